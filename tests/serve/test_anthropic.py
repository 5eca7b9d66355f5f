"""Anthropic's protocol, by its own client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

TOO_LONG = r"prompt is too long: \d+ tokens > 512 maximum"  # Claude Code shortens then
ASKED = [{"role": "user", "content": "hello there"}]
TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALL = r'I add\.<tool_call>\{"name": "add", "arguments": \{"a": 1\}\}</tool_call>'


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """Imported when it is needed: it takes two seconds."""
    return import_module("anthropic")


@pytest.fixture(scope="module")
def client(serve: Callable[..., Any], anthropic: Any) -> Iterator[Any]:
    url = serve().url
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, **options: Any) -> Any:
    return client.messages.create(**{"model": "any", "max_tokens": 8, "messages": ASKED, **options})


def streamed(client: Any, **options: Any) -> Any:
    given = {"model": "any", "max_tokens": 8, "messages": ASKED, **options}
    with client.messages.stream(**given) as stream:
        return stream.get_final_message()


def test_a_stream_has_the_text_of_the_whole(client: Any) -> None:
    whole = ask(client, system="be brief")
    again = streamed(client, system=[{"type": "text", "text": "be brief"}])
    assert [block.text for block in whole.content] == [block.text for block in again.content]
    assert whole.stop_reason == again.stop_reason == "max_tokens"
    assert again.usage.cache_read_input_tokens == whole.usage.input_tokens > 0
    assert whole.usage.output_tokens == 8
    spaced: dict[str, Any] = {"messages": [*ASKED, {"role": "assistant", "content": "x"}]}
    spaced |= {"max_tokens": 20, "extra_body": {"regex": "\n\n yes"}}
    assert [each(client, **spaced).content[0].text for each in (ask, streamed)] == ["\n\n yes"] * 2


def test_tools_and_thinking(client: Any) -> None:
    calls = {"regex": CALL, "think_budget": 0}
    options: dict[str, Any] = {"tools": [TOOL], "extra_body": calls, "max_tokens": 90}
    for answer in (ask(client, **options), streamed(client, **options)):
        text, call = answer.content
        assert text.text == "I add." and answer.stop_reason == "tool_use"
        assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 1})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    turns = [*ASKED, {"role": "assistant", "content": answer.content}]
    assert ask(client, messages=[*turns, {"role": "user", "content": [result]}]).content
    thought: dict[str, Any] = {"extra_body": {"regex": "<think>well</think>yes", "think_budget": 0}}
    thought["max_tokens"] = 40
    for answer in (ask(client, **thought), streamed(client, **thought)):
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[1].text) == ("well", "yes")


def test_stops_counts_and_errors(client: Any, anthropic: Any) -> None:
    stopped = ask(client, stop_sequences=["!"], extra_body={"regex": "yes!"})
    assert stopped.stop_reason == "stop_sequence" and stopped.content[0].text == "yes"
    assert stopped.stop_sequence == "!" and ask(client).stop_sequence is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        forced = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 90}
        for answer in (ask(client, **forced), streamed(client, **forced)):
            assert [block.name for block in answer.content] == ["add"]
            assert answer.stop_reason == "tool_use" and answer.stop_sequence is None
    count = client.messages.count_tokens(model="any", messages=ASKED)
    usage = ask(client).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="type tool, and no other, needs a name"):
        ask(client, tools=[TOOL], tool_choice={"type": "tool"})
    with pytest.raises(anthropic.BadRequestError, match="choose from full"):
        ask(client, extra_body={"method": "none"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content: is missing"):
        ask(client, messages=[{"role": "user", "text": "a"}])
    with pytest.raises(anthropic.BadRequestError, match=TOO_LONG) as info:
        ask(client, messages=[{"role": "user", "content": "long " * 600}])
    assert info.value.body["error"]["type"] == "invalid_request_error"
