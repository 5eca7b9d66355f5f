"""LFPS' tables ahead of a step, which may be taken back.

A step changes few entries: those of the rows that a head attends to. Only these are copied, and the
small arrays. ``rescale`` changes all entries, once in some hundred steps; then all are copied.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsekv_cli.cpu.lfps.history import RESCALE_BELOW, Tables
from sparsekv_cli.cpu.lfps.search import PendingUpdate


class SavedTables:
    """The tables of one layer ahead of a step."""

    def __init__(self, tables: Tables, decay: float, *others: np.ndarray) -> None:
        """others: further arrays, which do not grow."""
        self._bounds = tables.ver_bounds.copy(), tables.dist_bounds.copy()
        self._fixed = [(each, each.copy()) for each in (tables.sums, tables.gain, *others)]
        rescales = bool((tables.gain * decay < RESCALE_BELOW).any())
        self._whole = (tables.ver.copy(), tables.dist.copy()) if rescales else None
        # A pair a table: columns int32 (H, m), and the entries f32 (H, m) there.
        self._entries: list[tuple[np.ndarray, np.ndarray]] = []

    def keep_entries(self, tables: Tables, pending: PendingUpdate, n: int) -> None:
        """Copies the entries that ``pending``, the update of a step to n rows, will change."""
        if self._whole is None:
            # A list may end with rows of earlier steps. Their entries stay, so they do no harm.
            rows = np.minimum(pending.rows[:, : pending.sizes.max()], n - 1)
            for table, columns in ((tables.ver, rows), (tables.dist, n - 1 - rows)):
                entries = table.reshape(-1).take(columns + _starts(*table.shape))
                self._entries.append((columns, entries))

    def restore(self, tables: Tables) -> None:
        """Makes ``tables``, which may have grown, what they were."""
        arrays = tables.ver, tables.dist
        if self._whole is not None:
            for table, before in zip(arrays, self._whole, strict=True):
                _put_first(table, before)
        for table, (columns, entries) in zip(arrays, self._entries, strict=False):
            table.reshape(-1)[columns + _starts(*table.shape)] = entries
        bounds = tables.ver_bounds, tables.dist_bounds
        for array, before in zip(bounds, self._bounds, strict=True):
            _put_first(array, before)
        for array, before in self._fixed:
            array[:] = before


@lru_cache(8)
def _starts(n_head: int, n: int) -> np.ndarray:
    """Returns the places of the first columns of a table (H, n) that is one line: (H, 1)."""
    return np.arange(n_head)[:, None] * n


def _put_first(array: np.ndarray, before: np.ndarray) -> None:
    """Sets the columns that there were before; new ones are 0."""
    array[:, : before.shape[1]] = before
    array[:, before.shape[1] :] = 0
