"""Sequences of a step whose caches launch each kernel once for all of them.

Each sequence has its own number of rows, which lies in device memory. Kernels take the tensors of B
sequences at one stride, but each cache has tensors of its own. So caches of a layer that are about
to launch the same are moved into common tensors, (B, ...), as wide as the widest of them; each
keeps its part as a view. They stay there until one outgrows its part, joins or leaves; then all
move again, so that no memory is kept for one that is gone. Sequences that are much longer than
others launch for themselves: nobody is given more than twice the rows that it needs, if it is many.

What is planned for a step holds for the next ones, up to a number of rows that caches tell.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple
from weakref import ref

import torch

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.device.cache import UNLIMITED, CachePlan, DeviceCache

SHORT = 4096  # rows for which there is room in every sequence of a batch


class Run(NamedTuple):
    """Rows first..last - 1 of a step in one layer; the first one's ``cache`` decodes all."""

    first: int
    last: int
    cache: DeviceCache


class StepPlan(NamedTuple):
    """What a step launches. runs: of each layer, first and last of each ``Run`` on the device.

    It holds for ``n_more`` steps after it in which each sequence gets one row.
    """

    key: Hashable
    runs: list[list[tuple[int, int]]]
    caches: list[ref[LayerCache]]  # not kept alive
    n_more: int

    def runs_of(self, caches: Sequence[Sequence[LayerCache]]) -> list[list[Run]]:
        """Of each layer, for the caches of B sequences."""
        return [
            [Run(first, last, caches[first][i]) for first, last in of_layer]  # type: ignore[arg-type]
            for i, of_layer in enumerate(self.runs)
        ]


class Planner:
    """Plans steps, only where the plan of the step before does not hold.

    least_rows: steps are planned for so many rows at least.
    """

    def __init__(self) -> None:
        self.least_rows = 0
        self._plan: StepPlan | None = None
        self._next: list[int] = []  # positions of the step that the plan would hold for
        self._planned: list[ref[LayerCache]] = []  # by the last plan, whether it holds or not

    def forget(self) -> None:
        """Nothing is planned any more: rows were added in another way, or a step was broken off."""
        self._plan = None

    def begin(self, positions: Sequence[int], caches: Sequence[Sequence[LayerCache]]) -> StepPlan:
        """Readies the caches of B sequences for a step; ``end`` follows when it is done."""
        plan, flat = self._plan, [cache for layers in caches for cache in layers]
        self.forget()
        if plan is None or not self._holds(plan, positions, flat):
            self._part_from(flat)
            plan = _plan_step(positions, self.least_rows, caches, flat)
            self._planned = plan.caches
            return plan
        return plan._replace(n_more=plan.n_more - 1)

    def _part_from(self, caches: Sequence[LayerCache]) -> None:
        """Caches that are not among these any more leave the common tensors."""
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
    """The order of sequences in which those that may launch together follow each other.

    Those of a method, the longest first; steps do not change it.
    """
    if len(positions) == 1:
        return [0]
    kinds: dict[Hashable, int] = {}
    numbers = []
    for layers in caches:
        numbers.append(kinds.setdefault(tuple(map(_kind, layers)), len(kinds)))
    return sorted(range(len(positions)), key=lambda b: (numbers[b], -positions[b]))


def _kind(cache: LayerCache) -> Hashable:
    """Caches of different kinds never launch together."""
    return type(cache), cache.method if isinstance(cache, DeviceCache) else None


