"""A layer of FAEDKV and its twin on the same rows, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
from faedkv_twin import FAEDKVTwin, TwinOptions
from layer_stream import Geometry, Stream, decode

from sparsekv_cli.cache.spec import Budget, LayerSpec
from sparsekv_cli.calibration.allocation import budgets_of_levels
from sparsekv_cli.cpu.faedkv import frequencies
from sparsekv_cli.methods.faedkv import FAEDKV, FAEDKVCache

N_STEPS = 300
GEOMETRIES = [Geometry(4, 4, 64), Geometry(9, 3, 64), Geometry(8, 2, 80), Geometry(8, 1, 128)]
TOLERANCE = {"block": 2e-3, "additive": 2e-5}  # f16 and f32 rows
EVERY_BIN = Budget(share=0.99999)  # rounds to all bins; 100% transforms nothing


def importance(seed: int = 0) -> np.ndarray:
    """The mean's chunk first, the others anyhow."""
    order = np.random.default_rng(seed).permutation(frequencies.N_CHUNKS)
    return np.where(np.arange(frequencies.N_CHUNKS) == 0, 99, order).astype(np.float32)


def calibration(n_layer: int = 4) -> dict[str, np.ndarray]:
    """As ``calibrate`` makes it, (n_layer, ...): layer 2 wants to be whole most, then 0, 1, 3."""
    kld = np.outer([3.0, 2.0, 4.0, 1.0][:n_layer], [1.0, 0.99, 0.95, 0.8, 0.0])
    return {
        "imp_kld": np.stack([importance(i) for i in range(n_layer)]),
        "imp_ppl": np.stack([importance(10 + i) for i in range(n_layer)]),
        "layer_kld": kld.astype(np.float32),
        "layer_budget": budgets_of_levels(kld),
    }


def spec_of(geometry: Geometry, layer: int = 2, n_threads: int = 1) -> LayerSpec:
    g = geometry
    return LayerSpec(
        layer=layer, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
        n_threads=n_threads, calibration={k: v[layer] for k, v in calibration().items()},
    )  # fmt: skip


def make_cache(method: FAEDKV, geometry: Geometry, **spec: Any) -> FAEDKVCache:
    cache = method.layer(spec_of(geometry, **spec))
    assert isinstance(cache, FAEDKVCache)
    return cache


def uniform(share: float, update: str = "block", **options: Any) -> FAEDKV:
    budget = Budget(share=share)
    return FAEDKV(budget=budget, allocation="uniform", update=update, **options)


def make_twin(method: FAEDKV, geometry: Geometry) -> FAEDKVTwin:
    assert method.budget.share is not None
    options = TwinOptions(
        method.budget.share, method.update, method.block, method.sinks, method.recent
    )
    return FAEDKVTwin(options, importance(2), geometry.n_head, geometry.n_head_kv)


def follow(cache: FAEDKVCache, twin: FAEDKVTwin, stream: Stream, n_steps: int) -> set[int]:
    """Decodes n_steps tokens in both; the numbers of exact rows that occurred."""
    limit, seen = TOLERANCE[cache.method.update], set()
    for _ in range(n_steps):
        rows = stream.rows(1)
        out = decode(cache, rows)
        expected = twin.step(*(x[:, 0] for x in rows))
        np.testing.assert_allclose(out, expected, atol=limit)
        assert cache.n == twin.k.shape[1]
        assert cache.store.n == cache.n - twin.first_exact + cache.method.sinks
        seen.add(cache.store.n)
    return seen
