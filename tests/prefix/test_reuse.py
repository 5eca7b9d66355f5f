"""Prompts with passages of earlier ones: what is moved, what is kept, what is named and refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_prompts import keep, keeping
from tiny_models import make_model
from tiny_sequences import decoded, tokens

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.models.reuse.repair import check_movable
from sparsekv_cli.prefix.prompt_rows import NONE_MOVED
from sparsekv_cli.serve.rows import SharedRows
from sparsekv_cli.serve.running import Stats
from sparsekv_cli.settings.config import SessionConfig

A, B, C = tokens(700, 1), tokens(600, 2), tokens(300, 3)
FIRST = [*tokens(50, 4), *A, *B]
SECOND = [*tokens(40, 5), *B, *tokens(9, 6), *A, *tokens(60, 7)]
N_NEW = 40 + 9 + 60
KEPT = len(A) + len(B)
SHARING = [name for name in METHODS if name != "h2o"]
LAYERS = {"dense_layers": "0", "ctx_size": 4096}


@pytest.fixture
def opened(sequence_of: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """A sequence with FIRST on disk, which moves passages; an empty one; what the first says."""

    def open_pair(name: str = "full", repair: float = 1.0, **options: Any) -> Any:
        budget = None if name == "full" else "64"
        alone, sequence = (sequence_of(name, budget=budget, **LAYERS, **options) for _ in range(2))
        said = keeping(sequence, tmp_path)
        keep(sequence, FIRST)
        sequence.reset()
        sequence.timings.reset()
        sequence.rows.repair = repair
        return sequence, alone, said

    return open_pair


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_rows_that_are_all_computed_again_give_the_answer(
    name: str, opened: Callable[..., Any]
) -> None:
    sequence, alone, _ = opened(name)
    expected, found = alone.prefill(SECOND), sequence.prefill(SECOND)
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    moved = sequence.moved
    assert moved.n_exact == 0
    assert moved.reused == moved.repaired > KEPT - 80  # the ends are not all found
    assert sequence.timings.prefill_tokens == len(SECOND)
    for mine, other in zip(decoded(sequence, C[:6]), decoded(alone, C[:6]), strict=True):
        assert np.isfinite(mine).all()
        assert np.corrcoef(mine, other)[0, 1] > 0.95


def test_a_share_is_computed_again(opened: Callable[..., Any]) -> None:
    sequence, _, _ = opened(repair=0.2)
    sequence.prefill(SECOND)
    moved = sequence.moved
    assert moved.repaired == int(np.ceil(0.2 * moved.reused))
    assert sequence.timings.prefill_tokens == len(SECOND) - moved.reused + moved.repaired
    assert sequence.difference is None
    assert moved.usage() == {"reused_tokens": moved.reused, "repaired_tokens": moved.repaired}


def test_moved_rows_are_not_kept_and_exact_ones_follow(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    sequence, alone, _ = opened(repair=0.0)
    before = sorted(os.listdir(tmp_path))
    keep(sequence, SECOND)
    assert sorted(os.listdir(tmp_path)) == before
    assert sequence.n_alike(SECOND, sequence.method) == 0
    assert sequence.n_alike(SECOND, sequence.method, is_exact=False) > len(SECOND) - 100
    sequence.rows.repair = None
    sequence.reset()
    np.testing.assert_array_equal(sequence.prefill(SECOND), alone.prefill(SECOND))
    assert sequence.moved == NONE_MOVED
    sequence.rows.finish()
    assert len(os.listdir(tmp_path)) > len(before)


def test_a_beginning_stays_exact(opened: Callable[..., Any]) -> None:
    """The rows of an equal beginning are loaded, those of passages after it are moved."""
    sequence, alone, _ = opened()
    prompt = [*FIRST[:600], *tokens(80, 9), *B, *tokens(20, 8)]
    expected, found = alone.prefill(prompt), sequence.prefill(prompt)
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    assert sequence.timings.cached_tokens == sequence.moved.n_exact == 592
    assert sequence.moved.reused > len(B) - 40


def test_few_known_tokens_are_not_moved(opened: Callable[..., Any], tmp_path: Path) -> None:
    """A prompt's rows stay exact for a small gain: they are kept, and later prompts move them."""
    sequence, alone, _ = opened()
    prompt = [*tokens(700, 9), *B, *C]
    np.testing.assert_array_equal(keep(sequence, prompt), alone.prefill(prompt))
    assert sequence.moved == NONE_MOVED
    sequence.reset()
    sequence.prefill([*tokens(20, 8), *prompt[20:], *tokens(9, 7)])
    assert sequence.moved.reused > len(prompt) - 80


@pytest.mark.parametrize("at", ["rows", "header"])
def test_a_damaged_block_is_computed(at: str, opened: Callable[..., Any], tmp_path: Path) -> None:
    sequence, alone, said = opened()
    for path in tmp_path.glob("*.rows"):
        with path.open("r+b") as file:
            file.seek(-64 if at == "rows" else 40, os.SEEK_END if at == "rows" else os.SEEK_SET)
            file.write(b"\xff" * 8)
    expected, found = alone.prefill(SECOND), sequence.prefill(SECOND)
    np.testing.assert_array_equal(found, expected)
    assert sequence.moved == NONE_MOVED
    assert sum("computed again" in line for line in said) >= 1


def test_rows_of_another_model_or_reading_are_not_moved(opened: Callable[..., Any]) -> None:
    sequence, _, _ = opened()
    sequence.rows.identity = sequence.rows.identity.of_any_products()
    sequence.prefill(SECOND)
    assert sequence.moved == NONE_MOVED


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0")])
def test_rows_of_few_bits_are_not_moved(types: tuple[str, str], opened: Callable[..., Any]) -> None:
    sequence, _, _ = opened(types=types)
    sequence.prefill(SECOND)
    assert (sequence.moved.reused > 0) == (types[0] == "q8_0")


