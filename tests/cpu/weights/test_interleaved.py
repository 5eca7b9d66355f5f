"""Repacked weights: their layout, and their products against the reference."""

from typing import Any

import numpy as np
import pytest
from matrix_kernels import call_rows, quantize
from numba import njit, types
from quantized_weights import random_rows
from sweeps import sweep

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.layer import choice
from sparsekv_cli.cpu.layer import products as few_rows
from sparsekv_cli.cpu.weights import dot, integer, interleaved, vnni
from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.models.weights import Linear

NAMES = [name for name, each in FORMATS.items() if each.interleaves]
TWO_PLANES = ("Q4_0", "Q4_K", "Q6_K", "MXFP4")  # whose products of 16 bits are tried without VNNI
# Formats whose kernels for all numbers of inputs take longest to compile.
LONG = ("IQ4_XS", "Q1_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "TQ2_0")
repacks = pytest.mark.skipif(
    not interleaved.can_repack(FORMATS["Q4_1"].code, interleaved.GROUP),
    reason="this CPU does not repack",
)


def repacked(name: str, w: np.ndarray) -> np.ndarray:
    out = np.full_like(w, 255)
    interleaved.repack(FORMATS[name].code, w, out)
    return out


def columns(*counts: int) -> list[tuple[str, int]]:
    """Formats with numbers of columns, which for the K formats are multiples of 256."""
    sizes = [(name, FORMATS[name].n_elements) for name in NAMES]
    found = {(name, -(-count // size) * size) for name, size in sizes for count in counts}
    return sorted(found)


@pytest.mark.parametrize(("name", "n_columns"), columns(32, 96, 576))
def test_layout_equals_reference(name, n_columns):
    w = random_rows(name, 48, n_columns)
    np.testing.assert_array_equal(repacked(name, w), interleaved.repack_ref(FORMATS[name].code, w))


def products(linears, x: np.ndarray, n_threads: int, n_planes: int = 2) -> np.ndarray:
    """``layer.multiply`` of matrices with x f32 (B, columns)."""
    out = np.full((len(x), sum(w.n_rows for w in linears)), np.nan, np.float32)
    quantized = np.empty((len(x), integer.quantized_stride(x.shape[1])), np.uint8)
    table = choice.matrix_table(linears, n_planes)
    few_rows.multiply(table, x, len(x), quantized, out, n_threads)
    return out


def marked(sizes: list[tuple[str, int]]) -> list[Any]:
    """Those of LONG formats as nightly: ``test_products_of_one_input`` has them always."""
    nightly = pytest.mark.nightly
    return [pytest.param(*each, marks=nightly if each[0] in LONG else ()) for each in sizes]


@repacks
@pytest.mark.parametrize("n_planes", sweep([1, 2], fast=1))
@pytest.mark.parametrize(("name", "n_columns"), marked(columns(32, 64, 96, 224, 576)))
def test_products_are_exact_but_for_the_activations(name, n_columns, n_planes):
    w, code = random_rows(name, 48, n_columns), FORMATS[name].code
    linear = Linear(code, repacked(name, w), n_columns, repacked=True)
    x = np.random.default_rng(1).standard_normal((6, n_columns)).astype(np.float32)
    alone = np.concatenate([products([linear], row[None], 1, n_planes) for row in x])
    for row, found in zip(x, alone, strict=True):
        values, scales, _ = integer.quantize_ref(row, n_planes)
        expected = dot.matvec_ref(code, w, n_columns, values * np.repeat(scales, 32))
        assert np.sum((found - expected) ** 2) < 1e-9 * np.sum(expected**2)
    for n_inputs in range(2, 7):
        found = products([linear], x[:n_inputs], 2, n_planes)
        np.testing.assert_array_equal(found, alone[:n_inputs])


def largest_products(name: str, n_columns: int, n_planes: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights whose integers are the largest, and activations whose bytes are."""
    w = random_rows(name, 16, n_columns)
    blocks = w.reshape(16, -1, FORMATS[name].n_bytes)
    is_scale = np.zeros(blocks.shape[-1], bool)
    scales = interleaved.scales_of(FORMATS[name])
    is_scale[scales.at :][: scales.size * scales.n] = True
    blocks[:, :, ~is_scale] = 0x77 if name in ("MXFP4", "NVFP4") else 255
    x = np.empty((3, n_columns), np.float32)
    edges = (127, -127, 126) if n_planes == 1 else (127 * 257, 127 * 256 - 128, -126 * 256 - 128)
    for row, value in zip(x, edges, strict=True):
        row[:] = value / integer.LARGEST[n_planes]
        row[::32] = 1  # so that these are the values
    return w, x


def one_dot(
    code, n_planes, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):  # fmt: skip
    """``groups_dot`` of one input only, which is compiled in a tenth of the time."""
    interleaved._group_dots(code, n_planes, 1, w, x, x_row, n_columns, out, out_row)


@repacks
@pytest.mark.parametrize("name", LONG)
def test_products_of_one_input(name):
    code, n_columns = FORMATS[name].code, 768
    w = random_rows(name, 16, n_columns)
    x = np.random.default_rng(1).standard_normal((1, n_columns)).astype(np.float32)
    signature = (types.literal(code), types.literal(2)) + (types.int64,) * 10
    kernel = dot.function_address(njit(one_dot), signature)
    quantized, found = quantize(x[0], 2), np.empty((1, 16), np.float32)
    packed = repacked(name, w)
    call_rows(
        kernel, dot.address(packed), w.strides[0], n_columns, dot.address(quantized),
        quantized.nbytes, 1, dot.address(found), found.strides[0], 0, 16,
    )  # fmt: skip
    values, scales, _ = integer.quantize_ref(x[0], 2)
    expected = dot.matvec_ref(code, w, n_columns, values * np.repeat(scales, 32))
    assert np.sum((found[0] - expected) ** 2) < 1e-9 * np.sum(expected**2)


def three_dots(
    code, n_planes, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):  # fmt: skip
    """``groups_dot`` of three inputs only, which is compiled in a third of the time."""
    interleaved._group_dots(code, n_planes, 3, w, x, x_row, n_columns, out, out_row)


@pytest.mark.skipif(not llvm.has_feature("avx2"), reason="products for CPUs with AVX2")
@pytest.mark.parametrize(
    ("name", "n_planes"),
    sweep([(name, n) for name in NAMES for n in (1, 2) if n == 1 or name in TWO_PLANES]),
)
def test_products_without_vnni(name, n_planes, monkeypatch):
    """The path of CPUs without vpdpbusd, compiled here for this test."""
    monkeypatch.setattr(vnni, "is_available", lambda: False)
    monkeypatch.setattr(vnni, "has_both_forms", lambda: True)
    code, n_columns = FORMATS[name].code, 768
    signature = (types.literal(code), types.literal(n_planes)) + (types.int64,) * 10
    kernel = dot.function_address(njit(three_dots), signature)
    quantize = njit(integer.quantize_rows.py_func)
    any_x = np.random.default_rng(1).standard_normal((3, n_columns)).astype(np.float32)
    any_values = random_rows(name, 16, n_columns), any_x
    for w, x in (any_values, largest_products(name, n_columns, n_planes)):
        quantized = np.empty((len(x), 4 * n_columns + 16 * n_columns // 32), np.uint8)
        packed, found = repacked(name, w), np.empty((len(x), 16), np.float32)
        places = [dot.address(array) for array in (packed, quantized, found)]
        quantize(
            dot.address(x), x.strides[0], len(x), n_columns, n_planes, places[1],
            quantized.strides[0],
        )  # fmt: skip
        call_rows(
            kernel, places[0], w.strides[0], n_columns, places[1], quantized.strides[0], len(x),
            places[2], found.strides[0], 0, 16,
        )  # fmt: skip
        for row, values in zip(found, x, strict=True):
            values, scales, _ = integer.quantize_ref(values, n_planes)
            expected = dot.matvec_ref(code, w, n_columns, values * np.repeat(scales, 32))
            assert np.sum((row - expected) ** 2) < 1e-9 * np.sum(expected**2)


@repacks
@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_matrices_are_cut_between_groups(n_threads):
    """Repacked and other matrices in one table, whose parts begin anywhere."""
    linears, expected = [], []
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    for name, n_rows, packs in (("Q4_1", 48, True), ("Q8_0", 7, False), ("Q5_0", 80, True)):
        w, code = random_rows(name, n_rows, 64), FORMATS[name].code
        linears.append(Linear(code, repacked(name, w) if packs else w, 64, repacked=packs))
        expected.append([dot.matvec_ref(code, w, 64, row) for row in x])
    found = products(linears, x, n_threads)
    expected = np.concatenate(expected, axis=1)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@repacks
def test_rows_that_fill_no_group_stay_as_they_lie():
    assert interleaved.can_repack(FORMATS["Q4_1"].code, 32)
    assert not interleaved.can_repack(FORMATS["Q4_1"].code, 40)
    assert not interleaved.can_repack(FORMATS["Q8_0"].code, 32)


def test_every_format_that_interleaves_has_its_decoder():
    assert set(NAMES) == set(interleaved.DECODERS)
    for name in NAMES:
        at, count, size = interleaved.scales_of(FORMATS[name])
        n_bytes = FORMATS[name].n_bytes - size * count  # in words
        assert at in (0, n_bytes)  # the start or the end of a block
        n_words = n_bytes // 4
        assert n_bytes == 4 * n_words
        assert sorted(interleaved.word_order(FORMATS[name])) == list(range(n_words))
