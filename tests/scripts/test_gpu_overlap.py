"""scripts/gpu/overlap: what is launched when, a device that sleeps, and what is made of times."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from scripts_as_modules import load_script

overlap = load_script("gpu/overlap")


@pytest.mark.parametrize(
    ("beside", "order"),
    [(False, ["attend", "learn", "launch", "wait"]), (True, ["attend", "launch", "learn", "wait"])],
)
def test_order_of_a_layer(beside, order):
    done = []
    cache = SimpleNamespace(
        decode=lambda x: done.append("attend"), learn=lambda: done.append("learn")
    )
    device = SimpleNamespace(
        launch=lambda seconds: done.append("launch"), wait=lambda: done.append("wait")
    )
    step = overlap.step([cache, cache], [None, None], device, 1.0, beside=beside)
    assert done == 2 * order
    assert step.whole >= step.output + step.rest > step.output + step.learning > 0


@pytest.mark.parametrize("device", [overlap.Clock(), overlap.Sleeper()])
def test_a_piece_ends_no_earlier_than_asked(device):
    begin = time.perf_counter()
    device.launch(0.01)
    device.wait()
    assert time.perf_counter() - begin >= 0.01


def test_a_machine_that_wakes_up_late_is_told(monkeypatch):
    def piece(device, seconds):
        return max(3e-4, seconds + 1e-4 - device.wake_up)

    monkeypatch.setattr(overlap.Sleeper, "piece", piece)
    device = overlap.Sleeper()
    device.prepare(4e-4)
    assert device.wake_up == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="--device-us 100: here a piece takes 300 us at least"):
        device.prepare(1e-4)


def test_what_is_hidden_is_the_median_of_neighbours():
    """Behind the output; what the whole step saves is told beside it."""
    steps = [(10, 7), (12, 8), (90, 87)]  # the last pair was disturbed, both of it
    rounds = [
        overlap.Round(
            5e-6,
            overlap.Step(2e-6 * (a + 4), 8e-6, 12e-6, 2e-6 * a),
            overlap.Step(2e-6 * (b + 3), 6e-6, 14e-6, 2e-6 * b),
        )
        for a, b in steps
    ]
    assert overlap.figures(rounds, 2) == {
        "piece_us": 5, "apart_us": 16, "beside_us": 11, "output_apart_us": 4, "output_beside_us": 3,
        "learning_us": 6, "hidden_us": 3, "hidden_of_learning": 0.5, "saved_us": 4,
    }  # fmt: skip


def test_a_line_for_each_piece(capsys):
    shape = ["--rows", "600", "--layers", "1", "--steps", "2", "-t", "1"]
    overlap.main([*shape, "--device-us", "4000,5000"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shown = [(line["device"], line["device_us"]) for line in lines]
    assert shown == [(kind, us) for us in (4000, 5000) for kind in ("clock", "thread")]
    assert all(line["rows"] == 600 and line["learning_us"] > 0 for line in lines)
