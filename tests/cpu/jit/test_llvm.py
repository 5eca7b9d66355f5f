"""Helpers that write vector code: sums with an order of their own, prefetches between work."""

import numpy as np
import pytest

from sparsekv_cli.cpu.jit import llvm


@pytest.mark.parametrize("n", [1, 16, 31, 64, 576])
def test_squares_are_summed_lane_by_lane(n):
    """To the last bit, so that no compilation may take another order."""
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    whole = n - n % 16
    lanes = np.zeros(16, np.float32)
    for row in x[:whole].reshape(-1, 16):
        lanes = (row.astype(np.longdouble) ** 2 + lanes).astype(np.float32)  # fused
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = lanes[:half] + lanes[half:]
    total = lanes[0]
    for value in x[whole:]:
        total += value * value
    assert llvm.sum_squares(x) == total


@pytest.mark.parametrize(("n_lines", "n_steps"), [(0, 4), (5, 16), (5, 5), (7, 3), (1, 8)])
def test_prefetches_are_spread_over_the_steps(n_lines, n_steps, monkeypatch):
    asked, counts = [], []
    monkeypatch.setattr(llvm, "prefetch", asked.append)
    lines = llvm.Prefetches(list(range(n_lines)), n_steps)
    for _ in range(n_steps):
        lines.step()
        counts.append(len(asked))
    assert asked == list(range(n_lines))
    even = [(step + 1) * n_lines / n_steps for step in range(n_steps)]
    assert all(0 <= count - due < 1 for count, due in zip(counts, even, strict=True))
    lines.step()
    assert len(asked) == n_lines
