"""SALS' attention on the GPU: reconstructs chosen latents as keys and attends to them in one pass.

A program takes some of the chosen rows of one kv head. It multiplies their latents by D and rotates
the keys to their positions. It attends to them and decodes the stored values of 4 or 2 bits.
``merge`` (attention/merge.py) joins the programs' pieces and the attention over the exact rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.sals.latent import DeviceBasis, _cos_sin, head_bytes

PROGRAMS = 128  # fewest programs, if possible


class Pieces(NamedTuple):
    """Attention over S sets of rows, for ``merge``. The last sets are the exact rows."""

    out: torch.Tensor  # f32 (S, B, H, d_v)
    lse: torch.Tensor  # f32 (S, B, H)


@triton.jit
def _dot_twice(q, keys, total):
    """Returns total + q . keys for q f32, as two f16 halves: one half would lose three digits."""
    high = q.to(tl.float16)
    low = (q - high.to(tl.float32)).to(tl.float16)
    return tl.dot(low, keys, acc=tl.dot(high, keys, acc=total))


@triton.jit
def _attend_latents_kernel(
    q_ptr, idx_ptr, counts_ptr, latents_ptr, values_ptr, halves_ptr, decode_ptr, turns_ptr,
    out_ptr, lse_ptr, scale, factor, rope_scale, first, n_head, n_kv, capacity, r, stride_ib,
    D: tl.constexpr, D_V: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
    TILE_H: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, HEAD_BYTES: tl.constexpr,
):  # fmt: skip
    piece, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = (unit // n_kv).to(tl.int64), unit % n_kv
    count = tl.load(counts_ptr + b)
    t, i = tl.arange(0, TILE_H), tl.arange(0, BLOCK_H)
    is_head = t < GROUP
    head = b * n_head + g * GROUP + t
    at = piece * tl.num_programs(1) * GROUP + head
    c_v = tl.arange(0, BLOCK_V)[None, :]
    is_value = is_head[:, None] & (c_v < D_V)
    if piece * ROWS >= count:
        tl.store(lse_ptr + at, tl.full([TILE_H], float("-inf"), tl.float32), mask=is_head)
    else:
        j = piece.to(tl.int32) * ROWS + tl.arange(0, ROWS)
        is_row = j < count
        position = first + tl.load(idx_ptr + b * stride_ib + j, mask=is_row, other=0).to(tl.int64)
        row = b * capacity + position
        # Keys before RoPE: k1, k2 are the two halves of the rotated dims, k3 the other dims.
        c = tl.arange(0, BLOCK_C)
        latents_at = latents_ptr + row[:, None] * r
        decode_at = decode_ptr + g * D
        k1 = tl.zeros([ROWS, BLOCK_H], tl.float32)
        k2 = tl.zeros([ROWS, BLOCK_H], tl.float32)
        k3 = tl.zeros([ROWS, BLOCK_REST], tl.float32)
        i_rest = 2 * HALF + tl.arange(0, BLOCK_REST)
        for start in range(0, r, BLOCK_C):
            column = start + c
            is_column = column < r
            z = tl.load(
                latents_at + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0
            )
            d_at = decode_at + column[:, None] * (n_kv * D)
            mask = is_column[:, None] & (i < HALF)[None, :]
            k1 = tl.dot(z, tl.load(d_at + i[None, :], mask=mask, other=0.0), acc=k1)
            k2 = tl.dot(z, tl.load(d_at + HALF + i[None, :], mask=mask, other=0.0), acc=k2)
            if D > 2 * HALF:
                mask = is_column[:, None] & (i_rest < D)[None, :]
                k3 = tl.dot(z, tl.load(d_at + i_rest[None, :], mask=mask, other=0.0), acc=k3)
        half_turns = tl.load(turns_ptr + i, mask=i < HALF, other=0)
        cos, sin = _cos_sin((2 * position)[:, None] * half_turns[None, :])
        turned = factor * rope_scale
        keys1 = ((k1 * cos - k2 * sin) * turned).to(tl.float16)
        keys2 = ((k1 * sin + k2 * cos) * turned).to(tl.float16)
        # Scores.
        q_at = q_ptr + head[:, None] * D
        mask = is_head[:, None] & (i < HALF)[None, :]
        q1 = tl.load(q_at + i[None, :], mask=mask, other=0.0)
        q2 = tl.load(q_at + HALF + i[None, :], mask=mask, other=0.0)
        scores = tl.zeros([TILE_H, ROWS], tl.float32)
        scores = _dot_twice(q1, tl.trans(keys1), scores)
        scores = _dot_twice(q2, tl.trans(keys2), scores)
        if D > 2 * HALF:
            mask = is_head[:, None] & (i_rest < D)[None, :]
            q3 = tl.load(q_at + i_rest[None, :], mask=mask, other=0.0)
            scores = _dot_twice(q3, tl.trans((k3 * factor).to(tl.float16)), scores)
        scores = tl.where(is_row[None, :], scores * scale, float("-inf"))
        # Values.
        values_at = ((row * n_kv + g) * HEAD_BYTES)[:, None]
        if BITS == 16:
            mask = is_row[:, None] & (c_v < D_V)
            v = tl.load(halves_ptr + values_at // 2 + c_v, mask=mask, other=0.0)
        else:
            BYTES: tl.constexpr = 4 * BITS
            group = tl.arange(0, BLOCK_V // 32)[None, :, None]
            channel = tl.arange(0, 32)[None, None, :]
            group_at = values_at[:, :, None] + group * (4 + BYTES)
            mask = is_row[:, None, None] & (group * 32 < D_V)
            step = tl.load(halves_ptr + group_at // 2, mask=mask, other=0.0).to(tl.float32)
            low = tl.load(halves_ptr + group_at // 2 + 1, mask=mask, other=0.0).to(tl.float32)
            at_code = group_at + (4 + channel % BYTES)
            codes = tl.load(values_ptr + at_code, mask=mask, other=0).to(tl.int32)
            codes = (codes >> (BITS * (channel // BYTES))) & (2**BITS - 1)
            v = tl.reshape((low + step * codes.to(tl.float32)).to(tl.float16), (ROWS, BLOCK_V))
        peak = tl.max(scores, axis=1)
        p = tl.exp(scores - peak[:, None])
        mass = tl.sum(p, axis=1)
        out = tl.dot(p.to(tl.float16), v) / mass[:, None]
        tl.store(out_ptr + at[:, None] * D_V + c_v, out, mask=is_value)
        tl.store(lse_ptr + at, peak + tl.log(mass), mask=is_head)


def _rows_a_piece(n_batch: int, n_kv: int, m: int) -> int:
    """Returns the chosen rows of a program. They share D, but there must be enough programs."""
    fits = (rows for rows in (64, 32) if n_batch * n_kv * triton.cdiv(m, rows) >= PROGRAMS)
    return next(fits, 16)


def empty_pieces(
    n_batch: int, n_head: int, n_kv: int, d_v: int, m: int, n_exact: int, device: torch.device
) -> Pieces:
    """Allocates pieces for ``attend_latents`` of at most m chosen rows, and n_exact others."""
    n_piece = triton.cdiv(m, _rows_a_piece(n_batch, n_kv, m)) + n_exact
    shape = n_piece, n_batch, n_head
    return Pieces(torch.empty(*shape, d_v, device=device), torch.empty(shape, device=device))


def attend_latents(
    q: torch.Tensor,
    idx: torch.Tensor,
    counts: torch.Tensor,
    latents: torch.Tensor,
    values: torch.Tensor,
    basis: DeviceBasis,
    bits: int,
    d_v: int,
    scale: float,
    first: int,
    out: Pieces,
) -> None:
    """Computes attention over the chosen latents, in the first pieces of ``out``.

    q f32 (B, H, d), rotated; idx int32 (B, 1, m): counts int32 (B, 1) chosen latents, counted from
    position ``first`` on. latents f16 (B, capacity, r) and values uint8 (B, capacity, G, head
    bytes): by position.
    """
    n_batch, n_head, d = q.shape
    m, n_kv, device = idx.shape[2], basis.n_kv, q.device
    capacity, r = latents.shape[1:]
    size = head_bytes(d_v, bits)
    check("q", q, torch.float32, (None, None, basis.d), device)
    check("idx", idx, torch.int32, (n_batch, 1, m), device, strided=True)
    check("counts", counts, torch.int32, (n_batch, 1), device)
    check("latents", latents, torch.float16, (n_batch, None, basis.decode.shape[0]), device)
    check("values", values, torch.uint8, (n_batch, capacity, n_kv, size), device)
    rows = _rows_a_piece(n_batch, n_kv, m)
    n_piece = triton.cdiv(m, rows)
    check("out.out", out.out, torch.float32, (None, n_batch, n_head, d_v), device)
    check("out.lse", out.lse, torch.float32, (len(out.out), n_batch, n_head), device)
    if len(out.out) < n_piece:
        raise ValueError(f"out has {len(out.out)} pieces: expected {n_piece} or more")
    half, group = len(basis.half_turns), n_head // n_kv
    _attend_latents_kernel[(n_piece, n_batch * n_kv)](
        q, idx, counts, latents, values, values.view(torch.float16), basis.decode,
        basis.half_turns, out.out, out.lse, scale, basis.decode_factor, basis.rope_scale, first,
        n_head, n_kv, capacity, r, idx.stride(0), D=d, D_V=d_v, HALF=half, GROUP=group,
        TILE_H=max(16, triton.next_power_of_2(group)),
        BLOCK_H=max(16, triton.next_power_of_2(half)),
        BLOCK_REST=max(16, triton.next_power_of_2(max(1, d - 2 * half))),
        BLOCK_V=max(32, triton.next_power_of_2(d_v)), BLOCK_C=64 if r >= 256 else 32, ROWS=rows,
        BITS=bits, HEAD_BYTES=size, num_warps=8 if rows > 32 else 4, num_stages=4,
    )  # fmt: skip
