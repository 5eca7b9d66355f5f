"""Reads conversations of OpenAI's protocol and of ``run --jsonl`` for chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.fields import FieldError, shown
from sparsekv_cli.generation.parts import FILES, TEXTS, document_of, line_of
from sparsekv_cli.models.chat.loose import read_json

NO_MEDIA = "pictures, sounds and videos are not read"
# A message's field here -> its names in requests. Programs spell an assistant's thoughts in three
# ways.
SAME: dict[str, tuple[str, ...]] = {"name": ("name",), "tool_call_id": ("tool_call_id",)}
SAME["reasoning_content"] = ("reasoning_content", "reasoning", "thinking")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the messages as templates need them: contents are texts, arguments are objects.

    Raises FieldError, which names the wrong field.
    """
    last = len(messages) - 1
    return _with_ids(
        [_message(f"messages[{i}]", each, is_last=i == last) for i, each in enumerate(messages)]
    )


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with results of OpenAI's older functions turned into tools' results.

    An older result has the name of its call. It gets the id of the call in the message before it.
    """
    for i, message in enumerate(messages):
        if message["role"] == "function":
            calls = messages[i - 1].get("tool_calls") if i else None
            message["role"] = "tool"
            message["tool_call_id"] = calls[0]["id"] if calls else ""
    return messages


def _message(where: str, message: Any, *, is_last: bool = False) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise FieldError(where, f": expected an object whose role is one of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    is_new = is_last and role == "user"
    text = message_text(where, message, is_new=is_new)
    if not text and role == "assistant" and isinstance(message.get("refusal"), str):
        text = message["refusal"]
    result: dict[str, Any] = {"role": role, "content": text}
    for key, names in SAME.items():
        given = [message[name] for name in names if isinstance(message.get(name), str)]
        if given:
            result[key] = given[0]
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), dict):
        calls = [{"id": where, "function": message["function_call"]}]
    if calls:
        if not isinstance(calls, list):
            raise FieldError(f"{where}.tool_calls", ": expected a list")
        result["tool_calls"] = [
            _call(f"{where}.tool_calls[{k}]", call) for k, call in enumerate(calls)
        ]
    return result


def message_text(
    where: str,
    message: Mapping[str, Any],
    kinds: Sequence[str] = ("text",),
    *,
    is_new: bool = False,
) -> str:
    """Returns the text of a message. Raises FieldError if a role that needs text has none.

    Messages of assistants and tools may have none. The other arguments are those of
    ``content_text``.
    """
    if message.get("content") is None and message["role"] not in ("assistant", "tool", "function"):
        raise FieldError(f"{where}.content", ": is missing")
    return content_text(where, message.get("content"), kinds, is_new=is_new)


def content_text(
    where: str,
    content: Any,
    kinds: Sequence[str] = ("text",),
    key: str = "content",
    *,
    is_new: bool = False,
) -> str:
    """Returns the text of a message's content. The texts of a list's parts are joined.

    A part that is no text becomes a line of its own. kinds: types of parts that an error message
    names. key: the field's name. is_new: the message is the user's question, so a part that cannot
    be read raises FieldError.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    expected = f"expected a text, or a list of parts of type {' or '.join(kinds)}"
    if not isinstance(content, list):
        raise FieldError(f"{where}.{key}", f": {expected}")
    pieces = PartTexts()
    for i, part in enumerate(content):
        pieces.add(f"{where}.{key}[{i}]", part, expected, is_new=is_new)
    return pieces.text


class PartTexts:
    """Joins the parts of a message to one text. A part that is no text has its own lines."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._was_line = False

    @property
    def text(self) -> str:
        """The text of all parts so far."""
        return "".join(self._texts)

    def add(self, where: str, part: Any, expected: str, *, is_new: bool = False) -> None:
        """Adds a part. Raises FieldError for a part that is wrong or cannot be read."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise FieldError(where, f": {expected}")
        if kind in TEXTS:
            if not isinstance(part.get(TEXTS[kind]), str):
                raise FieldError(where, f": {expected}")
            self._put(part[TEXTS[kind]], is_line=False)
            return
        if is_new and kind in FILES:
            try:
                document_of(part)
            except SparseKVError as error:
                raise FieldError(where, f": {error}") from None
        elif is_new:
            raise FieldError(where, f".type = {shown(kind)}: {NO_MEDIA}: {expected}")
        self._put(line_of(part), is_line=True)

    def _put(self, text: str, *, is_line: bool) -> None:
        if not text:
            return
        if (is_line or self._was_line) and self._texts and not self._texts[-1].endswith("\n"):
            self._texts.append("\n")
        self._texts.append(text)
        self._was_line = is_line


def read_arguments(at: str, written: Any) -> dict[str, Any]:
    """Returns the arguments of a call as an object. ``written`` is an object or its JSON text.

    at: the field's path, for the FieldError of a wrong value.
    """
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
    if function is None and isinstance(call, dict) and isinstance(call.get("custom"), dict):
        function = {**call["custom"], "arguments": {"input": call["custom"].get("input") or ""}}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise FieldError(where, ": expected a function with name and arguments")
    given = read_arguments(f"{where}.function.arguments", function.get("arguments"))
    named = {"name": function["name"], "arguments": given}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}
