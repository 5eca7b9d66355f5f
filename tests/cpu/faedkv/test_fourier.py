"""FFTs, bins and the projected attention of FAEDKV against literal references."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numba import njit

from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.cpu.attention.rows import layout_of
from sparsekv_cli.cpu.faedkv import attention, fft, frequencies
from sparsekv_cli.cpu.faedkv.spectrum import FourierBasis, Spectrum, project, waves, waves_at

LOW_FIRST = -np.arange(
    frequencies.N_CHUNKS, dtype=np.float32
)  # low frequencies are the most important
EVERY_BIN = 0.99999  # a share that rounds to all bins; a share of 1 is for the method to handle


def shuffled(seed: int) -> np.ndarray:
    """An importance by which the kept bins are scattered, the mean perhaps not among them."""
    return np.random.default_rng(seed).permutation(frequencies.N_CHUNKS).astype(np.float32)


# --- FFTs -----------------------------------------------------------------------------------------


@njit
def run_fft(numbers, twiddles, x, y, inverse):
    re, im = (1, 0) if inverse else (0, 1)
    fft.fft(
        numbers, twiddles.ctypes.data, x[re].ctypes.data, x[im].ctypes.data, y[re].ctypes.data,
        y[im].ctypes.data,
    )  # fmt: skip


@pytest.mark.parametrize("inverse", [False, True])
# Factors that are and are not multiples of 16; every radix; odd and even numbers of passes.
@pytest.mark.parametrize("n", [256, 288, 320, 400, 512, 625, 675, 960, 1215, 1620, 2048, 3125])
def test_fft_equals_its_reference(n, inverse):
    rng = np.random.default_rng(n)
    plan = fft.make_plan(n)
    x, y = (rng.standard_normal((2, n + 16)).astype(np.float32) for _ in range(2))
    signal = x[0, :n] + 1j * x[1, :n]
    expected = fft.fft_ref(signal.conj()).conj() if inverse else fft.fft_ref(signal)
    behind = x[:, n:].copy(), y[:, n:].copy()
    run_fft(plan.numbers, plan.twiddles, x, y, inverse)
    out = y if fft.ends_in_y(plan.numbers) else x
    assert np.abs(out[0, :n] + 1j * out[1, :n] - expected).max() < 5e-6 * np.sqrt(n)
    np.testing.assert_array_equal((x[:, n:], y[:, n:]), behind)


def test_lengths():
    good = [n for n in range(1, 3000) if fft.factors(n)]
    for n in good:
        n1, n2 = fft.factors(n)
        assert n1 * n2 == n and 16 <= n1 <= n2
        rest = n
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        assert rest == 1
    assert good[0] == 256 and {1620, 2048, 2025} <= set(good)
    assert not {257, 512 * 7, 270} & set(good)  # primes; 270 is 15 x 18 and 10 x 27
    for n in (256, 300, 511, 1999, 2048):
        assert fft.length_above(n) == min(m for m in good if m >= n)
    assert fft.length_above(1) == 256
    with pytest.raises(ValueError, match="270"):
        fft.make_plan(270)


# --- bins -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bins", [22, 23, 65, 811, 4051])
def test_chunks_part_the_bins(n_bins):
    borders = frequencies.chunk_borders(n_bins)
    assert borders[0] == 0 and borders[-1] == n_bins
    sizes = np.diff(borders)
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("n", [64, 127, 128, 1620])
@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.25, 0.6, EVERY_BIN])
def test_kept_bins_are_the_most_important_chunks(n, share):
    importance, n_bins = shuffled(3), n // 2 + 1
    kept = frequencies.kept_bins(n, share, importance)
    assert (np.diff(kept) > 0).all()
    assert len(kept) == (1 if share <= 0.001 else max(1, round(share * n_bins)))
    left = set(kept.tolist())
    for c in np.argsort(-importance):
        chunk = list(range(c * n_bins // 22, (c + 1) * n_bins // 22))
        if not left.issuperset(chunk):
            assert left == set(chunk[: len(left)])  # the last chunk, its lowest bins
            break
        left -= set(chunk)
    rebuilt = [k for first, count in frequencies.runs(kept) for k in range(first, first + count)]
    assert rebuilt == kept.tolist()


# --- waves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 65, 128])
def test_waves_are_orthonormal_and_span_the_kept_bins(n):
    bins = frequencies.kept_bins(n, 0.4, shuffled(n))
    basis = waves(n, bins)
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-12)
    x = np.random.default_rng(0).standard_normal((n, 3))
    spectrum = np.fft.rfft(x, axis=0)
    spectrum[np.setdiff1d(np.arange(n // 2 + 1), bins)] = 0
    np.testing.assert_allclose(basis.T @ (basis @ x), np.fft.irfft(spectrum, n, axis=0), atol=1e-12)
    assert len(waves(n, frequencies.kept_bins(n, EVERY_BIN, LOW_FIRST))) == n


@pytest.mark.parametrize("n", [1620, 131072])
def test_angles_are_reduced_in_integers(n):
    """k n reaches 2^33 here; the f64 product of angle and index would lose seven digits of it."""
    bins, at = np.array([1, n // 3, n // 2]), np.array([n - 1, n // 2 + 1])
    exact = [[np.cos(2 * np.pi * (int(k) * int(j) % n) / n) for j in at] for k in bins]
    expected = np.array(exact) * np.sqrt([[2], [2], [1]]) / np.sqrt(n)
    np.testing.assert_allclose(waves_at(n, bins, at)[:3], expected, atol=1e-15)


@pytest.mark.parametrize(("rows", "m", "d"), [(1, 1, 16), (33, 128, 80), (7, 3, 128)])
def test_project_adds_a_product(rows, m, d):
    rng = np.random.default_rng(0)
    weights, x = rng.standard_normal((rows, m)), rng.standard_normal((3, m, d))
    out = rng.standard_normal((3, rows + 5, d)).astype(np.float32)
    expected = out.copy()
    expected[:, 2 : 2 + rows] += weights @ x
    project(weights.astype(np.float32), x.astype(np.float32), out, 2)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


# --- segments and attention -----------------------------------------------------------------------


class Layer:
    """Exact rows, segments of (length, tokens) and a query, all random; K has a mean."""

    def __init__(self, n_head, n_kv, d, n_exact, segments, share, importance, seed=0):
        self.rng, self.d, self.n_exact = np.random.default_rng(seed), d, n_exact
        self.shape, self.importance, self.share = (n_kv, padded(d)), importance, share
        block = FourierBasis(128, frequencies.kept_bins(128, share, importance))
        self.spectrum = Spectrum(n_kv, padded(d), padded(d), block)
        self.tokens: list[list[np.ndarray]] = [[], []]
        for length, count in segments:
            k, v = self.random(count, 1.0), self.random(count, 0.3)
            self.tokens[0].append(k)
            self.tokens[1].append(v)
            self.spectrum.append(k, v, block if length == 128 else self.basis(length))
        self.exact = [self.random(n_exact, m).astype(np.float16) for m in (0.0, 0.3)]
        self.q = np.zeros((n_head, padded(d)), np.float32)
        self.q[:, :d] = 1.5 * self.rng.standard_normal((n_head, d))
        self.scale = np.float32(d**-0.5)
        is_plain = n_head % 2  # the others have a softcap and sinks
        self.softcap = np.float32(0 if is_plain else 8)
        self.sinks = np.linspace(0, 4, 0 if is_plain else n_head, dtype=np.float32)

    def basis(self, length: int) -> FourierBasis:
        return FourierBasis(length, frequencies.kept_bins(length, self.share, self.importance))

    def random(self, n: int, mean: float) -> np.ndarray:
        n_kv, width = self.shape
        x = np.zeros((n_kv, n, width), np.float32)
        x[..., : self.d] = self.rng.standard_normal((n_kv, n, self.d))
        x[..., : self.d] += 2 * mean * self.rng.standard_normal((n_kv, 1, self.d))
        return x

    def attend(self, n_threads: int = 1) -> np.ndarray:
        exact = layout_of(*self.exact)
        return self.spectrum.attend(
            self.q, exact, self.n_exact, self.scale, self.softcap, self.sinks, n_threads
        )

    def projected(self) -> np.ndarray:
        """In f64 by waves, from the coefficients as they are stored."""
        s, segments = self.spectrum, []
        for basis, row in zip(s.bases, s.table, strict=True):
            filled, first = row[attention.FILLED], row[attention.FIRST]
            matrix = waves(basis.n, basis.bins)[:, :filled]
            if basis.kind == attention.MEAN:
                matrix = matrix * basis.n / filled
            rows = slice(first, first + basis.n_rows)
            k, v = s.k[:, rows].astype(np.float64), s.v[:, rows].astype(np.float64)
            segments.append((matrix, k, v))
        return attention.attend_spectrum_ref(
            self.q, *self.exact, segments, self.scale, self.softcap, self.sinks
        )

    def materialised(self, tokens) -> np.ndarray:
        """Dense attention over exact rows and tokens (K, V)."""
        k, v = (
            np.concatenate([exact.astype(np.float32), *each], axis=1)
            for exact, each in zip(self.exact, tokens, strict=True)
        )
        sinks = self.sinks if len(self.sinks) else None
        return attend_dense_ref(self.q, k, v, self.scale, self.softcap, sinks)


SEGMENTS = {
    "fft": [(1620, 1620)],
    "mixed": [(675, 600), (128, 128), (512, 512), (128, 50)],
    "blocks": [(128, 128)] * 3,
    "one token": [(128, 1)],
}
GEOMETRIES = [(1, 1, 64), (4, 4, 64), (9, 3, 64), (8, 2, 80), (8, 1, 128)]


@pytest.mark.parametrize("share", [0.001, 0.25, 0.6, EVERY_BIN])
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize(("n_head", "n_kv", "d"), GEOMETRIES)
def test_projected_equals_materialised(n_head, n_kv, d, segments, share):
    layer = Layer(n_head, n_kv, d, 60, SEGMENTS[segments], share, LOW_FIRST)
    out = layer.attend()
    np.testing.assert_allclose(out, layer.projected(), atol=1e-5)
    tokens = [[each] for each in layer.spectrum.tokens()]
    np.testing.assert_allclose(out, layer.materialised(tokens), atol=1e-5)
    if share == EVERY_BIN:  # nothing is left out: the tokens themselves
        np.testing.assert_allclose(out, layer.materialised(layer.tokens), atol=1e-5)
    elif segments != "one token":
        assert np.abs(out - layer.materialised(layer.tokens)).max() > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_scattered_bins(seed):
    layer = Layer(6, 2, 64, 37, SEGMENTS["mixed"], 0.4, shuffled(seed), seed)
    np.testing.assert_allclose(layer.attend(), layer.projected(), atol=1e-5)


@pytest.mark.parametrize("n_exact", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_exact_rows_and_threads(n_exact, n_threads):
    layer = Layer(9, 3, 64, n_exact, SEGMENTS["mixed"], 0.25, LOW_FIRST)
    np.testing.assert_allclose(layer.attend(n_threads), layer.projected(), atol=1e-5)


def test_the_mean_alone_is_one_row_of_every_token():
    """Many equal keys and values: what is kept of them is all there is."""
    layer = Layer(4, 2, 64, 20, [(1620, 1500), (128, 128)], 0.001, LOW_FIRST)
    assert [basis.kind for basis in layer.spectrum.bases] == [attention.MEAN] * 2
    assert layer.spectrum.n_rows == 2
    means = [[np.repeat(x.mean(1, keepdims=True), x.shape[1], 1) for x in t] for t in layer.tokens]
    np.testing.assert_allclose(layer.attend(), layer.materialised(means), atol=1e-3)


# --- tokens that are added ------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "share"), [(1620, 0.25), (1620, EVERY_BIN), (128, 0.4)])
@pytest.mark.parametrize("at_once", [1, 8, 13])
@pytest.mark.parametrize(("n_head", "d"), [(2, 64), (6, 64), (8, 80), (16, 128)])
def test_adding_equals_transforming(length, share, at_once, n_head, d):
    """docs/methods.md, step 3: relative error of the coefficients below 1e-5."""
    layer = Layer(n_head, 2, d, 1, [], share, shuffled(1))
    k, v = layer.random(length, 1.0), layer.random(length, 1.0)
    basis = layer.basis(length)
    whole = Spectrum(2, padded(d), padded(d), layer.spectrum.block)
    whole.append(k, v, basis)
    grown, start = layer.spectrum, length - 104
    grown.append(k[:, :start], v[:, :start], basis)
    for i in range(start, length, at_once):
        grown.add(k[:, i : i + at_once], v[:, i : i + at_once])
    assert grown.room == 0 and grown.n_tokens == length
    for actual, expected in ((grown.k, whole.k), (grown.v, whole.v)):
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert error < 1e-6
    layer.spectrum, out = whole, []
    for layer.spectrum in (whole, grown):
        out.append(layer.attend())
    np.testing.assert_allclose(*out, atol=1e-5)


def test_rows_grow_with_what_they_hold():
    layer = Layer(2, 2, 64, 1, [], 0.25, LOW_FIRST)
    spectrum, block = layer.spectrum, layer.spectrum.block
    outs = []
    for _ in range(12):
        spectrum.append(layer.random(128, 1.0), layer.random(128, 1.0), block)
        outs.append(layer.attend())
        assert spectrum.k.shape[1] <= spectrum.n_rows * 9 / 8 + 33
    assert spectrum.n_tokens == 12 * 128 and spectrum.n_rows == 12 * block.n_rows
    assert block.n_rows == 2 * round(0.25 * 65) - 1
    assert all(np.abs(a - b).max() > 1e-3 for a, b in pairwise(outs))
    np.testing.assert_allclose(outs[-1], layer.projected(), atol=1e-5)
