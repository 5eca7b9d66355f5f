"""RULER's tasks (arXiv:2404.06654, NVIDIA/RULER): a text of any length, a question, an answer.

Needles, haystacks, numbers of keys and values, frequencies and scores are RULER's. Essays and all
wording are ours, so results are RULER-style. The task ``code`` is not RULER's.
"""

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import NamedTuple

from sparsekv_cli.evaluation.ruler.functions import code_file
from sparsekv_cli.evaluation.ruler.words import distinct, listed_words, noise, prose

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
N_HOPS = 4
N_COMMON = 10
LONG = 4096  # from so many tokens on, cwe repeats its words more often
N_FREQUENT = 3
ZETA_2 = 1.6449340668482264
DOTS = "...."


class RulerSample(NamedTuple):
    """A text, and a question about it."""

    context: str
    question: str
    answer: str  # the beginning of the answer
    references: list[str]  # texts that the answer must contain
    depths: list[float]  # where in the text needles stand, 0 to 1


@dataclass(frozen=True)
class RulerTask:
    """A kind of question, and how to make a sample of it."""

    # Arguments: a random generator, the units of text, and a length in tokens.
    make: Callable[[Random, int, int], RulerSample]
    n_answer: int  # most tokens of an answer
    least: int = 1  # units of the shortest text


@dataclass(frozen=True)
class Needles:
    """Makes samples with facts in a haystack, such as "one magic number for this key is: value"."""

    haystack: str  # ``noise``, ``essay`` or ``needles``
    keys: str = "words"  # the kind of the keys
    values: str = "numbers"  # the kind of the values
    n_keys: int = 1  # keys in the text, without the haystack's own
    n_values: int = 1  # values of each key
    n_asked: int = 1  # keys that are asked for

    def __call__(self, random: Random, n: int, _length: int) -> RulerSample:
        n_others = n if self.haystack == "needles" else 0
        keys = distinct(random, self.keys, self.n_keys + n_others)
        values = distinct(random, self.values, self.n_keys * self.n_values + n_others)
        owners = [key for key in keys[: self.n_keys] for _ in range(self.n_values)]
        owners += keys[self.n_keys :]
        facts = [
            NEEDLE.format(kind=self.values, key=key, value=value)
            for key, value in zip(owners, values, strict=True)
        ]
        hidden = facts[: self.n_keys * self.n_values]
        others = facts[len(hidden) :]
        if self.haystack != "needles":
            others = list(islice(noise() if self.haystack == "noise" else prose(random), n))
        text, depths = hide(random, hidden, others)
        asked, n_told = keys[: self.n_asked], self.n_asked * self.n_values
        kind, verb = (self.values, "are all") if n_told > 1 else (self.values[:-1], "is")
        whose = ", ".join(asked[:-1]) + " and " * (len(asked) > 1) + asked[-1]
        which = f"special magic {kind} for {whose} that the text mentions"
        return RulerSample(
            f"Some special magic {self.values} are hidden in the following text. Remember them: a "
            f"question about them comes afterwards.\n\n{text}",
            f"What {verb} the {which}?",
            f"The {which} {'are' if n_told > 1 else 'is'}",
            values[:n_told],
            depths[:n_told],
        )


def hide(random: Random, hidden: list[str], others: list[str]) -> tuple[str, list[float]]:
    """Returns ``others`` as a text with ``hidden`` at random places, and these places, 0 to 1."""
    places = [random.randint(0, len(others)) for _ in hidden]
    lines = list(others)
    for place, fact in sorted(zip(places, hidden, strict=True), key=lambda each: -each[0]):
        lines.insert(place, fact)
    return " ".join(lines), [place / max(1, len(others)) for place in places]


def variables(random: Random, n: int, _length: int) -> RulerSample:
    """Makes a sample of vt: several variables get the same value in turn; which ones?

    The text begins with a short example.
    """

    def chain(n_lines: int) -> tuple[str, list[str], str, list[float]]:
        names: dict[str, None] = {}
        while len(names) < N_HOPS + 1:
            names["".join(random.choices(string.ascii_uppercase, k=5))] = None
        value = str(random.randint(10_000, 99_999))
        assigned = [value, *(f"VAR {name}" for name in names)]
        facts = [f"VAR {name} = {what}." for name, what in zip(names, assigned, strict=False)]
        lines = list(islice(noise(), n_lines))
        places = sorted(random.randint(0, n_lines) for _ in facts)
        for place, fact in reversed(list(zip(places, facts, strict=True))):
            lines.insert(place, fact)
        return " ".join(lines), list(names), value, [p / max(1, n_lines) for p in places]

    def asked(value: str) -> tuple[str, str]:
        return (
            f"Which variables have the value {value}, by the assignments in the text above?",
            f"By the chain of assignments in the text above, {N_HOPS + 1} variables have the "
            f"value {value}, they are:",
        )

    head = "Follow the chain of variable assignments that is hidden in the following text."
    example, names, value, _ = chain(5)
    question, answer = asked(value)
    shown = f"{head}\n\n{example}\n{question}\n{answer} {', '.join(names)}\n\n"
    text, names, value, depths = chain(n)
    question, answer = asked(value)
    return RulerSample(f"{shown}{head}\n\n{text}", question, answer, names, depths)


