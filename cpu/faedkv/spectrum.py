"""The transformed tokens of one layer: coefficient rows and the table of their segments.

Segments follow each other in time; tokens can be added to the last one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numba import njit

from sparsekv_cli.cpu.faedkv import attention as kernels
from sparsekv_cli.cpu.faedkv import fft, frequencies
from sparsekv_cli.cpu.jit.pointers import on_lines

DIRECT_BELOW = 512  # tokens of a segment under which a product with its waves is cheaper than FFTs


def waves(n: int, bins: np.ndarray) -> np.ndarray:
    """The basis of kept bins: f64 (rows, n), orthonormal; angles are reduced in integers."""
    return waves_at(n, bins, np.arange(n))


def waves_at(n: int, bins: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Columns ``at`` of ``waves``: what tokens with these numbers add to the coefficients."""
    turns = np.multiply.outer(bins, at) % n
    cos, sin = _circle(n)
    single = is_single(n, bins)
    norm = np.sqrt(np.where(single, 1, 2) / n)[:, None]
    return np.concatenate([norm * cos[turns], -(norm * sin[turns])[~single]])


@lru_cache(maxsize=16)
def _circle(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of n angles around the circle, f64."""
    angles = 2 * np.pi * np.arange(n) / n
    return np.cos(angles), np.sin(angles)


def is_single(n: int, bins: np.ndarray) -> np.ndarray:
    """Whether a bin has one wave only: the mean, and the highest one of an even length."""
    return (bins == 0) | (2 * bins == n)


@njit(cache=True, nogil=True, fastmath=kernels.FAST)
def project(weights, x, out, first):
    """out[g, first + i] += sum over j of weights[i, j] x[g, j]

    weights f32 (rows, m); x f32 (G, m, d); out f32 (G, >= first + rows, >= d).
    """
    for g in range(x.shape[0]):
        rows, tokens = out[g], x[g]
        for i in range(weights.shape[0]):
            for j in range(x.shape[1]):
                part = weights[i, j]
                for c in range(x.shape[2]):
                    rows[first + i, c] += part * tokens[j, c]


class FourierBasis:
    """The waves (kept bins) of a segment of up to n tokens."""

    def __init__(self, n: int, bins: np.ndarray) -> None:
        self.n, self.bins = n, bins.astype(np.int64)
        self.runs = frequencies.runs(self.bins)
        self.n_rows = 2 * len(bins) - int(is_single(n, self.bins).sum())
        self.plan = None
        self.matrix = np.zeros((0, n), np.float32)
        self.kind = kernels.MEAN if self.bins.tolist() == [0] else kernels.DIRECT
        if n < DIRECT_BELOW:
            self.matrix = waves(n, self.bins).astype(np.float32)
        elif self.kind != kernels.MEAN:
            self.kind, self.plan = kernels.FFT, fft.make_plan(n)

    def table_row(self, filled: int, first: int) -> list[int]:
        """This basis as a row of the table in cpu/faedkv/attention.py; it holds addresses."""
        numbers = twiddles = 0
        if self.plan is not None:
            numbers, twiddles = (_address(a) for a in (self.plan.numbers, self.plan.twiddles))
        runs = _address(self.runs), len(self.runs)
        return [self.kind, self.n, filled, first, len(self.bins), *runs, numbers, twiddles]

    def coefficients(self, x: np.ndarray) -> np.ndarray:
        """x f32 (G, m, d), m <= n -> f32 (G, n_rows, d)."""
        if len(self.matrix):
            out = np.zeros((len(x), self.n_rows, x.shape[2]), np.float32)
            project(self.matrix[:, : x.shape[1]].copy(), x, out, 0)
            return out
        if self.kind == kernels.MEAN:
            return x.sum(1, keepdims=True, dtype=np.float32) * np.float32(self.n**-0.5)
        spectrum = np.fft.rfft(x, n=self.n, axis=1)[:, self.bins]
        single = is_single(self.n, self.bins)
        spectrum *= np.sqrt(np.where(single, 1, 2) / self.n)[:, None]
        return np.concatenate([spectrum.real, spectrum.imag[:, ~single]], axis=1)

    def tokens(self, rows: np.ndarray, filled: int) -> np.ndarray:
        """The tokens that the coefficients f32 (G, n_rows, d) stand for: (G, filled, d)."""
        if self.kind == kernels.MEAN:
            return np.repeat(rows * np.float32(self.n**0.5 / filled), filled, axis=1)
        if self.kind == kernels.DIRECT:
            return np.einsum("ij,gid->gjd", self.matrix[:, :filled], rows)
        n_bin, keep = self.n // 2 + 1, len(self.bins)
        single = is_single(self.n, self.bins)
        spectrum = np.zeros((len(rows), n_bin, rows.shape[2]), np.complex64)
        spectrum[:, self.bins] = rows[:, :keep]
        spectrum[:, self.bins[~single]] += 1j * rows[:, keep:]
        spectrum[:, self.bins] *= np.sqrt(self.n / np.where(single, 1, 2))[:, None]
        return np.fft.irfft(spectrum, n=self.n, axis=1)[:, :filled]


class Mark(NamedTuple):
    """What a spectrum was at some moment, so that it can go back."""

    n_tokens: int
    n_rows: int
    n_segments: int
    # The rows of the last segment of K and V, and how many tokens it held; None: no segments.
    last: tuple[np.ndarray, np.ndarray, int] | None


class Spectrum:
    """Coefficient rows of K and V, f32 (G, capacity, width), and the table of segments."""

    def __init__(self, n_head_kv: int, width: int, width_v: int, block: FourierBasis) -> None:
        self.block = block
        self.k = np.zeros((n_head_kv, 0, width), np.float32)
        self.v = np.zeros((n_head_kv, 0, width_v), np.float32)
        self.n_rows = 0
        self.n_tokens = 0
        self.bases: list[FourierBasis] = []
        self.table = np.zeros((0, kernels.N_COLUMNS), np.int64)

    @property
    def n_segments(self) -> int:
        return len(self.table)

    @property
    def nbytes(self) -> int:
        """Bytes of the coefficients; plans are shared by the layers and not counted."""
        return self.k.nbytes + self.v.nbytes + self.block.matrix.nbytes + self.table.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of K and V in one kv head."""
        return self.k.strides[1] + self.v.strides[1]

    @property
    def room(self) -> int:
        """Tokens that can be added to the last segment."""
        if not len(self.table):
            return 0
        return int(self.table[-1, kernels.LENGTH] - self.table[-1, kernels.FILLED])

    def reserve(self, n: int) -> None:
        """Room for n rows; if it has to grow, at least an eighth more."""
        capacity = self.k.shape[1]
        if n <= capacity:
            return
        capacity = max(n, capacity + capacity // 8 + 32 if capacity else 0)
        for name in ("k", "v"):
            old = getattr(self, name)
            new = on_lines((old.shape[0], capacity, old.shape[2]), np.float32, zeros=True)
            new[:, : self.n_rows] = old[:, : self.n_rows]
            setattr(self, name, new)

    def append(self, k: np.ndarray, v: np.ndarray, basis: FourierBasis) -> None:
        """A new segment of tokens k f32 (G, m, d), v f32 (G, m, d_v), m <= basis.n."""
        first, n_new = self.n_rows, basis.n_rows
        self.reserve(first + n_new)
        for target, x in ((self.k, k), (self.v, v)):
            target[:, first : first + n_new, : x.shape[2]] = basis.coefficients(x)
        self.n_rows += n_new
        self.n_tokens += k.shape[1]
        self.bases.append(basis)
        self.table = np.vstack([self.table, basis.table_row(k.shape[1], first)])

    def add(self, k: np.ndarray, v: np.ndarray) -> None:
        """Adds tokens to the last segment (docs/methods.md, step 3): f32 (G, m, d), m <= room."""
        assert k.shape[1] <= self.room
        basis, row = self.bases[-1], self.table[-1]
        at = np.arange(row[kernels.FILLED], row[kernels.FILLED] + k.shape[1])
        weights = waves_at(basis.n, basis.bins, at).astype(np.float32)
        for target, x in ((self.k, k), (self.v, v)):
            project(weights, x, target, int(row[kernels.FIRST]))
        row[kernels.FILLED] += k.shape[1]
        self.n_tokens += k.shape[1]

    def mark(self) -> Mark:
        last = None
        if len(self.table):
            row = self.table[-1]
            rows = slice(int(row[kernels.FIRST]), self.n_rows)
            last = self.k[:, rows].copy(), self.v[:, rows].copy(), int(row[kernels.FILLED])
        return Mark(self.n_tokens, self.n_rows, len(self.table), last)

    def go_back(self, mark: Mark) -> None:
        """Takes back what came after ``mark``."""
        self.n_tokens, self.n_rows, n, last = mark
        self.bases, self.table = self.bases[:n], self.table[:n].copy()
        if last is not None:
            k, v, self.table[-1, kernels.FILLED] = last
            rows = slice(int(self.table[-1, kernels.FIRST]), self.n_rows)
            self.k[:, rows], self.v[:, rows] = k, v

    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens back in the time domain, lossy: f32 (G, n_tokens, width) of K and of V."""
        out = []
        for array in (self.k, self.v):
            parts = []
            for basis, row in zip(self.bases, self.table, strict=True):
                rows = array[:, row[kernels.FIRST] : row[kernels.FIRST] + basis.n_rows]
                parts.append(basis.tokens(rows, int(row[kernels.FILLED])))
            out.append(np.concatenate(parts, axis=1))
        return out[0], out[1]

    def attend(
        self,
        q: np.ndarray,
        exact: np.ndarray,
        n: int,
        scale: np.float32,
        softcap: np.float32,
        sinks: np.ndarray,
        n_threads: int,
    ) -> np.ndarray:
        """Attention f32 (H, d_v) of q f32 (H, d) over n exact rows (layout) and all segments.

        softcap, sinks: see ``attend_spectrum``.
        """
        out = np.empty((len(q), self.v.shape[2]), np.float32)
        kernels.attend_spectrum(
            q, exact, n, self.k, self.v, self.n_rows, self.table, self.block.matrix, scale, softcap,
            sinks, out, n_threads,
        )  # fmt: skip
        return out


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]
