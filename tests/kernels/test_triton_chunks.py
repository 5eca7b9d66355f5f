"""FASA's kernels against plain torch, on awkward sizes; what lies beyond n is NaN."""

import pytest
import torch
from sweeps import sweep
from test_triton_attention import take_newest

from sparsekv_cli.kernels.fasa import chunks

GEOMETRIES = [(2, 2, 64, 16), (9, 3, 64, 20), (8, 2, 80, 20), (8, 1, 128, 64), (3, 1, 80, 80)]


def layer(n_head, n_kv_head, d, n_dim, capacity, ns, device):
    """q, K (NaN behind n), V, the order of the dims (G, d), n; f16 values."""
    torch.manual_seed(0)
    n_batch = len(ns)
    q = torch.randn(n_batch, n_head, d)
    k, v = (torch.randn(n_batch, n_kv_head, capacity, d).half() for _ in range(2))
    for b, n in enumerate(ns):
        k[b, :, n:] = v[b, :, n:] = torch.nan
    order = torch.stack([torch.randperm(d) for _ in range(n_kv_head)]).int()
    n = torch.tensor(ns, dtype=torch.int32)
    return (x.to(device) for x in (q, k, v, order, n))


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "n_dim"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("ns", [[1], [65, 257, 15], [1000]])
def test_score_chunks(n_head, n_kv_head, d, n_dim, ns, device):
    capacity, n_max = 1024, max(ns) + 3
    q, k, v, order, n = layer(n_head, n_kv_head, d, n_dim, capacity, ns, device)
    dims = order[:, :n_dim]
    dom = torch.full((len(ns), n_kv_head, n_dim, capacity), torch.nan, device=device).half()
    chunks.build_chunks(k, 0, max(ns) - 1, dims, dom)
    out = torch.full((len(ns), n_head, n_max), torch.nan, device=device)
    whole = k.clone(), v.clone()
    new = take_newest(k, v, ns)
    for k_dims in (None, order[:, n_dim:]):  # variants c and m
        into = [k, v]
        if k_dims is not None:
            into = [torch.full_like(x, torch.nan, device="cpu") for x in (k[..., n_dim:], v)]
            into = [x.pin_memory() for x in into] if device == "cuda" else into
        for b, n_b in enumerate(ns):
            dom[b, :, :, n_b - 1] = torch.nan
        chunks.score_chunks(q, dims, dom, n, n_max, out.fill_(torch.nan), new, into, k_dims)
        if device == "cuda":
            torch.cuda.synchronize()  # the host reads what the kernel wrote over the bus
        of_row = new.k
        if k_dims is not None:
            of_row = new.k.gather(2, k_dims.long()[None].expand(len(ns), -1, -1))
        for b, n_b in enumerate(ns):
            assert torch.equal(into[0][b, :, n_b - 1].to(device), of_row[b].half())
            assert torch.equal(into[1][b, :, n_b - 1].to(device), new.v[b].half())
    for x, wanted in zip((k, v), whole, strict=True):
        torch.testing.assert_close(x, wanted, rtol=0, atol=0, equal_nan=True)
    expected = chunks.score_chunks_ref(q, dims, dom)
    for b, n_b in enumerate(ns):
        torch.testing.assert_close(
            out[b, :, :n_b].double(), expected[b, :, :n_b], rtol=1e-5, atol=2e-5
        )
        assert out[b, :, n_b:].isnan().all()
        # and the copy is K's
        wide = k[b].gather(2, dims.long()[:, None].expand(-1, capacity, -1)).transpose(1, 2)
        assert torch.equal(dom[b, :, :, :n_b], wide[:, :, :n_b])


def test_wrong_arguments_are_refused(device):
    q, _, _, order, n = layer(4, 2, 64, 16, 64, [5], device)
    dom = torch.zeros(1, 2, 16, 64, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="dom has room for 64 tokens: expected 65 or more"):
        chunks.score_chunks(q, order[:, :16], dom, n, 65)
    with pytest.raises(ValueError, match="dom has shape"):
        chunks.score_chunks(q, order[:, :8], dom, n, 5)
