"""One layer's KV cache on a GPU: the contract of a step, and the parts that methods share.

A decode step is captured in a CUDA graph, so it has three verbs. ``begin_step`` runs on the host
before the step, and only there may buffers grow. ``decode`` launches kernels and does nothing else.
Numbers that change from step to step lie in device memory (``StepNumbers``). ``end_step`` counts
the work of the step while the device works.

Letters as in cache/spec.py; tensors have a leading dimension of B sequences. A cache keeps the rows
of one sequence. If several caches lie in common tensors (batching.py), the first decodes for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from sparsekv_cli.cache.layer import LayerCache, rows_alike
from sparsekv_cli.cache.spec import LayerSpec, Memory
from sparsekv_cli.device.layers.prefill import softmax_on
from sparsekv_cli.device.layers.store import UNLIMITED, DeviceStore, copy_items, rows_like
from sparsekv_cli.device.streams import SideStream
from sparsekv_cli.kernels.attention import decode as attention
from sparsekv_cli.kernels.attention.rows import NewRow, store_rows
from sparsekv_cli.kernels.attention.softmax import RingWindow, ScoreSoftmax

AHEAD = 64  # rows for later steps that a bound includes, at least
LEAST_STEP = 256  # rows: bounds are multiples of it
Piece = tuple[np.ndarray, np.ndarray]  # K and V of some rows on the host
MOST_DRAFT = 16  # rows of a step with a draft; they share each load of a weight


class StepNumbers(NamedTuple):
    """Each sequence's numbers of a decode step, int32 (B,), in device memory.

    arrived: counts of arrivals (kernels/attention/arrivals.py), int32 (B, H or more). Launches use
    them one after another, and each leaves them as they were.
    """

    pos: torch.Tensor  # the position of the new token, which is its row
    n: torch.Tensor  # pos + 1, the number of rows with the new one
    budget: torch.Tensor  # method.budget.rows(n); n for a method without a budget
    arrived: torch.Tensor


class CachePlan(NamedTuple):
    """The result of ``begin_step``.

    key: steps with equal keys, and tensors at equal addresses, launch the same kernels with the
    same arguments. Then a captured graph can be replayed, and caches of a layer decode together.
    until: steps up to so many rows need no other ``begin_step``.
    is_alone: whether the cache cannot decode together with others.
    """

    key: Hashable
    until: int
    is_alone: bool = False


class DeviceInput(NamedTuple):
    """One layer's new row of each sequence in a decode step, f32 (B, heads, d), contiguous."""

    q: torch.Tensor  # (B, H, d), rotated
    k: torch.Tensor  # (B, G, d), rotated
    v: torch.Tensor  # (B, G, d_v)
    q_nope: torch.Tensor  # (B, H, d), before RoPE
    k_nope: torch.Tensor  # (B, G, d)
    step: StepNumbers


