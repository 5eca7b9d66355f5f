"""A sequence that goes on with another method: which rows it takes over, and their bits."""

import numpy as np
import pytest
from tiny_sequences import decoded, tokens

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method

N_PROMPT, STEPS = 200, [7, 8, 9]
OTHERS = ("topk", "streaming", "quest", "snapkv", "h2o", "lfps", "freekv")
QUERIED = {"window": "100"}  # more queries than are read again in any case
GIVE_ROWS = {"full", "topk", "streaming", "quest", "lfps", "freekv"}  # all rows


@pytest.mark.parametrize(
    ("name", "options"), [(name, {}) for name in OTHERS] + [("lfps", QUERIED), ("snapkv", QUERIED)]
)
def test_another_method_takes_over_the_rows(sequence_of, name, options):
    """From full, and back: it decodes as after a prefill of its own."""
    sequence, alone = sequence_of("full"), sequence_of(name, options, budget="16")
    method, full = alone.method, sequence.method
    sequence.prefill(tokens(N_PROMPT))
    sequence.change_method(sequence.model.attention_of(method))
    assert sequence.method is method
    assert len(sequence.tokens) == (0 if name == "h2o" else N_PROMPT)
    if name == "h2o":  # needs all queries
        sequence.prefill(tokens(N_PROMPT))
    alone.prefill(tokens(N_PROMPT))
    np.testing.assert_allclose(decoded(sequence, STEPS), decoded(alone, STEPS), atol=1e-3)
    sequence.change_method(sequence.model.attention_of(full))
    assert len(sequence.tokens) == (N_PROMPT + len(STEPS) if name in GIVE_ROWS else 0)
    assert all(cache.n == len(sequence.tokens) for cache in sequence.caches)


def test_other_types_of_rows_are_not_taken_over(sequence_of):
    sequence = sequence_of("full")
    sequence.prefill(tokens(50))
    quest = build_method("quest", {}, cache_type_k="q8_0")
    sequence.change_method(sequence.model.attention_of(quest))
    assert sequence.tokens == [] and all(cache.n == 0 for cache in sequence.caches)
    sequence.prefill(tokens(50))
    assert len(sequence.tokens) == 50


def test_a_method_that_is_refused_changes_nothing(sequence_of):
    sequence = sequence_of("full")
    sequence.prefill(tokens(50))
    quest = build_method("quest", {}, dense_layers="9")
    with pytest.raises(SparseKVError, match="layer 9"):
        sequence.change_method(sequence.model.attention_of(quest))
    assert len(sequence.tokens) == 50 and sequence.method.name == "full"


@pytest.mark.parametrize("name", ["load_kernels", "caches"])
def test_a_stop_ahead_of_the_change_changes_nothing(name, sequence_of, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    sequence = sequence_of("full")
    sequence.prefill(tokens(50))
    monkeypatch.setattr(sequence.engine, name, stop)
    attention = sequence.model.attention_of(build_method("quest", {}))
    with pytest.raises(KeyboardInterrupt):
        sequence.change_method(attention)
    assert len(sequence.tokens) == 50 and sequence.method.name == "full"
