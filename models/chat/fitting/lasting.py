"""Keeps what stays the same while a conversation grows: its time, and the order of its tools.

A template may write the date at the front of a prompt, and it writes tools there. Another date, or
the same tools in another order, would change all that follows.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from threading import Lock
from typing import Any, Generic, TypeVar

MOST_KEPT = 4096
MOST_CHARS = 1 << 14  # of a tool that is kept
T = TypeVar("T")


class Remembered(Generic[T]):
    """The newest values by the hash of a text."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str, value: T, *, is_new: bool = False) -> T:
        """Returns the value that is kept for a text; keeps this one if there is none or is_new."""
        key = sha256(text.encode(errors="surrogatepass")).digest()
        with self._lock:
            if is_new:
                self._values.pop(key, None)
            kept = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            if len(self._values) > MOST_KEPT:
                self._values.popitem(last=False)
        return kept


@cache
def _times() -> Remembered[datetime]:
    return Remembered()


@cache
def _tools() -> Remembered[dict[str, Any]]:
    return Remembered()


def started_at(messages: Sequence[Mapping[str, Any]]) -> datetime:
    """Returns when a conversation began: when its first message came, before any answer.

    A conversation that this process does not know begins now.
    """
    first = next((message for message in messages if message.get("role") == "user"), {})
    roles = {message.get("role") for message in messages}
    is_new = not roles & {"assistant", "tool"}
    return _times().get(str(first.get("content")), datetime.now(), is_new=is_new)


def in_one_order(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools by name. The keys of a tool are in the order in which the tool came first."""
    found = []
    for tool in tools:
        text = json.dumps(tool, sort_keys=True)
        kept = _tools().get(text, dict(tool)) if len(text) < MOST_CHARS else dict(tool)
        found.append((str(tool.get("function", {}).get("name")), text, kept))
    return [tool for _, _, tool in sorted(found, key=lambda each: each[:2])]
