"""Saves LFPS' tables before a step that may be undone.

A step changes only the entries of the rows that a head attends to. It keeps their old values in a
journal. Small arrays are copied. ``rescale`` changes all entries, once in some hundred steps.
Before such a step the tables are copied, too.
"""

from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.lfps.history import RESCALE_BELOW, Tables
from sparsekv_cli.cpu.lfps.state import Journal


class SavedTables:
    """One layer's tables before a step to n rows that attends to at most k_budget a head."""

    def __init__(
        self, tables: Tables, n: int, k_budget: int, decay: float, *others: np.ndarray
    ) -> None:
        """others: further arrays to save. Their sizes must not change."""
        self.n = n
        self._bounds = tables.ver_bounds.copy(), tables.dist_bounds.copy()
        self._fixed = [(each, each.copy()) for each in (tables.sums, tables.gain, *others)]
        rescales = tables.gain.min() * decay < RESCALE_BELOW
        self._whole = (tables.ver.copy(), tables.dist.copy()) if rescales else None
        n_head = len(tables.gain)
        self.journal = Journal(  # which the step fills
            np.empty((n_head, k_budget), np.int32),
            np.empty((2, n_head, k_budget), np.float32),
            np.zeros(n_head, np.int64),
        )

    def restore(self, tables: Tables) -> None:
        """Restores ``tables``, which may have grown."""
        _put_back(tables.ver, tables.dist, *self.journal, self.n)
        if self._whole is not None:
            for table, before in zip((tables.ver, tables.dist), self._whole, strict=True):
                _put_first(table, before)
        bounds = tables.ver_bounds, tables.dist_bounds
        for array, before in zip(bounds, self._bounds, strict=True):
            _put_first(array, before)
        for array, before in self._fixed:
            array[:] = before


class Indexed(NamedTuple):
    """The rows that the tables of a layer cover."""

    n: int = 0  # rows; 0: none, and the next step makes an index
    n_start: int = 0  # rows that they covered at first
    n_pending: int = 0  # rows after the step whose update is pending; 0: none


class SavedStep(NamedTuple):
    """A layer of lfps before a step.

    tables: None before a dense step, which changes none. queries: the last ones. n_parts: the
    scout's.
    """

    tables: SavedTables | None
    queries: Any
    indexed: Indexed
    n_parts: int


@njit(cache=True, nogil=True)
def _put_back(ver, dist, rows, entries, sizes, n):
    """Writes the old entries of a Journal back to both tables."""
    for h in range(len(sizes)):
        for j in range(sizes[h]):
            i = rows[h, j]
            ver[h, i], dist[h, n - 1 - i] = entries[0, h, j], entries[1, h, j]


def _put_first(array: np.ndarray, before: np.ndarray) -> None:
    """Restores the columns of ``before`` and sets the columns after them to 0."""
    array[:, : before.shape[1]] = before
    array[:, before.shape[1] :] = 0
