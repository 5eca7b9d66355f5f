"""FASA's kernels against plain numpy: appending, scores by chunks, selection, attention."""

import numpy as np
import pytest

from sparsekv_cli.cpu.attention.decode import attend_rows_ref
from sparsekv_cli.cpu.fasa import attend, chunks
from sparsekv_cli.cpu.fasa.chunks import BLOCK
from sparsekv_cli.cpu.fasa.split import split_keys
from sparsekv_cli.cpu.fasa.state import FASAState
from sparsekv_cli.cpu.fasa.step import append_split_row, fasa_step, run_thread
from sparsekv_cli.cpu.vector.run import KernelStep

SIZES = [1, 15, 16, 17, 63, 64, 65, 257, 1100]
# query heads, kv heads, d, dominant dims: GQA groups of 1, 3, 4, 5 and 8; whole and partial vectors
GEOMETRIES = [
    (2, 2, 64, 16), (9, 3, 64, 16), (8, 2, 80, 20), (5, 1, 64, 2), (8, 1, 128, 64), (4, 4, 64, 64),
]  # fmt: skip


def padded(d: int) -> int:
    return -(-d // BLOCK) * BLOCK


def permutations(n_kv: int, d: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(d) for _ in range(n_kv)]).astype(np.int32)


class Split:
    """Random K and V of a layer in both forms, with room behind row n that holds NaN."""

    def __init__(self, n_kv: int, d: int, n_dom: int, n: int, room: int = 40) -> None:
        rng = np.random.default_rng(n)
        self.n, self.n_dom, self.dims = n, n_dom, permutations(n_kv, d)
        self.k = np.zeros((n_kv, n + room, padded(d)), np.float16)
        self.k[..., :d] = rng.standard_normal((n_kv, n + room, d))
        self.v = rng.standard_normal((n_kv, n + room, padded(d))).astype(np.float16)
        nan = np.float16("nan").view(np.uint16)
        self.dom = np.full((n_kv, -(-(n + room) // BLOCK), n_dom, BLOCK), nan, np.uint16)
        self.rest = np.full((n_kv, n + room, padded(d - n_dom)), nan, np.uint16)
        split_keys(self.k.view(np.uint16), n, self.dims, self.dom, self.rest)


# --- storage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_head", "n_kv", "d", "n_dom"), GEOMETRIES)
def test_appended_rows_are_what_a_split_of_them_gives(n_head, n_kv, d, n_dom):
    whole = Split(n_kv, d, n_dom, 50)
    split = Split(n_kv, d, n_dom, 50)
    k_new = np.zeros((50, n_kv, padded(d)), np.float32)
    k_new[..., :d] = np.random.default_rng(1).standard_normal((50, n_kv, d))
    v_new = (k_new[..., ::-1] + 0.1).astype(np.float32)
    split.dom[:] = split.rest[:] = 0x7E00
    for i in range(50):
        append_split_row(
            k_new[i], v_new[i], i, split.dims, split.dom, split.rest, split.v.view(np.uint16)
        )
    whole.k[:, :50] = k_new.swapaxes(0, 1)
    split_keys(whole.k.view(np.uint16), 50, whole.dims, whole.dom, whole.rest)
    tokens = [s.dom.swapaxes(2, 3).reshape(n_kv, -1, n_dom)[:, :50] for s in (split, whole)]
    np.testing.assert_array_equal(*tokens)
    np.testing.assert_array_equal(split.rest[:, :50], whole.rest[:, :50])
    np.testing.assert_array_equal(split.v[:, :50], v_new.astype(np.float16).swapaxes(0, 1))
    np.testing.assert_array_equal(split.v[:, 50:], whole.v[:, 50:])


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("n_split", [1, 3])
@pytest.mark.parametrize(("n_head", "n_kv", "d", "n_dom"), GEOMETRIES)
def test_score_pieces(n_head, n_kv, d, n_dom, n, n_split):
    """The best of each block; the scores behind it to the same bits, whatever the tile."""
    layer = Split(n_kv, d, n_dom, padded(n))
    q = np.random.default_rng(2).standard_normal((n_head, n_dom)).astype(np.float32)
    n_block = -(-n // BLOCK)
    best = np.zeros((n_head, n_block), np.float32)
    chunks.score_pieces(np.zeros(1, np.int64), q, layer.dom, n_split, best)
    expected = chunks.score_pieces_ref(q, layer.dom.view(np.float16))[:, : BLOCK * n_block]
    blocks = expected.reshape(n_head, n_block, BLOCK)
    np.testing.assert_allclose(best, blocks.max(2), atol=1e-4)
    group = n_head // n_kv
    for h in range(n_head):
        for listed in (np.arange(n_block), np.arange(n_block)[::-3]):
            scores = chunks.scores_of(q[h], layer.dom[h // group], listed.astype(np.int32))
            scores = scores.reshape(len(listed), BLOCK)
            np.testing.assert_allclose(scores, blocks[h, listed], atol=1e-4)
            np.testing.assert_array_equal(scores.max(1), best[h, listed])


# --- selection ------------------------------------------------------------------------------------


class Head:
    """A query and keys of one dim whose scores are given; those behind them are the largest."""

    def __init__(self, scores: np.ndarray) -> None:
        wide = np.full(padded(len(scores)), np.float16(6e4))
        wide[: len(scores)] = scores
        self.scores = wide.astype(np.float32)
        self.q = np.ones(1, np.float32)
        self.dom = wide.reshape(-1, 1, BLOCK).view(np.uint16)
        self.best = self.scores.reshape(-1, BLOCK).max(1)

    def choose(self, n: int, n_sinks: int, n_recent: int, k: int) -> np.ndarray:
        rows, scores = np.full(k, -7, np.int32), np.full(k, np.nan, np.float32)
        chunks.choose_rows(self.q, self.dom, self.best, n, n_sinks, n_recent, rows, scores)
        np.testing.assert_array_equal(scores, self.scores[rows])
        return rows


@pytest.mark.parametrize(
    ("n", "n_sinks", "n_recent", "k"),
    [
        (2, 0, 0, 1), (2, 0, 1, 1), (6, 1, 1, 2), (16, 0, 0, 15), (16, 4, 8, 16), (17, 4, 8, 16),
        (33, 4, 16, 20), (33, 4, 16, 33), (48, 15, 17, 33), (48, 16, 16, 40), (64, 4, 16, 63),
        (64, 0, 0, 64), (65, 4, 16, 64), (65, 0, 0, 1), (257, 4, 16, 256), (700, 4, 16, 21),
        (5000, 4, 16, 256), (5000, 0, 0, 256), (5000, 4, 16, 4000), (5000, 40, 50, 100),
    ],
)  # fmt: skip
@pytest.mark.parametrize("values", [3, 1000])
def test_choose_rows(n, n_sinks, n_recent, k, values):
    rng = np.random.default_rng(n + k)
    for peaked in (False, True):
        scores = rng.integers(-values, values, n)
        if peaked:  # what is best lies close together, in few blocks
            scores[n // 3 : n // 3 + 40] += values
        rows = Head(scores).choose(n, n_sinks, n_recent, k)
        expected = chunks.choose_rows_ref(scores, n, n_sinks, n_recent, k)
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("bits", [0x7E00, 0xFE00])
def test_choose_rows_of_nan_stays_inside(bits):
    head = Head(np.full(100, bits, np.uint16).view(np.float16))
    rows, scores = np.full(30, -7, np.int32), np.zeros(30, np.float32)
    chunks.choose_rows(head.q, head.dom, head.best, 100, 4, 8, rows, scores)
    assert ((rows >= 0) & (rows < 100)).all()


def test_count_distinct():
    rows = np.array([[0, 1, 2], [2, 3, 4], [0, 1, 2], [9, 8, 7]], np.int32)
    assert chunks.count_distinct(rows, 1, 10) == 12
    assert chunks.count_distinct(rows, 2, 10) == 5 + 6
    assert chunks.count_distinct(rows, 4, 10) == 8


# --- attention, and the step in one ---------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("n_head", "n_kv", "d", "n_dom"), GEOMETRIES)
def test_attend_split_rows(n_head, n_kv, d, n_dom, n):
    split = Split(n_kv, d, n_dom, n)
    rng = np.random.default_rng(3)
    q, scale, order = rng.standard_normal(d).astype(np.float32), np.float32(0.2), split.dims[0]
    q_rest = np.zeros(padded(d - n_dom), np.float32)
    q_rest[: d - n_dom] = q[order[n_dom:]]
    dom, rest = split.dom.view(np.float16), split.rest.view(np.float16)
    scores = split.k[0, :, order[:n_dom]].astype(np.float32).T @ q[order[:n_dom]]
    rows = np.sort(rng.permutation(n)[: max(1, n // 2)]).astype(np.int32)
    for softcap, sink in ((0, -np.inf), (3, -np.inf), (0, 2), (3, 50)):
        out = np.full(padded(d), np.nan, np.float32)
        softcap, sink = np.float32(softcap), np.float32(sink)
        attend.attend_split_rows(
            q_rest, split.rest[0], split.v.view(np.uint16)[0], rows, scores[rows], scale, softcap,
            sink, out,
        )  # fmt: skip
        expected = attend.attend_split_rows_ref(
            q, dom[0], rest[0, :, : d - n_dom], split.v[0], order, rows, scale, softcap, sink
        )
        np.testing.assert_allclose(out, expected, atol=1e-5)
        whole = attend_rows_ref(
            q[None], split.k[:1, :, :d], split.v[:1], [rows], scale, softcap, sink[None]
        )
        np.testing.assert_allclose(expected, whole[0], atol=1e-12)


@pytest.mark.parametrize("n", [2, 16, 17, 64, 65, 257, 1100])
@pytest.mark.parametrize(("n_fac", "n_threads"), [(40, 1), (40, 2), (10_000, 1)])
@pytest.mark.parametrize(("n_head", "n_kv", "d", "n_dom"), GEOMETRIES)
def test_fasa_step(n_head, n_kv, d, n_dom, n, n_fac, n_threads):
    """The last case attends to all rows, through the sparse path."""
    split = Split(n_kv, d, n_dom, n - 1)
    rng = np.random.default_rng(4)
    q, k_new = np.zeros((n_head, padded(d)), np.float32), np.zeros((n_kv, padded(d)), np.float32)
    q[:, :d], k_new[:, :d] = rng.standard_normal((n_head, d)), rng.standard_normal((n_kv, d))
    v_new = rng.standard_normal((n_kv, padded(d))).astype(np.float32)
    k = min(n, n_fac)
    n_recent = min(16, max(1, k // 2))
    n_sinks = min(4, k - n_recent)
    rows, out = np.full((n_head, k), -7, np.int32), np.full((n_head, padded(d)), np.nan, np.float32)
    softcap, has_sinks = (0, False) if n % 2 else (1.5, True)
    sinks = np.linspace(-3, 9, n_head if has_sinks else 0, dtype=np.float32)
    new = (np.ascontiguousarray(x[:, None]) for x in (q, k_new, v_new))
    numbers = {"n": n, "n_sinks": n_sinks, "n_recent": n_recent, "n_threads": n_threads}
    run_step(
        split, *new, rows, out, scale=d**-0.5, softcap=softcap, sinks=sinks if has_sinks else None,
        **numbers,
    )  # fmt: skip
    keys, values = split.k[:, :n].copy(), split.v[:, :n]
    keys[:, n - 1] = k_new
    np.testing.assert_array_equal(values[:, n - 1], v_new.astype(np.float16))
    group = n_head // n_kv
    for h in range(n_head):
        order = split.dims[h // group, :n_dom]
        scores = keys[h // group][:, order].astype(np.float64) @ q[h, order]
        expected = chunks.choose_rows_ref(scores, n, n_sinks, n_recent, k)
        np.testing.assert_array_equal(rows[h], expected)
    expected = attend_rows_ref(
        q, keys, values, list(rows), d**-0.5, softcap, sinks if has_sinks else None
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def run_step(split: Split, q, k, v, rows, out, **others) -> None:
    """Runs ``fasa_step``. others: further fields of FASAState."""
    state = FASAState(
        dims=split.dims, dom=split.dom, rest=split.rest, values=split.v.view(np.uint16), q=q, k=k,
        v=v, rows=rows, out=out, **others,
    )  # fmt: skip
    fasa_step(KernelStep(state, run_thread).at)


def test_huge_scores_stay_finite():
    split = Split(1, 64, 16, 300)
    split.k[0, 100, :64] = 600
    split_keys(split.k.view(np.uint16), 300, split.dims, split.dom, split.rest)
    q = np.full((2, 64), 300, np.float32)
    rows, out = np.zeros((2, 32), np.int32), np.zeros((2, 64), np.float32)
    none = np.zeros((1, 1, 64), np.float32)
    run_step(
        split, q[:, None], none, none, rows, out, n=301, n_sinks=4, n_recent=16, n_threads=1,
        scale=1.0,
    )  # fmt: skip
    np.testing.assert_allclose(out, np.tile(split.v[0, 100], (2, 1)).astype(np.float32), atol=1e-6)
