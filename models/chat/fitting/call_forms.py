"""The forms in which chat templates accept the calls of an assistant's messages, and their ids."""

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from sparsekv_cli.models.chat.fitting.probes import USER, WORDS, Messages, said, writes

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
ID_LENGTH = 9  # Mistral's templates accept only ids of nine letters and digits
SAID = "said-probe"


class CallForm(NamedTuple):
    """The form in which a template accepts the calls of an assistant's message."""

    are_texts: bool = False  # True: arguments must be JSON texts, not objects
    is_null: bool = False  # True: a message without text has the content None, not ""
    has_short_ids: bool = False  # True: ids must be nine letters and digits
    is_alone: bool = False  # True: a message may have one call only
    # True: the text of a message with calls must be a message of its own before it
    is_split: bool = False


def new_call_id() -> str:
    """Returns a call id that every template accepts."""
    return _short(uuid.uuid4().bytes)


@lru_cache(16)
def call_form(template: str | None) -> CallForm | None:
    """Returns the form in which a template accepts calls with texts; None: it accepts none."""
    for is_split, are_texts, is_null, is_alone, has_short_ids in product((False, True), repeat=5):
        if is_null and not is_split:
            continue
        form = CallForm(are_texts, is_null, has_short_ids, is_alone, is_split)
        calls = [
            {"id": f"call_{i}", "type": "function", "function": {"name": "f", "arguments": given}}
            for i, given in enumerate({"x": word} for word in WORDS)
        ]
        asked = {**said("assistant", SAID), "tool_calls": calls}
        answered = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
        if writes(template, with_calls([USER, asked, *answered], form), [SAID, *WORDS]):
            return form
    return None


def with_calls(messages: Messages, form: CallForm) -> Messages:
    """Returns a conversation with its calls in a form. Calls without an id get one."""
    result: Messages = []
    open_ids: dict[str, None] = {}  # ids of calls that have no result yet
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
            if form.is_split:
                if message["content"]:
                    result.append(said("assistant", message["content"]))
                message["content"] = None if form.is_null else ""
        result.append(message)
    return _one_by_one(result) if form.is_alone else result


def _call(call: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if form.are_texts and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "id": _id(call["id"], form), "function": {**function, "arguments": arguments}}


def _one_by_one(messages: Messages) -> Messages:
    """Puts each call into a message of its own, and the call's result after it."""
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
    for message in result:  # a result of a known call comes after that call
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
    """Returns nine letters and digits, made of the first bytes of ``data``."""
    number, digits = int.from_bytes(data[:8], "little"), ""
    for _ in range(ID_LENGTH):
        number, digit = divmod(number, len(DIGITS))
        digits += DIGITS[digit]
    return digits
