"""The cache of a recurrent layer: a state of a fixed size, and its copies at some lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparsekv_cli.cache.layer import BoundedCache, Snapshot
from sparsekv_cli.cache.spec import LayerSpec, Memory, StateInput
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.recurrent.convolution import gated_convolution
from sparsekv_cli.cpu.recurrent.delta_net import delta_net
from sparsekv_cli.cpu.recurrent.groups import LANES, STRETCH
from sparsekv_cli.cpu.recurrent.mamba2 import mamba2

DRAFT_BYTES = 8 << 20  # the most bytes of copies of one layer's state during a draft
STEP = 2048  # tokens between two checkpoints within a message


class Recurrence(Protocol):
    """A recurrent layer's computation: from rows and a state to an output and the next state."""

    @property
    def n_out(self) -> int:
        """The number of elements of an output row."""

    def new_state(self) -> list[np.ndarray]:
        """Returns the arrays of the state before any token: f32 zeros."""

    def advance(
        self, x: StateInput, state: Sequence[np.ndarray], out: np.ndarray, n_threads: int
    ) -> None:
        """Writes the output of T rows to ``out`` (T, n_out), which has the rows' type.

        The arrays of ``state`` are changed to the state after these rows.
        """


@dataclass(frozen=True)
class GatedConvolution:
    """LFM2's short convolution. weight: f32 (length, n_out)."""

    weight: np.ndarray

    @property
    def n_out(self) -> int:
        return self.weight.shape[1]

    def new_state(self) -> list[np.ndarray]:
        return [np.zeros((len(self.weight) - 1, self.n_out), np.float32)]

    def advance(
        self, x: StateInput, state: Sequence[np.ndarray], out: np.ndarray, n_threads: int
    ) -> None:
        n_threads = n_threads if len(x.rows) > 1 else 1
        gated_convolution(x.rows, self.weight, state[0], out, n_threads)


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta net. cpu/recurrent/delta_net.py describes its weights."""

    weight: np.ndarray
    dt: np.ndarray
    a: np.ndarray
    norm: np.ndarray
    eps: float
    d_k: int  # elements of one key head
    grouped: bool = False  # whether adjacent value heads use one key head

    @property
    def n_out(self) -> int:
        return len(self.a) * len(self.norm)

    def new_state(self) -> list[np.ndarray]:
        return _rows_and_states(self.weight, len(self.a), self.d_k, len(self.norm))

    def advance(
        self, x: StateInput, state: Sequence[np.ndarray], out: np.ndarray, n_threads: int
    ) -> None:
        delta_net(
            x.rows, x.gates, self.weight, self.dt, self.a, self.norm, np.float32(self.eps),
            self.grouped, *state, out, n_threads,
        )  # fmt: skip


@dataclass(frozen=True)
class Mamba2:
    """Mamba-2. cpu/recurrent/mamba2.py describes its weights."""

    weight: np.ndarray
    bias: np.ndarray
    heads: np.ndarray
    norm: np.ndarray
    eps: float
    d_k: int  # elements of B and of C in one group
    d_v: int  # elements of one head

    @property
    def n_out(self) -> int:
        return self.heads.shape[1] * self.d_v

    def new_state(self) -> list[np.ndarray]:
        return _rows_and_states(self.weight, self.heads.shape[1], self.d_k, self.d_v)

    def advance(
        self, x: StateInput, state: Sequence[np.ndarray], out: np.ndarray, n_threads: int
    ) -> None:
        mamba2(
            x.rows, self.weight, self.bias, self.heads, self.norm, np.float32(self.eps), *state,
            out, n_threads,
        )  # fmt: skip


def _rows_and_states(weight: np.ndarray, n_head: int, d_k: int, d_v: int) -> list[np.ndarray]:
    """Returns zeros: the last rows before a convolution, and a matrix (d_k, d_v) of each head.

    A matrix lies in columns of LANES elements: (d_v / LANES rounded up, d_k, LANES).
    """
    rows = np.zeros((len(weight) - 1, weight.shape[1]), np.float32)
    return [rows, on_lines((n_head, -(-d_v // LANES), d_k, LANES), np.float32, zeros=True)]


class Checkpoints:
    """Copies of a list of arrays at some lengths of the sequence: one set of copies a length.

    At most ``most`` sets are kept. When there are more, the set with the closest neighbours is
    dropped, relative to their distance from the newest set. Sets are therefore sparser towards the
    start of the sequence. The newest set always stays.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sets: dict[int, list[np.ndarray]] = {}  # by rising length

    def __contains__(self, n: int) -> bool:
        return n in self._sets

    @property
    def lengths(self) -> list[int]:
        return list(self._sets)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for arrays in self._sets.values() for array in arrays)

    def keep(self, n: int, arrays: Sequence[np.ndarray]) -> None:
        """Keeps a copy of the arrays for length n. No kept length may be larger."""
        if n in self._sets or not self._most:
            return
        room = self._sets.pop(self._redundant()) if len(self._sets) == self._most else None
        if room is None:
            room = [np.empty_like(array) for array in arrays]
        for copy, array in zip(room, arrays, strict=True):
            copy[:] = array
        self._sets[n] = room

    def latest(self, n: int) -> int:
        """Returns the largest kept length that is at most n, or 0, the length without rows.

        With the lengths 100 and 300 kept, latest(250) is 100 and latest(50) is 0.
        """
        return max((length for length in self._sets if length <= n), default=0)

    def restore(self, n: int, arrays: Sequence[np.ndarray]) -> None:
        """Copies the set of length n into ``arrays``; zeros if n = 0. Drops later sets."""
        for i, array in enumerate(arrays):
            array[:] = self._sets[n][i] if n else 0
        for length in [length for length in self._sets if length > n]:
            del self._sets[length]

    def _redundant(self) -> int:
        """Returns the length whose set is the next to be dropped."""
        lengths = [0, *self._sets]
        newest = lengths[-1]
        gaps = {
            lengths[i]: (lengths[i + 1] - lengths[i - 1]) / (newest - lengths[i - 1])
            for i in range(1, len(lengths) - 1)
        }
        return min(gaps, key=gaps.__getitem__, default=newest)


