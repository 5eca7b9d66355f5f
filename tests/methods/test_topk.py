"""Exact top-k: what it counts."""

from tiny_sequences import N_HEAD, counts_after

from sparsekv_cli.cache.spec import N_SINKS


def test_ledger_of_topk(sequence_of):
    counts = counts_after(sequence_of("topk", budget="10%"), 100, 5)
    attended = sum(round(0.1 * n) + N_SINKS for n in range(101, 106))
    assert counts["sparse_rows_scored"] == counts["sparse_rows_total"] > 0
    assert counts["sparse_rows_attended"] == 2 * N_HEAD * attended
