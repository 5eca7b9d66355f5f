"""Kernels of FreeKV against numpy references: layouts, choice, LRU cache, a whole step."""

import numba
import numpy as np
import pytest
from freekv_pages import half, make_cache

from sparsekv_cli.cpu.attention.decode import attend_rows_ref
from sparsekv_cli.cpu.freekv import choice, recall
from sparsekv_cli.cpu.freekv.pages import CORRECTED, HIT, OFFLOADED, RECALLED, SCORED, PageCache
from sparsekv_cli.cpu.freekv.step import FreeKVStep
from sparsekv_cli.cpu.quest.pages import page_summaries_ref

NO_CAP = np.float32(0)
GEOMETRIES = [(1, 1, 64), (9, 3, 64), (8, 2, 80), (8, 1, 128), (3, 3, 96)]


pytestmark = pytest.mark.usefixtures("one_thread")


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("_", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [49, 63, 64, 65, 257])
@pytest.mark.parametrize("page", [5, 16])
def test_pages_hold_the_rows_of_the_store(_, n_kv_head, d, n, page):
    cache, store = make_cache(n, n_kv_head, d, 48, page=page, n_sink=2 if page == 5 else 1)
    hi, lo = page_summaries_ref(store.k[:, : cache.offloaded * page], page, True)
    np.testing.assert_allclose(half(cache.pages.hi)[:, : cache.offloaded], hi, atol=2e-3)
    np.testing.assert_allclose(half(cache.pages.lo)[:, : cache.offloaded], lo, atol=2e-3)
    k = cache.pages.k.view(np.float16).reshape(-1, n_kv_head, d)  # sinks lie at the front
    np.testing.assert_array_equal(
        k[: cache.n_sink * page].transpose(1, 0, 2), store.k[:, : cache.n_sink * page]
    )
    v = cache.pages.v.view(np.float16).reshape(-1, n_kv_head, 48)
    for i in range(cache.offloaded * page, n):  # the window's, in a ring
        at = cache.n_sink * page + i % (cache.n_ring * page)
        np.testing.assert_array_equal(k[at], store.k[:, i])
        np.testing.assert_array_equal(v[at], store.v[:, i])


