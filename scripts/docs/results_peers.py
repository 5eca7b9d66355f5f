"""Parts that run other programs beside this one: llama.cpp, and ik_llama.cpp where it is given."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from results_runner import ROOT, Runner

if TYPE_CHECKING:
    from results_parts import Rows, Sizes

PEERS = ("llama.cpp", "ik_llama.cpp")
# Shapes and types of random models, and what of each is held against peers.
LARGER = (
    "llama-3.2-1b q4_k_m --pp 512,4096 --depths 0,2048,8192 --methods full,lfps --pairs 3;"
    "llama-3.2-1b q8_0 --pp 512 --depths 0 --methods full --pairs 3;"
    "llama-3.1-8b q4_k_m --pp 512 --depths 0,2048 --methods full,lfps --pairs 3 --tokens 16;"
    "qwen3moe-4b q4_k_m --pp 512 --depths 0 --methods full --pairs 5"
)
TYPES = ";".join(
    f"llama-3.2-1b {name} --pp 512 --depths 0 --methods full --pairs 3"
    for name in ("q5_k_m", "q6_k", "q4_0", "iq4_xs", "mxfp4")
)


def peer(run: Runner, sizes: Sizes) -> Rows:
    return against_peers(run, sizes.model, sizes.peer.split())


def peer_larger(run: Runner, sizes: Sizes) -> Rows:
    return random_models(run, sizes.larger)


def peer_types(run: Runner, sizes: Sizes) -> Rows:
    return random_models(run, sizes.types)


def random_models(run: Runner, models: str) -> Rows:
    """Models as in LARGER, which are made once in build/models."""
    rows = []
    for each in filter(None, models.split(";")):
        shape, wtype, *arguments = each.split()
        path = ROOT / "build" / "models" / f"{shape}-{wtype}.gguf"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            made = path.with_suffix(".part")
            subprocess.run(
                [sys.executable, "scripts/random_model", shape, wtype, str(made)],
                cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            made.rename(path)
        model = str(path.relative_to(ROOT))
        run.commands.append(f"scripts/random_model {shape} {wtype} {model}")
        found = against_peers(run, model, arguments)
        rows += [{"model": f"{shape} {wtype.upper()}", **row} for row in found]
    return rows


def against_peers(run: Runner, model: str, arguments: Sequence[str]) -> Rows:
    ik = ["--ik", run.ik] if run.ik else []
    told = run.script("bench/peer", "-m", model, *arguments, *ik)
    if run.ik:
        run.commands[-1] = run.commands[-1].replace(shlex.quote(run.ik), "llama-bench")
    rows = []
    for row in told["rows"]:
        rows.append({"test": row["test"], "unit": row["unit"], "ratio": row["ratio"]})
        of_peers = {name: row["peers"][name] for name in PEERS if name in row["peers"]}
        for name, spread in {"sparsekv-cli": row["sparsekv_cli"], **of_peers}.items():
            rows[-1] |= {f"{name} {x}": spread[x] for x in ("median", "min", "max")}
        for name in of_peers:
            rows[-1][f"{name} version"] = told["programs"].get(name, {}).get("version", "")
    return rows
