"""Writes tools, calls and results as texts, for chat templates that do not write them.

A call stands between ``<tool_call>`` and ``</tool_call>``, as Qwen and Hermes write it. If a
template names other marks for calls, these are used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from sparsekv_cli.models.chat.fitting.probes import Messages, said

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
FUNCTION_LIST = """\
You can call these functions. Each line between the marks describes one as JSON.
<tools>
{tools}
</tools>

To call a function, write only its name and its arguments as JSON between these marks:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
The function's result comes next, between <tool_response> and </tool_response>.
If you need no function, answer without these marks."""

Calls = Sequence[Mapping[str, Any]]


def with_tools(messages: Messages, tools: Sequence[Any]) -> Messages:
    """Returns a conversation whose first system message also describes the tools."""
    lines = "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
    return with_system(messages, FUNCTION_LIST.format(tools=lines))


def with_system(messages: Messages, text: str, **fields: Any) -> Messages:
    """Returns a conversation with ``text`` and ``fields`` added to its first system message."""
    has_system = bool(messages) and messages[0].get("role") == "system"
    first = messages[0] if has_system else said("system", "")
    content = "\n\n".join(filter(None, (first["content"], text)))
    return [{**first, "content": content, **fields}, *messages[has_system:]]


def with_tools_field(messages: Messages, tools: Sequence[Any]) -> Messages:
    """Returns a conversation whose first system message has the tools in a field (Phi-4-mini)."""
    described = json.dumps([_function(tool) for tool in tools], ensure_ascii=False)
    return with_system(messages, "", tools=described)


def with_call_texts(messages: Messages, write: Callable[[Calls], str]) -> Messages:
    """Returns a conversation in which ``write`` has added each message's calls to its text."""
    result: Messages = []
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = "\n".join(filter(None, (message["content"], write(calls))))
        result.append(message)
    return result


def with_result_texts(messages: Messages) -> Messages:
    """Returns a conversation with results as texts of the user; neighbours become one message."""
    result: Messages = []
    for is_result, group in groupby(messages, lambda message: message.get("role") == "tool"):
        if is_result:
            told = (f"{RESULT}\n{message['content']}\n{RESULT_END}" for message in group)
            result.append(said("user", "\n".join(told)))
        else:
            result += group
    return result


def call_writer(template: str | None) -> Callable[[Calls], str]:
    """Returns the function that writes calls in the format that the template names."""
    words = template or ""
    return next((write for sign, write in WRITERS.items() if sign in words), hermes_calls)


def hermes_calls(calls: Calls) -> str:
    """Returns ``<tool_call>``, a JSON object and ``</tool_call>`` for each call."""
    return "\n".join(f"{CALL}\n{_object(call)}\n{CALL_END}" for call in calls)


def _listed_calls(calls: Calls) -> str:
    """Returns ``<|tool_call|>`` and a list of JSON objects (Granite)."""
    return f"<|tool_call|>[{', '.join(map(_object, calls))}]"


def _enclosed_calls(calls: Calls) -> str:
    """Returns ``<|tool_call|>``, a list of JSON objects and ``<|/tool_call|>`` (Phi-4-mini)."""
    return f"{_listed_calls(calls)}<|/tool_call|>"


def _python_calls(calls: Calls) -> str:
    """Returns ``<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>`` (LFM2)."""
    written = []
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        values = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
        written.append(f"{name}({values})")
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


# Text in a template -> the function that writes calls in its model's format.
WRITERS = {
    "<|/tool|>": _enclosed_calls,
    "<|tool_call|>": _listed_calls,
    "List of tools: ": _python_calls,
}


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _object(call: Mapping[str, Any]) -> str:
    return json.dumps(_function(call), ensure_ascii=False)


def _function(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", tool)
