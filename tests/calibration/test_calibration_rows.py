"""How many rows a calibration takes: as many of any large model, so that it ends in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparsekv_cli.calibration import trials
from sparsekv_cli.calibration.calibrations import LEAST_ROWS, PRODUCTS, affordable_rows
from sparsekv_cli.calibration.run import CalibrationRun


@pytest.mark.parametrize(("n_weights", "n_used"), [(10**8, 8), (10**12, 8), (10**12, 1)])
def test_rows_follow_from_the_weights_that_a_row_takes(n_weights: int, n_used: int) -> None:
    tensors: dict[str, Any] = {
        "blk.0.ffn_up_exps.weight": SimpleNamespace(n_elements=n_weights, shape=(8, 2, 2)),
        "token_embd.weight": SimpleNamespace(n_elements=10**15, shape=(2, 2)),
    }
    layer = SimpleNamespace(experts=SimpleNamespace(n_expert=8, n_expert_used=n_used))
    file, hparams = SimpleNamespace(tensors=tensors), SimpleNamespace(layers=[layer])
    found = affordable_rows(file, hparams)  # type: ignore[arg-type]
    assert found == max(LEAST_ROWS, PRODUCTS / (n_weights * n_used / 8))


@pytest.mark.parametrize(("n_rows", "n_windows"), [(1 << 30, 2), (3600, 1)])
def test_forward_passes_take_no_more_rows(
    n_rows: int, n_windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pass over the text, and of 26 layers with five trials each."""
    monkeypatch.setattr(trials, "Window", lambda run, ids, n, middle: (len(ids), n))
    forward: Any = None
    run = CalibrationRun([], range(4096), forward, lambda share: None, n_rows)
    middle, n_trials = trials.middle_rows(4096, 16, 64), 26 * 5
    left = n_rows - len(run.statistics_ids)
    windows: Any = trials.windows_of(run, middle, 64, n_trials, left)
    n_taken = sum(n_ids - n_scored - 1 + n_trials * n_scored for n_ids, n_scored in windows)
    assert len(windows) == n_windows and n_taken <= left
    assert all(trials.LEAST_SCORED <= n_scored <= 48 for _, n_scored in windows)
