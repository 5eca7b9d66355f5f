"""LFPS' tables ahead of a step, which may be taken back.

A step changes few entries: those of the rows that a head attends to. Only these are copied, and the
small arrays. ``rescale`` changes all entries, once in some hundred steps; then all are copied.
"""

import numpy as np
from numba import njit

from sparsekv_cli.cpu.lfps.history import RESCALE_BELOW, Tables
from sparsekv_cli.cpu.lfps.search import PendingUpdate


class SavedTables:
    """The tables of one layer ahead of a step."""

    def __init__(self, tables: Tables, decay: float, *others: np.ndarray) -> None:
        """others: further arrays, which do not grow."""
        self._bounds = tables.ver_bounds.copy(), tables.dist_bounds.copy()
        self._fixed = [(each, each.copy()) for each in (tables.sums, tables.gain, *others)]
        rescales = tables.gain.min() * decay < RESCALE_BELOW
        self._whole = (tables.ver.copy(), tables.dist.copy()) if rescales else None
        # Rows int32 (H, m), their entries f32 (2, H, m), rows in use int64 (H,), n of the step.
        self._entries: tuple[np.ndarray, np.ndarray, np.ndarray, int] | None = None

    def keep_entries(self, tables: Tables, pending: PendingUpdate, n: int) -> None:
        """Copies the entries that ``pending``, the update of a step to n rows, will change."""
        if self._whole is None:
            rows, sizes = pending.rows.copy(), pending.sizes.copy()
            entries = np.empty((2, *rows.shape), np.float32)
            _copy_entries(tables.ver, tables.dist, rows, sizes, n, entries, False)
            self._entries = rows, entries, sizes, n

    def restore(self, tables: Tables) -> None:
        """Makes ``tables``, which may have grown, what they were."""
        arrays = tables.ver, tables.dist
        if self._whole is not None:
            for table, before in zip(arrays, self._whole, strict=True):
                _put_first(table, before)
        if self._entries is not None:
            rows, entries, sizes, n = self._entries
            _copy_entries(tables.ver, tables.dist, rows, sizes, n, entries, True)
        bounds = tables.ver_bounds, tables.dist_bounds
        for array, before in zip(bounds, self._bounds, strict=True):
            _put_first(array, before)
        for array, before in self._fixed:
            array[:] = before


@njit(cache=True, nogil=True)
def _copy_entries(ver, dist, rows, sizes, n, kept, back):
    """kept f32 (2, H, m): the entries of the first ``sizes`` rows of each head in both tables."""
    for h in range(len(sizes)):
        for j in range(sizes[h]):
            i, distance = rows[h, j], n - 1 - rows[h, j]
            if back:
                ver[h, i], dist[h, distance] = kept[0, h, j], kept[1, h, j]
            else:
                kept[0, h, j], kept[1, h, j] = ver[h, i], dist[h, distance]


def _put_first(array: np.ndarray, before: np.ndarray) -> None:
    """Sets the columns that there were before; new ones are 0."""
    array[:, : before.shape[1]] = before
    array[:, before.shape[1] :] = 0
