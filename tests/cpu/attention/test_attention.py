"""Attention kernels against the f64 reference on awkward sizes, for every type of rows."""

import numpy as np
import pytest
from stored_rows import KINDS, layout, store

from sparsekv_cli.cache.spec import NO_SINKS
from sparsekv_cli.cpu.attention import decode
from sparsekv_cli.cpu.attention.flash import ALL_ROWS
from sparsekv_cli.cpu.attention.rows import F16, Q8_0

NO_CAP = np.float32(0)
GEOMETRIES = [
    (1, 1, 64), (9, 3, 64), (8, 1, 80), (4, 4, 128), (5, 1, 16), (2, 1, 96), (8, 2, 64), (8, 1, 128)
]  # fmt: skip


def make(n_head, n_kv_head, d, n, kinds=(F16, F16)):
    rng = np.random.default_rng(0)
    q = (2 * rng.standard_normal((n_head, d))).astype(np.float32)
    k, v = (store(rng.standard_normal((n_kv_head, n + 3, d)), kind) for kind in kinds)
    return q, k, v


def attend_dense(q, of_rows, n, *args):
    """The kernel, for the last of n tokens of one sequence."""
    layouts, stops = np.tile(of_rows, (len(q), 1)), np.arange(n - len(q), n) + 1
    decode.attend_dense(q, layouts, stops, np.zeros(len(q), np.int64), *args)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [1, 5, 63, 256, 257, 1300])
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("kinds", KINDS)
def test_attend_dense(n_head, n_kv_head, d, n, n_threads, kinds):
    q, k, v = make(n_head, n_kv_head, d, n, kinds)
    out = np.empty_like(q)
    scale = np.float32(d**-0.5)
    attend_dense(
        q[None], layout(k, v), n, ALL_ROWS, n_kv_head, scale, NO_CAP, NO_SINKS, out[None], n_threads
    )
    expected = decode.attend_dense_ref(q, k.exact[:, :n], v.exact[:, :n], scale)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), [*GEOMETRIES, (12, 2, 128), (14, 2, 64)])
@pytest.mark.parametrize("kinds", [(F16, F16), (Q8_0, Q8_0)])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("window", [200, ALL_ROWS])
@pytest.mark.parametrize(("n", "n_token"), [(9, 9), (63, 2), (260, 8), (515, 65), (1300, 4)])
def test_tokens_attend_together_as_alone(
    n_head, n_kv_head, d, kinds, n_threads, window, n, n_token
):
    """Bit by bit, also where their keys are cut into more pieces from some token on."""
    _, k, v = make(n_head, n_kv_head, d, n, kinds)
    q = np.random.default_rng(3).standard_normal((n_token, n_head, d)).astype(np.float32)
    args = (n_kv_head, np.float32(d**-0.5), np.float32(1.5), sinks_of(n_head, True))
    together, alone = np.empty((2, *q.shape), np.float32)
    attend_dense(q, layout(k, v), n, window, *args, together, n_threads)
    for b in range(n_token):
        one, n_own = slice(b, b + 1), n - n_token + 1 + b
        attend_dense(q[one], layout(k, v), n_own, window, *args, alone[one], n_threads)
    np.testing.assert_array_equal(together, alone)


OPTIONS = [(1.5, True), (0.0, True), (1.5, False)]  # a softcap, and whether there are sinks


def sinks_of(n_head, has_sinks):
    sinks = np.random.default_rng(2).standard_normal(n_head).astype(np.float32)
    return sinks if has_sinks else NO_SINKS


@pytest.mark.parametrize(("softcap", "has_sinks"), OPTIONS)
@pytest.mark.parametrize(("n", "first"), [(1, 0), (63, 20), (1300, 0), (1300, 700)])
@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), [(9, 3, 64), (8, 1, 80)])
def test_softcaps_sinks_and_a_part_of_the_rows(n_head, n_kv_head, d, n, first, softcap, has_sinks):
    q, k, v = make(n_head, n_kv_head, d, n)
    out, sinks, scale = np.empty_like(q), sinks_of(n_head, has_sinks), np.float32(d**-0.5)
    cap = np.float32(softcap)
    args = (n_kv_head, scale, cap, sinks)
    expected = decode.attend_dense_ref(
        q, k.exact[:, first:n], v.exact[:, first:n], scale, softcap, sinks if has_sinks else None
    )
    attend_dense(q[None], layout(k, v), n, n - first, *args, out[None], 2)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    idx = np.tile(np.arange(first, n, dtype=np.int32)[::-1], (n_kv_head, 1))
    decode.attend_rows(q, layout(k, v), idx, np.full(n_kv_head, n - first), *args, out, 2)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("kinds", KINDS)
def test_attend_rows(n_head, n_kv_head, d, per_head, kinds):
    n = 700
    q, k, v = make(n_head, n_kv_head, d, n, kinds)
    rng = np.random.default_rng(1)
    n_list = n_head if per_head else n_kv_head
    counts = rng.integers(1, n, n_list)
    idx = np.stack([rng.permutation(n) for _ in range(n_list)]).astype(np.int32)
    out = np.empty_like(q)
    scale = np.float32(d**-0.5)
    decode.attend_rows(q, layout(k, v), idx, counts, n_kv_head, scale, NO_CAP, NO_SINKS, out, 2)
    rows = [idx[h * n_list // n_head, : counts[h * n_list // n_head]] for h in range(n_head)]
    expected = decode.attend_rows_ref(q, k.exact, v.exact, rows, scale)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [1, 63, 1300])
@pytest.mark.parametrize("kind", [F16, Q8_0])
def test_score_rows(n_head, n_kv_head, d, n, kind):
    q, k, v = make(n_head, n_kv_head, d, n, (kind, kind))
    out = np.empty((n_head, n + decode.PAD), np.float32)
    decode.score_rows(q, layout(k, v), n, n_kv_head, np.float32(0.5), out, 2)
    keys = np.repeat(k.exact[:, :n], n_head // n_kv_head, axis=0)
    np.testing.assert_allclose(out[:, :n], 0.5 * np.einsum("hd,hnd->hn", q, keys), atol=1e-4)


@pytest.mark.parametrize("kind", [F16, Q8_0])
def test_attention_survives_huge_scores(kind):
    rng = np.random.default_rng(0)
    q = (2 * rng.standard_normal((2, 64))).astype(np.float32)
    keys, values = (rng.standard_normal((1, 603, 64)).astype(np.float32) for _ in range(2))
    keys[0, 300] = 300 * np.sign(q[0])
    k, v = store(keys, kind), store(values, kind)
    out = np.empty_like(q)
    args = (1, np.float32(1), NO_CAP, NO_SINKS, out[None], 2)
    attend_dense(q[None], layout(k, v), 600, ALL_ROWS, *args)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], v.exact[0, 300], atol=1e-5)


@pytest.mark.parametrize("d", [16, 64, 80, 128])
@pytest.mark.parametrize("kinds", KINDS)
def test_append_row_stores_what_the_reference_stores(d, kinds):
    rng = np.random.default_rng(0)
    news = [rng.standard_normal((3, d)).astype(np.float32) for _ in range(2)]
    stored = [store(np.zeros((3, 10, d), np.float32), kind) for kind in kinds]
    decode.append_row(*news, layout(*stored), 7)
    for new, rows in zip(news, stored, strict=True):
        expected = store(np.zeros((3, 10, d), np.float32), rows.kind).array
        expected[:, 7] = store(new, rows.kind).array
        np.testing.assert_array_equal(rows.array, expected)
