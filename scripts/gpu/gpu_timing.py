"""Timing of GPU work for scripts/gpu/bench: replays of captured graphs, medians, bandwidth."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
MIB = 1 << 20
FLUSHED = 256 * MIB  # bytes read ahead of a sample: several times what a device's cache holds
CYCLES_AHEAD = 300_000  # some 0.15 ms in which the host queues a sample's work behind the device


def time_calls(
    calls: Sequence[Call], device: torch.device, n_times: int = 20, restore: Call = lambda: None
) -> float:
    """The median milliseconds of a call. Each does the same on inputs of its own, taken in turn.

    On a GPU each is captured and its replays are timed by events. Ahead of each replay ``restore``
    puts back what the call before has changed, the device's cache is emptied, and the device is
    given something to do, so that nothing of a sample waits for the host.
    """
    if device.type != "cuda":  # interpreted: there to see that it runs
        calls[0]()
        restore()
        begin = time.perf_counter()
        calls[-1]()
        elapsed = 1e3 * (time.perf_counter() - begin)
        restore()
        return elapsed
    graphs = []
    for call in calls:
        call()
        restore()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    # The cache is emptied by reading: written lines would be written back during the sample.
    flushed = torch.ones(FLUSHED // 4, dtype=torch.int32, device=device)
    samples = []
    for i in range(n_times + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        restore()
        flushed.amax()
        torch.cuda._sleep(CYCLES_AHEAD)
        start.record()
        graphs[i % len(graphs)].replay()
        stop.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(stop))
    restore()
    return statistics.median(samples[3:])


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large copy within the device, bytes read and bytes written both counted."""
    n_bytes = (2048 if device.type == "cuda" else 4) * MIB
    source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * n_bytes / time_calls([lambda: target.copy_(source)], device) / 1e6


def link_bandwidth(device: torch.device) -> float:
    """GB/s from pinned memory of the host to the device by the copy engine."""
    n_bytes = (512 if device.type == "cuda" else 4) * MIB
    source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8)
    if device.type == "cuda":
        source = source.pin_memory()
    target = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    return n_bytes / time_calls([lambda: target.copy_(source, non_blocking=True)], device) / 1e6
