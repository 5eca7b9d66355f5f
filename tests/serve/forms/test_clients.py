"""Fields that known clients send: those without an effect are left out, and are counted once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_tokenizer
from conftest import TEMPLATE
from tiny_models import make_model
from tiny_sequences import SHAPE

from sparsekv_cli.generation.fields import FieldError, names_of, read_fields
from sparsekv_cli.generation.messages import read_messages
from sparsekv_cli.models.chat.calls import ToolCall
from sparsekv_cli.serve.forms.clients import CLIENTS, HOSTED_TOOLS, LEFT_OUT, without_unused
from sparsekv_cli.serve.forms.items import OutputItems, read_items
from sparsekv_cli.serve.forms.offers import ResponseTool, ToolFields, custom_input, offers_of
from sparsekv_cli.serve.forms.openapi import PATHS
from sparsekv_cli.serve.forms.schema import MessageTool
from sparsekv_cli.serve.forms.tools import HERMES_MARKS

CHAT, COMPLETE, MESSAGE, COUNT, RESPOND = (path for path, _, _ in PATHS[:5])
ASKED = [{"role": "user", "content": "hello there"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED, "max_tokens": 4},
    COMPLETE: {"prompt": "hello", "max_tokens": 4},
    MESSAGE: {"messages": ASKED, "max_tokens": 4},
    COUNT: {"messages": ASKED},
    RESPOND: {"input": "hello", "max_output_tokens": 4},
}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Others.",
    "tools": [{"type": "function", "name": "wait", "parameters": {"type": "object"}}],
}
INNER = ("tools", "reasoning", "text", "output_config", "stream_options")
OURS = [PATCH, AGENTS, {"type": "local_shell"}]
HOSTED = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}]
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)


def as_value(path: str) -> dict[str, Any]:
    """Returns a request with the field at a path, and with a tool that it may belong to."""
    first, _, inner = path.partition(".")
    value: Any = "x" if not inner else as_value(inner)
    if first.endswith("[]"):
        tool = {"type": "function", "name": "f"}
        return {first[:-2]: [{**(AGENTS if "[]" in inner else tool), **value}]}
    return {first: value}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve(template=PLAIN)  # it knows neither thoughts nor tools


@pytest.fixture(scope="module")
def post(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=240) as client:

        def send(path: str, **fields: Any) -> tuple[int, Any]:
            answer = client.post(path, json={**LEAST[path], **fields})
            return answer.status_code, answer.json()

        yield send


TAKEN: list[tuple[str, dict[str, Any]]] = [
    (RESPOND, {"client_metadata": {"session": "x"}, "prompt_cache_retention": "24h"}),
    (RESPOND, {"reasoning": {"effort": "high", "summary": "detailed"}}),
    (RESPOND, {"text": {"verbosity": "low"}, "truncation": "auto", "top_logprobs": 0}),
    (RESPOND, {"input": []}),
    (RESPOND, {"input": [], "instructions": "Be brief."}),
    (RESPOND, {"include": ["file_search_call.results", "reasoning.encrypted_content"]}),
    (RESPOND, {"stream_options": {"include_obfuscation": True}, "max_tool_calls": 3}),
    (RESPOND, {"tools": HOSTED}),
    (RESPOND, {"input": [*ASKED, {"type": "item_reference", "id": "msg_1"}]}),
    (CHAT, {"store": True, "verbosity": "low", "cache_prompt": True, "stop": [""]}),
    (CHAT, {"max_tokens": 5.0, "top_k": 40.0, "n": 1.0, "seed": 7.0}),
    (CHAT, {"reasoning_effort": "high"}),
    (CHAT, {"reasoning_effort": "none"}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"stream_options": {"include_usage": True}, "return_progress": True}),
    (CHAT, {"top_logprobs": 0, "parallel_tool_calls": True, "modalities": ["text"]}),
    (CHAT, {"provider": {"order": ["x"]}, "transforms": [], "keep_alive": -1, "options": {}}),
    (CHAT, {"tools": None, "tool_choice": None, "stop": None, "anything": None}),
    (COMPLETE, {"max_tokens": None, "n_predict": 3, "stop": ""}),
    (MESSAGE, {"thinking": {"type": "disabled"}, "betas": ["x"], "mcp_servers": [{}]}),
    (MESSAGE, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    (MESSAGE, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    (MESSAGE, {"output_config": {"effort": "high"}}),
    (COUNT, {"max_tokens": 10, "stream": True, "temperature": 1, "stop_sequences": ["x"]}),
]


@pytest.mark.parametrize(("path", "fields"), TAKEN, ids=[str(i) for i in range(len(TAKEN))])
def test_what_changes_nothing_is_no_error(post: Any, path: str, fields: dict[str, Any]) -> None:
    status, body = post(path, **fields)
    assert status == 200, body


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"temprature": 1}, "temprature"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"guided_json": {}}, "guided_json"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions: no such field: use tools"),
    (CHAT, {"function_call": "auto"}, "function_call: no such field: use tool_choice"),
    (CHAT, {"max_tokens": 5.5}, "max_tokens"),
    (CHAT, {"max_tokens": 5, "n_predict": 5}, "n_predict"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "thinking"),
    (CHAT, {"tools": [{"type": "custom"}]}, "tools"),
    (RESPOND, {"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "needs a definition"),
    (RESPOND, {"tools": [{**PATCH, "format": {"definition": "start: /a/"}}]}, "definition"),
    (RESPOND, {"tools": [{**PATCH, "format": {**PATCH["format"], "syntax": "ebnf"}}]}, "syntax"),
    (RESPOND, {"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    (RESPOND, {"tools": HOSTED, "tool_choice": "required"}, "tool_choice"),
    (RESPOND, {"response_format": {"type": "json_object"}}, "response_format"),
    (MESSAGE, {"tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
    (COUNT, {"temprature": 1}, "temprature"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "word"), REFUSED)
def test_what_a_client_relies_on_is_refused(
    post: Any, path: str, fields: dict[str, Any], word: str
) -> None:
    status, body = post(path, **fields)
    assert status == 400 and word in body["error"]["message"], body


def test_a_field_is_counted_always_and_logged_once(post: Any, server: Any) -> None:
    for _ in range(3):
        assert post(CHAT, safe_prompt=None, route="x", reasoning_effort="low")[0] == 200
    lines = [line for line in server.log if line.endswith(": route")]
    assert lines == ["requests have a field that has no effect here: route"]
    assert sum(line.endswith(": reasoning_effort") for line in server.log) == 1
    text = httpx.get(f"{server.url}/metrics").text
    assert 'sparsekv_unused_fields_total{field="route"} 3.0' in text


def test_a_grammar_of_a_custom_tool_is_told_and_logged_once(post: Any, server: Any) -> None:
    inner = {**AGENTS, "tools": [PATCH]}
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    custom = {"type": "custom", "custom": {"name": "word", "format": regex}}
    free = {"type": "custom", "name": "free", "format": {"type": "text"}}
    for _ in range(2):
        for path, tool in ((RESPOND, PATCH), (RESPOND, inner), (RESPOND, free), (CHAT, custom)):
            assert post(path, tools=[tool])[0] == 200
    lines = [line for line in server.log if line.endswith("format")]
    paths = ("tools[].format", "tools[].tools[].format", "tools[].custom.format")
    words = "requests have a field that the model is told and not bound by:"
    assert sorted(lines) == sorted(f"{words} {path}" for path in paths)
    told = read_fields(ToolFields, custom).as_function.description
    assert told.endswith("The input fits this regular expression:\n[a-z]+")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": "*** Begin"}, "*** Begin"),
        ({"input": "a", "path": "b"}, "a"),
        ({"patch": "*** Begin"}, "*** Begin"),
        ({}, ""),
        ({"patch": "a", "path": "b"}, '{"patch": "a", "path": "b"}'),
        ({"n": 5}, '{"n": 5}'),
        (["a"], '["a"]'),
    ],
)
def test_the_input_of_a_custom_tool(arguments: Any, text: str) -> None:
    assert custom_input(json.dumps(arguments)) == text


def test_every_known_field_can_be_sent_on_every_path() -> None:
    for path, _, kind in PATHS[:5]:
        for field in LEFT_OUT:
            if field in names_of(kind) or field.startswith(INNER):
                continue  # the objects of inner fields belong to some protocols only
            values, names = without_unused(kind, {**LEAST[path], **as_value(field)})
            read_fields(kind, values)
            assert names == {field}, path
    kind = PATHS[4][2]
    for field in (each for each in LEFT_OUT if each.startswith(("tools", "reasoning", "text"))):
        values, names = without_unused(kind, {**LEAST[RESPOND], **as_value(field)})
        assert names == {field}
        read_fields(kind, values)
    odd = {"tools": [1, None, {"type": [1]}, {"type": "web_search_x"}], "reasoning": 3, "text": []}
    values, names = without_unused(kind, odd)
    assert values["tools"] == odd["tools"][:3] and names == {"tools[].type: web_search"}


def test_refused_fields_are_in_no_model_that_takes_all_values() -> None:
    for client in CLIENTS:
        for field in client.refused:
            assert field not in LEFT_OUT
            with pytest.raises(FieldError):
                for path in (CHAT, COMPLETE, RESPOND):
                    kind = next(kind for each, _, kind in PATHS if each == path)
                    read_fields(kind, {**LEAST[path], field: {"x": 1}})


def test_the_page_has_the_fields_of_all_clients() -> None:
    page = Path(__file__).parents[3].joinpath("docs/serve.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", page, re.MULTILINE))
    for client in CLIENTS:
        told = [re.findall(r"`([^`]+)`", cell) for cell in rows[client.name].split(" | ")]
        assert told == [[*client.left_out], [*client.refused]], client.name
    assert re.findall(r"`([^`]+)`", rows["Tools"]) == [*HOSTED_TOOLS]


def test_tools_that_are_no_functions() -> None:
    """A call goes out in its tool's own form, and comes back as the same call."""
    offers = offers_of([read_fields(ResponseTool, tool) for tool in OURS])
    functions = {tool.as_function.name: tool.as_function for _, tool in offers}
    assert [*functions] == ["apply_patch", "agents__wait", "local_shell"]
    assert "start: /.+/" in functions["apply_patch"].description
    named = dict(zip(functions, (offer for offer, _ in offers), strict=True))
    output = OutputItems(encrypts=False, offers=named)
    given = [{"input": "*** Begin\n"}, {"for": 3}, {"command": ["ls", "-l"], "timeout_ms": 9}]
    calls = [ToolCall(n, json.dumps(a)) for n, a in zip(functions, given, strict=True)]
    events = [each for call in calls for each in output.add(call)]
    patch, wait, shell = output.items
    assert (patch["type"], patch["input"]) == ("custom_tool_call", "*** Begin\n")
    assert (wait["type"], wait["namespace"], wait["name"]) == ("function_call", "agents", "wait")
    assert shell["action"] == {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9}
    kinds = [kind for kind, _ in events]
    assert kinds[1:3] == ["custom_tool_call_input.delta", "custom_tool_call_input.done"]
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "done"}
        for item in output.items
    ]
    messages = read_items([*output.items, *results])
    read = [call["function"] for call in messages[0]["tool_calls"]]
    assert [each["name"] for each in read] == [*functions]
    assert [each["arguments"] for each in read] == given
    assert [each["role"] for each in messages] == ["assistant", "tool", "tool", "tool"]


