"""Compiling the CPU kernels ahead of their first use, with a word about it.

numba compiles a kernel when it is first called and keeps it on disk. A marker beside that cache
tells whether the kernels that a session needs are there, so that a first run can say what takes so
long and every other run starts at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv_cli.cache import Budget, Method

if TYPE_CHECKING:
    from sparsekv_cli.models.weights import Weights
    from sparsekv_cli.session import Session

Report = Callable[[str, int, int], None]  # what is compiled now, steps done, steps in all
N_PROMPT = 48  # rows of the trial sequence: more than any method keeps at its smallest budget


def _marker(name: str) -> Path | None:
    """Where it is noted that the kernels ``name`` are compiled for this CPU; None: nowhere."""
    import numba
    from llvmlite import binding

    folder = os.environ.get("NUMBA_CACHE_DIR")
    if folder is None:
        return None
    return Path(folder) / f"warm-{name}-{numba.__version__}-{binding.get_host_cpu_name()}"


def compile_weight_kernels(weights: Weights, target: int, report: Report | None) -> None:
    """Compiles the dot product and the dequantisation of every weight format of a model."""
    from sparsekv_cli.cpu import matvec
    from sparsekv_cli.cpu.blocks import FORMAT_OF_CODE

    linears = [linear for layer in weights.layers for linear in layer.linears()]
    codes = sorted({linear.code for linear in [*linears, weights.output, weights.token_embd]})

    def steps() -> Iterator[tuple[str, Callable[[], object]]]:
        for code in codes:
            format_ = FORMAT_OF_CODE[code]
            for to in {target, matvec.TO_F32}:
                yield format_.name, partial(matvec.dequantize_address, code, to)
            for integer in {False, format_.decode is not None}:
                yield format_.name, partial(matvec.kernel_address, code, integer)

    names = "-".join(str(code) for code in codes)
    _run(f"weights-{names}-{target}", list(steps()), report)


def compile_method_kernels(session: Session, report: Report | None) -> None:
    """Compiles what a prefill and a decode step with the session's method call, by a trial run."""
    from sparsekv_cli.cpu import ops

    method = _smallest_budget(session.method)
    caches = [method.layer(spec, ops) for spec in session.decoder.layer_specs()]
    prompt = [token % session.hparams.n_vocab for token in range(N_PROMPT)]
    steps: list[tuple[str, Callable[[], object]]] = [
        ("prefill", lambda: session.decoder.forward(prompt, 0, caches)),
        ("decode", lambda: session.decoder.decode(0, N_PROMPT, caches)),
        ("decode", lambda: session.decoder.decode(0, N_PROMPT + 1, caches)),
    ]
    biased = session.decoder.weights.layers[0].q.bias is not None
    _run(f"method-{type(method).__name__}-{biased}", steps, report)


def _smallest_budget(method: Method) -> Method:
    """The method with a budget that leaves rows out even in a short trial."""
    if any(field.name == "budget" for field in fields(method)):
        return replace(method, budget=Budget(tokens=8))  # type: ignore[call-arg]
    return method


def _run(name: str, steps: list[tuple[str, Callable[[], object]]], report: Report | None) -> None:
    marker = _marker(name)
    if marker is not None and marker.exists():
        return
    for i, (what, step) in enumerate(steps):
        if report is not None:
            report(what, i, len(steps))
        step()
    if report is not None:
        report("done", len(steps), len(steps))
    if marker is not None:
        with contextlib.suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
