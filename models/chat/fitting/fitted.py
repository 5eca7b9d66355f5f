"""Converts a conversation to the form that one chat template accepts. Nothing of it is lost."""

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
    """A conversation for one template."""

    messages: Messages
    tools: Tools  # None: the messages describe them, or there are none


def fitted(
    template: str | None, messages: Sequence[Mapping[str, Any]], tools: Tools = None
) -> FittedConversation:
    """Returns a conversation in the form that the template accepts.

    System messages stay in their places, as the user's text where the template takes none there.
    Calls get the form that the template accepts. Calls without an id, and their results, get an id.
    A template that does not write tools, calls or results gets them as texts.
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
    """Returns a conversation of two roles that take turns, for a template that refuses others."""
    result = [dict(message) for message in messages]
    result = with_result_texts(with_call_texts(result, hermes_calls))
    result = with_tools(result, tools) if tools else result
    told = [{**m, "role": "user"} if m.get("role") != "assistant" else m for m in result]
    return FittedConversation(in_turns(None, told, strict=True), None)


def _with_texts(template: str | None, messages: Messages) -> Messages:
    return with_result_texts(with_call_texts(messages, hermes_calls))


def _with_own_calls(template: str | None, messages: Messages) -> Messages:
    """Returns a conversation with calls and results as the template writes them."""
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
    """Returns a conversation in which every result follows its call, or a result that does.

    Any other result becomes a text of the user.
    """
    result: Messages = []
    follows = False
    for message in messages:
        follows = bool(message.get("tool_calls")) or (follows and message.get("role") == "tool")
        result += [message] if follows else with_result_texts([message])
    return result


def _on_channels(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as gpt-oss' template takes it: one thought before a call."""
    thought, text = message.get("reasoning_content"), message["content"]
    if not thought:
        return dict(message)
    if text and message.get("tool_calls"):
        return {**message, "content": f"{thought}\n\n{text}"}
    return {**message, "thinking": thought}
