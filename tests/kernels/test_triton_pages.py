"""Page summaries, pooled scores and rows of pages in Triton against numpy, on awkward sizes."""

import numpy as np
import pytest
import torch
from sweeps import sweep

from sparsekv_cli.cpu.freekv.choice import choose_pages_ref
from sparsekv_cli.cpu.quest.pages import listed_rows_ref, page_summaries_ref
from sparsekv_cli.kernels.attention import select
from sparsekv_cli.kernels.attention.decode import NewRow
from sparsekv_cli.kernels.quest import page_rows, pages
from sparsekv_cli.kernels.quest.scores import PageCandidates, pooled_pages, softmax_scores

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
    for n in range(1, 18):
        lengths = [n, max(1, n - 5)]
        new = torch.stack([rows[b, :, n_rows - 1] for b, n_rows in enumerate(lengths)])
        pages.append_row(
            NewRow(new, new), k, v, *stepped, ints(lengths, device), 4, meanstd, n_sinks=3
        )
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


@pytest.mark.parametrize(("n_head", "n_kv_head", "d"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("sizes", [[30], [64, 1030, 333]])
@pytest.mark.parametrize(("first", "recent"), [(2, 11), (0, 1)])  # FreeKV's, Quest's
def test_pooled_by_softmax(n_head, n_kv_head, d, sizes, first, recent, device):
    page, scale = 4, d**-0.5
    q, hi, lo = scored(n_head, n_kv_head, d, sizes, page, device)
    n_page_max = max(sizes) // page + 5
    out = pooled_pages(len(sizes), n_kv_head, n_page_max, q.device)
    out.scores.fill_(7)
    softmax_scores(
        q, hi, lo, ints(sizes, device), ints([20] * len(sizes), device), n_page_max, page, scale,
        PageCandidates(first, recent, 17, least=1), out=out,
    )  # fmt: skip
    group = n_head // n_kv_head
    for b, n in enumerate(sizes):
        end = (n - recent) // page
        assert out.n_page[b] == end - first and out.n_best[b] == 1
        assert (out.scores[b, :, end - first :] == 7).all()
        for g in range(n_kv_head):
            rows = q[b, g * group : (g + 1) * group], hi[b, g], lo[b, g]
            qg, hg, lg = (x.float().cpu().numpy() for x in rows)
            _, wanted = choose_pages_ref(qg, hg, lg, first, end, 1, scale)
            pooled = out.scores[b, g, : end - first].cpu()
            np.testing.assert_allclose(pooled, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("budget", [0, 9, 24, 1000])
@pytest.mark.parametrize("least", [0, 1])
def test_how_many_pages_are_taken(budget, least, device):
    q, hi, lo = scored(2, 1, 64, [40], 4, device)
    args = q, hi, lo, ints([40], device), ints([budget], device), 16, 4, 1.0
    out = softmax_scores(*args, PageCandidates(0, 3, 4, least))
    assert out.n_page == 9 and out.n_best == max(least, (budget - 4) // 4)
    out = softmax_scores(*args, PageCandidates(0, 3, 11, least))
    assert out.n_best == max(least, (budget - 11) // 4)


def test_no_candidates(device):
    q, hi, lo = scored(2, 1, 64, [40], 4, device)
    for n in (3, 5):
        args = q, hi, lo, ints([n], device), ints([20], device), 16, 4, 1.0
        assert softmax_scores(*args, PageCandidates(3, 2, 14)).n_page == 0
        assert softmax_scores(*args, PageCandidates(0, 1, 4)).n_page == (n - 1) // 4


@pytest.mark.parametrize("n_kv_head", [1, 3])
@pytest.mark.parametrize("page", [5, 16])
@pytest.mark.parametrize("n", [1, 6, 17, 65])
def test_selected_rows_are_those_of_the_host(n_kv_head, page, n, device):
    """Selection and rows of pages together, as Quest uses them."""
    n_page, n_page_max = (n - 1) // page, 60
    rng = np.random.default_rng(n)
    pooled = torch.full((1, n_kv_head, n_page_max), torch.nan)
    scores = rng.integers(0, 6, (n_kv_head, n_page)).astype(np.float32)  # many ties
    pooled[0, :, :n_page] = torch.from_numpy(scores)
    for n_best in (0, 3, 100):
        chosen, sizes = select.select_largest(
            pooled.to(device), ints([n_page], device), n_page_max, ints([n_best], device), 100
        )
        for n_sinks in (0, 4, 2 * page + 1):
            idx, counts = page_rows.page_rows(chosen, sizes, ints([n], device), page, n_sinks)
            wanted = listed_rows_ref(scores, n_best, page, n, n_sinks)
            for g in range(n_kv_head):
                np.testing.assert_array_equal(idx[0, g, : counts[0, g]].cpu(), wanted[g])


def test_wrong_arguments_are_named(device):
    k = torch.zeros(1, 2, 64, 64, device=device).half()
    hi, lo = empty_summaries(1, 2, 4, 64, device)
    with pytest.raises(ValueError, match="hi has room for 4 pages: expected 5"):
        pages.page_summaries(k, hi, lo, 16, True, 0, 5)
    with pytest.raises(ValueError, match="n_sinks = 16: expected 0 to page - 1 = 15"):
        pages.page_summaries(k, hi, lo, 16, True, 0, 4, 16)
    with pytest.raises(ValueError, match="last_page = 4: k has 60 rows"):
        pages.page_summaries(k[:, :, :60], hi, lo, 16, True, 0, 4)
