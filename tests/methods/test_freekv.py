"""FreeKV's two tiers of memory, the thread that works ahead, sequences."""

import gc
import itertools
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
from freekv_pair import GEOMETRIES, PLAIN, SMALL, FreeKVPair, followed
from layer_rows import Case, Geometry, TurningStream
from layer_stream import decode as decode_row
from layer_stream import make_cache as make_layer
from layer_stream import prefill
from sweeps import sweep
from tiny_sequences import CHUNK, decoded, tokens

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.freekv.pages import GROUPED
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.freekv import FreeKV

pytestmark = pytest.mark.usefixtures("one_thread")


def make_cache(case, **options):
    """A cache of FreeKV for the layer of a case."""
    return make_layer(FreeKV(**options), case[0])


def stream_of(case, seed):
    return TurningStream(case[0], seed)


# --- the plan of a step ---------------------------------------------------------------------------


def test_plan_of_the_defaults():
    method = FreeKV()
    assert method.plan(512) is None
    assert method.plan(1700) == (4, 108, (1700 - 64) // 4)
    assert build_method("freekv", {"preset": "paper"}).plan(1700) == (2, 12, (1700 - 64) // 32)
    paper = {"preset": "paper", "sinks": "512", "window": "512"}
    assert build_method("freekv", paper, budget="2048").plan(9000) == (16, 32, (9000 - 512) // 32)


@pytest.mark.parametrize("budget", [1, 2, 8, 17, 64, 100, 200])
@pytest.mark.parametrize("p", [8, 16])
def test_plan_of_small_budgets(budget, p):
    """Never less than a page of each kind, and never much more than the budget."""
    method = FreeKV(budget=Budget(tokens=budget), page=p, sinks=64)
    for n in range(1, 400):
        plan = method.plan(n)
        if plan is None:
            assert n <= max(budget, 2 * p + max(1, budget // 4) - 1)
            continue
        rows = (plan.n_sink + plan.n_best) * p + n - plan.window * p
        assert plan.n_sink >= 1 and plan.n_best >= 1 and n > plan.window * p
        assert rows <= max(budget, 2 * p + max(1, budget // 4)) + p - 1


def test_the_window_never_moves_back():
    """A share of the context: the window grows with n, but slower."""
    method = FreeKV(budget=Budget(share=0.3), window=500)
    plans = [plan for n in range(1, 4000) if (plan := method.plan(n, 1)) is not None]
    assert len(plans) > 3900
    for before, after in itertools.pairwise(plans):
        assert 0 <= after.window - before.window <= 1 and after.n_best >= before.n_best


# --- two tiers ------------------------------------------------------------------------------------


def test_memory_is_as_the_formula_says():
    case, p, n_ring, k = Case(Geometry(8, 2, 80, 48), 600), 16, 3, (144 - 16 - 32) // 16
    cache, stream = make_cache(case, **SMALL), stream_of(case, 1)
    cache.reserve(640)
    prefill(cache, stream.rows(600))
    memory, unit = cache.memory(), p * 2 * (80 + 48)
    assert memory.host == cache.store.nbytes == 640 // p * 2 * unit
    assert memory.device == (1 + n_ring + 2 * k) * 2 * unit
    tables = 640 // p * 4 + 2 * k * (4 + 8 + 4) + 8 * (5 + 7)
    of_pages, of_groups = 640 // p * 2 * 2 * 80, 640 // p // GROUPED * 2 * 2 * 80
    assert memory.index == 2 * (of_pages + of_groups + tables) + 4 * 8 * 80
    before = memory
    for _ in range(200):
        decode_row(cache, stream.rows(1))
    memory = cache.memory()
    assert memory.device == before.device
    assert 800 // p * 2 * unit <= memory.host <= 1.3 * 800 // p * 2 * unit


def test_counters_of_a_run():
    pair = followed(*PLAIN, n_steps=100, overlap="true")
    counts, n_best, seen = pair.cache.counters(), pair.naive.n_best(301), pair.seen
    chosen = counts["pages_hit"] + counts["pages_recalled"]
    n_choices = chosen / n_best
    assert chosen % n_best == 0 and seen["lists"] < n_choices <= seen["lists"] + 3 + (
        seen["corrected"] + 3 * seen["borders"]
    )
    assert counts["pages_recalled"] < 0.5 * chosen
    unit = 16 * 2 * 128
    moved = counts["pages_recalled"] + counts["pages_offloaded"]
    assert counts["bytes_moved"] == moved * unit
    attended = sum(16 + 16 * n_best + n - (n - 32) // 16 * 16 for n in range(301, 401))
    assert counts["sparse_rows_attended"] == counts["rows_attended"] == 9 * attended
    assert counts["sparse_rows_total"] == 9 * sum(range(301, 401))
    least = 2 * sum((n - 32) // 16 for n in range(302, 401)) * 9
    assert least <= counts["sparse_rows_scored"] <= 2.2 * least
    read = 3 * attended * 256 + counts["rows_scored"] // 3 * 128 + counts["bytes_moved"]
    assert counts["bytes_read"] == read


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_larger_cache_saves_recalls(overlap):
    recalled = []
    for cache_pages in (1.0, 1.5, 2.0, 4.0):
        pair = followed(*PLAIN, n_steps=100, cache_pages=cache_pages, overlap=overlap)
        recalled.append(pair.cache.counters()["pages_recalled"])
    assert recalled == sorted(recalled, reverse=True) and recalled[-1] < 0.7 * recalled[0]


@pytest.mark.parametrize("case", sweep(GEOMETRIES, fast=1), ids=str)
def test_rows_come_back_bit_for_bit(case):
    """Decode, then a second turn: its prefill sees every row as a KVStore would have it."""
    cache = make_cache(case, **(SMALL | {"budget": Budget(tokens=100), "overlap": "true"}))
    plain, stream = KVStore(cache.spec), stream_of(case, 5)

    def keep(rows) -> list[np.ndarray]:
        q, k, v = rows
        plain.append(k, v)
        return q

    rows = stream.rows(case[1])
    prefill(cache, rows)
    keep(rows)
    for n_new in (90, 3, 33):
        for _ in range(n_new):
            row = stream.rows(1)
            decode_row(cache, row)
            keep(row)
        rows = stream.rows(n_new)
        out, q = prefill(cache, rows, chunk=100), keep(rows)
        assert cache.n == plain.n and cache._cache is not None
        np.testing.assert_array_equal(out, attend_causal(q, plain, cache.spec))
    cache._leave_pages()
    for mine, theirs in ((cache.store.k, plain.k), (cache.store.v, plain.v)):
        np.testing.assert_array_equal(
            mine[:, : plain.n].view(np.uint16), theirs[:, : plain.n].view(np.uint16)
        )


def joined(rows, more):
    return tuple(np.concatenate(pair, 1) for pair in zip(rows, more, strict=True))


def test_a_later_turn_starts_again():
    """After a second prefill the cache equals one that was prefilled with everything."""
    stream, used, fresh = (
        stream_of(PLAIN, 4),
        make_cache(PLAIN, **SMALL),
        make_cache(PLAIN, **SMALL),
    )
    rows = stream.rows(300)
    prefill(used, rows)
    for _ in range(40):
        row = stream.rows(1)
        decode_row(used, row)
        rows = joined(rows, row)
    turn = stream.rows(30)
    prefill(used, turn)
    prefill(fresh, joined(rows, turn))
    for _ in range(40):
        row = stream.rows(1)
        np.testing.assert_array_equal(decode_row(used, row), decode_row(fresh, row))


@pytest.mark.parametrize("kept", [339, 320, 301, 250, 120, 40, 1])
def test_decode_after_truncate(kept):
    """The rows stay; the first query chooses for itself, and then all is as ever."""
    pair = FreeKVPair(FreeKV(**(SMALL | {"overlap": "true"})), PLAIN[0], 6)
    pair.prefill(300)
    pair.decode(40)
    assert pair.cache.truncate(400) == 340 and pair.cache._cache is not None, "nothing to forget"
    pair.truncate(kept)
    before = pair.seen["left out"]
    pair.decode(61)
    assert pair.seen["left out"] - before == 3 * {120: 22, 40: 0, 1: 0}.get(kept, 61)


# --- the thread that works ahead ------------------------------------------------------------------


def threads_ahead() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("freekv")]


def test_the_thread_ends_with_its_method():
    gc.collect()
    before = set(threads_ahead())
    method = FreeKV(overlap="true", **SMALL)
    stream = stream_of(PLAIN, 0)
    prompt = stream.rows(300)
    for _ in range(3):  # three sequences, as after sequence.reset()
        caches = [method.layer(replace(make_cache(PLAIN).spec, layer=i)) for i in (1, 2, 3)]
        for cache in caches:
            prefill(cache, prompt)
        for _ in range(5):
            row = stream.rows(1)
            for cache in caches:
                decode_row(cache, row)
    started = set(threads_ahead()) - before
    assert len(started) == 1, "one thread for all layers and sequences"
    del method, caches, cache
    gc.collect()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_recall_ahead_outlives_its_cache():
    """What the second thread reads and writes is there until it is done."""
    method = FreeKV(overlap="true", **SMALL)
    cache, stream = make_layer(method, PLAIN[0]), stream_of(PLAIN, 7)
    prefill(cache, stream.rows(PLAIN[1]))
    decode_row(cache, stream.rows(1))
    cache.end_step(cache.n)
    goes_on = threading.Event()
    method.worker.submit(goes_on.wait)  # the thread is busy, so that the next recall waits
    decode_row(cache, stream.rows(1))
    cache.end_step(cache.n)
    arrays = [weakref.ref(cache._previous), weakref.ref(cache._step.state._record)]
    arrays += [weakref.ref(array) for array in cache._cache.pages]
    (recall, _), cache = cache._ahead, None
    assert not recall.done() and all(each() is not None for each in arrays)
    goes_on.set()
    recall.result(60)


def test_overlap_auto_wants_a_core_for_itself(monkeypatch):
    monkeypatch.setattr("sparsekv_cli.methods.freekv.usable_cores", lambda: 4)
    assert FreeKV().overlaps(3) and not FreeKV().overlaps(4)
    assert FreeKV(overlap="true").overlaps(8) and not FreeKV(overlap="false").overlaps(1)
    assert not FreeKV(overlap="true", speculate=False).overlaps(1)
    assert not FreeKV(overlap="true", tau=1.01).overlaps(1), "every choice would be made twice"


def test_a_failure_ahead_is_raised_and_loses_nothing(monkeypatch):
    """The step that finds it can be taken again; a page that was leaving the window then leaves."""
    cache, other = make_cache(PLAIN, overlap="true", **SMALL), make_cache(PLAIN, **SMALL)
    stream = stream_of(PLAIN, 0)
    prompt = stream.rows(300)
    for each in (cache, other):
        prefill(each, prompt)

    def fail(*arguments):
        raise MemoryError("no memory")

    for n in range(300, 360):
        row = stream.rows(1)
        with monkeypatch.context() as patch:
            patch.setattr("sparsekv_cli.cpu.freekv.step.recall_ahead", fail)
            out = decode_row(cache, row).copy()
        np.testing.assert_array_equal(out, decode_row(other, row))
        with pytest.raises(MemoryError, match="no memory"):
            decode_row(cache, row)
        assert cache.n == n + 1


# --- sequences ------------------------------------------------------------------------------------


@pytest.fixture
def opened(sequence_of):
    """Opens sequences whose layers all attend to 48 rows, but for what the options say."""
    common = {"budget": "48", "dense_layers": "none"}
    return lambda **options: sequence_of("freekv", common | options)


@pytest.mark.parametrize("before_or_after", ["before", "after"])
def test_an_interrupted_step_can_be_taken_again(before_or_after, opened, monkeypatch):
    """Some layers have the row already when it strikes, or this layer has computed it as well."""
    sequence, other = opened(overlap="true"), opened()
    for each in (sequence, other):
        each.prefill(tokens(8 * CHUNK))
        decoded(each, tokens(20, 1))
    last = sequence.caches[-1]
    step = last.decode

    def interrupt(x):
        if before_or_after == "after":
            step(x)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "decode", interrupt)
        sequence.decode(5)
    assert sequence.tokens == other.tokens
    assert {cache.n for cache in sequence.caches} == {len(other.tokens)}
    assert np.isfinite(decoded(sequence, tokens(20, 2))).all()
    sequence.rewind(len(other.tokens))
    question, answer = tokens(7, 3), tokens(20, 4)
    np.testing.assert_array_equal(sequence.prefill(question), other.prefill(question))
    np.testing.assert_array_equal(decoded(sequence, answer), decoded(other, answer))
