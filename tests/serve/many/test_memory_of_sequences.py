"""The memory of a server's sequences: what is set aside, and what goes for others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from asked import FULL, GREEDY, Asked
from tiny_sequences import tokens
from waiting import PATIENCE

from sparsekv_cli.cache import kinds
from sparsekv_cli.cache.counters import held_bytes
from sparsekv_cli.methods import build_method
from sparsekv_cli.serve import rows
from sparsekv_cli.serve.jobs import Request, TooLargeError
from sparsekv_cli.serve.rows import IndexSizes, sequence_bytes
from sparsekv_cli.serve.scheduler import Scheduler


def bytes_of_rows(scheduler: Scheduler, n: int) -> int:
    """Bytes of the rows of n tokens."""
    return sequence_bytes(FULL, scheduler.model.decoder.layer_specs(), n)


def test_memory_is_set_aside_ahead_of_a_prefill(start: Callable[..., Scheduler]) -> None:
    most = bytes_of_rows(start(), 120)
    scheduler = start(kv_bytes=most)
    with pytest.raises(TooLargeError, match="start the server with more --kv-memory"):
        Asked(scheduler, tokens(100), 200)
    asked = [Asked(scheduler, tokens(80 + i, i), 20) for i in range(4)]
    assert all(each.text for each in asked)  # one after the other
    assert scheduler.n_parked == 1  # there is room for one only
    kept = next(iter(scheduler._donors()))
    assert held_bytes(kept.caches) <= bytes_of_rows(scheduler, 103)


def test_requests_on_one_document_fit_together(
    start: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows count once, and a request on another document waits for the memory."""
    for module in (kinds, rows):
        monkeypatch.setattr(module, "LEAST_SHARED", 256)
    document, gate = tokens(800), threading.Event()
    alone = [Asked(start(), [*document, *tokens(9, i)], 100).text for i in range(2)]
    _, n_bytes = start().bytes_of(Request(document, FULL, 0, 109))
    scheduler = start(kv_bytes=int(1.7 * n_bytes))
    waits = {"pause": lambda: gate.wait(0.02)}
    asked = [Asked(scheduler, [*document, *tokens(9, i)], 100, **waits) for i in range(2)]
    other = Asked(scheduler, tokens(800, 7), 3)
    assert asked[1].began.wait(PATIENCE) and not asked[0].ended.is_set() and not other.events
    assert asked[1].job.n_cached >= 700
    gate.set()
    assert [each.text for each in asked] == alone and other.text
    assert rows.held_together(scheduler._parked) <= 1.7 * n_bytes


def test_the_index_of_a_method_is_set_aside(start: Callable[..., Scheduler]) -> None:
    quest = build_method("quest", {}, budget="64")
    scheduler = start(kv_bytes=1 << 24)
    request = Request(tokens(600), quest, 0, 6, GREEDY)
    rows, first = scheduler.bytes_of(request)
    assert rows == first
    assert Asked(scheduler, tokens(600), method=quest).text
    _, after = scheduler.bytes_of(request)
    index = sum(cache.memory().index for each in scheduler._donors() for cache in each.caches)
    assert index > 0 and after == rows + int(index * 606 / 600)
    sizes = IndexSizes()
    assert sizes.bytes_of(quest, 100) == 0
    assert start(kv_bytes=rows).bytes_of(request) == (rows, rows)


def test_an_index_larger_than_its_estimate_takes_no_more_memory(
    start: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parked sequence ends for it while the answer is decoded."""
    monkeypatch.setattr("sparsekv_cli.serve.scheduler.WATCH_S", 0.0)
    quest = build_method("quest", {}, budget="64")
    rows, _ = start().bytes_of(Request(tokens(600), quest, 0, 30, GREEDY))
    parked, most = start(), []
    assert Asked(parked, tokens(600, 1), 30).text
    held = sum(each.n_bytes for each in parked._parked)
    scheduler = start(kv_bytes=rows + held)

    def look() -> None:
        most.append(scheduler.stats.kv_bytes)

    assert Asked(scheduler, tokens(600, 1), 30).text and scheduler.n_parked == 1
    assert Asked(scheduler, tokens(600, 2), 30, method=quest, pause=look).text
    assert max(most) <= rows + held and scheduler.n_parked == 1


def test_a_conversation_gives_its_rows_where_memory_is_short(
    start: Callable[..., Scheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count once, so others go first."""
    for module in (kinds, rows):
        monkeypatch.setattr(module, "LEAST_SHARED", 256)
    first = tokens(600)
    scheduler = start(kv_bytes=int(1.8 * start().bytes_of(Request(first, FULL, 0, 80))[0]))
    assert Asked(scheduler, first).text and Asked(scheduler, tokens(300, 7)).text
    asked = Asked(scheduler, [*first, *tokens(60, 8)])
    assert asked.text and asked.job.n_cached >= 512
