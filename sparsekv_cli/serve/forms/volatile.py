"""Lines of system prompts that each request has anew, and that would cost all known rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

SYSTEM_ROLES = ("system", "developer")
HEADERS = ("x-anthropic-billing-header:",)  # of Claude Code, for Anthropic's accounts


class VolatileHeaders:
    """Headers whose lines are left out of system prompts.

    names: beginnings of such lines, in upper or lower case; empty ones are ignored. counts: gets
    the number of lines that are left out, by header.
    """

    def __init__(self, names: Sequence[str], counts: Counter[str]) -> None:
        self._names = tuple(name for name in names if name.strip())
        self._counts = counts

    def of_messages(self, messages: Any) -> Any:
        """Returns messages as clients send them, without such lines in those of the system.

        A message of which nothing is left is left out too.
        """
        if not isinstance(messages, list):
            return messages
        kept = []
        for message in messages:
            is_system = isinstance(message, dict) and message.get("role") in SYSTEM_ROLES
            if is_system and (content := message.get("content")):
                if not (rest := self.of_system(content)):
                    continue
                message = {**message, "content": rest}
            kept.append(message)
        return kept

    def of_system(self, content: Any) -> Any:
        """Returns a system text, or a list of its blocks, without such lines."""
        if isinstance(content, str):
            return self._rest(content)
        if not isinstance(content, list):
            return content
        found = []
        for block in content:
            text = block.get("text") if isinstance(block, dict) else None
            if isinstance(text, str) and text:
                if not (rest := self._rest(text)):
                    continue
                block = {**block, "text": rest}
            found.append(block)
        return found

    def _rest(self, text: str) -> str:
        kept = []
        for line in text.splitlines(keepends=True):
            start = line.lstrip().lower()
            name = next((name for name in self._names if start.startswith(name.lower())), None)
            if name is None:
                kept.append(line)
            else:
                self._counts[name] += 1
        return "".join(kept)
