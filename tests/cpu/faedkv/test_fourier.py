"""Bins, waves and bases that tokens are added to of FAEDKV against literal references."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.cpu.faedkv import frequencies
from sparsekv_cli.cpu.faedkv.frequencies import FourierBasis, centred_waves
from sparsekv_cli.cpu.faedkv.spectrum import Spectrum, turns_at

LOW_FIRST = -np.arange(
    frequencies.N_CHUNKS, dtype=np.float32
)  # low frequencies are the most important
EVERY_BIN = 0.99999  # a share that rounds to all bins; a share of 1 is for the method to handle


def shuffled(seed: int) -> np.ndarray:
    """An importance by which the kept bins are scattered, the mean perhaps not among them."""
    return np.random.default_rng(seed).permutation(frequencies.N_CHUNKS).astype(np.float32)


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


def test_lengths():
    for n in (256, 300, 511, 1999, 2048):
        lengths = [m for m in range(n, 4 * n) if 30**20 % m == 0]
        assert frequencies.length_above(n) == lengths[0]


# --- waves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 65, 128])
def test_waves_are_orthonormal_and_span_the_kept_bins(n):
    bins = frequencies.kept_bins(n, 0.4, shuffled(n))
    basis, n_waves = centred_waves(n, bins)
    assert len(basis) == sum(n_waves) == frequencies.FourierBasis(n, bins).n_rows
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-12)
    x = np.random.default_rng(0).standard_normal((n, 3))
    spectrum = np.fft.rfft(x, axis=0)
    spectrum[np.setdiff1d(np.arange(n // 2 + 1), bins)] = 0
    np.testing.assert_allclose(basis.T @ (basis @ x), np.fft.irfft(spectrum, n, axis=0), atol=1e-12)
    assert len(centred_waves(n, frequencies.kept_bins(n, EVERY_BIN, LOW_FIRST))[0]) == n


@pytest.mark.parametrize("n", [1620, 131072])
def test_angles_are_reduced_in_integers(n):
    """k n reaches 2^33 here; the f64 product of angle and index would lose seven digits of it."""
    bins, at = np.array([1, n // 3, n // 2]), np.array([n - 1, n // 2 + 1])
    exact = [[np.cos(2 * np.pi * (int(k) * int(j) % n) / n) for j in at] for k in bins]
    np.testing.assert_allclose(turns_at(n, bins, at).real, exact, atol=1e-15)


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
        store = SimpleNamespace(k=self.exact[0], v=self.exact[1], n=self.n_exact)
        return self.spectrum.attend(self.q, store, self.scale, self.softcap, self.sinks, n_threads)

    def rebuilt(self) -> list[list[np.ndarray]]:
        """All tokens of K and of V in f64 by a literal DFT, from the bins as they are stored."""
        parts: list[list[np.ndarray]] = [[], []]
        for basis, filled, *spectra in self.spectrum.segments:
            waves = turns_at(basis.n, basis.bins, np.arange(filled)).conj()
            waves *= np.where(basis.is_single, 1, 2)[:, None]
            size = filled if basis.is_mean else basis.n
            for part, spectrum in zip(parts, spectra, strict=True):
                part.append(np.einsum("kn,gkd->gnd", waves, spectrum).real / size)
        return parts

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
    rebuilt = layer.rebuilt()
    np.testing.assert_allclose(out, layer.materialised(rebuilt), atol=1e-5)
    for tokens, wanted in zip(layer.spectrum.tokens(), rebuilt, strict=True):
        np.testing.assert_allclose(tokens, np.concatenate(wanted, axis=1), atol=1e-5)
    if share == EVERY_BIN:  # nothing is left out: the tokens themselves
        np.testing.assert_allclose(out, layer.materialised(layer.tokens), atol=1e-5)
    elif segments != "one token":
        assert np.abs(out - layer.materialised(layer.tokens)).max() > 0.05


@pytest.mark.parametrize("seed", range(4))
def test_scattered_bins(seed):
    layer = Layer(6, 2, 64, 37, SEGMENTS["mixed"], 0.4, shuffled(seed), seed)
    np.testing.assert_allclose(layer.attend(), layer.materialised(layer.rebuilt()), atol=1e-5)


@pytest.mark.parametrize("n_exact", [1, 63, 64, 65, 257])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_exact_rows_and_threads(n_exact, n_threads):
    layer = Layer(9, 3, 64, n_exact, SEGMENTS["mixed"], 0.25, LOW_FIRST)
    np.testing.assert_allclose(
        layer.attend(n_threads), layer.materialised(layer.rebuilt()), atol=1e-5
    )


def test_the_mean_alone_is_one_row_of_every_token():
    """Many equal keys and values: what is kept of them is all there is."""
    layer = Layer(4, 2, 64, 20, [(1620, 1500), (128, 128)], 0.001, LOW_FIRST)
    assert [segment.basis.is_mean for segment in layer.spectrum.segments] == [True] * 2
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
    assert grown.n_segments == whole.n_segments == 1
    for actual, expected in zip(grown.segments[0][2:], whole.segments[0][2:], strict=True):
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
        n_complex = 2 * 2 * 64 * spectrum.n_segments * len(block.bins)  # K and V of two heads
        assert spectrum.nbytes == 8 * n_complex
    assert spectrum.n_tokens == 12 * 128 and spectrum.n_rows == 12 * block.n_rows
    assert block.n_rows == 2 * round(0.25 * 65) - 1
    assert all(np.abs(a - b).max() > 1e-3 for a, b in pairwise(outs))
    np.testing.assert_allclose(outs[-1], layer.materialised(layer.rebuilt()), atol=1e-5)
