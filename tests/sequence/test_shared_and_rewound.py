"""State that sequences share, that goes back, or that has a name: none is taken for another."""

import os
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cache_states import differing, state_of
from kept_prompts import keep, keeping, n_cached
from reference_records import LONG_CASES
from tiny_sequences import CHUNK, SHAPE, decoded, open_tiny, tokens

from sparsekv_cli.cache import kinds, row_sizes
from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.cache.window import WindowCache
from sparsekv_cli.commands.options.prefix import PrefixOptions, open_prompt_rows
from sparsekv_cli.errors import LacksMemoryError
from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.methods import METHODS, build_method
from sparsekv_cli.model import Model
from sparsekv_cli.prefix.blocks import BlockWriter, read_header
from sparsekv_cli.prefix.prefixes import Prefixes
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.serve.pool import HostedModel, ModelPool

PROMPT, ANSWER, WRONG = tokens(12 * CHUNK), tokens(30, 1), tokens(8, 2)
HYBRID = {**LONG_CASES["lfm2"], "n_ctx": 420}
WINDOWS = {**LONG_CASES["gemma3"], "n_ctx": 420}


# --- drafts ---------------------------------------------------------------------------------------


def assert_alike(one: Sequence, other: Sequence) -> None:
    assert one.tokens == other.tokens
    for i, (a, b) in enumerate(zip(one.caches, other.caches, strict=True)):
        assert differing(state_of(a), state_of(b)) == [], f"layer {i}"


def with_wrong_drafts(model: Model, n_steps: int = 20) -> list[Sequence]:
    """A sequence whose steps all have a draft that is taken back, and one without drafts."""
    used, plain = model.sequence(), model.sequence()
    for sequence in (used, plain):
        sequence.prefill(PROMPT)
    for token in ANSWER[:n_steps]:
        n = len(used.tokens)
        draft = WRONG[: used.most_rows(1 + len(WRONG)) - 1]
        (outcomes,) = model.engine.decode([used], [[token, *draft]])
        used.keep(n + 1)
        np.testing.assert_array_equal(outcomes[0], plain.decode(token))
        assert_alike(used, plain)
    return [used, plain]


@pytest.mark.parametrize("name", METHODS)
def test_a_draft_that_is_taken_back_leaves_no_trace(name, sequence_of):
    with_wrong_drafts(sequence_of(name, budget="12").model, n_steps=4)


def test_windows_that_move_in_a_draft_move_back(sequence_of, monkeypatch):
    monkeypatch.setattr("sparsekv_cli.cache.window.N_SPARE", 8)
    monkeypatch.setattr("sparsekv_cli.cache.window.window_rows", lambda n: n + 24)
    moves, move = [], WindowCache._move
    monkeypatch.setattr(
        WindowCache, "_move", lambda cache, *a: (moves.append(len(cache._saved)), move(cache, *a))
    )
    used, _ = with_wrong_drafts(sequence_of("full", shape=WINDOWS).model, n_steps=30)
    assert max(moves) > 0  # else this test would be easy
    used.rewind(len(PROMPT))
    assert len(used.tokens) == len(PROMPT)


@pytest.mark.parametrize("name", ["full", "h2o", "lfps"])
def test_an_error_of_the_sampler_takes_the_draft_back(name, sequence_of):
    sequence = sequence_of(name, budget="12").model.sequence()
    sequence.drafts = SimpleNamespace(
        alone=False, sequence=None, begin=lambda _: None, checked=lambda *_: None,
        draft=lambda tokens, last, most: WRONG[:most],
    )  # fmt: skip
    sequence.prefill(PROMPT)
    given = iter([ANSWER[0]])
    model = SimpleNamespace(eog_ids=(), token_bytes=lambda _: b"", is_shown=lambda _: False)
    generation = Generation(model, sequence, lambda *_: next(given))
    generation.choose()
    step(sequence.engine, [generation])
    with pytest.raises(StopIteration):
        generation.choose()
    assert sequence.tokens == [*PROMPT, ANSWER[0]]
    plain = sequence_of(name, budget="12")
    plain.prefill(PROMPT)
    plain.decode(ANSWER[0])
    np.testing.assert_array_equal(decoded(sequence, ANSWER), decoded(plain, ANSWER))


