"""Drafts that pay: what ``auto`` does in worlds whose steps take seconds by a rule."""

import time
from typing import Any

import numpy as np
import pytest

from sparsekv_cli.drafts import MOST_DRAFTED
from sparsekv_cli.drafts.auto import FIRST_LOSS, LOSS, AutoDrafts, n_worth
from sparsekv_cli.drafts.draft_model import ModelDrafts
from sparsekv_cli.drafts.ngrams import NgramDrafts
from sparsekv_cli.models.tokenizer.ids import n_common


def answer(drafts: AutoDrafts, prompt: list[int], text: list[int], row_s: float) -> float:
    """The seconds of an answer: a step takes 1, and each row of a draft row_s."""
    tokens, last, at, seconds = list(prompt), text[0], 1, 0.0
    drafts.begin(tokens)
    while at < len(text):
        draft = drafts.draft(tokens, last, min(MOST_DRAFTED, len(text) - at))
        right = text[at : at + len(draft)]
        n = n_common(draft, right)
        took = 1 + row_s * len(draft)
        drafts.checked(len(draft), n, took)
        new = text[at : at + n + 1]
        tokens += [last, *new[:-1]]
        last, at, seconds = new[-1], at + len(new), seconds + took
    return seconds


def random_text(seed: int, n: int, n_kinds: int = 1000) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_kinds, n).tolist()


@pytest.mark.parametrize("row_s", [0.02, 0.1, 0.3, 0.8, 2.0])
@pytest.mark.parametrize("n", [100, 160, 500])
def test_matches_that_mislead_cost_little(row_s, n):
    """After three equal tokens always comes another one; matches are long or short."""
    rng = np.random.default_rng(4)
    prompt: list[int] = []
    for i in range(100):
        stretch = random_text(5, 40)[: rng.integers(3, 40)]
        prompt += [*stretch, 2000 + i]
    text: list[int] = []
    while len(text) < n:
        text += [*random_text(5, 40)[: rng.integers(3, 9)], 5000 + len(text)]
    text = [token if i % 4 else 9000 + i for i, token in enumerate(text[:n])]
    seconds = answer(AutoDrafts(NgramDrafts()), prompt, text, row_s)
    assert seconds <= (1 + LOSS + 0.002) * (n - 1) + FIRST_LOSS


@pytest.mark.parametrize(("row_s", "least"), [(0.03, 8), (0.1, 5), (0.3, 2)])
def test_a_copy_is_fast(row_s, least):
    text = random_text(6, 400)
    assert 399 / answer(AutoDrafts(NgramDrafts()), [*text, 7, 8, 9], text, row_s) > least


def test_it_learns_what_a_match_is_worth():
    """Long matches go on, short ones do not."""
    copied, prompt, text = random_text(7, 64), [], []
    for i in range(60):
        prompt += [1, 2, 3, 2000 + i]
    prompt += copied
    for i in range(8):
        text += [*copied, *(token for j in range(8) for token in (1, 2, 3, 5000 + 8 * i + j))]
    drafts = AutoDrafts(NgramDrafts())
    seconds = answer(drafts, prompt, text, 0.1)
    assert seconds < 0.55 * len(text)
    chances = [accepted / checked for accepted, checked in drafts._counts]
    assert chances[-1] > 0.9 and chances[0] < 0.2


def test_a_row_that_costs_a_step_is_never_drafted_again():
    text = random_text(8, 300)
    drafts = AutoDrafts(NgramDrafts())
    assert answer(drafts, text, text, 1.2) < 1.02 * len(text)
    tokens = [*text, *text[:20]]
    drafts.begin(tokens)
    assert drafts.draft(tokens, text[20], 64) == []


def warm(seconds: float = 1.0, model: Any = None) -> AutoDrafts:
    """Drafts after two steps. The first one has loaded kernels and does not count."""
    drafts = AutoDrafts(NgramDrafts(), model)
    drafts.begin([1, 2, 3, 4] * 9)
    for i, took in enumerate((1000.0, seconds)):
        assert drafts.draft([*[1, 2, 3, 4] * 9, 1, 2, 3][: 36 + i], i + 1, 64) == []
        drafts.checked(0, 0, took)
    return drafts


def test_the_first_two_steps_have_no_draft():
    draft = warm().draft([*[1, 2, 3, 4] * 9, 1, 2], 3, 64)
    assert draft == [4, 1, 2, 3]  # of 5 that may be lost, since a row costs .3 steps


@pytest.mark.parametrize("step_s", [0.0, 1e-9, 1.0])
def test_steps_and_rows_that_take_no_time(step_s):
    """A clock may not see them. Drafts go on, also after one that was all lost."""
    drafts, tokens = warm(step_s), [*[1, 2, 3, 4] * 9, 1, 2]
    for n_accepted in (0, 0, 1, 1):
        draft = drafts.draft(tokens, 3, 64)
        drafts.checked(len(draft), min(n_accepted, len(draft)), step_s)
    drafts._left_s = -1.0
    assert drafts.draft(tokens, 3, 64) == []


class Reading(ModelDrafts):
    """A draft model that reads a text in two calls, and whose first draft takes long."""

    def __init__(self):
        self.n_calls = 0

    def begin(self, tokens):
        """Nothing to do."""

    def draft(self, tokens, last, most, least_chance):
        self.n_calls += 1
        self.is_reading = self.n_calls < 3
        time.sleep(0.3 if self.n_calls < 4 else 0)
        return [] if self.is_reading else [500 + len(tokens)]


def test_what_comes_once_says_nothing_of_later_drafts():
    """Reading of a text, and the first draft: both take more seconds than drafts may lose."""
    drafts, tokens, n_drafted = warm(0.05, Reading()), list(range(900, 930)), []
    for i in range(12):
        draft = drafts.draft(tokens, 100 + i, 8)
        n_drafted.append(len(draft))
        drafts.checked(len(draft), len(draft), 0.05)
        tokens += [100 + i, *draft]
    assert n_drafted == [0, 0, *[1] * 10]


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("cost", [0.0, 0.02, 0.3, 0.9, 1.5])
def test_a_token_is_worth_its_row(chance, cost):
    n = n_worth(chance, cost)
    worth = [i for i in range(1, MOST_DRAFTED + 1) if chance**i > cost]
    assert n == len(worth)
