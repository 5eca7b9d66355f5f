"""The scheduler: texts as alone, aborts, limits; nothing is lost in a thousand requests."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from asked import FULL, METHODS, Asked
from tiny_sequences import tokens
from waiting import PATIENCE

from sparsekv_cli.cache.counters import held_bytes
from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import Model
from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.prefixes import Prefixes
from sparsekv_cli.prefix.prompt_rows import Found
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.serve import rows
from sparsekv_cli.serve.jobs import (
    Compiling,
    Failed,
    Finished,
    PromptProgress,
    QueueFullError,
    StoppingError,
    TooLargeError,
    bins_of,
)
from sparsekv_cli.serve.rows import sequence_bytes
from sparsekv_cli.serve.scheduler import Scheduler


def bytes_of_rows(scheduler: Scheduler, n: int) -> int:
    """Bytes of the rows of n tokens."""
    return sequence_bytes(FULL, scheduler.model.decoder.layer_specs(), n)


@pytest.mark.slow
def test_a_thousand_requests_with_aborts(
    start: Callable[..., Scheduler], pytestconfig: pytest.Config
) -> None:
    """Texts are those of sequences that run alone; no place and no memory is lost. (300 of them
    without ``--all``.)
    """
    n_requests = 1000 if pytestconfig.getoption("--all") else 300
    rng, alone = np.random.RandomState(3), start(n_parallel=1)
    kinds = [
        (tokens(int(rng.randint(1, 90)), seed), int(rng.randint(1, 9)), METHODS[seed % 3])
        for seed in range(24)
    ]
    wanted = []
    for ids, n, method in kinds:
        wanted.append(Asked(alone, ids, n, method=method).text)
        alone._parked.clear()
    alone.stop()
    kv_bytes = 6 * bytes_of_rows(alone, 100)
    scheduler = start(kv_bytes=kv_bytes)
    asked, n_aborted, most = [], 0, 0
    for i in range(n_requests):
        which = int(rng.randint(len(kinds)))
        ids, n, method = kinds[which]
        each = Asked(scheduler, ids, n, method=method)
        asked.append((which, each))
        if i % 3 == 0:
            asked[int(rng.randint(max(0, i - 8), i + 1))][1].job.abort()
        if i % 50 == 49:
            each.ended.wait(PATIENCE)
            most = max(most, held_bytes(c for s in scheduler._donors() for c in s.caches))
    for which, each in asked:
        if isinstance(each.end, Finished):
            assert each.text == wanted[which], which
        else:
            assert each.job.is_aborted
            n_aborted += 1
    assert scheduler.stats.n_answers == n_requests - n_aborted > n_requests // 2
    assert n_aborted > n_requests // 20
    assert scheduler.stats.n_failed == 0 and most <= kv_bytes
    assert (scheduler.n_waiting, scheduler.n_running) == (0, 0)
    assert all(job.generation is None for job in (each.job for _, each in asked))


def test_others_decode_while_a_prompt_is_prefilled(start: Callable[..., Scheduler]) -> None:
    """And a much shorter prompt goes first."""
    scheduler = start()
    long = Asked(scheduler, tokens(900), 400)
    alone = Asked(scheduler, tokens(40, 1), 30)
    assert alone.text
    n_before = len(long.events)
    other = Asked(scheduler, tokens(900, 7), 2)
    short = Asked(scheduler, tokens(20, 9), 2)
    assert short.text and other.text
    assert short.job.first_token < other.job.first_token
    assert len(long.events) > n_before + 1
    assert any(isinstance(event, PromptProgress) for event in other.events)
    scheduler.abort(long.job)
    assert isinstance(long.end, Failed)


def test_an_abort_frees_its_place_within_a_step(start: Callable[..., Scheduler]) -> None:
    scheduler, aborted = start(n_parallel=1, n_queue=1), threading.Event()
    first = Asked(scheduler, tokens(30), 900, pause=lambda: aborted.wait(PATIENCE))
    second = Asked(scheduler, tokens(5), 2)
    assert first.began.wait(PATIENCE)
    with pytest.raises(QueueFullError, match="requests wait, at most 1 may"):
        Asked(scheduler, tokens(5), 2)
    assert not second.events
    scheduler.abort(first.job)
    aborted.set()
    assert second.text and isinstance(first.end, Failed)
    late = Asked(scheduler, tokens(30), 900, seconds=0.2, pause=lambda: time.sleep(0.1))
    assert isinstance(late.end, Failed) and "longer than 0.2 s" in str(late.end.error)


def test_more_answers_than_the_queue_ever_holds(start: Callable[..., Scheduler]) -> None:
    """Later there is no room for them either."""
    scheduler = start(n_parallel=2, n_queue=1)
    job = Asked(scheduler, tokens(5), 2).job
    with pytest.raises(TooLargeError, match="4 answers are asked for, but at most 3 can run or"):
        scheduler.submit([job] * 4)
    assert Asked(scheduler, tokens(5), 2).text


def test_a_prompt_is_aborted_while_it_is_prefilled(start: Callable[..., Scheduler]) -> None:
    scheduler = start()
    running = Asked(scheduler, tokens(30), 900, pause=lambda: time.sleep(0.05))
    prompt = Asked(scheduler, tokens(1000, 4), 2)
    while not prompt.events:  # so long nothing is known of it
        time.sleep(0.001)
    scheduler.abort(prompt.job)
    scheduler.abort(running.job)
    assert isinstance(prompt.end, Failed | Finished) and isinstance(running.end, Failed)
    assert Asked(scheduler, tokens(30), 3).text


def test_a_method_that_is_compiled(
    start: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits meanwhile is told."""
    scheduler = start()
    running = Asked(scheduler, tokens(30), 200)
    assert running.began.wait(PATIENCE)

    of_model = Model.attention_of

    def attention_of(model: Model, method: Any, sparse_from: int, tell: Any) -> Any:
        tell("decode", 0, 1)
        return of_model(model, method, sparse_from)

    monkeypatch.setattr(Model, "attention_of", attention_of)
    lfps = build_method("lfps", {}, budget="64")
    assert Asked(scheduler, tokens(40), method=lfps).text and running.text
    assert Compiling("lfps", 0, 1) in running.events


