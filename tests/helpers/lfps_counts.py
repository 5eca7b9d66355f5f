"""What LFPS counts of a step against what its twin counts: rows, key rows, bytes."""

from __future__ import annotations

from collections.abc import Mapping

from lfps_twin import BLOCK, LFPSTwin

from sparsekv_cli.cache.store import padded

TIE = 1e-5  # nearer than this to a threshold, f32 may decide otherwise than f64


def assert_counted(twin: LFPSTwin, before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    """Holds the counts of one sparse step of f16 rows against ``twin.counts``, one by one.

    Returns whether it did: not where a comparison of the step was a tie.
    """
    counts = twin.counts
    if counts.distance < TIE:
        return False
    found = {name: after[name] - before.get(name, 0) for name in after}
    n_head, n, d = twin.n_head, twin.k.shape[1], twin.k.shape[2]
    expected = {
        "rows_total": n_head * n,
        "rows_scored": counts.scored,
        "rows_attended": counts.attended,
        "heads_stepped": n_head,
        "heads_tested": counts.tested,
        "bounds_read": counts.bounds,
    }
    assert {name: found[name] for name in expected} == expected
    # Bounds may be higher than what they bound, so that more blocks are read than have to be.
    searches = counts.bounds // (2 * -(-n // BLOCK))
    assert counts.entries <= found["entries_read"] <= searches * (2 * n - 4)
    of_tests = 4 * d * (d if twin.options.sigma == "cov" else 1) * counts.tested
    rows = 2 * padded(d) * counts.keys + 2 * padded(twin.v.shape[2]) * counts.attended
    index = 4 * (found["bounds_read"] + found["entries_read"])
    assert found["bytes_read"] == rows + index + of_tests
    return True
