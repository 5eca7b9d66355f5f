"""Mean and covariance of stored rows, for LFPS' high-sparsity test (eq 5, 6).

They come from sums over blocks of rows. The sums are kept, so that a later prefill adds only its
own rows. Blocks always start at the same rows. So the result does not depend on how calls split the
rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange

from sparsekv_cli.cpu.attention.rows import K_HEAD, K_KIND, K_ROW, K, V
from sparsekv_cli.cpu.attention.tile import tile_values
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.lfps.history import SINKS
from sparsekv_cli.cpu.vector.put import put

BLOCK = 256  # rows
STEP = 4  # rows that one pass adds to the products
# From this row on, every fourth row is added to the products, four times.
SAMPLED_FROM, EVERY = 16384, 4
BACK = 1024  # last rows that the first sums of a sequence leave out: the question lies there


class Moments(NamedTuple):
    """Sums over the first rows of each kv head, in whole blocks."""

    n: np.ndarray  # int64 (1,): rows in the sums; if it is 0, the next call starts from no rows
    centre: np.ndarray  # f32 (G, d): mean of the first block; sums around it lose few digits
    rows: np.ndarray  # f64 (G, d): sum of the rows
    # f32 (G, d, d), or (G, 0, 0): sum of (row - centre)(row - centre)'; only from the tile of the
    # diagonal on
    products: np.ndarray

    def copy(self) -> Moments:
        return Moments(*(array.copy() for array in self))

    def set_to(self, other: Moments) -> None:
        """Makes these sums equal to others of the same sizes."""
        for mine, given in zip(self, other, strict=True):
            mine[...] = given


def make_moments(n_kv_head: int, d: int, *, covariance: bool) -> Moments:
    """Returns the sums of no rows."""
    size = d if covariance else 0
    return Moments(
        np.zeros(1, np.int64),
        np.zeros((n_kv_head, d), np.float32),
        np.zeros((n_kv_head, d)),
        np.zeros((n_kv_head, size, size), np.float32),
    )


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def mean_and_covariance(layout, of, first, n, moments, mean, covariance, n_threads):
    """Computes mean f32 (G, d) and covariance f32 (G, d, d) of n rows of each kv head, d padded.

    layout int64 (8,): see attention/rows.py; of: its column K or V. first: the first of the n rows.
    moments: the sums of earlier calls, to which this call adds whole blocks. If covariance and
    moments.products have shape (G, 0, 0), it computes only the mean.
    """
    n_kv_head, row_bytes, kind = mean.shape[0], layout[K_ROW + of], layout[K_KIND + of]
    for part in prange(n_threads):
        for g in range(part, n_kv_head, n_threads):
            at = layout[of] + g * layout[K_HEAD + of] + first * row_bytes
            _one_head(
                at, row_bytes, kind, n, moments.n[0], moments.centre[g], moments.rows[g],
                moments.products[g], mean[g], covariance[g],
            )  # fmt: skip
    moments.n[0] = n // BLOCK * BLOCK


@njit(cache=True, nogil=True)
def _one_head(at, row_bytes, kind, n, n_known, centre, rows, products, mean, covariance):
    whole = n // BLOCK * BLOCK
    if n_known == 0:
        rows[:] = 0
        products[:] = 0
        count = min(n, BLOCK)
        _add(at, row_bytes, kind, 0, count, centre, rows, covariance[:0])
        for i in range(len(centre)):
            centre[i] = rows[i] / count
        rows[:] = 0
    for start in range(n_known, whole, BLOCK):
        _add(at, row_bytes, kind, start, BLOCK, centre, rows, products)
    total = rows.copy()
    for i in range(len(covariance)):
        put(covariance[i], products[i])
    _add(at, row_bytes, kind, whole, n - whole, centre, total, covariance)
    for i in range(len(mean)):
        mean[i] = total[i] / n
    for i in range(covariance.shape[0]):
        for j in range(i, covariance.shape[0]):
            off = (mean[i] - centre[i]) * (mean[j] - centre[j])
            covariance[i, j] = covariance[i, j] / np.float32(n) - off
            covariance[j, i] = covariance[i, j]


@njit(cache=True, nogil=True, fastmath={"contract"})
def _add(at, row_bytes, kind, first, count, centre, total, products):
    """Adds at most BLOCK rows from row ``first`` on to total f64 (d,), and to products f32 (d, d)
    unless it is empty.
    """
    at += first * row_bytes
    every = EVERY if first >= SAMPLED_FROM else 1
    weight = np.float32(np.sqrt(every))
    d = centre.shape[0]
    one, part = np.ones(BLOCK, np.float32), np.zeros(d, np.float32)
    tile_values(1, kind, one, 0, at, row_bytes, 0, count, d, part)
    total += part
    if products.shape[0] == 0:
        return
    rows = np.empty((STEP, d), np.float32)
    for start in range(0, count, STEP * every):
        rows[:] = 0
        for i in range(min(STEP, (count - start + every - 1) // every)):
            row = at + (start + i * every) * row_bytes
            tile_values(1, kind, one, 0, row, row_bytes, 0, 1, d, rows[i])
            rows[i] = weight * (rows[i] - centre)
        for tile in range(0, d, LANES):  # what lies left of the diagonal's tile is not needed
            a, b, c, e = rows[0, tile:], rows[1, tile:], rows[2, tile:], rows[3, tile:]
            for i in range(LANES):
                out = products[tile + i, tile:]
                for j in range(d - tile):
                    out[j] += a[i] * a[j] + b[i] * b[j] + c[i] * c[j] + e[i] * e[j]


class RowSums:
    """The sums over a layer's rows of K and V after the sinks, at two lengths of the sequence.

    The later length is where the last prefill ended. The earlier length is where the prefill before
    it ended. After the first prefill, it is BACK rows before the end. Both are cut to whole blocks.

    The sums at the earlier length save work after a rewind. If the sequence goes back to this
    length or a later one, ``extend`` reads only the rows from there on.
    """

    def __init__(self, n_kv_head: int, d: int, d_v: int, *, covariance: bool) -> None:
        self._now = (
            make_moments(n_kv_head, d, covariance=covariance),
            make_moments(n_kv_head, d_v, covariance=False),
        )
        self._earlier = self._now  # the same objects mean that there are no earlier sums
        self._no_covariance = np.empty((n_kv_head, 0, 0), np.float32)

    def extend(
        self,
        layout: np.ndarray,
        n: int,
        means: tuple[np.ndarray, np.ndarray],
        covariance: np.ndarray,
        n_threads: int,
    ) -> None:
        """Computes means f32 (G, d) and the covariance f32 (G, d, d), or (G, 0, 0), of n rows."""
        n -= SINKS
        is_first = self._now[0].n[0] == 0 and n - BACK >= BLOCK
        covariances = covariance, self._no_covariance
        for length in [(n - BACK) // BLOCK * BLOCK, n] if is_first else [n]:
            if 0 < self._now[0].n[0] < length // BLOCK * BLOCK:
                self._earlier = self._now[0].copy(), self._now[1].copy()
            for of, *parts in zip((K, V), self._now, means, covariances, strict=True):
                mean_and_covariance(layout, of, SINKS, length, *parts, n_threads)

    def truncate(self, n: int) -> None:
        """Drops the sums if they include rows after the first n."""
        if n >= SINKS + self._now[0].n[0]:
            return
        if n < SINKS + self._earlier[0].n[0]:
            self._earlier = self._now
        for now, earlier in zip(self._now, self._earlier, strict=True):
            if earlier is now:
                now.n[0] = 0
            else:
                now.set_to(earlier)

    def copy(self, of: RowSums, n: int) -> None:
        """Copies another layer's sums if they include only the first n rows, which both have."""
        for given in (of._earlier, of._now):
            if 0 < given[0].n[0] <= n - SINKS:
                for now, moments in zip(self._now, given, strict=True):
                    now.set_to(moments)

    @property
    def nbytes(self) -> int:
        kept = {id(moments): moments for moments in (*self._now, *self._earlier)}
        return sum(array.nbytes for moments in kept.values() for array in moments)


def mean_and_covariance_ref(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean (G, d) and covariance (G, d, d) of rows (G, n, d), in f64."""
    rows = rows.astype(np.float64)
    mean, centre = rows.mean(1), rows[:, :BLOCK].mean(1)
    later = rows[:, SAMPLED_FROM::EVERY] - centre[:, None]
    centred = np.concatenate([rows[:, :SAMPLED_FROM] - centre[:, None], 2 * later], axis=1)
    off = mean - centre
    covariance = np.einsum("gni,gnj->gij", centred, centred) / rows.shape[1]
    return mean, covariance - off[:, :, None] * off[:, None]
