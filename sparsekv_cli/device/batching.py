"""Sequences of a step whose caches launch each kernel once for all of them.

Kernels take the tensors of B sequences at one stride, but each cache has tensors of its own. So
caches of a layer that are about to launch the same are moved into common tensors, (B, ...), as wide
as the widest of them; each keeps its part as a view. They stay there until one outgrows its part,
and then all move again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from sparsekv_cli.device.cache import DeviceCache


class Run(NamedTuple):
    """Sequences first..last - 1 of a step in one layer; the first one's ``cache`` decodes all."""

    first: int
    last: int
    cache: DeviceCache


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
