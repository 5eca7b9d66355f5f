"""Quantised rows: the rounding, against the gguf package, and the kernel against its reference."""

import gguf
import numpy as np
import pytest

from sparsekv_cli.cache.store import CACHE_TYPES, RowType, padded
from sparsekv_cli.cpu.attention.rows import (
    F16,
    HIGH_BITS,
    NIBBLES,
    Q4_0,
    Q5_1,
    Q8_0,
    QUANT_BLOCK,
    dequantize_rows_ref,
    n_blocks,
    quantize_rows_ref,
    row_bytes,
)
from sparsekv_cli.cpu.attention.store import store_row
from sparsekv_cli.cpu.attention.tile import prepare, widen_row
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.jit.pointers import address

QUANTISED = {name: kind for name, kind in CACHE_TYPES.items() if kind != F16}


def values(shape, seed=0):
    """Blocks of very different sizes, some of them 0, and exact halves of steps."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, (*shape[:-1], 1))
    x[0, :, :32] = 0
    x[1, 0, :16] = np.arange(16) - 7.5
    x[1, 0, 15] = 127.0
    x[1, 1] = 1e-9  # its scale is 0 in f16
    return x.astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "width", "n_bytes"),
    [
        *[(F16, 16, 32), (F16, 80, 160)],
        *[(Q8_0, 16, 18), (Q8_0, 64, 68), (Q8_0, 80, 86), (Q8_0, 128, 136)],
        *[(Q5_1, 16, 24), (Q5_1, 64, 48), (Q5_1, 80, 72), (Q5_1, 128, 96)],
        *[(Q4_0, 16, 18), (Q4_0, 64, 36), (Q4_0, 80, 54), (Q4_0, 128, 72)],
    ],
)
def test_bytes_of_a_row(kind, width, n_bytes):
    assert row_bytes(kind, width) == n_bytes
    if kind != F16:
        assert quantize_rows_ref(values((2, 3, width)), kind).shape[-1] == n_bytes


def as_blocks(row, kind, width):
    """A row's bytes as ggml lays out its blocks."""
    n = n_blocks(width)
    quants = row[: (width if kind == Q8_0 else NIBBLES * n)].reshape(n, -1)
    rest = row[quants.size :]
    fifth = rest[: HIGH_BITS * n].reshape(n, -1) if kind == Q5_1 else rest[:0].reshape(n, -1)
    return np.concatenate([rest[fifth.size :].reshape(n, -1), fifth, quants], axis=1).ravel()


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_are_ggml_s_blocks_in_another_order(name):
    kind, x = QUANTISED[name], values((4, 50, 96), 3)
    if name == "q8_0":
        x[np.abs(x).max(-1) < 1e-4] = 0  # ggml has quants there, times a scale of 0
    rows, type_ = quantize_rows_ref(x, kind), gguf.GGMLQuantizationType[name.upper()]
    expected = gguf.quants.quantize(x, type_)
    n_other = 0
    for place in np.ndindex(x.shape[:2]):
        ours, theirs = as_blocks(rows[place], kind, 96), expected[place]
        n_other += not np.array_equal(ours, theirs)
        back = gguf.quants.dequantize(ours, type_)
        np.testing.assert_array_equal(dequantize_rows_ref(rows[place], 96, kind), back)
    assert n_other <= 1  # gguf computes 1 / scale in another order: a half may be rounded otherwise


