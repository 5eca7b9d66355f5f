"""``run --jsonl``: an answer a line, in order, together, resumed; log probabilities."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsekv_cli.cache import row_sizes
from sparsekv_cli.cache.counters import held_bytes
from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.commands.options.model import ModelOptions, open_model
from sparsekv_cli.commands.run.jsonl import LineAnswers, Output
from sparsekv_cli.commands.run.lines import read_task
from sparsekv_cli.commands.run.task import Task
from sparsekv_cli.engine import HostEngine
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

Invoke = Callable[..., Any]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
LINES = [
    {"prompt": "hello there", "n_predict": 6, "id": "first"},
    {"prompt": "one two three", "n_predict": 3},
    {"messages": [{"role": "user", "content": "Is it?"}], "regex": "(yes|no)!"},
    {"prompt": "long " * 300},
    {"prompt": "x", "n_predict": 0},
    {"prompt": "hello there", "n_predict": 6, "temp": 1.5, "seed": 7},
    {"prompt": "a", "temp": 10**400, "id": "seventh"},
    {"prompt": "the end", "json_schema": {"enum": [1, 2]}, "id": [8]},
]
FAILED = {4: "do not fit the context of 256", 7: "temp = 10000000"}
ZEROS = b"0" * 400
BOM = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(wtype="Q8_0", chat_template=TEMPLATE))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES), "utf-8")
    return file


def run(invoke: Invoke, model: str, *arguments: str, stdin: bytes = b"") -> Any:
    common = ["-m", model, "-c", "256", "-s", "3", "-n", "4", "--prefill-dtype", "f32"]
    return invoke("run", "--jsonl", *common, *arguments, stdin=stdin)


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("n_parallel", ["1", "3", "20"])
def test_an_answer_a_line_in_order(n_parallel, model, prompts, invoke):
    result = run(invoke, model, "-f", str(prompts), "--parallel", n_parallel)
    answers = objects(result.out)
    assert [answer["line"] for answer in answers] == list(range(1, 9))
    assert [answer.get("id") for answer in answers] == ["first", *[None] * 5, "seventh", [8]]
    for number, reason in FAILED.items():
        assert reason in answers[number - 1]["error"] and "text" not in answers[number - 1]
        assert f"error: line {number}: {answers[number - 1]['error']}\n" in result.err
    assert result.code == 1 and "error: 2 of 8 lines have no answer" in result.err
    n_tokens = [answer.get("generated_tokens") for answer in answers]
    assert n_tokens[:2] == [6, 3] and n_tokens[4:6] == [0, 6]
    assert answers[2]["text"] in ("yes!", "no!") and answers[2]["stop_reason"] == "eos"
    assert answers[7]["text"] in ("1", "2") and answers[1]["stop_reason"] == "length"
    assert answers[0]["tokens"] != answers[5]["tokens"]


def test_a_line_gets_the_answer_that_it_gets_alone(model, prompts, invoke):
    together = objects(run(invoke, model, "-f", str(prompts), "--parallel", "4").out)
    alone = invoke(
        *("run", "-m", model, "-c", "256", "-s", "3", "-n", "6", "--json"),
        *("--prefill-dtype", "f32", "-p", "hello there"),
    )
    expected = json.loads(alone.out)
    for key in ("text", "tokens", "prompt_tokens", "generated_tokens", "stop_reason"):
        assert together[0][key] == expected[key], key
    one_by_one = objects(run(invoke, model, "-f", str(prompts)).out)
    assert together == one_by_one


def test_a_line_waits_for_the_memory_of_the_others(model, monkeypatch):
    """The machine has memory for two of the lines; one is too long even alone."""
    opened = open_model(ModelOptions(model, SessionConfig(speculate="off", ctx_size=4096), None))
    written: list[str] = []
    answers = LineAnswers(opened, 4, Output(written.append, lambda _: None), None)
    asked = [{"prompt": "hello " * n, "raw": True, "n_predict": 4} for n in (9, 8, 300, 7, 9)]
    lines = [(i, json.dumps(line).encode()) for i, line in enumerate(asked, start=1)]
    most: list[int] = []

    def left() -> int:
        held = [held_bytes(line.generation.sequence.caches) for line in answers._active]
        most.append(len(held))
        return int(2.5 * opened.row_bytes(560)) - sum(held)

    monkeypatch.setattr(row_sizes, "available_memory", left)
    answers.run(lines, Task())
    told = objects("".join(written))
    assert [each["line"] for each in told if "error" in each] == [3] and len(told) == 5
    assert "GiB of memory" in told[2]["error"] and max(most) == 2
    opened.gguf.close()


def test_a_line_that_fails_in_a_step_leaves_the_others(model, monkeypatch):
    opened = open_model(ModelOptions(model, SessionConfig(speculate="off", ctx_size=256), None))
    asked = [
        {"prompt": "hello " * n, "raw": True, "n_predict": 6, "temperature": 0} for n in (9, 30, 5)
    ]
    lines = [(i, json.dumps(line).encode()) for i, line in enumerate(asked, start=1)]

    def answered() -> list[dict[str, Any]]:
        written: list[str] = []
        LineAnswers(opened, 3, Output(written.append, lambda _: None), None).run(lines, Task())
        return objects("".join(written))

    expected = answered()
    n, add = expected[1]["prompt_tokens"] + 2, DenseCache._add_all

    def fails(cache: DenseCache, *given: Any) -> Any:
        if cache.n == n:
            raise MemoryError
        return add(cache, *given)

    monkeypatch.setattr(DenseCache, "_add_all", fails)
    told = answered()
    assert told[1] == {"line": 2, "error": "MemoryError"}
    assert told[::2] == expected[::2]
    opened.gguf.close()


def test_lines_of_stdin(model, invoke):
    result = run(invoke, model, stdin=b'\n{"prompt": "a"}\r\n  \n{"prompt": "b"}')
    assert result.code == 0, result.err
    assert [answer["line"] for answer in objects(result.out)] == [2, 4]
    empty = run(invoke, model, stdin=b"\n")
    assert (empty.code, empty.out) == (0, "")


def test_it_goes_on_where_the_output_ends(model, prompts, invoke, tmp_path, monkeypatch):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    arguments = ("-f", str(prompts), "--parallel", "2", "--output")
    result = run(invoke, model, *arguments, str(whole))
    assert result.out == "" and result.code == 1
    lines = whole.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    prefilled: list[int] = []
    prefill = Sequence.prefill

    def counting(self: Sequence, ids: Any, *more: Any, **options: Any) -> Any:
        prefilled.append(len(ids))
        return prefill(self, ids, *more, **options)

    monkeypatch.setattr(Sequence, "prefill", counting)
    result = run(invoke, model, *arguments, str(output))
    assert output.read_bytes() == whole.read_bytes()
    assert len(prefilled) == 2 and "has answers up to line 5" in result.err
    again = run(invoke, model, *arguments, str(output))
    assert again.code == 1 and output.read_bytes() == whole.read_bytes()
    assert "error: 2 of 8 lines have no answer" in again.err  # lines of the file


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}\n', '{"line": 2}\n{"line": 1}\n', "[]\n"])
def test_a_file_of_something_else_is_left_alone(text, model, prompts, invoke, tmp_path):
    output = tmp_path / "other"
    output.write_text(text, "utf-8")
    result = run(invoke, model, "-f", str(prompts), "--output", str(output))
    assert result.code == 1 and "is not a file of answers" in result.err
    assert result.err.count("\n") == 1 and output.read_text("utf-8") == text


def test_an_interrupt_keeps_what_is_done(model, prompts, invoke, monkeypatch):
    steps: list[int] = []
    decode = HostEngine.decode

    def interrupted(self: HostEngine, sequences: Any, rows: Any, samples: Any) -> Any:
        steps.append(len(rows))
        if len(steps) == 6:  # after the five of the first line
            raise KeyboardInterrupt
        return decode(self, sequences, rows, samples)

    monkeypatch.setattr(HostEngine, "decode", interrupted)
    result = run(invoke, model, "-f", str(prompts))
    assert result.code == 130 and [answer["line"] for answer in objects(result.out)] == [1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"\xff", "not JSON in UTF-8: "),
        (b"{", "not JSON in UTF-8: EOF while parsing an object at column 1"),
        (b"[" * 100_000, "not JSON in UTF-8: recursion limit"),
        (b"1" * 5000, "not JSON in UTF-8: number out of range"),
        (b'{"prompt": "\\ud800"}', "not JSON in UTF-8: "),
        (b'{"prompt": "a", "id": NaN}', "not JSON in UTF-8: "),
        (b'{"prompt": "a", "id": [-1e999]}', "not JSON in UTF-8: a number is out of range"),
        (b"null", "expected an object, found null"),
        (b"{}", "expected either 'prompt' or 'messages'"),
        (b'{"prompt": "a", "messages": [{}]}', "expected either"),
        (b'{"prompt": ""}', 'prompt is "": expected one that is not empty'),
        (b'{"prompt": 3}', "prompt = 3: expected a text"),
        (b'{"prompt": "a", "tmp": 1}', "tmp: no such field (did you mean temp?)"),
        (b'{"prompt": "a", "max_tokens": 1}', "max_tokens: no such field: use n_predict"),
        (b'{"prompt": "a", "' + b"x" * 5000 + b'": 1}', "x" * 60 + ": no such field"),
        (b'{"messages": []}', "messages is []: expected one"),
        (b'{"messages": [{"content": "a"}]}', "messages[0]: expected an object whose role"),
        (b'{"messages": ["role"]}', 'messages[0] = "role": expected an object'),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0].content: expected a text"),
        (b'{"messages": [{"role": "user", "content": "a"}], "system": "b"}', "system: expected it"),
        (b'{"messages": [{"role": "user", "content": "a"}], "raw": true}', "messages needs the"),
        (b'{"prompt": "a", "system": "b", "raw": true}', "system needs the chat template"),
        (b'{"prompt": "a", "n_predict": -2}', "n_predict = -2: expected -1 or more"),
        (b'{"prompt": "a", "n_predict": true}', "n_predict = true: expected"),
        (b'{"prompt": "a", "seed": 1.5}', "seed = 1.5: expected"),
        (b'{"prompt": "a", "stop": [5]}', "stop: expected"),
        (b'{"prompt": "a", "temp": "hot"}', 'temp = "hot": expected a number'),
        (b'{"prompt": "a", "temp": 1%s}' % ZEROS, "temp = 1000"),
        (b'{"prompt": "a", "temp": 1e300}', "temp = 1e+300: expected at most 3.4"),
        (b'{"prompt": "a", "temp": 1, "temperature": 1}', "temp: is given twice"),
        (b'{"prompt": "a", "top_k": 1%s}' % ZEROS, "top_k = 1000"),
        (b'{"prompt": "a", "top_p": 2}', "top_p = 2: expected at most 1"),
        (b'{"prompt": "a", "samplers": 3}', "samplers = 3: expected a list"),
        (b'{"prompt": "a", "samplers": [1]}', "samplers[0] = 1: expected a text"),
        (b'{"prompt": "a", "samplers": ["x"]}', "samplers = 'x': must be names from"),
        (b'{"prompt": "a", "logit_bias": [1]}', "logit_bias = [1]: expected an object"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', 'logit_bias: the key "x" is no token'),
        (b'{"prompt": "a", "logit_bias": {"1%s": 1}}' % ZEROS, "logit_bias: the key"),
        (b'{"prompt": "a", "logit_bias": {"01": 1}}', 'logit_bias: the key "01" is no token'),
        (b'{"prompt": "a", "logit_bias": {"1": "x"}}', 'logit_bias.1 = "x": expected a number'),
        (b'{"prompt": "a", "logit_bias": {"1": 1e300}}', "logit_bias.1 = 1e+300: expected at most"),
        (b'{"prompt": "a", "ignore_eos": 1}', "ignore_eos = 1: expected true or false"),
        (b'{"prompt": "a", "regex": "a", "grammar": "b"}', "grammar and regex exclude each other"),
        (b'{"prompt": "a", "regex": "a", "ignore_eos": true}', "ignore_eos and regex exclude"),
        (b'{"prompt": "a", "think": 1}', "think = 1: expected true or false"),
        (b'{"prompt": "a", "think": true, "raw": true}', "think needs the chat template"),
        (b'{"prompt": "a", "regex": 1}', "regex = 1: expected a text"),
        (b'{"prompt": "a", "json_schema": 1}', "json_schema = 1: expected an object or true or"),
        (b'{"prompt": "a", "json_schema": {"uniqueItems": true}}', "json_schema: Unimplemented"),
    ],
)
def test_a_line_that_is_no_task(line, expected):
    with pytest.raises(SparseKVError) as info:
        read_task(line, Task())
    assert str(info.value).startswith(expected) and "\n" not in str(info.value)


def test_a_task_overrides_the_command_line():
    defaults = Task(n_predict=9, stop=("x",), seed=1, system="S")
    line = {"prompt": "a", "stop": "y", "temp": 0, "logit_bias": {"5": -1.5}, "samplers": ["top_k"]}
    line |= {"system": None, "seed": -1}
    task = read_task(json.dumps(line).encode(), defaults)
    assert (task.prompt, task.n_predict, task.stop, task.system) == ("a", 9, ("y",), "S")
    assert task.sampling.explicit == {"temp": 0, "logit_bias": {5: -1.5}, "samplers": ("top_k",)}
    assert task.seed == -1
    banned = read_task(b'{"prompt": "a", "logit_bias": {"5": -100}}', defaults).sampling.explicit
    assert banned == {"logit_bias": {5: -np.inf}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    task = read_task(BOM + json.dumps({"messages": messages}).encode(), defaults)
    assert task.system is None and [each["content"] for each in task.prompt] == ["ab", ""]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--jsonl", "--json"],
        ["--jsonl", "-p", "a"],
        ["--parallel", "2", "-p", "a"],
        ["--output", "x", "-p", "a"],
        ["--logprobs", "2", "-p", "a"],
    ],
    ids=str,
)
def test_options_that_do_not_fit_together(arguments, invoke):
    result = invoke("run", *arguments)
    assert result.code == 2 and result.err.count("\n") == 1


def test_log_probabilities(model, invoke):
    arguments = ["--temp", "0", "--prefill-dtype", "f32", "--raw", "-n", "3", "--logprobs", "2"]
    single = invoke("run", "-m", model, "-p", "hello", "--json", *arguments)
    answer = json.loads(single.out)
    entries = answer["logprobs"]
    assert [entry["id"] for entry in entries] == answer["tokens"] and len(entries) == 3
    opened = open_model(ModelOptions(model, SessionConfig(prefill_dtype="f32"), None))
    logits = (
        opened.sequence()
        .prefill(opened.tokenizer.encode("hello", add_eos=False))
        .astype(np.float64)
    )
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    first = entries[0]
    assert first["logprob"] == pytest.approx(expected.max(), abs=1e-4)
    assert [each["id"] for each in first["top"]] == np.argsort(-expected)[:2].tolist()
    assert first["top"][0] == {key: value for key, value in first.items() if key != "top"}
    assert first["bytes"] == list(opened.tokenizer.token_bytes(first["id"]))
    line = {"prompt": "hello", "logprobs": 2, "raw": True, "temp": 0, "n_predict": 3}
    lines = run(invoke, model, stdin=json.dumps(line).encode())
    (together,) = objects(lines.out)
    assert [entry["id"] for entry in together["logprobs"]] == answer["tokens"]
    assert together["logprobs"][2]["logprob"] == pytest.approx(entries[2]["logprob"], abs=1e-4)
    opened.gguf.close()


def test_special_tokens_are_written(fake, invoke):
    fake.script = ["a<bos>b<eos>"] * 2
    assert invoke("run", "-p", "Hi").out == "ab"
    fake.tokens.clear()
    assert invoke("run", "-p", "Hi", "--special").out == "a<bos>b<eos>"


def test_thinking_has_a_field_of_its_own(tiny_model, invoke):
    """The prompt opens the thinking, which ends in time for the answer."""
    template = TEMPLATE + "{% if thinking is not false %}<think>{% endif %}"
    model = str(tiny_model(wtype="Q8_0", chat_template=template))
    asked = {"prompt": "a", "regex": "yes!", "think_budget": 8, "ignore_eos": False}
    lines = [
        asked,
        {**asked, "inline_thinking": True},
        {**asked, "think": False, "think_budget": None},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in lines).encode()
    answers = objects(run(invoke, model, "-n", "40", stdin=stdin).out)
    assert [answer["thinking"] != "" for answer in answers] == [True, False, False]
    assert [answers[0]["text"], answers[2]["text"]] == ["yes!", "yes!"]
    inline = answers[1]["text"]
    assert inline.endswith("\n</think>\n\nyes!") and answers[0]["thinking"] in inline
