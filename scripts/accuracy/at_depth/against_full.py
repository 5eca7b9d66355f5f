"""The rows of scripts/accuracy/real as a table: scores, and every method against ``full``.

A method and ``full`` answer the same questions, so their differences are paired. Texts are drawn
anew with their questions (a bootstrap over clusters), because questions of one text are alike. The
reference is ``full`` after dense reading, also for methods after sparse reading.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from measuring import difference, table

from sparsekv_cli.evaluation.intervals import N_DRAWS, interval

EQUAL = -5.0  # points: the interval of two equal ways begins above
HALF = 50.0  # per cent of ``full``, below which a task says nothing
LEAST_TASKS = 3  # fewer, and only the KLD counts
LEAST_QUESTIONS = 100  # for a verdict
KLD_ALONE, FEW, REFERENCE, NO_FULL = "KLD alone", "too few texts", "reference", "no full"
KLDS = ("kld_code", "kld_prose")  # tasks that follow a text
Row = Mapping[str, Any]
Pairs = dict[int, list[float]]  # by text: the differences of its questions, in points


def paired(rows: Iterable[Row], of_full: Mapping[Any, Row]) -> dict[str, Pairs]:
    """Returns the differences to ``full`` by task. of_full: rows by task, text and question."""
    found: dict[str, Pairs] = {}
    for row in rows:
        if row["task"] not in KLDS and (other := of_full.get(place(row))):
            points = 100 * (row["score"] - other["score"])
            found.setdefault(row["task"], {}).setdefault(row["text"], []).append(points)
    return found


def place(row: Row) -> tuple[str, int, int]:
    return row["task"], row["text"], row["question"]


def mean_difference(pairs: Pairs) -> dict[str, float]:
    """Returns the mean, and of several texts the low and high end of its 95% interval."""
    sums, counts = (np.array([f(each) for each in pairs.values()]) for f in (sum, len))
    found = {"mean": float(sums.sum()) / int(counts.sum())}
    if len(pairs) > 1:
        drawn = np.random.RandomState(0).randint(0, len(pairs), (N_DRAWS, len(pairs)))
        low, high = interval(sums[drawn].sum(1) / counts[drawn].sum(1))
        found |= {"low": low, "high": high}
    return found


def verdict(of_all: Mapping[str, float], n_tasks: int, n_texts: int, n_questions: int) -> str:
    """Returns whether a method is equal to ``full`` on all kept tasks together."""
    if n_tasks < LEAST_TASKS:
        return KLD_ALONE
    if n_questions < LEAST_QUESTIONS or n_texts < 2:
        return FEW
    if of_all["low"] > EQUAL:
        return "equal"
    return "worse" if of_all["high"] < 0 else "open"


def against(rows: Sequence[Row], of_full: Sequence[Row]) -> dict[str, Any]:
    """Returns the difference of each task and of all kept ones, the verdict, and dropped tasks.

    rows: of a method; those of ``full`` themselves have no difference.
    """
    scores = {task: mean for task, mean in means(of_full).items() if task not in KLDS}
    dropped = [task for task, mean in scores.items() if mean < HALF]
    if rows == of_full or not of_full:
        return {"dropped": dropped, "verdict": REFERENCE if of_full else NO_FULL}
    pairs = paired(rows, {place(row): row for row in of_full})
    kept = [task for task in pairs if task not in dropped]
    together: Pairs = {}
    for task in kept:
        for text, points in pairs[task].items():
            together.setdefault(text, []).extend(points)
    told = {task: mean_difference(each) for task, each in pairs.items()}
    told |= {"all": mean_difference(together)} if together else {}
    found = {f"{task}_{kind}": x for task, each in told.items() for kind, x in each.items()}
    n_texts, questions = len(together), sum(map(len, together.values()))
    is_equal = verdict(told.get("all", {}), len(kept), n_texts, questions)
    return {"dropped": dropped, "verdict": is_equal, "questions": questions, **found}


def means(rows: Iterable[Row]) -> dict[str, float]:
    """Returns a score in per cent by task, or a KLD."""
    found: dict[str, list[float]] = {}
    for row in rows:
        score = row["kld"] if row["task"] in KLDS else 100 * row["score"]
        found.setdefault(row["task"], []).append(score)
    return {task: statistics.mean(each) for task, each in found.items()}


def shown_score(row: Row, name: str) -> str:
    """A mean with its number, in brackets if the task is dropped; a KLD with top-1."""
    if name not in row:
        return ""
    if name in KLDS:
        return f"{row[name]:.4f} / {row[f'{name}_top1']:.2f}"
    shown = f"{row[name]:.0f} of {row[f'{name}_n']}"
    return f"({shown})" if name in row.get("dropped", ()) else shown


def markdown(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """The scores of each length and method; then the differences to ``full``, in points.

    Scores of tasks that are dropped are in brackets.
    """
    names = [task for task in tasks if any(task in row for row in rows)]
    asked = [name for name in names if name not in KLDS]
    scores, losses = [], []
    for row in rows:
        what = [f"`{row['spec']}`", row["length"], row["read"]]
        seconds = f"{row['seconds']:.1f}" if row["rows"] else ""
        scores.append([*what, *(shown_score(row, name) for name in names), row["rows"], seconds])
        if "questions" in row:
            of_tasks = [difference(row, name) for name in (*asked, "all")]
            losses.append([*what, *of_tasks, row["verdict"]])
    head = ["method", "tokens", "read"]
    titles = [[name.removeprefix("niah_") for name in each] for each in (names, asked)]
    found = table([*head, *titles[0], "rows", "s"], scores)
    if losses:
        found += "\n\n" + table([*head, *titles[1], "all", "verdict"], losses)
    return found
