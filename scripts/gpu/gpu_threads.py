"""Decode speed of the CPU by its number of threads, for scripts/gpu/first.

    python scripts/gpu/gpu_threads.py --json FILE [--seconds 120] [--tiny]

The model has the shape of Qwen2.5-1.5B with random weights in Q4_K_M, all layers at places of their
own. Its rows are random. Each number of threads has a process of its own, and the most telling
numbers come first. The first process also compiles the kernels.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

THREADS = (1, 4, 16, 2, 8)
METHODS = ("full", "lfps")
DEPTHS = (0, 8192)
STEPS = 24  # of a row of the table
SCRIPTS = Path(__file__).resolve().parents[1]


def random_file(folder: Path, tiny: bool) -> Path:
    """Writes the model."""
    path = folder / "model.gguf"
    if tiny:
        sys.path.insert(0, str(SCRIPTS.parent / "fixtures" / "models"))
        from tiny_models import make_model

        return make_model(path, n_ctx=512)
    command = [sys.executable, "-P", SCRIPTS / "random_model", "qwen2.5-1.5b", "q4_k_m", path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def rows_of(path: Path, n_threads: int, tiny: bool) -> Iterator[dict[str, Any]]:
    """Measures one number of threads: a row a method and depth."""
    import numpy as np

    sys.path.insert(0, str(SCRIPTS / "bench"))
    from laid_rows import sequence_at

    from sparsekv_cli.evaluation.compare import build_spec
    from sparsekv_cli.model import load_model
    from sparsekv_cli.settings.config import SessionConfig

    rng, n_steps = np.random.default_rng(0), 2 if tiny else STEPS
    depths = (0, 96) if tiny else DEPTHS
    for name in METHODS:
        method = build_spec(name, {"budget": "24"} if tiny else {})
        config = SessionConfig(threads=n_threads, ctx_size=depths[-1] + n_steps + 64, device="cpu")
        model = load_model(path, method, config)
        recorded = [
            [rng.standard_normal((n, 2048, spec.head_dim), np.float32)
             for n in (spec.n_head, spec.n_head_kv, spec.n_head_kv)]
            for spec in model.decoder.layer_specs()
        ]  # fmt: skip
        for depth in depths:
            if depth:
                sequence = sequence_at(model, method, recorded, depth, n_steps + 4)
            else:
                sequence = model.sequence()
                sequence.prefill([1])
            times = []
            for step in range(-3, n_steps):
                begin = time.perf_counter()
                sequence.decode(1)
                if step >= 0:
                    times.append(1e3 * (time.perf_counter() - begin))
            ms = statistics.median(times)
            yield {"threads": n_threads, "method": name, "depth": depth, "ms": ms, "t/s": 1e3 / ms}
        model.close()


def measure(path: Path, seconds: float, tiny: bool, file: Path | None) -> bool:
    """Measures all numbers of threads, each in a process; whether nothing failed."""
    end, rows, errors = time.monotonic() + seconds, list[Any](), list[str]()
    for n_threads in THREADS[:2] if tiny else THREADS:
        left = end - time.monotonic()
        command = [sys.executable, "-P", __file__, "--one", str(n_threads), "--model", path]
        command += ["--tiny"] if tiny else []
        try:
            done = subprocess.run(
                list(map(str, command)), capture_output=True, text=True, check=False,
                timeout=max(0.1, left),
            )  # fmt: skip
            out, failed = done.stdout, done.stderr[-2000:] if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            out = (error.stdout or b"").decode()
            failed = "no time left"
        rows += [json.loads(line) for line in out.splitlines()]
        if failed:
            errors.append(f"{n_threads} threads: {failed}")
        for line in out.splitlines():
            print(line, flush=True)
        if file is not None:
            told = {"threads": rows, "errors": errors}
            file.write_text(json.dumps(told, indent=1), encoding="utf-8")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return not errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--model", type=Path, help="the model, with --one")
    parser.add_argument("--one", type=int, default=0, help="measure this number of threads here")
    options = parser.parse_args()
    if options.one:
        for row in rows_of(options.model, options.one, options.tiny):
            print(json.dumps(row), flush=True)
        return 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = random_file(Path(folder), options.tiny)
        left = options.seconds - (time.monotonic() - begin)
        return 0 if measure(path, left, options.tiny, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
