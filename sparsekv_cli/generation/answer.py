"""An answer that grows by tokens: its text as soon as it is certain, and what ends it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsekv_cli.models.chat.thinking import ChannelSplitter, Thinking, ThinkingSplitter, overlap

if TYPE_CHECKING:
    from sparsekv_cli.generation.constraint import AnswerConstraint
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer

STOP_EOS, STOP_LENGTH, STOP_TEXT, STOP_INTERRUPT = "eos", "length", "stop", "interrupt"


@dataclass
class Answer:
    """What was generated.

    text: the answer; a stop string and what follows it is not part of it.
    tokens: the sampled ids, without the end-of-generation token that ended them.
    stop_reason: ``eos``, ``length``, ``stop`` or ``interrupt``. stopped_by: the stop string.
    thinking: what was thought ahead of it. written: both as they came, with the markers.
    """

    text: str
    tokens: list[int]
    stop_reason: str
    thinking: str = ""
    written: str = ""
    stopped_by: str = ""


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    Text that may be the beginning of a stop string is held back until the next piece decides.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty")
        self.stops = tuple(stops)
        self.found = ""  # the one that was found
        self._held = ""

    def push(self, text: str) -> str:
        """The part of everything so far that can be shown now."""
        text = self._held + text
        found = [(start, stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            start, self.found = min(found)
            self._held = ""
            return text[:start]
        keep = max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when nothing follows any more."""
        held, self._held = self._held, ""
        return held


class AnswerBuilder:
    """An answer that grows by tokens. ``write`` gets its text as soon as it is certain.

    stops: texts before which the answer ends. constraint: what ends it where nothing can follow.
    special: control tokens are part of the text, the one that ends the answer too. thinking: the
    markers of what is no part of the text, which ``write_thinking`` gets; prompt: the prompt's
    tokens, or the last of them, which may open it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        write: Callable[[str], None],
        constraint: AnswerConstraint | None = None,
        *,
        special: bool = False,
        thinking: Thinking | None = None,
        write_thinking: Callable[[str], None] = lambda text: None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.answer = Answer("", [], STOP_LENGTH)
        self._tokenizer = tokenizer
        self._end_ids = frozenset(tokenizer.eog_ids)
        # Not StreamDecoder: a completion keeps the space before its first word.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopStrings(stops)
        self._write = write
        self._constraint = constraint
        self._special = special
        self._write_thinking = write_thinking
        self._splitter: ThinkingSplitter | ChannelSplitter | None = None
        self._shown_ids: frozenset[int] = frozenset()
        if thinking is not None:
            opened = thinking.opened_by(tokenizer, prompt)
            self.answer.written = opened
            self._splitter = thinking.splitter(is_open=bool(opened))
            self._shown_ids = thinking.control_ids

    def push(self, token: int) -> bool:
        """Adds a token; whether the answer ends with it."""
        is_end = token in self._end_ids
        if not is_end:
            self.answer.tokens.append(token)
        is_text = self._special or (not is_end and self._is_shown(token))
        piece = self._tokenizer.token_bytes(token) if is_text else b""
        self._emit(self._matcher.push(self._decoder.decode(piece)))
        if self._matcher.found and not is_end:
            self._stop()
            return True
        if is_end or (self._constraint is not None and self._constraint.is_finished):
            self.answer.stop_reason = STOP_EOS
            return True
        return False

    def finish(self) -> Answer:
        """The answer, to which nothing is added any more."""
        if not self._matcher.found:
            self._emit(self._matcher.push(self._decoder.decode(b"", final=True)))
            if self._matcher.found:
                self._stop()
            else:
                self._emit(self._matcher.flush())
        if self._splitter is not None:
            self._tell(*self._splitter.flush())
        return self.answer

    def _stop(self) -> None:
        self.answer.stop_reason, self.answer.stopped_by = STOP_TEXT, self._matcher.found

    def _is_shown(self, token: int) -> bool:
        return self._tokenizer.is_shown(token) or token in self._shown_ids

    def _emit(self, text: str) -> None:
        if text:
            self.answer.written += text
            self._tell(*(self._splitter.push(text) if self._splitter is not None else ("", text)))

    def _tell(self, thought: str, text: str) -> None:
        if thought:
            self.answer.thinking += thought
            self._write_thinking(thought)
        if text:
            self.answer.text += text
            self._write(text)
