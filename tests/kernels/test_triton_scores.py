"""Scores of all rows, and the rows of a sliding window, against plain torch and Python."""

import numpy as np
import pytest
import torch
from test_triton_attention import take_newest

from sparsekv_cli.kernels.attention import recent
from sparsekv_cli.kernels.attention.scores import score_rows


@pytest.mark.parametrize(
    ("n_head", "n_kv_head", "d"), [(1, 1, 64), (9, 3, 64), (4, 1, 80), (8, 1, 128)]
)
@pytest.mark.parametrize("sizes", [[1], [63, 257], [64, 15, 65]])
def test_score_rows(n_head, n_kv_head, d, sizes, device):
    generator = torch.Generator().manual_seed(d)
    q = 3 * torch.randn(len(sizes), n_head, d, generator=generator)
    k = torch.randn(len(sizes), max(sizes) + 3, n_kv_head, d, generator=generator).half()
    for b, n in enumerate(sizes):
        k[b, n:] = torch.nan
    out = torch.full((len(sizes), n_head, max(sizes) + 40), 7.0, device=device)
    n = torch.tensor(sizes, dtype=torch.int32, device=device)
    wide = k.double().repeat_interleave(n_head // n_kv_head, 2)
    keys = k.to(device).transpose(1, 2)
    values = keys[..., :48].clone()
    whole = keys.clone(), values.clone()
    for is_new in (False, True):
        new = take_newest(keys, values, sizes) if is_new else None
        score_rows(q.to(device), keys, n, max(sizes) + 33, 0.125, out, new, values)
        for b, size in enumerate(sizes):
            wanted = 0.125 * torch.einsum("hd,nhd->hn", q[b].double(), wide[b, :size])
            np.testing.assert_allclose(out[b, :, :size].cpu(), wanted, atol=1e-5)
            assert (out[b, :, size:] == 7).all()
        out.fill_(7)
    for x, expected in zip((keys, values), whole, strict=True):
        torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n_kv_head", "d", "d_v"), [(1, 64, 64), (3, 80, 48)])
@pytest.mark.parametrize(("sizes", "budget"), [([300, 350], [255, 290]), ([5], [1])])
def test_recent_rows(n_kv_head, d, d_v, sizes, budget, device):
    k, v = (torch.randn(len(sizes), n_kv_head, 360, w, device=device).half() for w in (d, d_v))
    whole = k.clone(), v.clone()
    new = take_newest(k, v, sizes)
    n, kept = (torch.tensor(x, dtype=torch.int32, device=device) for x in (sizes, budget))
    idx, counts = recent.recent_rows(n, kept, max(budget) + 7, 4, new, k, v)
    for b, rows in enumerate(recent.recent_rows_ref(n, kept, 4)):
        for g in range(n_kv_head):
            assert idx[b, g, : int(counts[b, g])].tolist() == rows
    assert torch.equal(k, whole[0]) and torch.equal(v, whole[1])
