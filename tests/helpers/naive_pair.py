"""A method's cache and its naive form on the same rows, held against each other in every step."""

from collections import Counter
from typing import Any

import numpy as np
from layer_rows import STREAMS, Geometry, Rows, Stream
from layer_stream import chunk_input, decode, make_cache, prefill

from sparsekv_cli.methods.base import Method
from sparsekv_cli.methods.naive import naive_form
from sparsekv_cli.methods.naive.base import FORCED, Choice

# Outputs: f32 sums over rows that both sides read as the same f16. sals rounds a rebuilt key to f16
# once more, and blocks of faedkv are f16: those may differ by a neighbouring number of f16.
TOLERANCE = {"sals": 2e-3, "faedkv": 2e-3, "lfps": 2e-4, "freekv": 2e-4}
# A score that is nearer to the lowest chosen one is a tie, which f32 may decide otherwise than f64:
# (part of that score, part of the largest one). freekv and quest round summaries to f16; sals
# scores latents by bytes.
NEAR = {"freekv": (2e-3, 0), "quest": (1e-4, 1e-5), "sals": (0.1, 0), "sals, paper": (0, 0.02)}
TIE = 1e-5, 1e-6


class Pair:
    """One layer. seen: what occurred, such as sparse steps, lists of rows, and ties."""

    def __init__(
        self, method: Method, geometry: Geometry, seed: int = 0, n_threads: int = 1, layer: int = 2
    ) -> None:
        self.method, self.geometry = method, geometry
        self.cache: Any = make_cache(method, geometry, n_threads, layer)
        self.naive: Any = naive_form(method, self.cache.spec)
        self.stream: Stream = STREAMS.get(method.name, Stream)(geometry, seed)
        self.seen: Counter[str] = Counter()
        self.tolerance = TOLERANCE.get(method.name, 1e-4)
        score = getattr(method, "score", "")
        self.near = NEAR.get(f"{method.name}, {score}", NEAR.get(method.name, TIE))

    def prefill(self, n: int, chunk: int = 64) -> Rows:
        """n rows into both; their dense attention agrees."""
        rows = self.stream.rows(n)
        out = prefill(self.cache, rows, chunk)
        expected = self.naive.prefill(chunk_input(rows, self.naive.n))
        np.testing.assert_allclose(out, expected, atol=self.tolerance)
        self.check_stored()
        assert self.cache.n == self.naive.n
        return rows

    def decode(self, n_steps: int) -> Counter[str]:
        """n_steps rows into both: their choices and their attention agree; what occurred so far."""
        for _ in range(n_steps):
            rows = self.stream.rows(1)
            out = decode(self.cache, rows)
            choices = self.naive.choose(chunk_input(rows, self.naive.n))
            self.check_stored()
            self.compare(choices)
            np.testing.assert_allclose(out, self.naive.attend(choices), atol=self.tolerance)
            assert self.cache.n == self.naive.n
            self.seen["steps"] += 1
        return self.seen

    def truncate(self, n: int) -> None:
        assert self.cache.truncate(n) == n == self.cache.n
        self.naive.truncate(n)
        self.stream.position = n

    def check_stored(self) -> None:
        """Holds more against the naive form ahead of a comparison; a method's own pair does."""

    def compare(self, choices: list[Choice]) -> None:
        """Rows are equal, but for ties, which are then decided as the cache has."""
        if self.cache.attended is None:
            assert all(len(choice.rows) == self.naive.n for choice in choices)
            return
        idx, counts = self.cache.attended
        assert len(counts) == len(choices)
        self.seen["sparse"] += 1
        for choice, rows, count in zip(choices, idx, counts, strict=True):
            self.seen["lists"] += 1
            self.seen["left out"] += int(count < self.naive.n)
            got = np.sort(rows[:count])
            assert (np.diff(got) > 0).all(), "a row is attended twice"
            if not np.array_equal(got, choice.rows):
                self.check_tie(choice, got)
                choice.rows = got
                self.seen["ties"] += 1

    def check_tie(self, choice: Choice, got: np.ndarray) -> None:
        """AssertionError if the rows that differ are not as many, and near the border."""
        gone, come = np.setdiff1d(choice.rows, got), np.setdiff1d(got, choice.rows)
        other = np.append(gone, come)
        scores, page = choice.scores[other], getattr(self.method, "page", 1)
        assert (scores != FORCED).all(), f"rows {other}: some are always attended"
        finite = choice.scores[np.isfinite(choice.scores)]
        chosen = choice.scores[choice.rows]
        cut = chosen[np.isfinite(chosen)].min(initial=np.inf)
        limit = self.near[0] * abs(cut) + self.near[1] * np.abs(finite).max(initial=0)
        is_near = np.isfinite(scores).all() and (np.abs(scores - cut) <= limit).all()
        is_near = is_near and len(np.unique(gone // page)) == len(np.unique(come // page))
        assert is_near or choice.margin < TIE[0], f"rows {other} of {self.naive.n} are no tie"


def pair_of(method: Method, *args: Any, **options: Any) -> Pair:
    """The pair of a method: its own, or Pair."""
    from freekv_pair import FreeKVPair
    from lfps_pair import LFPSPair
    from sals_pair import SALSPair

    own = {"freekv": FreeKVPair, "lfps": LFPSPair, "sals": SALSPair}
    return own.get(method.name, Pair)(method, *args, **options)
