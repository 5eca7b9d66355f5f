"""Caches that drop rows, in whole sequences."""

import pytest
from tiny_sequences import N_KV, N_LAYER, decoded, tokens


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_evicting_methods_hold_less_however_long_the_answer(name, sequence_of):
    """Less than the prompt's rows, in memory and in what a step reads."""
    full, sequence = sequence_of("full"), sequence_of(name, budget="10", dense_layers="none")
    for each in (full, sequence):
        each.prefill(tokens(1900))
        decoded(each, tokens(100, 1))
    whole, counts = full.ledger(), sequence.ledger()
    assert counts["bytes_host"] < 0.2 * whole["bytes_host"]
    assert counts["bytes_read"] < 0.1 * whole["bytes_read"]
    n_held = {cache.store.n for cache in sequence.caches}
    assert n_held == {46 + 100 if name == "snapkv" else 13}
    assert counts["rows_dropped"] == N_LAYER * N_KV * (2000 - n_held.pop())
