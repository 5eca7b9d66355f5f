"""Every Triton kernel compiles for sm_90, without spills, within 99 KB of shared memory a block.

No GPU is needed. The launches are listed in launches.py, a function a module of kernels/. With
``--all`` every launch compiles, and for sm_80 too; else the first launch of each kernel.
"""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

HERE = Path(__file__).parent
LARGEST_SHARED = 99 * 1024  # a block's on sm_86 and sm_89, which run sm_80's code
REGISTERS = 65536  # of a multiprocessor


def kernels_folder() -> Path:
    spec = importlib.util.find_spec("sparsekv_cli.kernels")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def kernels_of(path: Path) -> set[str]:
    """Names of the kernels that a module launches: its @triton.jit functions _NAME_kernel."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


KERNELS = {
    "_".join(path.relative_to(kernels_folder()).with_suffix("").parts): found
    for path in kernels_folder().rglob("*.py")
    if (found := kernels_of(path))
}


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What compile_launches.py tells of the modules that are tested, in two processes: torch and
    Triton take seconds to import, and Triton compiles in one thread.
    """
    tests = [item for item in request.session.items if item.parent is request.node]
    parameters = [getattr(test, "callspec", None) for test in tests]
    modules = [each.params["module"] for each in parameters if each is not None]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": python_path()}
    first = [] if request.config.getoption("--all") else ["--first"]
    program = [sys.executable, str(HERE / "compile_launches.py"), *first]
    halves = [
        subprocess.Popen([*program, *half], stdout=PIPE, stderr=PIPE, text=True, env=environment)
        for half in ([*modules[::2], "scalar_loads"], modules[1::2])
    ]
    told = [half.communicate() for half in halves]
    for half, (_, err) in zip(halves, told, strict=True):
        assert half.returncode == 0, err[-4000:]
    return [json.loads(line) for out, _ in told for line in out.splitlines()]


@pytest.mark.slow
@pytest.mark.unsampled
@pytest.mark.parametrize("module", sorted(KERNELS))
def test_kernels_compile_for_every_capability(module, compiled, pytestconfig):
    lines = [line for line in compiled if line["module"] == module]
    for line in lines:
        assert "error" not in line, line["error"][-4000:]
    for capability in (80, 90) if pytestconfig.getoption("--all") else (90,):
        kernels = {line["kernel"] for line in lines if line["capability"] == capability}
        assert kernels >= KERNELS[module], f"not launched: {KERNELS[module] - kernels}"
    for line in lines:
        assert line["stack"] == line["local"] == 0, f"spills: {line}"
        assert line["shared"] <= LARGEST_SHARED, line
        assert line["registers"] * 32 * line["warps"] <= REGISTERS, line


@pytest.mark.slow
def test_warps_wait_ahead_of_a_store_that_others_read(compiled):
    """Every warp reads how many pages have left before one changes that, and copies by it.

    The interpreter runs a program's threads as one, so that it cannot see it.
    """
    lines = [line for line in compiled if line["kernel"] == "_offload_pages_kernel"]
    assert lines and all(line["barriers"] for line in lines), lines


@pytest.mark.slow
def test_loads_of_single_elements_are_found(compiled):
    """One kernel of ``scalar_loads`` reads every other element, one all."""
    loads = {line["kernel"]: line["loads"] for line in compiled}
    assert loads["_every_other_kernel"].keys() == {"2"} and loads["_all_kernel"] == {"16": 1}


def python_path() -> str:
    """For the child: launches.py, what it imports, and what this process was given."""
    root = HERE.parents[1]
    shared = [root / "fixtures" / "models", root / "scripts" / "gpu"]
    folders = [str(folder) for folder in (HERE, HERE.parent / "helpers", *shared)]
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


def test_every_function_is_of_a_module_with_kernels():
    files = [HERE / "launches.py", HERE / "attention_launches.py"]
    named = {
        node.name
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "Launches"
    }
    assert named == {*KERNELS, "scalar_loads"}
