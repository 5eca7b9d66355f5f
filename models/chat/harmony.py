"""Reads gpt-oss's answers: messages on channels, of which one is thinking."""

import re
from collections.abc import Iterator

from sparsekv_cli.models.chat.calls import Part, Text, Thought, ToolCall, call_of
from sparsekv_cli.models.tokenizer.marks import SPELLED, Marks, plain

NAMES = ("channel", "message", "start", "end", "return", "call", "constrain")
ENDS = ("end", "return", "call")
# A mark such as <|end|> may be spelled in a text. The spelling ends a message only if the answer
# ends after it, or if one of these texts follows.
NEXT = ("<|start|>assistant<|channel|>", "<|start|>assistant to=", "<|channel|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")
BEGINS = re.compile(
    r"\s*(?:a|as|ass|assi|assis|assist|assista|assistan|assistant)?\s*(?:t|to|to=.*)?"
)
HEADER = re.compile(r"\s*(?:assistant)?\s*(?:to=\S*)?\s*\w*\s*(?:to=\S*)?\s*\w*\s*")
MAX_HEADER = 200  # characters; a longer header is a text
ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.S)


class HarmonyReader:
    """Reads messages on channels. The channel ``analysis`` is thinking; a recipient is a function.

    ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``

    If a mark is only spelled, it ends a message only before another message or the answer's end. A
    text without a header is an answer.
    """

    def __init__(self, marks: Marks = SPELLED, *, is_begun: bool = False) -> None:
        """is_begun: whether the prompt ends within the message of the final answer."""
        self._names = {marks[f"<|{name}|>"]: name for name in NAMES}
        self._pattern = re.compile("|".join(map(re.escape, self._names)))
        self._next = tuple(marks[each] for each in NEXT)
        self._held = ""
        self._begin()
        if is_begun:
            self._answer()

    def push(self, text: str) -> Iterator[Part]:
        self._held += text
        yield from self._read(is_end=False)

    def flush(self) -> Iterator[Part]:
        yield from self._read(is_end=True)
        yield from self._end("")

    def _begin(self, mark: str = "") -> None:
        """Begins the header of a message. mark: the mark that begins it, or ""."""
        self._raw, self._header = mark, ""  # the header with its marks, and without them
        self._is_header, self._is_marked = True, bool(mark)
        self._body = ""  # the text of a call so far
        # whether the body ends within a string, or after a \\
        self._is_string, self._escape = False, ""

    def _answer(self) -> None:
        """Begins the text of the answer."""
        self._raw, self._header, self._is_header = "", "final", False

    def _read(self, *, is_end: bool) -> Iterator[Part]:
        while (found := self._pattern.search(self._held)) is not None:
            yield from self._take(self._held[: found.start()])
            self._held = self._held[found.start() :]
            mark, after = found[0], self._held[len(found[0]) :]
            is_mark = self._is_mark(mark, after, is_end=is_end)
            if is_mark is None:
                return
            self._held = after
            yield from self._mark(mark) if is_mark else self._take(mark)
        n_most = 0 if is_end else len("<|constrain|>")
        ends = (self._held[-n:] for n in range(min(len(self._held), n_most), 0, -1))
        partial = next((end for end in ends if any(m.startswith(end) for m in self._names)), "")
        told = self._held[: len(self._held) - len(partial)]
        self._held = partial
        yield from self._take(told)

    def _is_mark(self, mark: str, after: str, *, is_end: bool) -> bool | None:
        """Returns whether ``mark`` is a mark here, or False if it is text.

        after: the text after it. None: only more text can decide.
        """
        name, is_spelled = self._names[mark], len(mark) > 1
        if self._is_header and is_spelled and not self._raw.strip():
            is_last = name in ENDS and not after.strip()
            return name in ("channel", "message", "start") or (is_last and (is_end or None))
        if self._is_header:
            return True
        if self._recipient is not None:
            return not self._is_string and (name in ENDS or name == "start")
        if not is_spelled:
            return name in ENDS or name in ("start", "channel")
        if name not in ENDS and (name != "start" or "final" in self._header):
            return False
        rest = after.lstrip() if name in ENDS else mark + after
        if name in ENDS and not rest:
            return True if is_end else None
        if rest.startswith(self._next):
            return True
        return None if not is_end and any(x.startswith(rest) for x in self._next) else False

    def _mark(self, mark: str) -> Iterator[Part]:
        name = self._names[mark]
        if self._is_header and name == "message":
            self._is_header = False
        elif self._is_header and name in ("channel", "constrain"):
            self._raw, self._header, self._is_marked = self._raw + mark, self._header + " ", True
        else:
            yield from self._end(name)
            self._begin("" if name in ENDS else mark)

    @property
    def _recipient(self) -> str | None:
        """The function to which the current message is sent, or None."""
        found = RECIPIENT.search(self._header)
        return None if found is None else found[1]

    def _take(self, text: str) -> Iterator[Part]:
        if self._is_header:
            self._raw, self._header = self._raw + text, self._header + text
            may_be = self._is_marked or BEGINS.fullmatch(self._raw) is not None
            if len(self._header) > MAX_HEADER or not may_be:
                text = self._raw
                self._answer()
                yield Text(plain(text))
        elif self._recipient is not None:
            self._body += text
            text = self._escape + text
            for found in ESCAPE_OR_QUOTE.finditer(text):
                self._is_string ^= found[0] == '"'
            n_escapes = len(text) - len(text.rstrip("\\"))
            self._escape = "\\" if n_escapes % 2 else ""
        elif text:
            yield (Thought if "analysis" in self._header else Text)(plain(text))

    def _end(self, name: str) -> Iterator[Part]:
        """Ends a message.

        Yields its call if it has a recipient. name: the mark that ends it, or "".
        """
        recipient, body = self._recipient, plain(self._body).strip()
        if self._is_header:
            is_cut = self._is_marked and recipient is None and HEADER.fullmatch(self._header)
            if recipient is not None and name == "call":
                yield ToolCall(recipient, "{}")
            elif self._raw.strip() and not is_cut:
                yield Text(plain(self._raw))
        elif recipient is not None and (body or name):
            yield call_of(recipient, body or "{}") or Text(body)
