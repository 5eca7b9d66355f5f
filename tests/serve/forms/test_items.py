"""Items of the Responses API: messages of a conversation, and parts of an answer."""

from __future__ import annotations

import pytest

from sparsekv_cli.generation.fields import FieldError
from sparsekv_cli.models.chat.calls import Text, Thought, ToolCall
from sparsekv_cli.serve.forms.items import OutputItems, read_items


def test_turns_become_messages() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "wait"}]}
    result = {"type": "function_call_output", "call_id": "a", "output": "1"}
    messages = read_items([thought, said, call, {**call, "call_id": "b"}, result, thought, said])
    assert [each["role"] for each in messages] == ["assistant", "tool", "assistant"]
    assert [each["id"] for each in messages[0]["tool_calls"]] == ["a", "b"]
    assert messages[0]["content"] == messages[2]["content"] == "wait"
    assert messages[0]["reasoning_content"] == messages[2]["reasoning_content"] == "hm"
    with pytest.raises(FieldError, match=r"input\[0\]\.role"):
        read_items([said, {"role": "x"}], 1)


def test_white_space_begins_no_message() -> None:
    output = OutputItems(encrypts=False)
    parts = [Thought("a"), Text("\n"), Text("\nb"), Text("\n"), ToolCall("f", "{}"), Text(" ")]
    events = [each for part in parts for each in output.add(part)] + list(output.end("completed"))
    assert [each["type"] for each in output.items] == ["reasoning", "message", "function_call"]
    assert output.items[1]["content"][0]["text"] == "\n\nb\n"
    assert sum(kind == "output_item.done" for kind, _ in events) == 3
    blank = OutputItems(encrypts=False)
    assert not list(blank.add(Text("\n"))) and list(blank.end("incomplete"))
    assert blank.items[0]["content"][0]["text"] == "\n"
