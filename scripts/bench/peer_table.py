"""The ratio table of scripts/bench/peer: what is compared, what is to be reached, as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

HEADER = ("test", "sparsekv-cli", "llama.cpp", "ratio", "must", "aim")
FLAT_DEPTHS = (2048, 32768)  # "depth is almost free": the second's speed over the first's


@dataclass(frozen=True)
class Case:
    """One test. method: None in a prefill, which every method does alike."""

    n_prompt: int
    n_gen: int
    n_depth: int
    method: str | None

    @property
    def label(self) -> str:
        if not self.n_gen:
            return f"pp{self.n_prompt}"
        return f"tg{self.n_gen} @ d{self.n_depth}, {self.method}"

    @property
    def key(self) -> str:
        """The name in TARGETS, where the number of decoded tokens does not count."""
        return self.label if not self.n_gen else f"tg @ d{self.n_depth}, {self.method}"


@dataclass(frozen=True)
class Target:
    """A ratio to reach; at_most: smaller is better."""

    must: float
    aim: float
    at_most: bool = False

    def text(self, value: float) -> str:
        return f"<= {value:g}" if self.at_most else f"{value:g}"


# Ratio of medians, sparsekv-cli over llama.cpp, that the project wants to reach.
TARGETS = {
    "pp512": Target(3, 6),
    "pp8192": Target(3, 8),
    "tg @ d0, full": Target(1.0, 1.7),
    "tg @ d8192, full": Target(3, 6),
    "tg @ d8192, lfps": Target(5, 9),
    "tg @ d16384, lfps": Target(10, 20),
    "tg @ d32768, lfps": Target(20, 40),
    "lfps: tg @ d32768 over tg @ d2048": Target(0.7, 0.9),
    "peak memory @ d16384": Target(1.5, 1.1, at_most=True),
}


@dataclass(frozen=True)
class PeerRow:
    """One line of the table.

    ours, theirs: a value a repetition, in ``unit``. target: what is wanted of their ratio.
    """

    label: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    target: Target | None = None

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

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

    def cells(self) -> tuple[str, ...]:
        unit = "" if self.unit == "t/s" else f" {self.unit}"
        must = aim = ""
        if self.target is not None:
            must, aim = self.target.text(self.target.must), self.target.text(self.target.aim)
        ours, theirs = spread(self.ours, unit), spread(self.theirs, unit)
        return self.label, ours, theirs, f"{self.ratio:.2f}", must, aim

    def as_dict(self) -> dict[str, Any]:
        return {
            "test": self.label,
            "unit": self.unit,
            "sparsekv_cli": summary(self.ours),
            "llama_cpp": summary(self.theirs),
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


def header() -> str:
    """The two lines above the rows."""
    return line(HEADER) + "\n" + line(["---", *["---:"] * (len(HEADER) - 1)])


def flatness(rates: dict[int, Sequence[float]]) -> PeerRow | None:
    """How much of its speed at a small depth lfps keeps at a large one (depth -> t/s, ours).

    The columns are ours at the large depth and ours at the small one; None when one is missing.
    """
    low, high = FLAT_DEPTHS
    if low not in rates or high not in rates:
        return None
    label = f"lfps: tg @ d{high} over tg @ d{low}"
    return PeerRow(label, "t/s", rates[high], rates[low], TARGETS[label])