def grid_bound(n: int) -> int:
    """Returns a bound of n for a graph's grids: at most a quarter larger (LEAST_STEP for few rows).

    Steps shortly after a power of two have the same bound. Measured contexts begin there.
    """
    n += AHEAD
    step = max(LEAST_STEP, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step


def spread(x: torch.Tensor, n: int) -> torch.Tensor:
    """Returns a sequence's part (1, ...) of a common tensor with the next parts, as (n, ...)."""
    return x.as_strided((n, *x.shape[1:]), x.stride())


class DeviceCache(LayerCache):
    """The mutable state of one layer of one sequence in device memory.

    method: has a budget; None in a dense layer. A method writes ``begin_step``, ``decode`` and
    ``end_step``, or derives from DeviceSelecting. ``drop_step`` takes the place of ``end_step``.
    """

    reads_on_gpu = True
    takes_drafts: ClassVar[bool] = False  # whether a step can have several rows of a sequence
    takes_softcap: ClassVar[bool] = True  # whether it chooses as on the host if scores are capped
    store: Any  # a DeviceStore, or the method's own store
    # Copies rows of a prefill to the host: host.py rows_on_host.
    to_host: Callable[[torch.Tensor, torch.Tensor], Callable[[], Piece]]
    n_ctx: int = UNLIMITED  # the most rows that there will be
    side: SideStream | None = None  # the stream of a cache that launches work during the steps
    # Called after ``decode`` with its input. Steps of a cache that has one are not captured. If it
    # ``records_attended``, ``attended`` then has the rows of the step: idx int32 (B, U, m) and
    # counts (B, U).
    on_step: Callable[[Any], None] | None = None
    _is_draft = False  # whether the rows of a step are of this cache's sequence alone
    _ring_slots = 0  # row i lies in slot i modulo them; 0: in slot i

    def __init__(self, spec: LayerSpec, device: torch.device, method: Any = None) -> None:
        super().__init__(spec, DeviceStore(spec, device))
        self.device = device
        self.method = method
        self.softmax = softmax_on(spec, device)

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        """Called before a step to ``n`` rows, unless the last plan is valid for it.

        It may allocate, move rows, launch and wait. n_max >= n bounds the grids.
        """
        self._n_max = n_max
        self.store.reserve(n_max)
        return CachePlan(n_max, n_max)

    def begin_batch(self, caches: Sequence[Any], n_rows: int) -> Hashable:
        """Called after ``begin_step`` on the first of the caches that decode together.

        It may allocate and launch. It returns the addresses that ``decode`` will use. n_rows: rows
        of the launches. The rows after those of the caches are padding (``rows_of_padding``).
        """
        self._is_draft = False
        return tuple((x.data_ptr(), x.shape) for x in self.tensors())

    def begin_draft(self, n: int, n_rows: int) -> Hashable:
        """Called before a step that adds rows n - 1 to n + n_rows - 2 of this sequence alone.

        It does the work of ``begin_step`` and ``begin_batch``. ``most_rows`` allows the first rows.
        The last ones may be padding: they are written, and later steps write them again.
        """
        plan = self.begin_step(n, self.bound(n + n_rows - 1))
        self._is_draft = True
        tensors = self.batch_tensors(n_rows)
        return plan.key, tuple((x.data_ptr(), x.shape, x.stride()) for x in tensors)

    def store_draft(self, x: Any) -> None:
        """Called before ``decode`` in a step with a draft: writes the rows of a DeviceInput.

        So each row can attend to those before it.
        """
        k, v, *_ = self.batch_tensors(len(x.q))
        store_rows(NewRow(x.k, x.v), k, v, x.step.n, self._ring_slots)

    def most_rows(self, n: int) -> int:
        return min(n, MOST_DRAFT) if self.takes_drafts else 1

    @abstractmethod
    def decode(self, x: Any, out: torch.Tensor | None = None) -> Any:
        """Called in a step: adds the rows of a DeviceInput. It launches and does nothing else.

        It returns their attention, f32 (B, H, d_v). The sequences are this cache's and, if B > 1,
        those after it in common tensors. out: where the result is written; None: in memory of its
        own.
        """

    @abstractmethod
    def end_step(self, n: int) -> None:
        """Counts a step to ``n`` rows. Called on every cache while the device works."""

    def drop_step(self, n: int) -> None:
        """Called instead of ``end_step`` if a step was broken off. It goes back to ``n`` rows."""
        if self.side is not None:
            self.side.join()
        self.truncate(n)

    def budget_rows(self, n: int) -> int:
        """Called before every step to ``n`` rows. Returns ``StepNumbers.budget``."""
        rows: int = n if self.method is None else self.method.budget.rows(n)
        return rows

    def rows_of_padding(self) -> int:
        """Called after ``begin_batch`` if there is padding. Returns n of a padded row.

        It is the least n that the launches take with a budget of 1. A padded row has a part of
        common tensors that no sequence has, with any contents. Its launches write nothing else.
        """
        return 1

    def tensors(self) -> list[torch.Tensor]:
        """Called between steps. Returns the tensors that ``decode`` reads, (1, ...) each.

        They are all tensors of the cache, unless it ``is_alone``.
        """
        return [self.store.k, self.store.v]

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Called before ``begin_batch``: takes other tensors with the contents of ``tensors``."""
        self.store.k, self.store.v = tensors

    def batch_tensors(self, n: int) -> list[torch.Tensor]:
        """Returns ``tensors`` of n rows of a step, from this cache's row on: (n, ...) each.

        In a step with a draft, all rows have this cache's tensors.
        """
        if self._is_draft:
            return [x.expand(n, *x.shape[1:]) for x in self.tensors()]
        return [spread(x, n) for x in self.tensors()]

    # --- the rest ---------------------------------------------------------------------------------

    def fill_rows(
        self, first: int, stop: int, write: Callable[[np.ndarray, np.ndarray], None]
    ) -> None:
        places = [self.store.k[0, :, first:stop], self.store.v[0, :, first:stop]]
        rows = [rows_like(place) for place in places]
        write(*rows)
        for place, given in zip(places, rows, strict=True):
            copy_items(place, torch.from_numpy(given))

    def rows_of(self, first: int, stop: int) -> Callable[[], Piece]:
        return self.to_host(self.store.k[0, :, first:stop], self.store.v[0, :, first:stop])

    def share_constants(self, other: Any) -> None:
        """Called once: shares the constants of ``other``, a cache of the same layer."""

    def room_on_host(self, n_max: int) -> int:
        """Returns the rows to make room for on the host, where growing takes long.

        They are all rows that there will be, or n_max if these are more than twice n_max.
        """
        return self.n_ctx if n_max <= self.n_ctx <= 2 * n_max else n_max

    def bound(self, n: int) -> int:
        """Returns ``grid_bound`` of n rows, at most ``n_ctx``. It is the room for rows, too."""
        return max(n, min(grid_bound(n), self.n_ctx))

    def reserve(self, n: int) -> None:
        """Makes room for n rows and the next steps, so that the first step moves no row."""
        self.store.reserve(self.bound(n))

    def keep_attended(self, idx: torch.Tensor, counts: torch.Tensor) -> None:
        """Keeps the rows that a step attends to, if they are to be recorded."""
        if self.records_attended:
            rows: Any = idx, counts
            self.attended = rows

    def memory(self) -> Memory:
        return Memory(device=self.store.nbytes)


def attend_all(
    x: DeviceInput,
    k: torch.Tensor,
    v: torch.Tensor,
    n_max: int,
    softmax: ScoreSoftmax,
    out: torch.Tensor | None,
    window: RingWindow | None = None,
) -> torch.Tensor:
    """Adds the rows of a step to k and v. Returns the attention to all rows, f32 (B, H, d_v).

    With a window they are all rows of it.
    """
    new = NewRow(x.k, x.v)
    return attention.attend_dense(x.q, k, v, x.step.n, n_max, softmax, out, new=new, window=window)


def count_dense(cache: DeviceCache, n: int, *, sparse: bool) -> None:
    """Counts a step over all of ``n`` rows. sparse: whether the layer may leave rows out."""
    spec = cache.spec
    rows = spec.n_head * n
    cache.ledger.step(rows, rows, rows, spec.n_head_kv * n * cache.store.row_bytes, sparse)


class DeviceSelecting(DeviceCache):
    """Adds a row, selects rows, and attends to them. A method writes ``select`` and its plan.

    While the budget covers the context, attention is dense, with the bits of ``full``.
    """

    can_prefill_in_parts = True

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        dense = super().begin_step(n, n_max)
        self._dense = self.is_dense_at(n)
        if self._dense:
            until = n_max if self.is_dense_at(n_max) else n
            return CachePlan((dense.key, "dense"), until)
        selecting = self.plan_selection(n, n_max)
        return CachePlan((dense.key, selecting.key), selecting.until)

    def decode(self, x: DeviceInput, out: torch.Tensor | None = None) -> torch.Tensor:
        k, v, *index = self.batch_tensors(len(x.q))
        self.attended = None
        if self._dense:
            return attend_all(x, k, v, self._n_max, self.softmax, out)
        idx, counts = self.select(x, k, v, *index)
        self.keep_attended(idx, counts)
        return attention.attend_rows(
            x.q, k, v, idx, counts, self.softmax, out, arrived=x.step.arrived
        )

    def end_step(self, n: int) -> None:
        self.store.n = n
        if self._dense:
            count_dense(self, n, sparse=True)
            return
        spec = self.spec
        scored, attended, n_bytes = self.count(n)
        self.ledger.step(spec.n_head * n, scored, attended, n_bytes, True)

    def most_rows(self, n: int) -> int:
        return super().most_rows(rows_alike(self.is_dense_at, self.n + 1, n))

    @abstractmethod
    def is_dense_at(self, n: int) -> bool:
        """Returns whether the budget covers a context of n rows, so that attention is dense."""

    @abstractmethod
    def plan_selection(self, n: int, n_max: int) -> CachePlan:
        """Does the host's work of ``begin_step`` for a step that selects. Returns its plan."""

    @abstractmethod
    def select(
        self, x: DeviceInput, k: torch.Tensor, v: torch.Tensor, *index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the selected rows: idx int32 (B, U, m), counts int32 (B, U); U is H or G.

        The new row is one of them. k, v: the rows of the B sequences, to which it adds the new
        ones. index: the rest of their ``tensors``.
        """

    @abstractmethod
    def count(self, n: int) -> tuple[int, int, int]:
        """Returns the counts of a step at ``n`` rows: rows scored, rows attended, bytes read."""
