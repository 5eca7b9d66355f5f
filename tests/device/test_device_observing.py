"""Rows that a watched step on a device attends to, against those on the host."""

import numpy as np
import pytest
from side_by_side import Geometry, SideBySide
from test_device_batching import METHODS, calibration_of

GEOMETRY = Geometry(4, 2, 32, 32, 32)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method])
def test_attended_rows_are_those_of_the_host(name, device):
    """Of a context that is dense at first."""
    pair = SideBySide(GEOMETRY, METHODS[name], calibration_of(GEOMETRY), device)
    pair.device.records_attended = True
    pair.prefill(38)
    pair.decode()
    assert pair.device.attended is None
    pair.prefill(90)
    for _ in range(2):
        pair.decode()
        idx, counts = (x[0].cpu().numpy() for x in pair.device.attended)
        wanted, sizes = pair.host.attended
        np.testing.assert_array_equal(counts, sizes)
        for found, rows, n in zip(idx, wanted, sizes, strict=True):
            # Scores of SALS are rounded to f16: two that are nearly equal may change places.
            n_other = n - len(set(found[:n]) & set(rows[:n]))
            assert n_other <= (2 if name == "sals" else 0)
            assert len(set(found[:n])) == n
