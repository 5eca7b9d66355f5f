"""Decode steps of several sequences with random rows, and where their time goes by kernel."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from gpu_models import filled_caches
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv_cli.cache.counters import ledger_of
from sparsekv_cli.device.engine import DeviceEngine
from sparsekv_cli.device.methods import full
from sparsekv_cli.methods.base import Method
from sparsekv_cli.sampling.plain import PlainChain, PlainSampler

BACKENDS = {"torch sdpa": None, "cudnn sdpa": SDPBackend.CUDNN_ATTENTION}
GREEDY = PlainChain(True, 0, 1.0, 0.0, 1.0)


def greedy_sampler() -> PlainSampler:
    """Takes the most likely token, on the device."""
    return PlainSampler(lambda logits, _: int(logits.argmax()), GREEDY, lambda: 0.0)


@contextmanager
def attention_of(name: str) -> Iterator[None]:
    """Within this block dense layers attend by torch, if ``name`` is one of BACKENDS.

    All sequences must have as many rows. Attention is over the rows that the step is planned for,
    some of which are 0: there to be timed.
    """
    if name not in BACKENDS:
        yield
        return

    def attend(x: Any, k: Any, v: Any, n_max: int, scale: float, out: Any) -> Any:
        pos = x.step.pos[:1].long()
        k.index_copy_(2, pos, x.k[:, :, None].half())
        v.index_copy_(2, pos, x.v[:, :, None].half())
        backend = BACKENDS[name]
        with nullcontext() if backend is None else sdpa_kernel(backend):
            found = scaled_dot_product_attention(
                x.q[:, :, None].half(), k[:, :, :n_max], v[:, :, :n_max], scale=scale,
                enable_gqa=x.q.shape[1] != k.shape[1],
            )  # fmt: skip
        return found[:, :, 0].float() if out is None else out.copy_(found[:, :, 0])

    ours, full.attend_all = full.attend_all, attend
    try:
        yield
    finally:
        full.attend_all = ours


class Decoding:
    """B sequences of n random rows each, and room for n_more steps."""

    def __init__(
        self, engine: DeviceEngine, method: Method, n: int, n_more: int, n_batch: int,
        rows: Any = None, end: float = math.inf,
    ) -> None:  # fmt: skip
        """rows, end: see ``filled_caches``."""
        self.engine, self.n = engine, n
        self.caches = [filled_caches(engine, method, n, n_more, rows, end) for _ in range(n_batch)]
        self.tokens = [1] * n_batch
        self.samplers = [greedy_sampler() for _ in range(n_batch)]

    def step(self) -> None:
        """Decodes a token of each sequence; the next one is chosen as generation does it."""
        positions = [self.n] * len(self.tokens)
        found: Any = self.engine.decoder.choose_batch(
            self.samplers, self.tokens, positions, self.caches
        )
        # Random rows may give no number: then any token does.
        self.tokens = [token if isinstance(token, int) else 1 for token in found]
        self.n += 1

    def timed_step(self) -> float:
        """Seconds of a step."""
        begin = time.perf_counter()
        self.step()
        return time.perf_counter() - begin

    def ledger(self) -> dict[str, int]:
        """What the caches have counted, of all sequences."""
        total: dict[str, int] = defaultdict(int)
        for caches in self.caches:
            for name, value in ledger_of(caches).items():
                total[name] += value
        return total


def profile_rows(
    step: Callable[[], None], n_steps: int, ms: float, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A row a kernel of ``n_steps`` steps, the longest first. ms: a step without the profiler."""
    if device.type != "cuda":
        return
    times = _profiled(step, n_steps)
    busy = sum(map(sum, times.values())) / n_steps / 1e3
    n_launch = sum(map(len, times.values())) / n_steps
    row = {"kernel": "step", "launches": n_launch, "us each": 1e3 * ms,
           "ms a step": ms, "busy ms": busy}  # fmt: skip
    yield row
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:16]:
        yield {
            "kernel": name[:60], "launches": len(each) / n_steps, "us each": sum(each) / len(each),
            "ms a step": sum(each) / n_steps / 1e3, "busy ms": None,
        }  # fmt: skip


def device_times(
    step: Callable[[], None], n_steps: int, device: torch.device
) -> dict[str, float | None]:
    """Milliseconds of a step in kernels and in copies between host and device; None without a GPU.

    Times on two streams are added up.
    """
    if device.type != "cuda":
        for _ in range(n_steps):
            step()
        return {"kernels": None, "copies": None}
    times = _profiled(step, n_steps)
    copies = sum(sum(each) for name, each in times.items() if name.startswith("Mem"))
    everything = sum(map(sum, times.values()))
    return {
        "kernels": (everything - copies) / n_steps / 1e3, "copies": copies / n_steps / 1e3,
    }  # fmt: skip


def _profiled(step: Callable[[], None], n_steps: int) -> dict[str, list[float]]:
    """Microseconds of each launch and copy of some steps, by name."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(n_steps):
            step()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.device_time_total)
    return times
