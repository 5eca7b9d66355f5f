"""What is expected of a method, and the table that says whether it is met.

The acceptance lines are in figures.json, by method text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accuracy_texts import FOLDER
from measuring import table

from sparsekv_cli.evaluation.compare import build_spec
from sparsekv_cli.methods.base import Method

EXPECTED = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
Figures = Mapping[tuple[str, int], Mapping[str, Any]]  # by method text and length


def expected(method: Method, length: int) -> dict[str, dict[str, float]]:
    """Returns the limits of ``method`` at about ``length`` tokens, by at_most and at_least."""
    near = [i for i, known in enumerate(EXPECTED["lengths"]) if abs(length - known) <= known / 10]
    for spec, kinds in EXPECTED["methods"].items():
        if near and build_spec(spec) == method:
            return {
                kind: {
                    column: values[near[0]]
                    for column, values in columns.items()
                    if values[near[0]] is not None
                }
                for kind, columns in kinds.items()
            }
    return {}


def broken_lines(row: Mapping[str, Any], known: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The acceptance lines of a method and length that ``row`` breaks, as text."""
    return [
        f"FAIL {column} {row[column]:.3f}, {kind.replace('_', ' ')} {limit}"
        for kind, sign in (("at_most", 1), ("at_least", -1))
        for column, limit in known.get(kind, {}).items()
        if row[column] is not None and sign * (row[column] - limit) > 0
    ]


def lines_across(methods: Mapping[str, Method], figures: Figures) -> list[str]:
    """The lines about several rows, with their verdict: order of KLD, needles over all lengths.

    A line about KLD says that it is below another method's, or within a factor of it.
    """

    def named(spec: str) -> str:
        """What the user called this method; empty if it was not asked for."""
        return next((name for name in methods if methods[name] == build_spec(spec)), "")

    lines = []
    lengths = sorted({length for _, length in figures})
    pairs = [(*pair, 1.0) for pair in EXPECTED["kld_below"]] + EXPECTED["kld_within"]
    for low, high, factor in ((named(a), named(b), factor) for a, b, factor in pairs):
        for length in lengths if low and high else ():
            a, b = (figures[name, length]["kld"] for name in (low, high))
            if a is not None:
                verdict = "pass" if a < factor * b else "FAIL"
                times = "" if factor == 1 else f"{factor} x "
                lines.append(f"{verdict}: KLD {low} {a:.3f} < {times}{high} {b:.3f} at {length}")
    for name, share in ((named(s), share) for s, share in EXPECTED["needles_share"].items()):
        found = [
            pair
            for length in (lengths if name else ())
            for pair in zip(*(figures[n, length]["found"] for n in ("full", name)), strict=True)
        ]
        dense, both = sum(full for full, _ in found), sum(full and own for full, own in found)
        if found:
            verdict = "pass" if share[1] * both >= share[0] * dense else "FAIL"
            lines.append(
                f"{verdict}: {name} finds {both} of {dense} needles that full finds, at least "
                f"{share[0]}/{share[1]}"
            )
    return lines


COLUMNS = ("kld", "top1", "needles", "overlap", "mass", "dots", "attended")
TITLES = ("method", "tokens", "KLD", "top-1", *COLUMNS[2:5], "dots %", "attended %", "lines")


def markdown(methods: Mapping[str, Method], lengths: Sequence[int], figures: Figures) -> str:
    """One row a method and length; then the lines across."""
    rows = []
    for name, method in methods.items():
        for length in lengths:
            row, known = figures[name, length], expected(method, length)
            cells = [name, length, *(cell(c, row[c]) for c in COLUMNS)]
            verdict = "pass" if any(known.values()) else ""
            rows.append([*cells, "; ".join(broken_lines(row, known)) or verdict])
    across = [f"- {line}" for line in lines_across(methods, figures)]
    return "\n".join([table(TITLES, rows), *([""] if across else []), *across])


def cell(column: str, value: float | None) -> str:
    """``0.094``; a dash for what was not measured."""
    digits = {"kld": 3, "needles": 0, "dots": 1, "attended": 1}.get(column, 2)
    return "-" if value is None else f"{value:.{digits}f}"
