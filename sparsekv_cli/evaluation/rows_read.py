"""The rows that the steps of a method read, as its caches count them."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsekv_cli.cache.counters import total_counters
from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.layer import LayerCache


@dataclass(frozen=True)
class RowsRead:
    """Rows that heads of full layers attended to, and how many steps these heads took."""

    rows: int = 0
    head_steps: int = 0

    @property
    def mean(self) -> float | None:
        """Rows a head, full layer and step; None: there was no such step."""
        return self.rows / self.head_steps if self.head_steps else None


def rows_read(layers: Sequence[LayerCache], n_steps: int) -> RowsRead:
    """Returns the rows that caches have read in so many steps."""
    n_head = sum(spec.n_head for spec in full_layers(cache.spec for cache in layers))
    return RowsRead(total_counters(layers)["rows_attended"], n_steps * n_head)
