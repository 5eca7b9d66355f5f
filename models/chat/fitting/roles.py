"""Puts the messages of a conversation into an order of roles that one chat template accepts.

A later message never changes the text of an earlier turn, so a prompt that grows keeps its
beginning. Neighbours become one message only if the template does not accept both.
"""

from collections import deque
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

# fields whose texts are joined if messages become one
JOINED = ("content", "reasoning_content", "thinking")


def beside_calls(messages: Messages) -> Messages:
    """Returns a conversation whose results follow their calls, in the order of the calls.

    A result without a call before it stays where it is.
    """
    waiting: dict[int, Messages] = {}  # index of a message with calls -> results of these calls
    owners: dict[str, int] = {}  # id of a call -> index of its message
    unnamed: deque[int] = deque()  # indexes of messages, one for each call without an id
    others: list[tuple[int, dict[str, Any]]] = []
    for place, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            if call.get("id"):
                owners[call["id"]] = place
            else:
                unnamed.append(place)
        if message.get("role") == "tool":
            given = message.get("tool_call_id")
            owner = owners.get(given) if given else unnamed.popleft() if unnamed else None
            if owner is not None:
                waiting.setdefault(owner, []).append(message)
                continue
        others.append((place, message))
    result: Messages = []
    for place, message in others:
        result.append(message)
        order = {call.get("id"): i for i, call in enumerate(message.get("tool_calls") or ())}
        result += sorted(
            waiting.get(place, []), key=lambda each: order.get(each.get("tool_call_id"), 0)
        )
    return result


def with_systems(template: str | None, messages: Messages) -> Messages:
    """Returns a conversation whose system messages the template accepts, in their places.

    System messages at the front become one message. Later ones become the user's text. After a
    result, such a text may remove thinking; then it becomes a part of the result. If a template
    writes no system message, its text comes before the first text of the user.
    """
    if takes_systems(template):
        return messages
    n = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    first = joined([said("system", ""), *messages[:n]])["content"]
    groups: list[Messages] = []
    for message in messages[n:]:
        if message.get("role") == "system":
            if not message["content"]:
                continue
            message = {**message, "role": "user"}
            if groups and groups[-1][0].get("role") == "tool" and ends_thinking(template):
                groups[-1].append(message)
                continue
        groups.append([message])
    rest = list(map(joined, groups))
    if not first:
        return rest
    if takes_system(template):
        return [said("system", first), *rest]
    is_told = bool(rest) and rest[0].get("role") == "user"
    return [joined([said("user", first), *rest[:is_told]]), *rest[is_told:]]


def in_turns(template: str | None, messages: Messages, *, strict: bool = False) -> Messages:
    """Returns a conversation in which user and assistant take turns, if the template wants it.

    Calls and results are no turns. Neighbours of one role become one message. A text between a
    result and the next call becomes a part of the result. So does a user's text after a result. If
    two turns of one role cannot be joined, an empty message of the other role comes between them.
    strict: the template wants turns.
    """
    n_system = bool(messages) and messages[0].get("role") == "system"
    begins = messages[n_system].get("role") if len(messages) > n_system else "none"
    if begins in ("assistant", "tool", "none") and (strict or needs_user(template)):
        messages = [*messages[:n_system], said("user", ""), *messages[n_system:]]
    if not (strict or alternates(template)):
        return messages
    groups: list[Messages] = []  # each group of messages becomes one message
    last = said("", "")  # the last turn
    for message, following in zip(messages, [*messages[1:], {}], strict=True):
        role, before = message.get("role"), groups[-1] if groups else [{}]
        is_turn = not (role == "tool" or message.get("tool_calls"))
        is_between = role == "user" or following.get("tool_calls")
        if is_turn and before[0].get("role") == "tool" and is_between:
            before.append(message)
            continue
        if is_turn and last.get("role") == role:
            if before[-1] is last:
                before.append(message)
                last = message
                continue
            groups.append([said("assistant" if role == "user" else "user", "")])
        if is_turn:
            last = message
        groups.append([message])
    return list(map(joined, groups))


def joined(messages: Messages) -> dict[str, Any]:
    """Returns one message: the first of ``messages``, with the texts of all."""
    if len(messages) == 1:
        return messages[0]
    texts = {
        key: "\n\n".join(filter(None, (message.get(key) for message in messages)))
        for key in JOINED
        if any(key in message for message in messages)
    }
    return {**messages[0], **texts}
