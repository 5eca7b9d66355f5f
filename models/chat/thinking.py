"""The thinking before an answer: its markers, and a splitter of text that arrives in pieces.

A chat template names the markers of its family. Most templates also have a variable that turns
thinking off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparsekv_cli.models.chat.calls import Part, Thought, ToolCall
from sparsekv_cli.models.chat.harmony import HarmonyReader
from sparsekv_cli.models.tokenizer.marks import (
    CHANNEL_MARKS,
    KNOWN,
    SPELLED,
    Marks,
    TokenText,
    marks_of,
    plain,
)

if TYPE_CHECKING:
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer

CHANNELS = ("<|channel|>analysis<|message|>", "<|end|>")  # gpt-oss: each message is on a channel
FINAL = "<|channel|>final<|message|>"
# Start and end markers, by family.
MARKERS = (
    CHANNELS,
    ("<think>", "</think>"),  # Qwen, DeepSeek, SmolLM3, Granite and most others
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)
# a template's switch is the first of these variables that it has
SWITCHES = ("enable_thinking", "thinking")
# Variables of a template that a user may not set.
SET_BY_PROGRAM = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
N_TAIL_TEXT = 256  # characters at the end of the thinking that may contain the end marker
N_TAIL = 16  # tokens at the end of a prompt that may contain the start marker


class Thinking(NamedTuple):
    """The markers with which a model marks its thinking in a text.

    The methods expect the text of an answer, in which characters stand for marks (marks.py).
    """

    start: str
    end: str
    marks: Marks = SPELLED  # the markers that are tokens

    @property
    def is_channel(self) -> bool:
        """Whether messages are on channels (gpt-oss). The answer is on the channel ``final``."""
        return self[:2] == CHANNELS

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that a template may search in an answer, start and end first."""
        return (self.start, self.end, FINAL) if self.is_channel else (self.start, self.end)

    def closing(self, thought: str) -> str:
        """Returns the text that ends the thinking after ``thought`` and starts the answer."""
        if not self.is_channel:
            return f"\n{self.end}\n\n"
        again = f"<|end|><|start|>assistant{FINAL}"
        if not self._is_header(thought):
            return again
        header, thinks, answers = self._headers(thought)
        if answers.startswith(header):
            return plain(answers[len(header) :])
        rest = plain(thinks[len(header) :]) if thinks.startswith(header) else "<|message|>"
        return rest + again

    def rests_of_header(self, thought: str) -> tuple[str, ...]:
        """Returns the texts that may complete the header of a message; () if no header is open.

        A message is either thinking or the answer.
        """
        if not self._is_header(thought):
            return ()
        header, *whole = self._headers(thought)
        return tuple(plain(each[len(header) :]) for each in whole if each.startswith(header))

    def _headers(self, thought: str) -> tuple[str, str, str]:
        """Returns the header so far, the header of thinking, and the header of the answer."""
        _, end, header = thought.rpartition(self.marks["<|end|>"])
        begin = "<|start|>assistant" if end else ""
        return header, self.marks[begin + self.start], self.marks[begin + FINAL]

    def _is_header(self, thought: str) -> bool:
        message, end = self.marks["<|message|>"], self.marks["<|end|>"]
        return self.is_channel and message not in thought.rpartition(end)[2]

    def end_of(self, thought: str) -> str:
        """Returns the end of the thinking, as long as the other methods need it."""
        end = thought[-N_TAIL_TEXT:]
        is_cut_body = self.is_channel and not self._is_header(thought) and self._is_header(end)
        return self.marks["<|message|>"] + end if is_cut_body else end

    def is_closed(self, thought: str) -> bool:
        """Returns whether the thinking is complete with ``thought``, so that the answer follows."""
        if self.is_channel:
            names = ("<|channel|>", "<|constrain|>", "<|message|>")
            channel, form, message = (re.escape(self.marks[name]) for name in names)
            begins = rf"{channel}\s*final\b[^<]*({form}[^<]*)?{message}\Z"
            return re.search(begins, thought) is not None
        return thought.rstrip().endswith(self.marks[self.end])

    def splitter(self, *, is_open: bool) -> ThinkingSplitter | ChannelSplitter:
        """Returns a splitter for an answer. is_open: the prompt ends with the start marker."""
        if self.is_channel:
            return ChannelSplitter(self.marks)
        return ThinkingSplitter(self, is_open=is_open)

    def opened_by(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        """Returns the end of a prompt from the start marker on, if it opens the thinking; or "".

        ids: the prompt's ids, or the last of them.
        """
        _, start, after = self._tail(tokenizer, ids).rpartition(self.marks[self.start])
        return plain(start + after) if start and not after.strip() else ""

    def written(self, prompt: str, thought: str) -> str:
        """Returns the text that continues ``prompt`` to the beginning of the final answer.

        thought: the thinking to write before the answer.
        """
        if self.is_channel:
            analysis = f"{self.start}{thought}<|end|><|start|>assistant" if thought else ""
            return analysis + FINAL
        _, start, after = prompt.rpartition(self.start)
        is_open = bool(start) and not after.strip()
        if is_open or thought:
            return ("" if is_open else f"{self.start}\n") + thought + self.closing("")
        return ""

    def closed_by(self, tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
        """Returns whether a prompt ends with the end marker, so that the answer has no thinking."""
        tail = self._tail(tokenizer, ids).rstrip()
        return not self.is_channel and tail.endswith(self.marks[self.end])

    def _tail(self, tokenizer: Tokenizer, ids: Sequence[int]) -> str:
        """Returns the text of the last N_TAIL tokens of a prompt."""
        text = TokenText(tokenizer, self.marks.by_id())
        return "".join([*map(text.push, ids[-N_TAIL:]), text.flush()])


def thinking_of(template: str | None, tokenizer: Tokenizer) -> Thinking | None:
    """Returns the markers of thinking that a chat template names; None if it names none."""
    markers = markers_of(template)
    if markers is None:
        return None
    start, end = markers
    names = CHANNEL_MARKS if markers == CHANNELS else [x for x in KNOWN if x in (start + end)]
    return Thinking(start, end, marks_of(tokenizer, names))


def markers_of(template: str | None) -> tuple[str, str] | None:
    """Returns the start and end marker that a chat template names; None if it names none."""
    if template is None:
        return None
    for start, end in MARKERS:
        if start in template or (end in template and (start, end) != CHANNELS):
            return start, end
    return None


def switch_of(template: str | None) -> str | None:
    """Returns the template's variable that turns thinking on and off; None if it has none."""
    if template is None or not any(name in template for name in SWITCHES):
        return None
    names = variables_of(template)
    return next((name for name in SWITCHES if name in names), None)


def variables_of(template: str | None) -> frozenset[str]:
    """Returns the variables that a template reads and that a user may set."""
    from jinja2 import TemplateError, meta

    from sparsekv_cli.models.chat.limits import Limits
    from sparsekv_cli.models.chat.sandbox import BoundedEnvironment
    from sparsekv_cli.models.chat.template import SPARE_CHARS, source_of

    if template is None:
        return frozenset()
    environment = BoundedEnvironment(Limits(SPARE_CHARS))
    try:
        names = meta.find_undeclared_variables(environment.parse(source_of(template)))
    except TemplateError:  # ``render`` reports it
        return frozenset()
    return frozenset(names - set(environment.globals) - SET_BY_PROGRAM)


def overlap(text: str, word: str) -> int:
    """Returns the length of the longest end of ``text`` that is a start of ``word``."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if word.startswith(text[-length:]):
            return length
    return 0


class ThinkingSplitter:
    """Splits a text that arrives in pieces into thinking and answer.

    Only the beginning of a text can be thinking. Later markers are text. White space between a
    marker and text is dropped. is_open: whether the prompt ends with the start marker.
    """

    def __init__(self, thinking: Thinking, *, is_open: bool) -> None:
        marks = thinking.marks
        self._start, self._end = marks[thinking.start], marks[thinking.end]
        self._step = self._think if is_open else self._begin
        self._held = ""
        self._is_blank = True  # True: only white space has come since the last marker

    def push(self, text: str) -> tuple[str, str]:
        """Adds a piece. Returns the new text of (thinking, answer), as far as it is certain."""
        return self._step(self._held + text)

    def flush(self) -> tuple[str, str]:
        """Returns the text that ``push`` has held back, as (thinking, answer).

        One of them is empty. Call it after the last piece.
        """
        held, self._held = self._held, ""
        if self._step == self._think:
            return held.rstrip(), ""
        return "", held

    def _begin(self, text: str) -> tuple[str, str]:
        stripped = text.lstrip()
        if stripped.startswith(self._start):
            self._step = self._think
            return self._think(stripped[len(self._start) :])
        self._held = text
        if self._start.startswith(stripped):
            return "", ""
        self._step, self._held, self._is_blank = self._answer, "", False
        return "", text

    def _think(self, text: str) -> tuple[str, str]:
        if self._is_blank:
            text = text.lstrip()
        thought, end, answer = text.partition(self._end)
        if end:
            self._step, self._is_blank = self._answer, True
            return thought.rstrip(), self._answer(answer)[1]
        n_shown = len(text[: len(text) - overlap(text, self._end)].rstrip())
        self._held = text[n_shown:]
        self._is_blank = self._is_blank and not n_shown
        return text[:n_shown], ""

    def _answer(self, text: str) -> tuple[str, str]:
        self._held = ""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return "", text


class ChannelSplitter:
    """Splits gpt-oss's text. The channel ``analysis`` is thinking; calls are written as text."""

    def __init__(self, marks: Marks) -> None:
        self._reader = HarmonyReader(marks)

    def push(self, text: str) -> tuple[str, str]:
        return _sides(self._reader.push(text))

    def flush(self) -> tuple[str, str]:
        return _sides(self._reader.flush())


def _sides(parts: Iterable[Part]) -> tuple[str, str]:
    thought, answer = "", ""
    for part in parts:
        if isinstance(part, Thought):
            thought += part.text
        else:
            answer += f"{part.name}({part.arguments})" if isinstance(part, ToolCall) else part.text
    return thought, answer


def without_thinking(thinking: Thinking | None, text: str) -> str:
    """Returns the text of an answer without its thinking."""
    if thinking is None:
        return text
    splitter = thinking.splitter(is_open=False)
    return splitter.push(text)[1] + splitter.flush()[1]
