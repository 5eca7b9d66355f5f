"""Page summaries and Quest's step in Triton against numpy, on awkward sizes."""

import numpy as np
import pytest
import torch
from sweeps import sweep

from sparsekv_cli.cpu.quest.pages import page_scores_ref, page_summaries_ref, select_pages_ref
from sparsekv_cli.kernels.attention import decode
from sparsekv_cli.kernels.attention.arrivals import NONE_ARRIVED, none_arrived
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.quest import pages, scores
from sparsekv_cli.kernels.quest.step import PageRules, step_rows

GEOMETRIES = [(1, 1, 64), (9, 3, 64), (4, 1, 80), (8, 1, 128)]


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def empty_summaries(n_batch, n_kv_head, n_page, d, device):
    shape = (n_batch, n_kv_head, n_page, d)
    return [torch.full(shape, 7.0, device=device).half() for _ in range(2)]


@pytest.mark.parametrize(("n_kv_head", "d"), [(1, 64), (3, 80)])
@pytest.mark.parametrize("page", [1, 16, 48])
@pytest.mark.parametrize("meanstd", [False, True])
def test_page_summaries(n_kv_head, d, page, meanstd, device):
    n = 3 * page + page // 2
    k = (random(2, n, n_kv_head, d) + 1).half().to(device).transpose(1, 2)
    for n_sinks in {0, page // 4}:
        hi, lo = empty_summaries(2, n_kv_head, 5, d, device)
        pages.page_summaries(k, hi, lo, page, meanstd, 1, 3, n_sinks)
        pages.page_summaries(k, hi, lo, page, meanstd, 0, 1, n_sinks)
        for b in range(2):
            keys = k[b].cpu().numpy()
            expected = page_summaries_ref(keys, page, meanstd, n_sinks)
            for actual, wanted in zip((hi, lo), expected, strict=True):
                tolerance = {"rtol": 1e-3, "atol": 1e-3} if meanstd else {"rtol": 0}
                np.testing.assert_allclose(actual[b, :, :3].cpu(), wanted, **tolerance)
        assert (hi[:, :, 3:] == 7).all() and (lo[:, :, 3:] == 7).all()


@pytest.mark.parametrize("meanstd", [False, True])
def test_steps_summarise_the_pages_that_they_complete(meanstd, device):
    """As they are summarised at once, by sequences of several lengths, from rows of the steps."""
    rows = random(2, 2, 18, 64).to(device)
    at_once, stepped = (empty_summaries(2, 2, 5, 64, device) for _ in range(2))
    pages.page_summaries(rows.half(), *at_once, 4, meanstd, 0, 4, 3)
    k, v = (torch.full_like(rows, torch.nan).half() for _ in range(2))
    arrived, q = none_arrived(2, 2, k.device), random(2, 4, 64).to(device)
    for n in range(1, 18):
        lengths = ints([n, max(1, n - 5)], device)
        new = torch.stack([rows[b, :, n_rows - 1] for b, n_rows in enumerate(lengths.tolist())])
        step_rows(
            q, NewRow(new, new), k, v, *stepped, arrived, lengths, lengths, 5,
            PageRules(4, meanstd, 3, 1.0),
        )  # fmt: skip
    for whole, grown in zip(at_once, stepped, strict=True):
        assert (whole[0] == grown[0]).all()
        assert (whole[1, :, :3] == grown[1, :, :3]).all() and (grown[1, :, 3:] == 7).all()
    for stored in (k, v):
        assert (stored[0, :, :17] == rows[0, :, :17].half()).all()


def test_deviations_of_large_keys_do_not_cancel(device):
    k = (random(1, 1, 16, 64) + 1000).half().to(device)
    hi, lo = empty_summaries(1, 1, 1, 64, device)
    pages.page_summaries(k, hi, lo, 16, True, 0, 1)
    expected = page_summaries_ref(k[0].cpu().numpy(), 16, True)
    np.testing.assert_allclose((hi - lo)[0].cpu(), expected[0] - expected[1], atol=1)


def scored(n_head, n_kv_head, d, sizes, page, device):
    """q, hi, lo with NaN behind each sequence's whole pages."""
    n_page = max(sizes) // page + 3
    q = 2 * random(len(sizes), n_head, d)
    hi = random(len(sizes), n_kv_head, n_page, d, seed=1).half()
    lo = hi - random(len(sizes), n_kv_head, n_page, d, seed=2).half().abs()
    for b, n in enumerate(sizes):
        hi[b, :, n // page :] = lo[b, :, n // page :] = torch.nan
    return q.to(device), hi.to(device), lo.to(device)


def listed(q, hi, lo, sizes, budgets, page, n_sinks, device, m=None, scale=None):
    """The rows that a step lists, for each sequence and kv head."""
    n_batch, _, d = q.shape
    n_kv_head, capacity = hi.shape[1], max(sizes) + 1
    k = torch.zeros(n_batch, n_kv_head, capacity, d, device=device).half()
    v = torch.zeros(n_batch, n_kv_head, capacity, 16, device=device).half()
    new = NewRow(*(torch.ones(n_batch, n_kv_head, width, device=device) for width in (d, 16)))
    arrived, m = none_arrived(n_batch, n_kv_head, q.device), m or max(budgets) // page + 1
    idx, counts = step_rows(
        q, new, k, v, hi, lo, arrived, ints(sizes, device), ints(budgets, device), m,
        PageRules(page, False, n_sinks, d**-0.5 if scale is None else scale),
    )  # fmt: skip
    assert (arrived == NONE_ARRIVED).all()
    for x in (k, v):
        for b, n in enumerate(sizes):
            assert (x[b, :, n - 1] == 1).all() and x[b].sum() == n_kv_head * x.shape[3]
    return [
        [rows[:count].tolist() for rows, count in zip(*of_sequence, strict=True)]
        for of_sequence in zip(idx.cpu(), counts.cpu(), strict=True)
    ]


def expected_rows(q, hi, lo, b, n, budget, page, n_sinks, scale):
    n_page, n_best = (n - 1) // page, max(0, (budget - 1) // page)
    of_pages = (x[b, :, :n_page].float().cpu().numpy() for x in (hi, lo))
    found = page_scores_ref(q[b].cpu().numpy(), *of_pages, scale)
    return [rows.tolist() for rows in select_pages_ref(
        found, hi.shape[1], min(n_best, n_page), page, n, n_sinks
    )]  # fmt: skip


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("sizes", [[30], [64, 1030, 333]])
@pytest.mark.parametrize("page", [4, 5])
def test_a_step_lists_the_rows_of_the_host(n_head, n_kv_head, d, sizes, page, device):
    q, hi, lo = scored(n_head, n_kv_head, d, sizes, page, device)
    budgets = [23 + 9 * b for b in range(len(sizes))]
    for n_sinks in (0, page - 1):
        found = listed(q, hi, lo, sizes, budgets, page, n_sinks, device)
        for b, n in enumerate(sizes):
            wanted = expected_rows(q, hi, lo, b, n, budgets[b], page, n_sinks, d**-0.5)
            assert found[b] == wanted


@pytest.mark.parametrize("n", [1, 4, 5, 6, 17, 65])
@pytest.mark.parametrize("budget", [0, 1, 6, 11, 1000])
def test_few_pages_and_any_budget(n, budget, device):
    q, hi, lo = scored(3, 3, 64, [n], 5, device)
    (found,) = listed(q, hi, lo, [n], [budget], 5, 4, device, m=20)
    assert found == expected_rows(q, hi, lo, 0, n, budget, 5, 4, 0.125)


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_equal_pages_are_taken_in_their_order(block, device, monkeypatch):
    """block: keys that fit the registers."""
    monkeypatch.setattr(scores, "REGISTERS", block)
    q, hi, lo = scored(6, 2, 64, [1200], 4, device)
    for x in (hi, lo):
        x[:, :, :299] = x[:, :, :1]
    rows = [*range(3), 3, *range(4, 5 * 4), *range(1196, 1200)]
    assert listed(q, hi, lo, [1200], [21], 4, 3, device) == [[rows, rows]]
    hi[:, 1, 250:255] += 1
    best = [*range(3), *range(1000, 1020), *range(1196, 1200)]
    assert listed(q, hi, lo, [1200], [21], 4, 3, device)[0][0] == rows
    found = listed(q.abs(), hi, lo, [1200], [21], 4, 3, device)[0][1]
    assert found == best


def test_the_number_of_programs_does_not_matter(device, monkeypatch):
    q, hi, lo = scored(4, 1, 80, [1030], 4, device)
    expected = listed(q, hi, lo, [1030], [200], 4, 3, device)
    for programs in (1, 3, 4096):
        monkeypatch.setattr(decode, "PROGRAMS", programs)
        assert listed(q, hi, lo, [1030], [200], 4, 3, device) == expected


def test_scores_of_any_size(device):
    """Few pages take all of the mass; or a head's scores are equal."""
    q, hi, lo = scored(4, 2, 64, [403], 4, device)
    for factor in (0.0, 0.01, 10.0):
        found = listed(q * factor, hi, lo, [403], [40], 4, 3, device, m=100)
        assert found[0] == expected_rows(q * factor, hi, lo, 0, 403, 40, 4, 3, 0.125)


def test_wrong_arguments_are_named(device):
    k = torch.zeros(1, 2, 64, 64, device=device).half()
    hi, lo = empty_summaries(1, 2, 4, 64, device)
    with pytest.raises(ValueError, match="hi has room for 4 pages: expected 5"):
        pages.page_summaries(k, hi, lo, 16, True, 0, 5)
    with pytest.raises(ValueError, match="n_sinks = 16: expected 0 to page - 1 = 15"):
        pages.page_summaries(k, hi, lo, 16, True, 0, 4, 16)
    with pytest.raises(ValueError, match="last_page = 4: k has 60 rows"):
        pages.page_summaries(k[:, :, :60], hi, lo, 16, True, 0, 4)
    q, new, n = torch.zeros(1, 4, 64, device=device), torch.zeros(1, 2, 64), ints([9], device)
    row, arrived = NewRow(new.to(device), new.to(device)), none_arrived(1, 1, k.device)
    with pytest.raises(ValueError, match="arrived has 1 counts a row: expected 2 or more"):
        step_rows(q, row, k, k, hi, lo, arrived, n, n, 3, PageRules(16, True, 4, 1.0))
