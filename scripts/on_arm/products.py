"""Products of every weight format on ARM: ``products.py make|check FOLDER PRODUCTS``.

``make`` writes the code (LLVM IR, as tests/helpers/arm_assembly.py makes it), random weights and
what numpy makes of them. ``check`` runs the code on ARM and compares. It needs
numpy and llvmlite alone, so that emulation takes seconds. PRODUCTS: none, dotprod or dotprod,i8mm.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding

N = 512  # columns
LIMIT = 1e-5  # of the largest result, which is summed in f64
SKIP = 3  # arguments of the code that are literals


def make(folder: Path, products: str) -> None:
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / "fixtures" / "models")]
    from quantized_weights import random_rows

    from sparsekv_cli.cpu.weights import dot, integer, interleaved
    from sparsekv_cli.cpu.weights.formats import FORMATS

    folder.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {}
    for name, format_ in FORMATS.items():
        if format_.decode is None:
            continue
        w = data[f"{name} w"] = random_rows(name, interleaved.GROUP, N)
        x = np.random.RandomState(1).standard_normal(N).astype(np.float32)
        if format_.interleaves:
            data[f"{name} repacked"] = interleaved.repack_ref(format_.code, w)
        for planes in (1, 2):
            values, scales, sums = integer.quantize_ref(x, planes)
            low = values.astype(np.int8)
            high = ((values.astype(np.int32) - low) >> 8).astype(np.int8)
            bytes_ = np.concatenate([high, low] if planes == 2 else [low, high])
            rest = [scales, sums, sums.reshape(-1, 2).sum(1)]
            for kind, parts in (("bytes", bytes_), ("shorts", values)):
                given = [np.asarray(part, np.float32).view(np.uint8) for part in rest]
                data[f"{name} {kind} {planes}"] = np.concatenate([parts.view(np.uint8), *given])
            rounded = values * np.repeat(scales, integer.BLOCK)
            data[f"{name} out {planes}"] = dot.matvec_ref(format_.code, w, N, rounded)
    np.savez(folder / "data.npz", **data)
    helper = root / "tests" / "helpers" / "arm_assembly.py"
    command = [sys.executable, str(helper), products, str(folder / f"{products}.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def check(folder: Path, products: str) -> int:
    """Prints the largest difference of each format; returns how many are above LIMIT."""
    import json

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = ",".join(f"+{name}" for name in products.split(",") if name != "none")
    modules = json.loads((folder / f"{products}.json").read_text())
    n_bad = n_all = 0
    with np.load(folder / "data.npz") as data:
        for case, text in modules.items():
            name, planes, *repacked = *case.split(), ""
            if planes not in ("1", "2") or f"{name} w" not in data:
                continue
            target = binding.Target.from_default_triple()
            machine = target.create_target_machine(features=features, opt=2, jit=True)
            module = binding.parse_assembly(text)
            engine = binding.create_mcjit_compiler(module, machine)
            engine.finalize_object()
            kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * (SKIP + 6))
            kernel = kind(engine.get_function_address("kernel"))
            w = data[f"{name} {'repacked' if any(repacked) else 'w'}"]
            x = data[f"{name} {'shorts' if products == 'none' else 'bytes'} {planes}"]
            expected = data[f"{name} out {planes}"]
            out = np.zeros(len(w), np.float32)
            for row in range(0, len(w), len(w) if any(repacked) else 1):
                places = w[row:].ctypes.data, x.ctypes.data, 0, N, out[row:].ctypes.data, 0
                kernel(*[0] * SKIP, *places)
            error = float(np.abs(out - expected).max() / np.abs(expected).max())
            n_all += 1
            if not error <= LIMIT:
                n_bad += 1
                print(f"{case}: differs by {error:.2e} of the largest", flush=True)
    print(f"{products}: {n_all} products, {n_bad} differ by more than {LIMIT:.0e}")
    return n_bad


if __name__ == "__main__":
    action, folder, products = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    sys.exit(make(folder, products) if action == "make" else check(folder, products))