@pytest.mark.parametrize("width", [16, 48, 64, 80, 128])
@pytest.mark.parametrize("name", QUANTISED)
def test_rounding_errs_by_half_a_step_at_most(name, width):
    kind, x = QUANTISED[name], values((4, 50, width))
    back = dequantize_rows_ref(quantize_rows_ref(x, kind), width, kind)
    for start in range(0, width, QUANT_BLOCK):
        block = slice(start, start + QUANT_BLOCK)
        peak = np.abs(x[..., block]).max(-1, keepdims=True)
        span = np.ptp(x[..., block], axis=-1, keepdims=True)
        # Of q4_0 a whole step, at the end of the range that has one quant less.
        step = {Q8_0: peak / 127, Q5_1: span / 31, Q4_0: 2 * peak / 8}[kind]
        # And the rounding of scale and minimum to f16 (relative 2^-11, 2^-25 when tiny).
        bound = step / 2 + (peak + span) * 2**-11 + 160 * 2.0**-25
        assert (np.abs(back - x)[..., block] <= bound * 1.0001).all()
    assert not back[0, :, :32].any()


def test_a_row_as_ggml_writes_it():
    x = np.zeros((1, 48), np.float32)
    x[0, :4] = [-127, 0.5, 1.5, 63.4]
    x[0, 32:34] = [2, -1]
    row = quantize_rows_ref(x, Q8_0)[0]
    quants, scales = row[:48].view(np.int8), row[48:].view(np.float16)
    assert quants[:4].tolist() == [-127, 0, 2, 63]  # to the nearest, halves to even
    assert quants[32:34].tolist() == [127, -64] and not quants[34:].any()
    assert scales.tolist() == [1.0, float(np.float16(2 / 127))]


@pytest.mark.parametrize("d", [16, 40, 64, 80, 128])
@pytest.mark.parametrize("name", QUANTISED)
def test_kernel_and_prefill_store_the_same_bytes(name, d):
    """A prefill rotates rows of q4_0 first, and reading them turns them back."""
    kind, x = QUANTISED[name], np.zeros((3, 7, padded(d)), np.float32)
    x[..., :d] = values((3, 7, d))
    rows = RowType(kind, d)
    prepare(kind)
    turned = rows.rotated(x)
    assert (turned is x) == (name != "q4_0")
    expected = quantize_rows_ref(turned, kind)
    by_kernel = np.full_like(expected, 255)
    for place in np.ndindex(x.shape[:2]):
        store_row(kind, address(turned[place]), address(by_kernel[place]), padded(d))
    np.testing.assert_array_equal(by_kernel, expected)
    by_prefill = np.full((3, 9, rows.n_items), 255, np.uint8)
    rows.write(by_prefill[:, 1:8], x[..., :d])
    np.testing.assert_array_equal(by_prefill[:, 1:8], expected)
    assert (by_prefill[:, [0, 8]] == 255).all()
    exact, wide = dequantize_rows_ref(expected, padded(d), kind), np.empty(padded(d), np.float32)
    for place in np.ndindex(x.shape[:2]):
        widen_row(kind, address(expected[place]), wide)
        np.testing.assert_array_equal(wide, exact[place])
    np.testing.assert_array_equal(rows.read(by_prefill[:, 1:8]), rows.rotated(exact))


@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_no_number_stays_none(name):
    kind, x = QUANTISED[name], np.ones((1, 64), np.float32)
    x[0, 40] = np.nan
    row = np.zeros(row_bytes(kind, 64), np.uint8)
    store_row(kind, address(x), address(row), 64)
    back = dequantize_rows_ref(row, 64, kind)
    assert np.isfinite(back[:32]).all() and np.isnan(back[32:]).any()


@pytest.mark.parametrize(
    ("name", "error"), [("f16", 0), ("q8_0", 0.02), ("q5_1", 0.12), ("q4_0", 0.4)]
)
def test_rows_of_a_bf16_prefill(name, error):
    normal = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
    x = as_type_of(np.empty(0, np.uint16), normal)
    rows = RowType(CACHE_TYPES[name], 64)
    stored = np.zeros((2, 5, rows.n_items), rows.dtype)
    rows.write(stored, x)
    expected = as_f32(x).astype(np.float16) if name == "f16" else as_f32(x)
    found = np.abs(rows.read(stored).astype(np.float32) - expected).max()
    assert found == 0 if name == "f16" else error / 4 < found < error
