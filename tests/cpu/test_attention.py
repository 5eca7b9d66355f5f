"""Attention kernels against the f64 reference on awkward sizes."""

import numpy as np
import pytest

from sparsekv_cli.cpu import attention
from sparsekv_cli.cpu.matvec import address

GEOMETRIES = [(1, 1, 64), (9, 3, 64), (8, 1, 80), (4, 4, 128), (5, 1, 16), (2, 1, 96)]


def make(n_head, n_kv_head, d, n, seed=0):
    rng = np.random.default_rng(seed)
    q = (2 * rng.standard_normal((n_head, d))).astype(np.float32)
    k, v = (rng.standard_normal((n_kv_head, n + 3, d)).astype(np.float16) for _ in range(2))
    return q, k, v


def arguments(k, v):
    return address(k), address(v), k.strides[0], v.strides[0], k.strides[1], v.strides[1]


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [1, 5, 63, 256, 1300])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_attend_dense(n_head, n_kv_head, d, n, n_threads):
    q, k, v = make(n_head, n_kv_head, d, n)
    out = np.empty_like(q)
    scale = np.float32(d**-0.5)
    attention.attend_dense(q, *arguments(k, v), n, n_kv_head, scale, out, n_threads)
    expected = attention.attend_dense_ref(q, k[:, :n], v[:, :n], scale)
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("per_head", [True, False])
def test_attend_rows(n_head, n_kv_head, d, per_head):
    n = 700
    q, k, v = make(n_head, n_kv_head, d, n)
    rng = np.random.default_rng(1)
    n_list = n_head if per_head else n_kv_head
    counts = rng.integers(1, n, n_list)
    idx = np.stack([rng.permutation(n) for _ in range(n_list)]).astype(np.int32)
    out = np.empty_like(q)
    scale = np.float32(d**-0.5)
    attention.attend_rows(q, *arguments(k, v), idx, counts, n_kv_head, scale, out, 2)
    rows = [idx[h * n_list // n_head, : counts[h * n_list // n_head]] for h in range(n_head)]
    np.testing.assert_allclose(out, attention.attend_rows_ref(q, k, v, rows, scale), atol=1e-5)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [1, 63, 1300])
def test_score_rows(n_head, n_kv_head, d, n):
    q, k, _ = make(n_head, n_kv_head, d, n)
    out = np.empty((n_head, n + attention.PAD), np.float32)
    attention.score_rows(
        q, address(k), k.strides[0], k.strides[1], n, n_kv_head, np.float32(0.5), out, 2
    )
    keys = np.repeat(k[:, :n].astype(np.float32), n_head // n_kv_head, axis=0)
    np.testing.assert_allclose(out[:, :n], 0.5 * np.einsum("hd,hnd->hn", q, keys), atol=1e-4)


def test_attention_survives_huge_scores():
    q, k, v = make(2, 1, 64, 600)
    k[0, 300] = 300 * np.sign(q[0]).astype(np.float16)
    out = np.empty_like(q)
    attention.attend_dense(q, *arguments(k, v), 600, 1, np.float32(1), out, 2)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], v[0, 300].astype(np.float32), atol=1e-5)


def test_append_row_rounds_to_half():
    rng = np.random.default_rng(0)
    k_new, v_new = (rng.standard_normal((3, 64)).astype(np.float32) for _ in range(2))
    k, v = (np.zeros((3, 10, 64), np.float16) for _ in range(2))
    attention.append_row(k_new, v_new, *arguments(k, v), 7)
    np.testing.assert_array_equal(k[:, 7], k_new.astype(np.float16))
    np.testing.assert_array_equal(v[:, 7], v_new.astype(np.float16))
    assert not k[:, :7].any() and not v[:, 8:].any()
