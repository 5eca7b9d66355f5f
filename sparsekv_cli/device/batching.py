"""Batches of caches: each kernel is launched once for several sequences.

Each sequence has its own number of rows, which lies in device memory. Kernels take the tensors of B
sequences at one stride, but each cache has tensors of its own. So caches of a layer that will
launch the same kernels move into common tensors (B, ...), as wide as the widest cache. A cache
keeps its part as a view until it outgrows the part or leaves. A sequence gets at most twice the
rows that it needs there. Much longer sequences launch their own kernels.

A captured step has a fixed number of rows: 1, 2, 4, 8, or a multiple of 8. The rows after those of
the sequences are padding. A padded row also has parts of common tensors, into which it writes, but
no cache. A sequence that joins takes over such parts. So no tensor moves, and the captured step can
be replayed. A sequence that leaves makes its row a padded one.

The plan of a step also holds for later steps. The caches state the number of rows up to which it
holds.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import ref

import torch

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.device.cache import CachePlan, DeviceCache, spread
from sparsekv_cli.device.host import HostCache
from sparsekv_cli.device.layers.store import UNLIMITED

SHORT = 4096  # rows for which there is room in every sequence of a batch
SIZES = 1, 2, 4, 8  # rows of a step; larger steps have a multiple of the last size


def rows_of_step(n_sequences: int) -> int:
    """Returns the rows of a step of so many sequences, padding included."""
    return next((n for n in SIZES if n >= n_sequences), -(-n_sequences // SIZES[-1]) * SIZES[-1])


class Run(NamedTuple):
    """Rows first .. last - 1 of a step in one layer. The first row's ``cache`` decodes all."""

    first: int
    last: int
    cache: DeviceCache


class StepPlan(NamedTuple):
    """The launches of a step. runs: for each layer, first and last of each ``Run`` on the device.

    on_host: for each layer, the rows that the host attends to. n_padded: n of a padded row, whose
    budget is 1. n_more: the plan holds for so many further steps, each with one row a sequence.
    """

    key: Hashable
    runs: list[list[tuple[int, int]]]
    on_host: list[list[int]]
    n_padded: int
    caches: list[ref[LayerCache]]  # not kept alive
    n_more: int

    def runs_of(self, caches: Sequence[Sequence[LayerCache]]) -> list[list[Run]]:
        """Returns the runs of each layer, with the caches of B sequences."""
        return [
            [Run(first, last, caches[first][i]) for first, last in of_layer]  # type: ignore[arg-type]
            for i, of_layer in enumerate(self.runs)
        ]

    def owners(self, caches: Sequence[Sequence[LayerCache]]) -> list[LayerCache]:
        """Returns the caches whose own memory the launches use, in addition to common tensors."""
        first = [run.cache for of_layer in self.runs_of(caches) for run in of_layer]
        on_host = [c for layers in caches for c in layers if isinstance(c, HostCache)]
        return [*first, *(cache for cache in on_host if cache.has_device_part)]


class Planner:
    """Plans a step if the plan of the step before does not hold for it.

    least_rows: the least rows for which a step is planned.
    """

    def __init__(self) -> None:
        self.least_rows = 0
        self._plan: StepPlan | None = None
        self._next: list[int] = []  # positions of the next step for which the plan is valid
        self._planned: list[ref[LayerCache]] = []  # of the last plan, valid or not

    def forget(self) -> None:
        """Drops the plan, because rows were added in another way or a step was broken off."""
        self._plan = None

    def order(self, positions: Sequence[int], caches: Sequence[Sequence[LayerCache]]) -> list[int]:
        """Returns which sequence each row of the next step has: ``launch_order``, or a like order.

        In a like order, with as few runs, only new sequences change rows.
        """
        n_layer = len(caches[0])
        before = {id(kept()): row for row, kept in enumerate(self._planned[::n_layer])}
        found = ((before.get(id(layers[0])), b) for b, layers in enumerate(caches))
        rows = {row: b for row, b in found if row is not None and row < len(caches)}
        if len(rows) == len(caches):
            return [rows[row] for row in range(len(caches))]
        best = launch_order(positions, caches)
        others = iter([b for b in best if b not in rows.values()])
        order = [rows[row] if row in rows else next(others) for row in range(len(best))]
        planned_for = lengths_to_plan([pos + 1 for pos in positions], self.least_rows)

        def n_runs(order: Sequence[int]) -> int:
            alike = [(*map(_kind, caches[b]), planned_for[b]) for b in order]
            return sum(1 for _ in groupby(alike))

        return order if n_runs(order) <= n_runs(best) else best

    def begin(
        self,
        positions: Sequence[int],
        caches: Sequence[Sequence[LayerCache]],
        *,
        is_draft: bool = False,
    ) -> StepPlan:
        """Prepares the caches of B sequences for a step. ``end`` follows when the step is done.

        is_draft: whether all rows are of one sequence.
        """
        if is_draft:
            self.forget()
            return _plan_draft(positions, caches[0])
        plan, flat = self._plan, [cache for layers in caches for cache in layers]
        self.forget()
        if plan is None or not self._holds(plan, positions, flat):
            self._part_from(flat)
            plan = _plan_step(positions, self.least_rows, caches, flat)
            self._planned = plan.caches
            return plan
        return plan._replace(n_more=plan.n_more - 1)

    def _part_from(self, caches: Sequence[LayerCache]) -> None:
        """Makes caches that are not among these any more leave the common tensors."""
        here = set(map(id, caches))
        for planned in self._planned:
            cache = planned()
            if isinstance(cache, DeviceCache) and id(cache) not in here:
                _leave_common(cache)

    def _holds(
        self, plan: StepPlan, positions: Sequence[int], caches: Sequence[LayerCache]
    ) -> bool:
        if plan.n_more < 1 or self._next != list(positions) or len(caches) != len(plan.caches):
            return False
        return all(kept() is cache for kept, cache in zip(plan.caches, caches, strict=True))

    def end(self, plan: StepPlan, positions: Sequence[int]) -> None:
        self._plan, self._next = plan, [pos + 1 for pos in positions]


