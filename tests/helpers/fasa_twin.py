"""FASA step by step as docs/methods.md numbers it, in numpy f64: slow, literal, no shared code.

K is stored whole; each step splits nothing, sums chunk by chunk and sorts. Letters: H query heads,
G kv heads, n keys, d head size, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass
class HeadChoice:
    """What one head does in a step."""

    rows: np.ndarray  # attended, ascending
    importance: np.ndarray  # S (n,)
    forced: set[int]
    cut: float = -np.inf  # lowest importance that was chosen beside the forced rows


class FASATwin:
    """One layer. rank (G, C): chunks by dominance; n_fac: rows attended in a context of n."""

    def __init__(
        self, rank: np.ndarray, n_tip: int, n_fac: Callable[[int], int], forced: bool, n_head: int
    ) -> None:
        self.rank, self.n_tip, self.n_fac, self.forced = rank, n_tip, n_fac, forced
        self.n_head, self.group = n_head, n_head // len(rank)

    def start(self, k: np.ndarray, v: np.ndarray) -> None:
        """k (G, n, d), v (G, n, d_v) of the context."""
        self.k, self.v = k.astype(np.float64), v.astype(np.float64)

    def choose(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[HeadChoice]:
        """Steps 4 and 5 for a token: q (H, d), k (G, d), v (G, d_v); its row is added first."""
        self.k = np.concatenate([self.k, k[:, None].astype(np.float64)], axis=1)
        self.v = np.concatenate([self.v, v[:, None].astype(np.float64)], axis=1)
        self.q = q.astype(np.float64)
        n = self.k.shape[1]
        n_fac = self.n_fac(n)
        choices = []
        for h in range(self.n_head):
            importance = self.importance(h)
            if n_fac >= n:
                choices.append(HeadChoice(np.arange(n), importance, set(range(n))))
                continue
            forced: set[int] = set()
            if self.forced:
                n_recent = min(16, max(1, n_fac // 2))
                forced |= set(range(n - n_recent, n))
                forced |= set(range(min(4, n_fac - n_recent)))
            others = [j for j in np.argsort(-importance, kind="stable") if j not in forced]
            best = others[: n_fac - len(forced)]
            rows = np.array(sorted(forced | set(best)))
            cut = importance[best].min() if best else -np.inf
            choices.append(HeadChoice(rows, importance, forced, cut))
        return choices

    def importance(self, h: int) -> np.ndarray:
        """Step 4: S, the sum of the dominant chunks' scores."""
        g, n_chunk = h // self.group, self.rank.shape[1]
        total = np.zeros(self.k.shape[1])
        for i in self.rank[g, : self.n_tip].astype(int):
            for dim in (i, i + n_chunk):
                total += self.q[h, dim] * self.k[g, :, dim]
        return total

    def attend(self, choices: list[HeadChoice]) -> np.ndarray:
        """Step 6: exact attention of every head over its rows, (H, d_v)."""
        out = []
        for h, choice in enumerate(choices):
            g = h // self.group
            scores = self.k[g, choice.rows] @ self.q[h] / np.sqrt(self.k.shape[2])
            weights = np.exp(scores - scores.max())
            out.append(weights @ self.v[g, choice.rows] / weights.sum())
        return np.stack(out)
