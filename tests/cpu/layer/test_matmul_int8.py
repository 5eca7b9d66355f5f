"""A prefill's integer products against gguf's own dequantisation, every format, awkward sizes."""

import numpy as np
import pytest
from quantized_weights import random_rows

from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.layer import matmul_int8 as products
from sparsekv_cli.cpu.layer import tiles_int8 as tiles
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.formats import FORMATS

pytestmark = pytest.mark.skipif(not tiles.is_available(), reason="needs byte products (AVX2)")

NAMES = [name for name, each in FORMATS.items() if products.can_multiply(each.code)]
LARGEST_QUANTS = {  # where the bytes are whose bits, all set, are the largest integers
    "Q4_0": slice(2, None), "Q4_1": slice(4, None), "Q5_0": slice(2, None), "Q5_1": slice(4, None),
    "Q2_K": slice(16, 80), "Q3_K": slice(0, 96), "Q4_K": slice(16, None), "Q5_K": slice(16, None),
    "Q6_K": slice(0, 192), "Q1_0": slice(2, None), "Q2_0": slice(2, None), "TQ2_0": slice(0, 64),
}  # fmt: skip
if vnni.is_available():
    LARGEST_QUANTS["Q8_0"] = slice(2, None)


def inputs(n_inputs: int, n_columns: int) -> np.ndarray:
    """f32 (T, n), blocks of very different size beside each other."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n_inputs, n_columns)).astype(np.float32)
    x *= np.repeat(rng.uniform(0.1, 10, (n_inputs, n_columns // 32)), 32, 1).astype(np.float32)
    return x


def rounded(x: np.ndarray) -> np.ndarray:
    """x as 8 bits hold it, in blocks of 32."""
    blocks = x.reshape(len(x), -1, 32)
    peak = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    return (np.rint(blocks * inverse) * (peak / np.float32(127))).reshape(x.shape)


def everything(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """offsets and rows of one expert that takes all rows."""
    return np.array([0, len(x)]), np.arange(len(x))


def multiply(matrices, x: np.ndarray, n_threads: int = 2) -> np.ndarray:
    table = products.product_table(matrices)
    out = np.full((len(x), sum(len(w) for _, w in matrices)), np.nan, np.float32)
    products.multiply(table, *everything(x), x, out, n_threads)
    return out


def assert_close(found: np.ndarray, w, x: np.ndarray) -> None:
    """f32 sums of products with the rounded inputs; and 8 bits' distance from those with x."""
    found = found.astype(np.float64)
    exact, expected = (products.multiply_ref(w, *everything(x), each) for each in (rounded(x), x))
    assert found.shape == expected.shape
    assert np.sum((found - exact) ** 2) < 1e-11 * np.sum(exact.astype(np.float64) ** 2)
    assert np.sum((found - expected) ** 2) < 1e-4 * np.sum(expected.astype(np.float64) ** 2)


def test_formats_whose_products_do_not_fit():
    too_large = set() if vnni.is_available() else {"Q8_0", "IQ4_NL", "IQ4_XS"}
    assert set(FORMATS) - set(NAMES) == {"F32", "F16", "BF16"} | too_large


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n_rows", "n_columns", "n_inputs"), [(16, 256, 6), (37, 2304, 7)])
def test_products_of_every_format(name, n_rows, n_columns, n_inputs):
    """Of rows that fill no group, of more columns than a panel has, of inputs that fill no tile."""
    w, x = [(FORMATS[name].code, random_rows(name, n_rows, n_columns))], inputs(n_inputs, n_columns)
    assert_close(multiply(w, x), w, x)


@pytest.mark.parametrize("name", LARGEST_QUANTS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums_do_not_overflow(name, sign):
    """Each integer at its largest, each input +-127."""
    code, size = FORMATS[name].code, FORMATS[name].n_bytes
    w = random_rows(name, 16, 512)
    w.reshape(-1, size)[:, LARGEST_QUANTS[name]] = 127 if name == "Q8_0" else 255
    x = np.full((6, 512), sign, np.float32)
    assert_close(multiply([(code, w)], x), [(code, w)], x)


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("n_columns", [32, 96, 608, 1184])
def test_columns_that_no_power_of_two_divides(name, n_columns):
    w, x = [(FORMATS[name].code, random_rows(name, 32, n_columns))], inputs(13, n_columns)
    assert_close(multiply(w, x), w, x)


@pytest.mark.parametrize("n_threads", [1, 2, 7])
@pytest.mark.parametrize("n_inputs", [1, 5, 12, products.MOST_TILES * tiles.TILE + 1])
def test_matrices_of_one_input_stand_side_by_side(n_threads, n_inputs):
    shapes = (("Q4_1", 48), ("Q6_K", 7), ("Q5_0", 80))
    w = [(FORMATS[name].code, random_rows(name, n_rows, 256)) for name, n_rows in shapes]
    x = inputs(n_inputs, 256)
    found = multiply(w, x, n_threads)
    assert_close(found, w, x)
    np.testing.assert_array_equal(found[:1], multiply(w, x[:1]))  # whatever the others are


def test_an_input_of_zeros_and_one_of_huge_values():
    w, x = [(FORMATS["Q4_1"].code, random_rows("Q4_1", 16, 64))], inputs(3, 64)
    x[0], x[1] = 0, x[1] * 1e30
    found = multiply(w, x)
    assert not found[0].any()
    for row, one in zip(found[1:], x[1:], strict=True):
        assert_close(row[None], w, one[None])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_inputs_and_results_in_bf16(name):
    """The same as of the same numbers in f32, rounded once."""
    w, x = [(FORMATS[name].code, random_rows(name, 37, 512))], inputs(7, 512)
    rows = as_type_of(np.empty(0, np.uint16), x)
    out = np.empty((7, 37), np.uint16)
    products.multiply(products.product_table(w), *everything(x), rows, out, 2)
    np.testing.assert_array_equal(out, as_type_of(out, multiply(w, as_f32(rows))))
