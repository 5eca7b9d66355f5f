"""The records of ``eval ruler``: a line a sample and setting."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv_cli.evaluation.records import Records
from sparsekv_cli.evaluation.ruler.samples import RulerPlan
from sparsekv_cli.evaluation.ruler.scores import TaskScore, mean_score
from sparsekv_cli.methods.base import Method

Key = tuple[str, int, int, str, str]  # task, length, sample, method, its options as JSON


def key_of(record: Mapping[str, Any]) -> Key:
    """Returns the key of a record."""
    options = json.dumps(record["options"], sort_keys=True)
    return record["task"], record["length"], record["sample"], record["name"], options


class RulerRecords(Records):
    """Records by key, and the scores of methods."""

    command = "eval ruler"
    key_of = staticmethod(key_of)

    @staticmethod
    def check(record: Mapping[str, Any]) -> None:
        float(record["score"])

    def of(
        self, method: Method, plan: RulerPlan, length: int, tasks: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Returns a method's records of some tasks at a length."""
        what = {"name": method.name, "options": method.options(), "length": length}
        return [
            self.by_key[key_of({**what, "task": task, "sample": number})]
            for task in tasks
            for number in range(plan.n_samples)
        ]

    def score(
        self, method: Method, plan: RulerPlan, length: int, tasks: Sequence[str]
    ) -> TaskScore:
        """Returns the score of some tasks together."""
        return mean_score([each["score"] for each in self.of(method, plan, length, tasks)])

    def rows(self, method: Method, plan: RulerPlan, length: int) -> float | None:
        """Rows that a head read in a step, in the mean of the samples that had steps."""
        told = [each["rows_attended_mean"] for each in self.of(method, plan, length, plan.tasks)]
        found = [each for each in told if each is not None]
        return sum(found) / len(found) if found else None