def launch_order(positions: Sequence[int], caches: Sequence[Sequence[LayerCache]]) -> list[int]:
    """Returns an order of sequences in which those that may launch together are adjacent.

    Within a method the longest sequence comes first. Steps do not change the order.
    """
    if len(positions) == 1:
        return [0]
    kinds: dict[Hashable, int] = {}
    numbers = []
    for layers in caches:
        numbers.append(kinds.setdefault(tuple(map(_kind, layers)), len(kinds)))
    return sorted(range(len(positions)), key=lambda b: (numbers[b], -positions[b]))


def _kind(cache: LayerCache) -> Hashable:
    """Returns the kind of a cache. Caches of different kinds never launch together."""
    if not isinstance(cache, DeviceCache):
        return type(cache), None
    return type(cache), cache.method, cache.spec.cache_type_k, cache.spec.cache_type_v


def lengths_to_plan(ns: Sequence[int], least: int) -> list[int]:
    """Returns for each sequence of n rows the number of rows for which its launches are planned.

    It is the number of the longest sequence with which it shares launches, and the width of common
    tensors. The longest one has few rows, or at most twice as many as the sequence. Sequences that
    share launches continue to do so.
    """
    found, longest = [0] * len(ns), 0
    for b in sorted(range(len(ns)), key=lambda b: -ns[b]):
        if longest == 0 or longest > max(SHORT, 2 * ns[b]):
            longest = ns[b]
        found[b] = max(least, longest)
    return found


def _plan_step(
    positions: Sequence[int],
    least: int,
    caches: Sequence[Sequence[Any]],
    flat: Sequence[LayerCache],
) -> StepPlan:
    n_more, n_rows, n_padded = UNLIMITED, rows_of_step(len(positions)), 1
    keys: list[Hashable] = []
    runs: list[list[tuple[int, int]]] = []
    on_host: list[list[int]] = []
    planned_for = lengths_to_plan([pos + 1 for pos in positions], least)
    for layers in zip(*caches, strict=True):
        plans = []
        for cache, pos, longest in zip(layers, positions, planned_for, strict=True):
            on_device = isinstance(cache, DeviceCache)
            plan = cache.begin_step(pos + 1, cache.bound(longest) if on_device else pos + 1)
            n_more = min(n_more, plan.until - pos - 1)
            plans.append(plan)
        of_layer, of_launches = prepare_runs(layers, plans, n_rows)
        if of_layer and of_layer[-1].last > len(positions):
            n_padded = max(n_padded, of_layer[-1].cache.rows_of_padding())
        on_host.append(_rows_on_host(layers, n_rows))
        keys.append((*of_launches, *on_host[-1]))
        runs.append([(run.first, run.last) for run in of_layer])
    own = [ref(cache) for cache in flat]
    return StepPlan(tuple(keys), runs, on_host, n_padded, own, n_more)


def _plan_draft(positions: Sequence[int], caches: Sequence[LayerCache]) -> StepPlan:
    of_sequence = [cache for cache in caches if isinstance(cache, DeviceCache)]
    n_rows, n_layer = len(positions), len(of_sequence)
    keys = tuple(cache.begin_draft(positions[0] + 1, n_rows) for cache in of_sequence)
    own: list[ref[LayerCache]] = [ref(cache) for cache in of_sequence]
    return StepPlan(keys, [[(0, n_rows)]] * n_layer, [[]] * n_layer, 1, own, 0)


