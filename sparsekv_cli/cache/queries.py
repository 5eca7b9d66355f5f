"""The last queries of a sequence, by which methods choose rows."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np

from sparsekv_cli.cpu.jit.floats import as_f32


class LastQueries:
    """The queries of the last ``size`` positions of a prefill, which comes in chunks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._chunks: list[np.ndarray] = []  # f32 (H, T, d)

    def add(self, q: Any) -> None:
        """Adds the queries of the next chunk, q (H, T, d), as in AttnInput (spec.py)."""
        self._chunks.append(as_f32(q[:, -self.size :]).copy())  # a copy: a view keeps all of q
        while sum(chunk.shape[1] for chunk in self._chunks[1:]) >= self.size:
            self._chunks.pop(0)

    def take(self) -> np.ndarray:
        """Returns the queries, f32 (H, size or fewer, d); forgets them."""
        q = np.concatenate(self._chunks, axis=1)[:, -self.size :]
        self.clear()
        return q

    def clear(self) -> None:
        self._chunks = []


class PastQueries:
    """The last ``size`` queries of a sequence, while its steps are recorded.

    Queries of its last prefill are kept too, so that the sequence can go back to its end.
    """

    def __init__(self, size: int, n_head: int, head_dim: int) -> None:
        self._coming = LastQueries(size)  # the running prefill's
        self._prefilled = np.empty((n_head, 0, head_dim), np.float32)  # the last is of row n - 1
        self._n = 0  # rows at the end of the prefill
        self._steps: deque[np.ndarray] = deque(maxlen=size)  # (H, 1, d), the last is of row n - 1
        self._n_stepped = 0  # rows after the last recorded step

    def copy(self) -> PastQueries:
        """Returns a copy that can record other steps. No prefill may be running."""
        new = copy.copy(self)
        new._steps = self._steps.copy()
        return new

    def extend(self, q: Any) -> None:
        """Adds the queries of a prefill's next chunk, q (H, T, d), as in AttnInput (spec.py)."""
        self._coming.add(q)

    def finish_prefill(self, n: int) -> None:
        """Keeps the queries of the prefill, which has ended at n rows."""
        self._prefilled, self._n = self._coming.take(), n
        self._steps.clear()

    def record(self, q: np.ndarray, n: int) -> None:
        """Adds q (H, 1, d or more) of a decode step to n rows."""
        if n != self._n_stepped + 1:
            self._steps.clear()
        self._steps.append(q[..., : self._prefilled.shape[2]].copy())
        self._n_stepped = n

    def last(self, n: int) -> np.ndarray:
        """Returns the last queries of n rows, f32 (H, T, d), T <= size; T = 0 if unknown."""
        steps = list(self._steps) if n == self._n_stepped else []
        known = [self._prefilled] if n - len(steps) == self._n else [self._prefilled[:, :0]]
        return np.concatenate(known + steps, axis=1)[:, -self._coming.size :]

    def truncate(self, n: int) -> None:
        """Forgets the queries of the rows from n on."""
        self._coming.clear()
        while self._steps and self._n_stepped > n:
            self._steps.pop()
            self._n_stepped -= 1
        if n < self._n:
            kept = max(0, self._prefilled.shape[1] - (self._n - n))
            self._prefilled, self._n = self._prefilled[:, :kept], n

    @property
    def nbytes(self) -> int:
        return self._prefilled.nbytes + sum(q.nbytes for q in self._steps)
