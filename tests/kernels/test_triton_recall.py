"""Kernels of FreeKV's recall one by one, two sequences at a time, on awkward sizes."""

import numpy as np
import pytest
import torch
from sweeps import sweep

from sparsekv_cli.cpu.freekv.choice import choose_pages_ref
from sparsekv_cli.cpu.freekv.recall import mean_cosine_ref
from sparsekv_cli.cpu.quest.pages import page_summaries_ref
from sparsekv_cli.kernels.attention.arrivals import NONE_ARRIVED, none_arrived
from sparsekv_cli.kernels.freekv import choice, correction, recall
from sparsekv_cli.kernels.freekv import pages as page_cache
from sparsekv_cli.kernels.quest import scores

LAYOUT = page_cache.Layout(n_sink=2, n_ring=3, meanstd=True)
SIZES = [(1, 64, 64, 4), (3, 80, 48, 5), (2, 16, 16, 24)]  # (G, d, d_v, p)
STATE = {name: getattr(page_cache, name).value for name in ("N_CHOSEN", "QUERY", "END", "BEST")}
OFFLOADED, SENT = page_cache.OFFLOADED.value, page_cache.SENT.value


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def make(n_kv, d, d_v, page, device, n_page=9, n_slot=6, m=4, layout=LAYOUT):
    """Arrays of two sequences; random rows in the pool, NaN in slots."""
    pages = page_cache.empty_pages(
        2, n_kv, d, d_v, page, n_page, n_slot, m, layout, torch.device(device)
    )
    page_cache.check_pages(pages, layout)
    generator = torch.Generator().manual_seed(d)
    for x in (pages.pool, pages.k, pages.v):
        x.copy_(torch.randn(x.shape, generator=generator))
    for x in (pages.k, pages.v):
        x[:, layout.n_sink + layout.n_ring :] = torch.nan
    return pages


@pytest.mark.parametrize(("n_kv", "d", "d_v", "page"), sweep(SIZES, fast=1))
@pytest.mark.parametrize("meanstd", [False, True])
def test_pages_that_leave_the_window(n_kv, d, d_v, page, meanstd, device):
    layout = LAYOUT._replace(meanstd=meanstd)
    pages = make(n_kv, d, d_v, page, device, layout=layout)
    before = pages.pool.clone()
    pages.state[0, :, OFFLOADED] = 4
    pages.state[1, :, OFFLOADED] = 5
    n = ints([6 * page + 7 - 1, 5 * page + 7], device)  # windows from 6, with the row ahead, and 5
    recall.offload_pages(pages, layout, n, 7, ahead=1)
    assert pages.state[..., OFFLOADED].tolist() == [[6] * n_kv, [5] * n_kv]
    assert pages.statistics[..., SENT].tolist() == [[2] * n_kv, [0] * n_kv]
    for j in (4, 5):
        k, v = (x[0, layout.n_sink + j % layout.n_ring] for x in (pages.k, pages.v))
        unit = torch.cat([x.transpose(0, 1).reshape(n_kv, -1) for x in (k, v)], 1)
        assert (pages.pool[0, j - layout.n_sink] == unit.to(pages.pool.device)).all()
        keys = k.transpose(0, 1).cpu().numpy()
        wanted = page_summaries_ref(keys, page, meanstd)
        for actual, summary in zip((pages.hi, pages.lo), wanted, strict=True):
            np.testing.assert_allclose(actual[0, :, j].cpu(), summary[:, 0], rtol=2e-3, atol=2e-3)
    untouched = [0, 1, *range(4, 9)]
    assert (pages.pool[0, untouched] == before[0, untouched]).all()
    assert (pages.pool[1] == before[1]).all()


