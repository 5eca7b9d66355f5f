"""A prefill's products in bf16 against gguf's own dequantisation."""

import numpy as np
import pytest
from quantized_weights import random_rows

from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.layer import matmul_bf16 as kernels
from sparsekv_cli.cpu.weights.dot import dequantize
from sparsekv_cli.cpu.weights.formats import FORMATS

pytestmark = pytest.mark.skipif(not bf16.is_available(), reason="this CPU has no bf16 products")


def random_inputs(n_rows: int, n_columns: int) -> np.ndarray:
    """bf16 (n_rows, n_columns)."""
    x = np.random.default_rng(5).standard_normal((n_rows, n_columns)).astype(np.float32)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def products(matrices, x: np.ndarray, n_threads: int = 2) -> np.ndarray:
    """f32 (T, all rows) of (name, uint8 (rows, row bytes)) and x bf16 (T, n)."""
    table = kernels.product_table([(FORMATS[name].code, w) for name, w in matrices])
    out = np.full((len(x), sum(len(w) for _, w in matrices)), 0x7FC0, np.uint16)
    kernels.multiply(table, np.array([0, len(x)]), np.arange(len(x)), x, out, n_threads)
    return as_f32(out)


def rounded(x: np.ndarray) -> np.ndarray:
    """f32 as the bf16 next to it, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).view(np.float32)


def assert_right(matrices, x: np.ndarray, found: np.ndarray) -> None:
    """Of weights rounded to bf16 the products are exact, but for sums in f32 and 8 bits at last."""
    dense = np.concatenate([dequantize(FORMATS[name].code, w, x.shape[1]) for name, w in matrices])
    w, rows = rounded(dense).astype(np.float64), as_f32(x).astype(np.float64)
    expected, size = rows @ w.T, np.abs(rows) @ np.abs(w).T
    assert (np.abs(found - expected) <= 2**-8 * np.abs(expected) + 1e-5 * size).all()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name):
    matrix = [(name, random_rows(name, 40, 768))]
    x = random_inputs(70, 768)
    assert_right(matrix, x, products(matrix, x))


@pytest.mark.parametrize("n_columns", [32, 64, 288, 320, 576, 608])
@pytest.mark.parametrize("n_rows", [1, 31, 64, 200])
@pytest.mark.parametrize("n_inputs", [1, 32, 33])
def test_sizes(n_columns, n_rows, n_inputs):
    """Blocks of columns, panels and tiles that are whole and that are not."""
    matrix = [("Q4_1", random_rows("Q4_1", n_rows, n_columns))]
    x = random_inputs(n_inputs, n_columns)
    assert_right(matrix, x, products(matrix, x))


@pytest.mark.parametrize("n_columns", [16, 40, 300])
def test_plain_floats_of_any_width(n_columns):
    matrix = [("F32", random_rows("F32", 50, n_columns))]
    x = random_inputs(40, n_columns)
    assert_right(matrix, x, products(matrix, x))


def test_more_rows_than_a_task_has_tiles():
    matrix = [("Q8_0", random_rows("Q8_0", 70, 96))]
    x = random_inputs(kernels.TASK_TILES * kernels.ROWS + 5, 96)
    assert_right(matrix, x, products(matrix, x))


def test_stacked_matrices_and_any_number_of_threads():
    """Panels over the edge between two matrices of different formats, and several panels a task."""
    sizes = (("Q4_K", 100), ("Q6_K", 30), ("Q8_0", 5), ("Q4_0", 600))
    matrices = [(name, random_rows(name, n, 512)) for name, n in sizes]
    x = random_inputs(37, 512)
    found = products(matrices, x, 1)
    assert_right(matrices, x, found)
    for n_threads in (2, 3, 7):
        np.testing.assert_array_equal(products(matrices, x, n_threads), found)


def test_a_row_does_not_depend_on_the_others():
    matrix = [("Q4_0", random_rows("Q4_0", 48, 320))]
    x = random_inputs(90, 320)
    found = products(matrix, x)
    np.testing.assert_array_equal(products(matrix, x[50:60]), found[50:60])
