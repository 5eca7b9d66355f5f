"""The scout's codes: which directions, which bytes, and which row of a part is found."""

import itertools

import numpy as np
import pytest
from numba import njit
from stored_rows import Stored, layout, store

from sparsekv_cli.cpu.attention.byte_scores import MAX_HALF_QUERIES
from sparsekv_cli.cpu.attention.rows import F16, Q4_0, Q5_1, Q8_0
from sparsekv_cli.cpu.lfps import scout
from sparsekv_cli.cpu.lfps.history import SINKS
from sparsekv_cli.cpu.lfps.scout import FOUND, PART, Scout

N_KV, GROUP = 2, 3
KEPT: list[Stored] = []  # rows whose addresses are in use


@njit
def find_rows(queries, codes, kv_head, first, last, found):
    scout.find_rows(queries, codes, kv_head, first, last, found)


def heads(d: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries f32 (H, 32, d), and keys f32 (G, n, d) whose dims differ in their variance."""
    rng = np.random.default_rng(d)
    spread = 3 * rng.random((N_KV, 1, d)) ** 3
    keys = rng.standard_normal((N_KV, 1, d)) + spread * rng.standard_normal((N_KV, n, d))
    queries = rng.standard_normal((N_KV * GROUP, 32, d))
    return queries.astype(np.float32), keys.astype(np.float32)


def scout_of(queries: np.ndarray, keys: np.ndarray) -> Scout:
    made = Scout(len(keys), keys.shape[2])
    covariance = np.stack([np.cov(each.T, bias=True) for each in keys])
    made.aim(queries, keys.mean(1), covariance)
    made.code(*stored(keys), 2)
    return made


def stored(keys: np.ndarray, kind: int = F16) -> tuple[np.ndarray, int]:
    """The layout of keys f32 (G, n, d) as rows of a kind, and n. Their bytes are kept."""
    rows = store(keys, kind)
    KEPT.append(rows)
    return layout(rows, rows), keys.shape[1]


@pytest.mark.parametrize(
    ("d", "n"),
    [(16, 140), (64, 2500), (80, 640), (128, 300), (256, 300), (32, (FOUND + 9) * PART)],
)
def test_the_best_rows_of_parts_are_found(d, n):
    queries, keys = heads(d, n)
    keys[:, :SINKS] *= 9  # with the highest scores of all, or the lowest
    of = scout_of(queries, keys)
    assert of.n_parts == n // PART
    worth = []
    for g, of_head in itertools.product(range(N_KV), (1, 2, GROUP, 2 * MAX_HALF_QUERIES + 1)):
        asked = np.ascontiguousarray(queries[g * GROUP :][:GROUP].reshape(-1, d)[-of_head:])
        codes = of.codes[g, : of.n_parts]
        found = np.full((of_head, of.n_parts + 1), -7, np.int32)
        for first in (of.n_parts // 2, 0):
            find_rows(asked, of.known(), g, first, of.n_parts, found)
            of_parts = codes[first:], of.directions[g]
            expected = np.stack([scout.find_rows_ref(q, *of_parts) for q in asked])
            n_found = min(FOUND, of.n_parts - first)
            np.testing.assert_array_equal(found[:, :n_found], first * PART + expected)
        assert (found[:, n_found:] == -7).all() and (expected >= SINKS).all()
        scores = keys[g, SINKS : of.n_parts * PART] @ asked.T
        worth.append((scores < np.sum(keys[g, expected[:, 0]] * asked, 1)).mean())
    assert np.mean(worth) > 0.9  # a random row is worth a half


def test_with_all_directions_products_are_those_of_queries_and_keys():
    queries, keys = heads(64, 500)
    covariance = np.stack([np.cov(each.T) for each in keys])
    encode, decode = scout.choose_directions(queries.reshape(N_KV, -1, 64), covariance, 64)
    of_heads = queries.reshape(N_KV, -1, 64)
    np.testing.assert_allclose(
        (of_heads @ decode) @ (keys @ encode).swapaxes(1, 2),
        of_heads @ keys.swapaxes(1, 2),
        atol=2e-3,
    )


def test_rows_are_coded_when_they_are_a_part_and_once():
    queries, keys = heads(64, 700)
    whole, grown = scout_of(queries, keys), scout_of(queries, keys[:, :300])
    grown.aim(queries, keys.mean(1), np.stack([np.cov(each.T, bias=True) for each in keys]))
    grown.code(stored(keys)[0], 300, 1)
    assert grown.n_parts == 2
    coded = grown.codes[:, :2].copy()
    grown.codes[:, :2] = 200  # are not written again
    for n, n_parts in [(383, 2), (384, 3), (500, 3), (700, 5)]:
        grown.code(stored(keys)[0], n, 3)
        assert grown.n_parts == n_parts
    assert (grown.codes[:, :2] == 200).all()
    np.testing.assert_array_equal(coded, whole.codes[:, :2])
    np.testing.assert_array_equal(grown.codes[:, 2:5], whole.codes[:, 2:5])
    assert grown.nbytes > 5 * PART * 8 * N_KV
    np.testing.assert_array_equal(scout.unpacked(whole.codes[:, :2]).shape, (N_KV, 2, PART, 16))


@pytest.mark.parametrize("kind", [F16, Q8_0, Q5_1, Q4_0])
@pytest.mark.parametrize("d", [32, 96, 160, 256])
def test_codes_are_those_of_the_reference(d, kind):
    """Products are summed in another order, so a code can differ by one where it was rounded."""
    queries, keys = heads(d, 400)
    keys += 300 * np.sign(keys.mean(1, keepdims=True))  # a bias far from 0, as some models have
    of = scout_of(queries, keys)
    of.n_parts = 0
    of.code(*stored(keys, kind), 2)
    expected = scout.code_parts_ref(KEPT[-1].exact[:, : 3 * PART], of.encode, of.zero)
    expected = scout.unpacked(expected)
    differs = np.abs(scout.unpacked(of.codes[:, :3]).astype(int) - expected)
    assert differs.max() <= 1 and differs.mean() < 2e-3
    assert expected.min() >= 1 and expected.max() <= 15 and np.ptp(expected) > 10


def test_queries_and_keys_that_are_all_equal():
    """Nothing to tell rows apart by: any row will do, and nothing is divided by zero."""
    of = scout_of(np.zeros((2, 1, 64), np.float32), np.ones((1, 256, 64), np.float32))
    found = np.zeros((1, 2), np.int32)
    query = np.zeros((1, 64), np.float32)
    find_rows(query, of.known(), 0, 0, 2, found)
    assert np.isfinite(of.encode).all() and found.tolist() == [[PART - 1, 2 * PART - 1]]
