"""The ranking of frequency chunks against docs/methods.md, taken literally."""

import numpy as np
import pytest

from sparsekv_cli.cpu.fasa import dominance


@pytest.mark.parametrize("n", [1, 2, 63, 256, 700, 4096])
def test_query_positions(n):
    positions = dominance.query_positions(n, 16)
    assert positions == sorted(set(positions)) and n // 4 <= positions[0]
    assert positions[-1] < n and len(positions) == min(16, len({*range(n // 4, n)}))


def judge_ref(q, position, k, n_chunk, top_k):
    """docs/methods.md step 2, literally: q (H, d), k (G, n, d), f64."""
    n_head, group = len(q), len(q) // len(k)
    var, ca = np.zeros((n_head, n_chunk)), np.zeros((n_head, n_chunk))
    for h in range(n_head):
        keys = k[h // group, : position + 1]
        top = set(np.argsort(-(keys @ q[h]))[:top_k].tolist())
        for i in range(n_chunk):
            dims = [i, i + n_chunk]
            scores = keys[:, dims] @ q[h, dims]
            var[h, i] = np.mean((scores - scores.mean()) ** 2)
            ca[h, i] = len(top & set(np.argsort(-scores)[:top_k].tolist())) / len(top)
    return var, ca


@pytest.mark.parametrize(("n_head", "n_kv", "d", "n_rot"), [(9, 3, 64, 64), (8, 1, 80, 20)])
@pytest.mark.parametrize("position", [0, 7, 63, 64, 299])
def test_judge_chunks(n_head, n_kv, d, n_rot, position):
    rng = np.random.default_rng(position)
    q, k = rng.standard_normal((n_head, d)), rng.standard_normal((n_kv, 300, d)) + 3
    keys = k.astype(np.float32).swapaxes(1, 2)
    var, ca = dominance.judge_chunks(q.astype(np.float32), position, keys, n_rot // 2, 64)
    expected_var, expected_ca = judge_ref(q, position, k, n_rot // 2, 64)
    np.testing.assert_allclose(var, expected_var, atol=1e-3)
    np.testing.assert_allclose(ca, expected_ca, atol=1e-6)


def test_ranks_are_votes_of_equal_weight():
    score = np.array([[1, 2, 7, 0], [600, 400, 0, 0], [0, 0, 0, 0], [5, 5, 1, 9]], np.float32)
    rank = dominance.rank_chunks(score, 2)
    # (.1 + .6, .2 + .4, .7 + 0, 0): a tie goes to the lower chunk
    np.testing.assert_array_equal(rank, [[0, 2, 1, 3], [3, 0, 1, 2]])
    assert rank.dtype == np.uint8


@pytest.mark.parametrize("n_tip", [1, 3, 8])
def test_dims_of_the_dominant_chunks_come_first(n_tip):
    rank = np.stack([np.random.default_rng(g).permutation(8) for g in range(3)]).astype(np.uint8)
    dims = dominance.order_dims(rank, n_tip, 20)  # dims 16 to 19 are not rotated
    assert dims.dtype == np.int32
    np.testing.assert_array_equal(np.sort(dims, axis=1), np.tile(np.arange(20), (3, 1)))
    for g in range(3):
        assert set(dims[g, : 2 * n_tip].tolist()) == {*rank[g, :n_tip], *(rank[g, :n_tip] + 8)}
