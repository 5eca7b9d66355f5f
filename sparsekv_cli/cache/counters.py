"""What caches count of their steps."""

from __future__ import annotations

from collections import Counter


class Ledger:
    """What really happened, counted where it happens. Rows are (query head, key) pairs.

    rows_scored: pairs whose q . k was computed in order to choose rows; dense attention, which
    chooses none, counts all it attends to. bytes_read: KV and index bytes that the kernels load; a
    row that several query heads choose for themselves counts for each.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def step(self, rows: int, scored: int, attended: int, n_bytes: int, sparse: bool) -> None:
        """One decode step of one layer: rows in context, rows scored, rows attended, KV bytes."""
        counts = self.counts
        counts["rows_total"] += rows
        counts["rows_scored"] += scored
        counts["rows_attended"] += attended
        counts["bytes_read"] += n_bytes
        if sparse:
            counts["sparse_rows_total"] += rows
            counts["sparse_rows_scored"] += scored
            counts["sparse_rows_attended"] += attended
