"""Keeps a conversation's time and order of tools the same while the conversation grows.

A template may write the date at the front of a prompt, and it writes tools there. Another date, or
the same tools in another order, would change all ids that follow.
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
MOST_CHARS = 1 << 14  # characters; a longer tool is not stored
T = TypeVar("T")


class Remembered(Generic[T]):
    """Stores values by the hash of a text. Only the newest MOST_KEPT values stay."""

    def __init__(self) -> None:
        self._values: OrderedDict[bytes, T] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str, value: T, *, is_new: bool = False) -> T:
        """Returns the value that is stored for ``text``.

        If there is none, or if is_new, it stores ``value`` first.
        """
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
    """Returns when a conversation began: the time of its first message, before any answer.

    A conversation that this process does not know begins now.
    """
    first = next((message for message in messages if message.get("role") == "user"), {})
    roles = {message.get("role") for message in messages}
    is_new = not roles & {"assistant", "tool"}
    return _times().get(str(first.get("content")), datetime.now(), is_new=is_new)


def in_one_order(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns tools sorted by name. Each tool's keys have the order of its first appearance."""
    found = []
    for tool in tools:
        text = json.dumps(tool, sort_keys=True)
        kept = _tools().get(text, dict(tool)) if len(text) < MOST_CHARS else dict(tool)
        found.append((str(tool.get("function", {}).get("name")), text, kept))
    return [tool for _, _, tool in sorted(found, key=lambda each: each[:2])]
