"""Drafts from n-grams of the text, against a search through the whole text."""

from typing import Any

import numpy as np
import pytest

from sparsekv_cli.drafts import MOST_DRAFTED, ngrams
from sparsekv_cli.drafts.ngrams import LEAST, LONGEST, NgramDrafts


def naive_draft(text: list[int], most: int = MOST_DRAFTED) -> list[int]:
    """What follows the longest match of the text's end; of equal ones the newest."""
    n, best, length = len(text), 0, 0
    for place in range(n - 1, LEAST - 1, -1):
        found = 0
        while found < min(place, LONGEST) and text[place - 1 - found] == text[n - 1 - found]:
            found += 1
        if found >= LEAST and found > length:
            best, length = place, found
    draft: list[int] = []
    for i in range(min(length, most)):
        draft.append([*text, *draft][best + i])
    return draft


def draft_of(tokens: list[int], last: int) -> list[int]:
    return NgramDrafts().draft(tokens, last, MOST_DRAFTED)


@pytest.mark.parametrize("n_kinds", [2, 5, 30])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_drafts_of_a_growing_text(n_kinds, seed, monkeypatch):
    """Random tokens with copies of earlier stretches; tokens come one or several at a time."""
    monkeypatch.setattr(ngrams, "N_PLACES", 10**6)
    rng, drafts = np.random.default_rng(seed), NgramDrafts()
    text: list[int] = rng.integers(0, n_kinds, 50).tolist()
    n_drafts = 0
    while len(text) < 700:
        if rng.random() < 0.2:
            start, size = rng.integers(0, len(text)), rng.integers(1, 90)
            text += text[start : start + size]
        else:
            text += rng.integers(0, n_kinds, rng.integers(1, 4)).tolist()
        most = int(rng.integers(0, MOST_DRAFTED + 1))
        found = drafts.draft(text[:-1], text[-1], most)
        assert found == naive_draft(text, most)
        assert drafts.draft(text[:-1], text[-1], most) == found  # a step that is taken again
        n_drafts += len(found) > 0
    assert n_drafts > 5


def test_a_text_that_repeats_itself_goes_on_so():
    assert draft_of([7, 8, 9, 7, 8, 9, 7, 8], 9) == [7, 8, 9, 7, 8, 9]
    assert draft_of([4] * 9, 4) == [4] * 9
    assert draft_of([4] * 100, 4) == [4] * MOST_DRAFTED


@pytest.mark.parametrize("text", [[], [1], [1, 2, 1, 2], [1, 2, 3, 4, 5]])
def test_no_match(text):
    assert draft_of(text, 9) == []


def test_a_longer_match_gives_a_longer_draft_than_a_newer_one():
    long, short = [1, 2, 3, 4, 5, 6, 70, 71, 72, 73, 74, 75], [4, 5, 6, 80, 81, 82]
    text = [*long, *short, 1, 2, 3, 4, 5, 6]
    assert draft_of(text[:-1], text[-1]) == [70, 71, 72, 73, 74, 75]


def test_the_oldest_of_many_places_is_not_looked_at():
    monotone = [1, 2, 3, 10] + [1, 2, 3, 20] * ngrams.N_PLACES
    text = [0, *monotone, 9, 1, 2, 3]
    assert draft_of(text[:-1], text[-1])[0] == 20


@pytest.mark.parametrize("n_kinds", [2, 30])
@pytest.mark.parametrize("n_done", [0, 1, 17, 60])
@pytest.mark.parametrize("grows", [True, False])
def test_an_interrupt_leaves_no_wrong_table(n_kinds, n_done, grows):
    """It comes between two changes. The next texts are longer, and shorter than what is known."""
    text: list[int] = np.random.default_rng(5).integers(0, n_kinds, 200).tolist()
    drafts, n = NgramDrafts(), iter(range(n_done))
    drafts.draft(text[:99], text[99], 9)

    class Places(list):
        def pop(self) -> Any:
            self.append(super().pop())
            return super().pop()

        def append(self, place: int) -> None:
            super().append(place)
            if next(n, None) is None:
                raise KeyboardInterrupt

    drafts._before = Places(drafts._before)
    with pytest.raises(KeyboardInterrupt):
        if grows:
            drafts.draft(text[:-1], text[-1], 9)
        drafts.begin(text[:20])
    drafts._before = list(drafts._before)
    for n_text in (60, 200, 30):
        anew = NgramDrafts()
        given = text[: n_text - 1], text[n_text - 1], 9
        assert drafts.draft(*given) == anew.draft(*given) and vars(drafts) == vars(anew)


@pytest.mark.parametrize("n_kinds", [2, 30])
def test_another_text_begins_as_the_last_one(n_kinds):
    """What the texts have in common is kept; of the rest nothing is left."""
    rng = np.random.default_rng(3)
    first, second = (rng.integers(0, n_kinds, 300).tolist() for _ in range(2))
    drafts = NgramDrafts()
    for n_common, n in ((0, 300), (170, 300), (299, 299), (2, 40), (0, 300)):
        text = [*first[:n_common], *second[n_common:n]]
        drafts.begin(text[:-1])
        found = drafts.draft(text[:-1], text[-1], MOST_DRAFTED)
        anew = NgramDrafts()
        assert found == anew.draft(text[:-1], text[-1], MOST_DRAFTED)
        assert vars(drafts) == vars(anew)
