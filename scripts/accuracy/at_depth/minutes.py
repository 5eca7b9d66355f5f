"""One text that holds the facts of all tasks: the minutes of thirty sessions, in order of time.

A session has a story, notes, magic numbers, assignments, labelled messages and a Python file. The
facts of a task lie in all sessions, so the depths of its questions are spread over the text.

    niah_multikey_2   the number of a key among many, as in RULER; niah_multikey_3: UUIDs
    niah_multiquery   the numbers of four keys
    vt                the variables of one of many chains of assignments
    code              the function that has a given body
    turns             the numbers of five keys, in five turns of one conversation
    summary           what the story says about a person; the words of four facts are wanted
    labels            the invented label of a message, by examples; a label stands for a topic
    updates           the number that a note gave last; earlier notes gave others
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from itertools import islice
from random import Random
from typing import NamedTuple

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.ruler.functions import functions
from sparsekv_cli.evaluation.ruler.tasks import NEEDLE
from sparsekv_cli.evaluation.ruler.words import ADJECTIVES, NOUNS, PLACES, distinct
from sparsekv_cli.evaluation.ruler.words import prose as sentences

TASKS = {  # most tokens of an answer
    "niah_multikey_2": 16,
    "niah_multikey_3": 48,
    "niah_multiquery": 64,
    "vt": 40,
    "code": 32,
    "turns": 16,
    "summary": 128,
    "labels": 8,
    "updates": 12,
}
N_SESSIONS = 30
FIRST_DAY, DAYS = date(2031, 1, 6), 12  # between two sessions
MOST_QUESTIONS = 25  # of a task and text
TOKENS_A_QUESTION = 1200  # of a text, at least
ROOM = 640  # tokens for questions and answers
N_KEYS, N_TURNS, N_FACTS = 4, 5, 4  # of a question: several keys, turns; facts about a person
N_VARIABLES = 3  # of a chain; RULER's have five, but a text has one chain
UPDATES = range(3, 6)  # notes about one thing
NUMBERS_A_UNIT = 3  # facts with numbers, for one with UUIDs, one function, one message
TOPICS = {
    "animals": "camel cat bird fish fox goat hawk horse lion otter owl rabbit",
    "food": "apple bean bread cake cherry honey lemon melon olive onion pepper potato",
    "buildings": "cabin castle church cottage hotel museum palace school shop temple theatre",
    "clothes": "apron boot coat crown glove hat jacket ribbon ring scarf shoe skirt",
    "music": "banjo bell drum flute guitar harp horn piano singer song trumpet violin",
}
MESSAGES = (
    "We saw the {a} {n} {p}.",
    "Is the {a} {n} {p} still yours?",
    "Somebody asked me about the {a} {n} {p}.",
    "Please tell me more about the {a} {n} {p}.",
)
TITLES = ("Captain", "Doctor", "Judge", "Madame", "Major", "Professor", "Sister", "Uncle")


class Turn(NamedTuple):
    """A question, the beginning of its answer, the texts that the answer must hold, and the places
    of their facts in the text, 0 to 1.
    """

    question: str
    answer: str
    references: list[str]
    depths: list[float]


class Minutes(NamedTuple):
    """A text and the questions of each task. A question has one turn or several."""

    context: str
    asked: Mapping[str, list[list[Turn]]]


Facts = dict[str, list[list[str]]]  # by kind: the lines of each session


def minutes(key: str, length: int, count: Callable[[str], int]) -> Minutes:
    """Returns the longest text of at most ``length`` - ROOM tokens; it depends on ``key`` only.

    count: tokens of a text. Raises SparseKVError if the length is too short.
    """
    n_asked = min(MOST_QUESTIONS, length // TOKENS_A_QUESTION)
    room, low = length - ROOM, max(2, n_asked)  # units; two have the keys of five turns
    best = _composed(key, low, n_asked) if n_asked else None
    if best is None or count(best.context) > room:
        raise SparseKVError(f"--lengths {length}: too short for the facts of all tasks")
    high = low + room
    while high - low > 1:
        middle = min((low + high) // 2, 2 * low)  # a text much too long takes long to count
        tried = _composed(key, middle, n_asked)
        if count(tried.context) <= room:
            low, best = middle, tried
        else:
            high = middle
    return best


def _composed(key: str, n_units: int, n_asked: int) -> Minutes:
    """Returns a text of so many units, with so many questions of each task."""
    facts: Facts = defaultdict(lambda: [[] for _ in range(N_SESSIONS)])
    randoms = {kind: Random(f"{key} {kind}") for kind in ("people", "filler", *TASKS)}
    people = _people(randoms["people"], 2 * n_asked)
    makers = {
        **_needles(facts, randoms, n_units, n_asked),
        "vt": _chains(facts, randoms["vt"], n_asked),
        "code": _functions(facts, randoms["code"], n_units, n_asked),
        "summary": _story(facts, randoms["summary"], people[:n_asked]),
        "labels": _labels(facts, randoms["labels"], max(n_units, 2 * len(TOPICS)), n_asked),
        "updates": _updates(facts, randoms["updates"], people[n_asked:]),
    }
    _spread(facts["story"], islice(sentences(randoms["filler"]), n_units), n_units)
    for lines in facts["story"]:
        randoms["filler"].shuffle(lines)
    context = _written(facts)
    asked = {}
    for task in TASKS:
        asked[task] = [
            [_with_depths(turn, told, context) for turn, told in question]
            for question in makers[task]
        ]
    return Minutes(context, asked)


Asked = list[list[tuple[Turn, list[str]]]]  # questions: their turns, each with its facts


def _with_depths(turn: Turn, told: Sequence[str], context: str) -> Turn:
    return turn._replace(depths=[context.index(fact) / len(context) for fact in told])


def _spread(lines: list[list[str]], given: Iterator[str] | Sequence[str], n: int) -> None:
    """Adds n lines to the sessions, evenly and in order."""
    for i, each in enumerate(given):
        lines[i * N_SESSIONS // n].append(each)


def _written(facts: Facts) -> str:
    parts = [
        "These are the minutes of thirty sessions, in order of time. They have stories, notes, "
        "special magic numbers and uuids, assignments of variables, labelled messages and Python "
        "code. Remember them: questions about them come afterwards."
    ]
    for session in range(N_SESSIONS):
        day = FIRST_DAY + timedelta(days=DAYS * session)
        parts.append(f"## Session {session + 1}, {day:%d %B %Y}")
        for kind in ("story", "notes", "magic", "assignments"):
            parts.append(" ".join(facts[kind][session]))
        parts.append("\n".join(facts["messages"][session]))
        if functions_of := facts["code"][session]:
            parts.append("```python\n" + "\n\n".join(functions_of) + "\n```")
    return "\n\n".join(filter(None, parts))


def _needles(facts: Facts, randoms: Mapping[str, Random], n: int, n_asked: int) -> dict[str, Asked]:
    """Keys with numbers and with UUIDs; the questions of four tasks about them."""
    pairs: dict[str, dict[str, str]] = {}
    told: dict[str, str] = {}
    for task, keys, values, n_facts in (
        ("niah_multikey_2", "words", "numbers", NUMBERS_A_UNIT * n),
        ("niah_multikey_3", "uuids", "uuids", n),
    ):
        random = randoms[task]
        found = zip(*(distinct(random, x, n_facts) for x in (keys, values)), strict=True)
        pairs[values] = dict(found)
        lines = [NEEDLE.format(kind=values, key=k, value=v) for k, v in pairs[values].items()]
        told |= zip(pairs[values], lines, strict=True)
        _spread(facts["magic"], lines, n_facts)

    def turn(kind: str, keys: Sequence[str]) -> tuple[Turn, list[str]]:
        one = len(keys) == 1
        whose = ", ".join(keys[:-1]) + " and " * (not one) + keys[-1]
        which = f"special magic {kind[:-1] if one else kind} for {whose} that the minutes mention"
        verb = "is" if one else "are"
        values = [pairs[kind][key] for key in keys]
        question, answer = f"What {verb} the {which}?", f"The {which} {verb}"
        if not one:
            question += f" Answer with a line for each, {keys[0]} first."
            answer += f":\n\n{keys[0]}:"
        return Turn(question, answer, values, []), [told[key] for key in keys]

    def chosen(task: str, kind: str, n_keys: int) -> list[list[str]]:
        """The keys of each question: no two questions of a task begin with the same one."""
        random, keys = randoms[task], list(pairs[kind])
        firsts = random.sample(keys, n_asked)
        others = [random.sample([k for k in keys if k != f], n_keys - 1) for f in firsts]
        return [[first, *more] for first, more in zip(firsts, others, strict=True)]

    of = {
        "niah_multikey_2": ("numbers", 1),
        "niah_multikey_3": ("uuids", 1),
        "niah_multiquery": ("numbers", N_KEYS),
    }
    made: dict[str, Asked] = {
        task: [[turn(kind, keys)] for keys in chosen(task, kind, n_keys)]
        for task, (kind, n_keys) in of.items()
    }
    asked = chosen("turns", "numbers", N_TURNS)
    return {**made, "turns": [[turn("numbers", [key]) for key in keys] for keys in asked]}


def _chains(facts: Facts, random: Random, n: int) -> Asked:
    names = _distinct(n * N_VARIABLES, lambda: "".join(random.choices(string.ascii_uppercase, k=5)))
    values = random.sample(range(10_000, 100_000), n)
    asked: Asked = []
    for i, value in enumerate(values):
        own = names[i * N_VARIABLES : (i + 1) * N_VARIABLES]
        assigned = [str(value), *(f"VAR {name}" for name in own)]
        lines = [f"VAR {name} = {what}." for name, what in zip(own, assigned, strict=False)]
        sessions = sorted(random.choices(range(N_SESSIONS), k=len(lines)))
        for session, line in zip(sessions, lines, strict=True):
            facts["assignments"][session].append(line)
        question = (
            f"Which variables have the value {value}, by the assignments in the minutes? One has "
            "it at first, and others get it from variable to variable."
        )
        answer = (
            f"By the assignments in the minutes, {N_VARIABLES} variables have the value {value}, "
            "they are:"
        )
        asked.append([(Turn(question, answer, own, []), lines)])
    return asked


def _functions(facts: Facts, random: Random, n: int, n_asked: int) -> Asked:
    """Functions of Python's library with names of their own (evaluation/ruler/functions.py)."""
    library = functions()
    drawn = random.sample(library, min(n, len(library)))
    suffixes = [each.replace("-", "_") for each in distinct(random, "words", len(drawn))]
    names = [f"{each.name}_{suffix}" for each, suffix in zip(drawn, suffixes, strict=True)]
    texts = [each.text(name) for each, name in zip(drawn, names, strict=True)]
    _spread(facts["code"], texts, len(texts))
    whole = "\n".join(texts)
    once = [i for i, each in enumerate(drawn) if whole.count(each.body) == 1]
    asked: Asked = []
    for i in random.sample(once, min(n_asked, len(once))):
        question = (
            "Which function in the minutes has this body?\n\n```python\n" + drawn[i].body + "\n```"
        )
        turn = Turn(question, "The name of the function with this body is", [names[i]], [])
        asked.append([(turn, [texts[i]])])
    return asked