def test_a_prompt_needs_memory_for_the_draft_models_rows_too(sequence_of, monkeypatch):
    sequence, other = (sequence_of("full", ctx_size=2000).model.sequence() for _ in range(2))
    sequence.drafts = SimpleNamespace(sequence=other)
    has = 3 * kinds.bytes_to_come(sequence.caches, len(PROMPT) + 512) // 2
    monkeypatch.setattr(row_sizes, "available_memory", lambda: has)
    with pytest.raises(LacksMemoryError, match="K and V of"):
        sequence.prefill(PROMPT)
    sequence.drafts = None
    sequence.prefill(PROMPT)


# --- rewinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [HYBRID, WINDOWS])
def test_a_place_that_was_left_is_another_place_later(shape, sequence_of):
    """Other tokens lead to the length of an old checkpoint."""
    model = sequence_of("full", shape=shape).model
    used = model.sequence()
    for part in (PROMPT[:64], PROMPT[64:128], PROMPT[128:]):
        used.prefill(part)
    used.rewind(64)
    assert used.tokens == PROMPT[:64]
    way = [*PROMPT[:64], *tokens(100, 7)]
    used.prefill(way[64:])
    for n in (len(PROMPT), 150, 128):
        used.rewind(n)
        kept = len(used.tokens)
        assert used.tokens == way[:kept]
    states = [each for each in used.caches if isinstance(each, StateCache)]
    assert all(max(each._checkpoints.lengths) <= kept for each in states)
    fresh, question = model.sequence(), [*way[kept:140], *WRONG]
    if kept:
        fresh.prefill(way[:kept])
    again, first = (each.prefill(question) for each in (used, fresh))
    np.testing.assert_allclose(again, first, atol=2e-3)


@pytest.mark.parametrize("shape", [SHAPE, HYBRID, WINDOWS])
@pytest.mark.parametrize("way", ["reset", "rewind", "keep_common"])
def test_an_empty_sequence_is_a_new_one(way, shape, sequence_of):
    """Nothing of its prompt is left for other tokens of the same number, which come by steps."""
    model, ids = sequence_of("full", shape=shape).model, tokens(64, 7)
    used, fresh = model.sequence(), model.sequence()
    used.prefill(PROMPT[:64])
    getattr(used, way)(*{"reset": (), "rewind": (0,), "keep_common": (WRONG,)}[way])
    for each in (used, fresh):
        decoded(each, ids)
    assert_alike(used, fresh)
    assert used.keep_common(ids) == fresh.keep_common(ids) == ids


@pytest.mark.parametrize("who", ["given", "taken"])
def test_rows_before_the_end_of_a_prefix_are_no_longer_shared(who, sequence_of):
    """After a rewind below the prefix, a few other rows, and more memory."""
    model = sequence_of("full", ctx_size=4096, chunk=128).model
    ids, other = tokens(1400), tokens(1500, 5)
    donor, taker, fresh = (model.sequence() for _ in range(3))
    donor.prefill(ids)
    kinds.share_prefix(donor.caches, taker.caches, 1024, 1100)
    taker.tokens = ids[:1024]
    taker.prefill(ids[1024:1100])
    changed, kept = (donor, taker) if who == "given" else (taker, donor)
    expected = [cache.store.keys().copy() for cache in kept.caches]
    changed.rewind(512)
    for part in (other[:40], other[40:900], other[900:]):
        changed.prefill(part)
    fresh.prefill([*ids[:512], *other])
    for one, two in zip(changed.caches, fresh.caches, strict=True):
        np.testing.assert_allclose(one.store.keys(), two.store.keys(), atol=2e-2)
    for cache, rows in zip(kept.caches, expected, strict=True):
        np.testing.assert_array_equal(cache.store.keys(), rows)


def test_sums_of_another_sigma_are_not_those_of_a_fork(sequence_of):
    """The sums are over blocks of 256 rows."""
    model = sequence_of("lfps", {"sigma": "ratio", "scout": "0"}, budget="12").model
    cov = model.attention_of(build_method("lfps", {"scout": "0"}, budget="12"))
    ids, n = tokens(640), 592
    for of, to in ((None, cov), (cov, None)):
        donor, fork, fresh = model.sequence(of), model.sequence(to), model.sequence(to)
        donor.prefill(ids)
        kinds.share_prefix(donor.caches, fork.caches, n, 700)
        fork.tokens = ids[:n]
        for each in (fork, fresh):
            each.prefill(ids[len(each.tokens) :])
        np.testing.assert_array_equal(decoded(fork, ANSWER), decoded(fresh, ANSWER))


