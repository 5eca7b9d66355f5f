"""FAEDKV's blocks against attention over the keys and values that their rows stand for."""

from types import SimpleNamespace

import numpy as np
import pytest

from sparsekv_cli.cache.spec import NO_SINKS
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.attention.decode import attend_dense_ref
from sparsekv_cli.cpu.attention.rows import layout_of
from sparsekv_cli.cpu.faedkv.blocks import BlockSpectrum
from sparsekv_cli.cpu.faedkv.frequencies import N_CHUNKS, FourierBasis, kept_bins

LOW_FIRST = -np.arange(N_CHUNKS)
SHUFFLED = np.random.default_rng(3).permutation(N_CHUNKS)


def half(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float16)


def with_bins(x: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """x (.., n, d) with only some bins of its spectrum along n."""
    spectrum = np.fft.rfft(x, axis=-2)
    kept = np.zeros_like(spectrum)
    kept[..., bins, :] = spectrum[..., bins, :]
    return np.fft.irfft(kept, n=x.shape[-2], axis=-2)


@pytest.mark.parametrize(("n_head", "n_kv", "d"), [(9, 3, 64), (8, 1, 80), (4, 4, 128)])
@pytest.mark.parametrize(
    ("length", "n_block", "share", "importance"),
    [
        (128, 9, 0.25, LOW_FIRST),
        (128, 300, 0.001, LOW_FIRST),  # the mean only, more than are taken at once
        (100, 7, 0.1, LOW_FIRST),
        (44, 17, 0.5, LOW_FIRST),  # more than a group of blocks
        (16, 40, 0.9, SHUFFLED),
        (256, 3, 0.001, SHUFFLED),  # a wave that is not the mean
    ],
)
def test_blocks_equal_what_they_stand_for(n_head, n_kv, d, length, n_block, share, importance):
    rng = np.random.default_rng(length)
    bins = kept_bins(length, share, importance)
    spectrum = BlockSpectrum(n_kv, padded(d), padded(d), FourierBasis(length, bins))
    scales = np.exp(rng.uniform(-4, 4, (n_block, 1, 1)))  # blocks have gains of their own
    k, v = (rng.standard_normal((n_kv, n_block, length, d)) for _ in range(2))
    v *= scales
    for part in np.array_split(np.arange(n_block), 3):
        given = (x[:, part].reshape(n_kv, -1, d).astype(np.float32) for x in (k, v))
        spectrum.append(*given)
    assert spectrum.n_tokens == n_block * length
    n_single = np.isin(bins, (0, length / 2)).sum()
    assert spectrum.n_rows == n_block * (2 * len(bins) - n_single)

    expected = [with_bins(x, bins) for x in (k, v)]
    expected = [x.reshape(n_kv, -1, d) for x in expected]
    actual = spectrum.tokens()
    for each, wanted in zip(actual, expected, strict=True):
        size = np.repeat(abs(wanted).reshape(n_kv, n_block, -1).max((0, 2)), length)[:, None]
        assert (abs(each[..., :d] - wanted) <= 2e-3 * size).all()

    q = rng.standard_normal((n_head, padded(d))).astype(np.float32)
    q[:, d:] = 0
    scale = np.float32(d**-0.5)
    exact = [np.pad(half(rng, n_kv, 60, d), [(0, 0), (0, 0), (0, padded(d) - d)]) for _ in range(2)]
    softcap, sinks = (np.float32(0), NO_SINKS) if n_kv == 1 else (np.float32(2), q[:, 0] + 4)
    store = SimpleNamespace(layout=layout_of(*exact), n=60)
    out = spectrum.attend(q, store, scale, softcap, sinks, 1 + n_block % 2)
    rows = [np.concatenate(pair, 1) for pair in zip(exact, actual, strict=True)]
    reference = attend_dense_ref(q, *rows, scale, softcap, sinks if len(sinks) else None)
    np.testing.assert_allclose(out, reference, rtol=1e-3, atol=1e-3 * abs(v).max())


def test_blocks_are_forgotten():
    rng = np.random.default_rng(0)
    spectrum = BlockSpectrum(1, 16, 16, FourierBasis(32, kept_bins(32, 0.5, LOW_FIRST)))
    x = rng.standard_normal((1, 96, 16)).astype(np.float32)
    spectrum.append(x[:, :64], x[:, :64])
    before, mark = spectrum.tokens(), spectrum.mark()
    spectrum.append(x[:, 64:], x[:, 64:])
    spectrum.go_back(mark)
    for actual, expected in zip(spectrum.tokens(), before, strict=True):
        np.testing.assert_array_equal(actual, expected)
