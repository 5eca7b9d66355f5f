"""The ratio table of scripts/bench/peer: what is compared, as text."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from measuring import three

OURS = "sparsekv-cli"


@dataclass(frozen=True)
class Case:
    """One test. method: None in a prefill, which all methods do alike, and for other programs."""

    n_prompt: int
    n_gen: int
    n_depth: int
    method: str | None
    n_seqs: int = 1  # decoded together; t/s counts the tokens of all

    @property
    def label(self) -> str:
        if not self.n_gen:
            return f"pp{self.n_prompt}"
        several = f" b{self.n_seqs}" if self.n_seqs > 1 else ""
        method = f", {self.method}" if self.method else ""
        return f"tg{self.n_gen} @ d{self.n_depth}{several}{method}"


@dataclass(frozen=True)
class PeerRow:
    """One line of the table.

    ours: a value a repetition, in ``unit`` (t/s or MiB); theirs: the same by program.
    """

    label: str
    unit: str
    ours: Sequence[float]
    theirs: Mapping[str, Sequence[float]]

    @property
    def best(self) -> str:
        """The peer with the best median: the fastest, or the smallest."""
        choose = max if self.unit == "t/s" else min
        return choose(self.theirs, key=lambda name: statistics.median(self.theirs[name]))

    @property
    def ratio(self) -> float:
        """Of the medians, to the best peer."""
        return statistics.median(self.ours) / statistics.median(self.theirs[self.best])

    def cells(self, peers: Iterable[str]) -> list[str]:
        """One for each of: test, this program, the peers, ratio; empty where there is no value."""
        unit = "" if self.unit == "t/s" else f" {self.unit}"
        theirs = [spread(self.theirs[p], unit) if p in self.theirs else "" for p in peers]
        return [self.label, spread(self.ours, unit), *theirs, f"{self.ratio:.2f}"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "test": self.label,
            "unit": self.unit,
            "sparsekv_cli": summary(self.ours),
            "peers": {name: summary(values) for name, values in self.theirs.items()},
            "best": self.best,
            "ratio": self.ratio,
        }


def spread(values: Sequence[float], unit: str = "") -> str:
    """``median (smallest to largest)``."""
    middle = f"{three(statistics.median(values))}{unit}"
    if len(values) == 1:
        return middle
    return f"{middle} ({three(min(values))} to {three(max(values))})"


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, spread and every value."""
    ends = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {**ends, "samples": list(values)}
