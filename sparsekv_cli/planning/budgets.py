"""``--method NAME --max-loss X``: the smallest budget with which a method loses no more than X.

The losses are those of ``--method auto`` (auto.py): they are measured once a model and a budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import spec_of, stated_options
from sparsekv_cli.methods.base import Method
from sparsekv_cli.planning.auto import Losses, as_flags
from sparsekv_cli.planning.kept import method_key

SHARES = ("1%", "2%", "5%", "10%", "20%", "40%")  # budgets that are tried, ascending


class BudgetChoice(NamedTuple):
    """A method with the budget that was chosen for it, and why."""

    method: Method
    losses: Sequence[tuple[Method, float]]  # of each budget
    max_loss: float
    measured: str  # where and when

    @property
    def repeat(self) -> str:
        """Options of the command line that give this choice again."""
        return as_flags(self.method)

    @property
    def why(self) -> str:
        """The reason of the choice, in a sentence."""
        tried = ", ".join(f"{spec_of(method)} {kld:.3f}" for method, kld in self.losses)
        return (
            f"{spec_of(self.method)}, because it is the smallest budget that loses at most "
            f"{self.max_loss:g} ({self.measured}): {tried}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.method.name,
            "options": stated_options(self.method),
            "repeat": self.repeat,
            "why": self.why,
            "max_loss": self.max_loss,
            "considered": [
                {"options": stated_options(method), "kld": kld} for method, kld in self.losses
            ],
        }


def with_budgets(method: Any) -> list[Method]:
    """Returns the method with each of SHARES as its budget, and its other options as they are."""
    return [replace(method, budget=Budget.parse(text)) for text in SHARES]


def smallest(methods: Sequence[Method], losses: Losses, max_loss: float) -> BudgetChoice:
    """Returns the first of ``methods`` that loses at most ``max_loss``.

    methods: of ascending budgets, all measured. Raises SparseKVError if none loses so little.
    """
    rated = [(each, losses.kld[method_key(each)]) for each in methods]
    chosen = next((method for method, kld in rated if kld <= max_loss), None)
    if chosen is None:
        best, kld = min(rated, key=lambda each: each[1])
        raise SparseKVError(
            f"--max-loss {max_loss:g}: {best.name} loses {kld:.3g} even with a budget of "
            f"{best.options()['budget']}; allow more, or take another method"
        )
    return BudgetChoice(chosen, rated, max_loss, f"KLD measured {losses.date} on {losses.machine}")
