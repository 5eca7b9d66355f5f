"""LFPS, naively ("Learn from the Past", Yao and Wang, arXiv:2506.15704).

| paper | here |
|---|---|
| eq 4, initial tables from the last s prefill queries | NaiveLFPS.start |
| eq 5, 6, high-sparsity test (sink, global, local mass) | NaiveLFPS.rho, log_global |
| eq 7, 8, candidates C0 above tau = a mean / kappa | NaiveLFPS.threshold, near |
| eq 9, expansion by {-1, 0, 1, 2} to C1 | NaiveLFPS.near |
| Algorithm 1 line 10, top-k of C1 by exact q . k | NaiveLFPS.select |
| eq 10, decay and update of the tables | NaiveLFPS.finish_step |

Whole tables decay in every step. NaiveLFPS.scouted is the scout, which finds rows that the
tables do not know. Its directions, codes and best rows are the references of cpu/lfps/scout.py.
Letters: ver by position (vertical pattern), dist by distance (slash pattern), tau thresholds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import N_SINKS, AttnInput, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.lfps.scout import (
    FOUND,
    PART,
    choose_directions,
    code_parts_ref,
    find_rows_ref,
    n_directions,
)
from sparsekv_cli.methods.naive.base import FORCED, NEVER, Choice, Naive, best, softmax

if TYPE_CHECKING:
    from sparsekv_cli.methods.lfps import LFPS

N_LOCAL = 6
GROUP_ROWS = 8192  # beyond so many rows the heads of a kv group share candidates
FEW_FROM, FEW = 32768, 8  # from 32768 rows on, every eighth query starts the tables


class NaiveLFPS(Naive):
    """Two tables of past attention (H, n), one by position and one by distance."""

    method: LFPS

    def __init__(self, method: LFPS, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        self.known: dict[int, np.ndarray] = {}  # position -> its query (H, d), to start tables with
        self.has_tables = False

    def is_dense_at(self, n: int) -> bool:
        return n <= N_SINKS + self.method.budget.rows(n)

    def finish_prefill(self, q: np.ndarray) -> None:
        last = range(max(0, q.shape[1] - self.method.window), q.shape[1])
        self.known = {self.n - q.shape[1] + t: q[:, t] for t in last}
        self.has_tables = False

    def choose(self, x: AttnInput) -> list[Choice]:
        self.bypassed = np.zeros(self.n_head, bool)
        if not self.has_tables and not self.is_dense_at(self.n + 1):
            self.start_from_known()
        return super().choose(x)

    def start_from_known(self) -> None:
        """Starts the tables with the queries of the last rows, if these are known."""
        queries: list[np.ndarray] = []  # queries of the last row, of the row before it, ...
        while self.n - 1 - len(queries) in self.known and len(queries) < self.method.window:
            queries.append(self.known[self.n - 1 - len(queries)])
        if queries and self.n > N_SINKS + 1:
            self.start(self.n, queries)

    def start(self, n: int, queries: list[np.ndarray]) -> None:
        """Steps 2 and 3: makes the tables and constants of n rows. queries: the last one first."""
        every = FEW if n >= FEW_FROM else 1
        starting = list(enumerate(queries))[::every]
        c, k = 1 / (2 * len(starting) * (1 - self.method.decay)), self.k[:, N_SINKS:n]
        self.ver, self.dist = np.zeros((2, self.n_head, n))
        for h in range(self.n_head):
            for j, q in starting:
                rows = np.arange(N_SINKS, n - j)
                if len(rows):
                    w = softmax(self.scores(h, q, self.k, rows))
                    self.ver[h, rows] += c * w
                    self.dist[h, n - 1 - j - rows] += c * w
        self.mean_k, self.mean_v = k.mean(1), self.v[:, N_SINKS:n].mean(1)
        centred = k - self.mean_k[:, None]
        self.covariance = np.einsum("gni,gnj->gij", centred, centred) / k.shape[1]
        q = queries[0]
        var = [np.var(k[h // self.group] @ q[h] * self.scale) for h in range(self.n_head)]
        self.sigma2 = np.array(var) / (q**2).sum(1)
        self.raised = np.ones(self.n_head)
        self.has_tables, self.n_start = True, n
        if self.method.scout:
            self.aim(np.stack(queries[::-1], axis=1))
            self.code(n)

    def aim(self, queries: np.ndarray) -> None:
        """Chooses the scout's directions by queries (H, s, d). All codes are dropped."""
        d = padded(queries.shape[2])
        wider = d - queries.shape[2]
        q = np.pad(queries, ((0, 0), (0, 0), (0, wider))).reshape(self.n_kv, -1, d)
        covariance = np.pad(self.covariance, ((0, 0), (0, wider), (0, wider)))
        n_codes = n_directions(d)
        encode, decode = choose_directions(q.astype(np.float32), covariance, n_codes)
        self.encode = encode.swapaxes(1, 2)[..., : queries.shape[2]]
        self.zero = np.einsum("gd,grd->gr", self.mean_k, self.encode)
        decode = decode[:, : queries.shape[2]]
        decode /= np.abs(decode).max((1, 2), keepdims=True)
        self.directions = decode.swapaxes(1, 2).astype(np.float16)
        self.codes = [np.empty((0, PART // 16, n_codes // 8, 16, 4), np.uint8)] * self.n_kv

    def code(self, n: int) -> None:
        """Computes the codes of the first n rows, in whole parts of PART rows."""
        first, last = len(self.codes[0]), n // PART
        if first < last:
            # Sinks have the code of the first row after them. The first part needs that row, so all
            # are coded.
            new = code_parts_ref(self.k[:, : last * PART], self.encode, self.zero)[:, first:]
            self.codes = [np.concatenate(each) for each in zip(self.codes, new, strict=True)]

    def scouted(self, h: int) -> np.ndarray:
        """Returns the rows that the scout finds for query head h, at most one a part.

        A step looks at one slice of all parts; the next step looks at the next slice.
        """
        codes = self.codes[h // self.group]
        most = -(-self.method.rows_scouted(self.n, self.n_start) // PART)
        if not len(codes):
            return np.empty(0, int)
        n_slices = -(-len(codes) // most)
        turn = self.n % n_slices
        first, last = (i * len(codes) // n_slices for i in (turn, turn + 1))
        query = (self.q[h] * self.scale).astype(np.float32)
        found = find_rows_ref(query, codes[first:last], self.directions[h // self.group])
        return first * PART + found

    def select(self) -> list[Choice]:
        n, k, epsilon = self.n, self.method.budget.rows(self.n), self.method.epsilon
        if not self.has_tables:  # no query of the last rows is known: use this step's
            self.start(n, [self.q])
        if self.method.scout:
            self.code(n - 1)
        grow = ((0, 0), (0, n - self.ver.shape[1]))
        self.ver, self.dist = np.pad(self.ver, grow), np.pad(self.dist, grow)  # step 10
        self.s = np.stack([self.scores(h, self.q, self.k) for h in range(self.n_head)])
        self.wg = np.array([self.log_global(h) for h in range(self.n_head)])
        rho = np.array([self.rho(h, self.wg[h]) for h in range(self.n_head)])
        self.bypassed = rho > epsilon
        n_recent = max(1, min(self.method.recent, k // 2))
        forced = np.r_[:N_SINKS, n - n_recent : n]
        size = self.group if self.shares(n) else 1  # number of heads that share candidates
        choices = []
        for h in range(self.n_head):
            if h % size == 0:
                c1, margin = self.candidates(range(h, h + size), n_recent, k)
            scores = np.full(n, NEVER)
            if self.bypassed[h]:
                scores[np.r_[:N_SINKS, max(N_SINKS, n - 1 - N_LOCAL) : n]] = FORCED
                choice = Choice(np.flatnonzero(scores == FORCED), scores)
            else:  # step 8
                scores[c1] = self.s[h, c1]
                choice = best(scores, forced, min(k - n_recent, len(np.setdiff1d(c1, forced))))
                choice.margin = margin
            choice.margin = min(choice.margin, abs(rho[h] - epsilon))
            choices.append(choice)
        return choices

    def shares(self, n: int) -> bool:
        """Returns whether the heads of a kv group score each other's candidates at n rows."""
        scored_by = self.method.scored_by
        return n > GROUP_ROWS if scored_by == "auto" else scored_by == "group"

    def rho(self, h: int, log_wg: float) -> float:
        """Step 4: returns ws / (ws + wg + wl), the share of the sinks in head h's attention.

        log_wg: ln wg, the log of the mass of all rows after the sinks.
        """
        s, sink, n = self.s[h], self.sinks[h], self.n
        peak = max(s.max(), log_wg, sink)
        ws = np.exp(s[:N_SINKS] - peak).sum() + np.exp(sink - peak)
        wl = np.exp(s[max(N_SINKS, n - 1 - N_LOCAL) : n - 1] - peak).sum()
        return ws / (ws + np.exp(log_wg - peak) + wl)

    def log_global(self, h: int) -> float:
        """Returns ln wg, the log of the expected sum of e^score over the rows after the sinks.

        The scores are assumed to be normally distributed. With n - N_SINKS rows, mean m and
        variance s2, ln wg = ln(n - N_SINKS) + m + s2 / 2. With a softcap the mean is a numerical
        integral.
        """
        q, g = self.q[h], h // self.group
        if self.method.sigma == "cov":
            variance = q @ self.covariance[g] @ q * self.scale**2
        else:
            variance = q @ q * self.sigma2[h]
        mean = q @ self.mean_k[g] * self.scale
        if not self.softcap:
            return np.log(self.n - N_SINKS) + mean + variance / 2
        z = np.arange(-10, 10, 0.01)
        density = 0.01 * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
        e = density @ np.exp(self.capped(mean + z * np.sqrt(variance)))
        return np.log(self.n - N_SINKS) + np.log(e)

    def candidates(self, head_group: range, n_recent: int, k: int) -> tuple[np.ndarray, float]:
        """Returns C1, the candidates of the active heads in ``head_group``, and their margin.

        n_recent: last rows that are always candidates. k: rows attended. While C1 is too large, the
        thresholds rise by a quarter.
        """
        n, limit, most = self.n, self.n, self.method.candidates
        active = [h for h in head_group if not self.bypassed[h]]
        if most:
            limit = max(min(most, n) * (1 + self.shares(n)), 2 * k)
            n_scanned = -(-self.method.rows_scouted(self.n, self.n_start) // PART)
            limit += self.n_head * min(n_scanned, FOUND)
        found = [row for h in active for row in self.scouted(h)] if self.method.scout else []
        factor, margin = self.raised[head_group[0]], np.inf
        while active:
            c1 = np.zeros(n, bool)
            c1[n - n_recent :] = True
            c1[found] = True
            for h in active:
                rows, nearest = self.near(h, factor)
                c1 |= rows
                margin = min(margin, nearest)
            if c1.sum() <= limit:
                falls = c1.sum() < 0.7 * limit
                self.raised[list(head_group)] = max(1.0, factor / 1.25) if falls else factor
                return np.flatnonzero(c1), margin
            factor *= 1.25
        return np.empty(0, int), margin

    def near(self, h: int, factor: float) -> tuple[np.ndarray, float]:
        """Returns head h's candidates, bool (n,), and the margin of this choice.

        Step 6 finds C0: the rows with an entry above factor * threshold in either table. Step 7
        adds the row before and the two rows after each row of C0. With ``expand=filtered`` it adds
        only rows with an entry above the table's mean. Sinks are no candidates. The margin is the
        least |entry / border - 1|. If it is tiny, a rounding can change the choice.
        """
        rows = np.arange(N_SINKS, self.n)
        tables = np.stack([self.ver[h, rows], self.dist[h, self.n - 1 - rows]])  # (2, nn)
        tau = factor * np.array([[self.threshold(x)] for x in tables])
        mean = tables.mean(1, keepdims=True)
        c0 = (tables > tau).any(0)
        wide = np.pad(c0, 2)
        beside = wide[3:-1] | wide[1:-3] | wide[:-4]  # offsets -1, 1 and 2
        borders = [tau]
        if self.method.expand == "filtered":
            beside &= (tables > mean).any(0)
            borders.append(mean)
        margin = min(np.abs(tables / border - 1).min() for border in borders)
        return np.append(np.zeros(N_SINKS, bool), c0 | beside), margin

    def threshold(self, x: np.ndarray) -> float:
        """Step 5: returns tau = a mu / kappa of a table with the entries x."""
        n, centred = len(x), x - x.mean()
        m2, m4 = (centred**2).sum(), (centred**4).sum()
        is_flat = m2 <= 1e-12 * (x**2).sum()
        kappa = 1 / n if is_flat else np.clip(m4 / m2**2, 1 / n, 1)
        others = min(self.group - 1, 2) if self.shares(self.n) else 0
        a = self.method.a * (1 + 0.855 * others)
        return a * x.sum() / min(n, self.method.horizon or n) / kappa

    def attend(self, choices: list[Choice]) -> np.ndarray:
        out = super().attend(choices)
        # A bypassed head gives the mean value the weight of all rows that it leaves out.
        for h in np.flatnonzero(self.bypassed).tolist():
            s, g = self.s[h, choices[h].rows], h // self.group
            values = np.vstack([self.v[g, choices[h].rows], self.mean_v[g]])
            out[h] = self.weights(int(h), np.append(s, self.wg[h])) @ values
        return out

    def finish_step(self, choices: list[Choice]) -> None:
        if self.is_dense_at(self.n):
            self.known[self.n - 1], self.has_tables = self.q, False
            return
        for h, choice in enumerate(choices):
            if not self.bypassed[h]:
                c2 = choice.rows[choice.rows >= N_SINKS]
                delta = softmax(self.s[h, c2]) - 1 / (2 * len(c2))
                self.ver[h] *= self.method.decay
                self.dist[h] *= self.method.decay
                self.ver[h, c2] += delta
                self.dist[h, self.n - 1 - c2] += delta

    def truncate(self, n: int) -> None:
        self.known = {i: q for i, q in self.known.items() if i < n}
        self.has_tables = self.has_tables and n == self.n
        super().truncate(n)
