"""SALS' cache on the GPU: pre-RoPE keys as latents, values in 4 or 2 bits, a row a token.

The latent of a token is its pre-RoPE key of all kv heads times a basis E, in f16. It is one row of
r columns, of which the first r* are scored. D maps it back to a key. Values have the layout of
cpu/sals/values.py: groups of 32 channels, each an f16 scale, an f16 minimum and its codes. E and D
are f16 times a power of two. Angles are int64 in units of 2^-64 of a full circle. So a position
times an angle keeps all its digits and wraps at full circles.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.rows import NewRow, check_new
from sparsekv_cli.kernels.checks import check

GROUP = 32  # channels of values that share a scale
ROPE_BLOCK = 128  # tokens that share a query when latents are scored
ROWS = 4  # elements of a latent that a program makes
LARGEST = 10  # binary exponent of the largest entry of E and D


class DeviceBasis(NamedTuple):
    """The matrices of one layer: latents z = k E, keys k ~ z D^T, before RoPE."""

    encode: torch.Tensor  # E^T f16 (r, G d), times 2^-encode_exponent
    decode: torch.Tensor  # D^T f16 (r, G d), times 2^-decode_exponent
    encode_factor: float  # 2^encode_exponent
    decode_factor: float
    half_turns: torch.Tensor  # int64 (pairs,): half the rotation a position, in 2^-64 circles
    rope_scale: float
    n_kv: int
    d: int

    @property
    def nbytes(self) -> int:
        return self.encode.nbytes + self.decode.nbytes + self.half_turns.nbytes


def make_basis(
    vectors: np.ndarray,
    weights: np.ndarray,
    theta: np.ndarray,
    rope_scale: float,
    n_kv: int,
    device: torch.device,
) -> DeviceBasis:
    """E = w U, D = U / w of vectors U (G d, r), weights w (G d,); theta in radians a position."""
    matrices = (weights[:, None] * vectors).T, (vectors / weights[:, None]).T
    halves, factors = [], []
    for matrix in matrices:
        exponent = math.frexp(float(np.abs(matrix).max()))[1] - LARGEST
        halves.append(torch.from_numpy(np.ldexp(matrix, -exponent).astype(np.float16)).to(device))
        factors.append(2.0**exponent)
    parts = (np.mod(theta / (4 * np.pi), 1) * 2.0**64).tolist()
    turns = [(int(part) + 2**63) % 2**64 - 2**63 for part in parts]
    half_turns = torch.tensor(turns, dtype=torch.int64, device=device)
    encode, decode = (half.contiguous() for half in halves)
    d = vectors.shape[0] // n_kv
    return DeviceBasis(encode, decode, factors[0], factors[1], half_turns, rope_scale, n_kv, d)


@triton.jit
def _cos_sin(turns):
    """Returns cos and sin of an angle int64 in units of 2^-64 circles; errors below 1e-6.

    The library's functions allow any angle and need a stack for that.
    """
    quarters = (turns >> 32).to(tl.float32) * (4.0 / 4294967296.0)  # -2 to 2
    nearest = tl.floor(quarters + 0.5)
    y = (quarters - nearest) * 1.5707963267948966
    z = y * y
    sin = y * (1 + z * (-1 / 6 + z * (1 / 120 + z * (-1 / 5040 + z * (1 / 362880)))))
    cos = 1 + z * (-0.5 + z * (1 / 24 + z * (-1 / 720 + z * (1 / 40320))))
    quadrant = nearest.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    s, c = tl.where(is_odd, cos, sin), tl.where(is_odd, sin, cos)
    return (tl.where((quadrant == 1) | (quadrant == 2), -c, c), tl.where(quadrant >= 2, -s, s))


def rotate(
    x: torch.Tensor, positions: torch.Tensor, half_turns: torch.Tensor, scale: float, sign: int = 1
) -> torch.Tensor:
    """Rotates x f32 (..., n, d), half-split, to ``positions`` int64 (n,), or back if sign is -1."""
    half = len(half_turns)
    fraction = (2 * positions[:, None] * half_turns).double() * 2.0**-64  # wraps at full circles
    angles = sign * 2 * math.pi * fraction
    cos, sin = ((scale * f(angles)).float() for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., 2 * half :]], dim=-1)


def encode_rows(k: torch.Tensor, positions: torch.Tensor, basis: DeviceBasis) -> torch.Tensor:
    """Rotated keys k (G, n, d) at ``positions`` int64 (n,) -> latents f16 (n, r)."""
    nope = rotate(k.float(), positions, basis.half_turns, 1 / basis.rope_scale, -1)
    rows = nope.transpose(0, 1).flatten(1)  # (n, G d)
    return (rows @ basis.encode.float().T * basis.encode_factor).half()


def reconstruct_rows(
    latents: torch.Tensor, positions: torch.Tensor, basis: DeviceBasis
) -> torch.Tensor:
    """latents f16 (n, r) -> rotated keys f16 (G, n, d)."""
    nope = latents.float() @ basis.decode.float() * basis.decode_factor
    nope = nope.unflatten(1, (basis.n_kv, basis.d)).transpose(0, 1)
    return rotate(nope, positions, basis.half_turns, basis.rope_scale).half()


def head_bytes(d_v: int, bits: int) -> int:
    """Returns the bytes of one token's values in one kv head."""
    if bits == 16:
        return 2 * (-(-d_v // 16) * 16)
    return -(-d_v // GROUP) * (4 + 4 * bits)


def quantize_values(values: torch.Tensor, bits: int) -> torch.Tensor:
    """f16 (..., d_v) -> uint8 (..., head bytes)."""
    d_v = values.shape[-1]
    size = head_bytes(d_v, bits)
    if bits == 16:
        padded = torch.nn.functional.pad(values, (0, size // 2 - d_v))
        return padded.contiguous().view(torch.uint8)
    x = torch.nn.functional.pad(values.float(), (0, -d_v % GROUP), value=torch.nan)
    x = x.unflatten(-1, (-1, GROUP))  # (..., groups, 32)
    low = x.nan_to_num(torch.inf).amin(-1).half()
    high = x.nan_to_num(-torch.inf).amax(-1)
    top = 2**bits - 1
    scale = ((high - x.nan_to_num(torch.inf).amin(-1)) / top).half()
    step = scale.float()[..., None]
    codes = torch.where(step > 0, (x - low.float()[..., None]) / step, 0)
    codes = (codes + 0.5).floor().clamp(0, top).nan_to_num(0).to(torch.uint8)
    fields = codes.unflatten(-1, (8 // bits, 4 * bits))  # (..., groups, field of a byte, byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)[:, None]
    packed = (fields << shifts).sum(-2, dtype=torch.uint8)
    ends = torch.stack([scale, low], dim=-1).view(torch.uint8)  # (..., groups, 4)
    return torch.cat([ends, packed], dim=-1).flatten(-2)


def dequantize_values(packed: torch.Tensor, d_v: int, bits: int) -> torch.Tensor:
    """uint8 (..., head bytes) -> f16 (..., d_v)."""
    if bits == 16:
        return packed.view(torch.float16)[..., :d_v]
    groups = packed.unflatten(-1, (-1, 4 + 4 * bits))
    ends = groups[..., :4].contiguous().view(torch.float16).float()  # (..., groups, 2)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)[:, None]
    codes = ((groups[..., None, 4:] >> shifts) & (2**bits - 1)).flatten(-2)
    return (ends[..., 1:] + ends[..., :1] * codes).half().flatten(-2)[..., :d_v]


class Exact(NamedTuple):
    """The exact rows: the first ``first`` positions, and a ring of the last ones.

    Position p >= first lies in slot first + p % ring. k f16 (B, G, first + ring, d), v likewise;
    listed, counts: the slots that take part in a step, int32 (B, G, first + window), (B, G).
    n_latent int32 (B,): positions from ``first`` on that are attended to as latents. k_latent int32
    (B,): the number of latents that are chosen. floor int32 (B,): the ring's oldest position.
    """

    k: torch.Tensor
    v: torch.Tensor
    listed: torch.Tensor
    counts: torch.Tensor
    n_latent: torch.Tensor
    k_latent: torch.Tensor
    floor: torch.Tensor


def empty_exact(
    n_batch: int, n_kv: int, sizes: Sequence[int], first: int, window: int, ring: int,
    device: torch.device,
) -> Exact:  # fmt: skip
    """Returns room for exact rows; sizes: d and d_v."""
    rows = (
        torch.zeros(n_batch, n_kv, first + ring, size, dtype=torch.float16, device=device)
        for size in sizes
    )
    shapes = (n_batch, n_kv, first + window), (n_batch, n_kv), *[(n_batch,)] * 3
    return Exact(*rows, *(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


@triton.jit
def _encode_part(
    nope_at, encode_ptr, latent_at, r, factor, R: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the elements r of a latent: those rows of E^T times a key before RoPE."""
    sums = tl.zeros([r.shape[0], BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = tl.load(nope_at + c, mask=c < SIZE, other=0.0)
        mask = (r < R)[:, None] & (c < SIZE)[None, :]
        encode = tl.load(encode_ptr + r[:, None] * SIZE + c[None, :], mask=mask, other=0.0)
        sums += encode.to(tl.float32) * x[None, :]
    tl.store(latent_at + r, (tl.sum(sums, 1) * factor).to(tl.float16), mask=r < R)


@triton.jit
def _store_values(
    v_new_at, values_ptr, halves_ptr, at, D_V: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Packs the new values of a kv head. at: their first byte in ``values_ptr``."""
    if BITS == 16:
        c = tl.arange(0, BLOCK_V)
        v = tl.load(v_new_at + c, mask=c < D_V)
        tl.store(halves_ptr + at // 2 + c, v.to(tl.float16), mask=c < D_V)
    else:
        BYTES: tl.constexpr = 4 * BITS  # of a group's codes
        TOP: tl.constexpr = 2**BITS - 1
        group = tl.arange(0, GROUPS)[:, None]
        channel = group * 32 + tl.arange(0, 32)[None, :]
        x = tl.load(v_new_at + channel, mask=channel < D_V, other=0.0)
        x = x.to(tl.float16).to(tl.float32)
        low = tl.min(tl.where(channel < D_V, x, float("inf")), axis=1)[:, None]
        high = tl.max(tl.where(channel < D_V, x, float("-inf")), axis=1)[:, None]
        scale = ((high - low) / TOP).to(tl.float16)
        step, minimum = scale.to(tl.float32), low.to(tl.float16)
        codes = tl.floor((x - minimum.to(tl.float32)) / tl.where(step > 0, step, 1.0) + 0.5)
        codes = tl.minimum(tl.maximum(codes, 0.0), TOP).to(tl.int32)
        codes = tl.where((channel < D_V) & (step > 0), codes, 0)
        fields = tl.reshape(codes, (GROUPS, 8 // BITS, BYTES))
        shifts = BITS * tl.arange(0, 8 // BITS)[None, :, None]
        packed = tl.sum(fields << shifts, axis=1)
        has_group = group * 32 < D_V
        group_at = at + group * (4 + BYTES)
        tl.store(halves_ptr + group_at // 2, scale, mask=has_group)
        tl.store(halves_ptr + group_at // 2 + 1, minimum, mask=has_group)
        byte = tl.arange(0, BYTES)[None, :]
        tl.store(values_ptr + group_at + 4 + byte, packed.to(tl.uint8), mask=has_group)


@triton.jit
def _append_latent_kernel(
    nope_ptr, encode_ptr, k_new_ptr, v_new_ptr, pos_ptr, budget_ptr, latents_ptr, values_ptr,
    halves_ptr, k_ptr, v_ptr, listed_ptr, counts_ptr, n_latent_ptr, k_latent_ptr, floor_ptr,
    n_kv, capacity, factor, n_back, first, window, ring,
    R: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BITS: tl.constexpr,
    HEAD_BYTES: tl.constexpr, BLOCK_D: tl.constexpr, GROUPS: tl.constexpr, BLOCK_L: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds a kv head's exact row and values, or ROWS elements of the latent."""
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    pos = tl.load(pos_ptr + b)
    row = b * capacity + pos
    if g >= n_kv:
        r = (g - n_kv) * ROWS + tl.arange(0, ROWS)
        latent_at = latents_ptr + row * R
        _encode_part(nope_ptr + b * SIZE, encode_ptr, latent_at, r, factor, R, SIZE, BLOCK)
    else:
        n, unit = pos + 1, b * n_kv + g
        # The exact row.
        slot = tl.where(pos < first, pos, first + pos % ring)
        at = unit * (first + ring) + slot
        c = tl.arange(0, BLOCK_D)
        k = tl.load(k_new_ptr + unit * D + c, mask=c < D)
        v = tl.load(v_new_ptr + unit * D_V + c, mask=c < D_V)
        tl.store(k_ptr + at * D + c, k.to(tl.float16), mask=c < D)
        tl.store(v_ptr + at * D_V + c, v.to(tl.float16), mask=c < D_V)
        # The list of the exact rows to which a step attends.
        start = tl.maximum(tl.maximum(n - window, tl.load(floor_ptr + b)), first)
        n_first = tl.minimum(first, n)
        j = tl.arange(0, BLOCK_L)
        count = n_first + tl.maximum(n - start, 0)
        listed = tl.where(j < n_first, j, first + (start + j - n_first) % ring)
        tl.store(listed_ptr + unit * (first + window) + j, listed, mask=j < count)
        tl.store(counts_ptr + unit, count)
        if g == 0:
            tl.store(n_latent_ptr + b, start - first)
            tl.store(k_latent_ptr + b, tl.load(budget_ptr + b) + n_back)
        values_at = (row * n_kv + g) * HEAD_BYTES
        _store_values(
            v_new_ptr + unit * D_V, values_ptr, halves_ptr, values_at, D_V, BITS, GROUPS, BLOCK_D
        )


def append_latent(
    k_nope: torch.Tensor,
    new: NewRow,
    pos: torch.Tensor,
    budget: torch.Tensor,
    latents: torch.Tensor,
    values: torch.Tensor,
    exact: Exact,
    basis: DeviceBasis,
    bits: int,
    first: int,
    window: int,
    n_back: int = 0,
) -> None:
    """Adds a row to each sequence at position pos int32 (B,), exact and latent; lists exact rows.

    k_nope f32 (B, G, d): the new keys before RoPE, which become a latent; budget int32 (B,).
    latents f16 (B, capacity, r) and values uint8 (B, capacity, G, head bytes), both by position.
    Exact rows are the first ``first`` and the last ``window`` rows that the ring holds. A step
    chooses budget + n_back of the latents between.
    """
    n_batch, n_kv, d = new.k.shape
    d_v, device, (_, capacity, r) = new.v.shape[2], new.k.device, latents.shape
    size, slots = head_bytes(d_v, bits), exact.k.shape[2]
    check("k_nope", k_nope, torch.float32, (n_batch, basis.n_kv, basis.d), device)
    check_new(new, exact.k, exact.v, d)
    check("pos", pos, torch.int32, (n_batch,), device)
    check("budget", budget, torch.int32, (n_batch,), device)
    check("latents", latents, torch.float16, (n_batch, None, len(basis.encode)), device)
    check("values", values, torch.uint8, (n_batch, capacity, n_kv, size), device)
    check("exact.k", exact.k, torch.float16, (n_batch, n_kv, slots, d), device)
    check("exact.v", exact.v, torch.float16, (n_batch, n_kv, slots, d_v), device)
    check("exact.listed", exact.listed, torch.int32, (n_batch, n_kv, first + window), device)
    if slots < first + window:
        raise ValueError(f"exact.k has {slots} slots: expected {first + window} or more")
    _append_latent_kernel[(n_batch, n_kv + triton.cdiv(r, ROWS))](
        k_nope, basis.encode, *new, pos, budget, latents, values, values.view(torch.float16),
        *exact, n_kv, capacity, basis.encode_factor, n_back, first, window, slots - first, R=r, D=d,
        D_V=d_v, BITS=bits, HEAD_BYTES=size, BLOCK_D=triton.next_power_of_2(max(d, d_v)),
        GROUPS=triton.next_power_of_2(-(-d_v // GROUP)),
        BLOCK_L=triton.next_power_of_2(first + window), ROWS=ROWS, SIZE=n_kv * d,
        BLOCK=min(1024, triton.next_power_of_2(n_kv * d)), num_warps=4,
    )  # fmt: skip
