"""LFPS step by step as docs/methods.md numbers it, in numpy f64: slow, literal, no shared code.

Whole tables decay every step; there is no lazy scale, no bound, no bitmap, no running power sum.
Letters: H query heads, G kv heads, n keys, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SINKS, LOCAL = 4, 6
BLOCK = 64  # entries of a table that have one bound
HEADS_A_READ = 4  # heads that score a key while it is in registers


@dataclass(frozen=True)
class TwinOptions:
    """The options that change what is computed, as in the method."""

    budget: int
    scored_by: str = "group"
    expand: str = "plain"
    sigma: str = "cov"
    recent: int = 32
    candidates: int = 0
    a: float = 0.2
    horizon: int = 0
    decay: float = 0.95
    window: int = 32
    epsilon: float = 0.85


@dataclass
class HeadChoice:
    """What one head does in a step."""

    bypassed: bool
    rho: float
    attended: np.ndarray  # row numbers, ascending: sinks and (unless bypassed) C2
    scores: np.ndarray  # (n,) scaled
    candidates: np.ndarray = field(default_factory=lambda: np.empty(0, int))  # C1
    cut: float = -np.inf  # lowest score that got into C2 beside the recents, if others did not
    distance: float = np.inf  # of the nearest table entry to its threshold, relative to it


@dataclass
class StepCounts:
    """What a step does, in rows and table entries.

    scored: pairs of head and row. keys: key rows read, of which HEADS_A_READ heads share one.
    entries: least entries of tables that a search reads: those of blocks that hold a candidate.
    distance: how near the nearest test of a head was to its limit.
    """

    scored: int = 0
    keys: int = 0
    attended: int = 0
    tested: int = 0
    bounds: int = 0
    entries: int = 0
    distance: float = np.inf


class LFPSTwin:
    """One layer: ``start`` after the prefill, then ``choose`` and ``finish`` for every token.

    softcap: c of scores c tanh(score / c), or 0. sinks (H,): scores without values, -inf for none.
    """

    def __init__(
        self,
        options: TwinOptions,
        n_head: int,
        n_head_kv: int,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
    ) -> None:
        self.options, self.n_head, self.group = options, n_head, n_head // n_head_kv
        self.softcap = softcap
        self.sinks = np.full(n_head, -np.inf) if sinks is None else sinks.astype(np.float64)
        self.heads_a_team = 1 if options.scored_by == "head" else self.group

    def start(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Steps 2, 3: k (G, n, d), v (G, n, d_v) of the context, q (H, m, d) of its last rows."""
        self.k, self.v = k.astype(np.float64), v.astype(np.float64)
        q = q.astype(np.float64)
        n, d = k.shape[1:]
        s, r = min(self.options.window, q.shape[1]), self.options.decay
        self.scale = 1 / np.sqrt(d)
        self.ver, self.dist = np.zeros((self.n_head, n)), np.zeros((self.n_head, n))
        for h in range(self.n_head):
            for j in range(1, s + 1):
                position = n - j
                rows = np.arange(SINKS, position + 1)
                if not len(rows):
                    continue
                weights = softmax(
                    self.capped(self.k[h // self.group, rows] @ q[h, -j] * self.scale)
                )
                weights /= 2 * s * (1 - r)
                self.ver[h, rows] += weights
                self.dist[h, position - rows] += weights
        self.raised = np.ones(len(self.ver))
        keys, values = self.k[:, SINKS:], self.v[:, SINKS:]
        self.mean_k, self.mean_v = keys.mean(1), values.mean(1)
        if self.options.sigma == "cov":
            centred = keys - self.mean_k[:, None]
            self.covariance = np.einsum("gni,gnj->gij", centred, centred) / keys.shape[1]
        else:
            last = q[:, -1]
            self.ratio = np.array(
                [
                    np.var(keys[h // self.group] @ last[h] * self.scale) / (last[h] @ last[h])
                    for h in range(self.n_head)
                ]
            )

    def choose(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[HeadChoice]:
        """Steps 4 to 8 for a token: q (H, d), k (G, d), v (G, d_v); its row is added first."""
        self.k = np.concatenate([self.k, k[:, None].astype(np.float64)], axis=1)
        self.v = np.concatenate([self.v, v[:, None].astype(np.float64)], axis=1)
        new = np.zeros((len(self.ver), 1))  # step 10
        self.ver = np.concatenate([self.ver, new], axis=1)
        self.dist = np.concatenate([self.dist, new], axis=1)
        self.q = q.astype(np.float64)
        n = self.k.shape[1]
        scores = [
            self.capped(self.k[h // self.group] @ self.q[h] * self.scale)
            for h in range(self.n_head)
        ]
        rho = [self.sink_share(h, scores[h]) for h in range(self.n_head)]
        choices = []
        counts = self.counts = StepCounts()
        n_local = n - max(SINKS, n - 1 - LOCAL)
        counts.scored = counts.keys = self.n_head * (SINKS + n_local)
        for h in range(self.n_head):
            most = self.sink_share(h, scores[h], of_all=False)
            counts.tested += most > self.options.epsilon
            counts.distance = min(counts.distance, abs(most - self.options.epsilon))
        for first in range(0, self.n_head, self.heads_a_team):
            heads = range(first, first + self.heads_a_team)
            active = [h for h in heads if rho[h] <= self.options.epsilon]
            if active:
                c1, distance = self.candidates(heads, active)
                counts.distance = min(counts.distance, distance)
                counts.scored += len(active) * max(0, len(c1) - n_local)
                counts.keys += len(c1) * -(-len(active) // HEADS_A_READ)
            for h in heads:
                if h not in active:
                    near = [*range(SINKS), *range(max(SINKS, n - 1 - LOCAL), n)]
                    choices.append(HeadChoice(True, rho[h], np.array(near), scores[h]))
                    continue
                n_recent = self.n_recent()
                recents, others = np.arange(n - n_recent, n), c1[c1 < n - n_recent]
                best = others[np.argsort(-scores[h][others], kind="stable")]
                best = best[: self.options.budget - n_recent]
                cut = scores[h][best].min() if 0 < len(best) < len(others) else -np.inf
                rows = np.sort(np.concatenate([np.arange(SINKS), best, recents]))
                choices.append(HeadChoice(False, rho[h], rows, scores[h], c1, cut, distance))
        counts.attended = sum(len(choice.attended) for choice in choices)
        return choices

    def capped(self, scores: np.ndarray) -> np.ndarray:
        return self.softcap * np.tanh(scores / self.softcap) if self.softcap else scores

    def n_recent(self) -> int:
        return max(1, min(self.options.recent, self.options.budget // 2))

    def sink_share(self, h: int, scores: np.ndarray, of_all: bool = True) -> float:
        """Step 4: rho; or the most that it could be, were there no other keys."""
        n = len(scores)
        peak = max(scores.max(), self.sinks[h])
        ws = np.exp(scores[:SINKS] - peak).sum() + np.exp(self.sinks[h] - peak)
        wl = np.exp(scores[max(SINKS, n - 1 - LOCAL) : n - 1] - peak).sum()
        wg = np.exp(self.log_global(h, n) - peak) if of_all else 0.0
        return ws / (ws + wg + wl)

    def log_global(self, h: int, n: int) -> float:
        """ln of nn exp(q.Kbar/sqrt d + Var/2), the mass of all keys but the sinks.

        With a softcap the integral of exp(capped score) over this normal distribution.
        """
        q, g = self.q[h], h // self.group
        d = len(q)
        if self.options.sigma == "cov":
            variance = q @ self.covariance[g] @ q / d
        else:
            variance = (q @ q) * self.ratio[h]
        mean = q @ self.mean_k[g] * self.scale
        if not self.softcap:
            return np.log(n - SINKS) + mean + variance / 2
        z = np.arange(-10, 10, 0.01)
        density = 0.01 * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
        return np.log(n - SINKS) + np.log(
            density @ np.exp(self.capped(mean + z * np.sqrt(variance)))
        )

    def candidates(self, heads: range, active: list[int]) -> tuple[np.ndarray, float]:
        """Steps 5 to 7: C1, ascending, of a team's heads that are not bypassed, the recents
        included; and how near a comparison was.
        """
        n = self.ver.shape[1]
        limit = n
        if self.options.candidates:
            shared = self.options.scored_by == "group"
            limit = max(self.options.candidates * (1 + shared), 2 * self.options.budget)
        factor, distance = self.raised[heads[0]], np.inf
        while True:
            c1 = set(range(n - self.n_recent(), n))
            for h in active:
                of_head, nearest = self.above_thresholds(h, factor)
                c1 |= of_head
                distance = min(distance, nearest)
            if len(c1) <= limit:
                calm = len(c1) < 0.7 * limit
                self.raised[list(heads)] = max(1.0, factor / 1.25) if calm else factor
                return np.array(sorted(c1)), distance
            factor *= 1.25

    def above_thresholds(self, h: int, factor: float) -> tuple[set[int], float]:
        """The head's C0 and their neighbours, thresholds raised by ``factor``; and how near."""
        n = self.ver.shape[1]
        known = np.arange(SINKS, n)
        ver = self.ver[h, known]  # by row
        dist = self.dist[h, n - 1 - known]
        tau_v, tau_s = factor * self.threshold(ver), factor * self.threshold(dist)
        self.counts.bounds += 2 * -(-n // BLOCK)
        for table, tau in ((self.ver[h], tau_v), (self.dist[h, : n - SINKS], tau_s)):
            blocks = [table[i : i + BLOCK] for i in range(0, len(table), BLOCK)]
            self.counts.entries += sum(len(block) for block in blocks if block.max() > tau)
        c0 = set(known[(ver > tau_v) | (dist > tau_s)].tolist())
        above_mean = set(known[(ver > ver.mean()) | (dist > dist.mean())].tolist())
        c1 = set(c0)
        for step in (-1, 1, 2):
            neighbours = {i + step for i in c0 if SINKS <= i + step < n}
            c1 |= neighbours if self.options.expand == "plain" else neighbours & above_mean
        borders = [(ver, tau_v), (dist, tau_s)]
        if self.options.expand == "filtered":
            borders += [(ver, ver.mean()), (dist, dist.mean())]
        return c1, min(np.abs(table / border - 1).min() for table, border in borders)

    def threshold(self, table: np.ndarray) -> float:
        """Step 5: a mu / kappa; a is higher where others' candidates are scored too."""
        n = len(table)
        centred = table - table.mean()
        m2, m4 = (centred**2).sum(), (centred**4).sum()
        kappa = 1 / n
        if m2 > 1e-12 * (table**2).sum():
            kappa = np.clip(m4 / m2**2, 1 / n, 1)
        a = self.options.a * (0.145 + 0.855 * min(self.heads_a_team, 3))
        return a * table.sum() / min(n, self.options.horizon or n) / kappa

    def finish(self, choices: list[HeadChoice]) -> np.ndarray:
        """Outputs (H, d_v) of the rows in ``choices``, and steps 9: the update of the tables."""
        out = np.stack([self.output(h, choice) for h, choice in enumerate(choices)])
        n, r = self.k.shape[1], self.options.decay
        for h, choice in enumerate(choices):
            if choice.bypassed:
                continue
            self.ver[h] *= r
            self.dist[h] *= r
            c2 = choice.attended[choice.attended >= SINKS]
            delta = softmax(choice.scores[c2]) - 1 / (2 * len(c2))
            self.ver[h, c2] += delta
            self.dist[h, n - 1 - c2] += delta
        return out

    def output(self, h: int, choice: HeadChoice) -> np.ndarray:
        """Exact attention over the rows; a bypassed head adds the mean value with mass wg."""
        values = self.v[h // self.group, choice.attended]
        scores = choice.scores[choice.attended]
        log_global = self.log_global(h, self.k.shape[1]) if choice.bypassed else -np.inf
        peak = max(scores.max(), log_global, self.sinks[h])
        weights, wide = np.exp(scores - peak), np.exp(log_global - peak)
        total = weights.sum() + wide + np.exp(self.sinks[h] - peak)
        return (weights @ values + wide * self.mean_v[h // self.group]) / total


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
