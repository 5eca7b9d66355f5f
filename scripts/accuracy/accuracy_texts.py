"""What scripts/accuracy/measure reads to the model: four long texts, and questions hidden in them.

A story; minutes, code and letters; the transcript of a hearing; the manual of a machine.

Texts and facts are ours. A needle prompt is a text with one fact put between two of its paragraphs,
followed by a question about it, all as one user message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sparsekv_cli.errors import SparseKVError

FOLDER = Path(__file__).resolve().parent
TEXT_FILES = tuple(
    FOLDER / "texts" / f"{name}.txt" for name in ("prose", "mixed", "hearing", "manual")
)


class Needle(NamedTuple):
    """A fact, the question about it, the words that an answer must hold, and where it stands."""

    fact: str
    question: str
    value: str
    text: int  # number of the text that hides it
    depth: float  # 0 = before the text, 1 = behind it


NEEDLES = (
    Needle(
        "The secret code of the harbour master is 48213.",
        "What is the secret code of the harbour master?",
        "48213",
        0,
        0.2,
    ),
    Needle(
        "The special magic number for Lisbon is 73952.",
        "What is the special magic number for Lisbon?",
        "73952",
        1,
        0.4,
    ),
    Needle(
        "The licence number of Captain Moreno is 90467.",
        "What is the licence number of Captain Moreno?",
        "90467",
        0,
        0.6,
    ),
    Needle(
        "The telephone number of Doctor Ferris is 61583.",
        "What is the telephone number of Doctor Ferris?",
        "61583",
        1,
        0.8,
    ),
    Needle(
        "The account number of Widow Pettersen is 35867.",
        "What is the account number of Widow Pettersen?",
        "35867",
        2,
        0.3,
    ),
    Needle(
        "The combination of the safe in the cellar is 82915.",
        "What is the combination of the safe in the cellar?",
        "82915",
        3,
        0.5,
    ),
    Needle(
        "The ticket number of Professor Amundsen is 17294.",
        "What is the ticket number of Professor Amundsen?",
        "17294",
        2,
        0.7,
    ),
    Needle(
        "The password of the night watchman is 59046.",
        "What is the password of the night watchman?",
        "59046",
        3,
        0.9,
    ),
    Needle(
        "The locker number of the choir master is 26738.",
        "What is the locker number of the choir master?",
        "26738",
        1,
        0.1,
    ),
    Needle(
        "The serial number of the old ferry engine is 94105.",
        "What is the serial number of the old ferry engine?",
        "94105",
        0,
        0.35,
    ),
    Needle(
        "The secret code of the chess club is 37260.",
        "What is the secret code of the chess club?",
        "37260",
        2,
        0.5,
    ),
    Needle(
        "The special magic number for Reykjavik is 68419.",
        "What is the special magic number for Reykjavik?",
        "68419",
        3,
        0.65,
    ),
    Needle(
        "The policy number of Madame Laurent is 50872.",
        "What is the policy number of Madame Laurent?",
        "50872",
        0,
        0.85,
    ),
    Needle(
        "The room number of Inspector Halloran is 14936.",
        "What is the room number of Inspector Halloran?",
        "14936",
        1,
        0.55,
    ),
    Needle(
        "The telephone number of the village bakery is 71604.",
        "What is the telephone number of the village bakery?",
        "71604",
        3,
        0.25,
    ),
    Needle(
        "The registration number of the blue tractor is 83527.",
        "What is the registration number of the blue tractor?",
        "83527",
        2,
        0.9,
    ),
)


def read_texts() -> list[str]:
    """The texts, each long enough for 6.5K tokens and a continuation."""
    return [path.read_text(encoding="utf-8") for path in TEXT_FILES]


def needle_prompt(
    needle: Needle, text: str, n_tokens: int, count: Callable[[str], int]
) -> tuple[str, str]:
    """A user message of nearly ``n_tokens``, and the question that it ends with.

    It has as many whole paragraphs of ``text`` as fit; count: tokens of a string. SparseKVError
    when the text is shorter than that.
    """
    question = f"{needle.question} Answer in one sentence."
    room = n_tokens - count(f"\n\n{needle.fact}\n\n{question}")
    paragraphs: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        room -= count(paragraph + "\n\n")
        if room < 0:
            break
        paragraphs.append(paragraph)
    else:
        raise SparseKVError(f"needle prompt of {n_tokens} tokens: the text is {room} too short")
    paragraphs.insert(round(needle.depth * len(paragraphs)), needle.fact)
    return "\n\n".join([*paragraphs, question]), question
