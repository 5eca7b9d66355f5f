"""FASA's kernels against plain torch, on awkward sizes; what lies beyond n is NaN."""

import pytest
import torch

attention = pytest.importorskip("sparsekv_cli.kernels.attention")
chunks = pytest.importorskip("sparsekv_cli.kernels.chunks")

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


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "n_dim"), GEOMETRIES)
@pytest.mark.parametrize("ns", [[1], [65, 257, 15], [1000]])
def test_score_chunks(n_head, n_kv_head, d, n_dim, ns, device):
    capacity, n_max = 1024, max(ns) + 3
    q, k, _, order, n = layer(n_head, n_kv_head, d, n_dim, capacity, ns, device)
    dims = order[:, :n_dim]
    dom = torch.full((len(ns), n_kv_head, n_dim, capacity), torch.nan, device=device).half()
    chunks.build_chunks(k, 0, max(ns) - 1, dims, dom)
    rows = torch.arange(len(ns), device=device)
    chunks.append_chunks(k[rows, :, n.long() - 1].float().contiguous(), dims, dom, n - 1)
    out = torch.full((len(ns), n_head, n_max), torch.nan, device=device)
    chunks.score_chunks(q, dims, dom, n, n_max, out)
    expected = chunks.score_chunks_ref(q, dims, dom)
    for b, n_b in enumerate(ns):
        torch.testing.assert_close(
            out[b, :, :n_b].double(), expected[b, :, :n_b], rtol=1e-5, atol=2e-5
        )
        assert out[b, :, n_b:].isnan().all()
        # and the copy is K's
        wide = k[b].gather(2, dims.long()[:, None].expand(-1, capacity, -1)).transpose(1, 2)
        assert torch.equal(dom[b, :, :, :n_b], wide[:, :, :n_b])


@pytest.mark.parametrize(("n_head", "n_kv_head", "m"), [(2, 2, 5), (9, 3, 64), (8, 1, 33)])
def test_unite_rows(n_head, n_kv_head, m, device):
    torch.manual_seed(1)
    n_batch, capacity = 2, 90
    idx = torch.stack([torch.randperm(capacity)[:m] for _ in range(n_batch * n_head)]).int()
    idx = idx.view(n_batch, n_head, m).to(device)
    counts = torch.randint(1, m + 1, (n_batch, n_head)).int()
    counts[0, 0], counts[1, 1] = m, 0
    seen = torch.full((n_batch, n_kv_head, capacity), -1, dtype=torch.int32, device=device)
    found = chunks.unite_rows(idx, counts.to(device), seen)
    assert (seen == -1).all()
    expected = chunks.unite_rows_ref(idx.cpu(), counts, n_kv_head)
    assert found.counts.flatten().tolist() == [len(rows) for rows in expected]
    for rows, wanted in zip(found.rows.flatten(0, 1).tolist(), expected, strict=True):
        assert rows[: len(wanted)] == wanted
    for b in range(n_batch):
        for h in range(n_head):
            places = found.places[b, h, : counts[b, h]].long()
            united = found.rows[b, h * n_kv_head // n_head]
            assert torch.equal(united[places], idx[b, h, : counts[b, h]])


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "n_dim"), GEOMETRIES)
def test_rows_of_the_host_are_attended_as_whole_ones(n_head, n_kv_head, d, n_dim, device):
    ns, capacity, m = [70, 33], 128, 21
    q, k, v, order, _ = layer(n_head, n_kv_head, d, n_dim, capacity, ns, device)
    pinned = device != "cpu"
    dom = torch.full((2, n_kv_head, n_dim, capacity), torch.nan, device=device).half()
    chunks.build_chunks(k, 0, max(ns), order[:, :n_dim], dom)
    rest = torch.full((2, n_kv_head, capacity, d - n_dim), torch.nan, pin_memory=pinned).half()
    values = torch.full((2, n_kv_head, capacity, d), torch.nan, pin_memory=pinned).half()
    if pinned:
        rest, values = rest.pin_memory(), values.pin_memory()
    for j in range(max(ns)):
        rows = k[:, :, j].float().contiguous(), v[:, :, j].float().contiguous()
        pos = torch.full((2,), j, dtype=torch.int32, device=device)
        chunks.append_rest(*rows, order[:, n_dim:], rest, values, pos)
    lists = [torch.randperm(n_b)[:m] for n_b in ns for _ in range(n_head)]
    idx = torch.stack(lists).int().view(2, n_head, m).to(device)
    counts = torch.full((2, n_head), m, dtype=torch.int32, device=device)
    seen = torch.full((2, n_kv_head, capacity), -1, dtype=torch.int32, device=device)
    union = chunks.unite_rows(idx, counts, seen)
    room = union.rows.shape[2]
    k_rows, v_rows = (
        torch.full((2, n_kv_head, room, d), torch.nan, device=device).half() for _ in range(2)
    )
    chunks.gather_split_rows(union, dom, rest, values, k_rows, v_rows)
    turned = q.gather(2, order.long().repeat_interleave(n_head // n_kv_head, 0).expand(2, -1, -1))
    found = attention.attend_rows(turned, k_rows, v_rows, union.places, counts, d**-0.5)
    expected = attention.attend_rows(q, k, v, idx, counts, d**-0.5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_wrong_arguments_are_refused(device):
    q, _, _, order, n = layer(4, 2, 64, 16, 64, [5], device)
    dom = torch.zeros(1, 2, 16, 64, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="dom has room for 64 tokens: expected 65 or more"):
        chunks.score_chunks(q, order[:, :16], dom, n, 65)
    with pytest.raises(ValueError, match="dom has shape"):
        chunks.score_chunks(q, order[:, :8], dom, n, 5)
