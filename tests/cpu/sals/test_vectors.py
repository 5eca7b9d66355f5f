"""Sixteen-lane building blocks against numpy: products, angles, rotations, halves."""

import numpy as np
import pytest
from numba import njit

from sparsekv_cli.cpu.attention.load import widen_halves
from sparsekv_cli.cpu.jit.pointers import address
from sparsekv_cli.cpu.sals import vectors


@njit
def cos_sin(turns, factor, count, cosines, sines):
    vectors.cos_sin(turns, factor, count, cosines, sines)


@njit
def rotate_row(x, n_pairs, cosines, sines, scale):
    vectors.rotate_row(x, n_pairs, cosines, sines, scale)


@njit
def rotate_pair(a, b, cosines, sines, out_a, out_b):
    vectors.rotate_pair(a, b, cosines, sines, out_a, out_b)


@njit
def copy_words(source, source_step, count, target, target_step):
    vectors.copy_words(source, source_step, count, target, target_step)


@njit
def join_bytes(high, low, scale, count, target):
    vectors.join_bytes(high, low, scale, count, target)


@njit
def scatter_halves(source, count, target, step):
    vectors.scatter_halves(source, count, target, step)


@njit
def widen(source, count, target):
    widen_halves(source, count, target)


@njit
def rounded_to_half(value):
    return vectors.rounded_to_half(value)


@pytest.mark.parametrize("n_rows", [*range(1, 14), 32])
@pytest.mark.parametrize("count", [1, 7, 48, 129])
def test_multiply(n_rows, count):
    """A with any strides, X with rows further apart than sixteen."""
    rng = np.random.default_rng(n_rows)
    a = rng.standard_normal((count + 2, n_rows + 3)).astype(np.float32)
    x = rng.standard_normal((count, 40)).astype(np.float32)
    out = np.full((n_rows + 1, 20), 7, np.float32)
    vectors.multiply(
        1, n_rows, address(a), a.strides[1], a.strides[0], address(x) + 4 * 8, x.strides[0], count,
        address(out), out.strides[0],
    )  # fmt: skip
    expected = vectors.multiply_ref(a[:count, :n_rows].T, x[:, 8:24])
    np.testing.assert_allclose(out[:n_rows, :16], expected, atol=1e-4)
    assert (out[n_rows] == 7).all() and (out[:, 16:] == 7).all()


@pytest.mark.parametrize("n_rows", [*range(1, 14), 25, 32])
@pytest.mark.parametrize("count", [1, 7, 48, 129])
def test_multiply_two_tiles(n_rows, count):
    """The same bits as tile by tile."""
    rng = np.random.default_rng(n_rows)
    a = rng.standard_normal((count, n_rows + 3)).astype(np.float32)
    x = rng.standard_normal((count, 32)).astype(np.float32)
    one, pair = (np.full((n_rows + 1, 40), 7, np.float32) for _ in range(2))
    strides = a.strides[1], a.strides[0]
    for c in (0, 16):
        vectors.multiply(
            1, n_rows, address(a), *strides, address(x) + 4 * c, x.strides[0], count,
            address(one) + 4 * c, one.strides[0],
        )  # fmt: skip
    vectors.multiply(
        2, n_rows, address(a), *strides, address(x), x.strides[0], count, address(pair),
        pair.strides[0],
    )  # fmt: skip
    expected = vectors.multiply_ref(a[:, :n_rows].T, x)
    np.testing.assert_allclose(one[:n_rows, :32], expected, atol=1e-4)
    np.testing.assert_array_equal(pair, one)
    assert (one[n_rows] == 7).all() and (one[:, 32:] == 7).all()


