"""A page cache of random rows."""

import numpy as np

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.freekv.pages import N_STATISTICS, PageCache


def make_cache(
    n,
    n_kv_head=3,
    d=64,
    d_v=None,
    *,
    page=16,
    n_sink=1,
    window=32,
    n_slot=8,
    meanstd=True,
    groups=False,
    seed=0,
):
    """A page cache of n random rows, and the store that they come from, which keeps them."""
    spec = LayerSpec(
        layer=0, n_layer=1, n_head=n_kv_head, n_head_kv=n_kv_head, head_dim=d, value_dim=d_v or d,
        n_threads=1,
    )  # fmt: skip
    store, rng = KVStore(spec), np.random.default_rng(seed)
    k, v = (rng.standard_normal((n_kv_head, n, size)).astype(np.float32) for size in (d, d_v or d))
    store.append(k, v)
    cache = PageCache(
        store, np.zeros((n_kv_head, N_STATISTICS), np.int64), page=page, n_sink=n_sink,
        n_ring=-(-(window + page - 1) // page), n_slot=n_slot, meanstd=meanstd,
        window=max(n_sink, (n + 1 - window) // page), groups=groups,
    )  # fmt: skip
    return cache, store


def half(bits):
    return bits.view(np.float16).astype(np.float32)
