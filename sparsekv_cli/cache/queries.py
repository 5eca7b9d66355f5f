"""The last queries of a sequence, which methods score keys with."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np

from sparsekv_cli.cpu.jit.floats import as_f32


class LastQueries:
    """The queries of the last ``size`` positions of a prefill. They are added chunk by chunk."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._chunks: list[np.ndarray] = []  # f32 (H, T, d)

    def add(self, q: Any) -> None:
        """Adds the queries of the next chunk, q (H, T, d), of AttnInput's types (spec.py)."""
        self._chunks.append(as_f32(q[:, -self.size :]).copy())  # a copy: a view keeps all of q
        while sum(chunk.shape[1] for chunk in self._chunks[1:]) >= self.size:
            self._chunks.pop(0)

    def take(self) -> np.ndarray:
        """Returns the last queries, f32 (H, T, d) with T <= size, and forgets them."""
        q = np.concatenate(self._chunks, axis=1)[:, -self.size :]
        self.clear()
        return q

    def clear(self) -> None:
        self._chunks = []


class PastQueries:
    """The queries of a sequence's last ``size`` rows, from its prefill and its recorded steps.

    It also keeps the queries at the end of the last prefill. So they are known again when the
    sequence goes back to that length.
    """

    def __init__(self, size: int, n_head: int, head_dim: int) -> None:
        self._coming = LastQueries(size)  # of the prefill that runs
        self._prefilled = np.empty((n_head, 0, head_dim), np.float32)  # (H, T, d), to row _n - 1
        self._n = 0  # rows at the end of the last prefill
        self._steps: deque[np.ndarray] = deque(maxlen=size)  # (H, 1, d), to row _n_stepped - 1
        self._n_stepped = 0  # rows after the last recorded step

    def copy(self) -> PastQueries:
        """Returns a copy to which other steps can be added. No prefill may be running."""
        new = copy.copy(self)
        new._steps = self._steps.copy()
        return new

    def extend(self, q: Any) -> None:
        """Adds the queries of a prefill's next chunk, q (H, T, d), in AttnInput's types (spec.py).

        ``finish_prefill`` must follow the last chunk.
        """
        self._coming.add(q)

    def finish_prefill(self, n: int) -> None:
        """Stores the queries of the prefill, which has ended at n rows."""
        self._prefilled, self._n = self._coming.take(), n
        self._steps.clear()

    def record(self, q: np.ndarray, n: int) -> None:
        """Adds q (H, 1, d or more) of the decode step that makes the sequence n rows long."""
        if n != self._n_stepped + 1:
            self._steps.clear()
        self._steps.append(q[..., : self._prefilled.shape[2]].copy())
        self._n_stepped = n

    def last(self, n: int) -> np.ndarray:
        """Returns the queries of rows n - T .. n - 1, f32 (H, T, d), with T <= size.

        T is 0 if the query of row n - 1 is not known.
        """
        steps = list(self._steps) if n == self._n_stepped else []
        known = [self._prefilled] if n - len(steps) == self._n else [self._prefilled[:, :0]]
        return np.concatenate(known + steps, axis=1)[:, -self._coming.size :]

    def truncate(self, n: int) -> None:
        """Forgets the queries of row n and of all later rows."""
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
