"""``--speculate`` on the command line: every command writes what it writes without drafts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model

from sparsekv_cli import load, machine
from sparsekv_cli.errors import OptionError

Invoke = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 8
REPEATING = "(the fox jumps; ){40}"  # an answer of which drafts can be made
GREEDY = ["--temp", "0", "--prefill-dtype", "f32", "-t", "1", "--regex", REPEATING]
SOURCES = ("off", "ngram")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(make_model(path, n_layer=2, wtype="Q8_0", chat_template=TEMPLATE))


def told(invoke: Invoke, *arguments: str, **options: Any) -> Any:
    result = invoke(*arguments, **options)
    assert result.code == 0, result.err
    return result


@pytest.mark.parametrize("method", ["full", "lfps"])
def test_run(method, model, invoke):
    given = ["run", "-m", model, *GREEDY, "-p", TEXT, "-n", "60", "--method", method, "--json"]
    given += [] if method == "full" else ["--budget", "20", "--sparse-from", "0"]
    off, ngram = (json.loads(told(invoke, *given, "--speculate", source).out) for source in SOURCES)
    speculation = ngram["timings"].pop("speculation")
    assert "speculation" not in off["timings"]
    times = off.pop("timings"), ngram.pop("timings")
    assert off == ngram and times[0].keys() == times[1].keys()
    assert speculation["source"] == "ngram" and speculation["accepted"] > 10
    assert speculation["steps"] < speculation["drafted"] <= 64 * speculation["steps"]
    mean = 1 + speculation["accepted"] / speculation["steps"]
    assert speculation["mean_length"] == pytest.approx(mean)
    assert speculation["draft_s"] > 0 < speculation["verify_s"]
    line = f"ngram drafts: {speculation['accepted']} of {speculation['drafted']} tokens accepted"
    given.remove("--json")
    verbose, plain = (told(invoke, *given, *more, "--speculate", "ngram") for more in (["-v"], []))
    assert line in verbose.err and "drafts" not in plain.err
    assert verbose.out == plain.out == off["text"]


def test_lines_together(model, invoke):
    lines: list[dict[str, Any]] = [
        {"prompt": TEXT[: 90 + 40 * i], "seed": i, "temp": 1.2 * (i % 2), "n_predict": 20 + 9 * i}
        for i in range(5)
    ]
    lines.append({"prompt": TEXT, "regex": REPEATING, "temp": 0, "n_predict": 40, "logprobs": 2})
    stdin = "".join(json.dumps(line) + "\n" for line in lines).encode()
    given = ["run", "-m", model, "--jsonl", "--parallel", "3", "-t", "1", "--speculate"]
    off, ngram = (told(invoke, *given, source, stdin=stdin) for source in SOURCES)
    assert off.out == ngram.out and off.out.count("\n") == 6
    assert "ngram drafts: " in ngram.err and "drafts" not in off.err
    tokens = sum(json.loads(line)["generated_tokens"] for line in off.out.splitlines())
    decoded = [
        result.err.partition("decode ")[2].partition(" tokens")[0] for result in (off, ngram)
    ]
    assert decoded[0] == decoded[1] and tokens - 6 <= int(decoded[0]) <= tokens


def test_chat_with_an_answer_again(model, invoke):
    stdin = f"{TEXT}\n/stats\n/regen\nand now?\n/undo\n{TEXT[:50]}\n/stats\n".encode()
    given = ["chat", "-m", model, *GREEDY, "-c", "900", "-n", "40", "--method", "lfps"]
    given += ["--budget", "20", "--sparse-from", "0", "--speculate"]
    off, ngram = (told(invoke, *given, source, stdin=stdin) for source in SOURCES)
    assert off.out == ngram.out and len(off.out) > 200
    assert ngram.err.count("ngram drafts: ") == 2 and "drafts" not in off.err


def test_bench_takes_a_text(model, invoke, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    given = ["bench", "-m", model, "-p", "0", "-n", "30", "-d", "80", "-b", "1,2", "-r", "2"]
    given += ["-t", "1", "-O", "json", "-f", str(file), "--speculate"]
    off, ngram = (json.loads(told(invoke, *given, source).out) for source in SOURCES)
    for a, b, n_seqs in zip(off, ngram, (1, 2), strict=True):
        counts = [b["ledger"].pop(name) for name in ("tokens_drafted", "tokens_accepted")]
        assert a["ledger"] == b["ledger"]
        assert counts[0] >= counts[1] > 2 * n_seqs * 15  # of two repetitions
    given[given.index("-d") + 1] = "800"
    result = invoke(*given, "ngram")
    assert result.code == 1 and "text.txt: has " in result.err
    result = invoke("bench", "-m", model, "--speculate", "ngram")
    assert result.code == 2 and "-f FILE" in result.err


def test_the_library(model):
    replies, asked = [], {"temperature": 0, "max_tokens": 50, "regex": REPEATING}
    for source in SOURCES:
        with load(model, threads=1, prefill_dtype="f32", speculate=source) as opened:
            for _ in range(2):
                reply = opened.generate(TEXT, **asked)
            pieces = list(opened.generate(TEXT, stream=True, **asked))
            assert "".join(pieces) == reply.text
            replies.append(reply)
    off, ngram = replies
    assert off.tokens == ngram.tokens and off.ledger == ngram.ledger
    assert ngram.timings["speculation"]["accepted"] > 10 and "speculation" not in off.timings


def test_a_gpu_is_refused(model, invoke, monkeypatch):
    monkeypatch.setattr(machine, "find_device", lambda name: (name if name == "cuda" else None, ""))
    on_gpu = "run", "-m", model, "-p", "a", "--device", "cuda"
    result = invoke(*on_gpu, "--draft-model", model)
    assert result.code == 2 and "--draft-model works on the CPU only" in result.err
    with pytest.raises(OptionError, match="use --device cpu"):
        load(model, device="cuda", draft_model=str(model))
    assert invoke("run", "-m", model, "-p", "a", "--speculate", "some").code == 2


@pytest.mark.parametrize("command", ["run", "chat", "serve", "bench"])
def test_options_without_effect_are_refused(command, model, invoke):
    """Before anything is loaded, in one line after that of the usage."""
    given = [command, "-m", "none.gguf"]
    for options, words in (
        (["--draft-method", "quest"], "draft_method (--draft-method) needs draft_model"),
        (["--draft-model", model, "--speculate", "mtp"], "does not use draft_model"),
        (["--draft-model", model, "--speculate", "off"], "does not use draft_model"),
    ):
        result = invoke(*given, *options)
        assert result.code == 2 and words in result.err.splitlines()[-1]


def test_a_session_file_and_a_context_that_shifts(model, invoke, tmp_path):
    outputs = []
    for source in SOURCES:
        session = str(tmp_path / f"{source}.session")
        given = ["run", "-m", model, *GREEDY, "--session", session, "--json", "-n", "40"]
        asked = [
            json.loads(told(invoke, *given, "--speculate", source, "-p", text).out)
            for text in (TEXT * 2, TEXT * 2 + "and so on")
        ]
        assert asked[1]["cached_tokens"] > 0
        given = ["chat", "-m", model, *GREEDY, "-c", "300", "-n", "150", "--context-shift"]
        stdin = f"{TEXT[:250]}\nand now?\n".encode()
        chat = told(invoke, *given, "--speculate", source, stdin=stdin)
        parts = [(each["tokens"], each["cached_tokens"], each["ledger"]) for each in asked]
        outputs.append((parts, chat.out, chat.err))
        has_drafts = [each["timings"].get("speculation", {"accepted": 0}) for each in asked]
        assert all((each["accepted"] > 5) == (source == "ngram") for each in has_drafts)
    assert outputs[0] == outputs[1] and len(outputs[0][1]) > 200
    assert "context shift: " in outputs[0][2]
