"""Decode steps whose K and V lie on the host, and where the time of a step goes.

``full`` and ``lfps`` attend on the CPU. ``freekv`` and ``fasa`` with ``variant=m`` fetch rows that
they chose. ``quest`` and ``full`` with K and V on the GPU are the limit. Rows of 131072 and of
several sequences repeat one block. Pinned memory is shared by layers, because to pin more takes
longer than to measure.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from gpu_carry import ROWS
from gpu_decoding import Decoding, device_times
from gpu_report import Row, Task
from gpu_rows import RandomRows, RecordedRows, RepeatedRows, queries_of

from sparsekv_cli.device.decoder import DeviceDecoder
from sparsekv_cli.device.engine import DeviceEngine
from sparsekv_cli.device.graphs import Steps
from sparsekv_cli.device.methods import fasa as fasa_caches
from sparsekv_cli.device.methods import freekv_pages
from sparsekv_cli.device.step import StepBuffers
from sparsekv_cli.kernels.freekv import pages as page_cache

METHODS = (
    ("full", "host"), ("lfps", "host"), ("freekv", "auto"), ("fasa:variant=m", "auto"),
    ("quest", "auto"), ("full", "auto"),
)  # fmt: skip
SIZES = (8192, 1), (32768, 1), (131072, 1), (8192, 4), (32768, 4)  # rows, sequences
SIZES_TINY = (150, 1), (150, 2)
PINNED = 2 << 30  # bytes that layers share: several times what a processor's cache holds
SECONDS = 22.0  # of a row of the table, with the time to fill its caches
STEPPED = 2.5  # seconds of its steps


class Setting(NamedTuple):
    """A row of the table. kind: of its rows, ``random`` or ``recorded``."""

    spec: str
    kv: str
    n: int
    n_batch: int
    kind: str = "random"

    @property
    def name(self) -> str:
        return f"{self.spec} kv={self.kv} B={self.n_batch} {self.n} {self.kind}"


def settings(tiny: bool) -> Iterator[Setting]:
    """The settings, the most important ones first."""
    sizes = SIZES_TINY if tiny else SIZES
    for n, n_batch in sizes:
        for spec, kv in METHODS:
            yield Setting(spec, kv, n, n_batch)
        if (n, n_batch) == sizes[0 if tiny else 1]:
            for spec, kv in METHODS[1:4]:  # random rows are their worst case
                yield Setting(spec, kv, n, n_batch, "recorded")


class StepClock:
    """Seconds of steps: the host's attention and tables, and its waits for the device."""

    def __init__(self) -> None:
        self.host = self.waited = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts within this block."""
        parts = (
            (DeviceDecoder, "_attend_on_host", "host"), (DeviceDecoder, "_end_on_host", "host"),
            (Steps, "_synchronize", "waited"), (StepBuffers, "_wait", "waited"),
        )  # fmt: skip
        before = [getattr(owner, name) for owner, name, _ in parts]

        def timed(call: Callable[..., None], part: str) -> Callable[..., None]:
            def run(*args: Any) -> None:
                begin = time.perf_counter()
                call(*args)
                setattr(self, part, getattr(self, part) + time.perf_counter() - begin)

            return run

        for (owner, name, part), call in zip(parts, before, strict=True):
            setattr(owner, name, timed(call, part))
        try:
            yield
        finally:
            for (owner, name, _), call in zip(parts, before, strict=True):
                setattr(owner, name, call)


@contextmanager
def shared_pins(device: torch.device) -> Iterator[None]:
    """Within this block pinned memory is given out again after ``PINNED`` bytes."""
    modules = (page_cache, freekv_pages, fasa_caches)
    make, blocks, n_given = page_cache.zeros_on_host, [], [0]

    def given(shape: tuple[int, ...], _: torch.device) -> torch.Tensor:
        n = torch.Size(shape).numel()
        n_block = max(2, -(-PINNED // max(1, 2 * n)))
        if len(blocks) < n_block or blocks[n_given[0] % n_block].numel() < n:
            blocks.append(make((n,), device))
            return blocks[-1].view(shape)
        n_given[0] += 1
        return blocks[n_given[0] % n_block][:n].view(shape)

    for module in modules:
        module.zeros_on_host = given  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.zeros_on_host = make  # type: ignore[attr-defined]


class HostPart:
    """Part ``host`` of scripts/gpu/bench. engine_of: the engine for K and V on ``kv``."""

    def __init__(
        self,
        device: torch.device,
        tiny: bool,
        engine_of: Callable[[str], DeviceEngine],
        method_of: Callable[[str], Any],
    ) -> None:
        self.device, self.tiny = device, tiny
        self._engine_of, self._method_of = engine_of, method_of

    def tasks(self) -> Iterator[Task]:
        for each in settings(self.tiny):
            yield Task("host", each.name, partial(self._row, each))

    def _rows(self, kind: str) -> Any:
        if kind == "random":
            return RepeatedRows(self.device)
        if not self.tiny:
            return RecordedRows.load(self.device, ROWS)
        spec, made = self._engine_of("auto").decoder.layer_specs()[0], RandomRows(self.device)
        parts = (part.cpu().numpy() for part in made.piece(spec, 0, 64))
        return RecordedRows(self.device, dict(zip("qkv", parts, strict=True)))

    def _row(self, at: Setting) -> Iterator[Row]:
        """Steps of n_batch sequences, and where their time goes."""
        end = time.monotonic() + SECONDS
        n_first, most, n_profiled = (0, 1, 1) if self.tiny else (3, 16, 2)
        engine, rows = self._engine_of(at.kv), self._rows(at.kind)
        pins = shared_pins(self.device) if at.n * at.n_batch > 8192 else nullcontext()
        n_step = n_first + most + n_profiled
        with pins, queries_of(rows, engine.decoder, at.n, n_step):
            begin = time.monotonic()
            steps = Decoding(engine, self._method_of(at.spec), at.n, n_step, at.n_batch, rows, end)
            filled = time.monotonic() - begin
            for _ in range(n_first):
                steps.step()
            before, clock, times = steps.ledger(), StepClock(), []
            begin = time.monotonic()
            with clock.running():
                while len(times) < most and (len(times) < 2 or time.monotonic() < begin + STEPPED):
                    times.append(1e3 * steps.timed_step())
            after, n = steps.ledger(), len(times)
            on_device = device_times(steps.step, n_profiled, self.device)
            yield {
                "method": at.spec, "K and V": at.kv, "B": at.n_batch, "context": at.n,
                "rows": at.kind, "ms": statistics.median(times), "GPU": on_device["kernels"],
                "host": 1e3 * clock.host / n, "copies": on_device["copies"],
                "waiting": 1e3 * clock.waited / n,
                "MB moved": (after["bytes_moved"] - before.get("bytes_moved", 0)) / n / 1e6,
                "steps": n, "s to fill": filled,
            }  # fmt: skip
