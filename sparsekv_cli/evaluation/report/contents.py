"""The result of a comparison, as one JSON object: ``--json`` prints it, a report shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sparsekv_cli.evaluation.needles import Needle
from sparsekv_cli.evaluation.result import MethodResult, equal_lines, pareto_front


def contents(
    n_context: int,
    n_steps: int,
    rows: Sequence[MethodResult],
    needles: Iterable[Needle] = (),
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the object; about: what the figures are of, such as the model and the machine.

    equal: methods whose figures differ by noise. front: the methods of the Pareto front, fastest
    last. recall: mass by layer and head, of the layers that choose rows.
    """
    return {
        "context": n_context,
        "steps": n_steps,
        **(about or {}),
        "methods": [_method(row) for row in rows],
        "equal": equal_lines(rows),
        "front": pareto_front(rows),
        "needles": [asdict(needle) for needle in needles],
    }


def _method(row: MethodResult) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in row.__dataclass_fields__ if name != "samples"}
    recall = {"layers": list(row.recall), "heads": list(row.recall.values())}
    return {**values, "options": dict(row.options), "intervals": row.intervals(), "recall": recall}
