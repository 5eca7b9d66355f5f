"""The steps of a decoder layer between its matrix products, for B rows of a decode step.

``rms_norm``: residual sum and RMS norm. ``split_heads``: biases, q/k norm and rotation of the
projections. ``silu_multiply``: silu(gate) * up. All are in f32. TorchChunkSteps
(sparsekv_cli/device/prefill.py) has the formulas and is the reference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check


@triton.jit
def _rms_norm_kernel(
    x_ptr, y_ptr, weight_ptr, out_ptr, n, eps, y_scale, stride_x, stride_y, stride_out,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + b * stride_x + c, mask=c < n, other=0)
    if ADD:
        x += tl.load(y_ptr + b * stride_y + c, mask=c < n, other=0) * y_scale
        tl.store(x_ptr + b * stride_x + c, x, mask=c < n)
    weight = tl.load(weight_ptr + c, mask=c < n, other=0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / n + eps)
    normed = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b * stride_out + c, normed, mask=c < n)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    y: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    y_scale: float = 1.0,
) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight, (B, n), after adding y_scale y to x in place.

    x, y f32 (B, n), weight f32 (n,); out f32, f16 or bf16 (B, n), any strides of rows.
    """
    n_batch, n = x.shape
    device = x.device
    if out is None:
        out = torch.empty(n_batch, n, dtype=torch.float32, device=device)
    check("x", x, torch.float32, (n_batch, n), device, strided=True)
    check("weight", weight, torch.float32, (n,), device)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    check("out", out, dtypes, (n_batch, n), device, strided=True)
    if y is not None:
        check("y", y, torch.float32, (n_batch, n), device, strided=True)
    block = triton.next_power_of_2(n)
    _rms_norm_kernel[(n_batch,)](
        x, x if y is None else y, weight, out, n, eps, y_scale, x.stride(0),
        0 if y is None else y.stride(0), out.stride(0), ADD=y is not None, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out


class Heads(NamedTuple):
    """One decode step's rows of a layer, f32 and contiguous, in half-split order."""

    q: torch.Tensor  # (B, H, d), rotated
    k: torch.Tensor  # (B, G, d), rotated
    v: torch.Tensor  # (B, G, d_v)
    q_nope: torch.Tensor  # (B, H, d), before RoPE (after bias and q/k norm)
    k_nope: torch.Tensor  # (B, G, d)


def empty_heads(
    n_batch: int, n_head: int, n_kv_head: int, d: int, d_v: int, device: torch.device
) -> Heads:
    """Allocates the output of ``split_heads``."""
    shapes = (n_head, d), (n_kv_head, d), (n_kv_head, d_v), (n_head, d), (n_kv_head, d)
    return Heads._make(torch.empty(n_batch, *shape, device=device) for shape in shapes)


@triton.jit
def _split_heads_kernel(
    raw_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    q_scale_ptr, pos_ptr, q_ptr, k_ptr, v_ptr, q_nope_ptr, k_nope_ptr, n_head, n_kv_head, d, d_v,
    half, eps, stride_raw, stride_rope, BIAS: tl.constexpr, V_BIAS: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, unit = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    raw_ptr += b * stride_raw
    if unit >= n_head + n_kv_head:
        g = unit - n_head - n_kv_head
        at = (n_head + n_kv_head) * d + g * d_v + c
        v = tl.load(raw_ptr + at, mask=c < d_v)
        if V_BIAS:
            v += tl.load(v_bias_ptr + g * d_v + c, mask=c < d_v)
        tl.store(v_ptr + (b * n_kv_head + g) * d_v + c, v, mask=c < d_v)
    else:
        is_q = unit < n_head
        head = tl.where(is_q, unit, unit - n_head)
        # Places of element c, and of the other element of its pair, in the file's order.
        first, turned = c < half, c < 2 * half
        partner = tl.where(first, c + half, tl.where(turned, c - half, c))
        pair = tl.where(first, c, c - half)
        source, source_of_partner = c, partner
        if INTERLEAVED:
            source = tl.where(turned, 2 * pair + tl.where(first, 0, 1), c)
            source_of_partner = tl.where(turned, 2 * pair + tl.where(first, 1, 0), c)
        mask = c < d
        x = tl.load(raw_ptr + unit * d + source, mask=mask, other=0)
        other = tl.load(raw_ptr + unit * d + source_of_partner, mask=mask, other=0)
        if BIAS:
            bias_ptr = tl.where(is_q, q_bias_ptr, k_bias_ptr) + head * d
            x += tl.load(bias_ptr + source, mask=mask, other=0)
            other += tl.load(bias_ptr + source_of_partner, mask=mask, other=0)
        if NORM:
            norm_ptr = tl.where(is_q, q_norm_ptr, k_norm_ptr)
            scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / d + eps)
            x *= scale * tl.load(norm_ptr + source, mask=mask, other=0)
            other *= scale * tl.load(norm_ptr + source_of_partner, mask=mask, other=0)
        pos = tl.load(pos_ptr + b).to(tl.int64)
        if SCALE:
            q_scale = tl.where(is_q, tl.load(q_scale_ptr + pos), 1.0)
            x *= q_scale
            other *= q_scale
        angle = pos * stride_rope + pair
        cos = tl.load(cos_ptr + angle, mask=turned, other=1)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0)
        rotated = x * cos + tl.where(first, -other, other) * sin
        if is_q:
            at = (b * n_head + head) * d + c
            tl.store(q_nope_ptr + at, x, mask=mask)
            tl.store(q_ptr + at, rotated, mask=mask)
        else:
            at = (b * n_kv_head + head) * d + c
            tl.store(k_nope_ptr + at, x, mask=mask)
            tl.store(k_ptr + at, rotated, mask=mask)


