"""The prefix cache on the command line: ``run`` and ``chat`` use it, ``cache`` shows it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_sequences import SHAPE

from sparsekv_cli.models.sources import locate

Invoke = Callable[..., Any]
DOCUMENT = "The ship had left before the rain. " * 60


@pytest.fixture
def model(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("SPARSEKV_NO_CACHE")
    return str(tiny_model(**SHAPE))


@pytest.fixture
def ask(model: str, invoke: Invoke, tmp_path: Path) -> Callable[..., Any]:
    """Asks the document a question: what ``run --json`` says, with stderr as ``err``."""

    def run(question: str, *arguments: str, clock: str = "", code: int = 0) -> dict[str, Any]:
        folder = () if "--session" in arguments else ("--cache-dir", str(tmp_path / "kept"))
        result = invoke(
            "run", "-m", model, "-p", clock + DOCUMENT + question, "--json", "-n", "4",
            "--temp", "0", "-t", "1", "--device", "cpu", *folder, *arguments,
        )  # fmt: skip
        assert result.code == code, result.err
        return {"err": result.err} if code else {**json.loads(result.out), "err": result.err}

    return run


def test_a_second_process_reuses_the_document(ask, invoke, tmp_path, model, monkeypatch):
    first, second, off = ask("Who?"), ask("When?"), ask("When?", "--no-cache")
    assert first["cached_tokens"] == off["cached_tokens"] == 0
    assert 512 <= second["cached_tokens"] < second["prompt_tokens"]
    assert second["tokens"] == off["tokens"]
    assert second["timings"]["ttft_s"] > 0
    assert "are kept in" in first["err"] and "kept" not in second["err"] + off["err"]
    folder = ("--cache-dir", str(tmp_path / "kept"))
    listed = json.loads(invoke("cache", "list", "--json", *folder).out)
    files = list((tmp_path / "kept").iterdir())
    assert listed["bytes"] == sum(path.stat().st_size for path in files)
    (prompt,) = listed["prompts"]
    assert prompt["tokens"] == first["prompt_tokens"] and prompt["bytes"] == listed["bytes"]
    assert prompt["begins"] == ""  # no model of this name is found
    monkeypatch.setitem(locate.SOURCES, "folder", lambda: [("tiny", Path(model))])
    (named,) = json.loads(invoke("cache", "list", "--json", *folder).out)["prompts"]
    assert DOCUMENT.startswith(named["begins"]) and 20 < len(named["begins"]) <= 48
    text = invoke("cache", "list", *folder).out
    assert str(prompt["tokens"]) in text and str(tmp_path / "kept") in text.replace("\n", "")
    assert invoke("cache", "clear", *folder).out.startswith(f"{len(files)} files removed")
    assert ask("When?", "-v")["cached_tokens"] == 0
    assert "0.0 MiB" in invoke("cache", "clear", "--cache-dir", str(tmp_path / "none")).out


def test_verbose_says_what_happens(ask):
    assert "tokens are kept in" in ask("Who?", "-v")["err"]
    assert "the prompt differs from the kept one at token" in ask("When?", "-v")["err"]
    assert "off, h2o needs the queries of all tokens" in ask("Who?", "--method", "h2o")["err"]
    assert "prefix cache" not in ask("Who?", "-v", "--no-cache")["err"]


def test_a_clock_at_the_top_is_named(ask):
    assert "difference" not in ask("Who?", clock="It is 12:01:07. ")
    told = ask("Who?", "-v", clock="It is 12:01:38. ")
    found = told["difference"]
    assert found["cause"] == "a clock" and found["n_again"] > 512
    assert found["before"].endswith("It is 12:01:")
    assert found["kept"].startswith("07.") and found["now"].startswith("38.")
    assert "the cause seems to be a clock" in told["err"]


def test_the_environment_switches_it_off(ask, invoke, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEKV_NO_CACHE", "1")
    ask("Who?")
    assert not (tmp_path / "kept").exists()
    monkeypatch.setenv("SPARSEKV_NO_CACHE", "maybe")
    result = invoke("run", "-m", "none.gguf", "-p", "x")
    assert result.code == 2 and "SPARSEKV_NO_CACHE is 'maybe'" in result.err


def test_other_models_and_other_rows_find_nothing(ask, tiny_model):
    ask("Who?")
    for arguments in (
        ("-m", str(tiny_model(**SHAPE, seed=5))),
        ("-ctk", "q8_0"),
        ("--prefill-dtype", "f32"),
        ("--activations", "16"),
    ):
        assert ask("When?", *arguments)["cached_tokens"] == 0, arguments
    assert ask("When?", "--method", "lfps", "--sparse-from", "0")["cached_tokens"] >= 512


def test_chat_uses_it_where_a_conversation_begins(model, invoke, tmp_path):
    """Also behind a short turn, and after /clear; not where the sequence has the rows itself."""
    turns = ["Hi", f"{DOCUMENT} Who?", "And when?", "/clear", f"Now: {DOCUMENT} Who?"]
    found = []
    for _ in range(2):
        result = invoke(
            "chat", "-m", model, "-n", "2", "-v", "-t", "1", "--device", "cpu", "--cache-dir",
            str(tmp_path / "kept"), "--temp", "0", stdin="\n".join(turns).encode(),
        )  # fmt: skip
        assert result.code == 0
        stats = [line for line in result.err.splitlines() if line.startswith("prefill ")]
        found.append(["from the prefix cache" in line for line in stats])
    assert found == [[False] * 4, [False, True, False, True]]


def test_bad_options_are_usage_errors(invoke, tmp_path):
    for arguments in (("--cache-limit", "0"), ("--cache-limit", "x"), ("--cache-dir", __file__)):
        assert invoke("run", "-p", "x", *arguments).code == 2
    assert invoke("bench", "--no-cache").code == 2
    for other in (("--cache-dir", str(tmp_path)), ("--no-cache",)):
        result = invoke("run", "-p", "x", "--session", str(tmp_path / "s"), *other)
        assert result.code == 2 and "leave --cache-dir and --no-cache out" in result.err


def test_a_session_file_is_used_in_place_of_the_folder(ask, tmp_path):
    file = tmp_path / "a.session"
    assert ask("Who?", "--session", str(file))["cached_tokens"] == 0
    assert file.exists()
    refused = ask("When?", "--session", str(file), "--method", "h2o", code=1)
    assert "error: --session: h2o needs the queries" in refused["err"]
    there = ("--session", str(file), "--prefill-dtype", "f32", "--method", "lfps", "-ctk", "q8_0")
    assert ask("When?", *there)["cached_tokens"] >= 512


def test_a_session_file_is_no_other_file(invoke, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("Mine.")
    wrong = {notes: "is not a session file of this version", tmp_path / "a" / "b": "no folder"}
    for path, what in wrong.items():
        result = invoke("run", "-p", "x", "--session", str(path))
        assert result.code == 1 and result.err.count("\n") == 1 and what in result.err
    assert notes.read_text() == "Mine."
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        result = invoke("run", "-p", "x", "--session", str(path))
        assert result.code in (1, 2) and result.err.count("\n") == 1
    assert (tmp_path / "pipe").is_fifo()


def test_passages_are_reused_and_counted(ask):
    """The document follows another beginning, so its rows are moved."""
    clock = "It is 10:31 on Monday. "
    first, second = ask("Who?"), ask("When?", clock=clock)
    assert not second["cached_tokens"] and "reused_tokens" not in first | second
    line = "tokens of known passages, "
    moved = ask("Where?", "--reuse", "passages", clock="It is 9:05 on a Tuesday. ")
    assert moved["reused_tokens"] > 512
    assert moved["repaired_tokens"] == -(-15 * moved["reused_tokens"] // 100)
    all_again = ask(
        "Why?", "--reuse", "passages", "--reuse-repair", "100", clock="It is 8:07 in June. "
    )
    assert all_again["repaired_tokens"] == all_again["reused_tokens"] > 512
    assert line not in moved["err"] + all_again["err"]  # --json has the numbers


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--reuse-repair", "20%"], "--reuse-repair has no effect without --reuse passages"),
        (["--reuse", "passages", "--reuse-repair", "101%"], "expected a share from 0% to 100%"),
        (["--reuse", "passages", "--reuse-repair", "nan"], "expected a share from 0% to 100%"),
        (["--reuse", "passages", "--no-cache"], "leave --no-cache out"),
        (["--reuse", "passages", "--method", "h2o"], "h2o needs the queries of all tokens"),
        (["--reuse", "some"], "'some' is not one of 'exact', 'passages'"),
    ],
)
def test_passages_that_cannot_be_reused_are_refused(ask, arguments, expected):
    code = 2 if "leave" not in expected and "h2o" not in expected else 1
    error = ask("Who?", *arguments, code=code)["err"]
    assert expected in " ".join(error.split()), error


def test_passages_and_a_session_exclude_each_other(ask, tmp_path):
    session = str(tmp_path / "kept.session")
    error = ask("Who?", "--session", session, "--reuse", "passages", code=2)["err"]
    assert "--session keeps one prompt" in " ".join(error.split())
