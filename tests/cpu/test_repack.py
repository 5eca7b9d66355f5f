"""Repacked weights: their layout, and their products against the reference."""

import numpy as np
import pytest
from test_blocks import random_rows

from sparsekv_cli.cpu import integer, layer, matvec, repack
from sparsekv_cli.cpu.blocks import FORMAT_OF_CODE, FORMATS
from sparsekv_cli.models.weights import Linear

NAMES = [FORMAT_OF_CODE[code].name for code in repack.REPACKED]
repacks = pytest.mark.skipif(
    not repack.can_repack(FORMATS["Q4_1"].code, repack.GROUP), reason="this CPU does not repack"
)


def repacked(name: str, w: np.ndarray) -> np.ndarray:
    out = np.full_like(w, 255)
    repack.repack(FORMATS[name].code, w, out)
    return out


def columns(*counts: int) -> list[tuple[str, int]]:
    """Formats with numbers of columns, which for the K formats are multiples of 256."""
    sizes = [(name, FORMATS[name].n_elements) for name in NAMES]
    found = {(name, -(-count // size) * size) for name, size in sizes for count in counts}
    return sorted(found)


@pytest.mark.parametrize(("name", "n_columns"), columns(32, 96, 576))
def test_layout_equals_reference(name, n_columns):
    w = random_rows(name, 48, n_columns)
    np.testing.assert_array_equal(repacked(name, w), repack.repack_ref(FORMATS[name].code, w))


def products(linears, x: np.ndarray, n_threads: int) -> np.ndarray:
    """``layer.multiply`` of matrices with x f32 (B, columns)."""
    out = np.full((len(x), sum(w.n_rows for w in linears)), np.nan, np.float32)
    quantized = np.empty((len(x), integer.quantized_stride(x.shape[1])), np.uint8)
    places = [matvec.address(array) for array in (x, quantized, out)]
    layer.multiply(
        layer.matrix_table(linears), places[0], x.strides[0], len(x), places[1], places[2],
        out.strides[0], n_threads,
    )  # fmt: skip
    return out


@repacks
@pytest.mark.parametrize(("name", "n_columns"), columns(32, 64, 96, 224, 576))
def test_products_are_within_sixteen_bits(name, n_columns):
    w, code = random_rows(name, 48, n_columns), FORMATS[name].code
    linear = Linear(code, repacked(name, w), n_columns, repacked=True)
    x = np.random.default_rng(1).standard_normal((6, n_columns)).astype(np.float32)
    alone = np.concatenate([products([linear], row[None], 1) for row in x])
    expected = np.stack([matvec.matvec_ref(code, w, n_columns, row) for row in x])
    assert np.sum((alone - expected) ** 2) < 1e-8 * np.sum(expected**2)
    for n_inputs in range(2, 7):
        found = products([linear], x[:n_inputs], 2)
        np.testing.assert_array_equal(found, alone[:n_inputs])


@repacks
@pytest.mark.parametrize("n_threads", [1, 2, 3, 7])
def test_matrices_are_cut_between_groups(n_threads):
    """Repacked and other matrices in one table, whose parts begin anywhere."""
    linears, expected = [], []
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    for name, n_rows, packs in (("Q4_1", 48, True), ("Q8_0", 7, False), ("Q5_0", 80, True)):
        w, code = random_rows(name, n_rows, 64), FORMATS[name].code
        linears.append(Linear(code, repacked(name, w) if packs else w, 64, repacked=packs))
        expected.append([matvec.matvec_ref(code, w, 64, row) for row in x])
    found = products(linears, x, n_threads)
    expected = np.concatenate(expected, axis=1)
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


@repacks
def test_rows_that_fill_no_group_stay_as_they_lie():
    assert repack.can_repack(FORMATS["Q4_1"].code, 32)
    assert not repack.can_repack(FORMATS["Q4_1"].code, 40)
    assert not repack.can_repack(FORMATS["Q8_0"].code, 32)