def end_rows(
    caches: Sequence[Sequence[DeviceCache]], positions: Sequence[int], n_drafted: int
) -> None:
    """Counts the rows of a step. n_drafted: see DeviceDecoder; padding does not count."""
    for row in range(n_drafted + 1 if n_drafted else len(caches)):
        for cache in caches[row]:
            if n_drafted and row:
                cache.save_draft()
            cache.end_step(positions[row] + 1)


def _rows_on_host(caches: Sequence[LayerCache], n_rows: int) -> list[int]:
    """Returns the rows whose caches lie on the host, and padding that follows such a row."""
    rows = [b for b, cache in enumerate(caches) if isinstance(cache, HostCache)]
    last = caches[-1]
    is_padded = isinstance(last, HostCache) and not last.has_device_part
    return [*rows, *range(len(caches), n_rows)] if is_padded else rows


def prepare_runs(
    caches: Sequence[LayerCache], plans: Sequence[CachePlan], n_rows: int
) -> tuple[list[Run], list[Hashable]]:
    """Returns one layer's caches as runs of equal plans, ready to decode, and the launches' keys.

    The caches of a run are of one kind, and lie in common tensors. No run has a cache on the host.
    The last run also has the rows up to n_rows, unless each of its caches is alone.
    """
    runs = list(_runs(caches, plans, n_rows))
    keys: list[Hashable] = []
    for first, last, cache in runs:
        addresses = cache.begin_batch(caches[first:last], last - first)
        keys.append((last, plans[first].key, addresses))
    return runs, keys


def _runs(caches: Sequence[Any], plans: Sequence[CachePlan], n_rows: int) -> Iterator[Run]:
    def of(b: int) -> Hashable:
        return _kind(caches[b]), plans[b].key

    for _, group in groupby(range(len(caches)), key=of):
        members = list(group)
        first, last = members[0], members[-1] + 1
        if not isinstance(caches[first], DeviceCache):
            continue
        if plans[first].is_alone or (last - first == 1 and (last < len(caches) or n_rows == last)):
            for b in members:
                _leave_common(caches[b])
                yield Run(b, b + 1, caches[b])
            continue
        _free_parts(caches[first], [*caches[:first], *caches[last:]])
        end = n_rows if last == len(caches) else last
        _move_to_common(caches[first:last], end - first)
        yield Run(first, end, caches[first])


def _free_parts(cache: DeviceCache, others: Sequence[LayerCache]) -> None:
    """Makes the other caches leave the common tensors in which ``cache`` lies."""

    def memory(cache: DeviceCache) -> set[int]:
        return {x.untyped_storage().data_ptr() for x in cache.tensors() if x.numel()}

    for other in others:
        if isinstance(other, DeviceCache) and memory(other) & memory(cache):
            _leave_common(other)


def _leave_common(cache: DeviceCache) -> None:
    """Moves the cache's tensors to memory of its own, if they are parts of others."""
    tensors = cache.tensors()
    if any(x.numel() and x.untyped_storage().nbytes() > x.nbytes for x in tensors):
        cache.replace_tensors([x.clone() for x in tensors])


def _move_to_common(caches: Sequence[DeviceCache], n_rows: int) -> None:
    """Moves the caches' tensors into common ones of n_rows parts, in this order.

    The tensors keep their contents. The first cache's common tensors are used again, if the others
    fit.
    """
    columns = zip(*(cache.tensors() for cache in caches), strict=True)
    common = [_common(parts, n_rows) for parts in columns]
    for b, cache in enumerate(caches):
        cache.replace_tensors([x[b : b + 1] for x in common])


def _common(parts: Sequence[torch.Tensor], n_rows: int) -> torch.Tensor:
    """Returns the parts (1, ...) as one tensor (n_rows, ...). Fills up narrower parts and padding.

    They get 0, or -1 (none) in tensors of integers, which number rows and slots.
    """
    sizes = [max(of_all) for of_all in zip(*(part.shape for part in parts), strict=True)]
    one = parts[0]
    fill = 0 if one.is_floating_point() or one.dtype == torch.uint8 else -1
    is_first = one.storage_offset() == 0 and one.untyped_storage().nbytes() == n_rows * one.nbytes
    if is_first and one.numel() and list(one.shape) == sizes:
        common = spread(one, n_rows)
    else:
        common = one.new_full((n_rows, *sizes[1:]), fill)
    for b, part in enumerate(parts):
        if part.data_ptr() != common[b].data_ptr():
            common[b].fill_(fill)
            common[b : b + 1][tuple(slice(size) for size in part.shape)] = part
    return common
