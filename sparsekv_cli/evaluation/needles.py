"""Plants facts in a document at several depths and lengths, and asks which methods find them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.prefill import greedy_answer, prefill_each
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.hparams import room_for

if TYPE_CHECKING:
    from sparsekv_cli.model import Model

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # 0: before the document, 1: after it
MAX_ANSWER_TOKENS = 24
FACT = "The secret code of the harbour master is {}."
QUESTION = "What is the secret code of the harbour master? Answer in one sentence."
SENTENCE = re.compile(r".+?(?:[.!?]\s+|\n+|$)", re.DOTALL)


@dataclass(frozen=True)
class Planted:
    """A prompt: a document with a fact at some depth, and a question about the fact."""

    length: int  # tokens that the prompt may have
    depth: float  # 0: at the start of the document; 1: at its end
    value: str  # number that the answer must contain
    ids: Sequence[int]


@dataclass(frozen=True)
class Needle:
    """The result of one fact: which methods found it."""

    length: int  # as Planted.length
    tokens: int  # tokens of the prompt
    depth: float
    found: Mapping[str, bool]  # the method's text -> whether its answer contained the number


def planted(document: str, fact: str, depth: float, room: int, count: Callable[[str], int]) -> str:
    """Returns the document's first sentences, as many as fit ``room`` tokens, with ``fact`` in it.

    The fact is a paragraph of its own. count: returns the tokens of a text. Raises SparseKVError if
    the document is too short.
    """
    room -= count(f"\n\n{fact}\n\n")
    sentences: list[str] = []
    for sentence in SENTENCE.findall(document):
        room -= count(sentence)
        if room < 0:
            break
        sentences.append(sentence)
    else:
        raise SparseKVError(
            f"needles: the document is {room} tokens too short: give fewer tokens, or a longer one"
        )
    at = round(depth * len(sentences))
    parts = "".join(sentences[:at]).strip(), fact, "".join(sentences[at:]).strip()
    return "\n\n".join(part for part in parts if part)


def plant_needles(
    model: Model, document: str, lengths: Sequence[int], encode: Callable[[str], list[int]]
) -> list[Planted]:
    """Returns a prompt for each of ``lengths`` and each of DEPTHS.

    encode: text of a user's message -> ids of the prompt. Every fact has another number, which is
    the same in every run. Raises SparseKVError if the document or the context is too short for a
    length.
    """
    longest = max(lengths, default=0) + MAX_ANSWER_TOKENS
    if longest > model.n_ctx:
        raise SparseKVError(
            f"needles: {longest} tokens with the answer do not fit the context of {model.n_ctx}: "
            f"give fewer tokens, or {room_for(model.hparams, longest)}"
        )

    def count(text: str) -> int:
        return len(model.tokenizer.encode(text, add_bos=False, parse_special=False))

    around = len(encode(QUESTION)) + 2
    random = np.random.RandomState(len(DEPTHS))
    found = []
    for length in lengths:
        for depth in DEPTHS:
            value = str(random.randint(10_000, 100_000))
            text = planted(document, FACT.format(value), depth, length - around, count)
            found.append(Planted(length, depth, value, encode(f"{text}\n\n{QUESTION}")))
    return found


def find_needles(
    model: Model,
    methods: Mapping[str, Method],
    prompts: Sequence[Planted],
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Needle]:
    """Asks every method about each fact. Yields the results, one a fact."""
    for i, prompt in enumerate(prompts):
        answers = greedy_answers(model, methods, prompt.ids)
        found = {spec: prompt.value in answer for spec, answer in answers}
        yield Needle(prompt.length, len(prompt.ids), prompt.depth, found)
        if progress is not None:
            progress(i + 1, len(prompts))


def greedy_answers(
    model: Model, methods: Mapping[str, Method], ids: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yields every method's greedy answer to a prompt, of at most MAX_ANSWER_TOKENS tokens."""
    tokenizer, n = model.tokenizer, MAX_ANSWER_TOKENS
    for spec, (logits, sequence, _) in prefill_each(model, methods, ids, n_steps=n):
        answer = greedy_answer(sequence, logits, tokenizer.eog_ids, n)
        yield spec, tokenizer.decode(list(answer), skip_special=True)
        del sequence, answer  # frees it before the next method