def lengths_to_plan(ns: Sequence[int], least: int) -> list[int]:
    """For each of the sequences of n rows the number of rows that launches are planned for.

    That of the longest with which it shares them and, in common tensors, their width. It has at
    most twice its rows, or few. Sequences that share them go on doing so.
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
    n_more = UNLIMITED
    keys: list[Hashable] = []
    runs: list[list[tuple[int, int]]] = []
    planned_for = lengths_to_plan([pos + 1 for pos in positions], least)
    for layers in zip(*caches, strict=True):
        plans = []
        for cache, pos, longest in zip(layers, positions, planned_for, strict=True):
            on_device = isinstance(cache, DeviceCache)
            plan = cache.begin_step(pos + 1, cache.bound(longest) if on_device else pos + 1)
            n_more = min(n_more, plan.until - pos - 1)
            plans.append(plan)
        of_layer, of_launches = prepare_runs(layers, plans)
        keys.append(tuple(of_launches))
        runs.append([(run.first, run.last) for run in of_layer])
    return StepPlan(tuple(keys), runs, [ref(cache) for cache in flat], n_more)


def prepare_runs(
    caches: Sequence[LayerCache], plans: Sequence[CachePlan]
) -> tuple[list[Run], list[Hashable]]:
    """One layer's caches as runs of equal plans, ready to decode, and what tells their launches.

    The caches of a run are of one kind, and lie in common tensors. No run has a cache on the host.
    """
    runs = list(_runs(caches, plans))
    keys: list[Hashable] = []
    for first, last, cache in runs:
        addresses = cache.begin_batch(caches[first:last], last - first)
        keys.append((last, plans[first].key, addresses))
    return runs, keys


def _runs(caches: Sequence[Any], plans: Sequence[CachePlan]) -> Iterator[Run]:
    def of(b: int) -> Hashable:
        return _kind(caches[b]), plans[b].key

    for _, group in groupby(range(len(caches)), key=of):
        members = list(group)
        first, last = members[0], members[-1] + 1
        if not isinstance(caches[first], DeviceCache):
            continue
        if last - first > 1 and not plans[first].is_alone:
            _move_to_common(caches[first:last])
            yield Run(first, last, caches[first])
        else:
            for b in members:
                _leave_common(caches[b])
                yield Run(b, b + 1, caches[b])


def _leave_common(cache: DeviceCache) -> None:
    """Moves the cache's tensors to memory of its own, if they are parts of others."""
    tensors = cache.tensors()
    if any(x.numel() and x.untyped_storage().nbytes() > x.nbytes for x in tensors):
        cache.replace_tensors([x.clone() for x in tensors])


def _move_to_common(caches: Sequence[DeviceCache]) -> None:
    """Moves the caches' tensors into common ones, in this order, unless they are there."""
    columns = list(zip(*(cache.tensors() for cache in caches), strict=True))
    if all(_are_in_common(parts) for parts in columns):
        return
    common = [_common(parts) for parts in columns]
    for b, cache in enumerate(caches):
        cache.replace_tensors([x[b : b + 1] for x in common])


def _are_in_common(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the parts follow each other in one tensor, and are all of it."""
    first = parts[0]
    step = first.stride(0) if first.numel() else 0  # nothing lies nowhere
    n_bytes = step * first.element_size()
    if first.numel() and first.untyped_storage().nbytes() != n_bytes * len(parts):
        return False  # there is more than these
    at, offset, shape = first.data_ptr(), first.storage_offset(), first.shape
    for part in parts:
        if part.data_ptr() != at or part.shape != shape:
            return False
        # Of two tensors that happen to be neighbours in memory, both begin at offset 0.
        if step and part.storage_offset() != offset:
            return False
        at, offset = at + n_bytes, offset + step
    return True


def _common(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts (1, ...) as one tensor (B, ...), narrower ones filled up.

    They are filled with 0, or in integers, which number rows and slots, with -1: none.
    """
    sizes = [max(of_all) for of_all in zip(*(part.shape for part in parts), strict=True)]
    one = parts[0]
    fill = 0 if one.is_floating_point() or one.dtype == torch.uint8 else -1
    common = one.new_full((len(parts), *sizes[1:]), fill)
    for b, part in enumerate(parts):
        common[b : b + 1][tuple(slice(size) for size in part.shape)] = part
    return common
