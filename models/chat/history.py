"""Converts a conversation to the form that one chat template accepts.

Templates accept different forms of calls and system messages. Some silently drop other forms. The
code tries a template on a short conversation, once, when a conversation needs it.
"""

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat.template import render

Messages = list[dict[str, Any]]
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9  # Mistral's templates accept only ids of so many letters and digits
USER = {"role": "user", "content": "Well?"}
PROBES = ("first-probe", "second-probe")
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


class CallForm(NamedTuple):
    """The form in which a template accepts the calls of an assistant's message."""

    are_texts: bool = False  # arguments are JSON texts, not objects
    is_null: bool = False  # the content of a message without text is None, not empty
    has_short_ids: bool = False  # ids are nine letters and digits
    is_alone: bool = False  # a message has one call


def new_call_id() -> str:
    """Returns a call id that every template accepts."""
    return _short(uuid.uuid4().bytes)


def fitted(template: str | None, messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Returns a conversation in the form that the template accepts. Nothing of it is lost.

    System messages become one, at the front, if the template accepts no others. Calls get the form
    that the template accepts. Calls without an id, and their results, get an id.
    """
    result = [dict(message) for message in messages]
    n_systems = sum(message.get("role") == "system" for message in result)
    is_first = n_systems == 1 and result[0].get("role") == "system"
    if n_systems and not is_first and not takes_systems(template):
        systems = [m["content"] for m in result if m.get("role") == "system"]
        others = [m for m in result if m.get("role") != "system"]
        result = [{"role": "system", "content": "\n\n".join(filter(None, systems))}, *others]
    if any(message.get("tool_calls") for message in result):
        result = _with_calls(result, call_form(template))
    return result


@lru_cache(16)
def takes_systems(template: str | None) -> bool:
    """Returns whether a template writes several system messages, also after other messages."""
    first, second = ({"role": "system", "content": word} for word in PROBES)
    answer = {"role": "assistant", "content": "Yes."}
    return all(
        _writes(template, messages)
        for messages in ([first, second, USER], [first, USER, answer, second, USER])
    )


@lru_cache(16)
def call_form(template: str | None) -> CallForm:
    """Returns the form in which a template accepts calls; the plain form if it accepts none."""
    for are_texts, is_null, is_alone, has_short_ids in product((False, True), repeat=4):
        form = CallForm(are_texts, is_null, has_short_ids, is_alone)
        calls = [
            {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": given}}
            for i, given in enumerate({"x": word} for word in PROBES)
        ]
        asked = {"role": "assistant", "content": "", "tool_calls": calls}
        answered = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
        if _writes(template, _with_calls([USER, asked, *answered], form)):
            return form
    return CallForm()


def _writes(template: str | None, messages: Messages) -> bool:
    """Returns whether a template accepts a conversation and writes its probes."""
    try:
        text = render(template, messages, tools=[TOOL])
    except SparseKVError:
        return False
    return all(word in text for word in PROBES)


def _with_calls(messages: Messages, form: CallForm) -> Messages:
    result: Messages = []
    open_ids: dict[str, None] = {}  # of calls that have no result yet
    for i, message in enumerate(messages):
        if message.get("role") == "tool":
            given = message.get("tool_call_id") or next(iter(open_ids), f"{i}")
            open_ids.pop(given, None)
            message = {**message, "tool_call_id": _id(given, form)}
        elif message.get("tool_calls"):
            calls = [
                {**call, "id": call.get("id") or f"{i}.{k}"}
                for k, call in enumerate(message["tool_calls"])
            ]
            open_ids |= dict.fromkeys(call["id"] for call in calls)
            message = {**message, "tool_calls": [_call(call, form) for call in calls]}
            if form.is_null:
                if message["content"]:
                    result.append({"role": "assistant", "content": message["content"]})
                message["content"] = None
        result.append(message)
    return _one_by_one(result) if form.is_alone else result


def _call(call: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if form.are_texts and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "id": _id(call["id"], form), "function": {**function, "arguments": arguments}}


def _one_by_one(messages: Messages) -> Messages:
    """Puts each call into its own message, followed by the call's result."""
    result: Messages = []
    for message in messages:
        calls = message.get("tool_calls") or []
        result.append({**message, "tool_calls": calls[:1]} if calls else message)
        for call in calls[1:]:
            content = None if message["content"] is None else ""
            result.append({"role": "assistant", "content": content, "tool_calls": [call]})
    n_calls = Counter(m["tool_calls"][0]["id"] for m in result if m.get("tool_calls"))
    results: dict[str, Messages] = {identity: [] for identity in n_calls}
    others: Messages = []
    for message in result:  # a result with a known call goes after that call
        is_known = message.get("role") == "tool" and message["tool_call_id"] in results
        (results[message["tool_call_id"]] if is_known else others).append(message)
    ordered: Messages = []
    for message in others:
        ordered.append(message)
        if message.get("tool_calls"):
            identity = message["tool_calls"][0]["id"]
            n_calls[identity] -= 1
            n = 1 if n_calls[identity] else len(results[identity])
            ordered += results[identity][:n]
            del results[identity][:n]
    return ordered


def _id(given: str, form: CallForm) -> str:
    """Returns an id that the template accepts. The same id always gives the same result."""
    is_short = len(given) == ID_LENGTH and given.isascii() and given.isalnum()
    if is_short or not form.has_short_ids:
        return given
    return _short(hashlib.sha256(given.encode(errors="replace")).digest())


def _short(data: bytes) -> str:
    """Returns an id of nine letters and digits from bytes."""
    number, digits = int.from_bytes(data[:8], "little"), ""
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(DIGITS))
        digits += DIGITS[digit]
    return digits
