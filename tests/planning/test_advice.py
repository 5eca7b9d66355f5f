"""``advise``'s parts without a model: the task, the time to read, the choice."""

from dataclasses import replace

import numpy as np
import pytest

from sparsekv_cli.methods import build_method
from sparsekv_cli.planning.advice import Advice
from sparsekv_cli.planning.reading import FACTS, N_WORDS, affordable_tokens, fitting_text, make_task
from sparsekv_cli.planning.trial import MethodTrial


def encode(text):
    return list(text.encode())


def decode(ids):
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("start", [0.0, 0.5, 0.9])
def test_facts_are_planted_after_the_start_and_asked_for(start):
    document = encode("".join(f"Sentence {i} of many. " for i in range(200)))
    task = make_task(document, start, encode, decode)
    assert task.first >= start * (len(document) - 200)
    assert task.prompt[: task.first] == document[: task.first]
    text = decode(task.prompt)
    assert all(text.count(fact) == 1 for fact in FACTS)
    assert len(task.facts) == len(FACTS)
    asked = decode(task.following[N_WORDS:])
    for steps in task.facts:
        code = decode([task.following[step + 1] for step in steps])
        lead = decode(task.following[N_WORDS : steps.start + 1]).rpartition("\n\n")[2]
        assert len(code) in (5, 6) and f"{lead}{code}." in text
        assert steps.stop < len(task.following) and f"{lead}{code}." in asked


def test_as_much_as_a_time_allows():
    assert affordable_tokens(float, 10_000, 3000.0, 1024) == 1024 + 3 * 512
    assert affordable_tokens(float, 10_000, 1.0, 1024) == 1024
    assert affordable_tokens(float, 900, 1.0, 1024) == 900
    assert affordable_tokens(float, 10_000, 1e9, 1024) == 10_000


def test_the_beginning_of_a_text_that_fits():
    text, ids = fitting_text("ab" * 1000, encode, 100)
    assert text == ("ab" * 50)[: len(text)]
    assert 90 <= len(ids) <= 100
    assert fitting_text("short", encode, 100) == ("short", encode("short"))
    assert fitting_text("ab", lambda text: [0] * 50, 10)[0] == ""


def trial(name, speedup, n_bytes=100, same=96, kld=0.01, found=8, noise=0.01):
    full = np.tile([1, 1 + noise], 4)
    steps = np.tile([1, 1 + noise], 7) / speedup
    words = np.arange(96) < same
    return MethodTrial(build_method(name, {}), steps, full, n_bytes, words, np.full(96, kld), found)


def advice(*trials):
    return Advice(trial("full", 1.0, kld=0.0), 0.02, trials, 0.1, {}, False, 8, 0)


def test_the_fastest_that_loses_little_is_advised():
    found = advice(trial("topk", 1.3), trial("quest", 2.0, kld=0.05), trial("lfps", 3.0, found=6))
    assert found.chosen.method.name == "quest"
    assert [each.method.name for each in found.best] == ["quest", "topk", "lfps"]
    assert "2.0 times as fast" in found.why and "found 8 of 8" in found.why


def test_of_methods_that_are_as_fast_the_nearest_is_advised():
    found = advice(trial("topk", 1.30, kld=0.02), trial("quest", 1.33, kld=0.09))
    assert found.chosen.method.name == "topk"
    assert ["topk", "quest"] in found.equal["speed"]


def test_a_busy_machine_ranks_by_loss_alone():
    trials = [trial("topk", 3.0, kld=0.09), trial("quest", 1.4, kld=0.01)]
    found = replace(advice(*trials), is_busy=True)
    assert [each.method.name for each in found.best] == ["quest", "topk"]
    assert found.chosen is found.full and "not to be believed" in found.why
    assert "speed" not in found.equal and advice(*trials).chosen is trials[0]


def test_full_is_advised_where_nothing_is_gained():
    assert advice().chosen.method.name == "full"
    for other in (
        trial("topk", 1.02),
        trial("quest", 1.1, noise=2.0),  # no more than noise
        trial("lfps", 2.0, kld=0.5),
        trial("snapkv", 0.8, n_bytes=10),
    ):
        found = advice(other)
        assert found.chosen is found.full and found.why.startswith("full: ")


def test_where_exact_top_k_loses_too_much_that_is_the_reason():
    lost = [trial("topk", 1.3, kld=0.4), trial("quest", 2.0, kld=0.5)]
    found = advice(*lost)
    assert found.why.startswith("full: even exact top-k (topk) loses 0.400, and 0.1 is")
    assert "top-k" not in advice(*lost, trial("lfps", 0.5, noise=2.0)).why  # which is near


def test_memory_alone_is_a_gain():
    found = advice(trial("snapkv", 1.0, n_bytes=20))
    assert found.chosen.method.name == "snapkv" and "20% of the memory" in found.why
    assert ["full", "snapkv"] in [sorted(group) for group in found.equal["speed"]]


def test_others_than_the_best_are_named():
    trials = [trial(name, 1.5) for name in ("topk", "quest", "lfps", "freekv")]
    (name,) = advice(*trials).reasons()
    assert name not in [each.method.name for each in advice(*trials).best]
