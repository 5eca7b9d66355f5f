"""What requests may take of the memory: set aside before a prefill, given back with the answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.store import CACHE_TYPES, RowType
from sparsekv_cli.sequence import Attention
from sparsekv_cli.session import N_HEADROOM

MEMINFO = Path("/proc/meminfo")  # Linux: what is free
FALLBACK = 4 << 30  # bytes for rows where the system does not tell
GROWTH = 9 / 8  # of a cache's memory over its rows, at most (KVStore.reserve)


def default_limit() -> int:
    """Half of the memory that is available."""
    if not MEMINFO.exists():
        return FALLBACK
    for line in MEMINFO.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // 2
    return FALLBACK


def sequence_bytes(attention: Attention, n: int) -> int:
    """Bytes that the rows of n tokens take, in all layers."""
    method, total = attention.method, 0
    n = int((n + N_HEADROOM) * GROWTH)
    for spec in attention.specs:
        k = RowType(CACHE_TYPES[method.cache_type_k], spec.head_dim)
        v = RowType(CACHE_TYPES[method.cache_type_v], spec.value_dim)
        row = sum(each.n_items * np.dtype(each.dtype).itemsize for each in (k, v))
        total += spec.n_head_kv * row * (min(n, spec.window) if spec.window else n)
    return total


def held_bytes(caches: Iterable[LayerCache]) -> int:
    """Bytes that caches take, indexes included."""
    return sum(m.host + m.device + m.index for m in (cache.memory() for cache in caches))
