"""The causal bf16 attention of a prefill against numpy in f64."""

import numpy as np
import pytest

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.spec import NO_SINKS, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention import prefill_bf16 as kernels
from sparsekv_cli.cpu.attention.flash import ALL_ROWS, attend_causal_ref
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of

pytestmark = pytest.mark.skipif(not bf16.is_available(), reason="this CPU has no bf16 products")


def attend(q, k, v, scale, n_threads=2, window=ALL_ROWS, softcap=0.0, sinks=NO_SINKS):
    """bf16 arrays -> f32 (H, T, d_v), of keys and values in a store."""
    spec = LayerSpec(0, 1, q.shape[0], k.shape[0], q.shape[2], v.shape[2], n_threads)
    store = KVStore(spec)
    store.append(k, v)
    out = np.full((q.shape[1], q.shape[0], v.shape[2]), 0xFFFF, np.uint16)  # NaN
    ends = np.arange(store.n - q.shape[1] + 1, store.n + 1)
    kernels.attend_causal(
        q, store.layout, spec.n_head_kv, ends, scale, window, softcap, sinks, out, n_threads
    )
    return as_f32(out).swapaxes(0, 1)


def in_bf16(x) -> np.ndarray:
    return as_type_of(np.empty(0, np.uint16), np.asarray(x, np.float32))


def random(seed: int, *shape: int) -> np.ndarray:
    return in_bf16(np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize(
    ("n_head", "n_kv", "d", "d_v"),
    [(9, 3, 64, 64), (4, 4, 80, 80), (8, 1, 128, 128), (4, 2, 48, 24), (2, 1, 96, 96)],
)
@pytest.mark.parametrize(("n_new", "n"), [(1, 1), (5, 5), (63, 63), (97, 1000), (256, 257)])
def test_against_f64(n_head, n_kv, d, d_v, n_new, n):
    q, k, v = random(0, n_head, n_new, d), random(1, n_kv, n, d), random(2, n_kv, n, d_v)
    scale = 2 * d**-0.5
    ref = attend_causal_ref(*map(as_f32, (q, k, v)), scale)
    # weights and output have 8 bits of mantissa; an output is a mean of values of size 1
    error = attend(q, k, v, scale) - ref
    assert np.abs(error).max() < 0.02
    assert np.sqrt((error**2).mean() / (ref**2).mean()) < 4e-3


@pytest.mark.parametrize(("n_head", "n_kv", "d"), [(9, 3, 64), (4, 1, 80), (1, 1, 16)])
@pytest.mark.parametrize(("n_new", "n"), [(1, 1), (1, 300), (97, 1000), (700, 1200)])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [(ALL_ROWS, 2.0, False), (ALL_ROWS, 0.0, True), (64, 2.0, True), (1, 0.0, False)],
)
def test_windows_softcaps_and_sinks(n_head, n_kv, d, n_new, n, window, softcap, has_sinks):
    q, k, v = random(0, n_head, n_new, d), random(1, n_kv, n, d), random(2, n_kv, n, d)
    sinks = as_f32(random(3, n_head)) if has_sinks else NO_SINKS
    options = {"window": window, "softcap": softcap}
    of_ref = {**options, "sinks": sinks if has_sinks else None}
    ref = attend_causal_ref(*map(as_f32, (q, k, v)), 0.3, **of_ref)
    error = attend(q, k, v, 0.3, sinks=sinks, **options) - ref
    assert np.abs(error).max() < 0.03
    assert np.sqrt((error**2).mean() / (ref**2).mean()) < 5e-3


@pytest.mark.parametrize(("n", "scale"), [(512, 0.125), (512, 96**-0.5), (1200, 0.125)])
def test_rows_that_see_no_key_of_their_tiles_first_block(n, scale):
    """Their peak is still LOWEST. The old sum then counts 0 times, not infinitely often."""
    q, k, v = random(0, 4, 512, 64), random(1, 2, n, 64), random(2, 2, n, 64)
    ref = attend_causal_ref(*map(as_f32, (q, k, v)), scale, window=40)
    np.testing.assert_allclose(attend(q, k, v, scale, 1, 40), ref, atol=0.03)


def test_large_scores_and_a_late_peak():
    """A peak that moves from block to block, and weights far below it: no overflow, no NaN."""
    n, d = 1200, 64
    q = np.zeros((1, 7, d), np.uint16)
    q[..., 0] = in_bf16(8)
    k, v = np.zeros((1, n, d), np.uint16), random(3, 1, n, d)
    k[0, :, 0] = in_bf16(np.linspace(-100, 100, n))
    ref = attend_causal_ref(*map(as_f32, (q, k, v)), 1.0)
    np.testing.assert_allclose(attend(q, k, v, 1.0), ref, atol=0.02)


def test_threads_and_chunks_change_no_bit():
    """Blocks of keys end at 384 and 576. In another chunk other rows share a row's tile."""
    q, k, v = random(0, 6, 600, 64), random(1, 2, 600, 64), random(2, 2, 600, 64)
    whole = attend(q, k, v, 0.5, 1)
    for first, n in ((0, 600), (16, 576), (368, 385), (560, 600)):
        part = attend(q[:, first:n], k[:, :n], v[:, :n], 0.5)
        np.testing.assert_array_equal(part, whole[:, first:n])


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_heads_at_a_time_change_no_bit(cache_type):
    """With few threads a kv head by itself, with many of them all together."""
    n_kv, group, n, n_new, d = 3, 2, 300, 250, 48
    outs = []
    for n_threads in (1, 2, 64):
        spec = LayerSpec(
            0, 1, n_kv * group, n_kv, d, d, n_threads,
            cache_type_k=cache_type, cache_type_v=cache_type,
        )  # fmt: skip
        store = KVStore(spec)
        store.append(random(1, n_kv, n, d), random(2, n_kv, n, d))
        q = random(0, n_kv * group, n_new, d)
        outs.append(as_f32(attend_causal(q, store, spec)))
    rows = (x[..., :d] for x in (as_f32(q), store.keys(), store.values()))
    ref = attend_causal_ref(*rows, d**-0.5)
    np.testing.assert_allclose(outs[0], ref, atol=0.02)
    np.testing.assert_array_equal(outs[1:], outs[:1] * 2)


def test_no_row_sees_a_later_key():
    q, k, v = random(0, 3, 200, 64), random(1, 3, 500, 64), random(2, 3, 500, 64)
    before = attend(q, k, v, 0.2)
    k[:, 400:], v[:, 400:] = in_bf16(50), in_bf16(50)
    after = attend(q, k, v, 0.2)
    np.testing.assert_array_equal(before[:, :100], after[:, :100])
    assert not np.isclose(before[:, 100:], after[:, 100:]).all(axis=2).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_shows(bad):
    """A key that overflowed must not become a plausible weight."""
    q, k, v = random(0, 1, 100, 64), random(1, 1, 300, 64), random(2, 1, 300, 64)
    k[0, 250] = np.float32(bad).view(np.uint32) >> 16
    out = attend(q, k, v, 0.1)
    assert np.isfinite(out[:, :50]).all() and np.isnan(out[:, 50:]).all(axis=2).all()
