"""What every registered method promises of rows that a step adds and that are taken back.

After that the sequence is what it would be without them: every table, index and counter, byte by
byte, and every later logit, bit by bit.
"""

import numpy as np
import pytest
import tiny_sequences
from cache_states import differing, state_of
from reference_records import LONG_CASES
from tiny_sequences import CHUNK, decoded, runs_on, tokens

from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.cache.window import WindowCache
from sparsekv_cli.methods import METHODS, method_class
from sparsekv_cli.sequence import Sequence

pytestmark = pytest.mark.slow

PROMPT, ANSWER, DRAFT = tokens(20 * CHUNK), tokens(200, 1), tokens(64, 2)
CASES = tiny_sequences.CASES | {
    "lfps, by group": ("lfps", {"scored_by": "group"}),
    "lfps, pages": ("lfps", {"pages_from": "200"}),
    "lfps, fast decay": ("lfps", {"decay": "0.5"}),  # tables are multiplied out every 20 steps
}
KEPT = ((4, 0), (4, 2), (1, 0), (9, 9), (30, 11), (64, 1), (64, 40))  # rows of a draft, kept ones


def draft(sequence: Sequence, token: int, ahead: list[int], n_kept: int) -> tuple[int, list]:
    """One step with a draft, of which at most n_kept rows stay; returns how many do, and logits."""
    n, most = len(sequence.tokens), sequence.most_rows(1 + len(ahead))
    (logits,) = sequence.engine.decode([sequence], [[token, *ahead[: most - 1]]])
    n_kept = min(n_kept, most - 1)
    sequence.keep(n + 1 + n_kept)
    assert len(sequence.tokens) == n + 1 + n_kept
    return n_kept, logits[: 1 + n_kept]


def assert_alike(one: Sequence, other: Sequence) -> None:
    assert one.tokens == other.tokens
    assert one.timings.decode_tokens == other.timings.decode_tokens
    for i, (a, b) in enumerate(zip(one.caches, other.caches, strict=True)):
        assert differing(state_of(a), state_of(b)) == [], f"layer {i}"


def compare(used: Sequence, plain: Sequence, prompt: list[int], answer: list[int]) -> int:
    """Answers with drafts and without. Returns how many rows of drafts were taken back."""
    for sequence in (used, plain):
        sequence.prefill(prompt)
        for cache in sequence.caches:
            cache.records_attended = True
    n_back, at, step = 0, 0, 0
    while at < len(answer) - 1:
        n_draft, n_right = KEPT[step % len(KEPT)]
        n_right = min(n_right, len(answer) - 1 - at)
        wrong = DRAFT[: n_draft - n_right]
        before = used.ledger()["rows_total"]
        ahead = [*answer[at + 1 : at + 1 + n_right], *wrong]
        n_kept, logits = draft(used, answer[at], ahead, n_right)
        assert used.ledger()["rows_total"] > before or used.method.name == "faedkv"
        text = answer[at : at + 1 + n_kept]
        np.testing.assert_array_equal(logits, decoded(plain, text))
        assert_alike(used, plain)
        n_back += len(wrong)
        at, step = at + 1 + n_kept, step + 1
    return n_back


@pytest.mark.parametrize("budget", ["12", "10%", "340"])
@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_taken_back_leave_no_trace(case, budget, sequence_of):
    """With 340 rows the answer outgrows the budget."""
    name, options = CASES[case]
    used, plain = (sequence_of(name, options, budget=budget) for _ in range(2))
    assert compare(used, plain, PROMPT, ANSWER) > 100


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q5_1")])
@pytest.mark.parametrize("name", [n for n in METHODS if "q8_0" in method_class(n).cache_types])
def test_quantised_rows(name, types, sequence_of):
    used, plain = (sequence_of(name, budget="12", types=types) for _ in range(2))
    assert compare(used, plain, PROMPT, ANSWER[:90]) > 50


# Windows whose rows move within a draft, and recurrent layers that keep checkpoints often.
SMALL_STEPS = {"window.N_SPARE": 8, "window.window_rows": lambda n: n + 24, "state.STEP": 32}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for i, case in enumerate(LONG_CASES)
        for j, name in enumerate(METHODS)
        if runs_on(name, LONG_CASES[case])
        and (
            (i + j) % 11 == 0
            or case in ("qwen35", "lfm2", "falcon-h1", "nemotron_h", "gemma3", "gemma4", "gpt-oss")
            or case == "deepseek2"
        )
    ],
)
def test_on_architectures(name, case, sequence_of, monkeypatch):
    for place, value in SMALL_STEPS.items():
        monkeypatch.setattr(f"sparsekv_cli.cache.{place}", value)
    shape = {**LONG_CASES[case], "n_ctx": 420, "attention_gain": 3.0}
    used, plain = (sequence_of(name, budget="12", shape=shape) for _ in range(2))
    assert compare(used, plain, PROMPT, ANSWER[:90]) > 20


def test_large_states_have_short_drafts(sequence_of, monkeypatch):
    """So many rows as there is memory for copies of a layer's state."""
    sequence = sequence_of("full", shape={**LONG_CASES["qwen35"], "n_ctx": 420})
    sequence.prefill(PROMPT)
    n_bytes = max(each._n_bytes for each in sequence.caches if isinstance(each, StateCache))
    assert sequence.most_rows(65) == 65
    for n_copies in (0, 1, 5):
        monkeypatch.setattr("sparsekv_cli.cache.state.DRAFT_BYTES", n_copies * n_bytes + 1)
        assert sequence.most_rows(65) == 1 + n_copies
        assert draft(sequence, ANSWER[0], ANSWER[1:9], 9)[0] == n_copies


def test_windows_move_and_states_are_kept_in_steps_with_drafts(sequence_of, monkeypatch):
    """The test above would be easy if they did not."""
    for place, value in SMALL_STEPS.items():
        monkeypatch.setattr(f"sparsekv_cli.cache.{place}", value)
    moves, kept = [], []
    move, keep = WindowCache._move, StateCache._keep
    monkeypatch.setattr(
        WindowCache, "_move", lambda cache, *a: (moves.append(len(cache._saved)), move(cache, *a))
    )
    monkeypatch.setattr(
        StateCache, "_keep", lambda cache: (kept.append(len(cache._saved)), keep(cache))
    )
    for case in ("gemma3", "lfm2"):
        sequence = sequence_of("full", shape={**LONG_CASES[case], "n_ctx": 420})
        sequence.prefill(PROMPT)
        for at in range(0, 80, 10):
            draft(sequence, ANSWER[at], ANSWER[at + 1 : at + 10], 4)
    assert max(moves) > 0 and max(kept) == 0 and len(kept) > 4
