"""The number of rows that the steps of a method attend to, as its caches count them."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsekv_cli.cache.counters import total_counters
from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.layer import LayerCache


@dataclass(frozen=True)
class RowsRead:
    """rows: (head, row) pairs attended in full layers. head_steps: steps times these heads."""

    rows: int = 0
    head_steps: int = 0

    @property
    def mean(self) -> float | None:
        """The mean rows that a head attends to in a step; None if there were no steps."""
        return self.rows / self.head_steps if self.head_steps else None


def rows_read(layers: Sequence[LayerCache], n_steps: int) -> RowsRead:
    """Returns what the caches ``layers`` have counted in ``n_steps`` steps."""
    n_head = sum(spec.n_head for spec in full_layers(cache.spec for cache in layers))
    return RowsRead(total_counters(layers)["rows_attended"], n_steps * n_head)
