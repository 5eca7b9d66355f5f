"""Mean and covariance of stored rows against f64."""

from dataclasses import replace

import numpy as np
import pytest

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention.rows import K
from sparsekv_cli.cpu.lfps.covariance import (
    BACK,
    BLOCK,
    RowSums,
    make_moments,
    mean_and_covariance,
    mean_and_covariance_ref,
)

SPEC = LayerSpec(layer=0, n_layer=1, n_head=6, n_head_kv=3, head_dim=72, value_dim=24, n_threads=2)


FIRST = 2  # rows ahead of those that are meant


def stored(n: int, kind: str) -> KVStore:
    """n rows behind FIRST others, of which each channel has a mean and a deviation of its own."""
    rng = np.random.default_rng(n)
    store = KVStore(replace(SPEC, cache_type_k=kind))
    k = rng.standard_normal((3, n + FIRST, 72)) * rng.uniform(0.1, 3, 72)
    k += 5 * rng.standard_normal(72)
    store.append(k.astype(np.float32), np.zeros((3, n + FIRST, 24), np.float32))
    return store


def moments_of(store: KVStore, *lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of the last of these numbers of rows, from calls with each of them."""
    moments = make_moments(3, 80, covariance=True)
    mean, covariance = np.empty((3, 80), np.float32), np.empty((3, 80, 80), np.float32)
    for n in lengths:
        mean[:] = covariance[:] = np.nan
        mean_and_covariance(store.layout, K, FIRST, n, moments, mean, covariance, 2)
    return mean, covariance


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("n", [1, 5, 256, 703, 20000])
def test_moments(n, kind):
    store = stored(n, kind)
    expected_mean, expected = mean_and_covariance_ref(
        store.keys()[:, FIRST:].astype(np.float32)
    )  # (3, 80), (3, 80, 80)
    mean, covariance = moments_of(store, n)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(covariance, expected, rtol=2e-5, atol=1e-4)
    assert not covariance[:, 72:].any() and not covariance[:, :, 72:].any()

    alone, none = np.empty_like(mean), np.empty((3, 0, 0), np.float32)
    moments = make_moments(3, 80, covariance=False)
    mean_and_covariance(store.layout, K, FIRST, n, moments, alone, none, 1)
    np.testing.assert_array_equal(alone, mean)


@pytest.mark.parametrize("lengths", [(5, 1300), (BLOCK, 1300), (3, 300, 301, 1299, 1300)])
def test_what_is_added_to_earlier_sums_is_what_one_call_gives(lengths):
    store = stored(1300, "f16")
    for result, expected in zip(moments_of(store, *lengths), moments_of(store, 1300), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_rows_of_whole_blocks_are_not_read_again():
    store = stored(600, "f16")
    moments = make_moments(3, 80, covariance=True)
    mean, covariance = np.empty((3, 80), np.float32), np.empty((3, 80, 80), np.float32)
    results = []
    for _ in range(2):
        mean_and_covariance(store.layout, K, FIRST, 600, moments, mean, covariance, 1)
        results.append((mean.copy(), covariance.copy()))
        store.k[:, FIRST : FIRST + 2 * BLOCK] = np.nan
    assert moments.n[0] == 2 * BLOCK
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_rewind_by_a_question_reads_only_the_last_rows():
    n = 2 * BLOCK + BACK + 100
    store = stored(n, "f16")
    means = np.empty((3, 80), np.float32), np.empty((3, 32), np.float32)
    results = []
    for is_rewound in (False, True):
        sums = RowSums(3, 80, 32, covariance=True)
        covariance = np.empty((3, 80, 80), np.float32)
        if is_rewound:
            sums.extend(store.layout, n, means, covariance, 1)
            sums.truncate(n - BACK // 2)
            store.k[:, :BLOCK] = store.v[:, :BLOCK] = np.nan
        sums.extend(store.layout, n - 50, means, covariance, 1)
        results.append((*(each.copy() for each in means), covariance))
    for fresh, rewound in zip(*results, strict=True):
        assert np.isfinite(rewound).all()
        np.testing.assert_array_equal(fresh, rewound)
