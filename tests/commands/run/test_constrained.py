"""``run`` and ``chat`` with --json-schema, --grammar and --regex."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sparsekv_cli.commands.options.model import ModelOptions, open_model
from sparsekv_cli.commands.run import run as run_module
from sparsekv_cli.commands.shared.answer import stream_answer
from sparsekv_cli.generation.conversation import encode_messages
from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.sampling.grammar import read_grammar
from sparsekv_cli.settings.config import SessionConfig

Invoke = Callable[..., Any]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "nick": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
POINTS = {
    "type": "array",
    "items": {"$ref": "#/$defs/point"},
    "minItems": 1,
    "maxItems": 2,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "on": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(wtype="Q8_0"))


def run_json(invoke: Invoke, model: str, *arguments: str) -> dict[str, Any]:
    result = invoke("run", "-m", model, "-p", "hello", "--json", *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_every_answer_is_what_was_asked_for(model, invoke, tmp_path):
    """Random weights at a high temperature want to say anything but JSON."""
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON), "utf-8-sig")
    for seed, schema in enumerate((str(file), json.dumps(PERSON)) * 2):
        arguments = ["--temp", "1.5", "--top-k", "0", "-s", str(seed), "--json-schema", schema]
        answer = run_json(invoke, model, *arguments)
        jsonschema.validate(json.loads(answer["text"]), PERSON)
        assert answer["stop_reason"] == "eos"


def test_other_options_hold_beside_a_grammar(model, invoke, tmp_path):
    grammar = tmp_path / "list.gbnf"
    grammar.write_text('root ::= ("- " [ab] "\\n"){3,}\n', "utf-8-sig")
    ever = ["--grammar", str(grammar), "--temp", "0"]
    cut = run_json(invoke, model, *ever, "-n", "5")
    assert (cut["generated_tokens"], cut["stop_reason"]) == (5, "length")
    assert set(cut["text"]) <= set("- ab\n")
    stopped = run_json(invoke, model, *ever, "-r", "\n")
    assert stopped["stop_reason"] == "stop" and stopped["text"] in ("- a", "- b")
    forced = run_json(invoke, model, "--regex", "(hello ){3}", "--repeat-penalty", "9")
    assert forced["text"] == "hello hello hello " and forced["stop_reason"] == "eos"
    whole = run_json(invoke, model, "--regex", "hello", "-n", str(forced["generated_tokens"]))
    assert whole["text"] == "hello" and whole["stop_reason"] == "eos"


def test_each_answer_of_a_chat_matches(model, invoke):
    result = invoke(
        "chat", "-m", model, "--regex", "(yes|no)!", "-s", "5", stdin=b"A?\nB?\n/regen\n"
    )
    assert result.code == 0, result.err
    answers = result.out.splitlines()
    assert len(answers) == 3 and set(answers) <= {"yes!", "no!"}


OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>\n' }}"


def test_a_budget_where_nothing_is_thought(model, invoke):
    for command in (["run", "-p", "a"], ["chat", "-p", "a"]):
        result = invoke(command[0], "-m", model, *command[1:], "--think-budget", "5")
        assert result.code == 1 and "has no markers of thinking" in result.err


def test_thinking_comes_first(tiny_model, invoke):
    """The template opens it, and a model of random weights never ends it."""
    thinker = str(tiny_model(wtype="Q8_0", chat_template=OPENING))
    for n, budget in ((40, ()), (-1, ("--think-budget", "9")), (40, ("--think-budget", "0"))):
        answer = run_json(invoke, thinker, "--regex", "(yes|no)!", "-n", str(n), *budget)
        assert answer["text"] in ("yes!", "no!") and answer["stop_reason"] == "eos"
        assert bool(answer["thinking"]) == (budget != ("--think-budget", "0"))
    raw = invoke("run", "-m", thinker, "-p", "a", "--raw", "--think-budget", "5")
    assert raw.code == 2 and "--think-budget needs the chat template" in raw.err
    free = run_json(invoke, thinker, "--think-budget", "5", "-n", "40", "--ignore-eos")
    assert free["thinking"] and free["text"]
    said = b"A?\nB?\n/set think_budget 3\n/regen\n/set think_budget x\n"
    result = invoke("chat", "-m", thinker, "--regex", "(yes|no)!", "-n", "40", stdin=said)
    assert result.out.count("yes!") + result.out.count("no!") == 3, result.out
    assert "think_budget 3" in result.err and "of at least 0" in result.err


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["--json-schema", "{}", "--regex", "a"], "--json-schema and --regex exclude each", 2),
        (["--grammar", "x", "--json-schema", "{}"], "--json-schema and --grammar exclude each", 2),
        (["--regex", "a", "--ignore-eos"], "--ignore-eos and --regex exclude each other", 2),
        (["--think-budget", "5", "--think", "off"], "--think-budget and --think off exclude", 2),
        (["--json-schema", "none.json"], "--json-schema none.json: No such file or directory", 1),
        (["--json-schema", ""], "--json-schema : Is a directory: expected a file, or a schema", 1),
        (["--grammar", "none.gbnf"], "--grammar none.gbnf: No such file", 1),
        (["--grammar", "."], "--grammar .: Is a directory: expected a file", 1),
        (["--regex", "a("], '--regex: at 1(8): invalid regex "a("', 1),
    ],
    ids=str,
)
def test_refused_before_the_model_is_loaded(arguments, expected, code, invoke, monkeypatch):
    monkeypatch.setattr(run_module, "open_model", lambda options: pytest.fail("opened"))
    for command in (["run", "-p", "Hi"], ["chat"]):
        result = invoke(*command, *arguments)
        assert result.code == code and result.err.startswith(f"error: {expected}"), result.err
        assert result.err.count("\n") == 1 and result.out == ""


def test_a_file_that_is_not_utf8(invoke, tmp_path):
    file = tmp_path / "latin.gbnf"
    file.write_bytes('root ::= "é"'.encode("latin-1"))
    result = invoke("run", "-p", "Hi", "--grammar", str(file))
    assert result.code == 1 and "latin.gbnf is not UTF-8" in result.err


def test_without_llguidance(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    result = invoke("run", "-p", "Hi", "--json-schema", "{}")
    assert result.code == 1 and result.err.count("\n") == 1
    assert "[grammar]'" in result.err


@pytest.mark.parametrize(("schema", "question"), [(PERSON, "Who?"), (POINTS, "Where?")])
def test_a_model_that_was_trained(schema, question, default_model):
    """Answers at temperature 1 fit the schema, and none is as long as it could be."""
    model = open_model(ModelOptions(str(default_model), SessionConfig(ctx_size=1024), None))
    constraint = new_constraint(
        model.tokenizer,
        SamplingOptions({}, grammar=read_grammar("json-schema", json.dumps(schema))),
        None,
    )
    template = model.gguf.metadata["tokenizer.chat_template"]
    ids = encode_messages(model.tokenizer, template, [{"role": "user", "content": question}])
    everything = SamplingOptions({"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    for seed in range(3):
        sample, sequence = new_sampler(model, everything, seed, constraint), model.sequence()
        begin = partial(
            Generation, model.tokenizer, sequence, sample, n_predict=600, constraint=constraint
        )
        answer = stream_answer(sequence, ids, begin)
        assert answer.stop_reason == "eos"
        jsonschema.validate(json.loads(answer.text), schema)
    model.gguf.close()
