"""A prefill that takes long says so, also where stderr is no terminal."""

import pytest

from sparsekv_cli.commands.shared import progress
from sparsekv_cli.commands.shared.progress import PrefillProgress


@pytest.mark.parametrize(
    ("unit", "line"),
    [
        ("tokens", "depth 6000: 3100 of 6000 tokens, 100 t/s, 29 s left"),
        ("bytes", "depth 6000: 3100 of 6000 bytes, 29 s left"),
    ],
)
def test_a_line_now_and_then(unit, line, monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with PrefillProgress("depth 6000", unit) as bar:
        for second in range(60):
            now[0] = float(second)
            bar(100 + 100 * second, 6000)
        bar(6000, 6000)
    assert capfd.readouterr().err == line + "\n"


def test_a_short_prefill_is_silent(capfd):
    with PrefillProgress() as bar:
        for done in range(0, 101, 10):
            bar(done, 100)
    assert not capfd.readouterr().err