class _Before(NamedTuple):
    """The length and the state of a StateCache before a step."""

    n: int
    state: list[np.ndarray]


class StateCache(BoundedCache):
    """The state of one recurrent layer of one sequence, and checkpoints of the state.

    A sequence can go back to lengths that have a checkpoint. These are the start and end of a
    prefill, the ends of its messages (``mark``), and every STEP tokens. At most
    ``spec.n_checkpoints`` of them are kept. The ledger counts only the bytes that steps read.
    Checkpoints do not change the bits of the state after a prompt.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        assert spec.recurrence is not None
        self._recurrence: Recurrence = spec.recurrence
        self._state = self._recurrence.new_state()
        self._n_bytes = sum(array.nbytes for array in self._state)
        self._n = 0
        self._checkpoints = Checkpoints(spec.n_checkpoints)
        self._marks: set[int] = set()
        self._is_prefilling = False
        self._out = np.zeros((1, self._recurrence.n_out), np.float32)

    @property
    def n(self) -> int:
        return self._n

    def mark(self, lengths: Sequence[int]) -> None:
        self._marks = set(lengths[-max(1, self.spec.n_checkpoints) :])

    def extend(self, x: Any) -> np.ndarray:
        """Adds the rows of a chunk. Returns its output (T, n_out) in the type of the rows."""
        if not self._is_prefilling:
            self._is_prefilling = True
            self._keep()
        out = np.empty((len(x.rows), self._recurrence.n_out), x.rows.dtype)
        first, last = self._n, self._n + len(x.rows)
        marks = [n for n in sorted(self._marks) if first < n < last]
        borders = {first, last, *range(first // STEP * STEP + STEP, last, STEP)}
        borders |= {first + (n - first) // STRETCH * STRETCH for n in marks}
        borders |= {n for n in self._snapshot_lengths if first < n < last}
        for start, stop in pairwise(sorted(borders)):
            for mark in marks:
                if start < mark < stop:
                    self._keep_ahead(x, first, mark)
            part = slice(start - first, stop - first)
            self._n = stop  # before the call, so that ``keep`` also undoes an interrupted advance
            self._advance(x, part, self._state, out[part])
            if stop in self._marks or stop % STEP == 0:
                self._keep()
            self._tell_snapshots(start, stop)
        return out

    def finish_prefill(self) -> None:
        super().finish_prefill()
        self._is_prefilling = False
        self._marks = set()
        self._keep()

    def decode(self, x: Any) -> np.ndarray:
        """Adds a row. Returns its output f32 (1, n_out), valid until the next call."""
        self._n += 1  # before the call, as in ``extend``
        self._recurrence.advance(x, self._state, self._out, self.spec.n_threads)
        self.ledger.counts["bytes_read"] += self._n_bytes
        if self._n % STEP == 0:
            self._keep()
        return self._out

    def most_rows(self, n: int) -> int:
        """Returns how many of the next n rows one step can add. See StepContract (contracts.py).

        A draft must end before a checkpoint, because a checkpoint cannot be undone. Each row of a
        draft needs a copy of the state, and DRAFT_BYTES limits these copies.
        """
        n, left = min(n, 1 + DRAFT_BYTES // self._n_bytes), STEP - self._n % STEP
        return n if left == 1 else min(n, left - 1)

    def save_own(self) -> _Before:
        return _Before(self._n, [array.copy() for array in self._state])

    def take_back_own(self, own: _Before) -> None:
        self._n = own.n
        for array, before in zip(self._state, own.state, strict=True):
            array[:] = before

    def reserve(self, n: int) -> None:
        """Does nothing, because the state does not grow."""

    def reach(self, n: int) -> int:
        return n if n == self._n else self._checkpoints.latest(n)

    def truncate(self, n: int) -> int:
        """Goes back to length n. Returns n, or 0 if n has no checkpoint. See StoreContract."""
        if n >= self._n:
            return self._n
        if n and n not in self._checkpoints:
            return 0
        self._checkpoints.restore(n, self._state)
        self._n, self._is_prefilling, self._marks = n, False, set()
        return n

    def memory(self) -> Memory:
        return Memory(host=self._n_bytes + self._checkpoints.nbytes)

    def snapshot(self, n: int) -> Snapshot:
        return _as_snapshot(self._state)

    def empty_snapshot(self, n: int) -> Snapshot:
        return _as_snapshot(self._recurrence.new_state())

    def restore(self, n: int, held: Snapshot) -> None:
        for array, given in zip(_as_snapshot(self._state), held, strict=True):
            array[:] = given
        self._n = n

    def _advance(
        self, x: StateInput, part: slice, state: Sequence[np.ndarray], out: np.ndarray
    ) -> None:
        """Advances ``state`` over rows ``part`` of chunk x. Writes their output to ``out``."""
        rows = StateInput(x.rows[part], x.gates[part])
        self._recurrence.advance(rows, state, out, self.spec.n_threads)

    def _keep(self) -> None:
        if self._n:
            self._checkpoints.keep(self._n, self._state)

    def _keep_ahead(self, x: StateInput, first: int, n: int) -> None:
        """Keeps a checkpoint of length n. The chunk x begins at length ``first`` and contains n.

        A copy of the state advances to n. The state itself does not stop at n, because a stop would
        change the rounding of later rows.
        """
        ahead = self._recurrence.new_state()
        for array, of in zip(ahead, self._state, strict=True):
            array[:] = of
        out = np.empty((n - self._n, self._recurrence.n_out), x.rows.dtype)
        self._advance(x, slice(self._n - first, n - first), ahead, out)
        self._checkpoints.keep(n, ahead)


def _as_snapshot(state: Sequence[np.ndarray]) -> Snapshot:
    """Returns the one or two arrays of a state as two arrays of bytes, each (1, 1, bytes)."""
    arrays = [array.reshape(1, 1, -1).view(np.uint8) for array in state]
    return arrays[0], arrays[1] if len(arrays) > 1 else np.empty((1, 1, 0), np.uint8)
