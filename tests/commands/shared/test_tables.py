"""Tables: plain lines for a pipe, rich's for a terminal; nothing of a file is markup."""

import sys

from sparsekv_cli.commands.shared.tables import print_pairs, print_table
from sparsekv_cli.methods import METHODS

ROWS = [("a [red]b", 7, 0.1234567891), ("long name\x1b[2J\n", "", "x" * 200)]


def test_a_pipe_gets_columns(capsys):
    print_table("things", ("name", "n", "value"), ROWS)
    print_pairs("", [("file", "f"), ("size", None), ("architecture", "llama")])
    print_pairs("nothing", [("size", None)])
    assert capsys.readouterr().out.splitlines() == [
        "things:", "  name                n  value", "  a [red]b            7  0.1234568",
        r"  long name\x1b[2J\n     " + "x" * 200, "file          f", "architecture  llama",
        "nothing:",
    ]  # fmt: skip


def test_a_terminal_gets_richs(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    print_table("things", ("name", "n", "value"), ROWS)
    print_pairs("", [("file", "f")])
    lines = capsys.readouterr().out.splitlines()
    assert "things" in lines[0] and "name" in lines[1] and "\u2500" in lines[2]
    assert any("a [red]b" in line for line in lines)
    assert not any("[2J" in line and "\x1b[2J" in line for line in lines)
    assert lines[-1].split() == ["file", "f"] and max(map(len, lines)) <= 80

    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")
    print_table("things", ("name", "n", "value"), ROWS[1:])
    lines = capsys.readouterr().out.splitlines()
    assert r"long name\x1b[2J\n" in lines[1] and lines[2] == "    " + "x" * 46


def test_methods(invoke):
    _, *lines = invoke("methods").out.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    shown = invoke("methods", "quest", "sals").out
    assert shown.startswith("quest:\n") and "\nsals:\n" in shown
    assert "-o page=8 " in shown and "-o dense_layers" not in shown
    assert shown.count("\n  --dense-layers  0,") == 2 and "type of V: f16\n" in shown
    assert invoke("methods", "qest").code == 2
