"""Reading a prompt of which passages are known: moved rows, chosen rows, rows computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tiny_sequences import tokens

from sparsekv_cli.cache.kinds import reserve
from sparsekv_cli.cpu.attention.flash import attend_causal_ref
from sparsekv_cli.models.reuse import repair
from sparsekv_cli.models.reuse.repair import Known, repair_steps, turned
from sparsekv_cli.sequence import Sequence

N, N_HEAD = 300, 40  # tokens of a passage, and of another beginning


def rows_of(sequence: Sequence, start: int, stop: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """K and V of each layer, f32, without padding."""
    stores = [(cache.store, cache.spec) for cache in sequence.caches]
    return [
        (
            store.keys()[:, start:stop, : spec.head_dim].astype(np.float32),
            store.values()[:, start:stop, : spec.value_dim].astype(np.float32),
        )
        for store, spec in stores
    ]


def moved_into(sequence: Sequence, rows: list[Any], first: int, distance: int) -> None:
    for cache, (k, v) in zip(sequence.caches, rows, strict=True):
        to = slice(first, first + k.shape[1])
        cache.store.write(to, turned(k, distance, cache.spec), v)


def repaired(sequence: Sequence, ids: list[int], known: np.ndarray, share: float) -> int:
    steps = repair_steps(sequence.engine.decoder, ids, 0, sequence.caches, Known(known, share))
    progress = []
    while True:
        try:
            progress.append(next(steps))
        except StopIteration as end:
            done = [each.done for each in progress]
            assert done == sorted(done) and done[-1] == len(ids) == progress[-1].total
            return int(end.value.sum())


@pytest.fixture
def prompts(sequence_of: Callable[..., Any]) -> tuple[Any, Any, Any, list[int]]:
    """A sequence with a passage, one with another beginning before it, an empty one; the ids."""
    passage, other = tokens(N, 3), tokens(N_HEAD, 4)
    first, whole, empty = (sequence_of("full") for _ in range(3))
    first.prefill(passage)
    whole.prefill([*other, *passage])
    reserve(empty.caches, N + N_HEAD, is_checked=True)
    return first, whole, empty, [*other, *passage]


def test_all_rows_computed_again_are_those_of_a_prefill(prompts: Any) -> None:
    first, whole, empty, ids = prompts
    known = np.arange(len(ids)) >= N_HEAD + 16
    moved_into(empty, rows_of(first, 16, N), N_HEAD + 16, N_HEAD)
    assert repaired(empty, ids, known, 1.0) == N - 16
    for new, old in zip(rows_of(empty, 0, len(ids)), rows_of(whole, 0, len(ids)), strict=True):
        for left, right in zip(new, old, strict=True):
            np.testing.assert_allclose(left, right, atol=2e-2)


@pytest.mark.parametrize("share", [0.0, 0.15, 0.5])
def test_computed_rows_are_the_new_ones_and_a_share(
    prompts: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _, empty, ids = prompts
    known, written = np.arange(len(ids)) >= N_HEAD, list[tuple[int, np.ndarray]]()
    attend = repair._attend

    def noted(cache: Any, x: Any) -> np.ndarray:
        written.append((cache.spec.layer, x.pos))
        return attend(cache, x)

    monkeypatch.setattr(repair, "_attend", noted)
    moved_into(empty, rows_of(first, 0, N), N_HEAD, N_HEAD)
    before = rows_of_room(empty, len(ids))
    n_again = repaired(empty, ids, known, share)
    assert n_again == int(np.ceil(share * N))
    after = rows_of_room(empty, len(ids))
    of_layer = {
        layer: np.concatenate([at for i, at in written if i == layer]) for layer in range(4)
    }
    np.testing.assert_array_equal(of_layer[0], np.arange(len(ids)))
    for layer in (1, 2, 3):
        at = of_layer[layer]
        assert (np.diff(at) > 0).all() and len(at) == N_HEAD + n_again
        np.testing.assert_array_equal(at[:N_HEAD], np.arange(N_HEAD))
        kept = np.setdiff1d(np.arange(len(ids)), at)
        for left, right in zip(before[layer], after[layer], strict=True):
            np.testing.assert_array_equal(left[:, kept], right[:, kept])


def rows_of_room(sequence: Sequence, n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(c.store.k[:, :n].copy(), c.store.v[:, :n].copy()) for c in sequence.caches]


def test_a_turned_row_is_the_row_of_another_position(sequence_of: Callable[..., Any]) -> None:
    """Layer 0 depends on the token and its position alone."""
    ids = tokens(64, 5)
    here, there = sequence_of("full"), sequence_of("full")
    here.prefill(ids)
    there.prefill([*tokens(100, 6), *ids])
    (k, v), *_ = rows_of(here, 0, 64)
    (k_there, v_there), *_ = rows_of(there, 100, 164)
    np.testing.assert_allclose(turned(k, 100, here.caches[0].spec), k_there, atol=1e-2)
    np.testing.assert_allclose(v, v_there, atol=1e-3)
    back = turned(turned(k, 100, here.caches[0].spec), -100, here.caches[0].spec)
    np.testing.assert_allclose(back, k, atol=1e-5)


def test_rows_that_differ_most_are_chosen(prompts: Any) -> None:
    _, whole, empty, ids = prompts
    known = np.arange(len(ids)) >= N_HEAD
    moved_into(empty, rows_of(whole, N_HEAD, N_HEAD + N), N_HEAD, 0)
    wrong = np.sort(np.random.default_rng(0).permutation(N)[:30]) + N_HEAD
    empty.caches[1].store.k[:, wrong] += 1
    forward = empty.engine.decoder
    forward.rope.reserve(len(ids))
    forward.prepare(len(ids))
    rows = repair._Rows(forward, ids, np.arange(len(ids)))
    drain_rows = list(rows.run(0, empty.caches[0]))
    chosen = rows.choose(empty.caches[1], known, 0.1)
    assert drain_rows[-1] == 1.0
    np.testing.assert_array_equal(np.flatnonzero(chosen & known), wrong)


@pytest.mark.parametrize("ends", [[3, 10, 11, 200], [1, 1, 256, 256]])
def test_rows_attend_up_to_their_own_end(ends: list[int], sequence_of: Callable[..., Any]) -> None:
    from sparsekv_cli.cache.attend import attend_causal

    sequence = sequence_of("full")
    sequence.prefill(tokens(256, 7))
    cache = sequence.caches[0]
    spec, store = cache.spec, cache.store
    q = np.random.default_rng(1).standard_normal((spec.n_head, len(ends), spec.head_dim))
    found = attend_causal(q.astype(np.float32), store, spec, np.array(ends))
    k, v = (x[..., : spec.head_dim].astype(np.float32) for x in (store.keys(), store.values()))
    for i, end in enumerate(ends):
        expected = attend_causal_ref(q[:, i : i + 1], k[:, :end], v[:, :end], spec.scale)
        np.testing.assert_allclose(found[:, i : i + 1], expected, atol=2e-3)
