"""Bytes of memory that an operation touches: sorted intervals, and whether two sets overlap."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch


class Ranges:
    """Disjoint intervals of addresses, ascending: ``first`` inclusive, ``last`` exclusive."""

    def __init__(self, first: np.ndarray, last: np.ndarray) -> None:
        self.first, self.last = first, last

    @classmethod
    def of(cls, starts: np.ndarray, sizes: np.ndarray) -> Ranges:
        """Those of pieces of memory, which may touch and overlap."""
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate((starts + sizes)[order])
        if len(starts) == 0:
            return cls(starts, ends)
        begins = np.concatenate([[True], starts[1:] > ends[:-1]])
        return cls(starts[begins], ends[np.concatenate([begins[1:], [True]])])

    @classmethod
    def of_tensor(cls, x: torch.Tensor) -> Ranges:
        """The elements of a strided tensor."""
        if x.numel() == 0:
            return EMPTY
        at, width = x.data_ptr(), x.element_size()
        size, places = width, np.zeros(1, np.int64)
        for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
            if stride * width == size and len(places) == 1:
                size *= n  # one piece
            elif n > 1 and stride > 0:
                places = (places[:, None] + np.arange(n) * (stride * width)).ravel()
        return cls.of(at + places, np.full(len(places), size))

    @classmethod
    def union(cls, parts: Iterable[Ranges]) -> Ranges:
        every = list(parts)
        if not every:
            return EMPTY
        first = np.concatenate([part.first for part in every])
        return cls.of(first, np.concatenate([part.last for part in every]) - first)

    def meets(self, other: Ranges) -> bool:
        """Whether a byte is in both."""
        if len(self.first) == 0 or len(other.first) == 0:
            return False
        at = np.searchsorted(other.first, self.last, side="left")  # those that begin ahead
        return bool(((at > 0) & (other.last[at - 1] > self.first)).any())

    @property
    def nbytes(self) -> int:
        return int((self.last - self.first).sum())


EMPTY = Ranges(np.empty(0, np.int64), np.empty(0, np.int64))
