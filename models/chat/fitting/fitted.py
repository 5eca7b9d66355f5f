"""Converts a conversation to the form that one chat template accepts, without losing any of it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sparsekv_cli.models.chat.fitting.call_forms import call_form, with_calls
from sparsekv_cli.models.chat.fitting.probes import (
    Messages,
    place_of_tools,
    writes_results,
)
from sparsekv_cli.models.chat.fitting.roles import beside_calls, in_turns, with_systems
from sparsekv_cli.models.chat.fitting.tool_texts import (
    call_writer,
    hermes_calls,
    with_call_texts,
    with_result_texts,
    with_tools,
    with_tools_field,
)
from sparsekv_cli.models.chat.thinking import CHANNELS

Tools = Sequence[Mapping[str, Any]] | None


class FittedConversation(NamedTuple):
    """A conversation in the form for one template."""

    messages: Messages
    tools: Tools  # None: the messages describe the tools, or there are no tools


def fitted(
    template: str | None, messages: Sequence[Mapping[str, Any]], tools: Tools = None
) -> FittedConversation:
    """Returns a conversation in the form that the template accepts.

    System messages stay in their places. Where the template accepts none, they become the user's
    text. Calls get the form that the template accepts. Calls without an id, and their results, get
    an id. If a template does not write tools, calls or results, they become texts.
    """
    result = [dict(message) for message in messages]
    if any(message.get("tool_calls") or message.get("role") == "tool" for message in result):
        result = beside_calls(result)
        is_general = bool(tools) and not place_of_tools(template)
        result = _with_texts(template, result) if is_general else _with_own_calls(template, result)
    place = place_of_tools(template) if tools else "tools"
    if place == "system":
        result, tools = with_tools_field(result, tools or ()), None
    elif not place:
        result, tools = with_tools(result, tools or ()), None
    if CHANNELS[0] in (template or ""):
        result = [_on_channels(message) for message in result]
    return FittedConversation(in_turns(template, with_systems(template, result)), tools)


def flattened(messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> FittedConversation:
    """Returns a conversation in which user and assistant take turns and no other role exists.

    It is for templates that refuse ``fitted``'s result.
    """
    result = [dict(message) for message in messages]
    result = with_result_texts(with_call_texts(result, hermes_calls))
    result = with_tools(result, tools) if tools else result
    told = [{**m, "role": "user"} if m.get("role") != "assistant" else m for m in result]
    return FittedConversation(in_turns(None, told, strict=True), None)


def _with_texts(template: str | None, messages: Messages) -> Messages:
    return with_result_texts(with_call_texts(messages, hermes_calls))


def _with_own_calls(template: str | None, messages: Messages) -> Messages:
    """Returns a conversation with calls and results in the way that the template writes them."""
    form = call_form(template)
    if form is not None:
        messages = with_calls(messages, form)
        return messages if writes_results(template) else _with_lost_results(messages)
    messages = with_call_texts(messages, call_writer(template))
    if not writes_results(template):
        return with_result_texts(messages)
    if place_of_tools(template) == "system":
        return [{**m, "role": "tool_response"} if m["role"] == "tool" else m for m in messages]
    return messages


def _with_lost_results(messages: Messages) -> Messages:
    """Returns a conversation in which results only follow calls or other results.

    A result in another place becomes a text of the user.
    """
    result: Messages = []
    follows = False
    for message in messages:
        follows = bool(message.get("tool_calls")) or (follows and message.get("role") == "tool")
        result += [message] if follows else with_result_texts([message])
    return result


def _on_channels(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message for gpt-oss' template, which accepts one thought before a call."""
    thought, text = message.get("reasoning_content"), message["content"]
    if not thought:
        return dict(message)
    if text and message.get("tool_calls"):
        return {**message, "content": f"{thought}\n\n{text}"}
    return {**message, "thinking": thought}
