"""Covers the texts of a conversation, so that nothing in them is read as a control token.

A template mixes its own control tokens with the texts of users, tools and the model. Before a
template gets these texts, they are covered. A character of Unicode's private use area then replaces
the first character of each control token in them. The rendered text is cut at its control tokens.
Only then the original characters come back. So a user cannot write a control token. None arises
either if a template trims, joins or cuts texts.

Templates search for words such as ``</think>`` in the texts. A word that the template names is not
covered, unless a control token may begin in it. In an answer, the markers of thinking are covered
after the answer's own thinking. Otherwise a template would cut the text there.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jinja2

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat.template import source_of, texts_of

PRIVATE_USE = range(0xE000, 0xF900)
ROLES = ("system", "user", "assistant", "tool")
MAX_WORD = 100  # characters; templates search for shorter words
ESCAPED = r"\\u([0-9a-fA-F]{4})"  # as JSON and Python's repr write a private use character


class Cover:
    """Replacement characters for one conversation that one template renders.

    controls: the spellings of control tokens; not empty. template: see ``render``. conversation:
    all messages and tools to cover. markers: of thinking, start and end first.
    """

    def __init__(
        self,
        controls: Collection[str],
        template: str | None,
        conversation: Sequence[Mapping[str, Any]],
        markers: Sequence[str] = (),
    ) -> None:
        source = source_of(template)
        names, written = words_of(source)
        rests = rests_of(controls, written)
        firsts = {token[0] for token in controls}
        self._rests = tuple(rests)
        self._parts = {rest[:n] for rest in rests for n in range(1, len(rest))}
        self._words = kept_words(controls, firsts, written)
        self._lengths = sorted(set(map(len, self._words)), reverse=True)
        self._heads = re.compile("|".join(sorted({*map(head_pattern, self._words)})) or "(?!)")
        self._names = {name for name in names if not self._completes(name)} - set(controls)
        self._markers = markers
        characters = sorted(firsts | {text[0] for text in (*rests, *markers)})
        texts = "\n".join([source, *controls, *texts_of(conversation)])
        self._stand_ins = stand_ins(characters, texts)
        self._firsts = {char: self._stand_ins[char] for char in firsts}
        self._originals = {mark: char for char, mark in self._stand_ins.items()}

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns ``messages`` with all texts covered, except the roles in ROLES."""
        covered = []
        for message in messages:
            covered.append(self.value(message))
            if message.get("role") in ROLES:
                covered[-1]["role"] = message["role"]
            if message.get("role") == "assistant" and isinstance(message.get("content"), str):
                covered[-1]["content"] = self._answer(message["content"])
        return covered

    def _answer(self, text: str) -> str:
        """Returns an answer, covered. The markers of the thinking at its beginning stay."""
        n_thought = 0
        if self._markers and text.lstrip().startswith(self._markers[0]):
            thought, end, _ = text.partition(self._markers[1])
            n_thought = len(thought + end)
        rest = self.text(text[n_thought:])
        for marker in self._markers:
            rest = rest.replace(marker, self._stand_ins[marker[0]] + marker[1:])
        return self.text(text[:n_thought]) + rest

    def value(self, value: Any) -> Any:
        """Returns ``value`` with all texts in it covered, except keys that the template names."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                key if key in self._names else self.value(key): self.value(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def text(self, text: str) -> str:
        """Returns ``text``, covered."""
        if self._completes(text):
            rest = text.lstrip()
            text = text[: -len(rest)] + self._stand_ins[rest[0]] + rest[1:]
        parts, end = [], 0
        for found in self._heads.finditer(text):
            start = found.start()
            n = next((n for n in self._lengths if text[start : start + n] in self._words), 0)
            if n and start >= end:
                parts += [replaced(text[end:start], self._firsts), text[start : start + n]]
                end = start + n
        return "".join(parts) + replaced(text[end:], self._firsts)

    def _completes(self, text: str) -> bool:
        """Returns whether ``text`` could complete a control token that the template begins."""
        text = text.strip()
        return text.startswith(self._rests) or text in self._parts

    def lift(self, text: str) -> str:
        """Returns the original of a covered text.

        Escapes of covered characters in JSON become escapes.
        """

        def json_of(found: re.Match[str]) -> str:
            original = self._originals.get(chr(int(found[1], 16)))
            return found[0] if original is None else json.dumps(original)[1:-1]

        return replaced(re.sub(ESCAPED, json_of, text), self._originals)


def replaced(text: str, new: Mapping[str, str]) -> str:
    """Returns ``text`` with characters replaced; for a few, this is faster than ``translate``."""
    for char in new:
        text = text.replace(char, new[char])
    return text


def words_of(source: str) -> tuple[set[str], set[str]]:
    """Returns the keys that a template may read, and the texts that it writes."""
    names, written = set(), set()
    with contextlib.suppress(jinja2.TemplateSyntaxError, ValueError):  # ``render`` reports it
        for token in jinja2.Environment().lexer.tokenize(source):
            if token.type in ("data", "string"):
                written.add(str(token.value))
            if token.type in ("name", "string") and str(token.value).isidentifier():
                names.add(str(token.value))
    return names, written


def rests_of(controls: Iterable[str], written: Iterable[str]) -> set[str]:
    """Returns the ends of control tokens of which the template writes only the start.

    ``'<' ~ key ~ '>'`` in a template makes ``</s>`` of the key ``/s``.
    """
    longest = max(map(len, controls), default=0)
    ends = {word[-n:] for word in written for n in range(1, min(longest, len(word)) + 1)}
    return {token[n:] for token in controls for n in range(1, len(token)) if token[:n] in ends}


def head_pattern(word: str) -> str:
    """Returns a pattern for places where ``word`` may start. A match is one character."""
    return f"{re.escape(word[0])}(?={re.escape(word[1:3])})"


def kept_words(
    controls: Iterable[str], firsts: Collection[str], written: Iterable[str]
) -> set[str]:
    """Returns the words in a template that must not be covered.

    controls: spellings of control tokens. firsts: their first characters. written: the template's
    texts. A word begins at its first character in ``firsts``.
    """
    tokens = tuple(controls)
    longest = max(map(len, tokens), default=0)
    beginnings = {token[:n] for token in tokens for n in range(1, len(token) + 1)}
    kept = set()
    for word in written:
        places = [place for place, char in enumerate(word) if char in firsts]
        parts = [word[place : place + longest] for place in places]
        if parts and not any(part in beginnings or part.startswith(tokens) for part in parts):
            kept.add(word[places[0] :])
    return {word for word in kept if len(word) <= MAX_WORD}


def stand_ins(characters: Sequence[str], texts: str) -> dict[str, str]:
    """Returns character -> private use character, for each of ``characters``.

    Neither the private use character nor its JSON escape occurs in ``texts``. Raises SparseKVError
    if too few are free.
    """
    taken = {*texts, *(chr(int(found, 16)) for found in re.findall(ESCAPED, texts))}
    free = (char for char in map(chr, PRIVATE_USE) if char not in taken)
    found = dict(zip(characters, free, strict=False))
    if len(found) < len(characters):
        raise SparseKVError(
            f"the conversation holds nearly all of Unicode's {len(PRIVATE_USE)} private use "
            "characters, of which control tokens need some: take some out, or use --parse-special"
        )
    return found
