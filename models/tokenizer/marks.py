"""Marks: the tokens that divide an answer into thinking, calls and text, such as ``<think>``.

In the text of an answer one character stands for each token that is a mark. It is a lone surrogate,
half of a character beyond 16 bits. UTF-8 cannot encode it, so no other token writes it. If an
answer only spells a mark with other tokens, the spelling stays as text.
"""

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer

CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")  # gpt-oss
KNOWN = (
    *CHANNEL_MARKS,
    *("<|return|>", "<|call|>"),
    *("<think>", "</think>"),
    *("[THINK]", "[/THINK]"),
    *("<seed:think>", "</seed:think>"),
    *("<|START_THINKING|>", "<|END_THINKING|>"),
    *("<|inner_prefix|>", "<|inner_suffix|>"),
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),  # Gemma 4
    *("<tool_call>", "</tool_call>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_call|>", "<|/tool_call|>", "</|tool_call|>"),
    "<|python_tag|>",
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
FIRST, N_STAND_INS = 0xD800, 0x800
STAND_INS = {mark: chr(FIRST + i) for i, mark in enumerate(KNOWN)}
SPELLINGS = {char: mark for mark, char in STAND_INS.items()}
STAND_IN = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Marks:
    """The marks that are tokens of a vocabulary.

    ids: spelling (one of KNOWN) -> token. None: the vocabulary is not known. Then a spelling is a
    mark wherever the form of the answer allows one. shows_controls: whether other control tokens
    are spelled in the text.
    """

    ids: Mapping[str, int] | None = None
    shows_controls: bool = False

    def __getitem__(self, text: str) -> str:
        """Returns ``text`` with the spellings of marks replaced by their characters.

        If ``ids`` is None, the text stays as it is.
        """
        for spelling in self.ids or ():
            text = text.replace(spelling, STAND_INS[spelling])
        return text

    def by_id(self) -> dict[int, str]:
        """Returns token -> character, for each token that is a mark."""
        return {token: STAND_INS[spelling] for spelling, token in (self.ids or {}).items()}


SPELLED = Marks()
CONTROLS_SHOWN = Marks(shows_controls=True)


def marks_of(tokenizer: "Tokenizer", spellings: Iterable[str]) -> Marks:
    """Returns the marks among ``spellings`` that are tokens of the tokenizer's vocabulary."""
    ids = {}
    for spelling in spellings:
        found = _ids(tokenizer, spelling)
        if len(found) == 1 and tokenizer.token_bytes(found[0]) == spelling.encode():
            ids[spelling] = found[0]
    return Marks(ids)


class TokenText:
    """Converts the tokens of an answer to text, one by one. It returns only complete characters."""

    def __init__(self, tokenizer: "Tokenizer", characters: Mapping[int, str]) -> None:
        """characters: token -> its character, for tokens that are marks, from ``Marks.by_id``."""
        self._tokenizer, self._characters = tokenizer, characters
        # StreamDecoder would drop the space before the first word. A completion keeps it.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Returns the text that a token completes. It may be empty."""
        mark = self._characters.get(token)
        if mark is None:
            return self._decoder.decode(self._tokenizer.token_bytes(token))
        return self.flush() + mark

    def flush(self) -> str:
        """Returns U+FFFD for an incomplete character, else an empty text."""
        return self._decoder.decode(b"", final=True)


class StopForms:
    """Finds the control tokens in stop strings, which are not shown in the text of an answer.

    stops: the stop strings that can occur in a text. characters: control token -> a character that
    stands for it in the text. forms: stop string with such characters -> the stop string that the
    user gave.
    """

    def __init__(
        self, tokenizer: "Tokenizer", stops: Iterable[str], characters: Mapping[int, str]
    ) -> None:
        """characters: token -> character, for tokens that are marks."""
        free = map(chr, range(FIRST + len(KNOWN), FIRST + N_STAND_INS))
        self.characters: dict[int, str] = {}
        self.forms: dict[str, str] = {}
        self._spellings: dict[str, str] = {}
        # no text contains a lone surrogate
        self.stops = [stop for stop in stops if not STAND_IN.search(stop)]
        for stop in self.stops:
            form = stop
            for token in _ids(tokenizer, stop):
                if token in characters or not tokenizer.is_shown(token):
                    spelling = tokenizer.token_bytes(token).decode()
                    char = characters.get(token) or self.characters.get(token) or next(free, "")
                    if char and token not in characters:
                        self.characters[token], self._spellings[char] = char, spelling
                    form = form.replace(spelling, char or spelling)
            if form != stop:
                self.forms[form] = stop

    def without(self, text: str, *, is_spelled: bool) -> str:
        """Returns ``text`` without the characters of control tokens, or with their spellings."""
        for char, spelling in self._spellings.items():
            text = text.replace(char, spelling if is_spelled else "")
        return text


def plain(text: str) -> str:
    """Returns ``text`` with the spellings of marks in place of their characters."""
    return STAND_IN.sub(lambda found: SPELLINGS.get(found[0], ""), text)


def _ids(tokenizer: "Tokenizer", text: str) -> list[int]:
    return tokenizer.encode(text, add_bos=False, add_eos=False, parse_special=True)
