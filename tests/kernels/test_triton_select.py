"""Scores and the selection of the k largest in Triton, against numpy: ties, borders, long rows."""

import numpy as np
import pytest
import torch

from sparsekv_cli.cpu.attention.select import select_rows_ref
from sparsekv_cli.kernels.attention import select


def rows_of(scores, sizes, device, slack=3):
    """f32 (B, U, n_max + slack) with NaN behind each sequence."""
    out = torch.full((len(sizes), scores.shape[1], max(sizes) + slack), torch.nan)
    for b, n in enumerate(sizes):
        out[b, :, :n] = torch.from_numpy(scores[b, :, :n])
    return out.to(device)


def largest(scores, sizes, ks, device, n_first=0, n_last=0, n_max=None, k_max=None):
    """The rows chosen, as lists; what is not to be written or looked at holds nonsense."""
    n = torch.tensor(sizes, dtype=torch.int32, device=device)
    k = torch.tensor(ks, dtype=torch.int32, device=device)
    n_max, k_max = n_max or max(sizes), k_max or max(ks)
    shape = (*scores.shape[:2], n_first + max(k_max, n_last) + 2)
    idx = torch.full(shape, -7, dtype=torch.int32, device=device)
    counts = torch.full(shape[:2], -7, dtype=torch.int32, device=device)
    scratch = select.select_scratch(shape[0] * shape[1], n_max, k_max, n.device)
    for x in scratch:
        x.fill_(-(2**30))
    select.select_largest(
        scores, n, n_max, k, k_max, n_first, n_last, idx=idx, counts=counts, scratch=scratch
    )
    chosen = []
    for of_rows, of_counts in zip(idx.tolist(), counts.tolist(), strict=True):
        chosen.append([row[:count] for row, count in zip(of_rows, of_counts, strict=True)])
        assert all(
            entry == -7
            for row, count in zip(of_rows, of_counts, strict=True)
            for entry in row[count:]
        )
    wanted = select.select_largest_ref(scores, n, k, n_first, n_last)
    assert chosen == wanted
    return chosen


@pytest.mark.parametrize("sizes", [[1], [15, 64], [63, 65, 1000], [257]])
@pytest.mark.parametrize("values", [3, 10**6])
def test_short_rows(sizes, values, device):
    scores = np.random.default_rng(sizes[0]).integers(-values, values, (len(sizes), 3, max(sizes)))
    rows = rows_of(scores.astype(np.float32), sizes, device)
    for share in (0, 0.1, 1):
        largest(rows, sizes, [int(share * n) for n in sizes], device, k_max=max(1, max(sizes)))
    largest(rows, sizes, [7 * b + 2 for b in range(len(sizes))], device, n_max=max(sizes) + 2)


@pytest.mark.parametrize(
    ("n", "n_first", "n_last", "k"),
    [(100, 4, 16, 30), (100, 4, 16, 16), (100, 4, 96, 96), (100, 0, 1, 1), (65, 4, 1, 61)],
)
def test_first_and_last_rows_are_chosen_as_on_the_host(n, n_first, n_last, k, device):
    scores = np.random.default_rng(n + k).standard_normal((2, 3, n)).astype(np.float32)
    chosen = largest(rows_of(scores, [n, n], device), [n, n], [k, k], device, n_first, n_last)
    for of_sequence, of_scores in zip(chosen, scores, strict=True):
        np.testing.assert_array_equal(
            of_sequence, select_rows_ref(of_scores, n, n_first, n_last, k)
        )


@pytest.mark.parametrize("k", [0, 3])
def test_rows_that_must_be_chosen_are_even_if_k_is_less(k, device):
    scores = np.random.default_rng(0).standard_normal((2, 1, 50)).astype(np.float32)
    chosen = largest(rows_of(scores, [50, 5], device), [50, 5], [k, k], device, 4, 9)
    assert chosen == [[[0, 1, 2, 3, *range(41, 50)]], [[0, 1, 2, 3, 4]]]


