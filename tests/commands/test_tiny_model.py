"""The commands on a real, tiny model: the whole way from the command line to the kernels."""

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from split_models import split_model
from tiny_models import make_model

from sparsekv_cli.commands.chat import conversation as chat_conversation
from sparsekv_cli.model import Model

Invoke = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONG = "the quick brown fox jumps over the lazy dog and runs away " * 12
GREEDY = ["--temp", "0", "--ignore-eos", "--prefill-dtype", "f32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(make_model(path, wtype="Q8_0", chat_template=TEMPLATE))


@pytest.fixture
def sequences(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The sequences that ``chat`` and ``run`` begin."""
    begun: list[Any] = []
    begin = Model.sequence

    def remember(model: Model) -> Any:
        begun.append(begin(model))
        return begun[-1]

    monkeypatch.setattr(Model, "sequence", remember)
    return begun


def run_json(invoke: Invoke, model: str, *arguments: str) -> dict[str, Any]:
    result = invoke("run", "-m", model, "--json", *GREEDY, *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_run_with_every_method(model, invoke):
    full = run_json(invoke, model, "-p", LONG, "-n", "8")
    assert full["generated_tokens"] == len(full["tokens"]) == 8
    assert full["stop_reason"] == "length" and full["prompt_tokens"] > 100
    assert full["timings"]["decode_tps"] > 0 and full["ledger"]["rows_total"] > 0
    for method in ("topk", "streaming", "lfps"):
        arguments = ["-p", LONG, "-n", "8", "--method", method]
        everything = run_json(invoke, model, *arguments, "--budget", "100%")
        assert everything["tokens"] == full["tokens"]
        assert everything["method"]["options"]["budget"] == "100%"
        arguments += ["--budget", "10%", "--dense-layers", "none", "--sparse-from", "0"]
        sparse = run_json(invoke, model, *arguments)
        ledger = sparse["ledger"]
        assert 0 < ledger["rows_attended"] < 0.5 * ledger["rows_total"]


def test_run_with_a_part_of_a_split_model(model, invoke, tmp_path):
    whole = run_json(invoke, model, "-p", LONG, "-n", "8")
    parts = split_model(Path(model), tmp_path)
    assert run_json(invoke, str(parts[1]), "-p", LONG, "-n", "8")["tokens"] == whole["tokens"]
    parts[2].write_bytes(parts[2].read_bytes()[:-1000])
    result = invoke("run", "-m", str(parts[0]), "-p", LONG)
    assert result.code == 1 and result.out == "" and result.err.count("\n") == 1
    assert result.err.startswith(f"error: {parts[2]}: 1000 bytes are missing: ")


def test_run_with_cache_types(model, invoke):
    arguments = ["-p", LONG, "-n", "8"]
    half = run_json(invoke, model, *arguments)
    both = run_json(invoke, model, *arguments, "-ctk", "q8_0", "--cache-type-v", "q8_0")
    options = both["method"]["options"]
    assert (options["cache_type_k"], options["cache_type_v"]) == ("q8_0", "q8_0")
    assert half["method"]["options"]["cache_type_k"] == "f16"
    assert both["ledger"]["bytes_host"] < 0.6 * half["ledger"]["bytes_host"]
    assert both["ledger"]["rows_total"] == half["ledger"]["rows_total"]


def test_bench_of_batches_counts_every_sequence(model, invoke):
    arguments = ["-p", "0", "-n", "5", "-pg", "4,2", "-d", "0,40", "-r", "1", "--dense-layers", "0"]
    methods = ["--method", "full,topk", "--budget", "8"]
    result = invoke("bench", "-m", model, *arguments, *methods, "-b", "1,3", "-O", "json")
    assert result.code == 0, result.err
    rows = json.loads(result.out)
    assert len(rows) == 2 * 2 * 4
    for one, three in zip(rows[::2], rows[1::2], strict=True):
        assert (one["n_seqs"], three["n_seqs"]) == (1, 3)
        assert three["samples_ts"][0] * three["samples_ns"][0] == pytest.approx(
            3 * one["samples_ts"][0] * one["samples_ns"][0]
        )
        # Three times the rows of one sequence are in the steps' contexts, and three caches held.
        assert three["ledger"]["rows_total"] == 3 * one["ledger"]["rows_total"] > 0
        assert three["ledger"]["bytes_host"] == 3 * one["ledger"]["bytes_host"] > 0
        if one["method"] == "topk":
            attended = three["ledger"]["rows_attended"]
            assert attended == 3 * one["ledger"]["rows_attended"]


def test_text_is_the_streamed_text(model, invoke):
    arguments = ["-p", "Hi", "-n", "12", "-s", "3", "--temp", "1.5", "--ignore-eos"]
    as_json = invoke("run", "-m", model, *arguments, "--json")
    streamed = invoke("run", "-m", model, *arguments)
    assert json.loads(as_json.out)["text"] == streamed.out
    other = invoke("run", "-m", model, "-p", "Hi", "-n", "12", "-s", "4", "--temp", "1.5")
    assert other.out != streamed.out


def test_chat_continues_as_a_new_run_would(model, invoke, sequences, monkeypatch):
    prefilled: list[int] = []
    real = chat_conversation.stream_answer

    def count(sequence: Any, ids: Any, *arguments: Any, **named: Any) -> Any:
        prefilled.append(len(ids))
        return real(sequence, ids, *arguments, **named)

    monkeypatch.setattr(chat_conversation, "stream_answer", count)
    options = ["-m", model, *GREEDY, "-n", "6", "-sys", LONG]
    result = invoke("chat", *options, stdin=b"One\nTwo\n")
    assert result.code == 0, result.err
    first = run_json(invoke, model, "-p", "One", "-n", "6", "-sys", LONG)
    (chat, run) = sequences
    n_prompt = first["prompt_tokens"]
    assert prefilled[0] == n_prompt > 100
    # A random model's answer has other ids when it is read again, so that the cache is cut there.
    assert prefilled[1] <= 64
    assert chat.tokens[:n_prompt] == run.tokens[:n_prompt]
    assert result.out.startswith(first["text"])


def test_bench_takes_the_rows_of_depths_from_a_folder(model, invoke, sequences, tmp_path):
    """A depth is computed once for both methods, and for later runs; steps see the same rows."""
    tests = ["-p", "0", "-n", "2", "-d", "600,1200", "-r", "1", "--method", "full,topk", "-t", "1"]
    alone = invoke("bench", "-m", model, *tests, "-O", "json")
    assert all(each.timings.cached_tokens == 0 for each in sequences)
    for computed in (1250, 250):  # at most, of the first method
        sequences.clear()
        kept = ["--cache-dir", str(tmp_path / "rows")]
        result = invoke("bench", "-m", model, *tests, *kept, "-O", "json")
        assert result.code == 0, result.err
        first, second = (each.timings for each in sequences)
        assert first.prefill_tokens <= computed and second.prefill_tokens <= 250
        assert second.cached_tokens > 1600
        # A cache that grew has other room than one that was made for the depth.
        ledgers = [[row["ledger"] for row in json.loads(each.out)] for each in (alone, result)]
        counts = [[{**ledger, "bytes_host": 0} for ledger in each] for each in ledgers]
        assert counts[0] == counts[1] and counts[0][1]["rows_attended"] > 0


def test_bench(model, invoke):
    arguments = ["-p", "16", "-n", "4", "-d", "0,96", "-r", "2", "-O", "jsonl"]
    methods = ["--method", "full,lfps", "--budget", "10%"]
    result = invoke("bench", "-m", model, *arguments, *methods)
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert len(rows) == 8 and all(row["avg_ts"] > 0 for row in rows)
    assert rows[0]["model_type"].startswith("llama ") and rows[0]["model_type"].endswith(" Q8_0")
    deep = [row for row in rows if row["n_depth"] == 96 and row["n_gen"]]
    assert [row["method"] for row in deep] == ["full", "lfps"]
    full, lfps = (row["ledger"] for row in deep)
    # 2 repetitions of 4 steps, each with its own token: 97 to 100 rows, 2 layers, 4 heads.
    assert full["rows_total"] == full["rows_attended"] == 2 * sum(range(97, 101)) * 2 * 4
    assert lfps["rows_total"] == full["rows_total"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "x", "-c", "4"], "do not fit the context of 4"),
        (["-p", "x", "-m", "missing.gguf"], "missing.gguf"),
        (["-p", "x", "--device", "cuda"], "no CUDA device"),
    ],
)
def test_what_cannot_be_done_is_one_line(model, arguments, words, invoke, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = invoke("run", "-m", model, *arguments)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert words in result.err


def test_a_context_beyond_the_training_is_a_warning(model, invoke):
    compare = ["compare", "--methods", "full", "--steps", "4", "--raw"]
    for command in (["run", "-n", "1", "--json"], ["chat", "-n", "1"], [*compare, "--json"]):
        arguments = [*command, "-m", model, "-p", "x", "--prefill-dtype", "f32"]
        quiet = invoke(*arguments, "-c", "2048")
        assert quiet.code == 0 and "warning" not in quiet.err
        warned = invoke(*arguments, "-c", "2049")
        assert warned.code == 0
        assert warned.err.count("a context of 2049 tokens is more than the 2048") == 1
        stretched = warned.err.splitlines()[0].rpartition(": ")[2].split()
        found = invoke(*arguments, "-c", "2049", *stretched)
        assert found.code == 0 and "warning" not in found.err
    assert "warning" not in invoke(*arguments, "-c", "2049", "--rope-freq-base", "3e4").err
    few_bits = ["run", "-m", model, "-p", "x", "-n", "1", "-ctk", "q4_0", "-c"]
    assert "use --cache-type-k q8_0" in invoke(*few_bits, "32769").err
    assert "q8_0" not in invoke(*few_bits, "2048").err
    deep = ["bench", "-m", model, "-p", "0", "-n", "1", "-d", "2048", "-r", "1"]
    assert "warning" not in invoke(*deep, "--prefill-dtype", "f32").err  # random tokens
    deep[deep.index("2048")] = "2300"
    assert "a depth of 2300 tokens is more than the 2048" in invoke(*deep).err
    assert "warning" not in invoke(*deep, "--rope-scaling", "yarn", "--rope-scale", "2").err


@pytest.mark.slow
def test_chat_at_a_terminal(model, tmp_path):
    """Typed as a user would: an answer, then another method, then the end."""
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 80))
    command = [sys.executable, "-m", "sparsekv_cli", "chat", "-m", model, "-n", "4", *GREEDY]
    state = {"XDG_STATE_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    environment = {**os.environ, **state, "TERM": "xterm-256color"}
    chat = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    shown = b""

    def wait_for(words: bytes) -> None:
        nonlocal shown
        at, deadline = len(shown), time.monotonic() + 120
        while words not in shown[at:]:
            assert time.monotonic() < deadline, shown
            if select.select([terminal], [], [], 1)[0]:
                piece = os.read(terminal, 4096)
                shown += piece
                if b"\x1b[6n" in piece:  # where the cursor is
                    os.write(terminal, b"\x1b[2;1R")

    wait_for(b"0 of ")  # the line below what is typed
    for typed, told in ((b"hello", b" | full |"), (b"/method topk", b" | topk |")):
        os.write(terminal, typed + b"\r")
        wait_for(told)
    os.write(terminal, b"/exit\r")
    with contextlib.suppress(OSError):  # how Linux tells that the other end is closed
        while piece := os.read(terminal, 4096):
            shown += piece
    os.close(terminal)
    assert chat.wait(60) == 0
    assert b"topk attention" in shown
