"""Routing, the products of chosen matrices, and the sum over experts, against numpy and torch."""

import numpy as np
import pytest
import torch
from tiny_models import random_rows, tensor_rng

from sparsekv_cli.cpu.experts.routing import route_ref
from sparsekv_cli.kernels.experts.routing import Routing, Shared, add_biases, mix, route
from sparsekv_cli.kernels.weights import dot, matvec, packed

NONE = np.empty(0, np.float32)


def f32(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def on(device, x):
    return None if x is None else torch.from_numpy(x).to(device)


@pytest.mark.parametrize(("n_expert", "n_used"), [(8, 2), (60, 4), (128, 8), (3, 3), (1, 1)])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_route(n_expert, n_used, sigmoid, normalised, has_bias, device):
    logits, bias = 3 * f32(0, 5, n_expert + 1), f32(1, n_expert) if has_bias else None
    logits[0, : n_expert // 2 + 1] = 2.0  # several are equal: the first is chosen
    added, scales = f32(2, n_expert), 1 + np.abs(f32(3, n_expert))
    routing = Routing(
        n_used, sigmoid, normalised, on(device, added), on(device, bias), on(device, scales)
    )
    chosen, weights = route(on(device, logits)[:, :n_expert], routing)
    given = NONE if bias is None else bias
    expected = route_ref(logits[:, :n_expert] + added, given, n_used, normalised, sigmoid)
    np.testing.assert_array_equal(chosen.cpu(), expected[0])
    np.testing.assert_allclose(weights.cpu(), expected[1] * scales[expected[0]], rtol=1e-5)


@pytest.mark.parametrize(("n_expert", "n_group", "n_open", "n_used"),
                         [(16, 4, 2, 4), (24, 8, 3, 9), (20, 4, 1, 5), (8, 2, 2, 3)])  # fmt: skip
@pytest.mark.parametrize("sigmoid", [False, True])
def test_groups(n_expert, n_group, n_open, n_used, sigmoid, device):
    logits = f32(4, 40, n_expert)
    routing = Routing(n_used, sigmoid, n_group=n_group, n_group_used=n_open)
    chosen, weights = route(on(device, logits), routing)
    expected = route_ref(logits, NONE, n_used, True, sigmoid, (n_group, n_open))
    np.testing.assert_array_equal(chosen.cpu(), expected[0])
    np.testing.assert_allclose(weights.cpu(), expected[1], rtol=1e-5)


def test_products_that_are_not_finite_choose_some_expert(device):
    for value in (np.nan, np.inf, -np.inf):
        logits = torch.full((3, 6), value, device=device)
        chosen, _ = route(logits, Routing(2))
        assert ((chosen >= 0) & (chosen < 6)).all()


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "Q5_1", "BF16", "F32"])
@pytest.mark.parametrize(("n_vector", "n_choice"), [(1, 1), (1, 3), (4, 2), (6, 1)])
def test_chosen_products(name, n_vector, n_choice, device):
    """Bit for bit what a matrix alone gives to a vector alone."""
    n_matrix, n_rows, n_columns = 5, 37, 512
    data = random_rows(tensor_rng(0, name), name, n_matrix * n_rows, n_columns, 0.05)
    data = torch.from_numpy(data.view(np.uint8).reshape(n_matrix * n_rows, -1)).to(device)
    w = packed.repack(name, data, n_columns)
    x, rng = on(device, f32(1, n_vector, n_columns)), np.random.default_rng(2)
    chosen = rng.integers(0, n_matrix, n_vector * n_choice).astype(np.int32)
    wide = torch.full((len(chosen), n_rows + 3), torch.nan, device=device)
    choice = matvec.PairChoice(on(device, chosen), n_choice, n_matrix)
    found = dot.multiply_chosen(w, x, choice, wide[:, :n_rows])
    for pair, matrix in enumerate(chosen):
        alone = packed.repack(name, data[matrix * n_rows : (matrix + 1) * n_rows], n_columns)
        vector = pair // n_choice
        expected = dot.multiply(alone, x[vector : vector + 1])
        torch.testing.assert_close(found[pair : pair + 1], expected, rtol=0, atol=0)
    assert wide[:, n_rows:].isnan().all()


@pytest.mark.parametrize("n", [64, 700])
@pytest.mark.parametrize("has_places", [False, True])
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mix(n, has_places, shared, dtype, device):
    n_rows, n_used, n_expert = 5, 3, 7
    results, weights = torch.from_numpy(f32(0, 15, n)).to(dtype), f32(1, n_rows, n_used)
    chosen = np.random.default_rng(2).integers(0, n_expert, (n_rows, n_used)).astype(np.int32)
    places = np.random.default_rng(3).permutation(15).astype(np.int32).reshape(n_rows, n_used)
    bias, of_all, gates = f32(4, n_expert, n), torch.from_numpy(f32(5, n_rows, n)), f32(6, n_rows)
    at = places if has_places else np.arange(15).reshape(n_rows, n_used)
    each = results.float().numpy()[at] + bias[chosen]
    expected = (weights[..., None] * each).sum(1)
    if shared != "none":
        factor = 1 / (1 + np.exp(-gates)) if shared == "gated" else np.ones(n_rows)
        expected = expected + factor[:, None] * of_all.to(dtype).float().numpy()
    given = Shared(of_all.to(device, dtype), on(device, gates) if shared == "gated" else None)
    found = mix(
        results.to(device), on(device, chosen), on(device, weights),
        places=on(device, places) if has_places else None, bias=on(device, bias),
        shared=None if shared == "none" else given,
    )  # fmt: skip
    np.testing.assert_allclose(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_biases(device):
    rows, bias, chosen = f32(0, 6, 700), f32(1, 4, 700), np.array([3, 0, 1, 1, 2, 3], np.int32)
    found = on(device, rows.copy())
    add_biases(found, on(device, chosen), on(device, bias))
    np.testing.assert_array_equal(found.cpu(), rows + bias[chosen])


def test_wrong_arguments_are_refused(device):
    with pytest.raises(ValueError, match="9 of 8 experts"):
        route(torch.zeros(2, 8, device=device), Routing(9))
    with pytest.raises(ValueError, match="bias has shape"):
        route(torch.zeros(2, 8, device=device), Routing(2, bias=torch.zeros(7, device=device)))
    w = packed.repack("F32", torch.zeros(6, 32, dtype=torch.uint8, device=device), 8)
    choice = matvec.PairChoice(torch.zeros(3, dtype=torch.int32, device=device), 2, 3)
    with pytest.raises(ValueError, match="3 pairs of 2 vectors"):
        dot.multiply_chosen(w, torch.zeros(2, 8, device=device), choice)