EXTREMES = [-np.inf, -3.4e38, -1, -1e-38, -1e-45, -0.0, 0.0, 1e-45, 1e-38, 1, 3.4e38, np.inf]


def test_extreme_scores(device):
    scores = np.random.default_rng(0).permutation(np.array(EXTREMES * 3, np.float32))[None, None]
    for k in range(1, 36, 5):
        n = torch.tensor([36], dtype=torch.int32, device=device)
        budget = torch.tensor([k], dtype=torch.int32, device=device)
        idx, counts = select.select_largest(torch.from_numpy(scores).to(device), n, 36, budget, k)
        assert counts.item() == k
        chosen = np.sort(scores[0, 0, idx[0, 0].cpu().numpy()])
        np.testing.assert_array_equal(chosen, np.sort(scores[0, 0])[36 - k :])


def long_rows(kind, n):
    rng = np.random.default_rng(n)
    if kind == "random":
        return rng.standard_normal((2, 2, n)).astype(np.float32)
    if kind == "side by side":  # the best lie in few chunks, in ascending order
        return np.sort(rng.standard_normal((2, 2, n)).astype(np.float32), axis=2)
    if kind == "ties":
        return rng.integers(0, 3, (2, 2, n)).astype(np.float32)
    return np.zeros((2, 2, n), np.float32)


@pytest.mark.parametrize("kind", ["random", "side by side", "ties", "equal"])
def test_long_rows(kind, device):
    sizes = [10001, 9000]
    rows = rows_of(long_rows(kind, max(sizes)), sizes, device)
    largest(rows, sizes, [300, 77], device, 4, 16)
    largest(rows, sizes, [4000, 0], device)


@pytest.mark.parametrize("n", [1, 5, 700])
def test_few_rows_under_the_bound_of_many(n, device):
    scores = np.random.default_rng(n).standard_normal((1, 2, n)).astype(np.float32)
    largest(rows_of(scores, [n], device, slack=9000), [n], [100], device, 4, 16, n_max=8500 + n)


@pytest.mark.parametrize("n", [50, 8300])
def test_only_wanted_lists_are_written(n, device):
    scores = np.random.default_rng(n).standard_normal((1, 3, n)).astype(np.float32)
    rows, size = rows_of(scores, [n], device), torch.tensor([n], dtype=torch.int32, device=device)
    idx = torch.full((1, 3, 5), -7, dtype=torch.int32, device=device)
    counts = torch.full((1, 3), -7, dtype=torch.int32, device=device)
    wanted = torch.tensor([[0, 2, 0]], dtype=torch.int32, device=device)
    k = torch.tensor([5], dtype=torch.int32, device=device)
    select.select_largest(rows, size, n, k, 5, wanted=wanted, idx=idx, counts=counts)
    assert counts.tolist() == [[-7, 5, -7]] and (idx[0, ::2] == -7).all()
    assert idx[0, 1].tolist() == select.select_largest_ref(rows, size, k)[0][1]


def test_what_does_not_fit_the_registers_is_read_again(device, monkeypatch):
    monkeypatch.setattr(select, "REGISTERS", 1024)
    sizes = [9500]
    for kind in ("random", "ties"):
        largest(rows_of(long_rows(kind, 9500)[:1], sizes, device), sizes, [3000], device, 4, 16)


def test_wrong_arguments_are_named(device):
    scores = torch.zeros(1, 2, 50, device=device)
    n = torch.tensor([50], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="scores has 50 a row: expected 60 or more"):
        select.select_largest(scores, n, 60, n, 5)
    with pytest.raises(ValueError, match=r"k is torch\.int64: expected torch\.int32"):
        select.select_largest(scores, n, 50, n.long(), 5)
    with pytest.raises(ValueError, match="idx has room for 5 rows: expected 9"):
        select.select_largest(
            scores, n, 50, n, 5, n_first=4, idx=torch.zeros(1, 2, 5).int().to(device)
        )
