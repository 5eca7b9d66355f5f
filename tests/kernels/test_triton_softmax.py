"""Attention with softcaps, sinks and windows against plain numpy, in steps and in prefills."""

import numpy as np
import pytest
import torch
from sweeps import sweep

from sparsekv_cli.kernels.attention import decode, prefill
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.attention.softmax import RingWindow, ScoreSoftmax

# (H, G, d, d_v)
GEOMETRIES = [(6, 3, 64, 64), (4, 1, 80, 48), (2, 2, 256, 256)]
SOFTMAXES = {
    "plain": (0.0, False),
    "capped": (2.0, False),
    "sinks": (0.0, True),
    "both": (0.5, True),
}


def normal(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def softmax_for(name, n_head, d, device):
    softcap, has_sinks = SOFTMAXES[name]
    sinks = 2 * normal(9, n_head).to(device) if has_sinks else None
    return ScoreSoftmax(d**-0.5, softcap, sinks)


def attended(q, k, v, softmax, h):
    """One query f64 (d,) of head h on rows k, v: its attention and the log of the sum."""
    scores = softmax.scale * (k.double().numpy() @ q.double().numpy())
    if softmax.softcap:
        scores = softmax.softcap * np.tanh(scores / softmax.softcap)
    sink = -np.inf if softmax.sinks is None else float(softmax.sinks[h])
    lse = np.logaddexp.reduce([sink, *scores])
    return np.exp(scores - lse) @ v.double().numpy(), lse


def expected_of(q, k, v, lists, softmax):
    """q (B, H, d); lists: rows for each sequence and head. f64 (B, H, d_v) and (B, H)."""
    q, k, v = (x.float().cpu() for x in (q, k, v))
    softmax = softmax._replace(sinks=None if softmax.sinks is None else softmax.sinks.cpu())
    group = q.shape[1] // k.shape[1]
    made = [
        [attended(q[b, h], k[b, h // group, rows], v[b, h // group, rows], softmax, h)
         for h, rows in enumerate(of_heads)]
        for b, of_heads in enumerate(lists)
    ]  # fmt: skip
    outs = np.array([[out for out, _ in of_heads] for of_heads in made])
    return outs, np.array([[lse for _, lse in of_heads] for of_heads in made])


def close(found, expected, tolerance=1e-3):
    np.testing.assert_allclose(found.float().cpu().numpy(), expected, tolerance, tolerance)


@pytest.mark.parametrize(("n_head", "n_kv", "d", "d_v"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("window", [0, 1, 50])
def test_steps(n_head, n_kv, d, d_v, name, window, device):
    """The rows of a window lie in a ring of 70 slots, which few rows have not filled yet."""
    sizes, n_slot = (1, 69, 71, 205), 70
    softmax = softmax_for(name, n_head, d, device)
    q = 3 * normal(0, len(sizes), n_head, d)
    k, v = (normal(i, len(sizes), n_kv, max(sizes), width) for i, width in ((1, d), (2, d_v)))
    k, v = k.half(), v.half()
    lists = [[np.arange(max(0, n - window if window else 0), n)] * n_head for n in sizes]
    wanted, wanted_lse = expected_of(q, k, v, lists, softmax)
    capacity = n_slot if window else max(sizes) + 3
    rings = [torch.full((len(sizes), n_kv, capacity, x.shape[3]), torch.nan).half() for x in (k, v)]
    for ring, x in zip(rings, (k, v), strict=True):
        for b, n in enumerate(sizes):
            for row in range(n - 1):
                ring[b, :, row % n_slot if window else row] = x[b, :, row]
    ring_k, ring_v = (ring.to(device) for ring in rings)
    places = torch.tensor(sizes) - 1
    new = NewRow(*(x[torch.arange(len(sizes)), :, places].float().to(device) for x in (k, v)))
    n = torch.tensor(sizes, dtype=torch.int32, device=device)
    lse = torch.full((len(sizes), n_head), torch.nan, device=device)
    of = RingWindow(window, n_slot) if window else None
    n_max = window or max(sizes)
    for given in (new, None):  # the second time the new rows are there already
        found = decode.attend_dense(
            q.to(device), ring_k, ring_v, n, n_max, softmax, lse=lse, new=given, window=of
        )
        close(found, wanted)
        close(lse, wanted_lse, 1e-4)


@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("a_head", [False, True])
@pytest.mark.parametrize("programs", [1, 792])
def test_lists(name, a_head, programs, device, monkeypatch):
    monkeypatch.setattr(decode, "PROGRAMS", programs)
    n_head, n_kv, d = 6, 3, 64
    n_list, softmax = (n_head if a_head else n_kv), softmax_for(name, n_head, d, device)
    q, k, v = 3 * normal(0, 2, n_head, d), *(normal(i, 2, n_kv, 300, d).half() for i in (1, 2))
    rng = np.random.default_rng(4)
    rows = [[rng.permutation(300)[: 130 if u else 1] for u in range(n_list)] for _ in range(2)]
    idx = torch.zeros(2, n_list, 130, dtype=torch.int32)
    counts = torch.tensor([[len(x) for x in of] for of in rows], dtype=torch.int32)
    for b, of in enumerate(rows):
        for u, x in enumerate(of):
            idx[b, u, : len(x)] = torch.from_numpy(x)
    lists = [[of[h * n_list // n_head] for h in range(n_head)] for of in rows]
    wanted, wanted_lse = expected_of(q, k, v, lists, softmax)
    lse = torch.full((2, n_head), torch.nan, device=device)
    given = (x.to(device) for x in (q, k, v, idx, counts))
    close(decode.attend_rows(*given, softmax, lse=lse), wanted)
    close(lse, wanted_lse, 1e-4)


@pytest.mark.parametrize("name", SOFTMAXES)
def test_sinks_are_added_once_to_what_was_attended_elsewhere(name, device):
    n_head, n_kv, d = 4, 2, 64
    softmax = softmax_for(name, n_head, d, device)
    q, k, v = 3 * normal(0, 1, n_head, d), *(normal(i, 1, n_kv, 40, d).half() for i in (1, 2))
    plain = softmax._replace(sinks=None)
    out, lse = expected_of(q, k, v, [[np.arange(10, 40)] * n_head], plain)
    out[0, 1], lse[0, 1] = np.nan, -np.inf  # nothing was attended for this head
    lse[0, 2] = 1e30  # and this one does not count
    lists = [[np.arange(40), np.arange(10), np.arange(40), np.arange(40)]]
    wanted, _ = expected_of(q, k, v, lists, softmax)
    wanted[0, 2] = out[0, 2]
    others = decode.Attended(*(torch.from_numpy(x).float().to(device) for x in (out, lse)))
    n = torch.tensor([10], dtype=torch.int32, device=device)
    given = (x.to(device) for x in (q, k, v))
    close(decode.attend_dense(*given, n, 10, softmax, others=others), wanted)


@pytest.mark.parametrize(("n_head", "n_kv", "d", "d_v"), sweep(GEOMETRIES, fast=1))
@pytest.mark.parametrize("name", SOFTMAXES)
@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize(("n_new", "n"), [(1, 1), (1, 90), (150, 150), (70, 203)])
def test_prefills(n_head, n_kv, d, d_v, name, window, n_new, n, device):
    softmax = softmax_for(name, n_head, d, device)
    q = 3 * normal(0, n_head, n_new, d)
    k, v = (normal(i, n_kv, n + 4, width).half() for i, width in ((1, d), (2, d_v)))
    k[:, n:], v[:, n:] = torch.nan, torch.nan  # behind the rows
    ends = range(n - n_new + 1, n + 1)
    lists = [[np.arange(max(0, end - window if window else 0), end)] * n_head for end in ends]
    wanted, _ = expected_of(
        q.transpose(0, 1), *(x[None].expand(n_new, -1, -1, -1) for x in (k, v)), lists, softmax
    )
    k, v = (x.to(device)[:, :n] for x in (k, v))
    found = prefill.attend_causal(q.to(device), k, v, softmax, window)
    close(found.transpose(0, 1), wanted, 2e-4)
    found = prefill.attend_causal(q.bfloat16().to(device), k, v, softmax, window)
    assert found.dtype == torch.bfloat16 and found.isfinite().all()


def test_wrong_arguments_are_refused(device):
    q, k = torch.zeros(2, 8, 64, device=device), torch.zeros(1, 4, 64, device=device).half()
    with pytest.raises(ValueError, match="8 queries of 4 rows"):
        prefill.attend_causal(q, k, k, 1.0)
    with pytest.raises(ValueError, match="sinks has shape"):
        prefill.attend_causal(q[:, :2], k, k, ScoreSoftmax(1.0, 0.0, torch.zeros(3, device=device)))
