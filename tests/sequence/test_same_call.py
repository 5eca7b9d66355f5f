"""A prompt has the answer that a new sequence gives, whatever the sequence has read before."""

import numpy as np
import pytest
from tiny_sequences import CASES, CHUNK, decoded, tokens

from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.sequence import N_REFRESH, Sequence

FIRST, ANSWER = tokens(150), tokens(N_REFRESH + 36, 1)  # more than is read again in any case
# Methods that need more queries than N_REFRESH.
QUERIED = {
    "lfps, window of 100": ("lfps", {"window": "100"}),
    "snapkv, window of 100": ("snapkv", {"window": "100"}),
}
# Prompts after FIRST and its answer.
PROMPTS = {
    "a few tokens more": [*FIRST, *tokens(5, 2)],
    "many tokens more": [*FIRST, *tokens(100, 2)],
    "after the answer": [*FIRST, *ANSWER, *tokens(5, 2)],
    "within the answer": [*FIRST, *ANSWER[:20], *tokens(5, 2)],
    "another end": [*FIRST[:-9], *tokens(12, 2)],
    "its beginning": FIRST[:-9],
    "the same": FIRST,
    "the answer and no more": [*FIRST, *ANSWER],
    "another text": tokens(150, 3),
    "a short text": FIRST[:7],
}


def answered(sequence: Sequence, prompt: list[int], n_steps: int = 20) -> np.ndarray:
    missing = sequence.keep_common(prompt)
    if missing:
        sequence.prefill(missing)
    assert sequence.tokens == prompt
    at = sequence.checkpoint
    assert at is not None and at.n == len(prompt)
    return np.stack([at.logits, *decoded(sequence, ANSWER[:n_steps])])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES | QUERIED)
def test_every_method(case, sequence_of):
    name, options = (CASES | QUERIED)[case]
    model = sequence_of(name, options, budget="12").model
    used = model.sequence()
    answered(used, FIRST, len(ANSWER))
    for relation, prompt in PROMPTS.items():
        again, fresh = (answered(each, prompt) for each in (used, model.sequence()))
        np.testing.assert_array_equal(again, fresh, err_msg=relation)
        answered(used, FIRST, len(ANSWER))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*METHODS, *QUERIED])
def test_after_another_method(case, sequence_of):
    model = sequence_of("topk", budget="12").model
    name, options = (CASES | QUERIED)[case]
    other = model.attention_of(build_method(name, options, budget=None if name == "full" else "12"))
    used, fresh = model.sequence(), model.sequence(other)
    answered(used, FIRST, len(ANSWER))
    prompt = PROMPTS["after the answer"]
    used.keep_common(prompt)
    used.change_method(other)
    np.testing.assert_array_equal(answered(used, prompt), answered(fresh, prompt))


def test_what_is_computed_again(sequence_of):
    """The end of the prompt, and rows of steps; with a method that drops rows, all of it."""
    for name, least in (("full", 0), ("lfps", 0), ("snapkv", 150), ("h2o", 150)):
        sequence = sequence_of(name, budget="12")
        answered(sequence, FIRST)
        assert sequence.keep_common(FIRST) == []
        prompt = PROMPTS["after the answer"]
        missing, most = sequence.keep_common(prompt), N_REFRESH + CHUNK + len(ANSWER)
        assert max(least, N_REFRESH) <= len(missing) <= (len(prompt) if least else most)


@pytest.mark.parametrize("case", [*METHODS, *QUERIED])
def test_turns_of_a_chat_keep_the_answer(case, sequence_of):
    """But a method that needs the last queries gets enough of them."""
    name, options = (CASES | QUERIED)[case]
    sequence = sequence_of(name, options, budget="12")
    answered(sequence, FIRST, len(ANSWER))
    n, question = len(sequence.tokens), tokens(5, 2)
    missing = sequence.keep_common([*FIRST, *ANSWER, *question], goes_on=True)
    n_queried = sequence.method.n_queried or 0
    assert missing[-5:] == question and len(missing) >= n_queried
    assert (len(sequence.tokens) == n) == (n_queried <= 5)
