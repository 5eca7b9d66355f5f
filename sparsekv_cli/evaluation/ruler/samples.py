"""The samples of a run, and each sample as a prompt of a given number of tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import NamedTuple

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.ruler.tasks import TASKS, RulerSample

# (user's message, beginning of the answer) -> ids.
Encode = Callable[[str, str], list[int]]


class RulerPrompt(NamedTuple):
    """A sample as token ids. The first ``n_context`` ids come before the question."""

    sample: RulerSample
    ids: list[int]
    n_context: int


@dataclass(frozen=True)
class RulerPlan:
    """Which samples a run asks, and how."""

    tasks: Sequence[str]
    lengths: Sequence[int]
    n_samples: int
    seed: int
    # True: the question is decoded token by token, after the prefill
    question_by_decode: bool = False
    n_answer: int | None = None  # most tokens of an answer; None: as many as the task allows

    def room(self, task: str) -> int:
        """Returns the most tokens that an answer to ``task`` may have."""
        return min(TASKS[task].n_answer, self.n_answer or TASKS[task].n_answer)

    def samples(self) -> Iterator[tuple[int, str, int]]:
        """Yields length, task and number of every sample."""
        for length in self.lengths:
            for task in self.tasks:
                for number in range(self.n_samples):
                    yield length, task, number

    def check(self, encode: Encode) -> None:
        """Raises SparseKVError if a sample cannot be made as short as its length."""
        for length, task, number in self.samples():
            shortest_prompt(task, length, number, self.seed, self.room(task), encode)


def shortest_prompt(
    task: str, length: int, number: int, seed: int, n_answer: int, encode: Encode
) -> tuple[RulerSample, list[int]]:
    """Returns the sample with the shortest text, and its ids.

    Raises SparseKVError if it does not fit ``length`` tokens with its answer.
    """
    sample, ids = _prompt(task, length, number, seed, encode, TASKS[task].least)
    if len(ids) > length - n_answer:
        raise SparseKVError(
            f"{task} takes at least {len(ids) + n_answer} tokens, {n_answer} of them for "
            f"the answer, but --lengths has {length}: give a greater one"
        )
    return sample, ids


def _prompt(
    task: str, length: int, number: int, seed: int, encode: Encode, n: int
) -> tuple[RulerSample, list[int]]:
    """Returns a sample with n units of text, such as sentences, and its ids."""
    sample = TASKS[task].make(Random(f"{seed} {task} {length} {number}"), n, length)
    return sample, encode(message(sample), sample.answer)


def make_prompt(
    task: str, length: int, number: int, seed: int, n_answer: int, encode: Encode
) -> RulerPrompt:
    """Returns sample ``number`` of a task with the longest text that leaves room for the answer.

    The same arguments give the same sample. Raises SparseKVError if no text is short enough.
    """
    prompt = partial(_prompt, task, length, number, seed, encode)
    room, low = length - n_answer, TASKS[task].least
    best = shortest_prompt(task, length, number, seed, n_answer, encode)
    high = low + max(1, room)  # a unit of text has a token or more
    while high - low > 1:
        middle = (low + high) // 2
        tried = prompt(middle)
        if len(tried[1]) <= room:
            low, best = middle, tried
        else:
            high = middle
    sample, ids = best
    other = encode(message(sample._replace(question="#")), "")
    n_context = next(
        (i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(other)
    )
    return RulerPrompt(sample, ids, n_context)


def message(sample: RulerSample) -> str:
    return f"{sample.context}\n\n{sample.question}"