def test_a_custom_tool_of_a_chat(serve: Callable[..., Any]) -> None:
    server = serve()
    tool = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
    asked = {
        "messages": ASKED, "tools": [tool], "max_tokens": 64,
        "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
    }  # fmt: skip
    answer = httpx.post(server.url + CHAT, json=asked, timeout=240).json()
    (call,) = answer["choices"][0]["message"].get("tool_calls") or [{}]
    if call:  # a call that max_tokens cuts is text
        assert call["type"] == "custom" and isinstance(call["custom"]["input"], str)
    call = {"id": "a", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    more = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    again = {**asked, "messages": [*ASKED, *more, *ASKED], "tool_choice": "auto"}
    assert httpx.post(server.url + CHAT, json=again, timeout=240).status_code == 200


KNOWN = [
    ("bash_20250124", "bash", ()),
    ("text_editor_20250728", "str_replace_based_edit_tool", ("view", "create", "insert")),
    ("memory_20250818", "memory", ("delete", "rename")),
]


@pytest.mark.parametrize(("kind", "name", "commands"), KNOWN)
def test_tools_whose_form_anthropic_describes(
    serve: Callable[..., Any], kind: str, name: str, commands: tuple[str, ...]
) -> None:
    """The model is told them, and its call comes back as that of a function."""
    tool = read_fields(MessageTool, {"type": kind, "name": name, "max_characters": 9})
    shown = json.dumps(tool.input_schema)
    assert tool.description and "command" in shown and all(each in shown for each in commands)
    asked = {**LEAST[COUNT], "tools": [{"type": kind, "name": name}]}
    with httpx.Client(base_url=serve(template=PLAIN, ctx_size=2048).url, timeout=60) as client:
        n = [client.post(COUNT, json=each).json()["input_tokens"] for each in (LEAST[COUNT], asked)]
        assert n[1] > n[0] + 20
        asked |= {"tool_choice": {"type": "tool", "name": name}, "max_tokens": 64}
        answer = client.post(MESSAGE, json=asked)
    assert answer.status_code == 200, answer.text
    for block in answer.json()["content"]:  # max_tokens may cut the call
        assert block["type"] == "text" or block["name"] == name


def test_thoughts_of_earlier_messages_under_each_name(post: Any) -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        (message,) = read_messages([{"role": "assistant", "content": "x", name: "hm"}])
        assert message["reasoning_content"] == "hm"


@pytest.mark.parametrize("path", [CHAT, MESSAGE, RESPOND])
def test_tools_that_must_not_be_called(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The tools stay in the prompt, whose rows are there, and the tokens of calls are banned."""
    known = (*tiny_tokenizer.SPECIAL_TOKENS, *HERMES_MARKS)
    with monkeypatch.context() as patch:
        patch.setattr(tiny_tokenizer, "SPECIAL_TOKENS", known)
        file = make_model(tmp_path / "model.gguf", **SHAPE, chat_template=TEMPLATE)
    bias = {str(known.index("<tool_call>")): 100}
    tool: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    choices: list[Any] = ["auto", "none"]
    if path == MESSAGE:
        tool = {"name": "add", "input_schema": tool["parameters"]}
        choices = [{"type": choice} for choice in choices]
    elif path == CHAT:
        tool = FUNCTION
    for files in ([file], []):  # the other model has no such tokens
        server, told, n = serve(files=files), list[str](), list[int]()
        for choice in choices:
            asked = {**LEAST[path], "tools": [tool], "tool_choice": choice}
            asked |= {"logit_bias": bias} if files else {}
            told.append(httpx.post(server.url + path, json=asked, timeout=60).text)
            usage = json.loads(told[-1])["usage"]
            keys = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
            n.append(sum(usage.get(key, 0) for key in keys))
        texts = ["<tool_call>" in text for text in told]
        assert texts == ([True, False] if files else [False, False])
        assert n[0] == n[1] if files else n[0] > n[1]
