"""Runs tiny models of each kind of layer for ``scripts/arm``, with every method or METHODS.

``record FILE KIND...`` writes logits, ``compare FILE COMMIT KIND...`` compares with them.
``compile KIND...`` computes nothing. Every kernel that the run would call is compiled for ARM and
kept, by LLVM on x86. A process under emulation then finds it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
TRIPLE = "aarch64-unknown-linux-gnu"
LIMIT = 1e-3
N_PROMPT, N_TOKENS, N_KEPT = 300, 16, 8  # faedkv compresses no shorter prompts
_SMALL = {"n_layer": 2, "n_head": 2, "n_head_kv": 1, "n_ff": 256, "n_embd": 256}
# Arguments of make_model: attention and windows, softcaps, sinks and experts, recurrent layers,
# rows that layers share.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"wtype": "Q4_K", **_SMALL, "n_head_kv": 2},
    "gemma2": {"wtype": "Q6_K", **_SMALL},
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
    from numba.core import dispatcher, types

    from sparsekv_cli.cpu.jit import ahead, compiling
    from sparsekv_cli.cpu.jit.kernel_cache import KernelCache

    # A dispatcher that knows no machine code asks for it at each call.
    compiling._numba_add_overload = lambda self, result: self.overloads.__setitem__(
        tuple(result.signature.args), result
    )
    call, kind = dispatcher.Dispatcher._compile_for_args, dispatcher.Dispatcher

    def compile_only(self: Any, *args: Any, **keywords: Any) -> Any:
        if not isinstance(self._cache, KernelCache):
            return call(self, *args, **keywords)
        omitted = dispatcher.OmittedArg
        given = (
            types.Omitted(a.value) if isinstance(a, omitted) else self.typeof_pyval(a) for a in args
        )
        self.compile(tuple(given))
        return self.py_func if ahead._returns_value(self.py_func) else lambda *_, **__: None

    compiled = compiling.compiled

    def no_address(function: Any, signature: tuple[Any, ...]) -> Any:
        compiled(function, signature)
        return ahead._NoCode()

    kind._compile_for_args, compiling.compiled = compile_only, no_address
    ahead.can_compile_ahead = lambda: False


def generate(path: Path, method: str) -> Any:
    """Logits f32 (N_TOKENS, N_KEPT) of greedy tokens after a prompt; the first column is the token.

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
    sequence.model.gguf.close()
    return np.array(rows, np.float32)


def record(out: Path, kinds: list[str]) -> None:
    """Writes the logits of each kind with each method; those of other kinds stay."""
    import numpy as np

    found = dict(np.load(out)) if out.exists() else {}
    for name, logits in each_run(kinds):
        found[name] = logits
        np.savez_compressed(out, **found)


def compare(out: Path, code: str, kinds: list[str]) -> int:
    """Returns how many runs differ from those of ``out``. What ran with this code is kept."""
    import numpy as np
    from numbers_of_runs import read_numbers, write_numbers

    from sparsekv_cli.methods import METHODS

    order = [f"{kind} {method}" for kind in KINDS for method in METHODS]
    known = read_numbers("arm")
    done = {name for name in order if known.get(name, {}).get("commit") == code}
    with np.load(out) as expected:
        for name, logits in each_run(kinds, without=done):
            if name not in expected:
                raise SystemExit(f"error: {out} has no {name}: run scripts/arm --record on x86")
            differs = float(f"{np.abs(logits - expected[name]).max():.1e}")
            write_numbers("arm", name, {"differs": differs, "commit": code}, order)
            print(f"{name}: differs by {differs}", flush=True)
    known = read_numbers("arm")
    ran = [name for name in order if name in known and name.split()[0] in kinds]
    bad = [name for name in ran if not known[name]["differs"] <= LIMIT]
    print(f"{len(ran)} runs, {len(bad)} differ by more than {LIMIT}: {', '.join(bad) or 'none'}")
    return len(bad)


def each_run(
    kinds: list[str], failures: Any = None, without: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields a kind with a method, and its logits."""
    from tiny_models import make_model

    from sparsekv_cli.methods import METHODS

    with TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder) / f"{kind}.gguf"
            make_model(path, arch=kind, n_ctx=512, **KINDS[kind])
            for method in os.environ.get("METHODS", "").split() or METHODS:
                if f"{kind} {method}" in without:
                    continue
                logits = None
                with failures or contextlib.nullcontext():
                    logits = generate(path, method)
                yield f"{kind} {method}", logits


def main(action: str, *arguments: str) -> int:
    folders = "fixtures/models", "fixtures/device", "scripts/fuzzing"
    sys.path[:0] = [str(ROOT / each) for each in folders]
    if action == "compare":
        return compare(Path(arguments[0]), arguments[1], list(arguments[2:])) > 0
    if action == "record":
        record(Path(arguments[0]), list(arguments[1:]))
        return 0
    compile_for_arm()
    for name, _ in each_run(list(arguments), contextlib.suppress(Exception)):  # it meets garbage
        print(f"{name}: compiled", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
