"""What the caches of every method say that they hold is what they hold."""

import gc
import threading
import tracemalloc

import pytest
from tiny_sequences import decoded, tokens

from sparsekv_cli.methods import METHODS
from sparsekv_cli.sequence import N_HEADROOM


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_caches_hold_what_they_say(name, sequence_of):
    """After a prompt and some steps: so many bytes are free when they are dropped."""
    model, others = sequence_of(name, budget="64", chunk=256).model, threading.enumerate()
    tracemalloc.start()
    try:
        sequence = model.sequence()
        sequence.prefill(tokens(1500))
        decoded(sequence, tokens(4, 1))
        said = [cache.memory() for cache in sequence.caches]
        held = tracemalloc.get_traced_memory()[0]
        del sequence
        gc.collect()
        for thread in set(threading.enumerate()) - set(others):
            thread.join(timeout=1)  # it holds the arrays of its method until it ends
        freed = held - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    n_bytes = sum(each.host + each.device + each.index for each in said)
    assert n_bytes == pytest.approx(freed, rel=0.05, abs=100_000)  # full: 3 MB


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_what_a_prompt_will_hold_is_known_before(name, sequence_of):
    """Rows and index: quest's summaries are 7 % of its rows here."""
    sequence, n = sequence_of(name, budget="64", chunk=256, ctx_size=4096), 3000
    expected = sum(cache.held_bytes(n + N_HEADROOM) for cache in sequence.caches)
    sequence.prefill(tokens(n))
    decoded(sequence, tokens(1, 1))
    said = [cache.memory() for cache in sequence.caches]
    n_bytes = sum(each.host + each.device + each.index for each in said)
    assert n_bytes == pytest.approx(expected, rel=0.03, abs=100_000)
