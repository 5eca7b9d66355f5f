"""FreeKV and its naive form: also which pages its LRU cache recalls, and when."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from layer_rows import Case, Geometry, Rows
from naive_pair import Pair

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.methods.freekv import FreeKV
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

    seen also has lists that were corrected, and steps in which a page leaves the window.
    """

    grouped = False  # whether a choice was among pages of the best groups only
    recalled: list[Recalled]

    @property
    def ahead(self) -> bool:
        return self.cache._overlaps

    def prefill(self, n: int, chunk: int = 64) -> Rows:
        rows = super().prefill(n, chunk)
        self.restart()
        return rows

    def truncate(self, n: int) -> None:
        super().truncate(n)
        self.restart()

    def restart(self) -> None:
        self.recalled = [Recalled() for _ in range(self.geometry.n_head_kv)]
        if self.method.speculate and self.naive.previous is not None:
            self.take_ahead()

    def decode(self, n_steps: int) -> Counter[str]:
        for _ in range(n_steps):
            super().decode(1)
            if self.ahead:
                self.take_ahead()
        return self.seen

    def compare(self, choices: list[Choice]) -> None:
        super().compare(choices)
        if self.cache.attended is None:
            return
        naive, n = self.naive, self.naive.n
        n_page = naive.first_pages(n)[1] - naive.n_sink
        self.seen["borders"] += naive.first_pages(n + 1)[1] - naive.first_pages(n)[1]
        self.seen["corrected"] += int(naive.corrected.sum())
        for g, choice in enumerate(choices):
            scores = choice.scores[choice.rows]
            pages = np.unique(choice.rows[scores != FORCED] // self.method.page)
            self.grouped |= bool(np.isfinite(choice.scores).sum() < n_page * self.method.page)
            by_previous = self.method.speculate and not naive.corrected[g]
            self.take(g, pages, n - 1 if by_previous else n, n)

    def take(self, g: int, pages: np.ndarray, asked_at: int, n: int) -> None:
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
        if naive.is_dense_at(n):
            return
        naive.n_sink, window = naive.first_pages(n)
        for g in range(self.geometry.n_head_kv):
            pages, pooled = naive.choose_pages(g, naive.previous, window, n)
            best = np.argsort(-pooled, kind="stable")[: naive.n_best(n)]
            self.take(g, np.sort(pages[best]), n - 1, n)


N_STEPS = 300
GEOMETRIES = [
    Case(Geometry(4, 4, 64), 250),
    Case(Geometry(9, 3, 64), 300),
    Case(Geometry(8, 2, 80), 271),
    Case(Geometry(8, 1, 128), 320),
    Case(Geometry(6, 2, 72, 40), 263),  # rows are padded, values are of another size
]
PLAIN = GEOMETRIES[1]
SMALL: dict[str, Any] = {
    "budget": Budget(tokens=144), "sinks": 16, "window": 32, "page": 16, "tau": 0.8,
}  # fmt: skip


def followed(
    geometry: Geometry, n_prefill: int, n_steps: int = N_STEPS, n_threads: int = 1, **options: Any
) -> FreeKVPair:
    """A pair behind a prefill and n_steps steps."""
    method = FreeKV(**(SMALL | {"overlap": "false"} | options))
    pair = FreeKVPair(method, geometry, 1, n_threads)
    pair.prefill(n_prefill)
    pair.decode(n_steps)
    return pair
