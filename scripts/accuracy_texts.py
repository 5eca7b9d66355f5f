"""What scripts/accuracy reads to the model: two long texts, and questions hidden in them.

Texts and facts are ours. A needle prompt is a text with one fact put between two of its paragraphs,
followed by a question about it, all as one user message.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sparsekv_cli.errors import SparseKVError

DATA = Path(__file__).resolve().parent / "data"
TEXT_FILES = (DATA / "accuracy_prose.txt", DATA / "accuracy_mixed.txt")


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
)


def read_texts() -> list[str]:
    """The texts, each long enough for 6.5K tokens and a continuation."""
    return [path.read_text(encoding="utf-8") for path in TEXT_FILES]


def needle_prompt(needle: Needle, text: str, n_tokens: int, count: Callable[[str], int]) -> str:
    """A user message of nearly ``n_tokens``: as many whole paragraphs of ``text`` as fit.

    count: tokens of a string. SparseKVError when the text is shorter than that.
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
    return "\n\n".join([*paragraphs, question])
