"""Runs tiny models of each kind of layer for ``scripts/arm``, with every method or METHODS.

``make FOLDER KIND...`` writes the models and their calibrations. ``record FOLDER FILE KIND...``
writes logits, ``compare FOLDER FILE COMMIT KIND...`` compares with them. ``compile`` runs on x86
and makes the kernels for ARM that a process under emulation asks for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRIPLE = "aarch64-unknown-linux-gnu"
LIMIT = 1e-3
N_PROMPT, N_TOKENS, N_KEPT = 300, 16, 8  # faedkv compresses no shorter prompts
_SMALL = {"n_layer": 2, "n_head": 2, "n_head_kv": 1, "n_ff": 256, "n_embd": 256}
# Arguments of make_model: attention and windows, softcaps, sinks and experts, recurrent layers,
# rows that layers share. Scores far above a softcap of 2 would tie, and rounding would choose rows.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"wtype": "Q4_K", **_SMALL, "n_head_kv": 2},
    "gemma2": {"wtype": "Q6_K", **_SMALL, "attention_gain": 0.5},
    "gpt-oss": {"wtype": "MXFP4", **_SMALL, "tied": False},
    "qwen35": {"wtype": "Q8_0", **_SMALL},
    "lfm2": {"wtype": "Q4_0", **_SMALL},
    "gemma4": {"wtype": "Q8_0", **_SMALL, "n_layer": 4},
}


def compile_for_arm() -> None:
    """Makes this process compile kernels for ARM wherever it would run them."""
    from llvmlite import binding

    found = {"sha2": False, "aes": False, "sve": False, "rand": False}
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    for module in (binding, binding.targets):
        module.get_process_triple = module.get_default_triple = lambda: TRIPLE
        module.get_host_cpu_name = lambda: "generic"
        module.get_host_cpu_features = lambda: binding.targets.FeatureMap(found)
    from sparsekv_cli.cpu.jit import features

    features.cpu_features = lambda: found | {"dotprod": True, "i8mm": True}
    from sparsekv_cli.cpu.jit.compiling import ahead, callees

    # A dispatcher that knows no machine code asks for it at each call.
    callees._numba_add_overload = lambda self, result: self.overloads.__setitem__(
        tuple(result.signature.args), result
    )
    compiled = callees.compiled

    def no_address(function: Any, signature: tuple[Any, ...]) -> Any:
        compiled(function, signature)
        return ahead._NoCode()

    callees.compiled = no_address
    from sparsekv_cli.cpu.jit.install import install

    install()  # which compiles the loop of the thread pool


def answer() -> None:
    """Compiles the kernels that standard input names. Ends a line when it is ready for the next."""
    compile_for_arm()
    with contextlib.suppress(EOFError):
        while True:
            print(flush=True)
            module, name, signature = pickle.load(sys.stdin.buffer)
            getattr(import_module(module), name).compile(signature)


def ask(python: str) -> None:
    """Makes this process, which is emulated, ask ``python`` on x86 for each kernel that is new."""
    from sparsekv_cli.cpu.jit.compiling import kernel_cache

    command, pipe = [python, __file__, "compile"], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": ""}
    x86: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
    x86.stdout.readline()

    def lock(self: Any, signature: Any, context: Any) -> Any:
        file, function = self.name(signature, context.codegen()), self._function
        if not self._store.has(file):
            pickle.dump((function.__module__, function.__name__, signature), x86.stdin)
            x86.stdin.flush()
            x86.stdout.readline()
        if not self._store.has(file):
            raise SystemExit(f"error: x86 did not compile {function.__name__} {signature}")
        return contextlib.nullcontext()

    kernel_cache.KernelCache.lock = lock  # type: ignore[method-assign]
    kernel_cache.is_marked = lambda name: True  # so that no trial looks for kernels


def generate(path: Path, method: str) -> Any:
    """Returns greedy tokens after a prompt with some of their logits, f32 (N_TOKENS, N_KEPT).

    Roundings to 8 bits would make a large difference of a small one; these are to 16 bits.
    """
    import numpy as np
    from opened import open_sequence

    from sparsekv_cli.methods import build_method
    from sparsekv_cli.settings.config import SessionConfig

    budget = None if method == "full" else "64"
    built = build_method(method, {}, budget=budget, dense_layers=None if budget is None else "none")
    config = SessionConfig(
        threads=1, prefill_dtype="f32", activations="16", repack="on", sparse_from=0, chunk=128
    )
    sequence = open_sequence(path, built, config)
    logits = sequence.prefill(np.random.RandomState(0).randint(3, 512, N_PROMPT).tolist())
    rows = []
    for _ in range(N_TOKENS):
        token = int(np.argmax(logits))
        rows.append([token, *logits[:: len(logits) // N_KEPT][: N_KEPT - 1]])
        logits = sequence.decode(token)
    sequence.model.close()
    return np.array(rows, np.float32)


def make(folder: str, *kinds: str) -> None:
    """Writes the model of each kind, and beside it the calibrations that methods need."""
    from tiny_models import make_model

    from sparsekv_cli.methods import calibrated_methods

    for kind in kinds:
        path = make_model(Path(folder) / f"{kind}.gguf", arch=kind, n_ctx=512, **KINDS[kind])
        for method in calibrated_methods():
            generate(path, method)  # which calibrates it


def record(folder: str, out: str, *kinds: str) -> None:
    """Writes the logits of each kind with each method; those of other kinds stay."""
    import numpy as np

    found = dict(np.load(out)) if Path(out).exists() else {}
    for name, logits in each_run(folder, kinds):
        found[name] = logits
        np.savez_compressed(out, **found)


def compare(folder: str, out: str, code: str, *kinds: str) -> bool:
    """Returns whether a run differs from those of ``out``. What ran with this code is kept."""
    if "X86" in os.environ:
        ask(os.environ["X86"])
    import numpy as np
    from numbers_of_runs import read_numbers, write_numbers

    from sparsekv_cli.methods import METHODS

    order = [f"{kind} {method}" for kind in KINDS for method in METHODS]
    runs = read_numbers("arm")
    done = [name for name, run in runs.items() if run["commit"] == code]
    with np.load(out) as expected:
        for name, logits in each_run(folder, kinds, without=done):
            if name not in expected:
                raise SystemExit(f"error: {out} has no {name}: run scripts/arm --record on x86")
            differs = float(f"{np.abs(logits - expected[name]).max():.1e}")
            runs[name] = {"differs": differs, "commit": code}
            write_numbers("arm", name, runs[name], order)
            print(f"{name}: differs by {differs}", flush=True)
    bad = [name for name, run in runs.items() if not run["differs"] <= LIMIT]
    print(f"{len(runs)} runs, {len(bad)} differ by more than {LIMIT}: {', '.join(bad) or 'none'}")
    return len(bad) > 0


def each_run(
    folder: str, kinds: Sequence[str], without: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields a kind with a method, and its logits."""
    from sparsekv_cli.methods import METHODS

    for method in os.environ.get("METHODS", "").split() or METHODS:
        for kind in kinds:
            if f"{kind} {method}" not in without:
                yield f"{kind} {method}", generate(Path(folder) / f"{kind}.gguf", method)


if __name__ == "__main__":
    folders = "fixtures/models", "fixtures/device", "scripts/fuzzing"
    sys.path[:0] = [str(ROOT / each) for each in folders]
    actions: Any = {"make": make, "record": record, "compare": compare, "compile": answer}
    sys.exit(actions[sys.argv[1]](*sys.argv[2:]))
