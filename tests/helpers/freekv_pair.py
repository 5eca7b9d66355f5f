"""FreeKV and its naive form: also which pages its LRU cache recalls, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from layer_rows import Rows
from naive_pair import Pair

from sparsekv_cli.methods.naive.base import FORCED, Choice


@dataclass
class Recalled:
    """The recalled pages of a kv head: page -> (when it was last used, slot)."""

    used: dict[int, tuple[int, int]] = field(default_factory=dict)
    time: int = 0
    n_hit: int = 0
    n_recalled: int = 0
    asked: tuple[int, int, int] = (0, 0, 0)

    def take(self, pages: np.ndarray, n_slot: int) -> None:
        """Hits are marked first; then each miss takes an empty slot, or the longest unused one."""
        self.time += 1
        misses = [int(j) for j in pages if int(j) not in self.used]
        for j in set(pages.tolist()) - set(misses):
            self.used[j] = (self.time, self.used[j][1])
        self.n_hit += len(pages) - len(misses)
        self.n_recalled += len(misses)
        for j in misses:
            free = sorted(set(range(n_slot)) - {slot for _, slot in self.used.values()})
            slot = free[0] if free else -1
            if not free:
                oldest = min(self.used, key=lambda page: self.used[page])
                slot = self.used.pop(oldest)[1]
            self.used[j] = (self.time, slot)


class FreeKVPair(Pair):
    """Pages are taken in the order in which they are chosen: with the prefill, or a step's own;
    then, with a thread that works ahead, the next step's.
    """

    def prefill(self, n: int, chunk: int = 64) -> Rows:
        rows = super().prefill(n, chunk)
        self.recalled = [Recalled() for _ in range(self.geometry.n_head_kv)]
        if self.method.speculate:
            self.take_ahead()
        return rows

    def compare(self, choices: list[Choice]) -> None:
        super().compare(choices)
        naive = self.naive
        if self.cache.attended is None:
            return
        corrected = naive.corrected.tolist()
        self.seen["corrected"] += sum(corrected)
        for g, choice in enumerate(choices):
            by_previous = self.method.speculate and not corrected[g]
            is_page = np.isfinite(choice.scores[choice.rows]) & (choice.scores[choice.rows] != FORCED)
            pages = np.unique(choice.rows[is_page] // self.method.page)
            self.take(g, pages, naive.n, naive.n - 1 if by_previous else naive.n)

    def take(self, g: int, pages: np.ndarray, n: int, asked_at: int) -> None:
        """Kv head g makes its pages of a step of n rows resident.

        asked_at: rows when the query was current. What it chose with the same query, of the same
        candidates, it has already.
        """
        n_best, of_head = self.naive.n_best(n), self.recalled[g]
        asked = asked_at, self.naive.first_pages(n)[1], n_best
        if of_head.asked != asked:
            of_head.asked = asked
            of_head.take(pages, max(n_best, round(self.method.cache_pages * n_best)))

    def take_ahead(self) -> None:
        """The pages of the next step by the query of this one."""
        naive, n = self.naive, self.naive.n + 1
        if naive.covers(n):
            return
        naive.n_sink, window = naive.first_pages(n)
        for g in range(self.geometry.n_head_kv):
            pages, pooled = naive.choose_pages(g, naive.previous, window)
            best = np.argsort(-pooled, kind="stable")[: naive.n_best(n)]
            self.take(g, np.sort(pages[best]), n, n - 1)

    def decode(self, n_steps: int):
        for _ in range(n_steps):
            super().decode(1)
            if self.cache._overlaps:
                self.take_ahead()
        return self.seen
