"""Products with quantised matrices against gguf's own dequantisation."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from quantized_weights import random_rows
from sweeps import sweep

from sparsekv_cli.kernels.weights import dot, fields, matvec
from sparsekv_cli.kernels.weights import packed as blocks
from sparsekv_cli.kernels.weights.dequantize import dequantize


def matrix(name, n_rows, n_columns, device):
    """A packed matrix, and its weights f32 (rows, columns) as gguf reads them."""
    rows = random_rows(name, n_rows, n_columns)
    weights = gguf_dequantize(rows.reshape(-1), GGMLQuantizationType[name])
    packed = blocks.repack(name, torch.from_numpy(rows).to(device), n_columns)
    return packed, weights.reshape(n_rows, n_columns)


def inputs(n_batch, n_columns):
    x = np.random.default_rng(1).standard_normal((n_batch, n_columns)).astype(np.float32)
    x[0] *= 1e6  # beyond f16
    return x


def assert_close(found, x, weights, limit):
    """Errors within ``limit`` of the product of the sizes, row by row."""
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    assert np.max(np.abs(found.cpu().numpy() - expected) / sizes) < limit


@pytest.mark.parametrize("name", sweep(blocks.PACKABLE))
@pytest.mark.parametrize(("n_batch", "n_rows", "n_columns"), [(1, 6, 768), (2, 5, 1536)])
def test_matvec(name, n_batch, n_rows, n_columns, device):
    packed, weights = matrix(name, n_rows, n_columns, device)
    x = inputs(n_batch, n_columns)
    out = torch.full((n_batch, n_rows), torch.nan, device=device)
    found = dot.multiply(packed, torch.from_numpy(x).to(device), out)
    assert found is out
    assert_close(found, x, weights, 4e-6)


@pytest.mark.parametrize("name", sweep(blocks.PACKABLE))
@pytest.mark.parametrize(("n_batch", "n_rows", "n_columns"), [(3, 70, 256), (16, 33, 512)])
def test_matvec_of_many_vectors(name, n_batch, n_rows, n_columns, device):
    packed, weights = matrix(name, n_rows, n_columns, device)
    x = inputs(n_batch, n_columns)
    for joined in (False, True):
        found = dot.multiply(packed, torch.from_numpy(x).to(device), joined=joined)
        assert_close(found, x, weights, 2e-4)


@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("Q6_K", "Q4_0"), ("Q5_1", "Q5_0")])
@pytest.mark.parametrize(("n_batch", "n_rows"), [(1, (70, 9)), (2, (6, 90)), (5, (70, 33))])
def test_two_matrices_at_once(names, n_batch, n_rows, device, monkeypatch):
    """Few vectors give the bits of two launches. What lies beside the result stays as it is."""
    monkeypatch.setattr(matvec, "PROGRAMS", 8)
    pairs = [matrix(name, rows, 512, device) for name, rows in zip(names, n_rows, strict=True)]
    (first, w_1), (second, w_2) = pairs
    x, n_all = inputs(n_batch, 512), sum(n_rows)
    wide = torch.full((n_batch, n_all + 5), torch.nan, device=device)
    given = torch.from_numpy(x).to(device)
    found = dot.multiply_pair(first, second, given, wide[:, :n_all])
    assert_close(found, x, np.concatenate([w_1, w_2]), 4e-6 if n_batch < 3 else 2e-4)
    assert wide[:, n_all:].isnan().all()
    if n_batch > 2:
        joined = dot.multiply_pair(first, second, given, joined=True)
        assert_close(joined, x, np.concatenate([w_1, w_2]), 2e-4)
    else:
        apart = [dot.multiply(each, given) for each in (first, second)]
        assert torch.equal(found, torch.cat(apart, 1))


@pytest.mark.parametrize("names", [("Q4_K", "Q8_0"), ("F16", "Q4_0"), ("F16", "F16")])
def test_pairs_that_do_not_go_together_are_refused(names, device):
    first, second = (matrix(name, 4, 256, device)[0] for name in names)
    assert not dot.can_pair(first, second)
    with pytest.raises(ValueError, match="do not go together"):
        dot.multiply_pair(first, second, torch.zeros(1, 256, device=device))


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "F16"])
@pytest.mark.parametrize("n_columns", [32, 96, 576])
@pytest.mark.parametrize("n_batch", [1, 6])
def test_awkward_widths(name, n_columns, n_batch, device):
    packed, weights = matrix(name, 9, n_columns, device)
    x = inputs(n_batch, n_columns)
    wide = torch.full((n_batch, 16), torch.nan, device=device)
    found = dot.multiply(packed, torch.from_numpy(x).to(device), wide[:, :9])
    assert_close(found, x, weights, 2e-4)
    assert wide[:, 9:].isnan().all()


@pytest.mark.parametrize("n_batch", [2, 7])
def test_narrow_inputs(n_batch, device):
    packed, weights = matrix("Q4_K", 17, 512, device)
    x = torch.from_numpy(inputs(n_batch, 512)).bfloat16()
    found = dot.multiply(packed, x.to(device))
    assert_close(found, x.float().numpy(), weights, 2e-4)


@pytest.mark.parametrize("name", sweep(blocks.PACKABLE))
def test_dequantize_rounds_once(name, device):
    packed, weights = matrix(name, 7, 768, device)
    for dtype in (torch.float32, torch.float16):
        found = dequantize(packed, dtype)
        assert torch.equal(found.cpu(), torch.from_numpy(weights).to(dtype))
    found = dequantize(packed).cpu()  # Triton's interpreter cuts bf16 off
    torch.testing.assert_close(found, torch.from_numpy(weights).bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("n_batch", [1, 3])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damaged_inputs_are_no_numbers_behind_it(damage, n_batch, device):
    """Rounding to integers must not hide them; other vectors are as they are."""
    packed, weights = matrix("Q4_K", 9, 256, device)
    x = np.ones((n_batch, 256), np.float32)
    x[0, 17] = damage
    found = dot.multiply(packed, torch.from_numpy(x).to(device)).cpu()
    assert not found[0].isfinite().any()
    if n_batch > 1:
        assert_close(found[1:], x[1:], weights, 2e-4)


@triton.jit
def _dot4_kernel(a_ptr, b_ptr, out_ptr):
    at = tl.arange(0, 64)
    out = fields.dot4(tl.load(a_ptr + at), tl.load(b_ptr + at), tl.full([64], 5, tl.int32))
    tl.store(out_ptr + at, out)


def test_four_bytes_at_once(device):
    """The instruction (on a GPU) and what stands for it: unsigned times signed bytes."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (64, 4), np.uint8), rng.integers(-128, 128, (64, 4), np.int8)
    words = [torch.from_numpy(x.view(np.int32)[:, 0].copy()).to(device) for x in (a, b)]
    out = torch.empty_like(words[0])
    _dot4_kernel[(1,)](*words, out)
    assert out.tolist() == (5 + (a.astype(int) * b).sum(1)).tolist()


def test_wrong_arguments_are_refused(device):
    packed, _ = matrix("Q4_0", 4, 64, device)
    with pytest.raises(ValueError, match="x has shape"):
        dot.multiply(packed, torch.zeros(1, 32, device=device))
    with pytest.raises(ValueError, match="x has 17 rows"):
        dot.multiply(packed, torch.zeros(17, 64, device=device))
    with pytest.raises(ValueError, match="out is"):
        out = torch.empty(1, 4, dtype=torch.float16, device=device)
        dot.multiply(packed, torch.zeros(1, 64, device=device), out)
