"""Reads gpt-oss's answers: messages on channels, one for thinking and one for functions."""

import re
from collections.abc import Iterator

from sparsekv_cli.models.chat.calls import Part, Text, Thought, call_of, in_string


class HarmonyReader:
    """Reads messages on channels. ``analysis`` is thinking; a recipient is a function.

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
            if self._recipient is not None and in_string(self._body):
                self._body += mark[0]  # of an argument
            elif mark[1] == "message":
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

    @property
    def _recipient(self) -> str | None:
        """The function to which the current message is sent, or None."""
        found = None if self._is_header else self.RECIPIENT.search(self._header)
        return None if found is None else found[1]

    def _take(self, text: str) -> Iterator[Part]:
        if self._is_header:
            self._header += text
        elif self._recipient is not None:
            self._body += text
        elif text:
            yield Thought(text) if "analysis" in self._header else Text(text)

    def _end(self) -> Iterator[Part]:
        """Ends a message; yields its call, if it is one."""
        if self._recipient is not None and self._body:
            body = self._body.strip()
            yield call_of(self._recipient, body) or Text(body)
        self._header, self._body, self._is_header = "", "", True
