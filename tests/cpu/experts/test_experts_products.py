"""A prefill's products with experts: each pair has the bits of its expert alone."""

import numpy as np
import pytest
from quantized_weights import random_rows

from sparsekv_cli.cpu.experts import routing
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.layer import matmul_bf16 as products_bf16
from sparsekv_cli.cpu.layer import matmul_int8 as products
from sparsekv_cli.cpu.layer import tiles_int8
from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.models.matmul import FewRowsProducts
from sparsekv_cli.models.weights import Linear

needs_bytes = pytest.mark.skipif(not tiles_int8.is_available(), reason="no byte products (AVX2)")
needs_bf16 = pytest.mark.skipif(not bf16.is_available(), reason="this CPU has no bf16 products")
N_EXPERT = 5


def grouped(n_rows: int, n_used: int, n_expert: int = N_EXPERT) -> tuple[np.ndarray, np.ndarray]:
    """offsets and rows of experts of which the second is never chosen."""
    rng = np.random.default_rng(n_rows)
    allowed = np.delete(np.arange(n_expert), 1)
    chosen = np.stack([rng.permutation(allowed)[:n_used] for _ in range(n_rows)])
    offsets, rows, _ = routing.group_ref(chosen, n_expert)
    return offsets, rows


def everything(n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """offsets and rows of one expert that takes all rows."""
    return np.array([0, n_rows]), np.arange(n_rows)


def multiplied(matrices, offsets, rows, x, n_threads=2):
    table = products.product_table(matrices, len(offsets) - 1)
    out = np.full((len(rows), sum(len(w) for _, w in matrices) // (len(offsets) - 1)), 9, x.dtype)
    products.multiply(table, offsets, rows, x, out, n_threads)
    return out


@needs_bytes
@pytest.mark.parametrize("names", [("Q4_K", "Q4_K"), ("Q6_K",), ("Q4_0", "Q5_1")])
@pytest.mark.parametrize(("n_rows", "n_used"), [(1, 2), (7, 3), (150, 4)])
@pytest.mark.parametrize("size", [32, 37])
def test_each_pair_has_the_bits_of_its_expert_alone(names, n_rows, n_used, size):
    n = 768
    matrices = [
        (FORMATS[name].code, random_rows(name, N_EXPERT * size, n, i))
        for i, name in enumerate(names)
    ]
    x = np.random.default_rng(0).standard_normal((n_rows, n)).astype(np.float32)
    offsets, rows = grouped(n_rows, n_used)
    found = multiplied(matrices, offsets, rows, x)
    for e in range(N_EXPERT):
        first, last = offsets[e : e + 2]
        if first < last:
            table = products.product_table(
                [(code, w[e * size : (e + 1) * size]) for code, w in matrices]
            )
            alone = np.empty((last - first, len(names) * size), np.float32)
            products.multiply(table, *everything(last - first), x[rows[first:last]], alone, 1)
            np.testing.assert_array_equal(found[first:last], alone)
    expected = products.multiply_ref(matrices, offsets, rows, x)
    assert np.sum((found - expected) ** 2) < 1e-4 * np.sum(expected.astype(np.float64) ** 2)


@needs_bytes
@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_bits_do_not_depend_on_threads(dtype):
    matrices = [(FORMATS["Q4_K"].code, random_rows("Q4_K", N_EXPERT * 40, 256))]
    x = np.random.default_rng(0).standard_normal((90, 256)).astype(np.float32)
    x = x if dtype == np.float32 else (x.view(np.uint32) >> 16).astype(np.uint16)
    offsets, rows = grouped(90, 3)
    first, second = (multiplied(matrices, offsets, rows, x, n) for n in (1, 3))
    np.testing.assert_array_equal(first, second)


@needs_bytes
def test_an_expert_of_more_inputs_than_a_task():
    """Its inputs are several tasks, the last of which is not full."""
    n_rows = 2 * products.MOST_TILES * tiles_int8.TILE + 5
    matrices = [(FORMATS["Q4_0"].code, random_rows("Q4_0", 2 * 32, 32))]
    x = np.random.default_rng(0).standard_normal((n_rows, 32)).astype(np.float32)
    offsets, rows = np.array([0, n_rows - 3, n_rows]), np.arange(n_rows)
    found = multiplied(matrices, offsets, rows, x)
    expected = products.multiply_ref(matrices, offsets, rows, x)
    assert np.sum((found - expected) ** 2) < 1e-4 * np.sum(expected.astype(np.float64) ** 2)


@needs_bf16
@pytest.mark.parametrize("names", [("Q4_K", "Q6_K"), ("F32",), ("Q4_0", "Q5_1")])
@pytest.mark.parametrize(("n_rows", "n_used"), [(1, 2), (7, 3), (150, 4)])
@pytest.mark.parametrize(("size", "n"), [(32, 512), (37, 256)])
def test_pairs_in_bf16_have_the_bits_of_their_expert_alone(names, n_rows, n_used, size, n):
    matrices = [
        (FORMATS[name].code, random_rows(name, N_EXPERT * size, n, i))
        for i, name in enumerate(names)
    ]
    x = np.random.default_rng(0).standard_normal((n_rows, n)).astype(np.float32)
    x = (x.view(np.uint32) >> 16).astype(np.uint16)
    offsets, rows = grouped(n_rows, n_used)
    table = products_bf16.product_table(matrices, N_EXPERT)
    for n_threads in (1, 3):
        found = np.full((len(rows), len(names) * size), 9, np.uint16)
        products_bf16.multiply(table, offsets, rows, x, found, n_threads)
        for e in range(N_EXPERT):
            first, last = offsets[e : e + 2]
            if first == last:
                continue
            own = [(code, w[e * size : (e + 1) * size]) for code, w in matrices]
            alone = np.empty((last - first, len(names) * size), np.uint16)
            products_bf16.multiply(
                products_bf16.product_table(own), *everything(last - first), x[rows[first:last]],
                alone, 1,
            )  # fmt: skip
            np.testing.assert_array_equal(found[first:last], alone)


@needs_bf16
@pytest.mark.parametrize("n", [32, 96, 608])
def test_bf16_of_columns_that_fill_no_unit(n):
    matrices = [(FORMATS["Q4_1"].code, random_rows("Q4_1", N_EXPERT * 48, n))]
    x = np.random.default_rng(0).standard_normal((40, n)).astype(np.float32)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    offsets, rows = grouped(40, 2)
    found = np.full((len(rows), 48), 9, np.uint16)
    table = products_bf16.product_table(matrices, N_EXPERT)
    products_bf16.multiply(table, offsets, rows, bits, found, 2)
    expected = products.multiply_ref(matrices, offsets, rows, as_f32(bits))
    assert np.sum((as_f32(found) - expected) ** 2) < 1e-4 * np.sum(expected.astype(float) ** 2)


@pytest.mark.parametrize("n_rows", [1, 16])
def test_few_pairs_in_f32(n_rows):
    n, sizes, names = 256, (37, 32), ("Q4_K", "F32")
    matrices = [
        (FORMATS[name].code, random_rows(name, N_EXPERT * size, n))
        for name, size in zip(names, sizes, strict=True)
    ]
    x = np.random.default_rng(0).standard_normal((n_rows, n)).astype(np.float32)
    offsets, rows = grouped(n_rows, 2)
    linears = [Linear(code, w, n, n_matrices=N_EXPERT) for code, w in matrices]
    found = FewRowsProducts(2).of_experts("gate_up", linears, rows, offsets)(x)
    expected = products.multiply_ref(matrices, offsets, rows, x)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
