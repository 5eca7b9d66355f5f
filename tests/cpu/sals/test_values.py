"""Quantised value rows: their bytes as the format says, and back."""

import numpy as np
import pytest

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import address
from sparsekv_cli.cpu.sals import values
from sparsekv_cli.cpu.sals.values import (
    dequantize_ref,
    head_bytes,
    quantize_head,
    quantize_ref,
)


@njit(nogil=True)
def read_head(bits, source, d_v, out):
    values.read_head(bits, source, d_v, out)


def parse_head(data: np.ndarray, d_v: int, bits: int):
    """uint8 (bytes,) -> scales, minima f16 and codes, byte by byte."""
    n_group, n_bytes = -(-d_v // 32), 4 * bits
    blocks = data.reshape(n_group, 4 + n_bytes)
    ends = blocks[:, :4].copy().view(np.float16)
    codes = np.zeros((n_group, 32), int)
    for channel in range(32):
        byte = blocks[:, 4 + channel % n_bytes].astype(int)
        codes[:, channel] = byte >> (bits * (channel // n_bytes)) & (2**bits - 1)
    return ends[:, 0], ends[:, 1], codes.reshape(-1)[:d_v]


def make(d_v: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(d_v).astype(np.float16)
    return np.concatenate([values, np.zeros(-d_v % 16)]).astype(np.float32)


@pytest.mark.parametrize("d_v", [16, 32, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("bits", [2, 4])
def test_a_row_is_stored_as_the_format_says(d_v, bits):
    for seed in range(20):
        values = make(d_v, seed)
        data = np.full(head_bytes(d_v, bits) + 8, 0xAA, np.uint8)
        quantize_head(values, d_v, bits, address(data))
        assert (data[-8:] == 0xAA).all()
        scales, minima, codes = parse_head(data[:-8], d_v, bits)
        expected = quantize_ref(values[None, :d_v], bits)
        np.testing.assert_array_equal(scales, expected[0][0])
        np.testing.assert_array_equal(minima, expected[1][0])
        np.testing.assert_array_equal(codes, expected[2][0])


@pytest.mark.parametrize("d_v", [16, 32, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("bits", [2, 4, 16])
def test_a_row_comes_back(d_v, bits):
    width = -(-d_v // 16) * 16
    for seed in range(20):
        values = make(d_v, seed)
        data = np.empty(head_bytes(d_v, bits) + 16, np.uint8)
        quantize_head(values, d_v, bits, address(data))
        out = np.full(width + 16, 9, np.float16)
        read_head(bits, address(data), d_v, address(out))
        assert (out[width:] == 9).all(), "written behind the row"
        if bits == 16:
            np.testing.assert_array_equal(out[:d_v], values[:d_v])
            continue
        scales, minima, codes = quantize_ref(values[None, :d_v], bits)
        expected = dequantize_ref(scales, minima, codes)[0]
        np.testing.assert_allclose(out[:d_v], expected, atol=2e-3)
        step = scales.astype(np.float32)[0, np.arange(d_v) // 32]
        assert (abs(out[:d_v] - values[:d_v]) <= 0.51 * step + 4e-3).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("values", [[0.5] * 64, [0.0] * 64, [1e-8, -1e-8] * 32, [6e4, -6e4] * 32])
def test_flat_tiny_and_huge_rows(bits, values):
    row = np.array(values, np.float16).astype(np.float32)
    data = np.empty(head_bytes(64, bits), np.uint8)
    out = np.empty(64, np.float16)
    quantize_head(row, 64, bits, address(data))
    read_head(bits, address(data), 64, address(out))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out.astype(np.float32), row, rtol=1e-3, atol=1e-6)


def test_bytes_a_head():
    assert [head_bytes(64, bits) for bits in (2, 4, 16)] == [24, 40, 128]
    assert head_bytes(80, 4) == 60 and head_bytes(80, 16) == 160 and head_bytes(72, 16) == 160
