"""SALS' scores by bytes against their references: queries, scores, weights summed over heads."""

import numpy as np
import pytest
from test_latent import CASES, ROPE_SCALE, Case, bases, make_rows, make_store, stored_latents

from sparsekv_cli.cpu.sals import latent, queries, scores


def exact_scores(q_nope, position, k_nope, first, theta, rope_scale):
    """q . k with RoPE (H, n): q_nope (H, d), k_nope (G, n, d)."""
    q = latent.rotate_ref(q_nope[:, None], np.array([position]), theta, rope_scale)[:, 0]
    positions = first + np.arange(k_nope.shape[1])
    k = latent.rotate_ref(k_nope, positions, theta, rope_scale)
    return np.einsum("hd,hnd->hn", q, np.repeat(k, len(q) // len(k), axis=0))


@pytest.mark.parametrize(
    "case", [Case(3, 64, 64, 192, 192), Case(2, 80, 40, 160, 160), Case(1, 128, 128, 128, 128)]
)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_blocks_of_one_token_and_full_rank_score_exactly(case, group):
    rng = np.random.default_rng(0)
    vectors, weights = (a.astype(np.float64) for a in bases(case))
    k_nope = rng.standard_normal((case.n_kv, 50, case.d))
    q_nope = rng.standard_normal((group * case.n_kv, case.d))
    latents = k_nope.transpose(1, 0, 2).reshape(50, -1) @ (weights[:, None] * vectors)
    decode = vectors / weights[:, None]
    found = queries.brope_ref(q_nope, 80, latents, 7, decode, case.theta, ROPE_SCALE, 1)
    expected = exact_scores(q_nope, 80, k_nope, 7, case.theta, ROPE_SCALE)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_damping_is_the_mean_cosine_of_a_block():
    theta = 1e4 ** (-np.arange(32) / 32)
    offsets = np.linspace(-16, 16, 20001)
    mean = np.cos(np.outer(offsets, theta)).mean(0)
    mean[16 * theta >= np.pi] = 0  # pairs that turn by more than a circle
    np.testing.assert_allclose(queries.damping(theta, 32), mean, atol=1e-3)
    np.testing.assert_array_equal(queries.damping(theta, 1), 1)


class Scored:
    """Latents of random keys, and queries of every block as bytes."""

    position = 2700

    def __init__(self, case: Case, group: int, n: int, first: int = 16) -> None:
        self.case, self.n, self.first = case, n, first
        self.store, basis, _, decode = make_store(case, first)
        given = make_rows(case, n)
        self.store.reserve(n)
        latent.encode_range(given.rows, 0, first, n, basis, self.store.table, 0)
        self.store.n = n
        self.decode = decode[:, : case.score_rank]
        rng = np.random.default_rng(n)
        self.q_nope = 0.5 * rng.standard_normal((group * case.n_kv, case.d))
        at = np.array([self.position])
        q = np.zeros((len(self.q_nope), case.width), np.float32)
        q[:, : case.d] = latent.rotate_ref(self.q_nope[:, None], at, case.theta, ROPE_SCALE)[:, 0]
        self.blocks = queries.make_block_basis(basis, case.theta, case.score_rank)
        n_span, n_words = -(-n // queries.SPAN), latent.words_of(case.score_rank)
        self.words = np.empty((n_span, len(q), n_words + 1, 16), np.int32)
        self.factors = np.empty((n_span, len(q), 16), np.float32)
        units = queries.query_units(q, self.blocks)
        for i in range(n_span):
            at, made = first + i * queries.SPAN, (self.words[i], self.factors[i])
            queries.block_queries(q, units, at, case.n_kv, self.blocks, *made)

    def expected(self, latents: np.ndarray) -> np.ndarray:
        """Scores (H, n) without rounding of queries."""
        return queries.brope_ref(
            self.q_nope, self.position, latents, self.first, self.decode, self.case.theta,
            ROPE_SCALE, queries.ROPE_BLOCK,
        )  # fmt: skip

    def found(self) -> np.ndarray:
        """Scores (H, n) by bytes."""
        out = np.empty((len(self.q_nope), -(-self.n // 32) * 32), np.float32)
        for at in range(0, self.n, 32):
            part = np.empty((len(out), 32), np.float32)
            scores.scores_of_pair(self.words, self.factors, self.store.table, at, part)
            out[:, at : at + 32] = part
        return out[:, : self.n]

    def rounding(self, latents: np.ndarray) -> np.ndarray:
        """What rounding of queries and of D to bytes can change of scores (H, n)."""
        steps = np.repeat(self.factors.transpose(1, 0, 2).reshape(len(self.q_nope), -1), 128, 1)
        in_latents = 0.5 * steps[:, : self.n] * np.abs(latents).sum(1)
        blocks, d = self.blocks, self.case.d
        n_dims, n_turned = len(blocks.dims), 2 * len(blocks.turns)
        a, b = (self.q_nope[:, x] for x in blocks.dims[:n_turned].reshape(2, -1))
        sizes = np.abs(self.q_nope).max(1, keepdims=True).repeat(n_dims, 1)
        sizes[:, :n_turned] = np.tile(np.hypot(a, b) * blocks.damp * ROPE_SCALE, 2)
        before = np.empty((len(sizes), self.case.score_rank))
        for h, size in enumerate(sizes):
            g, unit = h // (len(sizes) // self.case.n_kv), size.max() / 127
            decode = np.abs(self.decode[g * d : (g + 1) * d][blocks.dims]).sum(0)
            before[h] = (unit * decode + (size.sum() + n_dims * unit / 2) * blocks.scales[g]) / 2
        return in_latents + before @ np.abs(latents).T + 1e-4


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 127, 129, 2049])
def test_scores_by_block(case, group, n):
    scored = Scored(case, group, n)
    latents = stored_latents(scored.store, "scored")
    expected = scored.expected(latents)
    error = np.abs(scored.found() - expected)
    assert (error <= scored.rounding(latents)).all()
    if n > 1:  # one row may be near 0
        assert np.sqrt(np.mean(error**2)) < 0.03 * np.sqrt(np.mean(expected**2))
    whole = stored_latents(scored.store)[:, : case.score_rank]
    assert np.abs(latents - whole).max() <= np.abs(whole).max() / 250


@pytest.mark.parametrize("case", CASES[:3])
@pytest.mark.parametrize(("n", "softcap"), [(1, 0), (33, 2), (500, 0), (2049, 0), (2049, 2)])
def test_weights_are_summed_over_heads(case, n, softcap):
    """By the scores that the kernel finds, and softmax sums of these or of other rows."""
    scored = Scored(case, 3, n)
    found, softcap = scored.found().astype(np.float64), np.float32(softcap)
    found = softcap * np.tanh(found / softcap) if softcap else found
    n_span, n_head = scored.factors.shape[:2]
    peaks, masses = (np.empty((n_span + 1, n_head), np.float32) for _ in range(2))
    for i in range(n_span):
        part = scored.words, scored.factors, scored.store.table, n
        scores.sample_span(i, *part, softcap, peaks[i], masses[i])
    peaks[-1], masses[-1] = 1.5, 2.0
    sums = (masses.astype(np.float64) * np.exp(peaks.astype(np.float64))).sum(0)
    expected = np.full(n_head, 2 * np.exp(1.5))
    for i, start in enumerate(range(0, n, queries.SPAN)):
        stop, sampled = min(n, start + queries.SPAN), []
        for at in range(start, stop, queries.ROPE_BLOCK):
            first = at + 32 if at + 64 <= stop else at
            sampled += range(first, min(first + 32, stop))
        power = (found[:, sampled] - peaks[i][:, None]) * np.log2(np.e)
        whole = np.floor(power)
        line = 2**whole * (1 + power - whole)  # e^x by the bits of a float; exact with a softcap
        part = (2**power if softcap else line).sum(1) * np.exp(peaks[i].astype(np.float64))
        expected += part * (stop - start) / len(sampled)
    np.testing.assert_allclose(sums, expected, rtol=1e-4)
    bias = np.empty(n_head, np.float32)
    scores.head_biases(peaks, masses, bias)
    weights = np.full(-(-n // 32) * 32 + 8, 7, np.float32)
    part = scored.words, scored.factors, bias
    scores.importance(0, n, *part, softcap, scored.store.table, weights)
    ratio = weights[:n] / (np.exp(found) / sums[:, None]).sum(0)
    assert ratio.min() > 0.99 and ratio.max() < 1.07
    assert (weights[-8:] == 7).all()


def test_very_large_scores_stay_in_order():
    """Where the sampled rows say nothing of the best one."""
    scored = Scored(CASES[0], 1, 300)
    scored.factors *= 400
    bias = np.full(3, scores.BIAS, np.float32)
    weights = np.empty(320, np.float32)
    part = scored.words, scored.factors, bias, np.float32(0)
    scores.importance(0, 300, *part, scored.store.table, weights)
    found = scored.found()
    assert np.isfinite(weights[:300]).all() and (weights[:300] >= 0).all()
    assert found.max() > 100 and weights[found.max(0).argmax()] >= 2.0**100


@pytest.mark.parametrize("case", CASES)
def test_the_papers_query_is_the_sum_of_all_heads(case):
    _, basis, _, decode = make_store(case, 0)
    q_nope = np.zeros((3 * case.n_kv, case.width), np.float32)
    rng = np.random.default_rng(0)
    q_nope[:, : case.d] = rng.standard_normal((len(q_nope), case.d))
    latents = rng.standard_normal((20, case.score_rank))
    expected = queries.summed_ref(q_nope[:, : case.d], latents, decode[:, : case.score_rank])
    summed = queries.summed_query(q_nope, basis, case.score_rank)
    np.testing.assert_allclose(latents @ summed, expected, atol=1e-3)
    words = np.empty((1, latent.words_of(case.score_rank) + 1, 16), np.int32)
    factors = np.empty((1, 16), np.float32)
    queries.summed_queries(q_nope, basis, case.score_rank, words, factors)
    rounded = words[0, :-1, 0].copy().view(np.int8)[: case.score_rank] * factors[0, 0]
    assert np.abs(rounded - summed).max() <= 0.51 * factors[0, 0]
