"""Every weight format against gguf's own dequantisation, on random bytes with sane scales."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize as gguf_dequantize
from matrix_kernels import call_rows, matvec, quantize
from numba import njit, types
from quantized_weights import random_rows
from sweeps import sweep

from sparsekv_cli.cpu.jit.floats import as_type_of
from sparsekv_cli.cpu.weights import dot, integer, vnni
from sparsekv_cli.cpu.weights.block import IQ4_NL_VALUES, MXFP4_VALUES
from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.cpu.weights.grids import grid
from sparsekv_cli.cpu.weights.types import DECODABLE_TYPES


@pytest.mark.parametrize("name", FORMATS)
def test_table_equals_gguf_constants(name):
    format_ = FORMATS[name]
    assert GGMLQuantizationType[name] == format_.code
    n_elements, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    assert format_.n_elements * n_bytes == format_.n_bytes * n_elements


def test_every_type_that_a_file_may_have_has_its_record():
    assert {format_.type for format_ in FORMATS.values()} == DECODABLE_TYPES


SIGNED_GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def test_integers_lie_within_their_bounds():
    checked = set()
    for name, values in (
        ("IQ4_NL", IQ4_NL_VALUES),
        ("IQ4_XS", IQ4_NL_VALUES),
        ("MXFP4", MXFP4_VALUES),
        ("NVFP4", MXFP4_VALUES),
        ("Q1_0", (-1, 1)),
        ("Q2_0", range(-1, 3)),
        ("TQ1_0", range(-1, 2)),
        ("TQ2_0", range(-1, 3)),
        ("IQ1_S", (-9, -7, -1, 1, 7, 9)),  # eight times -1, 0 and 1 and an eighth
        ("IQ1_M", (-9, -7, -1, 1, 7, 9)),
        *((name, (-grid(name).max(), grid(name).max())) for name in SIGNED_GRIDS),
    ):
        format_ = FORMATS[name]
        assert min(values) + format_.zero >= 0 and max(values) + format_.zero == format_.largest
        checked.add(name)
    for name in set(BLOCK_FORMATS) - checked:
        n_bits = int(name[1])  # all integers of so many bits
        assert FORMATS[name].largest == 2**n_bits - 1
        assert FORMATS[name].zero in (0, 2 ** (n_bits - 1))


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_is_bit_exact(name):
    w = random_rows(name, 5, 768)
    expected = gguf_dequantize(w.reshape(-1), GGMLQuantizationType[name]).reshape(5, 768)
    found = dot.dequantize(FORMATS[name].code, w, 768)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("n_columns", [1, 63, 80])
def test_plain_floats_of_awkward_width(name, n_columns):
    w = random_rows(name, 3, n_columns)
    x = np.random.default_rng(1).standard_normal(n_columns).astype(np.float32)
    code = FORMATS[name].code
    expected = dot.matvec_ref(code, w, n_columns, x)
    np.testing.assert_allclose(matvec(code, w, n_columns, x), expected, atol=1e-5)
    dense = gguf_dequantize(w.reshape(-1), GGMLQuantizationType[name]).reshape(3, n_columns)
    np.testing.assert_array_equal(dot.dequantize(code, w, n_columns), dense)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n_parts", [1, 3])
def test_matvec_equals_reference(name, n_parts):
    w = random_rows(name, 7, 1536)
    x = np.random.default_rng(1).standard_normal(1536).astype(np.float32)
    code = FORMATS[name].code
    expected = dot.matvec_ref(code, w, 1536, x)
    found = matvec(code, w, 1536, x, n_parts)
    np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max() * 10)


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "F32"])
def test_bf16_is_rounded_to_nearest_even(name):
    w = random_rows(name, 4, 512)
    dense = dot.dequantize(FORMATS[name].code, w, 512)
    expected = as_type_of(np.empty(0, np.uint16), dense)
    out = np.empty_like(expected)
    dot.dequantize_into(FORMATS[name].code, w, 512, dot.address(out), 1024, dot.TO_BF16)
    np.testing.assert_array_equal(out, expected)


def values_of(quantized, n, n_planes):
    """The i16 values (n,) of ``quantize``'s output, in either layout."""
    if not vnni.is_available():
        return quantized[: 2 * n].view(np.int16)
    planes = (quantized[n * i : n * (i + 1)].view(np.int8) for i in range(n_planes))
    high, *low = (plane.astype(np.int16) for plane in planes)
    return 256 * high + low[0] if low else high


