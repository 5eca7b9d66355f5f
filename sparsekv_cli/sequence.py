"""One sequence of a session: its tokens, the caches that hold their rows, and how it attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import LayerCache, total_counters
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods.base import Method

LEDGER_ROWS = ("rows_total", "rows_scored", "rows_attended")


class Checkpoint(NamedTuple):
    """The end of a sequence's last prefill, to which it can go back."""

    n: int  # tokens
    logits: np.ndarray  # f32 (n_vocab,) after them


class Attention(NamedTuple):
    """How a sequence attends.

    method: with the budget that it has where it is dense at first. specs: the layers, calibrated
    for it. sparse_from: of so many rows the method attends to all; among more it chooses.
    """

    method: Method
    specs: Sequence[LayerSpec]
    sparse_from: int


class SequenceState(NamedTuple):
    """One sequence: its tokens, and for every layer the cache that holds their rows."""

    attention: Attention
    tokens: list[int]
    caches: list[LayerCache]
    checkpoint: Checkpoint | None = None


def ledger_of(caches: Sequence[LayerCache]) -> dict[str, int]:
    """The counts of ``caches`` together, in the words of the JSON contract."""
    counts = total_counters(caches)
    memory = [cache.memory() for cache in caches]
    result = {name: int(counts.pop(name, 0)) for name in LEDGER_ROWS}
    result["bytes_host"] = sum(m.host for m in memory)
    result["bytes_device"] = sum(m.device for m in memory)
    result["bytes_moved"] = int(counts.pop("bytes_moved", 0))
    result["index_bytes"] = sum(m.index for m in memory)
    result.update((name, int(count)) for name, count in sorted(counts.items()))
    return result
