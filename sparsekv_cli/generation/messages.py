"""Conversations as OpenAI's protocol and lines of ``run --jsonl`` have them, read for templates."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv_cli.generation.fields import FieldError, shown
from sparsekv_cli.models.chat.calls import read_json

NO_MEDIA = "pictures, audio and files are not read"
ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the conversation as templates read it: texts, and arguments of calls as objects.

    Raises FieldError, which names the wrong field.
    """
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise FieldError(where, f": expected an object whose role is one of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    result: dict[str, Any] = {"role": role, "content": message_text(where, message)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise FieldError(f"{where}.tool_calls", ": expected a list")
        result["tool_calls"] = [
            _call(f"{where}.tool_calls[{k}]", call) for k, call in enumerate(calls)
        ]
    return result


def message_text(where: str, message: Mapping[str, Any], kinds: Sequence[str] = ("text",)) -> str:
    """Returns a message's text. Only an assistant and a tool may leave it out."""
    if message.get("content") is None and message["role"] not in ("assistant", "tool"):
        raise FieldError(f"{where}.content", ": is missing")
    return content_text(where, message.get("content"), kinds)


def content_text(
    where: str, content: Any, kinds: Sequence[str] = ("text",), key: str = "content"
) -> str:
    """Returns a message's text, joined if it has parts of these kinds. key: the field's name."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    expected, at = f"expected a text, or a list of parts of type {' or '.join(kinds)}", where
    if not isinstance(content, list):
        raise FieldError(f"{where}.{key}", f": {expected}")
    for i, part in enumerate(content):
        at, kind = f"{where}.{key}[{i}]", part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise FieldError(at, f".type = {shown(kind)}: {NO_MEDIA}: {expected}")
        if kind is None or not isinstance(part.get("text"), str):
            raise FieldError(at, f": {expected}")
    return "".join(part["text"] for part in content)


def read_arguments(at: str, written: Any) -> dict[str, Any]:
    """Returns the arguments of a call as an object. They may be written as a JSON text."""
    try:
        given = read_json(written or "{}") if isinstance(written, str) else written
    except ValueError as error:
        raise FieldError(at, f": expected a JSON object: {error}") from None
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise FieldError(at, f": expected a JSON object, found {shown(given)}")
    return given


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(where, ": expected a function with name and arguments")
    given = read_arguments(f"{where}.function.arguments", function.get("arguments"))
    named = {"name": function["name"], "arguments": given}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}
