"""Templates of real models: conversations with tools and thinking, beside jinja2 without bounds.

tests/data/templates has those of the families that this program is for, as their authors publish
them; SPARSEKV_TEMPLATE_VECTORS may name a folder of more *.jinja files.
"""

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat.cover import Cover
from sparsekv_cli.models.chat.template import render

FOLDERS = [Path(__file__).parents[2] / "data" / "templates"]
FOLDERS += [Path(os.environ[name]) for name in ("SPARSEKV_TEMPLATE_VECTORS",) if name in os.environ]
TEMPLATES = [path for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))]
REFUSED = "refused"
UNCOVERED = ("turns", "two calls")  # are rendered without a cover, too

Messages = list[dict[str, Any]]

SYSTEM = {"role": "system", "content": "Be brief.\n  «Ünïcode» stays 😀 {{ so }} {% do %} these."}
HI = {"role": "user", "content": ' Hi, what\'s 2 < 3 & "4"? \n'}
HELLO = {"role": "assistant", "content": "Hello.\n\n```py\nx = {'a': 1}\n```"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm, why?\n</think>\n\nBecause."}
REASONED = {"role": "assistant", "reasoning_content": "Let me think.\n", "content": "So it is."}
MORE = {"role": "user", "content": "And now?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The weather of a "city" <now>',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {"type": ["integer", "null"], "minimum": 1},
                    "place": {
                        "type": "object",
                        "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}},
                        "required": ["lat"],
                    },
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
            "return": {"type": "object", "description": "What it is"},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def call(name: str, arguments: Any, identity: str) -> dict[str, Any]:
    return {"type": "function", "id": identity, "function": {"name": name, "arguments": arguments}}


def calls(*each: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(each), **more}


def result(content: str, identity: str, name: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": identity, "name": name}


CITY = {"city": "Köln", "days": 2, "place": {"lat": 50.9, "lon": None}, "tags": ["a", "b"]}
ONE_CALL = [HI, calls(call("get_weather", CITY, "abcdef123")), result('{"t": 3}', "abcdef123", "w")]
CONVERSATIONS: dict[str, Messages] = {
    "one": [HI],
    "system": [SYSTEM, HI],
    "turns": [SYSTEM, HI, HELLO, MORE],
    "ends with an answer": [HI, HELLO],
    "thoughts in the text": [SYSTEM, HI, THOUGHT, MORE, THOUGHT, HI],
    "reasoning": [SYSTEM, HI, REASONED, MORE, REASONED, HI],
    "a call": ONE_CALL[:2],
    "a result": ONE_CALL,
    "after a result": [SYSTEM, *ONE_CALL, HELLO, MORE],
    "two calls": [
        HI,
        calls(call("get_weather", {"city": "A"}, "abcdef123"), call("now", {}, "abcdef124")),
        result("3 °C", "abcdef123", "get_weather"),
        result("12:00", "abcdef124", "now"),
        HELLO,
    ],
    "thought and call": [
        HI,
        calls(call("now", {}, "abcdef123"), reasoning_content="I should look at the clock."),
        result("12:00", "abcdef123", "now"),
        {**REASONED, "reasoning_content": "It is noon."},
        MORE,
    ],
    "text and call": [
        HI,
        calls(call("now", {}, "abcdef123"), content="I look."),
        result("12:00", "abcdef123", "now"),
    ],
    "arguments as JSON": [HI, calls(call("get_weather", json.dumps(CITY), "abcdef123"))],
    "no content": [HI, calls(call("now", {}, "abcdef123"), content=None)],
    "content in parts": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]}
    ],
    "developer": [{"role": "developer", "content": "Be kind."}, HI],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "no prompt": {"add_generation_prompt": False},
    "thinks": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
    "does not think": {"enable_thinking": False, "thinking": False, "tools": TOOLS},
    "dated": {"date_string": "26 Jul 2024", "tools": TOOLS, "tools_in_user_message": False},
}
CASES = (
    *(("plain", name) for name in ("one", "system", "turns", "thoughts in the text", "developer")),
    *(("no prompt", name) for name in ("ends with an answer", "after a result")),
    *(("thinks", name) for name in ("reasoning", "thought and call")),
    *(("does not think", name) for name in ("reasoning", "a result")),
    *(("tools", name) for name in ("a call", "two calls", "text and call", "content in parts")),
    *(("dated", name) for name in ("arguments as JSON", "no content")),
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def compiled(template: str) -> jinja2.Template:
    """A template in jinja2 with the options and functions of transformers."""

    def tojson(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **more)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(re.sub(r"\{%-? (end)?generation -?%\}", "", template))


def unbounded(template: jinja2.Template, messages: Messages, options: dict[str, Any]) -> str:
    """The text, or REFUSED; transformers gives tools and documents always."""
    given = {"tools": None, "documents": None, "add_generation_prompt": True, **TOKENS, **options}
    try:
        return template.render(messages=messages, **given)
    except (jinja2.TemplateError, TypeError, RecursionError):
        return REFUSED


def bounded(template: str, messages: Messages, options: dict[str, Any]) -> str:
    """The text, or REFUSED; where a bound refuses, its words."""
    try:
        return render(template, messages, **TOKENS, **options)
    except SparseKVError as error:
        return str(error) if "stopped" in str(error) else REFUSED


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_as_jinja2_renders_them(path):
    """Within bounds; texts that are covered, rendered and lifted are what they are without."""
    template = path.read_text(encoding="utf-8")
    plain = compiled(template)
    controls = {"<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|endoftext|>"}
    controls |= set(re.findall(r"<\|[a-z_]+\|>|<[a-z_]+_of_turn>|\[/?[A-Z_]+\]", template))
    n_rendered = 0
    for options_name, name in CASES:
        messages, options = CONVERSATIONS[name], OPTIONS[options_name]
        expected = unbounded(plain, messages, options)
        cover = Cover(controls, template, [*messages, *options.get("tools", ())])
        covered = {**options, "tools": cover.value(options.get("tools"))}
        found = cover.lift(bounded(template, cover.messages(messages), covered))
        assert found == expected, (name, options_name)
        if name in UNCOVERED or expected == REFUSED:
            assert bounded(template, messages, options) == expected
        n_rendered += expected != REFUSED
    assert n_rendered >= 5, "it takes some of the conversations"
