"""Every method on every architecture beyond the first three: whole sequences on tiny models.

Layers without RoPE, partial rotation, queries scaled by position, other attention scales, experts,
windows, softcaps and sinks.
"""

import numpy as np
import pytest
from opened import open_sequence
from reference_decoder import nmse
from reference_records import LONG_CASES
from tiny_sequences import CHUNK, decoded, runs_on, tokens

from sparsekv_cli.cache.layer import SelectingCache
from sparsekv_cli.cache.spec import FULL, N_SINKS, Budget
from sparsekv_cli.methods import METHODS
from sparsekv_cli.methods.fasa import FASA
from sparsekv_cli.methods.lfps import LFPS, LFPSCache
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.methods.sals import SALS
from sparsekv_cli.methods.streaming import Streaming
from sparsekv_cli.methods.topk import TopK
from sparsekv_cli.settings.config import SessionConfig

SPARSE = [name for name in METHODS if name != "full"]
# Those whose attention is another one; the others differ from them in nothing that a method sees.
OWN_ATTENTION = (
    "smollm3", "phi3", "mistral3", "granitemoe", "granite_without_rope", "gemma3", "gemma4",
    "gpt-oss", "qwen35", "glm4", "minimax-m2", "olmo2_with_windows", "granitehybrid_with_experts",
    "deepseek2_with_groups", "nemotron_h", "falcon-h1",
)  # fmt: skip
# The windows of exaone4 need 64 layers, which takes too long. Its full layers are not rotated.
LONGEST = ("exaone4_with_windows",)
OTHERS = [name for name in LONG_CASES if name not in (*OWN_ATTENTION, *LONGEST)]
N_PROMPT, N_STEPS = 300, 12  # faedkv compresses no shorter prompts; mistral3, phi3 change at 96


# Gemma 3 with every other layer a full one, so that two are enough; Gemma 4's third and fourth
# read the rows of the first two.
SHORTER = {
    "gemma3": {"n_layer": 2, "metadata": {"gemma3.attention.sliding_window_pattern": 2}},
    "gemma4": {"n_layer": 4},
}


def shape(case: str) -> dict:
    return {"n_ctx": 320, **LONG_CASES[case], "attention_gain": 3.0, **SHORTER.get(case, {})}


def pairs(names) -> list:
    """Every method on every architecture of OWN_ATTENTION and on a sixth of the others."""
    return [
        pytest.param(name, case, marks=() if case in OWN_ATTENTION else pytest.mark.slow)
        for i, name in enumerate(names)
        for j, case in enumerate((*OTHERS, *OWN_ATTENTION))
        if (case in OWN_ATTENTION or (i + j) % 6 == 0) and runs_on(name, LONG_CASES[case])
    ]


def open_pair(sequence_of, name: str, case: str, budget: str, options=None):
    """Sequences of ``full`` and of the method with this budget, both prefilled."""
    full = sequence_of("full", shape=shape(case))
    sparse = sequence_of(name, options, budget=budget, dense_layers="none", shape=shape(case))
    prompt = tokens(N_PROMPT)
    np.testing.assert_array_equal(full.prefill(prompt), sparse.prefill(prompt))
    return full, sparse


@pytest.mark.parametrize(("name", "case"), pairs(SPARSE))
def test_a_budget_of_the_context_changes_no_bit_and_a_small_one_is_counted(name, case, sequence_of):
    """Calibrations of the models are made for it."""
    full, whole = open_pair(sequence_of, name, case, "100%")
    text = tokens(N_STEPS, 1)
    exact = decoded(full, text)
    np.testing.assert_array_equal(exact, decoded(whole, text))
    _, small = open_pair(sequence_of, name, case, "10")
    answers = decoded(small, text)
    assert np.isfinite(answers).all() and np.abs(answers - exact).max() > 1e-4
    counts = small.ledger()
    assert 0 < counts["sparse_rows_attended"] < 0.9 * counts["sparse_rows_total"]
    small.rewind(N_PROMPT)
    np.testing.assert_array_equal(answers, decoded(small, text))


class AllOf(Budget):
    """All rows of any context but ``floor``."""

    def rows(self, n: int) -> int:
        return n - self.floor


WIDE_TABLES = {"candidates": 0, "a": 1e-9, "decay": 1 - 1e-6}
WHOLE_LATENTS = {"rank": 10**4, "score_rank": 10**4, "bits": 16}
# The sparse path over all rows, which these take when they are told that no budget covers them.
FORCED = {
    "topk": TopK(budget=AllOf(floor=N_SINKS), dense_layers=()),
    "quest": Quest(budget=AllOf(floor=0), dense_layers=()),
    "streaming": Streaming(budget=AllOf(floor=N_SINKS), dense_layers=()),
    "fasa": FASA(budget=AllOf(floor=0), dense_layers=()),
    "sals": SALS(budget=AllOf(floor=16 + 64), dense_layers=(), **WHOLE_LATENTS),
    # Tables that the prefill fills and few steps change: every row has an entry above 0.
    "lfps": LFPS(budget=AllOf(floor=N_SINKS), dense_layers=(), epsilon=1, **WIDE_TABLES),
}
# Whose sparse path cannot be made to take every row: with most rows they are nearer than with few.
NEARER = {"freekv", "faedkv", "h2o", "snapkv"}
# sals holds keys as latents in f16, of another basis than the f16 keys of full.
LIMITS = dict.fromkeys(FORCED, 1e-9) | {"sals": 1e-4}


@pytest.mark.parametrize(("name", "case"), pairs(FORCED))
def test_the_sparse_path_over_all_rows_is_full(name, case, sequence_of, tiny_model, monkeypatch):
    full = sequence_of("full", shape=shape(case))
    config = SessionConfig(threads=1, prefill_dtype="f32", chunk=CHUNK)
    sparse = open_sequence(tiny_model(**shape(case)), FORCED[name], config)
    for sequence in (full, sparse):
        sequence.prefill(tokens(N_PROMPT))
    for cache in sparse.caches:
        if isinstance(cache, SelectingCache):
            monkeypatch.setattr(type(cache), "is_dense_at", lambda self, n: False)
        cache.records_attended = True
    for of in (FASA, SALS):
        monkeypatch.setattr(of, "is_dense_at", lambda self, n: False)
    monkeypatch.setattr(LFPSCache, "_is_dense_at", lambda self, n: False)
    text = tokens(N_STEPS, 1)
    assert nmse(decoded(full, text), decoded(sparse, text)) < LIMITS[name]
    n = N_PROMPT + N_STEPS
    for cache in sparse.caches:
        if cache.spec.kind != FULL:
            continue
        _, counts = cache.attended
        assert set(counts.tolist()) == {n}
    sparse.model.gguf.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), pairs(sorted(NEARER)))
def test_most_rows_are_nearer_to_full_than_few(name, case, sequence_of):
    text, errors = tokens(N_STEPS, 1), []
    for budget in ("10", "85%"):
        full, sparse = open_pair(sequence_of, name, case, budget)
        errors.append(nmse(decoded(full, text), decoded(sparse, text)))
    assert errors[1] < errors[0] / 2


def test_every_method_is_here():
    missing = {*SPARSE} - {*FORCED, *NEARER}
    assert not missing, f"FORCED or NEARER needs {missing}"
    assert set(SPARSE) == {*FORCED, *NEARER}
