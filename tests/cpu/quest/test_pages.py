"""Page summaries, page scores and the choice of pages against numpy, on awkward sizes."""

import numpy as np
import pytest

from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.jit.pointers import address
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.quest import pages

GEOMETRIES = [(1, 1, 64), (9, 3, 64), (8, 2, 80), (8, 1, 128), (5, 1, 24)]


def make(n_head, n_kv_head, d, n, seed=0):
    """q f32 (H, padded d) and f16 keys (G, n + 3, padded d), zero behind d."""
    rng = np.random.default_rng(seed)
    q = np.zeros((n_head, padded(d)), np.float32)
    q[:, :d] = 2 * rng.standard_normal((n_head, d))
    k = np.zeros((n_kv_head, n + 3, padded(d)), np.float16)
    k[..., :d] = rng.standard_normal((n_kv_head, n + 3, d)) + 1
    return q, k


def summaries(k, n, page, meanstd, n_sinks=0, first_page=0, into=None):
    """hi, lo as f16; pages that are not written hold 7."""
    n_kv, _, d = k.shape
    hi, lo = into or (np.full((n_kv, n // page + 2, d), 7, np.float16) for _ in range(2))
    pages.page_summaries(
        address(k), k.strides[0], k.strides[1], first_page, n // page, page, n_kv, d, meanstd,
        hi.view(np.uint16), lo.view(np.uint16), n_sinks,
    )  # fmt: skip
    return hi, lo


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("page", [1, 16, 32, 48])
@pytest.mark.parametrize("meanstd", [False, True])
def test_page_summaries(n_head, n_kv_head, d, n, page, meanstd):
    _, k = make(n_head, n_kv_head, d, n)
    for n_sinks in (0, 4) if page > 4 else (0,):
        hi, lo = summaries(k, n, page, meanstd, n_sinks)
        expected = pages.page_summaries_ref(k[:, :n], page, meanstd, n_sinks)
        for actual, wanted in zip((hi, lo), expected, strict=True):
            if meanstd:
                np.testing.assert_allclose(actual[:, : n // page], wanted, rtol=1e-3, atol=1e-3)
            else:
                np.testing.assert_array_equal(actual[:, : n // page], wanted)
            assert (actual[:, n // page :] == 7).all()


@pytest.mark.parametrize("meanstd", [False, True])
def test_summaries_page_by_page_equal_those_at_once(meanstd):
    _, k = make(4, 2, 64, 257)
    at_once = summaries(k, 257, 16, meanstd, 4)
    grown = tuple(np.full_like(x, 7) for x in at_once)
    for n in range(16, 258):
        summaries(k, n, 16, meanstd, 4, first_page=(n - 1) // 16, into=grown)
    np.testing.assert_array_equal(grown, at_once)


def test_deviations_of_large_keys_do_not_cancel():
    _, k = make(1, 1, 64, 16)
    k[..., :64] += 1000
    hi, lo = summaries(k, 16, 16, True)
    expected = pages.page_summaries_ref(k[:, :16], 16, True)
    np.testing.assert_allclose(hi[:, :1], expected[0], atol=0.5)  # f16 steps here
    np.testing.assert_allclose(hi[:, :1] - lo[:, :1], expected[0] - expected[1], atol=1)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), [*GEOMETRIES, (3, 1, 64), (4, 4, 128)])
@pytest.mark.parametrize("n_page", [1, 15, 63, 64, 65, 257, 1300])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_page_scores(n_head, n_kv_head, d, n_page, n_threads):
    q, hi = make(n_head, n_kv_head, d, n_page)
    lo = make(n_head, n_kv_head, d, n_page, seed=1)[1] - np.float16(2)
    out = np.full((n_head, n_page + 2), 7, np.float32)
    scale = np.float32(d**-0.5)
    pages.page_scores(
        q, hi.view(np.uint16), lo.view(np.uint16), n_page, n_kv_head, scale, out, n_threads
    )
    expected = pages.page_scores_ref(q, hi[:, :n_page], lo[:, :n_page], scale)
    np.testing.assert_allclose(out[:, :n_page], expected, atol=2e-5)
    assert (out[:, n_page:] == 7).all()


def test_hi_and_lo_may_be_halves_of_one_array():
    q, both = make(4, 2, 128, 70)
    q = q[:, :64].copy()
    hi, lo = both[..., :64], both[..., 64:]
    out = np.empty((4, 70), np.float32)
    halves = both.view(np.uint16)
    pages.page_scores(q, halves[..., :64], halves[..., 64:], 70, 2, np.float32(1), out)
    np.testing.assert_allclose(out, pages.page_scores_ref(q, hi[:, :70], lo[:, :70], 1), atol=1e-4)


@pytest.mark.parametrize("meanstd", [False, True])
def test_what_a_score_means(meanstd):
    """Quest's sum_c max(q_c max_c, q_c min_c), no less than any key; q . mean + |q| . std."""
    n_head, n_kv, d, page, n = 6, 2, 64, 16, 256
    q, k = make(n_head, n_kv, d, n)
    hi, lo = (x[:, : n // page].astype(np.float64) for x in summaries(k, n, page, meanstd))
    out = np.empty((n_head, n // page), np.float32)
    bits = (x[:, : n // page].view(np.uint16) for x in summaries(k, n, page, meanstd))
    pages.page_scores(q, *bits, n // page, n_kv, np.float32(1), out)
    wide_q = q.astype(np.float64)[:, None]
    hi, lo = (np.repeat(x, n_head // n_kv, axis=0) for x in (hi, lo))
    keys = np.repeat(k[:, :n].astype(np.float64), n_head // n_kv, axis=0).reshape(
        n_head, -1, page, d
    )
    if meanstd:
        expected = (wide_q * keys.mean(2) + abs(wide_q) * keys.std(2)).sum(-1)
        np.testing.assert_allclose(out, expected, atol=0.1)  # summaries are rounded to f16
    else:
        expected = np.maximum(wide_q * hi, wide_q * lo).sum(-1)
        np.testing.assert_allclose(out, expected, atol=1e-4)
        best = np.einsum("hd,hjpd->hjp", q.astype(np.float64), keys).max(-1)
        assert (out >= best - 1e-4).all() and (out > best + 1).any()


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("page", [5, 16])
@pytest.mark.parametrize("n", [1, 3, 5, 6, 16, 17, 63, 64, 65, 257])
@pytest.mark.parametrize("n_best", [0, 1, 3, 100])
@pytest.mark.parametrize(("softcap", "n_threads"), [(0, 1), (3, 2)])
def test_select_pages(n_head, n_kv_head, d, page, n, n_best, softcap, n_threads):
    n_page = (n - 1) // page
    rng = np.random.default_rng(n)
    given = np.zeros((n_head, n_page + LANES), np.float32)
    given[:, :n_page] = 9 * rng.standard_normal((n_head, n_page))
    given[:, 1:n_page:3] = given[:, :1]  # many ties
    for n_sinks in (0, 4, 2 * page + 1):
        idx = np.full((n_kv_head, n + 4), -1, np.int32)
        counts = np.zeros(n_kv_head, np.int64)
        pages.select_pages(
            given.copy(), n_page, n_best, page, n, n_sinks, np.float32(softcap), idx, counts,
            n_threads,
        )  # fmt: skip
        expected = pages.select_pages_ref(
            given[:, :n_page], n_kv_head, n_best, page, n, n_sinks, softcap
        )
        for g in range(n_kv_head):
            np.testing.assert_array_equal(idx[g, : counts[g]], expected[g])


def test_a_head_with_large_scores_does_not_choose_for_the_others():
    """All scores of the first head are larger; the second one's clear choice counts."""
    scores = np.zeros((2, 8 + LANES), np.float32)
    scores[0, :8], scores[1, 5] = 100, 20
    idx, counts = np.zeros((1, 40), np.int32), np.zeros(1, np.int64)
    pages.select_pages(scores, 8, 1, 4, 33, 0, np.float32(0), idx, counts)
    assert idx[0, : counts[0]].tolist() == [20, 21, 22, 23, 32]
