"""The text of scripts/accuracy/real: facts of all tasks, with one answer to every question."""

import re
import sys

import pytest
from scripts_as_modules import load_script

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.ruler.tasks import score

real = load_script("accuracy/real")
made = sys.modules["minutes"]
LENGTH = 5000  # words, which are tokens here
N = 4  # questions of a task


def count(text):
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture(scope="module")
def text():
    return made.minutes("7 of a test", LENGTH, count)


def of(text, task):
    return [turn for question in text.asked[task] for turn in question]


def test_a_text_is_as_long_as_fits_and_depends_on_its_key_only(text):
    assert LENGTH - 400 < count(text.context) + made.ROOM <= LENGTH
    assert made.minutes("7 of a test", LENGTH, count) == text
    other = made.minutes("8 of a test", LENGTH, count)
    for task in made.TASKS:
        told = [[turn.references for turn in of(each, task)] for each in (text, other)]
        assert told[0] != told[1] and len(text.asked[task]) == len(other.asked[task]) == N
    assert len(re.findall(r"^## Session \d+, \d\d \w+ 203", text.context, re.M)) == 30


@pytest.mark.parametrize("task", made.TASKS)
def test_facts_lie_at_the_depths_of_a_question(text, task):
    """No answer is given away, and no two questions are alike."""
    asked = text.asked[task]
    assert len({turn[0].question for turn in asked}) == N
    assert {len(question) for question in asked} == {made.N_TURNS if task == "turns" else 1}
    for turn in of(text, task):
        assert turn.question not in text.context
        assert score(turn.question + turn.answer, turn.references) == 0
        for depth in turn.depths:
            assert 0 <= depth < 1
        places = [round(depth * len(text.context)) for depth in turn.depths]
        facts = [text.context[place : place + 400] for place in places]
        if task == "labels":
            assert all(fact.startswith("Message: ") for fact in facts)
        elif task == "summary":
            found = " ".join(fact.partition(".")[0] for fact in facts)
            assert score(found, turn.references) == 1
        elif task == "code":
            assert facts[0].startswith(f"def {turn.references[0]}(")
        else:
            assert len(facts) == len(turn.references)
            for fact, wanted in zip(facts, turn.references, strict=True):
                assert wanted in fact.partition(". ")[0].partition("\n")[0]


def test_keys_have_one_value_each(text):
    """Every key stands in the text once; a turn asks for a key that its question names."""
    facts = re.findall(r"special magic (\w+) for (\S+) is: (\S+)\.", text.context)
    by_key = {key: value for _, key, value in facts}
    assert len(by_key) == len(facts) and len({*by_key.values()}) == len(facts)
    for task, kind, n in (
        ("niah_multikey_2", "numbers", 1), ("niah_multikey_3", "uuids", 1),
        ("niah_multiquery", "numbers", made.N_KEYS), ("turns", "numbers", 1),
    ):  # fmt: skip
        for turn in of(text, task):
            keys = [
                key for k, key, _ in facts if k == kind and re.search(rf"\b{key}\b", turn.question)
            ]
            assert sorted(by_key[key] for key in keys) == sorted(turn.references)
            assert len(turn.references) == n
    for question in text.asked["turns"]:
        assert len({turn.references[0] for turn in question}) == made.N_TURNS


def test_chains_can_be_followed(text):
    pairs = re.findall(r"VAR (\w{5}) = (?:VAR )?(\w{5})\.", text.context)
    assert len({name for name, _ in pairs}) == len(pairs) == N * made.N_VARIABLES
    for turn in of(text, "vt"):
        known = {re.search(r"value (\d+)", turn.question)[1]}
        for name, of_name in pairs:  # in the order of the text
            known |= {name} if of_name in known else set()
        assert {name for name in known if name.isupper()} == {*turn.references}


def test_a_body_has_one_function(text):
    for turn in of(text, "code"):
        body = turn.question.partition("```python\n")[2].removesuffix("\n```")
        assert text.context.count(body) == 1
        before = text.context.partition(body)[0]
        assert re.findall(r"def (\w+)\(", before)[-1] == turn.references[0]


def test_the_latest_note_is_asked_for(text):
    notes = re.findall(r"The locker number of (\w+ \w+) is now (\d+)\.", text.context)
    latest = dict(notes)
    assert len(latest) == N and len({value for _, value in notes}) == len(notes)
    for turn in of(text, "updates"):
        who = re.search(r"number of (\w+ \w+)\?", turn.question)[1]
        assert turn.references == [latest[who]]
        assert len([1 for name, _ in notes if name == who]) in made.UPDATES


def test_labels_stand_for_topics(text):
    topics = {noun: topic for topic, nouns in made.TOPICS.items() for noun in nouns.split()}
    messages = re.findall(r"Message: (.*) Label: (\w+)", text.context)

    def topic_of(message):
        (topic,) = {topics[word] for word in re.findall(r"\w+", message) if word in topics}
        return topic

    labels = {topic_of(message): label for message, label in messages}
    assert len(messages) >= 10 and labels.keys() == made.TOPICS.keys()
    assert all(labels[topic_of(message)] == label for message, label in messages)
    for turn in of(text, "labels"):
        message = turn.question.partition("Message: ")[2]
        assert message not in text.context and turn.references == [labels[topic_of(message)]]


def test_what_is_said_about_a_person(text):
    for turn in of(text, "summary"):
        who = re.search(r"about (\w+ \w+):", turn.question)[1]
        told = re.findall(rf"{who}'s (\w+) (\w+) is", text.context)
        assert sorted(word for pair in told for word in pair) == sorted(turn.references)


def test_a_length_that_is_too_short():
    for length in (0, 600, 1500):
        with pytest.raises(SparseKVError, match=f"--lengths {length}: too short"):
            made.minutes("7", length, count)
