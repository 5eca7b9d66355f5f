"""A template that opens the thinking, wants short ids and one system message: both protocols."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

# Of DeepSeek R1's family, whose thinking no variable switches off; with Mistral's ids of calls.
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('First!') }}{% endif %}"
    "{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('Nine letters.') }}{% endif %}"
    "{% for key, value in c.function.arguments | items %}{{ key }}={{ value }}{% endfor %}"
    "{% endfor %}"
    "<|im_start|>{{ m.role }}: {{ m.content }}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
)
ASKED = [{"role": "user", "content": "hello there"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
          "additionalProperties": False,
          "x-guidance": {"whitespace_pattern": " ?"}}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
USE = {"name": "add", "input_schema": SCHEMA}


@pytest.fixture(scope="module")
def ask(serve: Callable[..., Any]) -> Callable[..., Any]:
    url = serve(template=TEMPLATE).url

    def post(path: str = "chat/completions", status: int = 200, **fields: Any) -> Any:
        most = {} if path.endswith("count_tokens") else {"max_tokens": 150}
        body = {"messages": ASKED, **most, **fields}
        response = httpx.post(f"{url}/v1/{path}", json=body, timeout=240)
        assert response.status_code == status, response.text
        return response.text if fields.get("stream") else response.json()

    return post


def streamed(text: str, key: str) -> str:
    """The texts of the events of a stream with a key in their delta."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [each["choices"][0]["delta"] for each in events if each.get("choices")]
    deltas += [each["delta"] for each in events if each.get("type") == "content_block_delta"]
    return "".join(delta.get(key) or "" for delta in deltas)


def test_a_schema_holds_behind_the_thinking(ask: Callable[..., Any]) -> None:
    for budget in ({}, {"think_budget": 0}, {"think_budget": 5}):
        message = ask(response_format=FORMAT, **budget)["choices"][0]["message"]
        assert json.loads(message["content"]) in ({"a": 1}, {"a": 2})
        assert ("reasoning_content" in message) == (budget != {"think_budget": 0})
    text = ask(response_format=FORMAT, stream=True)
    assert json.loads(streamed(text, "content")) in ({"a": 1}, {"a": 2})
    assert streamed(text, "reasoning_content")
    object_of_any = ask(response_format={"type": "json_object"}, max_tokens=20)
    assert object_of_any["choices"][0]["message"]["content"].startswith("{")
    blocks = ask("messages", json_schema=SCHEMA)["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert json.loads(blocks[1]["text"]) in ({"a": 1}, {"a": 2})
    text = ask("messages", json_schema=SCHEMA, stream=True)
    assert json.loads(streamed(text, "text")) in ({"a": 1}, {"a": 2})


def test_anthropics_budget_and_switch(ask: Callable[..., Any]) -> None:
    thinking: dict[str, Any] = {"type": "enabled", "budget_tokens": 7}
    (thought, answer) = ask("messages", thinking=thinking, regex="yes")["content"]
    assert answer["text"] == "yes" and 1 <= len(thought["thinking"]) < 60
    off = ask("messages", thinking={"type": "disabled"}, max_tokens=20)["content"]
    assert "thinking" not in [block["type"] for block in off]


def test_calls_and_their_second_turn(ask: Callable[..., Any]) -> None:
    message = ask(tools=[TOOL], tool_choice="required")["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})
    for identity in (call["id"], "call_0123456789abcdef0123456789", "x", None):
        answered = {**message, "tool_calls": [{**call, "id": identity}]}
        turns = [*ASKED, answered, {"role": "tool", "tool_call_id": identity, "content": "2"}]
        assert ask(messages=turns, tools=[TOOL])["choices"]
    choice = {"type": "any"}
    (block,) = ask("messages", tools=[USE], tool_choice=choice)["content"]
    assert block["input"] in ({"a": 1}, {"a": 2})
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "2"}
    for each in (block, {**block, "id": "toolu_01A09q90qw90lq917835lq9"}, {**block, "input": None}):
        turns = [*ASKED, {"role": "assistant", "content": [each]}]
        turns.append({"role": "user", "content": [{**result, "tool_use_id": each["id"]}]})
        assert ask("messages", messages=turns, tools=[USE])["content"]


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}])
def test_arguments_of_the_history_that_are_none(ask: Callable[..., Any], arguments: Any) -> None:
    called = {"function": {"name": "add", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [called]}
    assert ask(messages=[*ASKED, asked, {"role": "tool", "content": "1"}])["choices"]


@pytest.mark.parametrize("arguments", ["{", "[1]", "5", "{'a': 1}", [1], True, "[" * 9999])
def test_broken_arguments_are_named(ask: Callable[..., Any], arguments: Any) -> None:
    called = {"id": "x", "function": {"name": "add", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [called]}
    error = ask(status=400, messages=[*ASKED, asked])["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    assert "expected a JSON object" in error["message"] and "TypeError" not in error["message"]
    block = {"type": "tool_use", "id": "x", "name": "add", "input": arguments}
    turns = [*ASKED, {"role": "assistant", "content": [block]}]
    error = ask("messages", status=400, messages=turns)["error"]
    assert error["message"].startswith("messages[1].content[0].input: expected an object")


def test_what_claude_code_sends(ask: Callable[..., Any]) -> None:
    reference = {"type": "tool_reference", "tool_name": "add"}
    found = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference]}
    used = {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"query": "add"}}
    turns = [
        *ASKED,
        {"role": "system", "content": [{"type": "text", "text": "Now be brief."}]},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [found, {"type": "text", "text": "and?"}]},
    ]
    given = {"messages": turns, "system": "Be kind.", "tools": [USE]}
    assert ask("messages", **given)["content"] is not None
    more = ask("messages/count_tokens", **given)["input_tokens"]
    del turns[1]
    assert more > ask("messages/count_tokens", **given)["input_tokens"]
    reference["tool_name"] = None  # type: ignore[assignment]
    error = ask("messages", status=400, **given)["error"]
    assert "expected a tool_reference with a tool_name" in error["message"]


def test_an_answer_that_goes_on(ask: Callable[..., Any]) -> None:
    begun = [*ASKED, {"role": "assistant", "content": "The answer is"}]
    went_on = ask(messages=begun, regex=" 42!")["choices"][0]["message"]
    assert went_on == {"role": "assistant", "content": " 42!"}
    n_tokens = ask(messages=begun, max_tokens=1)["usage"]["prompt_tokens"]
    new = {"messages": begun, "max_tokens": 1, "continue_final_message": False}
    assert ask(**new)["usage"]["prompt_tokens"] != n_tokens
    header = ask(messages=ASKED, max_tokens=1, add_generation_prompt=False)
    with_header = ask(messages=ASKED, max_tokens=1)
    assert header["usage"]["prompt_tokens"] < with_header["usage"]["prompt_tokens"]
    assert ask("messages", messages=begun, regex=" 42!")["content"][0]["text"] == " 42!"
    for fields in (
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True},
        {"continue_final_message": "yes"},
        {"messages": begun, "think_budget": 5},
    ):
        assert ask(status=400, **fields)["error"]["param"]
