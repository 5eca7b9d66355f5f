"""FAEDKV with ``update=additive``, in numpy: tokens are added to transformed segments.

A segment is a run of tokens. Its K and V were transformed along the tokens by a DFT of N points.
Only a few bins are kept. No key and no value is reconstructed: z = X_K . q on the kept bins. The
scores are the inverse DFT of z. P, the DFT of the softmax weights, weighs the bins of V.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cpu.faedkv.frequencies import FourierBasis
from sparsekv_cli.cpu.jit.threads import blas_threads


def turns_at(n: int, bins: np.ndarray, at: np.ndarray) -> np.ndarray:
    """e^(-2 pi i k j / n) complex128 (bins, tokens); the angles are reduced in integers."""
    return np.exp(-2j * np.pi / n * (np.multiply.outer(bins, at) % n))


class Segment(NamedTuple):
    """``filled`` tokens in a basis of N points. The arrays never change."""

    basis: FourierBasis
    filled: int
    k: np.ndarray  # X_K complex64 (G, bins, d)
    v: np.ndarray  # X_V complex64 (G, bins, d_v)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def size(self) -> int:
        """Divisor of a sum over the bins. If only the mean is kept, it is the number of tokens."""
        return self.filled if self.basis.is_mean else self.basis.n

    def with_tokens(self, k: np.ndarray, v: np.ndarray) -> Segment:
        """X[k] += x_n e^(-2 pi i k n / N) (docs/methods.md, step 3) for f32 (G, m, d), (G, m, d_v).

        The new tokens follow the present ones.
        """
        m, basis = k.shape[1], self.basis
        turns = turns_at(basis.n, basis.bins, self.filled + np.arange(m))
        sums = [old + turns @ x for old, x in ((self.k, k), (self.v, v))]
        return Segment(basis, self.filled + m, *(each.astype(np.complex64) for each in sums))

    def inverse(self, z: np.ndarray) -> np.ndarray:
        """Returns the tokens f64 (G, filled, any) whose bins are z complex (G, bins, any)."""
        n = self.basis.n
        spectrum = np.zeros((len(z), n // 2 + 1, z.shape[2]), np.complex128)
        spectrum[:, self.basis.bins] = z * (n / self.size)
        return np.fft.irfft(spectrum, n=n, axis=1)[:, : self.filled]

    def weighted(self, weights: np.ndarray) -> np.ndarray:
        """Returns weights f64 (G, heads, filled) times the values: f64 (G, heads, d_v)."""
        basis = self.basis
        bins = np.fft.rfft(weights, n=basis.n)[..., basis.bins]
        bins *= np.where(basis.is_single, 1, 2)  # the others have a mirror image
        return (bins.conj() @ self.v).real / self.size


class Mark(NamedTuple):
    """A state of a spectrum, to which ``go_back`` returns."""

    n_tokens: int
    segments: tuple[Segment, ...] = ()


class Spectrum:
    """The segments of one layer, in token order. block: the basis of short segments."""

    def __init__(self, n_head_kv: int, width: int, width_v: int, block: FourierBasis) -> None:
        self.block = block
        self.segments: tuple[Segment, ...] = ()
        self.row_bytes = 4 * (width + width_v)  # K and V of a kv head; a bin has two rows

    @property
    def n_segments(self) -> int:
        return len(self.segments)

    @property
    def n_tokens(self) -> int:
        return sum(segment.filled for segment in self.segments)

    @property
    def n_rows(self) -> int:
        return sum(segment.basis.n_rows for segment in self.segments)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    @property
    def room(self) -> int:
        """Tokens that can be added to the last segment."""
        return self.segments[-1].basis.n - self.segments[-1].filled if self.segments else 0

    def append(self, k: np.ndarray, v: np.ndarray, basis: FourierBasis) -> None:
        """Appends a segment of tokens k f32 (G, m, d), v f32 (G, m, d_v), m <= basis.n (eq 4)."""
        wide = (x.astype(np.float64) for x in (k, v))
        spectra = [np.fft.rfft(x, n=basis.n, axis=1)[:, basis.bins] for x in wide]
        arrays = [spectrum.astype(np.complex64) for spectrum in spectra]
        self.segments += (Segment(basis, k.shape[1], *arrays),)

    def add(self, k: np.ndarray, v: np.ndarray) -> None:
        """Adds tokens to the last segment: f32 (G, m, d), m <= room."""
        assert k.shape[1] <= self.room
        self.segments = (*self.segments[:-1], self.segments[-1].with_tokens(k, v))

    def mark(self) -> Mark:
        return Mark(self.n_tokens, self.segments)

    def go_back(self, mark: Mark) -> None:
        """Drops the tokens after ``mark``."""
        self.segments = mark.segments

    def copied_bytes(self, mark: Mark) -> int:
        """Returns the bytes of the segments of ``mark`` to which tokens were added since."""
        held = {id(segment) for segment in self.segments}
        return sum(segment.nbytes for segment in mark.segments if id(segment) not in held)

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all tokens in the time domain, lossy: f32 (G, n_tokens, width) of K and of V."""
        parts = zip(*((s.inverse(s.k), s.inverse(s.v)) for s in self.segments), strict=True)
        k, v = (np.concatenate(part, axis=1).astype(np.float32) for part in parts)
        return k, v

    def attend(
        self,
        q: np.ndarray,
        store: Any,
        scale: np.float32,
        softcap: np.float32,
        sinks: np.ndarray,
        n_threads: int,
    ) -> np.ndarray:
        """Returns attention f32 (H, d_v) of q f32 (H, d) over a KVStore's rows and all segments.

        softcap: 0 for none; sinks f32 (H,): scores without values, or empty.
        """
        exact_k, exact_v = (rows[:, : store.n].astype(np.float64) for rows in (store.k, store.v))
        q_kv = (np.float64(scale) * q).reshape(len(exact_k), -1, q.shape[1])  # (G, heads, d)
        q_columns = q_kv.swapaxes(1, 2)
        with blas_threads(n_threads):
            parts = [exact_k @ q_columns, *(s.inverse(s.k @ q_columns) for s in self.segments)]
            scores = np.concatenate(parts, axis=1).swapaxes(1, 2)  # (G, heads, n)
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            sink = sinks.reshape(*q_kv.shape[:2], 1) if len(sinks) else -np.inf
            peak = np.maximum(scores.max(-1, keepdims=True), sink)
            weights = np.exp(scores - peak)
            out, at = weights[..., : store.n] @ exact_v, store.n
            for segment in self.segments:
                out += segment.weighted(weights[..., at : at + segment.filled])
                at += segment.filled
        out /= weights.sum(-1, keepdims=True) + np.exp(sink - peak)
        return out.reshape(len(q), -1).astype(np.float32)
