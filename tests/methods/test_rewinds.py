"""What every registered method promises of a sequence that goes back, or is interrupted.

After a rewind a sequence answers as one would that came the same way for the first time. A method
that cannot go back to a row goes back to the end of the last prefill, or forgets all rows.
"""

from collections.abc import Sequence as Ids

import numpy as np
import pytest
from opened import generated
from tiny_sequences import CASES, CHUNK, decoded, greedy, tokens

from sparsekv_cli.methods import METHODS, method_class
from sparsekv_cli.sequence import Sequence

pytestmark = pytest.mark.slow

PROMPT = tokens(20 * CHUNK)
# Methods that drop rows, or keep old ones roughly, do not go back to every row.
FORGETFUL = {name for name in METHODS if not method_class(name).holds_all_rows}
KEPT = (20 * CHUNK + 3, 10 * CHUNK)  # tokens to go back to: in the answer, in the prompt


def turn(sequence: Sequence, prompt: Ids[int], answer: Ids[int]) -> np.ndarray:
    """The logits of a prompt's last token and of an answer's tokens."""
    return np.stack([sequence.prefill(prompt), *(sequence.decode(token) for token in answer)])


def answer_again(sequence: Sequence, answer: Ids[int]) -> np.ndarray:
    """``turn`` again from the checkpoint, without its prefill."""
    at = sequence.checkpoint
    assert at is not None
    sequence.rewind(at.n)
    assert len(sequence.tokens) == at.n and {cache.n for cache in sequence.caches} == {at.n}
    return np.stack([at.logits, *(sequence.decode(token) for token in answer)])


# --- to the end of the last prefill ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "budget"),
    [(case, "12") for case in CASES] + [(name, b) for name in METHODS for b in ("10%", "200")],
)
def test_an_answer_again_has_the_same_bits(case, budget, sequence_of):
    """Whole, interrupted, and of two turns; with 200 rows the first answer outgrows the budget."""
    name, options = CASES[case]
    sequence = sequence_of(name, options, budget=budget)
    for n_prompt, seed in ((9 * CHUNK, 0), (40, 3)):
        prompt, answer = tokens(n_prompt, seed), tokens(80, seed + 1)
        first = turn(sequence, prompt, answer[:25])  # the user stops it
        n_tokens = len(sequence.tokens)
        whole = answer_again(sequence, answer)
        np.testing.assert_array_equal(whole[:26], first)
        assert len(sequence.tokens) == n_tokens - 25 + 80
        other = answer_again(sequence, tokens(30, seed + 2))
        np.testing.assert_array_equal(other[0], first[0])
        assert (other[1:26] != first[1:]).any()
        np.testing.assert_array_equal(answer_again(sequence, answer), whole)


@pytest.mark.parametrize("case", CASES)
def test_a_turn_behind_an_answer_again_is_as_behind_the_first(case, sequence_of):
    name, options = CASES[case]
    sequences = [sequence_of(name, options, budget="12") for _ in range(2)]
    prompt, answer, question = tokens(9 * CHUNK), tokens(150, 1), tokens(40, 2)
    for sequence in sequences:
        turn(sequence, prompt, answer)
    answer_again(sequences[0], tokens(155, 3))
    answer_again(sequences[0], answer)
    again, first = (turn(sequence, question, tokens(20, 4)) for sequence in sequences)
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("name", METHODS)
def test_a_generation_goes_on_from_the_checkpoint(name, sequence_of):
    sequence = sequence_of(name, budget="12")
    first = list(generated(sequence, tokens(100), greedy, 30))
    sequence.rewind(100)
    prefilled = sequence.timings.prefill_tokens
    assert list(generated(sequence, [], greedy, 30)) == first
    assert sequence.timings.prefill_tokens == prefilled


# --- elsewhere ------------------------------------------------------------------------------------


def test_turns_equal_one_forward(sequence_of):
    parts = [tokens(n, seed) for seed, n in enumerate((37, 6, 21, 5))]
    sequence = sequence_of("full")
    rows = [sequence.prefill(parts[0], all_logits=True), decoded(sequence, parts[1])]
    rows += [sequence.prefill(parts[2], all_logits=True), decoded(sequence, parts[3])]
    whole = sequence_of("full").prefill(
        [*parts[0], *parts[1], *parts[2], *parts[3]], all_logits=True
    )
    np.testing.assert_allclose(np.concatenate(rows), whole, atol=2e-3)
    assert sequence.tokens == [*parts[0], *parts[1], *parts[2], *parts[3]]


