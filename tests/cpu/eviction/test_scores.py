"""Attention sums, pooling and the dropping of rows against numpy, on awkward sizes."""

import numpy as np
import pytest

from sparsekv_cli.cache.spec import NO_SINKS
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.attention.rows import layout_of
from sparsekv_cli.cpu.eviction import scores as evict

NO_CAP = np.float32(0)
GEOMETRIES = [(1, 1, 64), (9, 3, 64), (8, 2, 80), (8, 1, 128), (4, 4, 128), (5, 1, 24)]


def make(n_head, n_kv_head, d, n, n_position, seed=0):
    """q f32 (G, positions group, padded d) and f16 keys (G, n + 3, padded d), zero behind d."""
    rng = np.random.default_rng(seed)
    q = np.zeros((n_kv_head, n_position * n_head // n_kv_head, padded(d)), np.float32)
    q[..., :d] = 2 * rng.standard_normal((*q.shape[:2], d))
    k = np.zeros((n_kv_head, n + 3, padded(d)), np.float16)
    k[..., :d] = rng.standard_normal((n_kv_head, n + 3, d))
    return q, k


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize(
    ("n", "n_position"), [(1, 1), (2, 2), (63, 1), (64, 63), (65, 65), (257, 32), (700, 300)]
)
def test_add_attention(n_head, n_kv_head, d, n, n_position):
    group = n_head // n_kv_head
    q, k = make(n_head, n_kv_head, d, n, n_position)
    before = np.random.default_rng(1).random((n_kv_head, n + 5), np.float32)
    scale = np.float32(d**-0.5)
    softcap, sinks = NO_CAP, NO_SINKS
    if n % 2 == 0:
        softcap, sinks = np.float32(2), np.linspace(-3, 9, n_head, dtype=np.float32)
    results = []
    for n_threads in (1, 2):
        sums = before.copy()
        evict.add_attention(q, layout_of(k, k), n, group, scale, softcap, sinks, sums, n_threads)
        results.append(sums)
    expected = evict.add_attention_ref(q, k, n, group, scale, before, softcap, sinks)
    np.testing.assert_allclose(results[0][:, :n], expected, rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(results[0][:, n:], before[:, n:])
    np.testing.assert_array_equal(*results)
    added = (results[0] - before).sum(1)
    if not len(sinks):
        np.testing.assert_allclose(added, n_position * group, rtol=1e-4)


def test_attention_in_two_parts_is_that_of_all():
    q, k = make(6, 2, 64, 200, 200)
    at_once, in_parts = np.zeros((2, 200), np.float32), np.zeros((2, 200), np.float32)
    layout = layout_of(k, k)
    evict.add_attention(q, layout, 200, 3, np.float32(0.1), NO_CAP, NO_SINKS, at_once, 1)
    evict.add_attention(
        q[:, : 3 * 77].copy(), layout, 77, 3, np.float32(0.1), NO_CAP, NO_SINKS, in_parts, 1
    )
    evict.add_attention(
        q[:, 3 * 77 :].copy(), layout, 200, 3, np.float32(0.1), NO_CAP, NO_SINKS, in_parts, 1
    )
    np.testing.assert_allclose(at_once, in_parts, rtol=1e-5)


def test_attention_sums_survive_huge_scores():
    q, k = make(2, 1, 64, 100, 1)
    k[0, 40, :64] = 300 * np.sign(q[0, 0, :64])
    sums = np.zeros((1, 100), np.float32)
    evict.add_attention(q, layout_of(k, k), 100, 2, np.float32(1), NO_CAP, NO_SINKS, sums, 1)
    assert np.isfinite(sums).all() and sums[0, 40] >= 1


@pytest.mark.parametrize("n", [1, 2, 6, 7, 63, 64, 65, 257])
@pytest.mark.parametrize("width", [1, 3, 7, 301])
def test_max_pool(n, width):
    scores = np.random.default_rng(n).standard_normal((3, n + 4)).astype(np.float32)
    out = np.full((3, n + 4), 7, np.float32)
    evict.max_pool(scores, n, width, out)
    np.testing.assert_array_equal(out[:, :n], evict.max_pool_ref(scores[:, :n], width))
    assert (out[:, n:] == 7).all()


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [7, 64, 65])
def test_drop_least_attended(n_head, n_kv_head, d, n):
    """Positions in any order, many ties; the row is gone and all others are where they belong."""
    rng = np.random.default_rng(n)
    k, v = (rng.standard_normal((n_kv_head, n, w)).astype(np.float16) for w in (padded(d), 48))
    positions = np.stack([rng.permutation(3 * n)[:n] for _ in range(n_kv_head)]).astype(np.int32)
    mass = rng.integers(0, 3, (n_kv_head, n)).astype(np.float32)
    first, last = 4, int(np.sort(positions, axis=1)[:, -2].max())  # the newest stays
    before = [x.copy() for x in (k, v, positions, mass)]
    evict.drop_least_attended(layout_of(k, v), n, first, last, positions, mass)
    slots = evict.drop_least_attended_ref(first, last, *before[2:])
    for g, slot in enumerate(slots):
        for now, old in zip((k, v, positions, mass), before, strict=True):
            expected = np.concatenate([old[g, :slot], old[g, -1:], old[g, slot + 1 : -1]])
            np.testing.assert_array_equal(now[g, : n - 1], expected[: n - 1])


def test_the_last_row_may_be_the_one_to_drop():
    k = np.arange(3 * 16, dtype=np.float16).reshape(1, 3, 16)
    positions, mass = np.array([[0, 1, 9]], np.int32), np.array([[0, 0, 5]], np.float32)
    before = k.copy()
    evict.drop_least_attended(layout_of(k, k), 3, 4, 10, positions, mass)
    np.testing.assert_array_equal(k[:, :2], before[:, :2])
    np.testing.assert_array_equal(positions[:, :2], [[0, 1]])


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("drops", [False, True])
def test_heavy_hitter_step(n_head, n_kv_head, d, drops):
    n, group = 65, n_head // n_kv_head
    q, k = make(n_head, n_kv_head, d, n, 1)
    v = k[:, ::-1].copy()
    scale = np.float32(d**-0.5)
    positions = np.tile(np.arange(n + 2, dtype=np.int32) + 100, (n_kv_head, 1))
    positions[:, n - 1] = 999
    mass = np.random.default_rng(0).random((n_kv_head, n + 2), np.float32) / 10
    sinks = np.linspace(-3, 9, n_head, dtype=np.float32)
    expected = evict.add_attention_ref(q, k, n, group, scale, mass, NO_CAP, sinks)
    evict.heavy_hitter_step(
        q, layout_of(k, v), n, scale, NO_CAP, sinks, drops, 104, 140, positions, mass, 1
    )
    order = np.tile(np.append(np.arange(n - 1) + 100, 999), (n_kv_head, 1))
    if drops:
        slots = evict.drop_least_attended_ref(104, 140, order, expected)
        for g, slot in enumerate(slots):
            expected[g, slot], order[g, slot] = expected[g, -1], order[g, -1]
        expected, order = expected[:, : n - 1], order[:, : n - 1]
    held = order.shape[1]
    np.testing.assert_array_equal(positions[:, :held], order)
    np.testing.assert_allclose(mass[:, :held], expected, rtol=1e-5, atol=1e-6)
