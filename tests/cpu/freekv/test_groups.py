"""Groups of pages: their summaries, and the choice among the pages of the best of them."""

import numpy as np
import pytest
from freekv_pages import half, make_cache

from sparsekv_cli.cache.spec import NO_SINKS
from sparsekv_cli.cpu.freekv import choice, recall
from sparsekv_cli.cpu.freekv.pages import GROUPED, SCORED, group_summaries_ref
from sparsekv_cli.cpu.freekv.step import VISITED, FreeKVStep
from sparsekv_cli.cpu.quest.pages import page_summaries_ref

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("meanstd", [True, False])
def test_group_summaries(meanstd):
    """Of groups that are there from the start, and of one that the window leaves in decode."""
    cache, store = make_cache(8 * 16 * 3 + 64, page=16, window=64, meanstd=meanstd, groups=True)
    pages, first = cache.pages, cache.offloaded
    assert first // GROUPED == 3 and pages.group_hi.shape[1] >= 3
    hi, lo = group_summaries_ref(half(pages.hi)[:, :24], half(pages.lo)[:, :24], meanstd)
    np.testing.assert_allclose(half(pages.group_hi)[:, :3], hi, atol=4e-3)
    np.testing.assert_allclose(half(pages.group_lo)[:, :3], lo, atol=4e-3)
    of_rows = page_summaries_ref(store.k[:, : 24 * 16], 8 * 16, meanstd)
    for ours, theirs in zip((pages.group_hi, pages.group_lo), of_rows, strict=True):
        np.testing.assert_allclose(half(ours)[:, :3], theirs, atol=2e-2)
    expected = half(pages.group_hi)[:, 2].copy()
    pages.group_hi[:, 2] = 0
    at = [2 * GROUPED + i for i in range(GROUPED)]  # as if these left the window one by one
    for j in at:
        recall.offload_pages(pages, j, j + 1, cache.n_sink, cache.n_ring, meanstd)
        is_last = j == at[-1]
        assert half(pages.group_hi)[:, 2].any() == is_last
    assert expected.any()


def test_room_for_groups_grows_with_the_pages():
    cache, _ = make_cache(300, groups=True)
    have, before = cache.pages.hi.shape[1], cache.pages.group_hi.copy()
    cache.make_room(4 * have, 8)
    pages = cache.pages
    assert pages.group_hi.shape[1] == pages.group_lo.shape[1] == pages.hi.shape[1] // GROUPED
    np.testing.assert_array_equal(pages.group_hi[:, : before.shape[1]], before)


@pytest.mark.parametrize(("first", "end"), [(0, 128), (3, 133), (9, 135)])
def test_choice_among_the_pages_of_the_best_groups(first, end):
    """Against numpy, with ragged ends; visiting every group it is the choice among all."""
    rng, group, d, n_best = np.random.default_rng(end), 3, 64, 6
    q = rng.standard_normal((group, d)).astype(np.float32)
    hi = rng.standard_normal((1, 136, d)).astype(np.float16)
    lo = (hi - rng.uniform(0.1, 1, hi.shape)).astype(np.float16)
    tops = [x.astype(np.float16) for x in group_summaries_ref(hi, lo, True)]
    bits = [np.ascontiguousarray(x).view(np.uint16) for x in (hi, lo, *tops)]
    chosen, scale, softcap = np.zeros(32, np.int32), np.float32(0.125), np.float32(2)
    n_group = end // GROUPED
    for n_visited in (2, 5, n_group):
        m, n_scored = choice.choose_pages_by_groups(
            q, *bits, first, end, n_visited, n_best, scale, softcap, chosen
        )
        visited, _ = choice.choose_pages_ref(
            q, tops[0][0], tops[1][0], 0, n_group, n_visited, scale, softcap
        )
        listed = [j for i in visited for j in range(i * GROUPED, (i + 1) * GROUPED)]
        listed = np.array([j for j in [*listed, *range(n_group * GROUPED, end)] if j >= first])
        best, _ = choice.choose_pages_ref(
            q, hi[0][listed], lo[0][listed], 0, len(listed), n_best, scale, softcap
        )
        assert m == n_best and n_scored == n_group + len(listed)
        np.testing.assert_array_equal(chosen[:m], listed[best])
    everything, _ = choice.choose_pages_ref(q, hi[0], lo[0], first, end, n_best, scale, softcap)
    np.testing.assert_array_equal(chosen[:m], everything)


def test_steps_use_groups_where_they_leave_out_half():
    """Pages that are scored: of a long context the groups, and the pages of the best."""
    cache, _ = make_cache(4 * 500, page=4, window=16, n_slot=20, groups=True)
    n_kv, d, end, n_best = 3, 64, cache.offloaded, 5
    previous = np.random.default_rng(3).standard_normal((n_kv, d)).astype(np.float32)
    for best, few in ((n_best, True), (16, False)):
        cache.pages.statistics[:] = 0
        step = FreeKVStep(np.float32(0.125), np.float32(0), NO_SINKS, 0.9, 1)
        step.prepare(cache, cache.n + 1, end, best)
        unused = {name: np.zeros((n_kv, 1, d), np.float32) for name in "qkv"}
        step.state.set(
            previous=previous, out=previous, n_attended=np.zeros(n_kv, np.int64), **unused
        )
        step.ahead()()
        scored = cache.pages.statistics[:, SCORED]
        most = end // GROUPED + (VISITED * best + 1) * GROUPED
        assert (scored <= most).all() if few else (scored == end).all()
        assert (scored < end).all() == few