@pytest.mark.parametrize("n_planes", [1, 2])
def test_quantize_equals_reference(n_planes):
    x = np.random.default_rng(2).standard_normal(320).astype(np.float32)
    x[64:96] = 0  # a block without a scale
    values, scales, sums = integer.quantize_ref(x, n_planes)
    found = quantize(x, n_planes)
    n = len(x)
    np.testing.assert_array_equal(values_of(found, n, n_planes), values)
    np.testing.assert_array_equal(found[2 * n :][: n // 8].view(np.float32), scales)
    np.testing.assert_allclose(found[2 * n + n // 8 :][: n // 4].view(np.float32), sums, rtol=1e-5)


BLOCK_FORMATS = [name for name, f in FORMATS.items() if f.decode]


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    """The square of the relative error."""
    return float(np.sum((found - expected) ** 2) / np.sum(expected**2))


@pytest.mark.slow
@pytest.mark.parametrize("n_planes", [1, 2])
@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("n_columns", [256, 768])
def test_integer_matvec_is_exact_but_for_the_activations(name, n_columns, n_planes):
    w = random_rows(name, 7, n_columns)
    x = np.random.default_rng(1).standard_normal(n_columns).astype(np.float32)
    code = FORMATS[name].code
    values, scales, _ = integer.quantize_ref(x, n_planes)
    rounded = values * np.repeat(scales, 32)
    found = matvec(code, w, n_columns, x, 2, n_planes=n_planes)
    assert error_of(found, dot.matvec_ref(code, w, n_columns, rounded)) < 1e-9
    bound = 1e-8 if n_planes == 2 else 1e-3
    assert error_of(found, dot.matvec_ref(code, w, n_columns, x)) < bound


@pytest.mark.parametrize("n_planes", [1, 2])
@pytest.mark.parametrize("n_columns", [32, 64, 96, 128, 224, 576])
@pytest.mark.parametrize("name", [n for n in BLOCK_FORMATS if FORMATS[n].n_elements == 32])
def test_integer_matvec_of_few_blocks(name, n_columns, n_planes):
    """Every remainder of the groups of four blocks."""
    test_integer_matvec_is_exact_but_for_the_activations(name, n_columns, n_planes)


@pytest.mark.skipif(not vnni.is_available(), reason="this CPU takes that path in every test")
@pytest.mark.parametrize(
    ("name", "n_inputs", "n_planes"),
    sweep([
        ("IQ2_XS", 2, 1), ("NVFP4", 1, 2),
        ("Q4_0", 1, 2), ("Q4_1", 3, 1), ("Q5_0", 2, 2), ("Q8_0", 6, 2), ("Q2_K", 4, 1),
        ("Q4_K", 3, 2), ("Q6_K", 1, 1), ("IQ4_NL", 4, 2),
    ]),
)  # fmt: skip
def test_integer_products_without_vnni(name, n_inputs, n_planes, monkeypatch):
    """The path of CPUs without byte products, compiled here for this test."""
    monkeypatch.setattr(vnni, "is_available", lambda: False)
    quantize = njit(integer.quantize_rows.py_func)
    w = random_rows(name, 7, 768)
    x = np.random.default_rng(1).standard_normal((n_inputs, 768)).astype(np.float32)
    code = FORMATS[name].code
    quantized = np.empty((n_inputs, integer.quantized_stride(2 * 768)), np.uint8)
    found = np.empty((n_inputs, 7), np.float32)
    places = [dot.address(array) for array in (w, quantized, found)]
    quantize(dot.address(x), x.strides[0], len(x), 768, n_planes, places[1], quantized.strides[0])
    for row, values in zip(quantized, x, strict=True):
        expected = integer.quantize_ref(values, n_planes)[0]
        np.testing.assert_array_equal(values_of(row, 768, n_planes), expected)
    signature = (types.literal(code), types.literal(n_planes)) + (types.int64,) * 10
    kernel = dot.function_address(njit(dot.rows_dot.py_func), signature)
    call_rows(
        kernel, places[0], w.strides[0], 768, places[1], quantized.strides[0], len(x), places[2],
        found.strides[0], 0, 7,
    )  # fmt: skip
    for row, values in zip(found, x, strict=True):
        expected = dot.matvec_ref(code, w, 768, values)
        assert error_of(row, expected) < (1e-8 if n_planes == 2 else 1e-3)


@pytest.mark.parametrize(
    ("name", "n_planes"),
    [*((name, 0) for name in FORMATS), *((name, n) for n in (1, 2) for name in BLOCK_FORMATS)],
)
def test_several_inputs_give_the_bits_of_each(name, n_planes):
    """1 to 4 share a decoded row, more take passes; 19 rows of weights are two passes."""
    format_ = FORMATS[name]
    n_columns = 7 * 32 if format_.n_elements <= 32 else 768
    n_columns += 3 if format_.decode is None else 0
    w = random_rows(name, 19, n_columns)
    x = np.random.default_rng(1).standard_normal((8, n_columns)).astype(np.float32)

    def product(inputs):
        return matvec(format_.code, w, n_columns, inputs, 2, n_planes=n_planes)

    each = np.stack([product(row) for row in x])
    expected = np.stack([dot.matvec_ref(format_.code, w, n_columns, row) for row in x])
    assert error_of(each, expected) < (1e-3 if n_planes == 1 else 1e-8)
    for n in (1, 2, 3, 4, 5, 8):
        np.testing.assert_array_equal(product(x[:n]), each[:n])
