"""An answer, and the stop strings that end it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sparsekv_cli.models.chat.thinking import overlap

STOP_EOS, STOP_LENGTH, STOP_TEXT, STOP_INTERRUPT = "eos", "length", "stop", "interrupt"


@dataclass
class Answer:
    """A generated answer."""

    text: str  # the text before a stop string
    tokens: list[int]  # the sampled ids, without the token that ends the answer
    stop_reason: str  # ``eos``, ``length``, ``stop`` or ``interrupt``
    thinking: str = ""  # the text of the thinking
    written: str = ""  # thinking and text as the model wrote them, with markers
    stopped_by: str = ""  # the stop string that ended the answer, or empty
    is_cut: bool = False  # whether a full context ended the answer
    # one entry a token, if the caller asked for them
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    The end of a piece may be the beginning of a stop string. It is held back until the next piece
    decides.
    """

    def __init__(
        self, stops: Sequence[str], forms: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """forms: other spellings -> the stop string that each stands for.

        Raises ValueError for an empty one.
        """
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty: give a text")
        self._stops = {**{stop: stop for stop in stops}, **forms}
        self.found = ""  # the stop string in the text
        self._held = ""

    def push(self, text: str) -> str:
        """Adds text. Returns the part of all text that can be shown now and was not shown yet."""
        text = self._held + text
        found = [
            (start, stop) for form, stop in self._stops.items() if (start := text.find(form)) >= 0
        ]
        if found:
            start, self.found = min(found)
            self._held = ""
            return text[:start]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text that is still held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held
