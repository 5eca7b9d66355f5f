"""The kernels' vector code for CPUs of ARM, made here: what it calls, and its inner loops."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from source_tree import FOLDERS, root

from sparsekv_cli.cpu.jit import features

TESTS = Path(__file__).parents[2]
# Files that name x86 intrinsics. tests/helpers/arm_assembly.py has a case for the code of each, or
# says that ARM does not ask for it.
NAME_X86 = {
    "attention/softmax_bf16.py", "jit/bf16.py", "jit/pool.py", "weights/block.py",
    "weights/blocks_grid.py", "weights/integer.py", "weights/vnni.py",
}  # fmt: skip
PRODUCTS = {"Q4_K 1", "Q4_K 1 repacked", "Q8_0 1", "Q4_K tile", "half byte scores"}
FLOATS = {"scores f16", "values f16"}  # rows of f16 are widened and multiplied as f32
PLAIN = {"Q4_K 1", "Q8_0 1", "byte scores", "half byte scores"}


@cache
def made_for(products: str) -> dict[str, Any]:
    command = [sys.executable, str(TESTS / "helpers" / "arm_assembly.py"), products]
    with TemporaryDirectory() as cache:  # no kernel of this process is for others
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_files_that_name_x86_intrinsics_are_those_that_are_tried() -> None:
    folder = root() / FOLDERS["cpu"]
    sources = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    named = {name for name, path in sources.items() if "llvm.x86" in path.read_text("utf-8")}
    assert named == NAME_X86


@pytest.mark.slow
@pytest.mark.parametrize("products", ["dotprod,i8mm", "none", "dotprod"])
def test_no_x86_intrinsic_is_reached(products: str) -> None:
    made = made_for(products)
    assert len(made["cases"]) > 100 and made["x86"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("products", ["dotprod,i8mm", "dotprod"])
def test_inner_loops_have_sdot_where_the_cpu_has_it(products: str) -> None:
    loops = {name: set(words) for name, words in made_for(products)["loops"].items()}
    for name in PRODUCTS:
        assert "sdot" in loops[name] and not loops[name] & {"smull", "smull2"}, name
    unsigned = "usdot" if "i8mm" in products else "sdot"
    assert unsigned in loops["byte scores"]
    assert all({"fcvtl", "fcvtl2", "fmla"} <= loops[name] for name in FLOATS)


def test_inner_loops_are_plain_neon_elsewhere() -> None:
    loops = {name: set(words) for name, words in made_for("none")["loops"].items()}
    assert loops.keys() == PLAIN | FLOATS
    assert all({"smull", "smull2"} <= loops[name] for name in PLAIN)
    assert not any(words & {"sdot", "usdot"} for words in loops.values())
    assert all({"fcvtl", "fcvtl2", "fmla"} <= loops[name] for name in FLOATS)


@pytest.mark.parametrize(
    ("name", "found"),
    [("apple-m1", (True, False)), ("apple-m2", (True, True)), ("generic", (False, False))],
)
def test_apple_names_imply_the_products(name, found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features.binding, "get_default_triple", lambda: "arm64-apple-darwin24")
    monkeypatch.setattr(features.binding, "get_host_cpu_name", lambda: name)
    monkeypatch.setattr(features.binding, "get_host_cpu_features", dict)
    monkeypatch.setattr(features.sys, "platform", "darwin")
    has = features.cpu_features.__wrapped__()
    assert (has.get("dotprod", False), has.get("i8mm", False)) == found
    assert features.architecture() == "aarch64"


@pytest.mark.parametrize("bits", [0, 1 << 20])
def test_linux_tells_the_products(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features.binding, "get_default_triple", lambda: "aarch64-unknown-linux-gnu")
    monkeypatch.setattr(features.binding, "get_host_cpu_features", dict)

    def getauxval(entry: ctypes.c_ulong) -> int:
        return bits if entry.value == 16 else 0

    monkeypatch.setattr(features.ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=getauxval))
    assert features.cpu_features.__wrapped__() == {"dotprod": bits > 0, "i8mm": False}