# --- names ----------------------------------------------------------------------------------------


def test_rows_of_other_products_have_another_name(tiny_model, tmp_path):
    """A row on disk depends on the types of a prefill's products and rows, and of activations."""
    opened = open_tiny(tiny_model, "full").model
    opened.gguf.content.wait()
    options = PrefixOptions(directory=tmp_path, limit=1.0, is_off=False, session=None)

    def name(products: str, rows: str, n_planes: int) -> str | None:
        decoder = copy(opened.decoder)
        decoder.prefill_dtype, decoder.rows_dtype, decoder.n_planes = products, rows, n_planes
        engine: Any = SimpleNamespace(shares_prefill=True, decoder=decoder)
        found = open_prompt_rows(replace(opened, engine=engine), options, opened.method)
        assert isinstance(found, Prefixes)
        return found.identity.known()

    given = [("f32", "f32", 2), ("bf16", "f32", 2), ("f32", "bf16", 2)]
    names = [name(*each) for each in (*given, ("f32", "f32", 1))]
    assert len(set(names)) == 4 and None not in names
    opened.gguf.close()


def test_rows_of_another_model_are_not_found(sequence_of, tmp_path):
    """It has the same name, shape and vocabulary."""
    shapes = [{**SHAPE, "seed": seed} for seed in range(2)]
    one, other = (sequence_of("full", ctx_size=2048, chunk=128, shape=each) for each in shapes)
    for each in (one, other):
        each.model.gguf.content.wait()
        keeping(each, tmp_path)
    keep(one, tokens(600))
    assert [n_cached(each, tokens(600)) for each in (one, other)] == [592, 0]


def test_the_first_blocks_of_a_prompt_are_the_ones_used_last(sequence_of, tmp_path, monkeypatch):
    """So the disk gives up the ends of prompts first, when it is written and when it is read."""
    sequence, order = sequence_of("full", ctx_size=4096, chunk=128), list[int]()
    keeping(sequence, tmp_path)

    def noting(change, first):
        def call(*given):
            order.append(first(*given))
            change(*given)

        return call

    monkeypatch.setattr(
        BlockWriter, "finish", noting(BlockWriter.finish, lambda writer, _: writer.header.first)
    )
    monkeypatch.setattr(
        "os.utime", noting(os.utime, lambda path: read_header(path.open("rb", buffering=0)).first)
    )
    for run in (keep, type(sequence).prefill):
        sequence.reset()
        run(sequence, tokens(1700))
    assert order == 2 * [1536, 1024, 512, 0]


def test_a_file_that_is_replaced_while_it_is_read_is_not_believed(sequence_of, tmp_path):
    sequence, alone = (sequence_of("full", ctx_size=4096, chunk=128) for _ in range(2))
    said = keeping(sequence, tmp_path)
    for ids in (tokens(1100, 5), tokens(1100)):
        sequence.reset()
        keep(sequence, ids)
    mine, others = (
        next(path for path in tmp_path.glob("*.rows") if path_begins(path, tokens(512, seed)))
        for seed in (0, 5)
    )
    sequence.reset()
    rows, find = sequence.rows, sequence.rows.find

    def found(ids):
        result = find(ids)
        others.replace(mine)  # whole, with right checksums, of another prompt
        return result

    rows.find = found
    expected = alone.prefill(tokens(1100))
    np.testing.assert_array_equal(sequence.prefill(tokens(1100)), expected)
    assert any("it was replaced" in line for line in said)


def path_begins(path: Path, ids: list[int]) -> bool:
    with path.open("rb", buffering=0) as file:
        header = read_header(file)
    return header.first == 0 and list(header.tokens) == ids


def test_the_model_that_is_unused_longest_is_unloaded():
    """Not the one that was loaded first."""
    pool = ModelPool.__new__(ModelPool)
    hosted = [HostedModel.__new__(HostedModel) for _ in range(4)]
    for model, used, n_held in zip(hosted, (9.0, 2.0, 5.0, 1.0), (0, 0, 0, 1), strict=True):
        model.loaded = SimpleNamespace(used=used, n_held=n_held)
    pool.models = hosted
    assert pool._idle() == [hosted[1], hosted[2], hosted[0]]
