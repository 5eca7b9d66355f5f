"""Compiles ahead what scripts/gpu/bench launches, for a GPU that need not be there.

    python -P scripts/gpu/gpu_compile.py CACHE [--processes N] [--forbid] [--sm 90] [--only PART]
        [--used FILE]

The parts of the bench run on the CPU, where each launch of Triton is compiled and left undone. So
what is compiled is what the engine launches, with its types, alignments and options. CACHE is
Triton's cache folder. --forbid: nothing may be compiled: every launch must find its kernel there.
--used: a JSON file gets the names of the folders in CACHE whose kernels were launched.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

N_LAYER = 4  # of the shapes: dense layers and others


class AbsentGpu:
    """As much of Triton's driver as a warm-up asks for; the device's number is its capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class Compiled:
    """Replaces Triton's launches by compilations; counts them."""

    def __init__(self, capability: int, forbid: bool) -> None:
        import torch
        import triton
        from triton.runtime.driver import driver

        self.n_compiled = self.n_found = 0
        self.missing: list[str] = []
        self.used: set[str] = set()  # folders in Triton's cache
        driver.set_active(AbsentGpu(capability))  # type: ignore[arg-type]
        launch = triton.runtime.JITFunction.run

        def warm_up(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
            launch(kernel, *args, warmup=True, **kwargs)

        def listen(*, src: Any, metadata_group: Any, cache_hit: bool, **_: Any) -> None:
            self.n_found += cache_hit
            self.n_compiled += not cache_hit
            self.used.update(Path(path).parent.name for path in metadata_group.values())
            if forbid and not cache_hit:
                self.missing.append(src.name)

        # No launch writes. A prefill refuses the memory's old content if it is no number.
        torch.empty, torch.empty_like = torch.zeros, torch.zeros_like
        triton.runtime.JITFunction.run = warm_up
        triton.knobs.compilation.listener = listen


def tasks() -> Iterator[tuple[str, Callable[[], None]]]:
    """What the bench measures, by name; each is done in a process of its own."""
    from gpu_parts import DEPTHS

    for name, n_batch in dict.fromkeys((name, n_batch) for name, _, n_batch in DEPTHS):
        depths = [n for other, n, b in DEPTHS if (other, b) == (name, n_batch)]
        yield f"tokens {name} B={n_batch}", partial(steps, name, n_batch, depths)
    from gpu_host import METHODS, SIZES

    for n_batch in dict.fromkeys(n_batch for _, n_batch in SIZES):
        depths = [n for n, b in SIZES if b == n_batch]
        for spec, kv in METHODS:
            do = partial(host_steps, spec, kv, n_batch, depths)
            yield f"host {spec} {kv} B={n_batch}", do
    yield "operators", operators
    yield "weights", products
    yield "clock", times


def blank(*shape: int, device: Any, generator: Any = None) -> Any:
    """Zeros in the place of random rows: they cost no time."""
    import torch

    return torch.zeros(*shape, device=device)


def open_blank(name: str, kv: str) -> tuple[Any, Any]:
    """An engine whose weights have the shapes of ``name``, and a Bench."""
    import gpu_models
    import gpu_rows
    import torch
    from gpu_parts import Bench

    from sparsekv_cli.device import weights
    from sparsekv_cli.kernels.weights import packed

    def repack(name: str, data: torch.Tensor, n_columns: int) -> packed.PackedMatrix:
        few = packed.repack(name, data[:1], n_columns)
        planes = {
            field: torch.empty(len(data), plane.shape[1], dtype=plane.dtype)
            for field, plane in vars(few).items() if isinstance(plane, torch.Tensor)
        }  # fmt: skip
        return replace(few, n_rows=len(data), **planes)

    weights.repack = repack
    gpu_rows.FILL = blank
    device = torch.device("cpu")
    engine = gpu_models.open_engine(gpu_models.random_model(name, N_LAYER), device, 1, kv)
    return engine, Bench(device, False, None)


def steps(name: str, n_batch: int, depths: Sequence[int]) -> None:
    """Three steps of every method at each of the depths, and a short prefill."""
    from gpu_decoding import BACKENDS, Decoding
    from gpu_parts import OVER_THE_BUS, TOKENS_OF

    engine, bench = open_blank(name, "auto")
    caches = [engine.layer(bench.method("full"), s) for s in engine.decoder.layer_specs()]
    engine.decoder.forward(list(range(32)), 0, caches)
    for spec in TOKENS_OF:
        if spec in BACKENDS or (n_batch > 1 and spec in OVER_THE_BUS):
            continue
        for n in depths:
            if n > 32768 and spec in OVER_THE_BUS:
                continue
            decoding = Decoding(engine, bench.method(spec), n, 3, n_batch)
            for _ in range(3):
                decoding.step()


def host_steps(spec: str, kv: str, n_batch: int, depths: Sequence[int]) -> None:
    """Steps as the part ``host`` takes them. Those on the host launch the same at any depth."""
    from gpu_decoding import Decoding
    from gpu_rows import RepeatedRows

    engine, bench = open_blank("llama-3.1-8b", kv)
    rows = RepeatedRows(engine.device)
    for n in [2048] if kv == "host" else depths:
        decoding = Decoding(engine, bench.method(spec), n, 3, n_batch, rows)
        for _ in range(3):
            decoding.step()


def operators() -> None:
    import gpu_rows
    import torch
    from gpu_operators import SHAPES, OperatorInputs, cache_operators
    from gpu_parts import OPERATOR_BATCHES, OPERATOR_ROWS

    gpu_rows.FILL = blank
    torch.randn = torch.zeros  # type: ignore[assignment]
    device = torch.device("cpu")
    for n in OPERATOR_ROWS:
        for n_batch in OPERATOR_BATCHES:
            for shape in SHAPES:
                if n * n_batch * shape.n_head_kv > 8 * 8 * 32768:
                    continue  # specialised as those before it
                for operator in OperatorInputs(shape, n_batch, n, device).operators():
                    if "sdpa" not in operator.name:
                        operator.run()
                for operator in cache_operators(("sals", "freekv"), shape, n_batch, n, device):
                    operator.run()


def products() -> None:
    import torch
    from gpu_weights import BATCHES, FORMATS, PAIR, PAIR_SIZES, SIZES, random_matrix

    from sparsekv_cli.kernels.weights import dot

    for name in FORMATS:
        for _, n_rows, n_columns in SIZES:
            w = random_matrix(name, n_rows, n_columns, torch.device("cpu"))
            for n_batch in BATCHES:
                for joined in (False, True):
                    dot.multiply(w, torch.zeros(n_batch, n_columns), joined=joined)
    q, v = (
        random_matrix(name, n, 4096, torch.device("cpu"))
        for name, n in zip(PAIR, PAIR_SIZES, strict=True)
    )
    for n_batch in BATCHES:
        dot.multiply_pair(q, v, torch.zeros(n_batch, 4096))


def times() -> None:
    """What steps launch on streams, which the CPU has not."""
    import torch

    from sparsekv_cli.kernels import clock

    for stop in (False, True):
        clock.take_time(torch.zeros(clock.N_TIMES.value, dtype=torch.int64), stop=stop)


def do(name: str, capability: int, forbid: bool) -> dict[str, Any]:
    """Does the task of this name in a process of its own."""
    begin, compiled, error = time.monotonic(), Compiled(capability, forbid), ""
    import torch

    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    try:
        dict(tasks())[name]()
    except Exception:
        error = traceback.format_exc()
    return {"task": name, "compiled": compiled.n_compiled, "found": compiled.n_found,
            "missing": compiled.missing, "error": error, "used": compiled.used,
            "s": round(time.monotonic() - begin, 1)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--forbid", action="store_true", help="fail where something is missing")
    parser.add_argument("--sm", type=int, default=90, help="compute capability")
    parser.add_argument("--only", default="", help="tasks whose names have this in them")
    parser.add_argument("--used", type=Path, help="file for the names of used folders")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = str(options.cache.absolute())
    names = [name for name, _ in tasks() if options.only in name]
    work = partial(do, capability=options.sm, forbid=options.forbid)
    status, used = 0, set[str]()
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for told in pool.imap_unordered(work, names, chunksize=1):
            status |= bool(told["error"] or told["missing"])
            used |= told.pop("used")
            print(json.dumps(told), flush=True)
    if options.used:
        options.used.write_text(json.dumps(sorted(used)), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