def test_who_has_yet_to_choose(device):
    pages = make(4, 16, 16, 4, device)
    pages.state[..., OFFLOADED] = 8
    chosen_for = [[30, 8, 3], [29, 8, 3], [30, 7, 3], [30, 8, 2]]
    columns = [STATE[name] for name in ("QUERY", "END", "BEST")]
    for g, values in enumerate(chosen_for):
        pages.state[0, g, columns] = pages.state[1, g, columns] = ints(values, device)
    wanted = torch.full((2, 4), 7, dtype=torch.int32, device=device)
    n, budget = ints([30, 31], device), ints([20, 20], device)
    # With the row ahead: queries of row 30, windows from (31 - 2) // 4 = 7 and (32 - 2) // 4 = 7.
    recall.offload_pages(pages, LAYOUT, n, 2, ahead=1, budget=budget, reserved=8, wanted=wanted)
    assert wanted.tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize(("n_kv", "d", "d_v", "page"), sweep(SIZES, fast=1))
@pytest.mark.parametrize("group", [1, 3])
def test_enter_row(n_kv, d, d_v, page, group, device):
    pages = make(n_kv, d, d_v, page, device)
    generator = torch.Generator().manual_seed(group)
    k, v = (torch.randn(2, n_kv, width, generator=generator).to(device) for width in (d, d_v))
    q, other = (torch.randn(2, n_kv * group, d, generator=generator) for _ in range(2))
    previous = q + other * torch.rand(2, n_kv * group, 1, generator=generator)
    previous[0, 0] = 0
    n, budget = ints([5 * page, 5 * page + 1], device), ints([40 * page] * 2, device)
    recent, reserved, tau = 3, 2 * page + 3, 0.8
    fresh = [STATE[name] for name in ("QUERY", "END", "BEST")]
    pages.state[1, :, fresh] = ints([5 * page, (5 * page + 1 - recent) // page, 37], device)
    wanted = torch.full((2, n_kv), 7, dtype=torch.int32, device=device)
    query = torch.full_like(q, torch.nan, device=device)
    args = pages, LAYOUT, q.to(device), previous.to(device), k, v, n, budget, recent, reserved, tau
    correction.enter_row(*args, current=False, wanted=wanted, query=query)
    for b in range(2):
        row = int(n[b]) - 1
        at = LAYOUT.n_sink + row // page % LAYOUT.n_ring, row % page
        assert (pages.k[b, at[0], at[1]] == k[b].half()).all()
        assert (pages.v[b, at[0], at[1]] == v[b].half()).all()
        for g in range(n_kv):
            heads = slice(g * group, (g + 1) * group)
            pair = (x[b, heads].numpy() for x in (q, previous))
            turned = mean_cosine_ref(*pair) < tau
            assert wanted[b, g] == (1 if turned else 0 if b else 2)
            assert (query[b, heads].cpu() == (q if turned else previous)[b, heads]).all()
            assert pages.statistics[b, g, page_cache.CORRECTED.value] == turned
    correction.enter_row(*args, current=True, wanted=wanted, query=query)
    assert (wanted == 1).all() and (query.cpu() == q).all()


class Lru:
    """The pages in slots, as cpu/freekv/recall.py recall_pages keeps them."""

    def __init__(self, n_slot):
        self.pages, self.stamps, self.now = [-1] * n_slot, [0] * n_slot, 0

    def take(self, chosen):
        """The slots of the chosen pages, and which were missing."""
        self.now += 1
        missing = [page not in self.pages for page in chosen]
        for page in set(chosen) & set(self.pages):
            self.stamps[self.pages.index(page)] = self.now
        for page, is_missing in zip(chosen, missing, strict=True):
            if is_missing:
                slot = int(np.argmin(self.stamps))
                self.pages[slot], self.stamps[slot] = page, self.now
        return [self.pages.index(page) for page in chosen], missing


def choice_buffers(pages, n_head):
    """Buffers of a choice; every kv head chooses."""
    (n_batch, n_kv, m), d, device = pages.chosen.shape, pages.k.shape[4], pages.k.device
    lists = torch.full((n_batch, n_kv, m), 1 << 20, dtype=torch.int32, device=device)
    n_candidate = pages.hi.shape[2] - LAYOUT.n_sink
    return choice.ChoiceBuffers(
        torch.ones(n_batch, n_kv, dtype=torch.int32, device=device),
        none_arrived(n_batch, n_kv, device),
        lists,
        scores.page_scratch(n_batch, n_head, n_kv, d, n_candidate, device),
    )


@pytest.mark.parametrize(("n_slot", "m"), [(4, 4), (6, 3), (70, 33)])
def test_slots_are_an_lru_cache(n_slot, m, device):
    n_page, n_sink = 3 * m + 5, LAYOUT.n_sink
    pages = make(2, 16, 16, 4, device, n_page=n_page, n_slot=n_slot, m=m)
    buffers, rng = choice_buffers(pages, 4), np.random.default_rng(m)
    caches = {(b, g): Lru(n_slot) for b in range(2) for g in range(2)}
    n = ints([4 * (n_sink + n_page) + 2, 4 * (n_sink + n_page) + 3], device)
    query = torch.zeros(2, 4, 16, device=device)
    query[..., 0] = 1  # a page's score is the first element of its upper bound
    hits = 0
    for step in range(9):
        sizes = rng.integers(1, m + 1, 2)
        wanted = torch.from_numpy(rng.integers(0, 2, (2, 2))).int()
        before, rows = pages.chosen.clone(), {}
        pages.hi[..., 0] = 0
        for b, g in caches:
            near = rng.integers(0, n_page - m)  # choices that overlap
            rows[b, g] = np.sort(rng.permutation(np.arange(near, near + m))[: sizes[b]])
            pages.hi[b, g, (n_sink + rows[b, g]).tolist(), 0] = 4
        choice.choose_pages(
            pages, LAYOUT, query, n, ints((4 * sizes + 11).tolist(), device), 3, 11, 1.0,
            buffers._replace(wanted=wanted.to(device)),
        )  # fmt: skip
        assert (buffers.arrived == NONE_ARRIVED).all()
        for (b, g), cache in caches.items():
            if not wanted[b, g]:
                assert (pages.missing[b, g] == 0).all()
                assert (pages.chosen[b, g] == before[b, g]).all()
                continue
            size = int(sizes[b])
            chosen = (n_sink + rows[b, g]).tolist()
            slots, missing = cache.take(chosen)
            assert pages.chosen[b, g, :size].tolist() == chosen
            assert pages.slots[b, g, :size].tolist() == slots
            assert pages.missing[b, g, :size].tolist() == missing
            assert pages.page_in[b, g].tolist() == cache.pages
            state = pages.state[b, g, list(STATE.values())].tolist()
            assert state == [size, n[b], n_sink + n_page, size]
            hits += size - sum(missing)
            of = pages.slot_of[b, g].tolist()
            assert [of[page] for page in chosen] == slots
            assert sorted(page for page, slot in enumerate(of) if slot >= 0) == sorted(
                page for page in cache.pages if page >= 0
            ), step
    assert pages.statistics[..., page_cache.HIT.value].sum() == hits > 0


@pytest.mark.parametrize(("n_kv", "d", "d_v", "page"), sweep(SIZES, fast=1))
@pytest.mark.parametrize("group", [1, 3])
def test_the_choice_is_that_of_the_host(n_kv, d, d_v, page, group, device):
    """By a step and ahead of one; few candidates, and none."""
    pages = make(n_kv, d, d_v, page, device, n_page=90, n_slot=12, m=9)
    generator, n_sink = torch.Generator().manual_seed(group), LAYOUT.n_sink
    pages.hi.copy_(torch.randn(pages.hi.shape, generator=generator))
    pages.lo.copy_(pages.hi - torch.randn(pages.hi.shape, generator=generator).abs())
    query, q = (torch.randn(2, n_kv * group, d, generator=generator).to(device) for _ in range(2))
    buffers, scale, recent = choice_buffers(pages, n_kv * group), d**-0.5, 5
    for windows, n_best in (([92, 40], 7), ([5, 4], 9), ([2, 3], 1)):
        for b, window in enumerate(windows):
            pages.hi[b, :, window:] = pages.lo[b, :, window:] = torch.nan
        budget = ints([n_best * page + 11] * 2, device)
        for ahead in (0, 1):
            n = ints([page * window + recent - ahead for window in windows], device)
            previous = torch.zeros_like(q)
            step = {} if ahead else {"q": q, "previous": previous}
            choice.choose_pages(pages, LAYOUT, query, n, budget, recent, 11, scale, buffers, **step)
            assert (previous == (0 if ahead else q)).all()
            for b, window in enumerate(windows):
                size = min(n_best, window - n_sink)
                state = [size, n[b], window, n_best]
                for g in range(n_kv):
                    assert pages.state[b, g, list(STATE.values())].tolist() == state
                    if size == 0:
                        continue
                    heads = query[b, g * group : (g + 1) * group], pages.hi[b, g], pages.lo[b, g]
                    wanted, _ = choose_pages_ref(
                        *(x.float().cpu().numpy() for x in heads), n_sink, window, size, scale
                    )
                    assert pages.chosen[b, g, :size].tolist() == list(wanted)
        pages.hi[:], pages.lo[:] = pages.hi.nan_to_num(9), pages.lo.nan_to_num(3)


def test_kv_heads_that_do_not_choose_are_counted(device):
    pages = make(2, 16, 16, 4, device)
    buffers, q = choice_buffers(pages, 4), torch.ones(2, 4, 16, device=device)
    wanted, previous = ints([[0, 0], [0, 1]], device), torch.zeros_like(q)
    pages.state[..., STATE["N_CHOSEN"]] = 3
    n, budget = ints([40, 40], device), ints([23, 23], device)
    pages.missing.fill_(1)
    choice.choose_pages(
        pages, LAYOUT, q, n, budget, 3, 11, 1.0, buffers._replace(wanted=wanted), q=q,
        previous=previous,
    )  # fmt: skip
    assert (previous == 1).all() and (buffers.arrived == NONE_ARRIVED).all()
    assert pages.statistics[..., page_cache.STEPPED.value].tolist() == [[1, 1], [1, 1]]
    rows = (LAYOUT.n_sink + 3) * 4 + 40 - (40 - 3) // 4 * 4
    attended = pages.statistics[..., page_cache.ATTENDED.value].tolist()
    assert attended == [[rows, rows], [rows, rows]]
    assert pages.missing.sum(2).tolist() == [[0, 0], [0, 3]]


@pytest.mark.parametrize(("n_kv", "d", "d_v", "page"), sweep(SIZES, fast=1))
def test_fetch_pages(n_kv, d, d_v, page, device):
    pages = make(n_kv, d, d_v, page, device)
    n_sink, n_ring, _ = LAYOUT
    chosen, slots, missing = [2, 5, 10], [4, 0, 2], [1, 0, 1]
    for x, values in ((pages.chosen, chosen), (pages.slots, slots), (pages.missing, missing)):
        x[..., :3] = ints(values, device)
    pages.state[0, :, STATE["N_CHOSEN"]] = 3
    pages.state[1, :, STATE["N_CHOSEN"]] = 1
    width = (n_sink + 4 + n_ring) * page
    idx = torch.full((2, n_kv, width + 1), -7, dtype=torch.int32, device=device)
    counts = ints([[0] * n_kv] * 2, device)
    n = ints([11 * page + 3, 12 * page + 3], device)
    recall.fetch_pages(pages, LAYOUT, n, 4, idx, counts)
    pool = pages.pool.to(device)
    for b, n_chosen in enumerate((3, 1)):
        window = (int(n[b]) - 4) // page
        rows = list(range(n_sink * page))
        for slot in slots[:n_chosen]:
            rows += range((n_sink + n_ring + slot) * page, (n_sink + n_ring + slot + 1) * page)
        for row in range(window * page, int(n[b])):
            rows.append((n_sink + row // page % n_ring) * page + row % page)
        fetched = [slots[i] for i in range(n_chosen) if missing[i]]
        for g in range(n_kv):
            assert counts[b, g] == len(rows) and idx[b, g].tolist()[: len(rows)] == rows
            assert (idx[b, g, len(rows) :] == -7).all()
            for slot in range(6):
                k, v = (x[b, n_sink + n_ring + slot, :, g] for x in (pages.k, pages.v))
                if slot not in fetched:
                    assert k.isnan().all() and v.isnan().all()
                    continue
                unit = pool[b, chosen[slots.index(slot)] - n_sink, g]
                assert (k == unit[: page * d].view(page, d)).all()
                assert (v == unit[page * d :].view(page, d_v)).all()
    pages.k[:, n_sink + n_ring :] = torch.nan
    recall.fetch_pages(pages, LAYOUT)
    assert (pages.k[0, n_sink + n_ring + 4, 0, 0] == pool[0, 0, 0, :d]).all()


@pytest.mark.parametrize(("n_kv", "d", "d_v", "page"), sweep(SIZES, fast=1))
def test_pools_that_lie_apart(n_kv, d, d_v, page, device):
    """Each sequence's own, with as many pages or more, do what one tensor does."""
    together, apart = (make(n_kv, d, d_v, page, device) for _ in range(2))
    pools = [torch.nn.functional.pad(together.pool[b : b + 1], (0, 0, 0, 0, 0, b)) for b in (0, 1)]
    if torch.device(device).type == "cuda":
        pools = [pool.pin_memory() for pool in pools]
    offsets = [(pool.data_ptr() - pools[0].data_ptr()) // 2 for pool in pools]
    table = torch.tensor(offsets, dtype=torch.int64, device=device)
    apart = apart._replace(pool=pools[0])
    n = ints([6 * page + 3, 5 * page + 7], device)
    for pages, where in ((together, None), (apart, table)):
        pages.state[..., OFFLOADED] = 4
        pages.state[..., page_cache.N_CHOSEN.value] = 2
        pages.chosen[..., :2] = ints([LAYOUT.n_sink, LAYOUT.n_sink + 1], device)
        pages.slots[..., :2], pages.missing[..., :2] = ints([3, 1], device), 1
        recall.offload_pages(pages, LAYOUT, n, 4, pools=where)
        recall.fetch_pages(pages, LAYOUT, pools=where)
    assert together.state[0, 0, OFFLOADED] > 4
    for b, pool in enumerate(pools):
        assert (pool[0, : together.pool.shape[1]] == together.pool[b]).all()
    for name in ("k", "v", "missing"):
        a, b = (getattr(pages, name) for pages in (together, apart))
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert not together.k[:, -3].isnan().any()  # slot 3 of 6
    with pytest.raises(ValueError, match="pool is of 1 sequences"):
        recall.fetch_pages(apart, LAYOUT)


def test_arrays_that_do_not_fit_are_named(device):
    pages = make(2, 16, 16, 4, device)
    with pytest.raises(ValueError, match=r"lo has shape .*: expected \(2, 2, 11, 16\)"):
        page_cache.check_pages(pages._replace(lo=pages.lo[:, :, :10].contiguous()), LAYOUT)
    with pytest.raises(ValueError, match=r"k has 3 slots: expected one for each of 4"):
        page_cache.check_pages(
            pages._replace(
                k=pages.k[:, :8].contiguous(), v=pages.v[:, :8].contiguous(),
                page_in=pages.page_in[..., :3].contiguous(),
                stamps=pages.stamps[..., :3].contiguous(),
            ),
            LAYOUT,
        )  # fmt: skip
