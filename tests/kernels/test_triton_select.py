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
    select.select_largest(scores, n, n_max, k, k_max, n_first, n_last, idx=idx, counts=counts)
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
    largest(rows, sizes, [10001, 9000], device)


@pytest.mark.parametrize(("n_first", "n_last"), [(0, 0), (8, 0), (5, 1), (0, 8191), (9, 8192)])
@pytest.mark.parametrize("k", [1, 9, 8193])
def test_groups_at_both_ends(n_first, n_last, k, device):
    """Rows that are not to choose from lie in the same groups as others, and are larger."""
    sizes = [8200, 8193, 8196]
    scores = long_rows("ties", 8200)[:, :1].repeat(2, axis=0)[:3]
    for of_sequence, n in zip(scores, sizes, strict=True):
        of_sequence[:, :n_first] = of_sequence[:, n - n_last :] = 9
    ks = [k + n_last, k, max(0, k + n_last - 1)]
    largest(rows_of(scores, sizes, device), sizes, ks, device, n_first, n_last)


@pytest.mark.parametrize("size", [4, 8, 16, 32])
def test_groups_of_every_size(size, device, monkeypatch):
    monkeypatch.setattr(select, "SMALLEST", size)
    monkeypatch.setattr(select, "LARGEST", size)
    for kind in ("random", "equal"):
        rows = rows_of(long_rows(kind, 8300), [8300, 8211], device)
        largest(rows, [8300, 8211], [70, 300], device, 4, 16)


def test_the_size_of_a_group_grows_with_the_row():
    device = torch.device("cpu")
    assert select.empty_tops(1, 2, 8192, 512, device) is None
    for n, k, size in ((8193, 512, 4), (32768, 512, 8), (131072, 512, 16), (1 << 20, 64, 32)):
        tops = select.empty_tops(1, 2, n, k, device)
        assert tops.size == size and tops.keys.shape == (1, 2, -(-n // size))


@pytest.mark.parametrize("n", [1, 5, 700])
def test_few_rows_under_the_bound_of_many(n, device):
    scores = np.random.default_rng(n).standard_normal((1, 2, n)).astype(np.float32)
    largest(rows_of(scores, [n], device, slack=9000), [n], [100], device, 4, 16, n_max=8500 + n)


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