def common_words(random: Random, n: int, length: int) -> RulerSample:
    """Makes a sample of cwe: ten words of a list come more often than ``n`` other words.

    The text begins with a short example.
    """
    source = listed_words(random)

    def numbered(n_others: int, often: int, seldom: int) -> tuple[str, list[str]]:
        common = list(islice(source, N_COMMON))
        words = common * often + list(islice(source, n_others)) * seldom
        random.shuffle(words)
        return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1)), common

    head = (
        "Below is a numbered list of words, some of which come more often than others. Remember "
        "those that come most often."
    )
    question = f"What are the {N_COMMON} most common words in the list above?"
    answer = f"The {N_COMMON} most common words in the list above are:"
    is_long = length >= LONG
    example, common = numbered(*((30, 10, 3) if is_long else (10, 3, 1)))
    listed = ", ".join(common)
    text, common = numbered(n, *((30, 3) if is_long else (6, 1)))
    shown = f"{head}\n\n{example}\n{question}\n{answer} {listed}\n\n"
    return RulerSample(f"{shown}{head}\n\n{text}", question, answer, common, [])


def frequent_words(random: Random, n: int, length: int) -> RulerSample:
    """Makes a sample of fwe: coded words. The k-th word comes in proportion to 1/k^2.

    The first word is dots, which the question excludes.
    """
    words: dict[str, None] = {DOTS: None}
    while len(words) < max(2 * N_FREQUENT, length // 50):
        words["".join(random.choices(string.ascii_lowercase, k=6))] = None
    counts = [int(n / ZETA_2 / k**2) for k in range(1, len(words) + 1)]
    for k in range(N_FREQUENT, -1, -1):  # no ties among the asked words
        counts[k] = max(counts[k], counts[k + 1] + 1)
    text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
    random.shuffle(text)
    return RulerSample(
        "Read the following coded text and keep count of how often each coded word comes.\n\n"
        + " ".join(text),
        f"Ignore the dots '{DOTS}'. Which three coded words are the most frequent ones in the text "
        "above?",
        "The three most frequent coded words in the text above are:",
        list(words)[1 : 1 + N_FREQUENT],
        [],
    )


def function_of_a_body(random: Random, n: int, _length: int) -> RulerSample:
    """Makes a sample of code: which function of a Python file has this body?"""
    text, name, body, depth = code_file(random, n)
    return RulerSample(
        f"Read the following Python file.\n\n```python\n{text}\n```",
        f"Which function of the file above has this body?\n\n```python\n{body}\n```",
        "The name of the function with this body is",
        [name],
        [depth],
    )


TASKS: Mapping[str, RulerTask] = {
    "niah_single_1": RulerTask(Needles("noise"), 128),
    "niah_single_2": RulerTask(Needles("essay"), 128),
    "niah_single_3": RulerTask(Needles("essay", values="uuids"), 128),
    "niah_multikey_1": RulerTask(Needles("essay", n_keys=4), 128),
    "niah_multikey_2": RulerTask(Needles("needles"), 128),
    "niah_multikey_3": RulerTask(Needles("needles", keys="uuids", values="uuids"), 128),
    "niah_multivalue": RulerTask(Needles("essay", n_values=4), 128),
    "niah_multiquery": RulerTask(Needles("essay", n_keys=4, n_asked=4), 128),
    "vt": RulerTask(variables, 30),
    "cwe": RulerTask(common_words, 120),
    "fwe": RulerTask(frequent_words, 50, least=20),
    "code": RulerTask(function_of_a_body, 48),
}


def score(answer: str, references: list[str]) -> float:
    """Returns the share of the references that the answer contains, in any case of letters."""
    text = answer.lower()
    return sum(reference.lower() in text for reference in references) / len(references)
