"""The comparison of scripts/accuracy/real: paired differences, their interval, and the verdict."""

import sys

import numpy as np
import pytest
from scripts_as_modules import load_script

load_script("accuracy/real")
compare = sys.modules["against_full"]
TASKS = ("a", "b", "c")


def rows(score, tasks=TASKS, texts=range(4), questions=range(10)):
    """score: of a task, text and question."""
    places = [(task, text, q) for task in tasks for text in texts for q in questions]
    return [
        {"task": task, "text": text, "question": q, "score": score(task, text, q)}
        for task, text, q in places
    ]


FULL = rows(lambda *_: 1.0)


def test_questions_are_paired():
    """The order of rows and rows that only one side has do not matter."""
    method = rows(lambda task, text, q: 1.0 - 0.1 * (q == 0))
    told = compare.against([*reversed(method)], [*FULL, *rows(lambda *_: 0.0, texts=[9])])
    assert told["a_mean"] == told["all_mean"] == pytest.approx(-1) and told["questions"] == 120
    assert told["all_low"] == told["all_high"] == pytest.approx(-1)  # all texts are alike
    assert told["verdict"] == "equal" and told["dropped"] == []


def test_a_text_is_drawn_with_its_questions():
    """Two texts lose 20 points each: the interval is much wider than that of 120 questions."""
    method = rows(lambda task, text, q: 0.8 if text < 2 else 1.0)
    told = compare.against(method, FULL)
    assert told["all_mean"] == pytest.approx(-10) and told["verdict"] == "open"
    # Of 4 draws with replacement 0 to 4 are such texts: 1/16 of the draws have none, 1/16 four.
    assert (told["all_low"], told["all_high"]) == pytest.approx((-20, 0), abs=0.1)
    few = compare.mean_difference({0: [0.0] * 30, 1: [-40.0] * 10})
    assert few["mean"] == -10 and (few["low"], few["high"]) == (-40, 0)


@pytest.mark.parametrize(
    ("loss", "verdict"), [(0.0, "equal"), (-0.1, "equal"), (0.04, "equal"), (0.2, "worse")]
)
def test_verdicts(loss, verdict):
    spread = np.array([0.01, -0.01, 0.005, -0.005])
    method = rows(lambda task, text, q: 1.0 - loss + spread[text])
    assert compare.against(method, FULL)["verdict"] == verdict


def test_what_cannot_be_said():
    noisy = rows(lambda task, text, q: 1.1 if text else 0.5)
    assert compare.against(noisy, FULL)["verdict"] == "open"
    one = compare.against(rows(lambda *_: 1.0, texts=[0]), FULL)
    assert one["verdict"] == "too few texts" and "all_low" not in one and one["all_mean"] == 0
    few = compare.against(rows(lambda *_: 1.0, questions=range(3)), FULL)
    assert few["verdict"] == "too few texts" and few["questions"] == 36
    assert compare.against(FULL, FULL) == {"dropped": [], "verdict": "reference"}
    assert compare.against(FULL, [])["verdict"] == "no full"


def test_tasks_that_full_cannot_do_are_dropped():
    """They do not count; with fewer than three left there is the KLD alone."""
    full = FULL + rows(lambda *_: 0.49, tasks=["d"])
    method = FULL + rows(lambda *_: 0.0, tasks=["d"])
    told = compare.against(method, full)
    assert told["dropped"] == ["d"] and told["all_mean"] == 0 and told["verdict"] == "equal"
    assert told["d_mean"] == pytest.approx(-49)
    full = rows(lambda task, *_: 0.4 if task == "a" else 0.6)
    told = compare.against(FULL, full)
    assert told["dropped"] == ["a"] and told["verdict"] == "KLD alone"
    table = compare.markdown(
        [{"spec": "x", "length": 9, "read": "dense", "rows": 2, "seconds": 1.0, "a": 40.0,
          "a_n": 5, "b": 80.0, "b_n": 5, **told}], TASKS,
    )  # fmt: skip
    assert "| `x` | 9 | dense | (40 of 5) | 80 of 5 | 2 | 1.0 |" in table
    assert "| `x` | 9 | dense | +60.0 (60 to 60) | +40.0 (40 to 40) |" in table
    assert table.endswith("| +40.0 (40 to 40) | KLD alone |")
