"""A prefill that takes long says so, also where stderr is no terminal."""

import re

import pytest
from tiny_sequences import SHAPE

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


def test_lines_on_a_terminal_where_a_bar_would_disturb(monkeypatch, capfd):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    with PrefillProgress(draws=False) as lines:
        for second in range(60):
            now[0] = float(second)
            lines(100 * second, 6000)
    assert capfd.readouterr().err == "prefill: 3000 of 6000 tokens, 100 t/s, 30 s left\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("bench", "-p", "1100", "-n", "0", "-r", "1"), r"pp 1100: \d+ of 1100 tokens, \d+ t/s"),
        (("bench", "-p", "0", "-n", "1", "-d", "1100", "-r", "1"), r"depth 1100: \d+ of 1099 t"),
        (("eval", "perplexity", "-c", "1200"), r"\nprefill: \d+ of 600 tokens, \d+ t/s"),
        (
            ("eval", "perplexity", "-c", "1200", "--method", "topk"),
            r"\nprefill: \d+ of 600 tokens",
        ),
    ],
)
def test_what_is_read_for_a_measurement_says_how_far_it_is(
    arguments, line, tiny_model, invoke, tmp_path, monkeypatch
):
    monkeypatch.setattr(progress, "PREFILL_LINE_S", 0.0)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_BAR", 1e-9)
    (tmp_path / "text").write_text("The ship had left before the rain. " * 150)
    file = ("-f", str(tmp_path / "text")) if arguments[0] == "eval" else ()
    options = ("-m", str(tiny_model(**SHAPE)), "-t", "1", "--device", "cpu")
    result = invoke(*arguments, *options, *file)
    assert result.code == 0 and re.search(line, "\n" + result.err), result.err


def test_a_short_prefill_is_silent(capfd):
    with PrefillProgress() as bar:
        for done in range(0, 101, 10):
            bar(done, 100)
    assert not capfd.readouterr().err
