"""q8_0 rows: the rounding, and the kernel against its reference, to the bit."""

import numpy as np
import pytest

from sparsekv_cli.cache.store import CACHE_TYPES, padded
from sparsekv_cli.cpu.attention.rows import (
    F16,
    Q8_0,
    QUANT_BLOCK,
    dequantize_rows_ref,
    quantize_rows_ref,
    row_bytes,
)
from sparsekv_cli.cpu.attention.store import store_row
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.jit.pointers import address


def values(shape, seed=0):
    """Blocks of very different sizes, some of them 0, and exact halves of steps."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, (*shape[:-1], 1))
    x[0, :, :32] = 0
    x[1, 0, :16] = np.arange(16) - 7.5
    x[1, 0, 15] = 127.0
    x[1, 1] = 1e-9  # its scale is 0 in f16
    return x.astype(np.float32)


@pytest.mark.parametrize(("width", "n_bytes"), [(16, 18), (64, 68), (80, 86), (128, 136)])
def test_bytes_of_a_row(width, n_bytes):
    assert row_bytes(Q8_0, width) == n_bytes == quantize_rows_ref(values((2, 3, width))).shape[-1]
    assert row_bytes(F16, width) == 2 * width


@pytest.mark.parametrize("width", [16, 48, 64, 80, 128])
def test_rounding_errs_by_half_a_step_at_most(width):
    x = values((4, 50, width))
    back = dequantize_rows_ref(quantize_rows_ref(x), width)
    for start in range(0, width, QUANT_BLOCK):
        block = slice(start, start + QUANT_BLOCK)
        peak = np.abs(x[..., block]).max(-1, keepdims=True)
        # Half a step; the scale's own rounding to f16 (relative 2^-11, or 2^-25 when it is tiny).
        bound = peak * (0.5 / 127 + 2**-11) + 127 * 2.0**-25
        assert (np.abs(back - x)[..., block] <= bound * 1.0001).all()
    assert not back[0, :, :32].any() and not back[1, 1].any()


def test_a_row_as_ggml_writes_it():
    x = np.zeros((1, 48), np.float32)
    x[0, :4] = [-127, 0.5, 1.5, 63.4]
    x[0, 32:34] = [2, -1]
    row = quantize_rows_ref(x)[0]
    quants, scales = row[:48].view(np.int8), row[48:].view(np.float16)
    assert quants[:4].tolist() == [-127, 0, 2, 63]  # to the nearest, halves to even
    assert quants[32:34].tolist() == [127, -64] and not quants[34:].any()
    assert scales.tolist() == [1.0, float(np.float16(2 / 127))]


@pytest.mark.parametrize("d", [16, 40, 64, 80, 128])
def test_kernel_and_prefill_store_the_same_bytes(d):
    x = np.zeros((3, 7, padded(d)), np.float32)
    x[..., :d] = values((3, 7, d))
    expected = quantize_rows_ref(x)
    by_kernel = np.full_like(expected, 255)
    for place in np.ndindex(x.shape[:2]):
        store_row(Q8_0, address(x[place]), address(by_kernel[place]), padded(d))
    np.testing.assert_array_equal(by_kernel, expected)
    rows = CACHE_TYPES["q8_0"](d)
    by_prefill = np.full((3, 9, rows.n_items), 255, np.uint8)
    rows.write(by_prefill[:, 1:8], x[..., :d])
    np.testing.assert_array_equal(by_prefill[:, 1:8], expected)
    assert (by_prefill[:, [0, 8]] == 255).all()
    read = rows.read(by_prefill[:, 1:8])
    np.testing.assert_array_equal(read, dequantize_rows_ref(expected, padded(d)))


def test_rows_of_a_bf16_prefill():
    normal = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
    x = as_type_of(np.empty(0, np.uint16), normal)
    for name, expected in (("f16", as_f32(x).astype(np.float16)), ("q8_0", as_f32(x))):
        rows = CACHE_TYPES[name](64)
        stored = np.zeros((2, 5, rows.n_items), rows.dtype)
        rows.write(stored, x)
        error = np.abs(rows.read(stored).astype(np.float32) - expected).max()
        assert error == 0 if name == "f16" else 0 < error < 0.02
