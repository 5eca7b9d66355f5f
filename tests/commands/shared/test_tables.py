"""Tables: plain lines for a pipe, rich's for a terminal; nothing of a file is markup."""

import sys

import click

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


def test_a_narrow_terminal_gets_whole_figures_in_further_tables(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "50"}.items():
        monkeypatch.setenv(name, value)
    figures = [("full", "0.0000–0.0001", "4194304", "3139.6–3658.1"), ("topk", "1", "2", "")]
    print_table("", ("method", "KLD", "rows", "tokens/s"), figures)
    shown = click.unstyle(capsys.readouterr().out).splitlines()
    lines = [line.split() for line in shown if "─" not in line]
    assert lines[:3] == [["method", "KLD", "rows"], [*figures[0][:3]], [*figures[1][:3]]]
    assert lines[3:] == [["method", "tokens/s"], ["full", "3139.6–3658.1"], []]


def test_methods(invoke):
    _, *lines = invoke("methods").out.partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(METHODS)
    shown = invoke("methods", "quest", "sals").out
    assert shown.startswith("quest:\n") and "\nsals:\n" in shown
    assert "-o page=8 " in shown and "-o dense_layers" not in shown
    assert shown.count("\n  --dense-layers  0,") == 2 and "type of V: f16\n" in shown
    assert invoke("methods", "qest").code == 2
