"""Counts of the work of caches (the ledger), and the times of a sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparsekv_cli.cache.spec import FULL, LayerSpec, Memory

LEDGER_ROWS = ("rows_total", "rows_scored", "rows_attended")
# Ledger entries whose names begin with one of these hold memory in use now. All other entries count
# finished work.
LEDGER_STATES = ("bytes_host", "bytes_device", "index_bytes")


class Counted(Protocol):
    """A layer's cache."""

    spec: LayerSpec

    def counters(self) -> Mapping[str, int]:
        """Returns the ledger's counts so far."""

    def memory(self) -> Memory:
        """Returns the bytes that the cache takes."""


class Ledger:
    """Counts of the work of decode steps. One (query head, key) pair counts as one row.

    rows_scored: pairs whose q . k was computed to choose rows. Dense attention counts all pairs
    that it attends to. bytes_read: bytes of K, V and index that the kernels load. If several query
    heads choose the same row separately, its bytes count once for each head.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def step(self, rows: int, scored: int, attended: int, n_bytes: int, sparse: bool) -> None:
        """Counts one layer's decode step.

        rows, scored, attended: pairs in the context, scored and attended. n_bytes: bytes read of K,
        V and index. sparse: whether the step also counts as one that may leave out rows.
        """
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
    """Returns the counts of ``caches`` together, with the names of the JSON output.

    drafting: the caches of the model that makes drafts. Only their memory counts.
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
    """Returns the counts of ``now`` minus those of ``before``. Memory entries are those of ``now``.

    A memory entry has a name that begins as in LEDGER_STATES.
    """
    return {
        name: n if name.startswith(LEDGER_STATES) else n - before.get(name, 0)
        for name, n in now.items()
    }


def speed(n: int, seconds: float) -> float:
    """Returns tokens a second; 0.0 when nothing was timed."""
    return n / seconds if seconds > 0 else 0.0


@dataclass
class Speculation:
    """Counts of drafts and of their accepted tokens so far."""

    source: str = "off"
    steps: int = 0  # decode steps with a draft
    drafted: int = 0  # tokens
    accepted: int = 0  # tokens of drafts that are in the answer
    draft_s: float = 0.0  # seconds in which drafts were made
    verify_s: float = 0.0  # seconds of the steps with a draft

    def add_step(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Counts one decode step that has checked the tokens of a draft."""
        self.steps += 1
        self.drafted += n_drafted
        self.accepted += n_accepted
        self.verify_s += seconds

    def reset(self) -> None:
        self.steps = self.drafted = self.accepted = 0
        self.draft_s = self.verify_s = 0.0

    def add(self, other: Speculation) -> None:
        self.source = other.source
        for name in ("steps", "drafted", "accepted", "draft_s", "verify_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields and ``mean_length``, the mean tokens of a step with a draft."""
        mean = 1 + self.accepted / self.steps if self.steps else 0.0
        return {**vars(self), "mean_length": mean}


@dataclass
class Timings:
    """Seconds and tokens of a sequence so far. ``reset`` keeps the load time."""

    load_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_s: float = 0.0
    decode_tokens: int = 0
    cached_tokens: int = 0  # tokens of prompts whose rows existed already
    ttft_s: float = 0.0  # seconds from the start of a prompt to its first token
    speculation: Speculation = field(default_factory=Speculation)

    def reset(self) -> None:
        self.speculation.reset()
        self.prefill_s = self.decode_s = self.ttft_s = 0.0
        self.prefill_tokens = self.decode_tokens = self.cached_tokens = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the timings of an answer, with the names of the JSON output."""
        drafts = self.speculation
        return {
            "load_s": self.load_s,
            "prefill_s": self.prefill_s,
            "prefill_tps": speed(self.prefill_tokens, self.prefill_s),
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "decode_tps": speed(self.decode_tokens, self.decode_s),
            **({} if drafts.source == "off" else {"speculation": drafts.as_dict()}),
        }

    def add(self, other: Timings) -> None:
        """Adds the work of another sequence. The load time and ``ttft_s`` stay."""
        self.prefill_s += other.prefill_s
        self.prefill_tokens += other.prefill_tokens
        self.decode_s += other.decode_s
        self.decode_tokens += other.decode_tokens
        self.cached_tokens += other.cached_tokens
        self.speculation.add(other.speculation)