@pytest.mark.parametrize("position", [0.0, 1.0, -5.0, 31.5, 8191.0, -131071.0])
def test_cosines_and_sines_stay_exact_at_large_positions(position):
    turns = np.concatenate([1e5 ** (-np.arange(44) / 44) / (2 * np.pi), [0, 0.25, 0.5, 1]])
    cosines, sines = (np.empty(48, np.float32) for _ in range(2))
    cos_sin(address(turns), position, 48, address(cosines), address(sines))
    angles = 2 * np.pi * turns * position
    np.testing.assert_allclose(cosines, np.cos(angles), atol=3e-7)
    np.testing.assert_allclose(sines, np.sin(angles), atol=3e-7)


@pytest.mark.parametrize("n_pairs", [1, 5, 16, 24, 40, 64])
def test_rotate_row(n_pairs):
    rng = np.random.default_rng(n_pairs)
    x = rng.standard_normal(2 * n_pairs + 4).astype(np.float32)
    angles = rng.uniform(-9, 9, n_pairs)
    cosines, sines = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    a, b = x[:n_pairs].copy(), x[n_pairs : 2 * n_pairs].copy()
    rest = x[2 * n_pairs :].copy()
    rotate_row(address(x), n_pairs, address(cosines), address(sines), np.float32(1.5))
    np.testing.assert_allclose(x[:n_pairs], 1.5 * (a * cosines - b * sines), atol=1e-6)
    np.testing.assert_allclose(x[n_pairs : 2 * n_pairs], 1.5 * (a * sines + b * cosines), atol=1e-6)
    np.testing.assert_array_equal(x[2 * n_pairs :], rest)


def test_rotate_pair_turns_back():
    angles = np.linspace(-3, 3, 16)
    cosines, sines = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    out = np.empty((2, 16), np.float32)
    a, b = np.float32(0.7), np.float32(-1.3)
    rotate_pair(a, b, address(cosines), address(sines), address(out), address(out[1]))
    turned = (a + 1j * b) * np.exp(-1j * angles)
    np.testing.assert_allclose(out, [turned.real, turned.imag], atol=1e-6)


@pytest.mark.parametrize("count", [1, 15, 16, 24, 33])
def test_halves(count):
    rng = np.random.default_rng(count)
    source = rng.standard_normal((48, 3)).astype(np.float16)
    row, target = source.reshape(-1), np.empty(48, np.float32)
    widen(address(row), count, address(target))
    np.testing.assert_array_equal(target[:count], row[:count].astype(np.float32))

    values = rng.standard_normal(count).astype(np.float32)
    values[0] = 1e6  # beyond f16: cut, not infinite
    scattered = np.zeros((count + 1, 5), np.float16)
    scatter_halves(address(values), count, address(scattered), scattered.strides[0])
    expected = np.clip(values, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(scattered[:count, 0], expected)
    assert not scattered[count].any() and not scattered[:, 1:].any()


@pytest.mark.parametrize("value", [0.1, -3.14159, 2049.0, 1e-7, 0.0])
def test_rounded_to_half(value):
    assert rounded_to_half(np.float32(value)) == np.float32(np.float16(value))


def test_words_and_bytes():
    """Words that lie apart and side by side; numbers of 16 bits from their high and low bytes."""
    rng = np.random.default_rng(0)
    words = rng.integers(-(2**31), 2**31, 5).astype(np.int32)
    apart, back = np.zeros((6, 7), np.int32), np.zeros(6, np.int32)
    copy_words(address(words), 4, 5, address(apart), apart.strides[0])
    copy_words(address(apart), apart.strides[0], 5, address(back), 4)
    np.testing.assert_array_equal(apart[:5, 0], words)
    np.testing.assert_array_equal(back, [*words, 0])
    assert not apart[5].any() and not apart[:, 1:].any()

    high, low = rng.integers(0, 256, 32).astype(np.uint8), rng.integers(-128, 128, 32)
    out = np.full(33, 7, np.float32)
    join_bytes(address(high), address(low.astype(np.int8)), np.float32(0.5), 20, address(out))
    np.testing.assert_array_equal(out, [*(0.5 * (high - 128.0 + low / 256)), 7])