def _story(facts: Facts, random: Random, people: Sequence[str]) -> Asked:
    asked: Asked = []
    for person in people:
        words = random.sample(ADJECTIVES, N_FACTS), random.sample(NOUNS, N_FACTS)
        lines = [
            f"{person}'s {adjective} {noun} is {place}."
            for adjective, noun, place in zip(*words, random.sample(PLACES, N_FACTS), strict=True)
        ]
        for line, session in zip(lines, random.sample(range(N_SESSIONS), N_FACTS), strict=True):
            facts["story"][session].append(line)
        question = (
            "Write a summary, of at most 80 words, of all that the stories in the minutes say "
            f"about {person}: which things, and where they are."
        )
        wanted = [f"{adjective} {noun}" for adjective, noun in zip(*words, strict=True)]
        references = [word for pair in wanted for word in pair.split()]
        asked.append([(Turn(question, f"{person}'s", references, []), lines)])
    return asked


def _labels(facts: Facts, random: Random, n: int, n_asked: int) -> Asked:
    """Messages with labels. Those that are asked for are others about the same topics."""
    topics = {topic: nouns.split() for topic, nouns in TOPICS.items()}
    labels = dict(zip(topics, _distinct(len(topics), lambda: _invented(random)), strict=True))
    order = [topic for _ in range(n // len(topics) + 2) for topic in random.sample([*topics], 5)]
    told = iter(order)

    def made() -> tuple[str, str]:
        topic = next(told)
        message = random.choice(MESSAGES).format(
            a=random.choice(ADJECTIVES), n=random.choice(topics[topic]), p=random.choice(PLACES)
        )
        return message, labels[topic]

    examples = dict(made() for _ in range(n))
    lines = [f"Message: {message} Label: {label}" for message, label in examples.items()]
    _spread(facts["messages"], lines, len(lines))
    asked: Asked = []
    seen = set(examples)
    told = iter([random.choice([*topics]) for _ in range(50 * n_asked)])
    while len(asked) < n_asked:
        message, label = made()
        if message in seen:
            continue
        seen.add(message)
        question = (
            "Which label does this message get, by the labelled messages in the minutes?\n\n"
            f"Message: {message}"
        )
        of_label = [line for line in lines if line.endswith(f"Label: {label}")]
        asked.append([(Turn(question, f"Message: {message} Label:", [label], []), of_label)])
    return asked


def _updates(facts: Facts, random: Random, people: Sequence[str]) -> Asked:
    asked: Asked = []
    n_notes = [random.choice(UPDATES) for _ in people]
    values = distinct(random, "numbers", sum(n_notes))
    for person, n in zip(people, n_notes, strict=True):
        lines = [f"The locker number of {person} is now {values.pop()}." for _ in range(n)]
        for line, session in zip(lines, sorted(random.sample(range(N_SESSIONS), n)), strict=True):
            facts["notes"][session].append(line)
        which = f"the locker number of {person}"
        question = f"By the latest note about it in the minutes, what is {which}?"
        latest = lines[-1].rpartition(" ")[2].rstrip(".")
        turn = Turn(question, f"By the latest note, {which} is now", [latest], [])
        asked.append([(turn, lines[-1:])])
    return asked


def _people(random: Random, n: int) -> list[str]:
    names = _distinct(n, lambda: _invented(random).capitalize())
    return [f"{random.choice(TITLES)} {name}" for name in names]


def _invented(random: Random) -> str:
    """Returns a word that no language has: ``velmorak``."""
    parts = (random.choice("bdfgklmnprstvz") + random.choice("aeiou") for _ in range(3))
    return random.choice("lmnr").join(("".join(islice(parts, 2)), *parts)) + random.choice("kmnx")


def _distinct(n: int, make: Callable[[], str]) -> list[str]:
    """``n`` different words."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[make()] = None
    return list(found)
