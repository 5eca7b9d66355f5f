"""The counts that caches keep of their steps, and the ledger of a sequence."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from sparsekv_cli.cache.spec import FULL, LayerSpec, Memory

LEDGER_ROWS = ("rows_total", "rows_scored", "rows_attended")
# The ledger entries that begin so hold the current memory. The others count finished work.
LEDGER_STATES = ("bytes_host", "bytes_device", "index_bytes")


class Counted(Protocol):
    """A layer's cache."""

    spec: LayerSpec

    def counters(self) -> Mapping[str, int]:
        """Returns the ledger's counts so far."""

    def memory(self) -> Memory:
        """Returns the bytes that the cache takes."""


class Ledger:
    """Counts of the work of decode steps. Rows are counted as (query head, key) pairs.

    rows_scored: pairs whose q . k was computed to choose rows. Dense attention counts all pairs
    that it attends to. bytes_read: bytes of K, V and index that the kernels load. A row that
    several query heads choose separately counts for each.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def step(self, rows: int, scored: int, attended: int, n_bytes: int, sparse: bool) -> None:
        """Counts one layer's decode step: rows in context, scored and attended, and KV bytes."""
        counts = self.counts
        counts["rows_total"] += rows
        counts["rows_scored"] += scored
        counts["rows_attended"] += attended
        counts["bytes_read"] += n_bytes
        if sparse:
            counts["sparse_rows_total"] += rows
            counts["sparse_rows_scored"] += scored
            counts["sparse_rows_attended"] += attended


def total_counters(caches: Iterable[Counted]) -> Counter[str]:
    """Returns the counts of all layers together."""
    total: Counter[str] = Counter()
    for cache in caches:
        total.update(cache.counters())
    return total


def held_bytes(caches: Iterable[Counted]) -> int:
    """Returns the bytes that caches take, indexes included."""
    return sum(m.host + m.device + m.index for m in (cache.memory() for cache in caches))


def ledger_of(caches: Sequence[Counted], drafting: Sequence[Counted] = ()) -> dict[str, int]:
    """Returns the counts of ``caches`` together, in the words of the JSON contract.

    drafting: the caches that make drafts. Only their memory counts.
    """
    counts = total_counters(caches)
    memory = [cache.memory() for cache in caches]
    result = {name: int(counts.pop(name, 0)) for name in LEDGER_ROWS}
    result["bytes_host"] = sum(m.host for m in memory)
    for kind in sorted({cache.spec.kind for cache in caches} - {FULL}):
        held = sum(cache.memory().host for cache in caches if cache.spec.kind == kind)
        result[f"bytes_host_{kind}"] = held  # part of bytes_host
    if drafting:
        result["bytes_host_drafts"] = held_bytes(drafting)
        result["bytes_host"] += result["bytes_host_drafts"]
    result["bytes_device"] = sum(m.device for m in memory)
    result["bytes_moved"] = int(counts.pop("bytes_moved", 0))
    result["index_bytes"] = sum(m.index for m in memory)
    result.update((name, int(count)) for name, count in sorted(counts.items()))
    return result


def ledger_since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """Returns the ledger ``now`` without the counts of ``before``; the memory is that of now."""
    return {
        name: n if name.startswith(LEDGER_STATES) else n - before.get(name, 0)
        for name, n in now.items()
    }