@pytest.mark.parametrize("part", ["step", "cache"])
def test_a_failure_hurts_nobody_else(
    part: str, start: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a whole step, which each sequence then takes alone, or of one cache."""
    scheduler = start()
    alone = Asked(scheduler, tokens(25, 2), 30).text
    decode, add, steps = scheduler.model.decoder.decode_batch, DenseCache._add_all, []

    def fails(ids: Any, positions: Any, caches: Any, failed: Any) -> np.ndarray:
        steps.append(len(ids))
        if 61 in positions and part == "step":  # behind one more step of the second prompt
            raise MemoryError
        return decode(ids, positions, caches, failed)

    def fails_to_add(cache: DenseCache, *given: Any) -> np.ndarray:
        if cache.n == 61 and part == "cache":
            raise MemoryError
        return add(cache, *given)

    monkeypatch.setattr(scheduler.model.decoder, "decode_batch", fails)
    monkeypatch.setattr(DenseCache, "_add_all", fails_to_add)
    good, bad = (Asked(scheduler, tokens(n, 2), 30) for n in (25, 60))
    assert good.text == alone
    assert isinstance(bad.end, Failed) and isinstance(bad.end.error, MemoryError)
    assert scheduler.stats.n_failed == 1 and scheduler.n_running == 0
    assert 2 in steps


@pytest.mark.parametrize("method", ["full", "quest", "lfps", "sals"])
def test_a_beginning_is_shared_in_memory_and_on_disk(
    method: str, start: Callable[..., Scheduler], tmp_path: Any
) -> None:
    """The texts, and the rows, are those of a whole prefill."""
    built = build_method(method, {})
    prompt, other = tokens(700), [*tokens(600), *tokens(60, 5)]

    def disk_of(wanted: Any) -> Prefixes:
        model, types = scheduler.model, (wanted.cache_type_k, wanted.cache_type_v)
        identity = model.decoder.identity_of(types)
        folder = PrefixFolder(tmp_path / "prefixes", 1 << 30, lambda text: None)
        return Prefixes(folder, "tiny", identity, types, wanted.n_queried or 0, lambda text: None)

    scheduler = start()
    alone = Asked(scheduler, other, method=built).text
    scheduler = start(disk_of=lambda wanted: disk_of(wanted))
    first = Asked(scheduler, prompt, 200)  # which full attention computes, and which runs on
    shared = Asked(scheduler, other, method=built)
    assert shared.text == alone and 560 <= shared.job.n_cached <= 600
    first.job.abort()
    scheduler.stop()
    scheduler = start(disk_of=lambda wanted: disk_of(wanted))
    from_disk = Asked(scheduler, other, method=built)
    assert from_disk.text == alone and from_disk.job.n_cached >= 512
    again = Asked(scheduler, other, method=built)
    assert again.text == alone and again.job.n_cached == len(other)


def test_rows_of_another_type_are_not_shared(start: Callable[..., Scheduler]) -> None:
    method = build_method("full", {}, cache_type_k="q8_0", cache_type_v="q8_0")
    scheduler, alone = start(), start()
    expected = Asked(alone, tokens(100), 8, method=method).text
    assert Asked(scheduler, tokens(100), 8).text
    asked = Asked(scheduler, tokens(100), 8, method=method)
    assert asked.text == expected
    assert isinstance(asked.end, Finished) and asked.end.n_cached == 0


@pytest.mark.parametrize(("name", "window", "n"), [("full", {}, 144), ("lfps", "120", 128)])
def test_which_rows_are_given(name: str, window: Any, n: int, start: Callable[..., Any]) -> None:
    """Rows of the prompt, but none of its answer, nor those whose queries a method needs."""
    scheduler, method = start(), build_method(name, window and {"window": window})
    assert Asked(scheduler, tokens(150), 90).text
    said = [*scheduler._parked[0].sequence.tokens, *tokens(9, 1)]
    asked = Asked(scheduler, said, method=method)
    assert (asked.text, asked.job.n_cached) == (Asked(start(), said, method=method).text, n)


def test_a_sequence_that_is_sparse_elsewhere_is_not_taken(start: Callable[..., Scheduler]) -> None:
    scheduler, ids, topk = start(), tokens(100), METHODS[1]
    ends: list[Any] = [Asked(scheduler, ids, method=topk, sparse_from=n).end for n in (900, 0, 0)]
    assert [end.n_cached for end in ends] == [0, 96, 100]
    first, second, third = (end.ledger["rows_attended"] for end in ends)
    assert first > second == third


def test_a_sequence_whose_rows_are_being_written_waits(
    start: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it goes back to its prompt for the next answer."""
    order: list[str] = []

    class SlowRows(Prefixes):
        def __init__(self) -> None:
            """Without a folder."""

        find, load, begin, take, abandon = (
            lambda *_, given=given: given for given in (Found(), 0, None, None, None)
        )

        def finish(self) -> None:
            if not order:
                time.sleep(0.3)
                order.append("written")

    rewind = Sequence.rewind

    def noting(sequence: Sequence, n: int) -> None:
        if n < len(sequence.tokens):
            order.append("rewind")
        rewind(sequence, n)

    monkeypatch.setattr(Sequence, "rewind", noting)
    rows_on_disk = SlowRows()
    scheduler = start(disk_of=lambda _: rows_on_disk)
    first, second = (Asked(scheduler, tokens(100), 4).text for _ in range(2))
    assert first == second and order == ["written", "rewind"]


def test_few_methods_are_remembered() -> None:
    """What is forgotten has finished ahead of that."""
    alive, finished = weakref.WeakSet[Any](), []

    class Disk:
        def __init__(self, method: Any) -> None:
            self.method = method
            alive.add(self)

        def find(self, ids: Any) -> Found:
            return Found()

        def finish(self) -> None:
            finished.append(self.method)

    shared = rows.SharedRows(Disk, list)
    methods = [build_method("quest", {}, budget=str(64 + i)) for i in range(rows.N_METHODS + 9)]
    for method in methods:
        shared.use(method)
        shared.find([1])
    shared.close()
    assert len(alive) == rows.N_METHODS and finished == methods[:-1]


def test_the_end_lets_answers_become_whole(start: Callable[..., Scheduler]) -> None:
    scheduler = start(n_parallel=2)
    asked = [Asked(scheduler, tokens(20, i), 20) for i in range(5)]
    scheduler.stop()
    assert all(each.text for each in asked)
    with pytest.raises(StoppingError):
        Asked(scheduler, tokens(3))


def test_bins_of_attended_rows() -> None:
    idx, counts = np.array([[0, 5, 9, 9], [1, 5, 0, 0]], np.int32), np.array([3, 2])
    assert bins_of((idx, counts), 10, 5) == [50, 0, 50, 0, 25]
    assert bins_of(None, 3, 5) == [100, 100, 100]
    assert issubclass(TooLargeError, SparseKVError)


def test_a_conversation_keeps_its_rows(start: Callable[..., Scheduler]) -> None:
    """Another question after the same system prompt does not take them, nor does an abort."""
    scheduler, gate = start(), threading.Event()
    system, first = tokens(400), [*tokens(400), *tokens(24, 1)]
    assert Asked(scheduler, first).text and Asked(scheduler, [*system, *tokens(90, 2)]).text
    assert scheduler.n_parked == 2
    follow_up = [*first, *tokens(200, 3)]
    running = Asked(scheduler, tokens(30), 900, pause=lambda: gate.wait(0.02))
    left = Asked(scheduler, follow_up, 2)
    left.job.abort()
    assert isinstance(left.end, Failed | Finished)
    scheduler.abort(running.job)
    asked = Asked(scheduler, follow_up)
    assert asked.text and asked.job.n_cached >= 416
    assert scheduler.n_parked == 2  # what goes on has replaced its beginning
    alone = start(n_parallel=1)
    assert Asked(alone, follow_up).text == asked.text