def split_heads(
    raw: torch.Tensor,
    out: Sequence[torch.Tensor],
    pos: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_scale: torch.Tensor | None = None,
    *,
    n_rot: int | None = None,
    biases: Sequence[torch.Tensor | None] = (None, None, None),
    norms: Sequence[torch.Tensor | None] = (None, None),
    eps: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Splits projected q, k and v, raw f32 (B, H d + G d + G d_v), to ``out``, ordered as Heads.

    pos int32 (B,): each row's position in cos, sin f32 (positions, at least n_rot / 2) and q_scale
    f32 (positions,), which multiplies the queries. n_rot: dims that are rotated; None: all pairs of
    cos. biases: of q, k and v, f32 (rows,); norms: of q and k, f32 (d,), with ``eps``. q and k must
    both have a bias or both have none; norms likewise. interleaved: whether the rotation pairs in
    raw are (0, 1), (2, 3) ...
    """
    heads = Heads._make(out)
    n_batch, n_head, d = heads.q.shape
    n_kv_head, d_v = heads.v.shape[1:]
    half, device = cos.shape[1] if n_rot is None else n_rot // 2, raw.device
    width = (n_head + n_kv_head) * d + n_kv_head * d_v
    check("raw", raw, torch.float32, (n_batch, width), device, strided=True)
    check("cos", cos, torch.float32, (None, cos.shape[1]), device)
    check("sin", sin, torch.float32, tuple(cos.shape), device)
    check("pos", pos, torch.int32, (n_batch,), device)
    if q_scale is not None:
        check("q_scale", q_scale, torch.float32, (len(cos),), device)
    if 2 * half > d:
        raise ValueError(f"cos has {half} pairs: expected at most {d // 2}")
    if half > cos.shape[1]:
        raise ValueError(f"n_rot = {n_rot}: cos has {cos.shape[1]} pairs")
    for name, x, shape in zip(
        Heads._fields, heads,
        ((n_head, d), (n_kv_head, d), (n_kv_head, d_v), (n_head, d), (n_kv_head, d)), strict=True,
    ):  # fmt: skip
        check(f"out.{name}", x, torch.float32, (n_batch, *shape), device)
    sizes = {"q_bias": n_head * d, "k_bias": n_kv_head * d, "v_bias": n_kv_head * d_v}
    sizes |= {"q_norm": d, "k_norm": d}
    vectors = dict(zip(sizes, (*biases, *norms), strict=True))
    for name, vector in vectors.items():
        if vector is not None:
            check(name, vector, torch.float32, (sizes[name],), device)
    for name in ("bias", "norm"):
        if (vectors[f"q_{name}"] is None) != (vectors[f"k_{name}"] is None):
            raise ValueError(f"q_{name} and k_{name}: expected both or none")
    given = [raw if vector is None else vector for vector in vectors.values()]
    _split_heads_kernel[(n_batch, n_head + 2 * n_kv_head)](
        raw, *given, cos, sin, raw if q_scale is None else q_scale, pos, *heads, n_head, n_kv_head,
        d, d_v, half, eps, raw.stride(0), cos.stride(0), BIAS=biases[0] is not None,
        V_BIAS=biases[2] is not None, NORM=norms[0] is not None, SCALE=q_scale is not None,
        INTERLEAVED=interleaved, BLOCK=triton.next_power_of_2(max(d, d_v)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _silu_multiply_kernel(gate_up_ptr, out_ptr, n, stride_gate_up, stride_out, BLOCK: tl.constexpr):
    b = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + b * stride_gate_up + c, mask=c < n, other=0)
    up = tl.load(gate_up_ptr + b * stride_gate_up + n + c, mask=c < n, other=0)
    e = tl.exp(-tl.abs(gate))  # never overflows
    product = gate * (tl.where(gate >= 0, 1.0, e) / (1.0 + e)) * up
    tl.store(out_ptr + b * stride_out + c, product.to(out_ptr.dtype.element_ty), mask=c < n)


def silu_multiply(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns silu(gate) * up (B, n_ff), f32, f16 or bf16, of gate_up f32 (B, 2 n_ff)."""
    n_batch, n = gate_up.shape[0], gate_up.shape[1] // 2
    device = gate_up.device
    if out is None:
        out = torch.empty(n_batch, n, dtype=torch.float32, device=device)
    check("gate_up", gate_up, torch.float32, (n_batch, 2 * n), device, strided=True)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    check("out", out, dtypes, (n_batch, n), device, strided=True)
    _silu_multiply_kernel[(triton.cdiv(n, 512), n_batch)](
        gate_up, out, n, gate_up.stride(0), out.stride(0), BLOCK=512, num_warps=4
    )
    return out
