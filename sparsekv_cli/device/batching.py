"""Sequences of a step whose caches launch each kernel once for all of them.

Kernels take the tensors of B sequences at one stride, but each cache has tensors of its own. So
caches of a layer that are about to launch the same are moved into common tensors, (B, ...), as wide
as the widest of them; each keeps its part as a view. They stay there until one outgrows its part,
and then all move again.

What is planned for a step holds for the next ones, up to a number of rows that caches tell.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple
from weakref import ref

import torch

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.device.cache import UNLIMITED, DeviceCache
from sparsekv_cli.device.methods.lfps import HostLFPS


class Run(NamedTuple):
    """Sequences first..last - 1 of a step in one layer; the first one's ``cache`` decodes all."""

    first: int
    last: int
    cache: DeviceCache


class StepPlan(NamedTuple):
    """What a step launches. runs: of each layer, first and last of each ``Run``; none on the host.

    It holds for ``n_more`` steps behind it in which each sequence gets one row.
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

    def forget(self) -> None:
        """Nothing is planned any more: rows were added in another way, or a step was broken off."""
        self._plan = None

    def begin(self, positions: Sequence[int], caches: Sequence[Sequence[LayerCache]]) -> StepPlan:
        """Readies the caches of B sequences for a step; ``end`` follows when it is done."""
        plan, flat = self._plan, [cache for layers in caches for cache in layers]
        self.forget()
        if plan is None or not self._holds(plan, positions, flat):
            longest = max(self.least_rows, max(positions) + 1)
            return _plan_step(positions, longest, caches, flat)
        for cache in flat:
            if isinstance(cache, DeviceCache):
                cache.resume()
        return plan._replace(n_more=plan.n_more - 1)

    def _holds(
        self, plan: StepPlan, positions: Sequence[int], caches: Sequence[LayerCache]
    ) -> bool:
        if plan.n_more < 1 or self._next != list(positions) or len(caches) != len(plan.caches):
            return False
        return all(kept() is cache for kept, cache in zip(plan.caches, caches, strict=True))

    def end(self, plan: StepPlan, positions: Sequence[int]) -> None:
        self._plan, self._next = plan, [pos + 1 for pos in positions]


def _plan_step(
    positions: Sequence[int],
    longest: int,
    caches: Sequence[Sequence[LayerCache]],
    flat: Sequence[LayerCache],
) -> StepPlan:
    n_more = UNLIMITED
    parts: list[Hashable] = []
    runs: list[list[tuple[int, int]]] = []
    for layers in zip(*caches, strict=True):
        keys, on_device = [], []
        for cache, pos in zip(layers, positions, strict=True):
            if isinstance(cache, DeviceCache):
                if cache.side is not None:  # of a step that was broken off: captures cannot wait
                    cache.side.join()
                n, n_max = pos + 1, cache.bound(longest)
                keys.append(cache.plan(n, n_max))
                on_device.append(cache)
                n_more = min(n_more, cache.holds_until(n, n_max) - n, n_max - longest)
            elif isinstance(cache, HostLFPS):
                cache.plan()
                n_more = min(n_more, UNLIMITED if cache.is_planned else 0)
        of_layer = prepare_runs(on_device, keys) if keys else []
        parts.append(tuple((run.last, keys[run.first], run.cache.places) for run in of_layer))
        runs.append([(run.first, run.last) for run in of_layer])
    return StepPlan(tuple(parts), runs, [ref(cache) for cache in flat], n_more)


def prepare_runs(caches: Sequence[DeviceCache], keys: Sequence[Hashable]) -> list[Run]:
    """One layer's caches as runs of equal keys (DeviceCache.plan), ready to decode.

    The caches of a run lie in common tensors.
    """
    runs = list(_runs(caches, keys))
    for run in runs:
        run.cache.lead(caches[run.first : run.last])
    return runs


def _runs(caches: Sequence[DeviceCache], keys: Sequence[Hashable]) -> Iterator[Run]:
    for _, group in groupby(range(len(caches)), key=lambda b: keys[b]):
        members = list(group)
        first, last = members[0], members[-1] + 1
        if last - first > 1 and all(caches[b].moves for b in members):
            _move_to_common(caches[first:last])
            yield Run(first, last, caches[first])
        else:
            yield from (Run(b, b + 1, caches[b]) for b in members)


def _move_to_common(caches: Sequence[DeviceCache]) -> None:
    """Moves the caches' tensors into common ones, in this order, unless they are there."""
    columns = list(zip(*(cache.tensors() for cache in caches), strict=True))
    if all(_are_in_common(parts) for parts in columns):
        return
    common = [_common(parts) for parts in columns]
    for b, cache in enumerate(caches):
        cache.put([x[b : b + 1] for x in common])


def _are_in_common(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the parts follow each other in one tensor."""
    first = parts[0]
    step = first.stride(0) if first.numel() else 0  # nothing lies nowhere
    n_bytes = step * first.element_size()
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
