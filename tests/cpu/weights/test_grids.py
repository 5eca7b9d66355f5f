"""The grids of IQ1, IQ2 and IQ3 against gguf's, and known blocks of what gguf lacks."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from numba import njit, types
from quantized_weights import random_rows

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.cpu.weights.blocks_grid import GRID
from sparsekv_cli.cpu.weights.formats import FORMATS
from sparsekv_cli.cpu.weights.grids import GRIDS, grid


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_equals_that_of_gguf(name):
    theirs = getattr(quants, name)
    theirs.init_grid()
    np.testing.assert_array_equal(grid(name), theirs.grid.reshape(theirs.grid_shape))
    assert grid(name).dtype == np.int8


@pytest.mark.parametrize("name", [format_.name for format_ in GRID])
def test_groups_are_loaded_where_the_cpu_has_no_permutes(name, monkeypatch):
    """The path of CPUs without AVX-512 VBMI, compiled here for this test."""
    has_feature = llvm.has_feature
    asked = []

    def without_permutes(feature):
        asked.append(feature)
        return feature != "avx512vbmi" and has_feature(feature)

    monkeypatch.setattr(llvm, "has_feature", without_permutes)
    w, found = random_rows(name, 5, 768), np.empty((5, 768), np.float32)
    literals = types.literal(FORMATS[name].code), types.literal(dot.TO_F32)
    dequantize = njit(dot.rows_dequantize.py_func)
    kernel = dot.function_address(dequantize, literals + (types.int64,) * 7)
    places = dot.address(w), w.strides[0], 768, dot.address(found), found.strides[0]
    dot._dequantize_parallel(kernel, *places, len(w), 1)
    expected = quants.dequantize(w, GGMLQuantizationType[name])
    np.testing.assert_array_equal(found, expected)
    assert "avx512vbmi" in asked


# A block, a unit for each 1/k of its elements, and the elements in it, as ggml's own dequantisation
# gives them (version 0.25.3 of its library).
KNOWN = {
    "Q1_0": (
        "00bee5f1a94106a0956a26afbccdafe562f9",
        [1.5],
        """
        -1 1 -1 1 1 -1 -1 -1 -1 1 1 1 -1 -1 -1 -1 -1 1 1 -1 1 -1 1 -1 -1 1 1 1 1 1 -1 1
        1 -1 -1 1 1 1 1 1 1 1 1 1 1 -1 1 -1 -1 1 -1 1 -1 1 1 -1 1 -1 1 -1 1 -1 -1 1 1 -1
        -1 1 1 -1 1 1 -1 -1 -1 -1 1 -1 1 -1 1 1 -1 -1 -1 -1 1 -1 -1 1 -1 -1 1 1 -1 -1 -1
        -1 -1 -1 1 -1 1 -1 -1 1 -1 1 1 -1 -1 -1 1 -1 1 1 1 -1 -1 1 -1 1 1 -1 -1 -1 -1 -1
        """,
    ),
    "Q2_0": (
        "00be93c642276ad5ab2da7394551370e99b2",
        [1.5],
        """
        -2 1 0 -1 -1 0 1 -2 -1 1 1 0 -2 0 -1 1 -1 -1 -1 0 0 0 0 -2 -2 -1 -1 -1 0 -2 -1 1
        -2 0 -1 -1 0 -1 -2 1 0 0 1 0 0 1 0 0 -2 0 -2 1 -1 -2 1 1 0 -1 0 -1 -1 1 -2 -1
        """,
    ),
    "NVFP4": (
        "7fff0538d732a1df70aca1e926115901dd06f27f8f063cd25e19a621f9bd0ccc21397c1e",
        [1, 240, 0.0048828125, 0.5],
        """
        0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 8 1 -1 1 -6 8 2 -12 2 1 6 0 -6 0 -12 12 -12 8 -4
        2 -8 -1 8 1 0 0 3 -6 6 1 -2 2 -1 -6 -4 -4 1 -1 -4 -8 -12 -3 0 -4 2 3 12 1
        """,
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_blocks(name):
    block, units, integers = KNOWN[name]
    w = np.frombuffer(bytes.fromhex(block), np.uint8)[None]
    expected = np.array(integers.split(), np.float32).reshape(len(units), -1)
    found = dot.dequantize(FORMATS[name].code, w, expected.size)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected * np.c_[units])
