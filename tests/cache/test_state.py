"""Recurrent layers in sessions: rewinds to checkpoints, message ends, memory, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from reference_decoder import nmse
from reference_records import LONG_CASES
from tiny_sessions import decoded, open_tiny, tokens
from tiny_tokenizer import SPECIAL_TOKENS

from sparsekv_cli.cache import state
from sparsekv_cli.cache.state import Checkpoints, StateCache
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.methods.full import Full
from sparsekv_cli.session import load_session

END = SPECIAL_TOKENS.index("<|im_end|>")


def states(session) -> list[StateCache]:
    return [cache for cache in session.caches if isinstance(cache, StateCache)]


def messages(*lengths: int) -> list[int]:
    """Messages of so many tokens each, the last of which ends it."""
    ids = []
    for seed, n in enumerate(lengths):
        ids += [*tokens(n - 1, seed), END]
    return ids


@pytest.fixture(params=["lfm2", "qwen35"])
def session(request, tiny_model):
    session = open_tiny(tiny_model, "full", shape=LONG_CASES[request.param])
    yield session
    session.gguf.close()


def test_a_changed_last_message_keeps_the_others(session):
    prompt, changed = messages(40, 30, 50), messages(40, 30) + tokens(20, 9)
    session.prefill(prompt)
    decoded(session, tokens(5, 3))
    session.rewind(75)
    assert session.tokens == prompt[:70]
    again = session.prefill(changed[70:])
    session.reset()
    assert nmse(session.prefill(changed), again) < 1e-9


def test_the_end_of_a_prefill_is_kept_to_the_last_bit(session):
    """As another answer to the same prompt needs it."""
    session.prefill(tokens(33))
    first = decoded(session, tokens(7, 1))
    assert session.checkpoint is not None
    session.rewind(33)
    assert len(session.tokens) == 33 and session.checkpoint is not None
    np.testing.assert_array_equal(first, decoded(session, tokens(7, 1)))
    n_before = len(session.tokens)
    session.prefill(tokens(8, 2))
    session.rewind(n_before)
    assert len(session.tokens) == n_before  # where the second prefill began


def test_a_failed_step_goes_back_to_a_checkpoint(session, monkeypatch):
    session.prefill(tokens(20))
    session.decode(5)
    last = states(session)[-1]

    def fail(x):
        raise KeyboardInterrupt

    monkeypatch.setattr(session.caches[-1], "decode", fail)
    with pytest.raises(KeyboardInterrupt):
        session.decode(6)
    monkeypatch.undo()
    assert session.tokens == tokens(20) and last.n == 20
    after = session.decode(5)
    session.reset()
    session.prefill(tokens(20))
    np.testing.assert_array_equal(after, session.decode(5))


def test_long_prompts_and_answers_have_checkpoints_every_step(session, monkeypatch):
    monkeypatch.setattr(state, "STEP", 32)
    session.prefill(tokens(100))
    decoded(session, tokens(40, 1))
    for n, kept in ((135, 128), (127, 100), (99, 96), (50, 32), (31, 0)):
        session.rewind(n)
        assert len(session.tokens) == kept
        assert all(cache.n == kept for cache in session.caches)


def test_memory_is_the_states_and_that_of_checkpoints(session):
    session.prefill(tokens(10))
    (first, *_) = states(session)
    one = first.memory().host // 2  # the state and a copy
    session.prefill(tokens(300, 1))
    assert first.memory().host == 3 * one
    decoded(session, tokens(20))
    assert first.memory().host == 3 * one
    assert session.ledger.as_dict()["bytes_host"] >= 3 * one


def test_without_checkpoints_everything_is_prefilled_again(tiny_model):
    config = SessionConfig(threads=1, prefill_dtype="f32", checkpoints=0)
    session = load_session(tiny_model(**LONG_CASES["lfm2"]), Full(), config)
    session.prefill(tokens(30))
    session.decode(4)
    session.rewind(30)
    assert session.tokens == []
    session.gguf.close()


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
