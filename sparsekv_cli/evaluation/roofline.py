"""The roofline of decoding: a step cannot be faster than the memory reads that it needs.

A token reads every weight once and the KV rows that its method touches. Only the chosen experts are
read. The ledger counts the rows. Bandwidth divided by these bytes bounds the tokens a second. The
bandwidth is measured in the same run with the same threads. Weights that fit a cache of the CPU can
be read faster than this bound. How many different experts several sequences choose is an
expectation (models/weights.py).
"""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROBE_BYTES = 256 << 20  # more than fits the caches of a CPU
PROBE_SECONDS = 0.5  # seconds of passes, at least; there are also PROBE_PASSES passes at least
PROBE_PASSES = 5


@dataclass(frozen=True)
class Roofline:
    """The bound of one test. weight_bytes, kv_bytes: a token's. bandwidth: bytes a second."""

    weight_bytes: int
    kv_bytes: int
    bandwidth: float

    @property
    def n_bytes(self) -> int:
        """Bytes that one token must read."""
        return self.weight_bytes + self.kv_bytes

    @property
    def bound_ts(self) -> float:
        """Tokens a second that the bandwidth allows."""
        return self.bandwidth / max(self.n_bytes, 1)

    def fraction(self, rate: float) -> float:
        """Returns ``rate``, in tokens a second, as a share of the bound."""
        return rate / self.bound_ts

    def line(self, what: str, rate: float) -> str:
        """Returns: ``roofline tg128 @ d8192 full: 98 MB weights + 189 MB KV a token, ..``."""
        return (
            f"roofline {what}: {_megabytes(self.weight_bytes)} weights + "
            f"{_megabytes(self.kv_bytes)} KV a token, {self.bandwidth / 1e9:.1f} GB/s measured, "
            f"bound {self.bound_ts:.0f} t/s, reached {100 * self.fraction(rate):.0f}%"
        )


def decode_roofline(
    weight_bytes: int, ledger: Mapping[str, Any], n_tokens: int, bandwidth: float
) -> Roofline:
    """Returns the roofline of ``n_tokens`` decode steps.

    weight_bytes: bytes of weights that a token reads. ledger: its ``bytes_read`` is what all steps
    together read of K, V and index.
    """
    kv_bytes = round(int(ledger.get("bytes_read", 0)) / max(n_tokens, 1))
    return Roofline(weight_bytes, kv_bytes, bandwidth)


def measure_bandwidth(n_threads: int, n_bytes: int = PROBE_BYTES) -> float:
    """Returns the bytes a second that ``n_threads`` threads read, the best of several passes.

    numba's number of threads must be set before, as load_model does it.
    """
    import numpy as np

    from sparsekv_cli.cpu.bandwidth import sum_parts

    data = np.ones(n_bytes // 4, np.float32)
    sum_parts(data, n_threads)  # compiles
    best = float("inf")
    begin = time.perf_counter()
    passes = 0
    while passes < PROBE_PASSES or time.perf_counter() - begin < PROBE_SECONDS:
        start = time.perf_counter()
        sum_parts(data, n_threads)
        best = min(best, time.perf_counter() - start)
        passes += 1
    return data.nbytes / best


def _megabytes(n_bytes: int) -> str:
    """Returns decimal megabytes as text: ``98 MB``, and below 10 with a decimal: ``9.8 MB``."""
    size = n_bytes / 1e6
    return f"{size:.1f} MB" if 0 < size < 10 else f"{size:.0f} MB"


def cpu_name() -> str:
    """Returns the processor's name as the system reports it."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model", "cpu model") and value.strip():
                    return value.strip()
    return platform.processor() or platform.machine()
