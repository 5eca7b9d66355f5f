"""Formats of tool calls: what models write, what templates teach them, and calls asked for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_vocabularies import bpe_metadata

from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint
from sparsekv_cli.models.chat.calls import ToolCall
from sparsekv_cli.models.chat.fitting.fitted import fitted
from sparsekv_cli.models.chat.template import render
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer
from sparsekv_cli.sampling.grammar import read_grammar
from sparsekv_cli.serve.forms.tools import (
    GEMMA4,
    HARMONY,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL,
    forced_call,
    format_of,
    reader_of,
)

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "f", "description": "Of a city.", "parameters": PARAMETERS}
PLACE = {"lat": 47.4, "tags": ["a", "b"]}
ARGUMENTS = {"city": 'Bonn, "D"', "days": 3, "place": PLACE, "ok": True}
OF_TEMPLATES = {
    "Qwen-Qwen2.5-7B-Instruct": HERMES, "Qwen-Qwen3-0.6B": HERMES, "Qwen3-Coder": HERMES,
    "Qwen3.5-4B": HERMES, "meta-llama-Llama-3.1-8B-Instruct": LLAMA3,
    "mistralai-Mistral-Nemo-Instruct-2407": MISTRAL,
    "Mistral-Small-3.2-24B-Instruct-2506": MISTRAL, "openai-gpt-oss-120b": HARMONY,
    "google-gemma-4-31B-it": GEMMA4,
    "microsoft-Phi-3.5-mini-instruct": HERMES, "google-gemma-2-2b-it": HERMES,
    "HuggingFaceTB-SmolLM3-3B": HERMES, "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": HERMES,
}  # fmt: skip

CALL = "<|tool_call_start|>"
TEXTS = [
    (HERMES, 'Hi <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "Hi ", 1),
    (HERMES, '{"name": "f", "arguments": {"a": 1}}', "", 1),
    (HERMES, '```json\n{ "name" : "f", "arguments": {}}\n```', "", 1),
    (HERMES, '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', 0),
    (HERMES, '{"name": "f", "arguments"', '{"name": "f", "arguments"', 0),
    (HERMES, "a <b> <tool_call>nonsense</tool_call>", "a <b> <tool_call>nonsense</tool_call>", 0),
    (HERMES, "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n", "", 1),
    (HERMES, "<tool_call><function=f>?</function>", "<tool_call><function=f>?</function>", 0),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>', "", 1),
    (LLAMA3, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", 2),
    (LLAMA3, '{"no": "call"}<|eot_id|>', '{"no": "call"}', 0),
    (LLAMA3, "text {}<|eot_id|>", "text {}", 0),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]</s>', "", 1),
    (MISTRAL, 'x[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "x", 2),
    (MISTRAL, "[TOOL_CALLS]?", "[TOOL_CALLS]?", 0),
    (
        HARMONY,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        "",
        1,
    ),
    (HARMONY, "<|channel|>final<|message|>a < b<|return|>", "a < b", 0),
    (HERMES, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", 1),
    (GEMMA4, 'So: <|tool_call>call:f{a:<|"|>{b:1}<|"|>}<tool_call|><|tool_response>', "So: ", 1),
    (GEMMA4, "<|tool_call>call:f{a:}<tool_call|><turn|>", "<|tool_call>call:f{a:}<tool_call|>", 0),
    (LFM2, f'{CALL}[f(a="x"), g(b=[1, None])]<|tool_call_end|><|im_end|>', "", 2),
    (
        LFM2,
        "<|tool_call_start|>f(x)<|tool_call_end|>",
        "<|tool_call_start|>f(x)<|tool_call_end|>",
        0,
    ),
    (LFM2, "a <|b|> c<|im_end|>", "a <|b|> c", 0),
    (None, "<tool_call>", "<tool_call>", 0),
]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("kind", "written", "text", "n_calls"), TEXTS)
def test_formats_of_calls(kind: Any, written: str, text: str, n_calls: int, size: int) -> None:
    """However the text is cut."""
    reader = reader_of(kind, functions={"f": {}, "g": {}})
    pieces = [written[i : i + size] for i in range(0, len(written), size)]
    parts = [part for piece in pieces for part in reader.push(piece)] + list(reader.flush())
    kinds = [type(part).__name__ for part in parts]
    assert "".join(p.text for p in parts if type(p).__name__ == "Text") == text
    calls = [part for part in parts if type(part).__name__ == "ToolCall"]
    assert len(calls) == n_calls and all(call.name in "fg" for call in calls)
    assert ("Thought" in kinds) == ("analysis" in written)


OF_TYPES: dict[str, Any] = {
    "type": "object",
    "$defs": {"count": {"type": "integer"}},
    "properties": {
        "s": {"type": "string"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "n": {"type": "number"},
        "count": {"$ref": "#/$defs/count"},
        "on": {"enum": [True, False]},
        "list": {"type": ["array", "object"]},
    },
}


def calls_of(kind: Any, written: str) -> list[tuple[str, Any]]:
    """The calls of functions f and g in an answer, which comes in pieces, and the texts."""
    reader = reader_of(kind, None, {"f": OF_TYPES})
    pieces = [written[i : i + 3] for i in range(0, len(written), 3)]
    parts = [part for piece in pieces for part in reader.push(piece)] + [*reader.flush()]
    told: list[tuple[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            told.append((part.name, json.loads(part.arguments, parse_constant=pytest.fail)))
        elif told and told[-1][0] == "":
            told[-1] = ("", told[-1][1] + part.text)
        else:
            told.append(("", part.text))
    return told


def tagged(*values: tuple[str, str]) -> str:
    parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values)
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


TEXTS_OF_ARGUMENTS = (
    '{"a": 1}', "42", "true", "None", "null", "3.10", "NaN", "", '"', " a\n b ", "a </tool_call> b",
    "a </parameter> b", "a\n</function>\nb", "<parameter=n>", "\n<parameter=x>\n", "<tool_call>",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS_OF_ARGUMENTS)
def test_a_declared_text_stays_what_it_is(text: str) -> None:
    """Its neighbour is read, too, and what follows the call."""
    assert calls_of(HERMES, f"{tagged(('s', text), ('n', '1.5'))} then") == [
        ("f", {"s": text, "n": 1.5}),
        ("", " then"),
    ]
    in_json = json.dumps({"name": "g", "arguments": {"s": text}})
    assert calls_of(HERMES, f"<tool_call>{in_json}</tool_call>") == [("g", {"s": text})]
    in_json = f'[TOOL_CALLS]g[ARGS]{{"s": {json.dumps(text)}}}'
    assert calls_of(MISTRAL, in_json) == [("g", {"s": text})]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("maybe", "None", None), ("maybe", "null", None), ("maybe", "7", "7"), ("count", "7", 7),
        ("count", "7.5", "7.5"), ("on", "True", True), ("on", "false", False), ("on", "1", "1"),
        ("list", "[1, NaN]", [1, "NaN"]), ("list", "5", "5"), ("n", "1e999", "1e999"),
        ("n", "-Infinity", "-Infinity"), ("n", "9" * 5000, "9" * 5000), ("other", "[1]", [1]),
        ("other", "None", None), ("other", "NaN", "NaN"), ("other", "a", "a"),
    ],
)  # fmt: skip
def test_values_are_of_the_declared_types(key: str, text: str, value: Any) -> None:
    assert calls_of(HERMES, tagged((key, text))) == [("f", {key: value})]


UNCLOSED = "<tool_call>\n<function=f>\n<parameter=s>\na\n"
OTHERS: list[tuple[Any, str, list[tuple[str, Any]]]] = [
    # A tag is missing: the next parameter, the next call and the text are not swallowed.
    (HERMES, UNCLOSED + "<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
     [("f", {"s": "a", "n": 1})]),
    (HERMES, f"{UNCLOSED}</function>\n</tool_call>\n{tagged(('n', '2'))}",
     [("f", {"s": "a"}), ("f", {"n": 2})]),
    (HERMES, f"{UNCLOSED}</function>\n</tool_call> b", [("f", {"s": "a"}), ("", " b")]),
    (HERMES, f"{UNCLOSED}</tool_call>", [("f", {"s": "a"})]),
    (HERMES, UNCLOSED, [("", UNCLOSED)]),  # is cut
    (HERMES, tagged(("s", "</tool_call>"))[:-12], [("f", {"s": "</tool_call>"})]),
    # A broken call is text, and does not take the next one with it.
    (HERMES, f'<tool_call>{{"name": "f}}</tool_call>{tagged()}',
     [("", '<tool_call>{"name": "f}</tool_call>'), ("f", {})]),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"a": NaN, "b": 1e999}}</tool_call>',
     [("g", {"a": "NaN", "b": "1e999"})]),
    (HERMES, r'<tool_call>{"name": "g", "arguments": {"a": "\ud800"}}</tool_call>',
     [("g", {"a": "\ufffd"})]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]g[ARGS]{}"}[TOOL_CALLS]g[ARGS]{}',
     [("f", {"s": "[TOOL_CALLS]g[ARGS]{}"}), ("g", {})]),
    (GEMMA4, '<|tool_call>call:g{s:<|"|>a<tool_call|>b<|"|>}<tool_call|>',
     [("g", {"s": "a<tool_call|>b"})]),
    (LFM2, f'{CALL}[g(s="a<|tool_call_end|>")]<|tool_call_end|>',
     [("g", {"s": "a<|tool_call_end|>"})]),
    (HARMONY, '<|channel|>commentary to=g <|message|>{"s": "<|end|>"}<|call|>',
     [("g", {"s": "<|end|>"})]),
    (HARMONY, "<|channel|>commentary to=g <|message|>[1]<|call|>", [("", "[1]")]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "written", "told"), OTHERS)
def test_marks_within_arguments_and_marks_that_are_missing(
    kind: Any, written: str, told: list[tuple[str, Any]]
) -> None:
    assert calls_of(kind, written) == told


def test_arguments_that_are_nested_too_deeply_are_text() -> None:
    written = '<tool_call>{"name": "g", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}"
    assert calls_of(HERMES, written + "</tool_call>") == [("", written + "</tool_call>")]


def test_a_format_is_known_by_the_template() -> None:
    known = {"<tool_call>": HERMES, "[TOOL_CALLS]": MISTRAL, "<|channel|>": HARMONY, "x": None}
    assert {sign: format_of(sign + "{{ tools }}") for sign in known} == known
    assert format_of(None) == format_of("[TOOL_CALLS]") == HERMES  # they write no tools


@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_a_call_as_the_template_writes_it_is_read(name: str) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    kind = format_of(template)
    assert kind == OF_TEMPLATES[name]
    call = {"id": "123456789", "type": "function"}
    call["function"] = {"name": "f", "arguments": ARGUMENTS}  # type: ignore[assignment]
    asked = [{"role": "user", "content": "How is it?"}]
    turns = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": TOOL}]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}

    def text(messages: list[dict[str, Any]], *, begins: bool) -> str:
        form = fitted(template, messages, tools)
        more: dict[str, Any] = {"tools": form.tools, "add_generation_prompt": begins, **tokens}
        return render(template, form.messages, **more)

    whole = text(turns, begins=False)
    begins = [text(asked, begins=x) for x in (True, False)]
    begin = next((each for each in begins if whole.startswith(each)), None)
    written = whole.split("[/INST]")[-1] if begin is None else whole[len(begin) :]
    reader = reader_of(kind)
    parts = [*reader.push(written), *reader.flush()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [("f", ARGUMENTS)]


@pytest.mark.parametrize("names", [("f",), ("f", "g")], ids="-".join)
@pytest.mark.parametrize("name", OF_TEMPLATES)
def test_a_call_that_is_asked_for(name: str, names: tuple[str, ...]) -> None:
    """The grammar takes a call of the last function in its format, and the reader reads it."""
    template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    kind = format_of(template)
    forced = forced_call(kind, template, dict.fromkeys(names, PARAMETERS))
    tokenizer = load_tokenizer(bpe_metadata())
    model: Any = SimpleNamespace(tokenizer=tokenizer)
    options = SamplingOptions({}, grammar=read_grammar("tool_choice", forced.lark))
    constraint = new_constraint(model.tokenizer, options, None)
    assert constraint is not None
    key = "parameters" if kind == LLAMA3 else "arguments"
    said = json.dumps({"name": names[-1], key: {"city": "Bonn"}})
    said = f"[{said}]" if kind == MISTRAL else said
    said = '{"city": "Bonn"}' if forced.name else said
    assert bool(forced.name) == (len(names) == 1 and name in ONE_BY_NAME)
    for token in tokenizer.encode_within(said):
        constraint.accept(token)
    assert constraint.is_finished
    reader = reader_of(kind, forced)
    (call,) = [*reader.push(said[:9]), *reader.push(said[9:]), *reader.flush()]
    assert call == ToolCall(names[-1], '{"city": "Bonn"}')
    cut = reader_of(kind, forced)
    assert not any(isinstance(part, ToolCall) for part in [*cut.push(said[:9]), *cut.flush()])


def test_arguments_have_the_described_keys():
    """A small model would write further keys until its answer is cut."""
    open_one = {"type": "object", "properties": {}, "additionalProperties": True}
    lark = forced_call(None, None, {"f": PARAMETERS, "g": open_one, "h": {}}).lark
    schemas = [json.loads(line.partition("%json ")[2]) for line in lark.splitlines()[2:]]
    assert [each.get("additionalProperties") for each in schemas] == [False, True, None]
    one_of = {"oneOf": [PARAMETERS, {**PARAMETERS, "required": []}]}
    read_grammar("tool_choice", forced_call(None, None, {"f": one_of}).lark)


ONE_BY_NAME = ("openai-gpt-oss-120b", "Mistral-Small-3.2-24B-Instruct-2506")
