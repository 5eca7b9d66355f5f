"""What ``scripts/arm`` runs: tiny models of each kind of layer, with every method.

With CROSS in the environment nothing is computed. Every kernel that the run would call is compiled
for ARM and kept, by LLVM on this machine. A process under emulation then finds it in its cache.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TRIPLE = "aarch64-unknown-linux-gnu"
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
    from sparsekv_cli.cpu import features

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

    Integer products round alike on every CPU, so that machines can be compared.
    """
    import numpy as np
    from opened import open_sequence

    from sparsekv_cli.methods import build_method
    from sparsekv_cli.settings.config import SessionConfig

    budget = None if method == "full" else "64"
    built = build_method(method, {}, budget=budget, dense_layers=None if budget is None else "none")
    config = SessionConfig(
        threads=1, prefill_dtype="int8", activations="16", repack="on", sparse_from=0, chunk=128
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


def main(out: str, kinds: list[str]) -> None:
    """Writes the logits of each kind with each method to the file ``out`` after each."""
    crosses = bool(os.environ.get("CROSS"))
    if crosses:
        compile_for_arm()
    import numpy as np
    from tiny_models import make_model

    from sparsekv_cli.methods import METHODS

    Path(out).parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for kind in kinds or KINDS:
        path = Path(out).with_name(f"{kind}.gguf")
        make_model(path, arch=kind, n_ctx=512, **KINDS[kind])
        for method in METHODS:
            failures = contextlib.suppress(Exception) if crosses else contextlib.nullcontext()
            with failures:  # of Python code that meets garbage
                found[f"{kind} {method}"] = generate(path, method)
            print(f"{kind} {method}: {'compiled' if crosses else 'run'}", flush=True)
            if not crosses:
                np.savez_compressed(out, **found)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "fixtures" / each) for each in ("models", "device")]
    main(sys.argv[1], sys.argv[2:])
