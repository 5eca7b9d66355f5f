"""Recurrent layers in sequences: rewinds to checkpoints, message ends, memory, what is refused."""

import numpy as np
import pytest
from opened import open_sequence
from reference_decoder import nmse
from reference_records import LONG_CASES
from tiny_sequences import decoded, open_tiny, tokens
from tiny_tokenizer import SPECIAL_TOKENS

from sparsekv_cli.cache import state
from sparsekv_cli.cache.state import Checkpoints, StateCache
from sparsekv_cli.methods.full import Full
from sparsekv_cli.settings.config import SessionConfig

END = SPECIAL_TOKENS.index("<|im_end|>")


def states(sequence) -> list[StateCache]:
    return [cache for cache in sequence.caches if isinstance(cache, StateCache)]


def messages(*lengths: int) -> list[int]:
    """Messages of so many tokens each, the last of which ends it."""
    ids = []
    for seed, n in enumerate(lengths):
        ids += [*tokens(n - 1, seed), END]
    return ids


@pytest.fixture(params=["lfm2", "qwen35", "granitehybrid", "nemotron_h_moe", "falcon-h1"])
def sequence(request, tiny_model):
    sequence = open_tiny(tiny_model, "full", shape=LONG_CASES[request.param])
    yield sequence
    sequence.model.gguf.close()


def test_a_changed_last_message_keeps_the_others(sequence):
    prompt, changed = messages(40, 30, 50), messages(40, 30) + tokens(20, 9)
    sequence.prefill(prompt)
    decoded(sequence, tokens(5, 3))
    sequence.rewind(75)
    assert sequence.tokens == prompt[:70]
    again = sequence.prefill(changed[70:])
    sequence.reset()
    assert nmse(sequence.prefill(changed), again) < 1e-9


def test_the_end_of_a_prefill_is_kept_to_the_last_bit(sequence):
    """As another answer to the same prompt needs it."""
    sequence.prefill(tokens(33))
    first = decoded(sequence, tokens(7, 1))
    assert sequence.checkpoint is not None
    sequence.rewind(33)
    assert len(sequence.tokens) == 33 and sequence.checkpoint is not None
    np.testing.assert_array_equal(first, decoded(sequence, tokens(7, 1)))
    n_before = len(sequence.tokens)
    sequence.prefill(tokens(8, 2))
    sequence.rewind(n_before)
    assert len(sequence.tokens) == n_before  # where the second prefill began


def test_a_failed_step_goes_back_to_a_checkpoint(sequence, monkeypatch):
    sequence.prefill(tokens(20))
    sequence.decode(5)
    last = states(sequence)[-1]

    def fail(x):
        raise KeyboardInterrupt

    monkeypatch.setattr(sequence.caches[-1], "decode", fail)
    with pytest.raises(KeyboardInterrupt):
        sequence.decode(6)
    monkeypatch.undo()
    assert sequence.tokens == tokens(20) and last.n == 20
    after = sequence.decode(5)
    sequence.reset()
    sequence.prefill(tokens(20))
    np.testing.assert_array_equal(after, sequence.decode(5))


def test_long_prompts_and_answers_have_checkpoints_every_step(sequence, monkeypatch):
    monkeypatch.setattr(state, "STEP", 32)
    sequence.prefill(tokens(100))
    decoded(sequence, tokens(40, 1))
    for n, kept in ((135, 128), (127, 100), (99, 96), (50, 32), (31, 0)):
        sequence.rewind(n)
        assert len(sequence.tokens) == kept
        assert all(cache.n == kept for cache in sequence.caches)


def test_memory_is_the_states_and_that_of_checkpoints(sequence):
    sequence.prefill(tokens(10))
    (first, *_) = states(sequence)
    one = first.memory().host // 2  # the state and a copy
    sequence.prefill(tokens(300, 1))
    assert first.memory().host == 3 * one
    decoded(sequence, tokens(20))
    assert first.memory().host == 3 * one
    assert sequence.ledger()["bytes_host"] >= 3 * one


def test_without_checkpoints_everything_is_prefilled_again(tiny_model):
    config = SessionConfig(threads=1, prefill_dtype="f32", checkpoints=0)
    sequence = open_sequence(tiny_model(**LONG_CASES["lfm2"]), Full(), config)
    sequence.prefill(tokens(30))
    sequence.decode(4)
    sequence.rewind(30)
    assert sequence.tokens == []
    sequence.model.gguf.close()


def test_checkpoints_get_sparser_towards_the_beginning():
    kept, array = Checkpoints(4), np.zeros(3)
    for n in range(10, 170, 10):
        array[:] = n
        kept.keep(n, [array])
    assert len(kept.lengths) == 4 and kept.lengths[-1] == 160
    gaps = np.diff([0, *kept.lengths])
    assert (gaps[:-1] >= gaps[1:]).all() and kept.nbytes == 4 * array.nbytes
    third = kept.lengths[2]
    assert kept.latest(third + 5) == third and kept.latest(5) == 0
    kept.restore(third, [array])
    assert (array == third).all() and kept.lengths[-1] == third
    kept.restore(0, [array])
    assert not array.any() and not kept.lengths
