"""Mean and covariance of stored rows against f64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention.rows import K
from sparsekv_cli.cpu.lfps.covariance import mean_and_covariance, mean_and_covariance_ref

SPEC = LayerSpec(layer=0, n_layer=1, n_head=6, n_head_kv=3, head_dim=72, value_dim=24, n_threads=2)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("n", [1, 5, 256, 703, 20000])
def test_moments(n, kind):
    rng = np.random.default_rng(n)
    store = KVStore(replace(SPEC, cache_type_k=kind))
    k = rng.standard_normal((3, n + 2, 72)) * rng.uniform(0.1, 3, 72) + 5 * rng.standard_normal(72)
    store.append(k.astype(np.float32), np.zeros((3, n + 2, 24), np.float32))
    expected_mean, expected = mean_and_covariance_ref(
        store.keys(2).astype(np.float32)
    )  # (3, 80), (3, 80, 80)
    mean, covariance = np.empty((3, 80), np.float32), np.empty((3, 80, 80), np.float32)
    mean[:] = covariance[:] = np.nan
    mean_and_covariance(store.layout, K, 2, n, mean, covariance, 2)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(covariance, expected, rtol=2e-5, atol=1e-4)
    assert not covariance[:, 72:].any() and not covariance[:, :, 72:].any()

    alone = np.empty_like(mean)
    mean_and_covariance(store.layout, K, 2, n, alone, np.empty((3, 0, 0), np.float32), 1)
    np.testing.assert_array_equal(alone, mean)
