"""The order of roles: conversations in an order that one chat template accepts.

A later message never changes the text of an earlier turn. So a prompt that grew keeps its
beginning. Only neighbours that a template does not take become one message.
"""

from collections.abc import Mapping
from typing import Any

from sparsekv_cli.models.chat.fitting.probes import (
    Messages,
    alternates,
    ends_thinking,
    needs_user,
    said,
    takes_system,
    takes_systems,
)

JOINED = ("content", "reasoning_content", "thinking")  # texts of messages that become one


def beside_calls(messages: Messages) -> Messages:
    """Returns a conversation whose results follow their calls, in the order of the calls.

    A result without a call before it becomes the user's text.
    """
    waiting: dict[int, Messages] = {}  # the results of a message's calls, by its place
    open_calls: dict[Any, int] = {}  # the place of the message, by the id of a call
    others: list[tuple[int, dict[str, Any]]] = []
    for place, message in enumerate(messages):
        for k, call in enumerate(message.get("tool_calls") or ()):
            open_calls[call.get("id") or (place, k)] = place
        if message.get("role") == "tool":
            unnamed = (each for each in open_calls if isinstance(each, tuple))
            key = message.get("tool_call_id") or next(unnamed, None)
            owner = open_calls.get(key)
            if isinstance(key, tuple):
                del open_calls[key]
            if owner is not None:
                waiting.setdefault(owner, []).append(message)
                continue
        others.append((place, message))
    result: Messages = []
    for place, message in others:
        result.append(message)
        order = [call.get("id") for call in message.get("tool_calls") or ()]
        result += sorted(
            waiting.get(place, []),
            key=lambda each: order.index(i) if (i := each.get("tool_call_id")) in order else 0,
        )
    return result


def with_systems(template: str | None, messages: Messages) -> Messages:
    """Returns a conversation with the system messages that the template accepts, in their places.

    The first ones become one message. Later ones become the user's text. Where this would remove
    thinking, a text after a result becomes a part of the result. A template that writes no system
    message gets its text before the first text of the user.
    """
    if takes_systems(template):
        return messages
    n = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    first = _texts(*(message["content"] for message in messages[:n]))
    rest: Messages = []
    for message in messages[n:]:
        if message.get("role") == "system":
            if not message["content"]:
                continue
            message = {**message, "role": "user"}
            if rest and rest[-1].get("role") == "tool" and ends_thinking(template):
                message = _added(rest.pop(), message)
        rest.append(message)
    if not first:
        return rest
    if takes_system(template):
        return [said("system", first), *rest]
    is_told = bool(rest) and rest[0].get("role") == "user"
    return [_joined(said("user", first), rest[0]), *rest[1:]] if is_told else [
        said("user", first), *rest
    ]  # fmt: skip


def in_turns(template: str | None, messages: Messages, *, strict: bool = False) -> Messages:
    """Returns a conversation in which user and assistant take turns, if the template wants it.

    Calls and results are no turns. Neighbours of one role become one message. A text between a
    result and the next call, and a user's text after a result, become a part of the result. An
    empty message of the other role goes between two answers of one turn. strict: the template wants
    turns.
    """
    n_system = bool(messages) and messages[0].get("role") == "system"
    begins = messages[n_system].get("role") if len(messages) > n_system else "none"
    if begins in ("assistant", "tool", "none") and (strict or needs_user(template)):
        messages = [*messages[:n_system], said("user", ""), *messages[n_system:]]
    if not (strict or alternates(template)):
        return messages
    result: Messages = []
    last = said("", "")  # the last turn
    for message, following in zip(messages, [*messages[1:], {}], strict=True):
        role, before = message.get("role"), result[-1] if result else {}
        is_turn = not (role == "tool" or message.get("tool_calls"))
        is_between = role == "user" or following.get("tool_calls")
        if is_turn and before.get("role") == "tool" and is_between:
            message = _added(result.pop(), message)
        elif is_turn and last.get("role") == role:
            if before is last:
                message = _joined(result.pop(), message)
            else:
                result.append(said("assistant" if role == "user" else "user", ""))
            last = message
        elif is_turn:
            last = message
        result.append(message)
    return result


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one message of two."""
    texts = {
        key: _texts(first.get(key), second.get(key))
        for key in JOINED
        if key in first or key in second
    }
    return {**first, **second, **texts}


def _added(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first message with the text of the second one."""
    return {**first, "content": _texts(first["content"], second["content"])}


def _texts(*texts: str | None) -> str:
    return "\n\n".join(filter(None, texts))
