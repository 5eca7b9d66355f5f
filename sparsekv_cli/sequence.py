"""One sequence of a session: its tokens, the caches that hold their rows, and how it attends."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import LayerCache, total_counters
from sparsekv_cli.cache.spec import FULL, LayerSpec
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


@dataclass
class Timings:
    """Seconds and tokens so far; ``reset`` keeps the load time.

    cached_tokens: of prompts, whose rows came from disk. ttft_s: from a prompt to its first token.
    """

    load_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: float = 0.0

    def reset(self) -> None:
        self.prefill_s = self.decode_s = self.ttft_s = 0.0
        self.prefill_tokens = self.decode_tokens = self.cached_tokens = 0


class SequenceLedger:
    """Counts of the sequence that a session works on; caches: asks for its caches."""

    def __init__(self, caches: Callable[[], Sequence[LayerCache]]) -> None:
        self._caches = caches

    def as_dict(self) -> dict[str, int]:
        return ledger_of(self._caches())


def ledger_of(caches: Sequence[LayerCache]) -> dict[str, int]:
    """The counts of ``caches`` together, in the words of the JSON contract."""
    counts = total_counters(caches)
    memory = [cache.memory() for cache in caches]
    result = {name: int(counts.pop(name, 0)) for name in LEDGER_ROWS}
    result["bytes_host"] = sum(m.host for m in memory)
    for kind in sorted({cache.spec.kind for cache in caches} - {FULL}):
        held = sum(cache.memory().host for cache in caches if cache.spec.kind == kind)
        result[f"bytes_host_{kind}"] = held  # of those above
    result["bytes_device"] = sum(m.device for m in memory)
    result["bytes_moved"] = int(counts.pop("bytes_moved", 0))
    result["index_bytes"] = sum(m.index for m in memory)
    result.update((name, int(count)) for name, count in sorted(counts.items()))
    return result


def hand_over(
    old: Sequence[LayerCache], new: Sequence[LayerCache], n: int, n_room: int
) -> list[LayerCache] | None:
    """The caches of another method with the first n rows of a sequence; all on the host.

    new: empty ones; of a layer in which methods have no part the old one is taken. None unless the
    old ones keep all rows, and as the new ones do; ``old`` is of no use after either. n_room: rows
    in all that are to fit. A prefill of more rows must follow.
    """
    for cache, into in zip(old, new, strict=True):
        kinds = [(each.store.k_type.kind, each.store.v_type.kind) for each in (cache, into)]
        if not cache.can_prefill_in_parts or kinds[0] != kinds[1] or cache.truncate(n) != n:
            return None
    taken = []
    for cache, into in zip(old, new, strict=True):
        if cache.spec.kind == FULL:
            of, to = cache.store, into.store
            to.reserve(n_room)
            to.k[:, :n], to.v[:, :n], to.n = of.k[:, :n], of.v[:, :n], n
        taken.append(into if cache.spec.kind == FULL else cache)
    return taken


def mark_messages(
    caches: Sequence[LayerCache], ending: Container[int], ids: Sequence[int], n_past: int
) -> None:
    """Tells the caches where messages end in a prompt behind n_past tokens.

    ending: the tokens behind which one does.
    """
    ends = [n_past + i + 1 for i, token in enumerate(ids) if token in ending]
    for cache in caches:
        cache.mark(ends)


def reachable(caches: Sequence[LayerCache], n: int) -> int:
    """The largest length of at most n to which all caches go back, as far as they know."""
    while (least := min((cache.reach(n) for cache in caches), default=n)) < n:
        n = least
    return n
