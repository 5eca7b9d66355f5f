"""Texts for the parts of a message that are no texts: documents, pictures and other blocks.

The text of a document is read from its data. A picture becomes a line that says that it is left
out. A block that only another service understands becomes a line with its type.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.document_process import read_apart
from sparsekv_cli.system.documents import kind_of

# Type of a part -> the field with its text.
TEXTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text")
TEXTS |= {"summary_text": "text", "refusal": "refusal"}
# Type of a part -> its kind of medium.
MEDIA = dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot"), "image")
MEDIA |= dict.fromkeys(("audio", "input_audio"), "audio")
MEDIA |= dict.fromkeys(("video", "video_url", "input_video"), "video")
FILES = ("document", "file", "input_file")
HOLDERS = ("source", "file", "image_url", "input_audio", "audio", "video_url", "video")
DATA = ("data", "file_data", "url", "image_url", "video_url", "file_url", "file_id", "id")
NAMES = ("title", "filename", "name")
KINDS = ("media_type", "mime_type", "format")
# Fields that mean something to another service only.
HIDDEN = ("type", "id", "tool_use_id", "call_id", "cache_control", "signature", "status", "caller")
MOST_SHOWN = 200  # characters of an address or a name that are shown
LONG = 1000  # a text with so many characters and no white space counts as data


class Attached(NamedTuple):
    """The data that a part of a message carries."""

    name: str
    kind: str  # such as image/png; empty: unknown
    data: str  # base64, or plain text if is_text
    is_text: bool
    place: str  # the address or id of the data, if ``data`` is empty

    @property
    def details(self) -> str:
        """Name, kind and size of the data, or its address, such as "a.png, image/png, 12 KB"."""
        n_bytes = len(self.data) if self.is_text else len(self.data) * 3 // 4
        size = f"{-(-n_bytes // 1024)} KB" if self.data else ""
        known = (self.name, self.kind, size, self.place)
        return ", ".join(each[:MOST_SHOWN] for each in known if each)


def line_of(part: Mapping[str, Any]) -> str:
    """Returns a text that stands for a part that is no text. ``part["type"]`` is a string."""
    kind = part["type"]
    if kind in MEDIA:
        return left_out(MEDIA[kind], attached(part).details)
    if kind == "tool_reference":
        return f"tool: {part.get('tool_name')}"
    if kind in FILES:
        try:
            return document_of(part)
        except SparseKVError as error:
            return left_out(kind.removeprefix("input_"), f"{attached(part).details}: {error}")
    try:
        fields = {key: _plain(value) for key, value in part.items() if not _is_hidden(key)}
    except RecursionError:
        return left_out(kind, "nested too deeply")
    content = fields.get("content")
    body = content if isinstance(content, str) else ""
    if isinstance(content, list) and all(isinstance(each, str) for each in content):
        body = "\n".join(content)
    if body:
        del fields["content"]
    told = (each if isinstance(each, str) else _written(each) for each in fields.values())
    about = ", ".join(filter(None, told))
    head = f"[{kind}: {about}]" if about else f"[{kind}]"
    return f"{head}\n{body}" if body else head


def left_out(what: str, details: str) -> str:
    """Returns the line that says that a part was left out: "[image left out: a.png, 12 KB]"."""
    return f"[{what} left out: {' '.join(details.split())}]" if details else f"[{what} left out]"


def document_of(part: Mapping[str, Any]) -> str:
    """Returns the text of a document's part, with a line with its name before it.

    Raises SparseKVError if the document cannot be read.
    """
    given = attached(part)
    source = part.get("source")
    content = source.get("content") if isinstance(source, dict) else None
    if content is not None:
        parts = content if isinstance(content, list) else [content]
        text = "\n".join(each if isinstance(each, str) else str(_plain(each)) for each in parts)
    elif given.is_text:
        text = given.data
    else:
        text = _read(given)
    return f"[document: {given.name[:MOST_SHOWN]}]\n{text}" if given.name else text


def _read(given: Attached) -> str:
    name = given.name or "the document"
    if not given.data:
        raise SparseKVError(f"{name} has no data: send its text or its data in base64")
    try:
        data = base64.b64decode(given.data, validate=True)
    except (binascii.Error, ValueError):
        raise SparseKVError(f"{name}: expected data in base64") from None
    if kind_of(data):
        return read_apart(data, name)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise SparseKVError(f"{name} is no text, PDF or Word file: send its text")
    return text


def attached(part: Mapping[str, Any]) -> Attached:
    """Returns the data of a part, in the form of any protocol."""
    inner = [part.get(key) for key in HOLDERS]
    holders = [part, *(each for each in inner if isinstance(each, dict))]

    def first(keys: tuple[str, ...]) -> str:
        found = (each[key] for each in holders for key in keys if isinstance(each.get(key), str))
        return next(filter(None, found), "")

    given, kind, is_text = first(DATA), first(KINDS), False
    source = part.get("source")
    if isinstance(source, dict) and source.get("type") == "text":
        is_text = True
    data = next((each.get(key) for each in holders for key in DATA[:2] if each.get(key)), None)
    data = data if isinstance(data, str) else ""
    if given.startswith("data:"):
        head, _, data = given.partition(",")
        kind = kind or head.removeprefix("data:").partition(";")[0]
    place = "" if data else given
    return Attached(first(NAMES), kind, data, is_text, place)


def _is_hidden(key: str) -> bool:
    return key in HIDDEN or key.startswith("encrypted")


def _plain(value: Any) -> Any:
    """Returns ``value`` without the fields that only another service reads.

    Texts of parts replace the parts, and long data becomes a line that it is left out.
    """
    if isinstance(value, str):
        is_data = len(value) > LONG and not any(map(str.isspace, value[:LONG]))
        return left_out("data", f"{-(-len(value) // 1024)} KB") if is_data else value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if isinstance(kind, str) and isinstance(text := value.get(TEXTS.get(kind, "")), str):
        return text
    if isinstance(kind, str) and (kind in MEDIA or kind in FILES):
        return line_of(value)
    return {key: _plain(each) for key, each in value.items() if not _is_hidden(key)}


def _written(value: Any) -> str:
    is_empty = value is None or value is False or value == [] or value == {}
    return "" if is_empty else json.dumps(value, ensure_ascii=False)
