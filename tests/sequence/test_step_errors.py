"""A step that fails for one of several sequences: the others go on as if they were alone."""

import numpy as np
import pytest
from reference_records import LONG_CASES
from tiny_sequences import CHUNK, N_LAYER, decoded, tokens

from sparsekv_cli.errors import StepError
from sparsekv_cli.methods import METHODS
from sparsekv_cli.model import Model
from sparsekv_cli.sequence import Sequence

PROMPT, ANSWER = tokens(5 * CHUNK), tokens(6, 1)
PLACES = (0, 1, 2)  # of the sequence that fails


def started(model: Model, n: int = 3) -> list[Sequence]:
    sequences = [model.sequence() for _ in range(n)]
    for i, sequence in enumerate(sequences):
        sequence.prefill(PROMPT[i:])
        decoded(sequence, ANSWER[:3])
    return sequences


def fail(cache, monkeypatch, is_late: bool) -> None:
    """Makes the cache's next step raise, at its start or when the row is there."""

    def failing(change):
        def call(*given):
            if is_late:
                change(*given)
            raise MemoryError("of one")

        return call

    for name in ("decode", "decode_rows", "_add_all"):
        monkeypatch.setattr(cache, name, failing(getattr(cache, name)))


def check(model: Model, layer: int, place: int, monkeypatch, n_rows: int = 1) -> None:
    alone, together = started(model), started(model)
    rows = [ANSWER[3 : 3 + min(n_rows, each.most_rows(n_rows))] for each in together]
    expected = [
        model.engine.decode([each], [new])[0] for each, new in zip(alone, rows, strict=True)
    ]
    failing, before = together[place], list(together[place].tokens)
    with monkeypatch.context() as patch, pytest.raises(StepError, match="of one") as told:
        fail(failing.caches[layer], patch, layer % 2 == 0)
        model.engine.decode(together, rows)
    assert list(told.value.errors) == [place] and failing.tokens == before
    for i in set(PLACES) - {place}:
        np.testing.assert_array_equal(told.value.outcomes[i], expected[i])
        assert together[i].tokens == alone[i].tokens
        again, first = (decoded(each, ANSWER) for each in (together[i], alone[i]))
        np.testing.assert_array_equal(again, first)
    failing.rewind(len(before))
    assert failing.tokens == before[: len(failing.tokens)]
    assert {cache.n for cache in failing.caches} == {len(failing.tokens)}
    other = started(model)[place]
    other.rewind(len(failing.tokens))
    again, first = (each.prefill(tokens(20, 4)) for each in (failing, other))
    np.testing.assert_array_equal(again, first)


@pytest.mark.parametrize("layer", range(N_LAYER))
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, layer, sequence_of, monkeypatch):
    check(
        sequence_of(name, budget="12").model, layer, PLACES[layer % 3], monkeypatch, 1 + layer % 2
    )


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(
    "case", ["gemma3", "qwen35", "lfm2", "nemotron_h", "falcon-h1", "gemma4", "deepseek2"]
)
def test_windows_states_and_shared_rows(case, layer, sequence_of, monkeypatch):
    model = sequence_of("full", shape={**LONG_CASES[case], "n_ctx": 420}).model
    layer = min(layer, len(model.hparams.layers) - 1)
    check(model, layer, PLACES[layer % 3], monkeypatch)


def test_an_error_of_all_is_raised_as_it_is(sequence_of, monkeypatch):
    model = sequence_of("quest", budget="12").model
    sequences = started(model, 2)
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="of one"):
        for sequence in sequences:
            fail(sequence.caches[1], patch, is_late=True)
        model.engine.decode(sequences, [[7], [7]])
    for i, sequence in enumerate(sequences):
        assert sequence.tokens == [*PROMPT[i:], *ANSWER[:3]]
        assert {cache.n for cache in sequence.caches} == {len(sequence.tokens)}