def test_sequences_in_memory_give_passages(sequence_of: Callable[..., Any]) -> None:
    """Exact rows are sources. A sequence with moved rows gives its beginning, and says so."""
    source, second, third = (sequence_of("full", ctx_size=4096) for _ in range(3))
    source.prefill(FIRST)
    donors = [source]
    rows = SharedRows(lambda method: None, lambda: donors, 0.25)
    for sequence in (second, third):
        rows.use(sequence.method)
        sequence.rows = rows
    second.prefill(SECOND)
    assert second.moved.reused > KEPT - 80 and second.moved.n_exact == 0
    donors.append(second)
    third.prefill([*SECOND, *C])
    assert third.timings.cached_tokens >= len(SECOND) - 16
    assert third.moved == second.moved
    third.reset()
    third.timings.reset()
    other = [*SECOND[:160], *tokens(300, 8)]  # a part of the moved rows, and new text
    third.prefill(other)
    stats, n_cached = Stats(), third.timings.cached_tokens
    stats.add_moved(third.moved, n_cached)
    assert n_cached == 160 and stats.reused_tokens == stats.repaired_tokens == 0
    assert 160 - N_NEW <= third.moved.reused == second.moved.within(160).reused <= 120
    assert third.moved.repaired < third.moved.reused
    stats.add_moved(second.moved, 0)
    assert stats.reused_tokens == second.moved.reused
    third.reset()
    rows.find([*FIRST, *C])  # the exact rows of the source
    third.prefill([*FIRST, *C])
    assert third.timings.cached_tokens and third.moved == NONE_MOVED
    rows.repair = None
    third.reset()
    third.timings.reset()
    third.prefill([*SECOND, *C])
    assert third.timings.cached_tokens == 0 and third.moved == NONE_MOVED
    rows.close()


@pytest.mark.parametrize("types", [("q8_0", "f16"), ("q4_0", "f16"), ("f16", "q5_1")])
def test_rows_of_few_bits_in_memory_are_not_moved(
    types: tuple[str, str], sequence_of: Callable[..., Any]
) -> None:
    source, sequence = (sequence_of("full", ctx_size=4096, types=types) for _ in range(2))
    source.prefill(FIRST)
    rows = SharedRows(lambda method: None, lambda: [source], 0.2)
    rows.use(sequence.method)
    sequence.rows = rows
    sequence.prefill(SECOND)
    assert (sequence.moved.reused > 0) == (types == ("q8_0", "f16"))
    rows.close()


def test_an_interrupted_repair_leaves_an_empty_sequence(opened: Callable[..., Any]) -> None:
    sequence, alone, _ = opened(repair=0.5)
    steps = sequence.engine.prefill(sequence, SECOND, rows=sequence.rows)
    for _ in range(3):
        next(steps)
    steps.close()
    assert not sequence.tokens and sequence.moved == NONE_MOVED
    sequence.rows.repair = None
    np.testing.assert_array_equal(sequence.prefill(SECOND), alone.prefill(SECOND))


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "qwen2"},
        {"arch": "qwen3", "head_dim": 64},
        {"arch": "phi3", "rope_scaling": ("longrope", 2.0)},
        {"arch": "llama", "rope_freqs": True, "rope_scaling": ("yarn", 4.0, 512)},
        {"arch": "qwen3moe", "head_dim": 64},
        {"arch": "smollm3", "n_layer": 4},
        {"arch": "granite"},
        {"arch": "deepseek2"},
    ],
    ids=lambda options: options["arch"],
)
def test_models_of_many_kinds(options: dict[str, Any], tmp_path: Path) -> None:
    """Rows of a source that are all computed again are those of a prefill; none is worse."""
    path = make_model(tmp_path / "m.gguf", n_ctx=4096, **options)
    config = SessionConfig(threads=1, prefill_dtype="f32")
    model = load_model(path, build_method("full", {}), config)
    source, exact = model.sequence(), model.sequence()
    source.prefill(FIRST[:700])
    prompt = [*tokens(40, 5), *FIRST[200:650], *tokens(20, 6)]
    expected = exact.prefill(prompt)
    errors = []
    for share in (1.0, 0.3):
        rows = SharedRows(lambda method: None, lambda: [source], share)
        rows.use(model.method)
        sequence = model.sequence()
        errors.append(np.abs(sequence.prefill(prompt, rows=rows) - expected).max())
        assert sequence.moved.reused > 400
        rows.close()
    assert errors[0] < 0.02 * np.abs(expected).max() and errors[0] <= errors[1]
    model.close()


def test_a_model_whose_rows_cannot_be_moved_is_refused(tmp_path: Path) -> None:
    for options, words in (
        ({"arch": "gemma3"}, "do not keep the rows of all tokens"),
        ({"arch": "llama", "n_layer": 1}, "one alone"),
    ):
        path = make_model(tmp_path / f"{options['arch']}.gguf", **options)
        model = load_model(path, build_method("full", {}), SessionConfig(threads=1))
        with pytest.raises(SparseKVError, match=words):
            check_movable(model)
        model.close()


def test_progress_never_goes_back(opened: Callable[..., Any]) -> None:
    sequence, _, _ = opened(repair=0.3)
    steps = list(sequence.engine.prefill(sequence, SECOND, rows=sequence.rows))
    done = [at.done for at in steps]
    assert done == sorted(done) and done[-1] == len(SECOND)
    assert {at.total for at in steps} == {len(SECOND)}
