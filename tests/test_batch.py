"""Several sequences of one sequence: whose turn it is, what they share, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from opened import open_sequence
from tiny_models import make_model

from sparsekv_cli.batch import Batch
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.full import Full
from sparsekv_cli.sequence import Sequence

PROMPTS = ([1, 262, 280], [5, 17, 310, 99, 266], [4, 401])


@pytest.fixture
def sequence(tmp_path) -> Sequence:
    config = SessionConfig(prefill_dtype="f32", threads=1, ctx_size=8)
    return open_sequence(make_model(tmp_path / "model.gguf", n_layer=1), Full(), config)


def started(sequence: Sequence) -> Batch:
    batch = Batch(sequence, len(PROMPTS))
    for i, prompt in enumerate(PROMPTS):
        batch.use(i).prefill(prompt)
    return batch


def test_sequences_are_those_that_a_session_would_have_alone(sequence):
    expected, bytes_host = [], 0
    for prompt in PROMPTS:
        sequence.reset()
        sequence.prefill(prompt)
        expected.append([sequence.decode(7), sequence.decode(9)])
        bytes_host += sequence.ledger()["bytes_host"]
    sequence.reset()
    batch = started(sequence)
    for step, token in enumerate((7, 9)):
        logits = batch.decode([token] * 3)
        np.testing.assert_array_equal(logits, [rows[step] for rows in expected])
    for i, prompt in enumerate(PROMPTS):
        assert batch.use(i).tokens == [*prompt, 7, 9]
        assert sequence.caches[0].n == len(prompt) + 2
    assert batch.ledger(3)["bytes_host"] == bytes_host > batch.ledger(2)["bytes_host"]
    assert batch.ledger(3)["rows_total"] == 4 * sum(2 * len(p) + 3 for p in PROMPTS)  # 4 heads


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full", {"cache_type_k": "q8_0"}),
        ("lfps", {"budget": "12", "scout": "256"}),
        ("quest", {"budget": "32"}),
        ("freekv", {"budget": "32", "page": "4", "sinks": "4", "window": "8"}),
        ("h2o", {"budget": "12"}),
    ],
)
def test_methods_give_each_sequence_the_bits_that_it_has_alone(name, options, tmp_path):
    """Long enough for the stores to grow; which rows a layer attended to may be asked as well."""
    config = SessionConfig(prefill_dtype="f32", threads=2, ctx_size=900)
    path = make_model(tmp_path / "model.gguf", n_layer=3)
    sequence = open_sequence(path, build_method(name, options), config)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 512, n).tolist() for n in (60, 75)]
    following = rng.integers(0, 512, (2, 530)).tolist()
    expected = []
    for prompt, tokens in zip(prompts, following, strict=True):
        sequence.reset()
        sequence.prefill(prompt)
        expected.append([sequence.decode(token) for token in tokens])
    sequence.reset()
    batch = Batch(sequence, 2)
    for i, prompt in enumerate(prompts):
        batch.use(i).prefill(prompt)
    batch.use(1).caches[2].records_attended = True
    for step, tokens in enumerate(zip(*following, strict=True)):
        np.testing.assert_array_equal(batch.decode(tokens), [rows[step] for rows in expected])
    if name != "full":
        assert batch.use(1).caches[2].attended is not None


def test_a_sequence_goes_on_by_itself_and_back(sequence):
    batch = started(sequence)
    batch.decode([7, 7])  # the first two
    batch.use(2).decode(11)
    batch.use(1).rewind(0)
    sequence.prefill([3, 4])
    batch.use(0)
    assert [list(batch.use(i).tokens) for i in range(3)] == [[1, 262, 280, 7], [3, 4], [4, 401, 11]]
    again = batch.decode([2, 2, 2])[1]
    sequence.reset()
    sequence.prefill([3, 4])
    np.testing.assert_array_equal(sequence.decode(2), again)


def test_sequences_exchange_their_places(sequence):
    expected = started(sequence).decode([7, 8, 9])
    sequence.reset()
    batch = started(sequence)
    batch.exchange(0, 2)
    assert sequence.tokens == PROMPTS[0], "the sequence works on the same place"
    assert [list(batch.use(i).tokens) for i in range(3)] == [PROMPTS[2], PROMPTS[1], PROMPTS[0]]
    np.testing.assert_array_equal(batch.decode([9, 8, 7]), expected[::-1])


def test_a_full_sequence_or_a_wrong_token_stops_the_step(sequence):
    batch = started(sequence)
    for tokens in ([7, -1, 7], [7, 512, 7]):
        with pytest.raises(SparseKVError, match=r"token id (-1|512)"):
            batch.decode(tokens)
    for _ in range(3):
        batch.decode([7, 7, 7])
    with pytest.raises(SparseKVError, match="context of 8"):
        batch.decode([7, 7, 7])
    assert [len(batch.use(i).tokens) for i in range(3)] == [6, 8, 5]
    batch.use(0).decode(7)


def test_a_step_that_fails_leaves_every_sequence_as_it_was(sequence, monkeypatch):
    batch = started(sequence)
    expected = batch.decode([7, 7, 7])
    for i, prompt in enumerate(PROMPTS):
        batch.use(i).rewind(len(prompt))
    batch.use(1)
    failing = batch.use(2).caches[0]
    batch.use(1)
    with monkeypatch.context() as patch:
        patch.setattr(failing, "decode", lambda x: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch.decode([7, 7, 7])
    assert sequence.tokens == PROMPTS[1], "the sequence works on the same sequence"
    assert [batch.use(i).caches[0].n for i in range(3)] == [len(p) for p in PROMPTS]
    np.testing.assert_array_equal(batch.decode([7, 7, 7]), expected)
    for tokens in ([], [7] * 4):
        with pytest.raises(ValueError, match="must be 1 to 3"):
            batch.decode(tokens)
