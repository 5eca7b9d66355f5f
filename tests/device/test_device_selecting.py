"""topk, streaming and quest on a device against the same on the host, step by step."""

import numpy as np
import pytest
from side_by_side import GEOMETRIES, SideBySide
from sweeps import sweep

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.methods.streaming import Streaming
from sparsekv_cli.methods.topk import TopK

Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
# The interpreter takes half a second a step, so one case of each is followed over page borders.
CASES = [
    (0, TopK(budget=Budget(tokens=40)), 20),
    (2, TopK(budget=Budget(share=0.3), recent=3), 4),
    (1, Streaming(budget=Budget(tokens=40)), 20),
    (3, Streaming(budget=Budget(share=0.3), sinks=0), 4),
    (0, Quest(budget=Budget(tokens=40), page=8), 24),
    (2, Quest(budget=Budget(share=0.4), page=16, summary="meanstd"), 4),
    (0, TopK(budget=Budget(tokens=40), **Q8), 4),
    (4, TopK(budget=Budget(tokens=40), cache_type_k="q8_0"), 4),
    (3, Quest(budget=Budget(tokens=40), page=8, **Q8), 10),
    (2, Quest(budget=Budget(tokens=40), page=8, cache_type_v="q8_0"), 4),
    (1, Streaming(budget=Budget(tokens=40), **Q8), 4),
]


def follow(pair: SideBySide, n_steps: int) -> None:
    for _ in range(n_steps):
        expected, found = pair.decode()
        np.testing.assert_allclose(found, expected, atol=2e-3)


@pytest.mark.parametrize(("geometry", "method", "n_steps"), sweep(CASES, fast=1))
def test_device_and_host_attend_alike(geometry, method, n_steps, device):
    """Dense at first, then sparse, another prompt, and rewinds, the last to a dense context."""
    pair = SideBySide(GEOMETRIES[geometry], method, {}, device)
    pair.prefill(38)
    follow(pair, n_steps)
    pair.prefill(70)
    end = pair.host.n
    follow(pair, 2)
    for n in (90, 30) if method.holds_all_rows else (end,):
        for cache in (pair.host, pair.device):
            assert cache.truncate(n) == n
        follow(pair, 2)
    host, found = pair.host.counters(), pair.device.counters()
    for name in ("rows_total", "rows_scored", "sparse_rows_scored"):
        assert host[name] == found[name], name
    for name in ("rows_attended", "bytes_read"):
        assert host[name] == pytest.approx(found[name], rel=0.05), name
