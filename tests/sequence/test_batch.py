"""Several sequences of one model, which a step decodes together, and what a step refuses."""

import numpy as np
import pytest
from opened import OpenSequence, decode_together, open_sequence
from tiny_models import make_model

from sparsekv_cli.cache.counters import ledger_of
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.full import Full
from sparsekv_cli.settings.config import SessionConfig

PROMPTS = ([1, 262, 280], [5, 17, 310, 99, 266], [4, 401])


@pytest.fixture
def sequence(tmp_path) -> OpenSequence:
    config = SessionConfig(prefill_dtype="f32", threads=1, ctx_size=8)
    return open_sequence(make_model(tmp_path / "model.gguf", n_layer=1), Full(), config)


def started(sequence: OpenSequence) -> list[OpenSequence]:
    """Returns a sequence for each prompt, all of the model of ``sequence``."""
    sequences = [sequence.another() for _ in PROMPTS]
    for each, prompt in zip(sequences, PROMPTS, strict=True):
        each.prefill(prompt)
    return sequences


def test_sequences_have_the_bits_that_each_has_alone(sequence):
    expected, bytes_host = [], 0
    for prompt in PROMPTS:
        sequence.reset()
        sequence.prefill(prompt)
        expected.append([sequence.decode(7), sequence.decode(9)])
        bytes_host += sequence.ledger()["bytes_host"]
    sequences = started(sequence)
    for step, token in enumerate((7, 9)):
        logits = decode_together(sequences, [token] * 3)
        np.testing.assert_array_equal(logits, [rows[step] for rows in expected])
    for each, prompt in zip(sequences, PROMPTS, strict=True):
        assert each.tokens == [*prompt, 7, 9]
        assert each.caches[0].n == len(prompt) + 2
    three, two = (
        ledger_of([cache for each in some for cache in each.caches])
        for some in (sequences, sequences[:2])
    )
    assert three["bytes_host"] == bytes_host > two["bytes_host"]
    assert three["rows_total"] == 4 * sum(2 * len(p) + 3 for p in PROMPTS)  # 4 heads


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
    following = rng.integers(0, 512, (2, 230)).tolist()
    expected, sequences = [], []
    for prompt, tokens in zip(prompts, following, strict=True):
        sequence.reset()
        sequence.prefill(prompt)
        expected.append([sequence.decode(token) for token in tokens])
        sequences.append(sequence.another())
        sequences[-1].prefill(prompt)
    sequences[1].caches[2].records_attended = True
    for step, tokens in enumerate(zip(*following, strict=True)):
        np.testing.assert_array_equal(
            decode_together(sequences, tokens), [rows[step] for rows in expected]
        )
    if name != "full":
        assert sequences[1].caches[2].attended is not None


def test_a_step_with_several_tokens_of_a_sequence_has_the_bits_of_steps_with_one(sequence):
    expected = started(sequence)
    steps = [[expected[0].decode(7)], [expected[1].decode(token) for token in (8, 9, 10)]]
    some = started(sequence)[:2]
    outcomes = sequence.engine.decode(some, [[7], [8, 9, 10]])
    for rows, alone in zip(outcomes, steps, strict=True):
        np.testing.assert_array_equal(rows, alone)
    assert [each.tokens for each in some] == [each.tokens for each in expected[:2]]
    assert [each.timings.decode_tokens for each in some] == [1, 3]
    with pytest.raises(SparseKVError, match="context of 8"):
        sequence.engine.decode(some, [[7, 7], [7]])
    assert [len(each.tokens) for each in some] == [4, 8]


def test_a_sequence_goes_on_by_itself_and_together_with_others(sequence):
    sequences = started(sequence)
    decode_together(sequences[:2], [7, 7])
    sequences[2].decode(11)
    sequences[1].rewind(0)
    sequences[1].prefill([3, 4])
    assert [each.tokens for each in sequences] == [[1, 262, 280, 7], [3, 4], [4, 401, 11]]
    again = decode_together(sequences, [2, 2, 2])[1]
    sequence.prefill([3, 4])
    np.testing.assert_array_equal(sequence.decode(2), again)


def test_sequences_may_come_in_any_order(sequence):
    expected = decode_together(started(sequence), [7, 8, 9])
    backwards = started(sequence)[::-1]
    np.testing.assert_array_equal(decode_together(backwards, [9, 8, 7]), expected[::-1])


def test_a_full_sequence_or_a_wrong_token_stops_the_step(sequence):
    sequences = started(sequence)
    for tokens in ([7, -1, 7], [7, 512, 7]):
        with pytest.raises(SparseKVError, match=r"token id (-1|512)"):
            decode_together(sequences, tokens)
    for _ in range(3):
        decode_together(sequences, [7, 7, 7])
    with pytest.raises(SparseKVError, match="context of 8"):
        decode_together(sequences, [7, 7, 7])
    assert [len(each.tokens) for each in sequences] == [6, 8, 5]
    sequences[0].decode(7)


def test_a_step_that_fails_leaves_every_sequence_as_it_was(sequence, monkeypatch):
    sequences = started(sequence)
    expected = decode_together(sequences, [7, 7, 7])
    for each, prompt in zip(sequences, PROMPTS, strict=True):
        each.rewind(len(prompt))
    with monkeypatch.context() as patch:
        failing = sequences[2].caches[0].store
        patch.setattr(failing, "append_rows", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            decode_together(sequences, [7, 7, 7])
    assert [each.tokens for each in sequences] == [*PROMPTS]
    assert [each.caches[0].n for each in sequences] == [len(p) for p in PROMPTS]
    np.testing.assert_array_equal(decode_together(sequences, [7, 7, 7]), expected)
    for tokens in ([], [7] * 4):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            decode_together(sequences, tokens)
    assert [each.tokens for each in sequences] == [[*prompt, 7] for prompt in PROMPTS]
