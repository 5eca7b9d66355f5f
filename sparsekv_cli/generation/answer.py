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

    text: str  # without a stop string and what follows it
    tokens: list[int]  # the sampled ids, without the end-of-generation token
    stop_reason: str  # ``eos``, ``length``, ``stop`` or ``interrupt``
    thinking: str = ""  # the thinking before the answer
    written: str = ""  # thinking and text as they came, with the markers
    stopped_by: str = ""  # the stop string
    is_cut: bool = False  # whether it ended because the context is full
    # one entry a token, if they are kept
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces.

    Text that may be the beginning of a stop string is held back until the next piece decides.
    """

    def __init__(
        self, stops: Sequence[str], forms: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """forms: other texts that are found, each with the stop string that it stands for."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty: give a text")
        self._stops = {**{stop: stop for stop in stops}, **forms}
        self.found = ""  # the stop string in the text
        self._held = ""

    def push(self, text: str) -> str:
        """Returns the part of all text so far that can be shown now."""
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
        """Returns the held-back text at the end of the answer."""
        held, self._held = self._held, ""
        return held
