"""Routing against its numpy reference: the choice, ties, no numbers; groups; weighted sums."""

import numpy as np
import pytest

from sparsekv_cli.cpu.experts import routing


def routed(
    logits: np.ndarray,
    n_used: int,
    normalised: bool,
    bias=routing.NO_BIAS,
    sigmoid: bool = False,
    groups=routing.ALL_GROUPS,
):
    chosen = np.full((len(logits), n_used), -9)
    weights = np.full((len(logits), n_used), np.nan, np.float32)
    routing.route_rows(logits.copy(), bias, sigmoid, normalised, groups, chosen, weights, 2)
    return chosen, weights


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("n_expert", "n_used"), [(1, 1), (4, 4), (64, 8), (129, 6)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_the_choice_and_its_weights(size, n_expert, n_used, normalised):
    logits = np.random.default_rng(n_expert).standard_normal((37, n_expert)).astype(np.float32)
    logits *= size
    chosen, weights = routed(logits, n_used, normalised)
    expected, expected_weights = routing.route_ref(logits, routing.NO_BIAS, n_used, normalised)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
    shares = np.take_along_axis(logits, chosen, 1), np.take_along_axis(logits, expected, 1)
    np.testing.assert_allclose(*shares, atol=1e-6 * size)  # the same but for ties by rounding
    if normalised:
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize("groups", [(4, 1), (4, 3), (12, 5), (2, 2)])
def test_only_the_best_groups_are_used(groups):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((37, 24)).astype(np.float32)
    bias = rng.standard_normal(24).astype(np.float32)
    chosen, weights = routed(logits, 5, True, bias, True, groups)
    expected, expected_weights = routing.route_ref(logits, bias, 5, True, True, groups)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
    of_group = chosen // (24 // groups[0])
    assert all(len(set(row)) <= groups[1] for row in of_group)


def test_equal_groups_are_used_in_their_order():
    chosen, _ = routed(np.zeros((2, 12), np.float32), 3, True, groups=(4, 1))
    np.testing.assert_array_equal(chosen, [[0, 1, 2]] * 2)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_bias_has_a_part_in_the_choice_alone(normalised, sigmoid):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((37, 24)).astype(np.float32)
    bias = rng.standard_normal(24).astype(np.float32)
    chosen, weights = routed(logits, 5, normalised, bias, sigmoid)
    expected, expected_weights = routing.route_ref(logits, bias, 5, normalised, sigmoid)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=1e-6)
    assert (expected != routing.route_ref(logits, 0 * bias, 5, normalised, sigmoid)[0]).any()


def test_of_equal_experts_the_first_is_chosen():
    logits = np.array([[0, 2, 1, 2, 1, 1]], np.float32)
    chosen, _ = routed(logits, 4, True)
    np.testing.assert_array_equal(chosen, [[1, 3, 2, 4]])
    np.testing.assert_array_equal(chosen, routing.route_ref(logits, routing.NO_BIAS, 4, True)[0])


def test_logits_of_the_largest_size_leave_a_weight():
    """The others' shares underflow to 0, and are still chosen in order."""
    logits = np.array([[-3e38, 3e38, -3e38]], np.float32)
    chosen, weights = routed(logits, 3, True)
    np.testing.assert_array_equal(chosen, [[1, 0, 2]])
    np.testing.assert_array_equal(weights, [[1, 0, 0]])


def test_no_numbers_choose_different_experts():
    """What a broken model computes; no address outside the weights comes of it."""
    logits = np.full((2, 6), np.nan, np.float32)
    logits[1, 2:] = 1
    chosen, _ = routed(logits, 4, True)
    for row in chosen:
        assert len(set(row)) == 4 and row.min() >= 0 and row.max() < 6


@pytest.mark.parametrize(("n_rows", "n_used", "n_expert"), [(1, 1, 1), (1, 8, 64), (100, 3, 5)])
def test_groups(n_rows, n_used, n_expert):
    rng = np.random.default_rng(n_rows)
    chosen = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(n_rows)])
    offsets, rows = np.full(n_expert + 1, -1), np.full(n_rows * n_used, -1)
    places = np.full(chosen.shape, -1)
    routing.group_rows(chosen, offsets, rows, places)
    for found, expected in zip(
        (offsets, rows, places), routing.group_ref(chosen, n_expert), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n_shared", [0, 1])
@pytest.mark.parametrize("is_gated", [False, True])
def test_weighted_sums(is_gated, n_shared):
    rng, n_rows, n_used, n = np.random.default_rng(0), 9, 3, 50
    results = rng.standard_normal((n_rows * n_used, n)).astype(np.float32)
    places = rng.permutation(len(results)).reshape(n_rows, n_used)
    weights = rng.random((n_rows, n_used)).astype(np.float32)
    shared = rng.standard_normal((n_rows * n_shared, n)).astype(np.float32)
    normed = rng.standard_normal((n_rows, n)).astype(np.float32)
    gate = rng.standard_normal(n * is_gated).astype(np.float32)
    expected = (results[places].astype(np.float64) * weights[..., None]).sum(1)
    if n_shared:
        sigmoid = 1 / (1 + np.exp(-(normed @ gate))) if is_gated else np.ones(n_rows)
        expected += sigmoid[:, None] * shared
    outs = [np.full((n_rows, n), np.nan, np.float32) for _ in range(2)]
    for out, n_threads in zip(outs, (1, 3), strict=True):
        routing.add_weighted(results, places, weights, shared, normed, gate, out, n_threads)
    np.testing.assert_allclose(outs[0], expected, atol=1e-5)
    np.testing.assert_array_equal(*outs)
    if not n_shared:
        return
    bits = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in (results, shared)]
    out = np.empty((n_rows, n), np.float32)
    routing.add_weighted(bits[0], places, weights, bits[1], normed, gate, out, 2)
    np.testing.assert_allclose(out, expected, atol=0.1)
