"""The counts that caches keep of their steps."""

from collections import Counter


class Ledger:
    """Counts of the work of decode steps. Rows are counted as (query head, key) pairs.

    rows_scored: pairs whose q . k was computed to choose rows. Dense attention counts all pairs
    that it attends to. bytes_read: bytes of K, V and index that the kernels load. A row that
    several query heads choose separately counts for each.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def step(self, rows: int, scored: int, attended: int, n_bytes: int, sparse: bool) -> None:
        """Counts one layer's decode step: rows in context, scored and attended, and KV bytes."""
        counts = self.counts
        counts["rows_total"] += rows
        counts["rows_scored"] += scored
        counts["rows_attended"] += attended
        counts["bytes_read"] += n_bytes
        if sparse:
            counts["sparse_rows_total"] += rows
            counts["sparse_rows_scored"] += scored
            counts["sparse_rows_attended"] += attended
