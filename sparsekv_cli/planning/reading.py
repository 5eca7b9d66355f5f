"""Chooses the part of a document to read, and makes the task on which methods are tried.

The task is the document with some facts planted in it. Methods then decode given tokens: they
repeat a passage of the document, continue its end, and name each fact. All these tokens are text of
the document and the facts. So a base model can do the task too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from sparsekv_cli.models.tokenizer.ids import n_common
from sparsekv_cli.planning.auto import N_HALF, loss_task

FACTS = (  # a number follows each fact; no two facts begin with the same words
    "The secret code of the harbour master is",
    "The phone number of the village baker is",
    "The old safe in the cellar opens with",
    "The blue tractor has the serial number",
    "A library card of the schoolteacher bears",
    "Her parcel from Lisbon was registered as",
    "His winning ticket in the lottery was",
    "Inside the ship's bell someone had scratched",
)
N_WORDS = 2 * N_HALF  # steps in which a method's word is compared with full's
PART = 512  # tokens; the length of a reading is a multiple
END_OF_SENTENCE = re.compile(r"[.!?]\s*$|\n\s*$")
SEARCHED = 64  # tokens in which the end of a sentence is searched


def affordable_tokens(work: Callable[[int], float], n: int, most: float, least: int) -> int:
    """Returns the most tokens, at most n, whose ``work`` is at most ``most``.

    It is ``least`` plus a multiple of PART, or n. Even if their work is more than ``most``, it is
    ``least`` (or n, if n is less).
    """
    found = min(n, least)
    while found < n and work(min(n, found + PART)) <= most:
        found = min(n, found + PART)
    return found


def fitting_text(
    text: str, encode: Callable[[str], Sequence[int]], most: int
) -> tuple[str, Sequence[int]]:
    """Returns the beginning of ``text`` that has at most ``most`` tokens, and its ids.

    encode: text -> ids. A text with far more tokens is never encoded as a whole.
    """
    text = text[: 32 * most]
    while len(ids := encode(text)) > most:
        keep = min(len(text) - 1, int(len(text) * 0.99 * most / len(ids)))
        if keep <= 0:
            return "", encode("")
        text = text[:keep]
    return text, ids


@dataclass(frozen=True)
class LossTask:
    """A document with planted facts, and the tokens that every method decodes after it."""

    prompt: list[int]
    following: list[int]  # N_WORDS tokens of the document, then a sentence for each fact
    # For each fact, the steps that name its number. A method has found the fact if, after each of
    # these steps, ``following[step + 1]`` is its likeliest token.
    facts: Sequence[range]
    first: int  # the position of the first fact in ``prompt``


def make_task(
    document: Sequence[int],
    start: float,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
) -> LossTask:
    """Plants FACTS in the document, after the share ``start`` of it.

    Tokens before the first fact stay as they are. encode: ids of a text within another text.
    decode: text of ids.
    """
    random = Random(len(FACTS))
    codes = [str(random.randint(10_000, 99_999)) for _ in FACTS]
    prompt, following = loss_task(document)
    end = len(document) - 3 * N_HALF
    planted: list[int] = []
    places, last = [], 0
    for i, (fact, code) in enumerate(zip(FACTS, codes, strict=True)):
        at = int(end * (start + (1 - start) * (i + 0.5) / len(FACTS)))
        at = max(last, _end_of_sentence(prompt, at, end, decode))
        places.append(at)
        planted += prompt[last:at] + encode(f"\n\n{fact} {code}.\n\n")
        last = at
    asked, facts = list(zip(FACTS, codes, strict=True)), []
    random.shuffle(asked)
    for fact, code in asked:
        lead = f"\n\n{fact}"
        ids, n = encode(f"{lead} {code}."), len(following)
        first = n_common(ids, encode(lead))
        stop = len(ids)
        while stop > first + 1 and code in decode(ids[first : stop - 1]):
            stop -= 1
        facts.append(range(n + first - 1, n + stop - 1))
        following += ids
    return LossTask(planted + prompt[last:], following, facts, places[0])


def _end_of_sentence(
    ids: Sequence[int], at: int, end: int, decode: Callable[[Sequence[int]], str]
) -> int:
    """Returns the first end of a sentence from ``at`` on; ``at`` if none is near."""
    for place in range(at, min(at + SEARCHED, end)):
        if END_OF_SENTENCE.search(decode(ids[max(0, place - 4) : place])):
            return place
    return at
