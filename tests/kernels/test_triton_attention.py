"""Triton's decode attention against numpy, on awkward sizes; NaN lies wherever nothing may look."""

import numpy as np
import pytest
import torch
from sweeps import sweep

from sparsekv_cli.cpu.attention.decode import attend_rows_ref
from sparsekv_cli.kernels.attention import decode
from sparsekv_cli.kernels.attention.arrivals import NONE_ARRIVED, none_arrived
from sparsekv_cli.kernels.attention.merge import merge, merge_ref
from sparsekv_cli.kernels.attention.rows import NewRow

# (H, G, d, d_v)
GEOMETRIES = [(1, 1, 64, 64), (9, 3, 64, 64), (4, 1, 80, 48), (8, 1, 128, 128)]


def cache_of(sizes, n_kv_head, d, d_v, device, seed=0):
    """k f16 (B, G, capacity, d), v, as views of token-major arrays; NaN behind each sequence."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for width in (d, d_v):
        x = torch.randn(len(sizes), max(sizes) + 5, n_kv_head, width, generator=generator).half()
        for b, n in enumerate(sizes):
            x[b, n:] = torch.nan
        made.append(x.to(device).transpose(1, 2))
    return made


def queries(n_batch, n_head, d, device, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(n_batch, n_head, d, generator=generator).to(device)


def take_newest(k, v, sizes):
    """The last row of each sequence as a step has it, f32; NaN lies in its place then."""
    rows = torch.arange(len(sizes), device=k.device)
    last = torch.tensor(sizes, device=k.device) - 1
    new = NewRow(*(x[rows, :, last].float().contiguous() for x in (k, v)))
    for x in (k, v):
        x[rows, :, last] = torch.nan
    return new


def filled(*shape, device):
    return torch.full(shape, torch.nan, device=device)


def expected_of(q, k, v, lists, scale):
    """lists: one int array a head, a sequence; f64 (B, H, d_v) and log-sum-exp (B, H)."""
    out, lse = [], []
    for b, rows in enumerate(lists):
        qb, kb, vb = (x[b].float().cpu().numpy() for x in (q, k, v))
        out.append(attend_rows_ref(qb, kb, vb, rows, scale))
        group = len(qb) // len(kb)
        scores = [scale * kb[h // group, row] @ qb[h] for h, row in enumerate(rows)]
        lse.append([np.logaddexp.reduce(s) for s in scores])
    return np.stack(out), np.array(lse)


def assert_close(actual, expected, tolerance=1e-3):
    np.testing.assert_allclose(actual.cpu().numpy(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "d_v"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("sizes", [[1], [64, 15, 65], [257, 63]])
def test_attend_dense(n_head, n_kv_head, d, d_v, sizes, device):
    k, v = cache_of(sizes, n_kv_head, d, d_v, device)
    q = queries(len(sizes), n_head, d, device)
    n = torch.tensor(sizes, dtype=torch.int32, device=device)
    n_max = max(sizes) + 70  # grids are made for more rows than there are
    out = filled(len(sizes), n_head, d_v, device=device)
    lse = filled(len(sizes), n_head, device=device)
    scratch = decode.attend_scratch(len(sizes), n_head, n_kv_head, d, d_v, n_max, q.device)
    for x in scratch:
        x.fill_(torch.nan)
    lists = [[np.arange(size)] * n_head for size in sizes]
    wanted, wanted_lse = expected_of(q, k, v, lists, d**-0.5)
    whole = k.clone(), v.clone()
    for is_new in (False, True):
        new = take_newest(k, v, sizes) if is_new else None
        decode.attend_dense(q, k, v, n, n_max, d**-0.5, out, lse, scratch, new=new)
        assert_close(out, wanted)
        assert_close(lse, wanted_lse, 1e-4)
        out.fill_(torch.nan)
    for x, expected in zip((k, v), whole, strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "d_v"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("a_head", [False, True])
@pytest.mark.parametrize("sizes", [[1], [20, 140, 5]])
def test_attend_rows(n_head, n_kv_head, d, d_v, a_head, sizes, device):
    k, v = cache_of(sizes, n_kv_head, d, d_v, device)
    q = queries(len(sizes), n_head, d, device)
    n_list = n_head if a_head else n_kv_head
    rng = np.random.default_rng(len(sizes))
    idx = torch.full((len(sizes), n_list, 140), 1 << 30, dtype=torch.int32)
    counts = torch.empty(len(sizes), n_list, dtype=torch.int32)
    lists = []
    for b, size in enumerate(sizes):
        rows = [rng.permutation(size)[: rng.integers(1, size + 1)] for _ in range(n_list)]
        rows[0] = rng.permutation(size)[: min(size, 139)]
        for u, row in enumerate(rows):
            idx[b, u, : len(row)] = torch.from_numpy(row)
            counts[b, u] = len(row)
        lists.append([rows[h * n_list // n_head] for h in range(n_head)])
    lse = filled(len(sizes), n_head, device=device)
    out = decode.attend_rows(q, k, v, idx.to(device), counts.to(device), d**-0.5, lse=lse)
    wanted, wanted_lse = expected_of(q, k, v, lists, d**-0.5)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse, 1e-4)


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "d_v"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("a_head", [False, True])
def test_the_last_program_of_a_list_merges(n_head, n_kv_head, d, d_v, a_head, device, monkeypatch):
    """It gives what a launch of its own gives, and every launch leaves the counts as they were."""
    sizes = [20, 140, 9]
    k, v = cache_of(sizes, n_kv_head, d, d_v, device)
    q = queries(3, n_head, d, device)
    n_list = n_head if a_head else n_kv_head
    idx = torch.arange(140, dtype=torch.int32, device=device).repeat(3, n_list, 1)
    counts = torch.tensor(sizes, dtype=torch.int32, device=device)[:, None].repeat(1, n_list)
    counts[0, -1] = 0
    merges = []
    merge = decode.merge
    monkeypatch.setattr(decode, "merge", lambda *args: merges.append(1) or merge(*args))
    wanted = decode.attend_rows(q, k, v, idx, counts, d**-0.5)
    assert merges == [1]
    arrived = none_arrived(3, n_list + 1, torch.device(device))
    for _ in range(2):
        out = filled(3, n_head, d_v, device=device)
        decode.attend_rows(q, k, v, idx, counts, d**-0.5, out, arrived=arrived)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
        assert (arrived == NONE_ARRIVED).all()
    assert merges == [1]
    monkeypatch.setattr(decode, "MERGED", 1)  # more pieces than that
    decode.attend_rows(q, k, v, idx, counts, d**-0.5, arrived=arrived)
    assert merges == [1, 1]


@pytest.mark.parametrize("programs", [1, 7])
def test_programs_that_loop_over_many_tiles(programs, device, monkeypatch):
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    n_head, n_kv_head, d, sizes = 6, 2, 64, (1000, 130)
    k, v = cache_of(sizes, n_kv_head, d, d, device)
    q = queries(2, n_head, d, device)
    n = torch.tensor(sizes, dtype=torch.int32, device=device)
    out = decode.attend_dense(q, k, v, n, 1000, 0.125)
    assert_close(
        out, expected_of(q, k, v, [[np.arange(size)] * n_head for size in sizes], 0.125)[0]
    )
    rows = torch.arange(1000, dtype=torch.int32, device=device).flip(0).expand(2, 2, -1)
    counts = torch.tensor([[1000, 3], [0, 0]], dtype=torch.int32, device=device)
    out = decode.attend_rows(q, k, v, rows.contiguous(), counts, 0.125)[:1]
    lists = [[np.arange(1000)] * 3 + [np.arange(997, 1000)] * 3]
    assert_close(out, expected_of(q, k, v, lists, 0.125)[0])


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "d_v"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("sizes", [[4], [0, 3], [257, 63]])
def test_what_was_attended_elsewhere_is_taken_in(n_head, n_kv_head, d, d_v, sizes, device):
    """Some heads have seen rows elsewhere, some none, and one so much that these do not count."""
    k, v = cache_of([size + 40 for size in sizes], n_kv_head, d, d_v, device)
    q = queries(len(sizes), n_head, d, device)
    n = torch.tensor(sizes, dtype=torch.int32, device=device)
    elsewhere = [[np.arange(size, size + 40)] * n_head for size in sizes]
    lists = [[np.arange(size + 40)] * n_head for size in sizes]
    out, lse = (torch.from_numpy(x).float() for x in expected_of(q, k, v, elsewhere, d**-0.5))
    wanted, wanted_lse = expected_of(q, k, v, lists, d**-0.5)
    lse[0, 0] = 1e30
    wanted[0, 0], wanted_lse[0, 0] = out[0, 0], 1e30
    if n_head > 1 and sizes[0]:
        lse[0, 1], out[0, 1] = -torch.inf, torch.nan
        only = expected_of(q[:1], k[:1], v[:1], [[np.arange(sizes[0])] * n_head], d**-0.5)
        wanted[0, 1], wanted_lse[0, 1] = only[0][0, 1], only[1][0, 1]
    others = decode.Attended(out.to(device), lse.to(device))
    both = filled(len(sizes), n_head, device=device)
    found = decode.attend_dense(q, k, v, n, max(*sizes, 4), d**-0.5, lse=both, others=others)
    assert_close(found, wanted)
    assert_close(both, wanted_lse, 1e-4)
    assert (found[0, 0] == others.out[0, 0]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_queries(dtype, device):
    k, v = cache_of([100], 2, 64, 64, device)
    q = queries(1, 4, 64, device).to(dtype)
    n = torch.tensor([100], dtype=torch.int32, device=device)
    out = decode.attend_dense(q, k, v, n, 100, 0.125)
    assert_close(out, expected_of(q, k, v, [[np.arange(100)] * 4], 0.125)[0])


def test_large_scores_keep_their_digits(device):
    """Scores of several hundred, as keys with large biases give, need q to more than f16."""
    k, v = cache_of([200], 1, 128, 64, device)
    q = 20 * queries(1, 4, 128, device)
    n = torch.tensor([200], dtype=torch.int32, device=device)
    lse = filled(1, 4, device=device)
    out = decode.attend_dense(q, k, v, n, 200, 1.0, lse=lse)
    wanted, wanted_lse = expected_of(q, k, v, [[np.arange(200)] * 4], 1.0)
    assert wanted_lse.max() > 1000
    assert_close(out, wanted, 2e-3)
    assert_close(lse, wanted_lse, 1e-5)


@pytest.mark.parametrize("n_piece", [1, 2, 9])
def test_merge_is_attention_over_the_union(n_piece, device):
    n_head, n_kv_head, d, n = 4, 2, 64, 100
    k, v = cache_of([n, n], n_kv_head, d, d, device)
    q = queries(2, n_head, d, device)
    outs, lses = (
        filled(n_piece, 2, n_head, d, device=device),
        filled(n_piece, 2, n_head, device=device),
    )
    parts = np.array_split(np.random.default_rng(0).permutation(n), n_piece)
    for piece, part in enumerate(parts):
        rows = torch.from_numpy(part).int().to(device).expand(2, n_kv_head, -1).contiguous()
        counts = torch.full((2, n_kv_head), len(part), dtype=torch.int32, device=device)
        decode.attend_rows(q, k, v, rows, counts, 0.125, outs[piece], lses[piece])
    lse = filled(2, n_head, device=device)
    out = merge(outs, lses, lse=lse)
    wanted, wanted_lse = expected_of(q, k, v, [[np.arange(n)] * n_head] * 2, 0.125)
    assert_close(out, wanted)
    assert_close(lse, wanted_lse, 1e-4)
    by_reference, its_lse = merge_ref(outs, lses)
    assert_close(out, by_reference.cpu().numpy(), 1e-5)
    assert_close(lse, its_lse.cpu().numpy(), 1e-5)


def test_pieces_without_rows_count_for_nothing(device):
    k, v = cache_of([30], 1, 64, 64, device)
    q = queries(1, 2, 64, device)
    idx = torch.arange(30, dtype=torch.int32, device=device).expand(1, 1, 30).contiguous()
    outs, lses = filled(2, 1, 2, 64, device=device), filled(2, 1, 2, device=device)
    for piece, count in enumerate((0, 30)):
        counts = torch.full((1, 1), count, dtype=torch.int32, device=device)
        decode.attend_rows(q, k, v, idx, counts, 0.125, outs[piece], lses[piece])
    assert (outs[0] == 0).all() and (lses[0] == -torch.inf).all()
    outs[0] = torch.nan
    merged = merge(outs, lses)
    torch.testing.assert_close(merged, outs[1])
    torch.testing.assert_close(merged, merge_ref(outs, lses)[0].float())
    lse = filled(1, 2, device=device)
    nothing = merge(outs[:1], lses[:1], lse=lse)
    assert (nothing == 0).all() and (lse == -torch.inf).all()


def test_wrong_arguments_are_named(device):
    k, v = cache_of([20], 2, 64, 64, device)
    q = queries(1, 4, 64, device)
    n = torch.tensor([20], dtype=torch.int32, device=device)
    idx = torch.zeros(1, 3, 5, dtype=torch.int32, device=device)
    counts = torch.zeros(1, 3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"k is torch\.float32: expected torch\.float16"):
        decode.attend_dense(q, k.float(), v, n, 20, 1.0)
    with pytest.raises(ValueError, match=r"v has strides .* contiguous in its last dimension"):
        decode.attend_dense(q, k, v[..., ::2], n, 20, 1.0)
    with pytest.raises(ValueError, match=r"n has shape \(1,\): expected \(2\)"):
        decode.attend_dense(torch.cat([q, q]), k, v, n, 20, 1.0)
    with pytest.raises(ValueError, match="idx has 3 lists: expected 4 or 2"):
        decode.attend_rows(q, k, v, idx, counts, 1.0)
    with pytest.raises(ValueError, match="q has 3 heads: expected a multiple of k's 2"):
        decode.attend_dense(q[:, :3].contiguous(), k, v, n, 20, 1.0)
