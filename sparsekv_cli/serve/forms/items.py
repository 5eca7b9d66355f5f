"""Items of the Responses API: read into messages of a conversation, and written from an answer."""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sparsekv_cli.generation.fields import FieldError, shown
from sparsekv_cli.generation.messages import content_text, message_text, read_arguments
from sparsekv_cli.generation.parts import line_of
from sparsekv_cli.models.chat.calls import Part, Text, Thought, ToolCall
from sparsekv_cli.models.chat.fitting.call_forms import new_call_id
from sparsekv_cli.serve.forms.offers import (
    SHELL,
    SHELL_INPUT,
    Offer,
    custom_input,
    joined_name,
    shell_action,
)

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text")
ENCRYPTED = "encrypted_content"
# Types of items that only another service makes: its tools' calls and their results.
FOREIGN = re.compile(r"_(call|output|tools|request|response)$|^compaction")
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
OUTPUTS = tuple(f"{kind}_output" for kind in CALLS)
Messages = list[dict[str, Any]]
Event = tuple[str, dict[str, Any]]  # its type, without ``response.``, and its fields


def read_items(items: Sequence[Any], n_before: int = 0) -> Messages:
    """Returns the messages of a conversation, as /v1/chat/completions has them.

    n_before: the number of items of previous responses. Raises FieldError, which names the wrong
    field.
    """
    messages: Messages = []
    for i, item in enumerate(items, -n_before):
        where = f"input[{i}]"
        is_last = i == len(items) - n_before - 1
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        if kind == "message":
            _add_message(messages, where, item, is_last=is_last)
        elif kind == "reasoning":
            own = _own(messages, "reasoning_content")
            own.setdefault("reasoning_content", []).append(_thought(where, item))
        elif kind in CALLS:
            call = _call(where, item, kind)
            _own(messages, "tool_calls").setdefault("tool_calls", []).append(call)
        elif kind == "item_reference":
            text = f"[{_text(where, item, 'id')}: this server does not keep this item]"
            messages.append({"role": "user", "content": text})
        elif kind in OUTPUTS:
            call_id = _text(where, item, _key_of_id(item, kind))
            text = content_text(where, item.get("output"), TEXTS, "output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif isinstance(kind, str) and FOREIGN.search(kind):
            role = "user" if kind.endswith(("_output", "_response")) else "assistant"
            messages.append({"role": role, "content": line_of(item)})
        else:
            found = "" if kind is None else f", found {shown(kind)}"
            raise FieldError(
                where,
                ": expected an item of type message, reasoning, item_reference, "
                f"{', '.join([*CALLS, *OUTPUTS])}{found}",
            )
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


def _key_of_id(item: Mapping[str, Any], kind: str) -> str:
    return "id" if kind.startswith("local_shell") and "call_id" not in item else "call_id"


def _call(where: str, item: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Returns a call as /v1/chat/completions has it."""
    if kind == "local_shell_call":
        action = item.get("action")
        known = SHELL_INPUT["properties"]
        given = action if isinstance(action, dict) else {}
        name, given = SHELL, {key: each for key, each in given.items() if key in known and each}
    elif kind == "custom_tool_call":
        name, given = _text(where, item, "name"), {"input": item.get("input") or ""}
    else:
        name = _text(where, item, "name")
        given = read_arguments(f"{where}.arguments", item.get("arguments"))
    name = joined_name(item.get("namespace") or "", name)
    call_id = _text(where, item, _key_of_id(item, kind))
    function = {"name": name, "arguments": given}
    return {"id": call_id, "type": "function", "function": function}


def _add_message(messages: Messages, where: str, item: Mapping[str, Any], *, is_last: bool) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise FieldError(f"{where}.role", f": expected one of {', '.join(ROLES)}")
    text = message_text(where, item, TEXTS, is_new=is_last and role == "user")
    if role == "assistant":
        _own(messages, "content")["content"] = text
    else:
        messages.append({"role": role, "content": text})


def _own(messages: Messages, key: str) -> dict[str, Any]:
    """Returns the assistant's message that gets ``key``: the thinking, the text, the calls."""
    last = messages[-1] if messages else {}
    is_begun = last.get("content") or "tool_calls" in last
    if last.get("role") != "assistant" or (is_begun and key != "tool_calls"):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(where: str, item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise FieldError(f"{where}.{key}", ": expected a text that is not empty")
    return value


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """Returns the thinking: as text, from base64, or its summary."""
    thought = content_text(where, item.get("content"), ("reasoning_text",))
    hidden = item.get(ENCRYPTED)
    if thought or not hidden:
        return thought or content_text(where, item.get("summary"), ("summary_text",), "summary")
    try:
        return base64.b64decode(hidden, validate=True).decode()
    except (binascii.Error, TypeError, ValueError):
        raise FieldError(f"{where}.{ENCRYPTED}", ": expected this server's own") from None


class OutputItems:
    """The items of an answer as they grow, one open at a time, and the events of a stream.

    items: the items so far; the last one may be open. encrypts: whether thoughts are also sent as
    base64. offers: the tools by the name of the function that the model calls.
    """

    def __init__(
        self, *, encrypts: bool, offers: Mapping[str, Offer] = MappingProxyType({})
    ) -> None:
        self.items: list[dict[str, Any]] = []
        self._offers = offers
        self.thought = ""
        self._encrypts = encrypts
        self._kind: type[Part] | None = None  # of the open item
        self._texts: list[str] = []  # of the open item
        self._blank = ""  # white space, which begins no message alone

    def add(self, part: Part) -> Iterator[Event]:
        """Yields the events of a part of the answer."""
        if isinstance(part, ToolCall):
            yield from self._call(part)
        elif isinstance(part, Thought):
            if self._kind != Thought:
                yield from self._begin(Thought, {"type": "reasoning", "summary": []}, "rs")
            yield from self._grow("reasoning_text", part.text)
        elif self._kind == Text or (self._blank + part.text).strip():
            yield from self._say(part.text)
        else:
            self._blank += part.text

    def end(self, status: str) -> Iterator[Event]:
        """Yields the last events of the answer. status: of the last item."""
        if self._blank and not self.items:
            yield from self._say("")
        yield from self.close(status)

    def _call(self, part: ToolCall) -> Iterator[Event]:
        offer = self._offers.get(part.name, Offer("function", part.name))
        call: dict[str, Any] = {"call_id": new_call_id(), "name": offer.name}
        if offer.namespace:
            call["namespace"] = offer.namespace
        if offer.kind == SHELL:
            action = shell_action(part.arguments)
            shell = {"type": "local_shell_call", "call_id": call["call_id"], "action": action}
            yield from self._begin(ToolCall, shell, "lsh")
        elif offer.kind == "custom":
            yield from self._begin(
                ToolCall, {"type": "custom_tool_call", **call, "input": ""}, "ctc"
            )
            yield from self._grow("custom_tool_call_input", custom_input(part.arguments))
        else:
            yield from self._begin(
                ToolCall, {"type": "function_call", **call, "arguments": ""}, "fc"
            )
            yield from self._grow("function_call_arguments", part.arguments)
        yield from self.close()

    def _say(self, text: str) -> Iterator[Event]:
        if self._kind != Text:
            text = self._blank + text
            yield from self._begin(Text, {"type": "message", "role": "assistant"}, "msg")
        yield from self._grow("output_text", text, logprobs=[])

    def _begin(self, kind: type[Part], item: dict[str, Any], prefix: str) -> Iterator[Event]:
        yield from self.close()
        self._kind, self._texts, self._blank = kind, [], ""
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", **item, "status": "in_progress"}
        if kind != ToolCall:
            item["content"] = []
        self.items.append(item)
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": item}
        if kind != ToolCall:
            yield "content_part.added", {**self._place(), "part": self._part("")}

    def _grow(self, name: str, text: str, **more: Any) -> Iterator[Event]:
        self._texts.append(text)
        yield f"{name}.delta", {**self._place(), "delta": text, **more}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Ends the open item, if there is one."""
        if self._kind is None:
            return
        item, text, place = self.items[-1], "".join(self._texts), self._place()
        if item["type"] == "custom_tool_call":
            item["input"] = text
            yield "custom_tool_call_input.done", {**place, "input": text}
        elif item["type"] == "function_call":
            item["arguments"] = text
            done = {**place, "name": item["name"], "arguments": text}
            yield "function_call_arguments.done", done
        elif self._kind != ToolCall:
            part = self._part(text)
            logprobs: dict[str, Any] = {"logprobs": []} if self._kind == Text else {}
            yield f"{part['type']}.done", {**place, "text": text, **logprobs}
            yield "content_part.done", {**place, "part": part}
            item["content"] = [part]
        if self._kind == Thought:
            self.thought += text
            if self._encrypts:
                item[ENCRYPTED] = base64.b64encode(text.encode()).decode()
        item["status"], self._kind = status, None
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return place if self._kind == ToolCall else {**place, "content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        if self._kind == Thought:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
