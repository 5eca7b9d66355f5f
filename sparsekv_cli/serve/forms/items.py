"""Items of the Responses API: read into messages of a conversation, and written from an answer."""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sparsekv_cli.generation.fields import FieldError, shown
from sparsekv_cli.generation.messages import content_text, message_text, read_arguments
from sparsekv_cli.generation.parts import line_of
from sparsekv_cli.models.chat.calls import Part, Text, Thought, ToolCall
from sparsekv_cli.models.chat.fitting.call_forms import new_call_id

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text")
ENCRYPTED = "encrypted_content"
# Types of items that only another service makes: its tools' calls and their results.
FOREIGN = re.compile(r"_(call|output|tools|request|response)$|^compaction")
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
        elif kind == "function_call":
            name, call_id = (_text(where, item, key) for key in ("name", "call_id"))
            given = read_arguments(f"{where}.arguments", item.get("arguments"))
            function = {"name": name, "arguments": given}
            call = {"id": call_id, "type": "function", "function": function}
            _own(messages, "tool_calls").setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = _text(where, item, "call_id")
            text = content_text(where, item.get("output"), TEXTS, "output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif isinstance(kind, str) and FOREIGN.search(kind):
            role = "user" if kind.endswith(("_output", "_response")) else "assistant"
            messages.append({"role": role, "content": line_of(item)})
        else:
            found = "" if kind is None else f", found {shown(kind)}"
            raise FieldError(
                where,
                ": expected an item of type message, reasoning, function_call or "
                f"function_call_output{found}",
            )
    for message in messages:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return messages


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
    base64.
    """

    def __init__(self, *, encrypts: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self.thought = ""
        self._encrypts = encrypts
        self._kind: type[Part] | None = None  # of the open item
        self._texts: list[str] = []  # of the open item
        self._blank = ""  # white space, which begins no message alone

    def add(self, part: Part) -> Iterator[Event]:
        """Yields the events of a part of the answer."""
        if isinstance(part, ToolCall):
            call = {"call_id": new_call_id(), "name": part.name, "arguments": ""}
            yield from self._begin(ToolCall, {"type": "function_call", **call}, "fc")
            yield from self._grow("function_call_arguments", part.arguments)
            yield from self.close()
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
        if self._kind == ToolCall:
            item["arguments"] = text
            done = {**place, "name": item["name"], "arguments": text}
            yield "function_call_arguments.done", done
        else:
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
