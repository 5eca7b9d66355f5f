"""SALS's kernels against the references of cpu/ and plain torch; what lies beyond n is NaN."""

import numpy as np
import pytest
import torch
from sweeps import sweep

from sparsekv_cli.cpu.sals import values as quantized_values
from sparsekv_cli.cpu.sals.latent import encode_ref, reconstruct_ref
from sparsekv_cli.cpu.sals.queries import brope_ref, damping, summed_ref
from sparsekv_cli.kernels.attention.arrivals import NONE_ARRIVED, none_arrived
from sparsekv_cli.kernels.attention.merge import merge
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.sals import attention as latent_attention
from sparsekv_cli.kernels.sals import latent
from sparsekv_cli.kernels.sals import scores as sals

# n_head, n_kv_head, d, d_v, n_rot, rank, score rank
GEOMETRIES = [
    (2, 2, 64, 64, 64, 32, 16),
    (9, 3, 64, 64, 64, 48, 24),
    (8, 2, 80, 80, 80, 40, 20),
    (4, 1, 128, 128, 128, 70, 33),
    (6, 2, 80, 64, 40, 160, 160),
]
FIRST = 4


def basis_of(geometry, device, rope_scale=1.1):
    """(basis, E, D, theta): an orthogonal basis with weights alike within a pair."""
    _, n_kv, d, _, n_rot, rank, _ = geometry
    rng = np.random.default_rng(3)
    vectors = np.linalg.qr(rng.standard_normal((n_kv * d, n_kv * d)))[0][:, :rank]
    weights = rng.uniform(0.3, 3, n_kv * d)
    theta = 1e4 ** (-np.arange(n_rot // 2) / (n_rot // 2))
    basis = latent.make_basis(vectors, weights, theta, rope_scale, n_kv, torch.device(device))
    return basis, weights[:, None] * vectors, vectors / weights[:, None], theta


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_keys_become_latents_and_back(geometry, device):
    _, n_kv, d, *_ = geometry
    basis, encode, decode, theta = basis_of(geometry, device)
    k = np.random.default_rng(0).standard_normal((n_kv, 33, d)).astype(np.float16)
    positions = np.arange(33) + 120_000  # angles that f32 has lost
    at = torch.from_numpy(positions).to(device)
    found = latent.encode_rows(torch.from_numpy(k).to(device), at, basis)
    expected = encode_ref(k, positions, encode, theta, 1.1)
    np.testing.assert_allclose(found.cpu(), expected, atol=3e-3 * np.abs(expected).max())
    back = latent.reconstruct_rows(found, at, basis)
    expected = reconstruct_ref(found.cpu().numpy(), positions, decode, theta, 1.1, n_kv)
    np.testing.assert_allclose(back.cpu(), expected, atol=3e-3 * np.abs(expected).max())


@pytest.mark.parametrize("bits", sweep([2, 4, 16], fast=1))
@pytest.mark.parametrize("d_v", [64, 80, 128, 20])
def test_values_are_packed_as_on_the_host(bits, d_v, device):
    values = np.random.default_rng(0).standard_normal((7, d_v)).astype(np.float16)
    values[0] = 0.5  # without a scale
    packed = latent.quantize_values(torch.from_numpy(values).to(device), bits)
    size = quantized_values.head_bytes(d_v, bits)
    assert packed.shape == (7, size) and latent.head_bytes(d_v, bits) == size
    expected = np.zeros((7, size), np.uint8)
    for row, out in zip(values.astype(np.float32), expected, strict=True):
        wide = np.zeros(-(-d_v // 16) * 16, np.float32)
        wide[:d_v] = row
        quantized_values.quantize_head(wide, d_v, bits, out.ctypes.data)
    np.testing.assert_array_equal(packed.cpu(), expected)
    found = latent.dequantize_values(packed, d_v, bits)
    wanted = values if bits == 16 else quantized_values.dequantize_ref(
        *quantized_values.quantize_ref(values.astype(np.float32), bits)
    )  # fmt: skip
    np.testing.assert_allclose(found.cpu().float(), wanted, atol=2e-3)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("bits", sweep([2, 4, 16], fast=1))
def test_append_latent(geometry, bits, device):
    """Rows one by one fill latents, values and the ring as all at once do."""
    _, n_kv, d, d_v, _, rank, _ = geometry
    basis, encode, *_ = basis_of(geometry, device)
    first, window, ring, capacity = 2, 3, 5, 12
    torch.manual_seed(0)
    exact = latent.empty_exact(1, n_kv, (d, d_v), first, window, ring, torch.device(device))
    latents = torch.full((1, capacity, rank), torch.nan, device=device).half()
    size = latent.head_bytes(d_v, bits)
    values = torch.zeros(1, capacity, n_kv, size, dtype=torch.uint8, device=device)
    rows = [torch.randn(10, n_kv, size) for size in (d, d, d_v)]
    nope, k, v = (x.half().float().to(device) for x in rows)
    for pos in range(10):
        at, budget = (torch.tensor([x], dtype=torch.int32, device=device) for x in (pos, 7))
        latent.append_latent(
            nope[pos : pos + 1], NewRow(k[pos : pos + 1], v[pos : pos + 1]), at, budget, latents,
            values, exact, basis, bits, first, window, n_back=2,
        )  # fmt: skip
        n = pos + 1
        start = max(first, n - window)
        assert exact.n_latent.item() == start - first
        assert exact.k_latent.item() == 9
        wanted = [*range(min(first, n)), *range(start, n)]
        for g in range(n_kv):
            slots = exact.listed[0, g, : exact.counts[0, g]].long()
            assert torch.equal(exact.k[0, g, slots].float(), k[wanted, g])
            assert torch.equal(exact.v[0, g, slots].float(), v[wanted, g])
    expected = nope.flatten(1).cpu().double().numpy() @ encode
    np.testing.assert_allclose(latents[0, :10].cpu(), expected, atol=3e-3 * np.abs(expected).max())
    assert latents[0, 10:].isnan().all()
    packed = latent.quantize_values(v.half(), bits)
    used = 2 * d_v if bits == 16 else size
    assert torch.equal(values[0, :10, :, :used], packed[..., :used])
    exact.floor.fill_(9)  # the ring has lost what was before
    latent.append_latent(
        nope[9:], NewRow(k[9:], v[9:]), at, budget, latents, values, exact, basis, bits, first,
        window,
    )  # fmt: skip
    assert exact.n_latent.item() == 9 - first and (exact.counts == first + 1).all()


def layer(geometry, ns, device, bits=4):
    """q (B, H, d), latents and values of capacity 300 (NaN and 255 behind), by position."""
    n_head, n_kv, d, d_v, _, rank, _ = geometry
    torch.manual_seed(1)
    n_batch, capacity = len(ns), 300
    q = torch.randn(n_batch, n_head, d)
    latents = torch.randn(n_batch, capacity, rank).half()
    values = torch.randn(n_batch, capacity, n_kv, d_v).half()
    packed = latent.quantize_values(values, bits)
    for b, n in enumerate(ns):
        latents[b, FIRST + n :], packed[b, FIRST + n :] = torch.nan, 255
    n = torch.tensor(ns, dtype=torch.int32)
    return [x.to(device) for x in (q, latents, packed, n)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize(("ns", "n_exact"), [([1], 1), ([257, 65], 3)])
def test_score_latents(geometry, ns, n_exact, device):
    n_head, _, d, *_, score_rank = geometry
    basis, _, decode, theta = basis_of(geometry, device)
    q_nope, latents, _, n = layer(geometry, ns, device)
    position = 270
    at = torch.tensor([position], device=device)
    q = latent.rotate(q_nope[:, :, None], at, basis.half_turns, 1.1)[:, :, 0].contiguous()
    damp = torch.from_numpy(damping(theta, latent.ROPE_BLOCK) * np.float32(1.1)).to(device)
    exact_lse = torch.full((n_exact, len(ns), n_head), 0.3, device=device)
    exact_lse[1:2] = -torch.inf  # a set without rows
    n_full = max(1, n_exact - 1)
    n_max, scale = 260, d**-0.5
    arrived = none_arrived(len(ns), n_head, q.device)
    found = sals.score_latents(
        q, damp, basis, latents, score_rank, n, n_max, scale, FIRST, exact_lse, arrived
    )
    assert (arrived == NONE_ARRIVED).all()
    for b, n_b in enumerate(ns):
        rows = latents[b, FIRST : FIRST + n_b, :score_rank].cpu().double().numpy()
        nope = q_nope[b].cpu().double().numpy()
        scores = scale * brope_ref(
            nope, position, rows, FIRST, decode[:, :score_rank], theta, 1.1, latent.ROPE_BLOCK
        )
        weights = np.exp(scores)
        total = weights.sum(1, keepdims=True) + n_full * np.exp(0.3)
        expected = (weights / total).sum(0)
        np.testing.assert_allclose(found[b, 0, :n_b].cpu(), expected, rtol=1e-2)


@pytest.mark.parametrize("geometry", GEOMETRIES[1:3])
def test_score_summed(geometry, device):
    n_kv, score_rank = geometry[1], geometry[-1]
    _, _, decode, _ = basis_of(geometry, device)
    q_nope, latents, _, n = layer(geometry, [257, 65], device)
    summed = q_nope.cpu().double().unflatten(1, (n_kv, -1)).sum(2).flatten(1)  # (B, G d)
    query = (summed @ torch.from_numpy(decode[:, :score_rank])).float().to(device)
    found = sals.score_summed(query, latents, n, 260, FIRST)
    for b, n_b in enumerate((257, 65)):
        rows = latents[b, FIRST : FIRST + n_b, :score_rank].cpu().double().numpy()
        expected = summed_ref(q_nope[b].cpu().double().numpy(), rows, decode[:, :score_rank])
        np.testing.assert_allclose(found[b, 0, :n_b].cpu(), expected, atol=1e-3)


@pytest.mark.parametrize(
    ("geometry", "bits", "m"),
    [
        (GEOMETRIES[i], *case)
        for i, case in enumerate([(4, 70), (2, 15), (16, 40), (4, 33), (2, 16)])
    ],
)
def test_attend_latents(geometry, bits, m, device):
    """With the exact rows, equal to attention over all of them reconstructed."""
    n_head, n_kv, d, d_v, *_ = geometry
    basis, *_ = basis_of(geometry, device)
    counts_of = [m, m - 7]
    q, latents, values, _ = layer(geometry, [200, 90], device, bits)
    idx = torch.stack([torch.randperm(80)[:m].sort()[0] for _ in range(2)])[:, None].int()
    idx[1, :, counts_of[1] :] = 1 << 20
    idx = idx.to(device)
    counts = torch.tensor(counts_of, dtype=torch.int32, device=device)[:, None]
    pieces = latent_attention.empty_pieces(2, n_head, n_kv, d_v, m, 2, torch.device(device))
    pieces.out.fill_(torch.nan)
    latent_attention.attend_latents(
        q, idx, counts, latents, values, basis, bits, d_v, d**-0.5, FIRST, pieces
    )
    assert pieces.out[-2:].isnan().all()
    found = merge(pieces.out[:-2], pieces.lse[:-2])
    for b, count in enumerate(counts_of):
        positions = FIRST + idx[b, 0, :count].long()
        k = latent.reconstruct_rows(latents[b, positions], positions, basis)
        v = latent.dequantize_values(values[b, positions], d_v, bits).transpose(0, 1)
        k, v = (x.repeat_interleave(n_head // n_kv, 0).double() for x in (k, v))
        weights = torch.softmax((k @ q[b, :, :, None].double())[..., 0] * d**-0.5, -1)
        expected = (weights[:, None] @ v)[:, 0]
        torch.testing.assert_close(found[b].double(), expected, rtol=0, atol=2e-3)
