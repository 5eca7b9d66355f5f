"""StreamingLLM: what it counts, and positions within the cache."""

import numpy as np
from layer_rows import Geometry
from naive_pair import Pair
from tiny_sequences import N_HEAD, counts_after, decoded, tokens

from sparsekv_cli import engine
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.methods.streaming import Streaming


def test_ledger_of_streaming(sequence_of):
    sequence = sequence_of("streaming", {"sinks": "3"}, budget="10", dense_layers="0")
    counts = counts_after(sequence, 60, 5)
    dense = N_HEAD * sum(range(61, 66))
    assert counts["sparse_rows_attended"] == 3 * N_HEAD * 5 * (10 + 3)
    assert counts["rows_attended"] == dense + counts["sparse_rows_attended"]
    assert counts["sparse_rows_scored"] == 0


def test_repositioned_streaming_numbers_rows_within_the_cache():
    """Two turns: decode, prefill, decode."""
    method = Streaming(budget=Budget(tokens=20), sinks=3, reposition=True, dense_layers=())
    pair = Pair(method, Geometry(4, 2, 64, n_rot=64))
    pair.tolerance = 3e-3  # keys are rotated once more after they were rounded to f16
    pair.prefill(60)
    pair.decode(40)
    pair.prefill(50)
    assert pair.decode(30)["sparse"] == 70


def test_layers_that_share_rows_turn_the_sinks_once(sequence_of, monkeypatch):
    """Gemma 4's third and fourth layer read the rows of the first two."""
    shape = {"arch": "gemma4", "n_layer": 4, "attention_gain": 3.0}
    answers = []
    for is_shared in (True, False):
        if not is_shared:
            monkeypatch.setattr(engine, "share_rows", lambda caches: None)
        options = {"reposition": "true"}
        sequence = sequence_of("streaming", options, budget="20", dense_layers="none", shape=shape)
        assert any(cache.store.is_shared for cache in sequence.caches) == is_shared
        sequence.prefill(tokens(100))
        answers.append(decoded(sequence, tokens(10, 1)))
    np.testing.assert_array_equal(*answers)
