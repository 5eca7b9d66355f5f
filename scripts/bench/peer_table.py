"""The ratio table of scripts/bench/peer: what is compared, what is to be reached, as text."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "sparsekv-cli"
FLAT_DEPTHS = (2048, 32768)  # "depth is almost free": the second's speed over the first's


class BenchError(Exception):
    """Something that the user can act on, in one line."""


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

    @property
    def key(self) -> str:
        """The name in TARGETS, where the number of decoded tokens does not count."""
        return self.label if not self.n_gen else self.label.replace(f"tg{self.n_gen}", "tg")


@dataclass(frozen=True)
class Target:
    """A ratio to reach; at_most: smaller is better."""

    must: float
    aim: float
    at_most: bool = False

    def text(self, value: float) -> str:
        return f"<= {value:g}" if self.at_most else f"{value:g}"


# Ratio of medians, sparsekv-cli over the best peer, that the project wants to reach.
TARGETS = {
    "pp512": Target(1, 1.5),
    "pp8192": Target(1, 1.5),
    "tg @ d0, full": Target(1, 1.5),
    "tg @ d8192, full": Target(1.5, 2),
    "tg @ d8192, lfps": Target(2, 3),
    "tg @ d16384, lfps": Target(10, 20),
    "tg @ d32768, lfps": Target(20, 40),
    "lfps: tg @ d32768 over tg @ d2048": Target(0.7, 0.9),
    "peak memory @ d16384": Target(1.2, 1.1, at_most=True),
}


@dataclass(frozen=True)
class PeerRow:
    """One line of the table.

    ours: a value a repetition, in ``unit``; theirs: the same by program. target: what is wanted of
    the ratio. at_most: smaller values are better.
    """

    label: str
    unit: str
    ours: Sequence[float]
    theirs: Mapping[str, Sequence[float]]
    target: Target | None = None
    at_most: bool = False

    @property
    def best(self) -> str:
        """The peer with the best median."""
        choose = min if self.at_most else max
        return choose(self.theirs, key=lambda name: statistics.median(self.theirs[name]))

    @property
    def ratio(self) -> float:
        """Of the medians, to the best peer."""
        return statistics.median(self.ours) / statistics.median(self.theirs[self.best])

    @property
    def met(self) -> str | None:
        """``aim``, ``must`` or ``no``; None without a target."""
        if self.target is None:
            return None
        for name in ("aim", "must"):
            limit = getattr(self.target, name)
            if self.ratio <= limit if self.target.at_most else self.ratio >= limit:
                return name
        return "no"

    def cells(self, peers: Iterable[str]) -> tuple[str, ...]:
        """One a column of ``header``; empty where a program has no value."""
        unit = "" if self.unit == "t/s" else f" {self.unit}"
        must = aim = ""
        if self.target is not None:
            must, aim = self.target.text(self.target.must), self.target.text(self.target.aim)
        theirs = [spread(self.theirs[p], unit) if p in self.theirs else "" for p in peers]
        return self.label, spread(self.ours, unit), *theirs, f"{self.ratio:.2f}", must, aim

    def as_dict(self) -> dict[str, Any]:
        return {
            "test": self.label,
            "unit": self.unit,
            "sparsekv_cli": summary(self.ours),
            "peers": {name: summary(values) for name, values in self.theirs.items()},
            "best": self.best,
            "ratio": self.ratio,
            "must": None if self.target is None else self.target.must,
            "aim": None if self.target is None else self.target.aim,
            "reached": self.met,
        }


def spread(values: Sequence[float], unit: str = "") -> str:
    """``median (smallest to largest)``."""
    middle = f"{number(statistics.median(values))}{unit}"
    if len(values) == 1:
        return middle
    return f"{middle} ({number(min(values))} to {number(max(values))})"


def number(value: float) -> str:
    """Three figures, as many as such a measurement has."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, spread and every value."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "samples": list(values),
    }


def line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def header(peers: Sequence[str]) -> str:
    """The two lines above the rows; the ratio is that to the best of ``peers``."""
    cells = ("test", OURS, *peers, "ratio", "must", "aim")
    return line(cells) + "\n" + line(["---", *["---:"] * (len(cells) - 1)])


def flatness(rates: dict[int, Sequence[float]]) -> PeerRow | None:
    """How much of its speed at a small depth lfps keeps at a large one (depth -> t/s, ours).

    What it is compared with is itself at the small depth, which has no column; None when one of the
    depths is missing.
    """
    low, high = FLAT_DEPTHS
    if low not in rates or high not in rates:
        return None
    label = f"lfps: tg @ d{high} over tg @ d{low}"
    return PeerRow(label, "t/s", rates[high], {f"d{low}": rates[low]}, TARGETS[label])
