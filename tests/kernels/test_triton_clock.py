"""The GPU's clock, which the interpreter lacks."""

from itertools import pairwise

import pytest
import torch

from sparsekv_cli.kernels import clock


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a clock of the GPU")
def test_times_add_up():
    times = torch.zeros(2, dtype=torch.int64, device="cuda")
    x = torch.zeros(1 << 26, device="cuda")
    totals = [0]
    for _ in range(3):
        clock.take_time(times, stop=False)
        x.add_(1)
        clock.take_time(times, stop=True)
        totals.append(int(times[1]))
    assert all(1_000 < b - a < 10**9 for a, b in pairwise(totals))


def test_what_it_refuses(device):
    with pytest.raises(ValueError, match="times is torch"):
        clock.take_time(torch.zeros(2, dtype=torch.int32, device=device), stop=True)
