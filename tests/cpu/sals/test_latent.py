"""Latents against their references: encoding, reconstruction, scores, on awkward sizes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from sparsekv_cli.cpu.jit.pointers import address
from sparsekv_cli.cpu.sals import latent, step

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
    def rows(self) -> latent.RowPointers:
        """Where they lie; valid as long as this object."""
        k, v = self
        return latent.RowPointers(
            address(k), address(v), k.strides[0], v.strides[0], k.strides[1], v.strides[1]
        )


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


def stored_latents(store: latent.LatentStore) -> np.ndarray:
    """f64 (n, r) as the store's layout says."""
    rank, r_star, _ = store._shape
    score, rest, _ = store._arrays
    tiles = score[: store.capacity * r_star].reshape(-1, r_star, 16)
    score = tiles.transpose(0, 2, 1).reshape(-1, r_star)[: store.n]
    rest = rest[: store.n * (rank - r_star)].reshape(store.n, -1)
    return np.concatenate([score, rest], axis=1).astype(np.float64)


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
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=2e-4)

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
    size = n * case.n_kv * single._head_bytes
    np.testing.assert_array_equal(single._arrays[2][:size], whole._arrays[2][:size])


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
    latent.prefetch_rows(idx, basis, store.table)
    latent.reconstruct_rows(idx, basis, store.table, few.rows, 0)
    for actual, expected in zip(few, everything, strict=True):
        np.testing.assert_array_equal(actual[:, : len(idx)], expected[:, idx])
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


# --- scores ---------------------------------------------------------------------------------------


def exact_scores(q_nope, position, k_nope, first, theta, rope_scale):
    """q . k with RoPE (H, n): q_nope (H, d), k_nope (G, n, d)."""
    q = latent.rotate_ref(q_nope[:, None], np.array([position]), theta, rope_scale)[:, 0]
    positions = first + np.arange(k_nope.shape[1])
    k = latent.rotate_ref(k_nope, positions, theta, rope_scale)
    return np.einsum("hd,hnd->hn", q, np.repeat(k, len(q) // len(k), axis=0))


@pytest.mark.parametrize(
    "case",
    [Case(3, 64, 64, 192, 192), Case(2, 80, 40, 160, 160), Case(1, 128, 128, 128, 128)],
)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_blocks_of_one_token_and_full_rank_score_exactly(case, group):
    rng = np.random.default_rng(0)
    vectors, weights = (a.astype(np.float64) for a in bases(case))
    k_nope = rng.standard_normal((case.n_kv, 50, case.d))
    q_nope = rng.standard_normal((group * case.n_kv, case.d))
    latents = k_nope.transpose(1, 0, 2).reshape(50, -1) @ (weights[:, None] * vectors)
    decode = vectors / weights[:, None]
    scores = step.brope_ref(q_nope, 80, latents, 7, decode, case.theta, ROPE_SCALE, 1)
    expected = exact_scores(q_nope, 80, k_nope, 7, case.theta, ROPE_SCALE)
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_damping_is_the_mean_cosine_of_a_block():
    theta = 1e4 ** (-np.arange(32) / 32)
    offsets = np.linspace(-16, 16, 20001)
    mean = np.cos(np.outer(offsets, theta)).mean(0)
    np.testing.assert_allclose(step.damping(theta, 32), np.maximum(0, mean), atol=1e-3)
    np.testing.assert_array_equal(step.damping(theta, 1), 1)


def score_all(store, basis, damp, q, n):
    """Scores (H, n) of the kernel, from its exponentials."""
    n_head = len(q)
    r_star = store.table.score_rank
    queries = np.empty((-(-n // step.SPAN), n_head, r_star, 16), np.float32)
    for span, of_span in enumerate(queries):
        step.block_queries(q, store.first + span * step.SPAN, basis, damp, r_star, of_span)
    scores = np.empty((n_head, -(-n // 32) * 32), np.float32)
    out = np.empty((n_head, n))
    for chunk in range(-(-n // step.CHUNK)):
        peak, mass = (np.empty(n_head, np.float32) for _ in range(2))
        step.score_chunk(chunk, queries, store.table, n, scores, peak, mass)
        part = slice(chunk * step.CHUNK, min(n, (chunk + 1) * step.CHUNK))
        with np.errstate(divide="ignore"):
            out[:, part] = np.log(scores[:, part]) + peak[:, None]
        np.testing.assert_allclose(mass, scores[:, part].sum(1), rtol=1e-5)
        np.testing.assert_allclose(scores[:, part].max(1), 1, rtol=1e-5)
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("n", [1, 127, 129, 512, 2049])
def test_scores_by_block(case, group, n):
    first, position = 16, 2700
    store, basis, _, decode = make_store(case, first)
    given = make_rows(case, n)
    store.reserve(n)
    latent.encode_range(given.rows, 0, first, n, basis, store.table, 0)
    store.n = n
    rng = np.random.default_rng(n)
    q_nope = 0.5 * rng.standard_normal((group * case.n_kv, case.d))
    q = np.zeros((len(q_nope), case.width), np.float32)
    q[:, : case.d] = latent.rotate_ref(
        q_nope[:, None], np.array([position]), case.theta, ROPE_SCALE
    )[:, 0]
    damp = step.damping(case.theta, step.ROPE_BLOCK) * np.float32(ROPE_SCALE)
    expected = step.brope_ref(
        q_nope, position, stored_latents(store)[:, : case.score_rank], first,
        decode[:, : case.score_rank], case.theta, ROPE_SCALE, step.ROPE_BLOCK,
    )  # fmt: skip
    actual = score_all(store, basis, damp, q, n)
    kept = expected > expected.max(1, keepdims=True) - 60  # the others' exponentials vanish
    np.testing.assert_allclose(actual[kept], expected[kept], atol=2e-4)


def test_scores_without_rotation_are_exact():
    """theta = 0: a block has one angle, so nothing is damped, and all of a key is scored."""
    case, n = Case(2, 64, 64, 128, 128), 100
    vectors, weights = bases(case)
    theta = np.zeros(32)
    basis = latent.make_basis(vectors, weights, theta, 1.0, case.n_kv, case.d)
    store = latent.LatentStore(case.rank, case.score_rank, 16, 0, basis)
    given = make_rows(case, n)
    store.reserve(n)
    latent.encode_range(given.rows, 0, 0, n, basis, store.table, 0)
    q = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    actual = score_all(store, basis, step.damping(theta, 32), q, n)
    expected = np.einsum("hd,hnd->hn", q, np.repeat(given.k.astype(np.float64), 2, axis=0))
    np.testing.assert_allclose(actual, expected, atol=0.02)  # f16 latents


@pytest.mark.parametrize("case", CASES)
def test_the_papers_query_is_the_sum_of_all_heads(case):
    _, basis, _, decode = make_store(case, 0)
    q_nope = np.zeros((3 * case.n_kv, case.width), np.float32)
    rng = np.random.default_rng(0)
    q_nope[:, : case.d] = rng.standard_normal((len(q_nope), case.d))
    latents = rng.standard_normal((20, case.score_rank))
    expected = step.summed_ref(q_nope[:, : case.d], latents, decode[:, : case.score_rank])
    summed = step.summed_query(q_nope, basis, case.score_rank)
    np.testing.assert_allclose(latents @ summed, expected, atol=1e-3)
