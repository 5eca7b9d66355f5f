"""Latents against their references: encoding, reconstruction, slots, on awkward sizes."""

from typing import NamedTuple

import numpy as np
import pytest

from sparsekv_cli.cpu.attention.rows import layout_of
from sparsekv_cli.cpu.sals import latent

ROPE_SCALE = 1.2


class Case(NamedTuple):
    """One layer's sizes; n_rot dims of d are rotated."""

    n_kv: int
    d: int
    n_rot: int
    rank: int
    score_rank: int

    @property
    def theta(self) -> np.ndarray:
        return 1e4 ** (-2 * np.arange(self.n_rot // 2) / self.n_rot)

    @property
    def width(self) -> int:
        return -(-self.d // 16) * 16


CASES = [
    Case(3, 64, 64, 48, 24),
    Case(1, 80, 80, 20, 10),
    Case(2, 128, 128, 37, 13),
    Case(2, 64, 48, 128, 128),
    Case(4, 40, 40, 33, 1),
]


def bases(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Orthonormal U (G d, r) and weights (G d,), alike within a pair."""
    rng = np.random.default_rng(seed)
    size = case.n_kv * case.d
    vectors = np.linalg.qr(rng.standard_normal((size, size)))[0][:, : case.rank]
    weights = rng.uniform(0.3, 3, (case.n_kv, case.d))
    half = case.n_rot // 2
    weights[:, half : 2 * half] = weights[:, :half]
    return vectors.astype(np.float32), weights.reshape(-1).astype(np.float32)


class Stored(NamedTuple):
    """f16 K and V (G, n, width)."""

    k: np.ndarray
    v: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Their layout; valid as long as this object."""
        return layout_of(*self)


def make_rows(case: Case, n: int, seed: int = 1) -> Stored:
    """Random rows, zero behind d."""
    rng = np.random.default_rng(seed)
    rows = empty_rows(case, n)
    for part in rows:
        part[:] = 0
        part[..., : case.d] = rng.standard_normal((case.n_kv, n, case.d))
    return rows


def empty_rows(case: Case, n: int) -> Stored:
    """Rows full of sevens."""
    return Stored(*(np.full((case.n_kv, n, case.width), 7, np.float16) for _ in range(2)))


def make_store(case: Case, first: int, bits: int = 16):
    vectors, weights = bases(case)
    basis = latent.make_basis(vectors, weights, case.theta, ROPE_SCALE, case.n_kv, case.d)
    encode, decode = weights[:, None] * vectors, vectors / weights[:, None]
    store = latent.LatentStore(case.rank, case.score_rank, bits, first, basis)
    return store, basis, encode.astype(np.float64), decode.astype(np.float64)


def stored_latents(store: latent.LatentStore, part: str = "all") -> np.ndarray:
    """f64 (n, r) as the store's layout says; "scored": (n, r*) of the high bytes only."""
    rank, r_star, _ = store._shape
    n_words = -(-r_star // 4)
    tiles = store._scored.reshape(-1, n_words + 1, 16, 4)
    high = tiles[:, :n_words].transpose(0, 2, 1, 3).reshape(store.capacity, -1)[: store.n]
    scales = tiles[:, n_words].copy().view(np.float32).reshape(-1, 1)[: store.n]
    scored = high.astype(np.float64) - 128
    if part == "scored":
        return (scored * scales)[:, :r_star]
    records = store._records[: store.n * store.table.record].reshape(store.n, -1)
    scored += records[:, : 4 * n_words].view(np.int8) / 256
    rest = records[:, 4 * n_words : 4 * n_words + 2 * (rank - r_star)].copy().view(np.float16)
    return np.concatenate([(scored * scales)[:, :r_star], rest.astype(np.float64)], axis=1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 257])
def test_rows_become_latents_and_come_back(case, n):
    first = 5
    store, basis, encode, decode = make_store(case, first)
    given = make_rows(case, n)
    store.reserve(n)
    latent.encode_range(given.rows, 0, first, n, basis, store.table, 0)
    store.n = n
    positions = first + np.arange(n)
    expected = latent.encode_ref(given.k[..., : case.d], positions, encode, case.theta, ROPE_SCALE)
    actual = stored_latents(store)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=4e-4)

    back = empty_rows(case, n + 3)
    latent.reconstruct_range(n, basis, store.table, back.rows, 2)
    expected = latent.reconstruct_ref(actual, positions, decode, case.theta, ROPE_SCALE, case.n_kv)
    np.testing.assert_allclose(back.k[:, 2 : n + 2, : case.d], expected, rtol=1e-3, atol=2e-3)
    np.testing.assert_array_equal(back.v[:, 2 : n + 2], given.v)
    for out in back:
        assert (out[:, [0, 1, n + 2]] == 7).all() and not out[:, 2 : n + 2, case.d :].any()


@pytest.mark.parametrize("case", CASES)
def test_single_rows_are_encoded_like_ranges(case):
    n = 70
    (whole, basis, _, _), (single, _, _, _) = make_store(case, 3, 4), make_store(case, 3, 4)
    given = make_rows(case, n)
    whole.reserve(n)
    latent.encode_range(given.rows, 0, 3, n, basis, whole.table, 0)
    whole.n = n
    for i in range(n):
        single.reserve(i + 1)  # which grows it on the way
        latent.encode_rows(given.rows, i, 3 + i, 1, basis, single.table, i)
        single.n = i + 1
    np.testing.assert_array_equal(stored_latents(single), stored_latents(whole))
    size = n * single.table.record
    np.testing.assert_array_equal(single._records[:size], whole._records[:size])


@pytest.mark.parametrize("chosen", [[0], [64], [3, 17, 31, 32, 64], list(range(1, 65, 2))])
def test_chosen_rows(chosen):
    case, n = CASES[0], 65
    store, basis, _, _ = make_store(case, 16, 4)
    given = make_rows(case, n)
    store.reserve(n)
    latent.encode_range(given.rows, 0, 16, n, basis, store.table, 0)
    store.n = n
    everything, few = empty_rows(case, n), empty_rows(case, latent.PIECE)
    latent.reconstruct_range(n, basis, store.table, everything.rows, 0)
    idx = np.array(chosen, np.int32)
    slots = np.random.default_rng(0).permutation(len(idx)).astype(np.int32)
    latent.prefetch_rows(idx, store.table)
    latent.reconstruct_rows(idx, slots, basis, store.table, few.rows)
    for actual, expected in zip(few, everything, strict=True):
        np.testing.assert_array_equal(actual[:, slots], expected[:, idx])
        assert (actual[:, len(idx) :] == 7).all()


@pytest.mark.parametrize(
    "case", [Case(2, 64, 64, 128, 64), Case(3, 80, 80, 240, 120), Case(1, 128, 128, 128, 64)]
)
def test_a_basis_of_full_rank_loses_nothing(case):
    """docs/methods.md: E^T D is the identity to 1e-5; as the kernels get them."""
    vectors, weights = bases(case)
    basis = latent.make_basis(vectors, weights, case.theta, 1.0, case.n_kv, case.d)
    product = basis.encode[:, : case.rank].T.astype(np.float64) @ basis.decode[:, :-16].T
    assert abs(product - np.eye(case.rank)).max() < 1e-5


def test_rows_that_are_chosen_again_keep_their_slots():
    rng, m = np.random.default_rng(0), 20
    kept = np.full(m + 5, -1, np.int32)
    for count in (m, m, m, 12, 12, m, m):  # fewer are chosen, and more again
        before = {int(each): slot for slot, each in enumerate(kept[:count]) if each >= 0}
        chosen = np.sort(rng.choice(40, count, replace=False)).astype(np.int32)
        slots, missing, where = (np.empty(count, np.int32) for _ in range(3))
        n_missing = latent.assign_slots(chosen, kept, slots, missing, where)
        assert sorted(slots) == list(range(count))
        np.testing.assert_array_equal(kept[slots], chosen)
        assert (kept[count:] == -1).all()
        new = [each for each in chosen if each not in before]
        np.testing.assert_array_equal(missing[:n_missing], new)
        np.testing.assert_array_equal(kept[where[:n_missing]], new)
        for each, slot in zip(chosen, slots, strict=True):
            assert before.get(int(each), slot) == slot
