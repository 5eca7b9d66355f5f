"""Summaries of pages as bytes, their scores and the best pages, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore, padded
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.quest import byte_pages
from sparsekv_cli.cpu.quest.best_pages import best_pages
from sparsekv_cli.cpu.quest.byte_pages import PAGE, SPAN

TYPES = ["f16", "q8_0", "q5_1", "q4_0"]
RNG = np.random.default_rng(3)


def coded(keys: np.ndarray, cache_type: str = "f16", cuts: tuple[int, ...] = ()):
    """Codes and scales of keys f32 (G, n, d) by the kernel, what numpy says, and the stored keys.

    cuts: tiles that a call ends with.
    """
    n_head, n, d = keys.shape
    sizes = {"cache_type_k": cache_type, "cache_type_v": cache_type}
    store = KVStore(LayerSpec(0, 1, n_head, n_head, d, d, 2, **sizes))
    store.reserve(n)
    store.k_type.write(store.k[:, :n], keys)
    stored = store.k_type.read(store.k[:, :n]).astype(np.float32)
    centre, tiles = stored.mean(1), n // PAGE // LANES
    codes = on_lines((n_head, tiles + 1, padded(d) // 2, LANES, 4), np.uint8, zeros=True)
    scales = on_lines((n_head, tiles + 1, LANES), np.float32, zeros=True)
    rotated = d if store.k_type.rotates else 0
    for first, last in zip((0, *cuts), (*cuts, tiles), strict=True):
        byte_pages.code_pages(store.layout, first, last, rotated, centre, codes, scales, 2)
    assert not codes[:, tiles:].any()
    wanted = byte_pages.code_pages_ref(stored, centre)
    return codes[:, :tiles], scales[:, :tiles], wanted, stored


@pytest.mark.parametrize("cache_type", TYPES)
@pytest.mark.parametrize(("n_head", "d"), [(1, 128), (2, 64), (3, 80), (1, 24)])
def test_codes_are_those_of_numpy(cache_type: str, n_head: int, d: int) -> None:
    keys = (3 * RNG.standard_normal((n_head, 3 * PAGE * LANES, d)) + 1).astype(np.float32)
    keys[:, :, 3] *= 30
    codes, scales, (of_numpy, of_pages), _ = coded(keys, cache_type)
    np.testing.assert_allclose(scales, of_pages, rtol=1e-5)
    difference = np.abs(codes.astype(int) - of_numpy)
    assert difference.max() <= 1 and (difference > 0).mean() < 1e-3  # halves may round otherwise
    assert codes.min() < 64 and codes.max() > 192
    parts, others, *_ = coded(keys, cache_type, cuts=(1, 2))
    np.testing.assert_array_equal(parts, codes)
    np.testing.assert_array_equal(others, scales)


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_equal_keys_are_the_centre(value: float) -> None:
    codes, scales, *_ = coded(np.full((1, PAGE * LANES, 32), value, np.float32))
    assert (codes[0, 0, :8] == byte_pages.ZERO).all() and not codes[0, 0, 8:].any()
    assert (scales > 0).all()


@pytest.mark.parametrize(("n_head", "n_rows", "d", "n_page"), [
    (2, 96, 128, SPAN + 64), (1, 9, 64, 32), (3, 1, 80, 2 * SPAN), (1, 10, 24, 3 * SPAN - 32),
])  # fmt: skip
@pytest.mark.parametrize("n_threads", [1, 2])
def test_scores_and_best_pages(n_head, n_rows, d, n_page, n_threads) -> None:
    width = padded(d)
    codes = on_lines((n_head, n_page // LANES, width // 2, LANES, 4), np.uint8)
    codes[:] = RNG.integers(0, 256, codes.shape)
    scales = on_lines(codes.shape[:2] + (LANES,), np.float32)
    scales[:] = RNG.uniform(0.01, 0.1, scales.shape)
    q = np.zeros((n_head, n_rows, width), np.float32)
    q[:, :, :d] = RNG.standard_normal((n_head, n_rows, d))
    queries = np.empty((n_head, n_rows, 2 * width), np.int8)
    starts, factors = np.empty((n_head, n_rows), np.int32), np.empty((n_head, n_rows), np.float32)
    byte_pages.round_queries(q, queries, starts, factors)
    rounded = byte_pages.round_queries_ref(q)
    for found, wanted in zip((queries, starts, factors), rounded, strict=True):
        np.testing.assert_array_equal(found, wanted)
    spans = -(-n_page // SPAN)
    out = np.full((spans, n_head, n_rows, SPAN), np.nan, np.float32)
    tops = np.empty((spans, n_head, n_rows, LANES), np.float32)
    byte_pages.score_pages(queries, starts, factors, codes, scales, n_page, out, tops, n_threads)
    wanted = byte_pages.score_pages_ref(*rounded, codes, scales)
    scores = np.moveaxis(out, 0, 2).reshape(n_head, n_rows, -1)
    np.testing.assert_allclose(scores[:, :, :n_page], wanted, rtol=1e-5, atol=1e-5)
    assert np.isnan(scores[:, :, n_page:]).all()
    highest = tops.max((0, 3))
    np.testing.assert_array_equal(highest, scores[:, :, :n_page].max(2))

    n_last, n_best = n_page // 8, n_page // 4
    best, chosen = np.empty((n_head, n_page), np.float32), np.empty((n_head, n_best), np.int32)
    best_pages(out, highest, n_page, n_last, best, chosen, n_threads)
    expected = (scores[:, :, :n_page] - highest[:, :, None]).max(1)
    expected[:, 0] = expected[:, n_page - n_last :] = np.inf
    np.testing.assert_array_equal(best, expected)
    order = np.argsort(-expected, axis=1, kind="stable")[:, :n_best]
    np.testing.assert_array_equal(chosen, np.sort(order, axis=1))


@pytest.mark.parametrize("cache_type", TYPES)
def test_byte_scores_are_near_those_of_floats(cache_type: str) -> None:
    """The order of a query's pages is that of q . mean + |q| . deviation, but for some rounding."""
    keys = (RNG.standard_normal((2, 4 * SPAN, 64)) + 4 * RNG.standard_normal(64)).astype(np.float32)
    codes, scales, _, stored = coded(keys, cache_type)
    q = RNG.standard_normal((2, 5, 64)).astype(np.float32)
    scores = byte_pages.score_pages_ref(*byte_pages.round_queries_ref(q), codes, scales)
    pages = stored.reshape(2, -1, PAGE, 64)
    wanted = q @ pages.mean(2).swapaxes(1, 2) + np.abs(q) @ pages.std(2).swapaxes(1, 2)
    scores, wanted = (x - x.mean(2, keepdims=True) for x in (scores, wanted))
    assert np.abs(scores - wanted).max() < 0.05 * np.abs(wanted).max()


def test_numbers_that_are_not_finite_do_no_harm() -> None:
    keys = RNG.standard_normal((1, PAGE * LANES * 2, 32)).astype(np.float32)
    keys[0, 5, 3], keys[0, 100, 7] = np.inf, np.nan
    codes, scales, *_ = coded_quietly(keys)
    queries = np.empty((1, 1, 64), np.int8)
    starts, factors = np.empty((1, 1), np.int32), np.empty((1, 1), np.float32)
    q = np.full((1, 1, 32), np.nan, np.float32)
    byte_pages.round_queries(q, queries, starts, factors)
    out, tops = np.empty((1, 1, 1, SPAN), np.float32), np.empty((1, 1, 1, LANES), np.float32)
    byte_pages.score_pages(queries, starts, factors, codes, scales, 32, out, tops, 1)
    best, chosen = np.empty((1, 32), np.float32), np.empty((1, 4), np.int32)
    best_pages(out, tops.max((0, 3)), 32, 2, best, chosen, 1)
    assert chosen[0, 0] == 0 and chosen[0, 2:].tolist() == [30, 31]


def coded_quietly(keys: np.ndarray):
    with np.errstate(all="ignore"):
        return coded(keys)
