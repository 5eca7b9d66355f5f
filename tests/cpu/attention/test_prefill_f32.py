"""The causal f32 attention of a prefill, over rows as they are stored, against numpy in f64."""

import numpy as np
import pytest

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.spec import NO_SINKS, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention import prefill_f32 as kernels
from sparsekv_cli.cpu.attention.flash import ALL_ROWS, attend_causal_ref


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def stored(k: np.ndarray, v: np.ndarray, types: tuple[str, str] = ("f16", "f16")) -> KVStore:
    n_kv, _, d = k.shape
    k_type, v_type = types
    spec = LayerSpec(0, 1, n_kv, n_kv, d, v.shape[2], 1, cache_type_k=k_type, cache_type_v=v_type)
    store = KVStore(spec)
    store.append(k, v)
    return store


def attend(
    q: np.ndarray,
    store: KVStore,
    scale: float,
    n_threads: int = 2,
    window: int = ALL_ROWS,
    softcap: float = 0.0,
    sinks: np.ndarray = NO_SINKS,
) -> np.ndarray:
    """f32 (H, T, d_v)."""
    out = np.full((q.shape[1], q.shape[0], store.v_type.d), np.nan, np.float32)
    ends = np.arange(store.n - q.shape[1] + 1, store.n + 1)
    kernels.attend_causal(
        q, store.layout, store.k.shape[0], ends, np.float32(scale), window, np.float32(softcap),
        sinks, out, n_threads,
    )  # fmt: skip
    return out.swapaxes(0, 1)


def reference(q: np.ndarray, store: KVStore, scale: float) -> np.ndarray:
    k, v = store.keys()[..., : store.k_type.d], store.values()[..., : store.v_type.d]
    return attend_causal_ref(q, k, v, scale)


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")])
@pytest.mark.parametrize(
    ("n_head", "n_kv", "d", "d_v"),
    [
        (9, 3, 64, 64), (4, 4, 80, 80), (8, 1, 128, 128), (4, 2, 48, 24), (2, 1, 96, 96),
        (5, 1, 6, 7),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("n_new", "n"), [(1, 1), (5, 5), (63, 63), (97, 1000), (256, 257)])
def test_against_f64(n_head, n_kv, d, d_v, n_new, n, types):
    q = random(0, n_head, n_new, d)
    store = stored(random(1, n_kv, n, d), random(2, n_kv, n, d_v), types)
    scale = 2 * d**-0.5
    ref = reference(q, store, scale)
    error = attend(q, store, scale) - ref  # an output is a mean of values of size 1
    assert np.abs(error).max() < 1e-5
    assert np.sqrt((error**2).mean() / (ref**2).mean()) < 2e-6


@pytest.mark.parametrize(("n_head", "n_kv", "d"), [(9, 3, 64), (4, 1, 80), (1, 1, 16)])
@pytest.mark.parametrize(("n_new", "n"), [(1, 1), (1, 300), (97, 1000), (700, 1200)])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [(ALL_ROWS, 2.0, False), (ALL_ROWS, 0.0, True), (64, 2.0, True), (1, 0.0, False)],
)
def test_windows_softcaps_and_sinks(n_head, n_kv, d, n_new, n, window, softcap, has_sinks):
    q, store = random(0, n_head, n_new, d), stored(random(1, n_kv, n, d), random(2, n_kv, n, d))
    sinks = random(3, n_head) if has_sinks else NO_SINKS
    k, v = store.keys()[..., :d], store.values()[..., :d]
    options = {"window": window, "softcap": softcap}
    ref = attend_causal_ref(q, k, v, 0.3, sinks=sinks if has_sinks else None, **options)
    np.testing.assert_allclose(attend(q, store, 0.3, sinks=sinks, **options), ref, atol=2e-5)


def test_large_scores_and_a_late_peak():
    """A peak that moves from block to block, and weights far below it: no overflow, no NaN."""
    n, d = 1200, 64
    q = np.zeros((1, 7, d), np.float32)
    q[..., 0] = 8
    k = np.zeros((1, n, d), np.float32)
    k[0, :, 0] = np.linspace(-100, 100, n)
    store = stored(k, random(3, 1, n, d))
    np.testing.assert_allclose(attend(q, store, 1.0), reference(q, store, 1.0), atol=1e-4)


def test_small_weights_are_not_lost():
    """Many keys far below one peak: together they outweigh it."""
    n, d = 4000, 16
    q, k, v = (np.zeros((1, rows, d), np.float32) for rows in (1, n, n))
    q[..., 0], k[0, 5, 0], v[:], v[0, 5] = 1, 7, 1, -1
    out = attend(q, stored(k, v), 1.0)
    rest = (n - 1) * np.exp(-7.0)
    np.testing.assert_allclose(out, (rest - 1) / (rest + 1), rtol=1e-5)


def test_threads_and_chunks_change_no_bit():
    """Blocks of keys end at 384 and 576. In another chunk other rows share a row's tile."""
    q, k, v = random(0, 6, 600, 64), random(1, 2, 600, 64), random(2, 2, 600, 64)
    whole = attend(q, stored(k, v), 0.5, 1)
    for first, n, n_threads in ((0, 600, 2), (0, 600, 64), (16, 576, 2), (368, 385, 1)):
        part = attend(q[:, first:n], stored(k[:, :n], v[:, :n]), 0.5, n_threads)
        np.testing.assert_array_equal(part, whole[:, first:n])


def test_no_row_sees_a_later_key():
    q, k, v = random(0, 3, 200, 64), random(1, 3, 500, 64), random(2, 3, 500, 64)
    before = attend(q, stored(k, v), 0.2)
    k[:, 400:], v[:, 400:] = 50, 50
    after = attend(q, stored(k, v), 0.2)
    np.testing.assert_array_equal(before[:, :100], after[:, :100])
    assert not np.isclose(before[:, 100:], after[:, 100:]).all(axis=2).any()


def test_room_behind_the_rows_is_not_read():
    q, store = random(0, 2, 50, 64), stored(random(1, 2, 250, 64), random(2, 2, 250, 64))
    expected = attend(q, store, 0.1)
    store.reserve(400)
    store.k[:, 250:], store.v[:, 250:] = np.nan, np.nan
    np.testing.assert_array_equal(attend(q, store, 0.1), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_shows(bad):
    """A key that overflowed must not become a plausible weight."""
    q, k, v = random(0, 1, 100, 64), random(1, 1, 300, 64), random(2, 1, 300, 64)
    k[0, 250] = bad
    out = attend(q, stored(k, v), 0.1)
    assert np.isfinite(out[:, :50]).all() and np.isnan(out[:, 50:]).all(axis=2).all()


def test_f32_prefill():
    """What a layer calls: q in any layout, the output's rows by token."""
    n_head, n_new, d = 4, 30, 64
    spec = LayerSpec(0, 1, n_head, 2, d, d, 2)
    store = stored(random(1, 2, 90, d), random(2, 2, 90, d))
    q = random(0, n_new, n_head, d).swapaxes(0, 1)
    out = attend_causal(q, store, spec)
    assert out.dtype == np.float32 and out.swapaxes(0, 1).flags.c_contiguous
    np.testing.assert_allclose(out, reference(q, store, spec.scale), atol=1e-5)
