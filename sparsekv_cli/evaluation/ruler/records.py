"""The records of ``eval ruler``, a line for each sample and method, and the methods' scores."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparsekv_cli.evaluation.records import Records
from sparsekv_cli.evaluation.ruler.samples import RulerPlan
from sparsekv_cli.methods.base import Method

NORMAL_95 = 1.959963984540054  # 95% of a normal distribution lie within so many standard deviations
Key = tuple[str, int, int, str, str]  # task, length, sample, method, its options as JSON


def key_of(record: Mapping[str, Any]) -> Key:
    """Returns the key of a record."""
    options = json.dumps(record["options"], sort_keys=True)
    return record["task"], record["length"], record["sample"], record["name"], options


class TaskScore(NamedTuple):
    """The mean score of n samples, and its confidence interval of 95%, in per cent."""

    score: float
    low: float
    high: float
    n: int


def mean_score(scores: Sequence[float]) -> TaskScore:
    """Returns the mean of scores from 0 to 1, with Wilson's interval.

    The interval is that of scores that are 0 or 1, which spread most for a given mean. For other
    scores it is rather too wide than too narrow. It has a width even if all scores are equal.
    """
    n = len(scores)
    mean = sum(scores) / n
    z2 = NORMAL_95**2
    middle = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = NORMAL_95 / (1 + z2 / n) * (mean * (1 - mean) / n + z2 / (4 * n * n)) ** 0.5
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return TaskScore(100 * mean, 100 * low, 100 * high, n)


class RulerRecords(Records):
    """The records by key, from which the scores of methods are computed."""

    command = "eval ruler"
    key_of = staticmethod(key_of)

    @staticmethod
    def check(record: Mapping[str, Any]) -> None:
        float(record["score"])

    def of(
        self, method: Method, plan: RulerPlan, length: int, tasks: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Returns a method's records of the given tasks at one length."""
        what = {"name": method.name, "options": method.options(), "length": length}
        return [
            self.by_key[key_of({**what, "task": task, "sample": number})]
            for task in tasks
            for number in range(plan.n_samples)
        ]

    def score(
        self, method: Method, plan: RulerPlan, length: int, tasks: Sequence[str]
    ) -> TaskScore:
        """Returns a method's score of the given tasks together, at one length."""
        return mean_score([each["score"] for each in self.of(method, plan, length, tasks)])

    def rows(self, method: Method, plan: RulerPlan, length: int) -> float | None:
        """Returns the mean rows that a head attends to in a step; None if no sample had steps."""
        means = [each["rows_attended_mean"] for each in self.of(method, plan, length, plan.tasks)]
        found = [each for each in means if each is not None]
        return sum(found) / len(found) if found else None
