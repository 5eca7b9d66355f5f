"""LFPS and its naive form: also its tables, and what it counts: rows, key rows, bytes."""

from typing import Any

import numpy as np
from layer_rows import Geometry, Rows
from naive_pair import TIE, Pair

from sparsekv_cli.cache.spec import N_SINKS, Budget
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.lfps.scout import PART
from sparsekv_cli.methods.lfps import LFPS
from sparsekv_cli.methods.naive.base import Choice
from sparsekv_cli.methods.naive.lfps import N_LOCAL, NaiveLFPS

BLOCK = 64  # entries of a table that have one bound
HEADS_A_READ = 4  # heads that score a key while it is in registers


class CountedLFPS(NaiveLFPS):
    """The naive form; of the last step it also knows what a search must read.

    n_bounds: bounds of blocks.
    n_entries: least entries of tables, those of blocks that hold a candidate.
    n_codes: rows of which the scout read a code, of all heads.
    n_scouted: heads that it searched for.
    c1: candidates and active heads of each head group that is not bypassed as a whole.
    """

    def select(self) -> list[Choice]:
        self.n_bounds = self.n_entries = self.n_codes = self.n_scouted = 0
        self.c1: list[tuple[int, int]] = []
        return super().select()

    def candidates(self, head_group, n_recent, k):
        c1, margin = super().candidates(head_group, n_recent, k)
        if n_active := sum(not self.bypassed[h] for h in head_group):
            self.c1.append((len(c1), n_active))
        return c1, margin

    def scouted(self, h):
        found = super().scouted(h)
        self.n_codes += PART * len(found)
        self.n_scouted += len(found) > 0
        return found

    def near(self, h, factor):
        n = self.n
        for table, length, entries in (
            (self.ver[h], n, self.ver[h, N_SINKS:]),
            (self.dist[h], n - N_SINKS, self.dist[h, : n - N_SINKS]),
        ):
            tau = factor * self.threshold(entries)
            blocks = [table[i : min(length, i + BLOCK)] for i in range(0, length, BLOCK)]
            self.n_entries += sum(len(block) for block in blocks if block.max() > tau)
            self.n_bounds += -(-n // BLOCK)
        return super().near(h, factor)


class LFPSPair(Pair):
    """seen also has heads that were bypassed, lists of candidates longer or shorter than k, groups
    of both kinds of heads, and steps whose counts were held against each other.
    """

    def __init__(self, method, geometry, seed=0, n_threads=1, layer=2) -> None:
        super().__init__(method, geometry, seed, n_threads, layer)
        self.naive = CountedLFPS(method, self.cache.spec)
        self.before = self.cache.counters()

    def prefill(self, n: int, chunk: int = 64) -> Rows:
        rows = super().prefill(n, chunk)
        self.before = self.cache.counters()
        return rows

    def compare(self, choices: list[Choice]) -> None:
        naive, n, k = self.naive, self.naive.n, self.method.budget.rows(self.naive.n)
        after = self.cache.counters()
        found = {name: after[name] - self.before.get(name, 0) for name in after}
        self.before = after
        ties = self.seen["ties"]
        super().compare(choices)
        if self.cache.attended is None:
            return
        self.seen["bypassed"] += int(naive.bypassed.sum())
        self.seen["active"] += int((~naive.bypassed).sum())
        for size, n_active in naive.c1:
            self.seen["beyond"] += n_active * (size > k)
            self.seen["short"] += n_active * (size < k)
        if naive.shares(n):
            head_groups = naive.bypassed.reshape(-1, naive.group)
            self.seen["mixed"] += int((head_groups.any(1) & ~head_groups.all(1)).sum())
        most = np.array([naive.rho(h, -np.inf) for h in range(naive.n_head)])
        margin = min(choice.margin for choice in choices)
        if (
            self.seen["ties"] == ties
            and min(margin, np.abs(most - self.method.epsilon).min()) > TIE[0]
        ):
            self.check_counts(found, int((most > self.method.epsilon).sum()), choices)
            self.seen["counted"] += 1

    def check_counts(self, found: dict[str, int], n_tested: int, choices: list[Choice]) -> None:
        """Holds the counts of one sparse step of f16 rows against the naive form's, one by one."""
        naive, n_head, n = self.naive, self.naive.n_head, self.naive.n
        n_local = n - max(N_SINKS, n - 1 - N_LOCAL)
        attended = sum(len(choice.rows) for choice in choices)
        of_tests = n_head * (N_SINKS + n_local)
        expected = {
            "rows_total": n_head * n,
            "rows_scored": of_tests + sum(m * max(0, size - n_local) for size, m in naive.c1),
            "rows_attended": attended,
            "heads_stepped": n_head,
            "heads_tested": n_tested,
            "bounds_read": naive.n_bounds,
        }
        assert {name: found[name] for name in expected} == expected
        # Bounds may be higher than what they bound, so that more blocks are read than have to be.
        searches = naive.n_bounds // (2 * -(-n // BLOCK))
        assert naive.n_entries <= found["entries_read"] <= searches * (2 * n - 4)
        d, d_v = naive.k.shape[2], naive.v.shape[2]
        n_keys = of_tests + sum(size * -(-m // HEADS_A_READ) for size, m in naive.c1)
        a_test = 4 * d * (d if self.method.sigma == "cov" else 1)
        index = 4 * (found["bounds_read"] + found["entries_read"])
        rows = 2 * padded(d) * n_keys + 2 * padded(d_v) * attended
        codes = 0
        if self.method.scout:
            r, width = naive.directions.shape[1:]
            codes = r * naive.n_codes + 2 * r * padded(width) * naive.n_scouted
        assert found.get("codes_read", 0) == naive.n_codes
        assert found["bytes_read"] == rows + index + a_test * n_tested + codes

    def compare_tables(self) -> None:
        """Tables times gain, their sums, power sums and bounds."""
        cache, naive, n = self.cache, self.naive, self.cache.store.n
        if not naive.has_tables:
            naive.start_from_known()
        for which, (table, expected) in enumerate(
            zip(cache._tables[:2], (naive.ver, naive.dist), strict=True)
        ):
            actual = table[:, :n].astype(np.float64) * cache._tables.gain[:, None]
            np.testing.assert_allclose(actual, expected, atol=2e-5)
            assert not table[:, n:].any()
            np.testing.assert_allclose(actual.sum(1), expected.sum(1), rtol=1e-5)
            if self.method.window <= 32:  # otherwise the first queries, which see sinks only, count
                np.testing.assert_allclose(actual.sum(1), 0.5 / (1 - self.method.decay), rtol=1e-5)
            for power in range(1, 5):
                powers = table[:, :n].astype(np.float64) ** power
                np.testing.assert_array_less(
                    np.abs(cache._tables.sums[:, which, power - 1] - powers.sum(1)),
                    1e-9 * np.abs(powers).sum(1) + 1e-12,
                )
            bounds = cache._tables[2 + which]
            for block in range(-(-n // BLOCK)):
                entries = table[:, BLOCK * block : min(n, BLOCK * (block + 1))]
                assert (bounds[:, block] >= entries.max(1)).all()


N_STEPS = 300
BASE = {"scored_by": "group", "candidates": 0, "a": 0.2, "horizon": 0}


def make_method(budget: int, **options: Any) -> LFPS:
    return LFPS(budget=Budget(tokens=budget), **(BASE | options))


def followed(
    geometry: Geometry, n_prefill: int, method: LFPS, seed: int = 1, n_steps: int = N_STEPS
) -> LFPSPair:
    """A pair behind a prefill and n_steps steps; its tables agree before and after."""
    pair = LFPSPair(method, geometry, seed)
    pair.prefill(n_prefill)
    pair.compare_tables()
    capacities = pair.cache._tables.ver.shape[1], pair.cache.store.capacity
    pair.decode(n_steps)
    pair.compare_tables()
    if n_steps == N_STEPS:  # both have grown on the way
        assert pair.cache._tables.ver.shape[1] > capacities[0]
        assert pair.cache.store.capacity > capacities[1]
    return pair
