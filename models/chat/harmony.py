"""gpt-oss's answers: messages on channels, of which one is thinking and one is for functions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sparsekv_cli.models.chat.calls import Part, Text, Thought, ToolCall, is_json


class HarmonyReader:
    """gpt-oss: messages on channels; ``analysis`` is thought, a recipient is a function.

    ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``
    """

    MARKS = re.compile(r"<\|(channel|message|start|end|return|call|constrain)\|>")
    RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
    LONGEST = len("<|constrain|>")

    def __init__(self) -> None:
        self._held, self._header, self._body = "", "", ""
        self._is_header = True

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        while (mark := self.MARKS.search(self._held)) is not None:
            yield from self._take(self._held[: mark.start()])
            self._held = self._held[mark.end() :]
            if mark[1] == "message":
                self._is_header = False
            elif mark[1] in ("end", "return", "call", "start"):
                yield from self._end()
            else:
                self._header += " "
        begun = self._held.rfind("<", max(0, len(self._held) - self.LONGEST))
        n = begun if begun >= 0 else len(self._held)
        told, self._held = self._held[:n], self._held[n:]
        yield from self._take(told)

    def flush(self) -> Iterator[Part]:
        held, self._held = self._held, ""
        yield from self._take(held)
        yield from self._end()

    def _take(self, text: str) -> Iterator[Part]:
        if self._is_header:
            self._header += text
        elif self.RECIPIENT.search(self._header):
            self._body += text
        elif text:
            yield Thought(text) if "analysis" in self._header else Text(text)

    def _end(self) -> Iterator[Part]:
        """A message ends."""
        recipient = self.RECIPIENT.search(self._header)
        if recipient is not None and self._body:
            body = self._body.strip()
            yield ToolCall(recipient[1], body) if is_json(body) else Text(body)
        self._header, self._body, self._is_header = "", "", True