@pytest.mark.parametrize(("_", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("meanstd", [True, False])
def test_offload_pages(_, n_kv_head, d, meanstd):
    """Two pages leave the window as they would in decode."""
    cache, store = make_cache(200, n_kv_head, d, 32, meanstd=meanstd, window=64)
    first, last = cache.offloaded, cache.offloaded + 2
    cache.make_room(last, 8)
    recall.offload_pages(cache.pages, first, last, cache.n_sink, cache.n_ring, meanstd)
    hi, lo = page_summaries_ref(store.k[:, : 16 * last], 16, meanstd)
    np.testing.assert_allclose(half(cache.pages.hi)[:, first:last], hi[:, first:], atol=2e-3)
    np.testing.assert_allclose(half(cache.pages.lo)[:, first:last], lo[:, first:], atol=2e-3)
    assert (cache.pages.statistics[:, OFFLOADED] == 2).all()


def test_room_is_made_and_nothing_is_lost():
    cache, _ = make_cache(300)
    old = cache.pages
    old.slot_of[:, 5], old.page_in[:, 3], old.stamps[:, 3], old.chosen[:, 0] = 3, 5, 9, 5
    have = old.hi.shape[1]
    cache.make_room(have, 8)
    assert cache.pages is old, "there was room"
    cache.make_room(have + 1, 20)
    new = cache.pages
    assert new.hi.shape[1] >= have + 1 + have // 8 and new.stamps.shape[1] == 20
    assert new.k.shape[0] == old.k.shape[0] + 12
    assert (new.slot_of[:, 5] == 3).all() and (new.slot_of[:, have:] == -1).all()
    assert (new.page_in[:, 3] == 5).all() and (new.page_in[:, 8:] == -1).all()
    assert (new.stamps[:, 3] == 9).all() and not new.stamps[:, 8:].any()
    np.testing.assert_array_equal(new.hi[:, :have], old.hi)
    assert cache.index_bytes == sum(a.nbytes for a in new[4:])


def test_the_pool_follows_a_store_that_moves():
    """Pages are recalled from the new memory, and a new row is written there."""
    step = Step(8, 4, 64, 300)
    old = step.store.k
    step.store.reserve(2 * step.store.capacity)
    step.store.k[:, :300] *= 2
    assert step.store.k is not old
    step.run(current=True)
    pages, n_sink, n_ring = step.cache.pages, step.cache.n_sink, step.cache.n_ring
    for g, j in enumerate(pages.chosen[:, 0]):
        at = n_sink + n_ring + pages.slot_of[g, j]
        found = pages.k[at, :, g].view(np.float16)
        np.testing.assert_array_equal(found, step.store.k[g, 16 * j : 16 * j + 16])
    np.testing.assert_array_equal(step.store.k[:, 300], step.k.astype(np.float16))


def test_known_summaries_serve_again():
    """Only the pages after them are summarised, and arrays that are too short grow."""
    cache, store = make_cache(700, groups=True, page=4)
    known = cache.summaries._replace(n=40)
    known.hi[:, 7] = 9  # a mark in a page that is known
    store.append(*(np.ones((3, 300, 64), np.float32) for _ in "kv"))
    new, whole = (
        PageCache(
            store, cache.pages.statistics, page=4, n_sink=1, n_ring=9, n_slot=8, window=240,
            meanstd=True, groups=True, known=each,
        )
        for each in (known, None)
    )  # fmt: skip
    assert (new.pages.hi[:, 7] == 9).all() and new.summaries.n == 240
    new.pages.hi[:, 7] = whole.pages.hi[:, 7]
    for mine, theirs, n in zip(
        new.summaries[:4], whole.summaries[:4], (240, 240, 30, 30), strict=True
    ):
        np.testing.assert_array_equal(mine[:, :n], theirs[:, :n])


# --- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("d", [64, 80, 128])
@pytest.mark.parametrize("n_page", [1, 63, 64, 65, 257])
def test_choose_pages(group, d, n_page):
    rng = np.random.default_rng(n_page + d)
    first, end = 3, 3 + n_page
    q = rng.standard_normal((group, d)).astype(np.float32)
    bits = [rng.standard_normal((1, end + 2, d)).astype(np.float16) for _ in range(2)]
    hi, lo = (x.view(np.uint16) for x in bits)
    scale = np.float32(d**-0.5)
    for n_best in {1, max(1, n_page // 3), n_page - 1, n_page, n_page + 5} - {0}:
        chosen = np.full(n_best, -7, np.int32)
        softcap = np.float32(4 * (n_best % 2))
        m = choice.choose_pages(q, hi, lo, first, end, n_best, scale, softcap, chosen)
        floats = [x[0].astype(np.float32) for x in bits]
        expected, pooled = choice.choose_pages_ref(q, *floats, first, end, n_best, scale, softcap)
        assert m == min(n_best, n_page)
        np.testing.assert_array_equal(chosen[:m], expected)
        assert pooled.sum() == pytest.approx(1)


def test_equal_pages_are_chosen_in_order():
    q = np.ones((2, 64), np.float32)
    hi = np.ones((1, 40, 64), np.float16).view(np.uint16)
    chosen = np.empty(5, np.int32)
    assert choice.choose_pages(q, hi, hi, 4, 40, 5, np.float32(1), NO_CAP, chosen) == 5
    np.testing.assert_array_equal(chosen, range(4, 9))


def test_choosing_survives_huge_scores():
    """One page outweighs all others by far: the rest of the softmax is 0, and ties."""
    q = np.full((3, 64), 100, np.float32)
    hi = np.zeros((1, 50, 64), np.float16)
    hi[0, 20] = 100
    chosen = np.empty(2, np.int32)
    bits = hi.view(np.uint16)
    assert choice.choose_pages(q, bits, bits, 0, 50, 2, np.float32(1), NO_CAP, chosen) == 2
    np.testing.assert_array_equal(chosen, [0, 20])


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("d", [16, 80])
def test_mean_cosine(group, d):
    rng = np.random.default_rng(group)
    q = rng.standard_normal((group, d)).astype(np.float32)
    previous = q + rng.standard_normal((group, d)).astype(np.float32)
    expected = recall.mean_cosine_ref(q, previous)
    assert recall.mean_cosine(q, previous) == pytest.approx(expected, abs=1e-6)
    assert recall.mean_cosine(q, q) == pytest.approx(1, abs=1e-6)
    assert recall.mean_cosine(q, -q) == pytest.approx(-1, abs=1e-6)
    previous[0] = 0
    expected = recall.mean_cosine_ref(q, previous)
    assert recall.mean_cosine(q, previous) == pytest.approx(expected, abs=1e-6)


# --- the cache of recalled pages ------------------------------------------------------------------


def recalled(cache, g, chosen):
    cache.pages.chosen[g, : len(chosen)] = chosen
    before = cache.pages.statistics[g].copy()
    first_slot = cache.n_sink + cache.n_ring
    recall.recall_pages(cache.pages, g, len(chosen), first_slot)
    return (cache.pages.statistics[g] - before)[[HIT, RECALLED]].tolist()


def check_slots(cache, store, g):
    """Both tables agree, and every slot holds its page."""
    pages = cache.pages
    for slot, j in enumerate(pages.page_in[g]):
        if j < 0:
            continue
        assert pages.slot_of[g, j] == slot
        at = cache.n_sink + cache.n_ring + slot
        for resident, rows in ((pages.k, store.k), (pages.v, store.v)):
            np.testing.assert_array_equal(
                resident[at, :, g].view(np.float16), rows[g, 16 * j : 16 * j + 16]
            )
    assert (pages.slot_of[g] >= 0).sum() == (pages.page_in[g] >= 0).sum()


def test_the_pages_unused_for_longest_make_room():
    cache, store = make_cache(400, n_slot=6)
    assert recalled(cache, 1, [1, 2, 3]) == [0, 3]
    assert recalled(cache, 1, [1, 2, 3]) == [3, 0]
    assert recalled(cache, 1, [4, 5, 6]) == [0, 3]
    assert recalled(cache, 1, [2, 7]) == [1, 1]  # 1 or 3 goes: the first slot, with page 1
    assert recalled(cache, 1, [1, 3]) == [1, 1]  # 4 goes
    assert sorted(cache.pages.page_in[1]) == [1, 2, 3, 5, 6, 7]
    assert recalled(cache, 1, [8, 9, 10, 11, 12, 13]) == [0, 6]
    check_slots(cache, store, 1)
    assert (cache.pages.page_in[0] == -1).all() and (cache.pages.page_in[2] == -1).all()


@pytest.mark.parametrize("n_slot", [5, 7, 10, 40])
def test_any_sequence_of_choices_is_served(n_slot):
    """A full cache, hits and misses in all mixtures; nothing chosen is ever thrown out."""
    cache, store = make_cache(600, n_slot=n_slot)
    rng = np.random.default_rng(n_slot)
    for _ in range(200):
        g, m = rng.integers(3), rng.integers(1, 6)
        chosen = np.sort(rng.choice(np.arange(1, 34), m, replace=False))
        hit = int((cache.pages.slot_of[g, chosen] >= 0).sum())
        assert recalled(cache, g, chosen) == [hit, m - hit]
        assert (cache.pages.slot_of[g, chosen] >= 0).all()
        check_slots(cache, store, g)


# --- a step ---------------------------------------------------------------------------------------


class Step:
    """A page cache and what one step over it takes."""

    def __init__(
        self, n_head, n_kv_head, d, n, *, n_best=4, window=32, seed=0, softcap=NO_CAP, sinks=()
    ):
        self.softcap, self.sinks = softcap, np.array(sinks, np.float32)
        self.cache, self.store = make_cache(n, n_kv_head, d, n_slot=8, window=window, seed=seed)
        rng = np.random.default_rng(seed + 1)
        shapes = (n_head, n_head, n_kv_head, n_kv_head)
        self.q, self.previous, self.k, self.v = (
            rng.standard_normal((heads, d)).astype(np.float32) for heads in shapes
        )
        self.n, self.n_best, self.scale = n + 1, n_best, np.float32(d**-0.5)
        self.window = max(1, (n + 1 - window) // 16)

    def step(self, tau=0.0, n_threads=1):
        step = FreeKVStep(self.scale, self.softcap, self.sinks, tau, n_threads)
        self.store.reserve(self.n)
        self.cache.make_room(self.window, 8)
        step.prepare(self.cache, self.n, self.window, self.n_best)
        return step

    def arrays(self):
        """What ``FreeKVStep.run`` takes."""
        rows = {name: np.ascontiguousarray(getattr(self, name)[:, None]) for name in "qkv"}
        width = (self.cache.n_sink + self.n_best) * 16 + self.n - self.window * 16
        attended, counts = np.empty((len(self.k), width), np.int32), np.empty(len(self.k), np.int64)
        out = np.empty_like(self.q)
        return rows | {
            "previous": self.previous,
            "out": out,
            "attended": attended,
            "n_attended": counts,
        }

    def run(self, tau=0.0, current=False, n_threads=1):
        """(out, rows attended a kv head)."""
        arrays = self.arrays()
        self.step(tau, n_threads).run(current, **arrays)
        self.cache.offloaded = self.window
        listed = zip(arrays["attended"], arrays["n_attended"], strict=True)
        return arrays["out"], [rows[:count] for rows, count in listed]

    def ahead(self):
        step = self.step()
        step.state.set(**self.arrays())
        step.ahead()()
        self.cache.offloaded = self.window

    def keys_and_values(self):
        """(G, n, d) each, with the new row."""
        return (
            np.concatenate([rows[:, : self.n - 1], new[:, None].astype(np.float16)], 1)
            for rows, new in ((self.store.k, self.k), (self.store.v, self.v))
        )


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), GEOMETRIES)
@pytest.mark.parametrize("n", [63, 64, 65, 257, 271, 272])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_recall_step(n_head, n_kv_head, d, n, n_threads):
    numba.set_num_threads(n_threads)
    softcap, sinks = (NO_CAP, ()) if n % 2 else (np.float32(1.5), np.linspace(-3, 9, n_head))
    step = Step(n_head, n_kv_head, d, n, softcap=softcap, sinks=sinks)
    out, rows = step.run(current=True, n_threads=n_threads)
    numba.set_num_threads(1)
    k, v = step.keys_and_values()
    group = n_head // n_kv_head
    expected = attend_rows_ref(
        step.q, k, v, [rows[h // group] for h in range(n_head)], step.scale, softcap,
        step.sinks if len(sinks) else None,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected, atol=1e-5)
    hi, lo = page_summaries_ref(k[:, : step.window * 16], 16, True)
    for g in range(n_kv_head):
        chosen, _ = choice.choose_pages_ref(
            step.q[g * group : (g + 1) * group], hi[g], lo[g], 1, step.window, step.n_best,
            step.scale, softcap,
        )  # fmt: skip
        parts = [np.arange(16), *(np.arange(16 * j, 16 * j + 16) for j in chosen)]
        parts.append(np.arange(16 * step.window, step.n))
        np.testing.assert_array_equal(rows[g], np.concatenate(parts))


@pytest.mark.parametrize("n", [255, 270, 271, 272])
def test_choosing_ahead_or_in_the_step_is_the_same(n):
    """Also when a page leaves the window in between (n = 271: the step's n is 272)."""
    late, ahead = Step(9, 3, 64, n), Step(9, 3, 64, n)
    ahead.ahead()
    scored = ahead.cache.pages.statistics[:, SCORED].copy()
    out, rows = ahead.run(tau=-np.inf)
    np.testing.assert_array_equal(ahead.cache.pages.statistics[:, SCORED], scored)
    expected, expected_rows = late.run(tau=-np.inf)
    np.testing.assert_array_equal(out, expected)
    for mine, theirs in zip(rows, expected_rows, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    ahead.ahead()
    np.testing.assert_array_equal(ahead.cache.pages.statistics[:, SCORED], scored)


def test_only_heads_that_turned_choose_again():
    step, plain, turned = (Step(8, 4, 64, 500) for _ in range(3))
    for each in (step, plain, turned):
        each.previous[:] = each.q * 1.5
        each.previous[2:4] = np.roll(each.q[2:4], 7, axis=1)  # kv head 1
        each.previous[6] = -each.q[6]  # kv head 3: mean cosine 0
    _, rows = step.run(tau=0.5)
    _, by_previous = plain.run(tau=-np.inf)
    _, by_current = turned.run(current=True)
    for g, expected in enumerate((by_previous[0], by_current[1], by_previous[2], by_current[3])):
        np.testing.assert_array_equal(rows[g], expected)
    assert not np.array_equal(by_previous[1], by_current[1])
    assert step.cache.pages.statistics[:, CORRECTED].tolist() == [0, 1, 0, 1]
    assert plain.cache.pages.statistics[:, CORRECTED].sum() == 0
    assert turned.cache.pages.statistics[:, CORRECTED].sum() == 0