@pytest.mark.parametrize(
    ("case", "keep"),
    [(name, keep) for name in METHODS for keep in (*KEPT, 20 * CHUNK + 140, 20 * CHUNK, 0)]
    + [(case, keep) for case in CASES if case not in METHODS for keep in KEPT],
)
def test_a_rewound_sequence_equals_a_fresh_one(case, keep, sequence_of):
    """Into an answer, to its beginning, into the prompt, and to nothing; then another turn.

    A sequence that goes back further than it is told to has the same bits, too. First it reads the
    tokens that are missing.
    """
    name, options = CASES[case]
    used, fresh = (sequence_of(name, options, budget="12") for _ in range(2))
    answer, question = tokens(150, 3), tokens(7, 1)
    turn(used, PROMPT, answer)
    used.rewind(keep)
    kept = len(used.tokens)
    assert {cache.n for cache in used.caches} == {kept}
    assert used.tokens == [*PROMPT, *answer][:kept]
    if name in FORGETFUL:
        assert kept in ({keep, len(PROMPT)} if keep >= len(PROMPT) else {keep, 0})
    else:
        assert kept == keep
    assert (used.checkpoint is None) == (kept < len(PROMPT))
    if kept:
        turn(fresh, PROMPT[:kept], answer[: max(0, kept - len(PROMPT))])
    missing = [*PROMPT, *answer][kept:keep]
    again, first = (turn(each, [*missing, *question], answer) for each in (used, fresh))
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("case", [case for case in CASES if "lfps" not in case])
def test_behind_a_checkpoint_that_was_left(case, sequence_of):
    """The sequence passes the place again with other tokens, and goes back to it.

    LFPS decodes otherwise behind a rewind than behind a prefill, with the queries that are left.
    """
    name, options = CASES[case]
    used, fresh = (sequence_of(name, options, budget="12") for _ in range(2))
    answer, question = tokens(150, 3), tokens(7, 1)
    used.prefill(PROMPT)
    used.rewind(len(PROMPT) - CHUNK)
    way = [*PROMPT[:-CHUNK], *answer]
    missing = PROMPT[len(used.tokens) : -CHUNK]
    if missing:
        used.prefill(missing)
    decoded(used, answer)
    used.rewind(len(PROMPT))
    kept = len(used.tokens)
    assert used.tokens == way[:kept]
    if kept:
        turn(fresh, PROMPT[:-CHUNK], way[len(PROMPT) - CHUNK : kept])
    missing = way[kept : len(PROMPT)]
    again, first = (turn(each, [*missing, *question], answer) for each in (used, fresh))
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("calls", [1, 4, 6, 7, 8])
@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_prefill_adds_nothing(name, calls, sequence_of):
    """Progress is reported after each chunk of each layer: 2 chunks, 4 layers.

    Once a layer has dropped rows, the sequence is lost: it has to be read again.
    """
    left = calls

    def interrupt(done: int, total: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt

    sequence, other = answered(sequence_of, name)
    before = list(sequence.tokens)
    with pytest.raises(KeyboardInterrupt):
        sequence.prefill(tokens(2 * CHUNK, 5), interrupt)
    assert left == 0 and sequence.checkpoint is None
    goes_on_like(sequence, other, before, name)


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_decode_adds_nothing(name, sequence_of, monkeypatch):
    sequence, other = answered(sequence_of, name)
    before, last = list(sequence.tokens), sequence.caches[-1]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "decode", interrupt)
        sequence.decode(5)
    goes_on_like(sequence, other, before, name)


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_first_step_can_be_taken_again(name, sequence_of, monkeypatch):
    """The sequence is then at its checkpoint, so that nothing is lost."""
    sequence, other = (sequence_of(name, budget="12") for _ in range(2))
    for each in (sequence, other):
        each.prefill(PROMPT)
    last = sequence.caches[-1]

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "decode", interrupt)
        sequence.decode(5)
    assert sequence.tokens == PROMPT
    np.testing.assert_array_equal(*(decoded(each, tokens(20, 1)) for each in (sequence, other)))


def answered(sequence_of, name: str) -> list[Sequence]:
    """Two sequences with a prompt and an answer."""
    sequences = [sequence_of(name, budget="12") for _ in range(2)]
    for sequence in sequences:
        turn(sequence, tokens(3 * CHUNK), tokens(10, 2))
    return sequences


def goes_on_like(sequence: Sequence, other: Sequence, before: Ids[int], name: str) -> None:
    """``sequence`` has the tokens of before, or fewer if it may forget. It answers as ``other``."""
    kept = len(sequence.tokens)
    if kept < len(before):
        assert name in FORGETFUL and kept in (0, 3 * CHUNK)
        other.rewind(kept)
    assert sequence.tokens == before[:kept]
    assert {cache.n for cache in sequence.caches} == {kept}
    question, answer = tokens(7, 1), tokens(10, 2)
    np.testing.assert_array_equal(turn(sequence, question, answer), turn(other, question, answer))


# --- types of the cache ---------------------------------------------------------------------------


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("f16", "q8_0"), ("q4_0", "q5_1")])
@pytest.mark.parametrize("name", [n for n in METHODS if "q8_0" in method_class(n).cache_types])
def test_quantised_rows(name, types, sequence_of):
    sequence = sequence_of(name, budget="12", types=types)
    first = turn(sequence, PROMPT[: 4 * CHUNK], tokens(40, 1))
    np.testing.assert_array_equal(answer_again(sequence, tokens(40, 1)), first)
