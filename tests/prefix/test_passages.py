"""Passages of a prompt that are known from others: which are found, and what is read of them."""

from __future__ import annotations

import numpy as np
import pytest

from sparsekv_cli.prefix.passages import LEAST, N_FIRST, WINDOW, Passage, PassageIndex, anchors

RNG = np.random.default_rng(0)


class Listed:
    """A document of tokens alone."""

    def __init__(self, tokens, first: int = 0) -> None:
        self.tokens, self.first = np.asarray(tokens, np.int64), first


def text(n: int) -> list[int]:
    return RNG.integers(0, 30000, n).tolist()


def found(documents, ids, first: int = 0, last: int | None = None) -> list[Passage]:
    passages = PassageIndex([Listed(*each) for each in documents]).find(
        ids, first, last or len(ids)
    )
    end = first
    for each in passages:
        assert each.n >= LEAST and each.first >= max(end, N_FIRST)
        tokens = documents[each.document][0][each.at : each.at + each.n]
        assert ids[each.first : each.first + each.n] == tokens
        end = each.first + each.n
    assert end <= (last or len(ids))
    return passages


def test_passages_in_another_order():
    a, b, c = text(300), text(200), text(500)
    start = text(20)
    found_now = found([(start + a + b + c,)], text(30) + c + a + text(5) + b)
    assert [(each.first, each.n) for each in found_now] == [(30, 500), (530, 300), (835, 200)]
    assert [each.at for each in found_now] == [520, 20, 320]


def test_an_inserted_line_costs_its_tokens_only():
    whole = text(2000)
    new = whole[:1000] + text(7) + whole[1000:]
    first, second = found([(whole,)], new)
    assert (first.first, first.n) == (N_FIRST, 1000 - N_FIRST)
    assert (second.first, second.n, second.at) == (1007, 1000, 1000)


def test_the_first_tokens_of_a_document_and_of_a_prompt_stay():
    whole = text(200)
    (only,) = found([(whole,)], text(50) + whole)
    assert (only.first, only.at, only.n) == (50 + N_FIRST, N_FIRST, 200 - N_FIRST)
    (later,) = found([(whole, 512)], text(50) + whole)  # the later part of a prompt has none
    assert (later.first, later.at, later.n) == (50, 0, 200)


def test_the_end_and_the_beginning_are_left_out():
    whole = text(400)
    (only,) = found([(text(20) + whole,)], whole, first=100, last=350)
    assert (only.first, only.n) == (100, 250)


@pytest.mark.parametrize("n", [0, 1, 15, 16, LEAST - 1])
def test_short_texts_have_no_passages(n):
    whole = text(400)
    assert not found([(whole,)], text(30) + whole[100 : 100 + n])
    assert not found([(whole[:n],)], whole)
    assert not found([], whole)


def test_equal_hashes_are_not_equal_tokens(monkeypatch):
    """Tokens are compared: an index whose hashes are all the same finds the same passages."""
    from sparsekv_cli.prefix import passages

    a, b = text(300), text(300)
    expected = found([(a,), (b,)], text(20) + b)

    def alike(tokens):
        places, _ = anchors(tokens)
        return places[:1], np.zeros(min(1, len(places)), np.uint64)

    monkeypatch.setattr(passages, "anchors", alike)
    assert all(each.document == 1 for each in found([(a,), (b,)], text(20) + b))
    assert expected[0].document == 1 and expected[0].n == 300 - N_FIRST


def test_a_text_of_one_token_ends_soon():
    token = next(i for i in range(1000) if len(anchors(np.full(WINDOW, i))[0]))
    same = [token] * 5000
    passages = found([(same,)], [1] * 20 + same + [2] + same)
    assert sum(each.n for each in passages) >= 9900


def test_anchors_depend_on_the_text_alone():
    whole = text(3000)
    places, hashes = anchors(np.asarray(whole))
    later, same = anchors(np.asarray(text(11) + whole))
    assert len(places) == pytest.approx(3000 / 8, rel=0.2)
    at = {int(p) - 11: h for p, h in zip(later, same, strict=True)}
    assert all(at[int(p)] == h for p, h in zip(places, hashes, strict=True))
    assert not len(anchors(np.empty(0, np.int64))[0])
