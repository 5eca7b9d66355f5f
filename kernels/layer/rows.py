"""The steps of a decoder layer between its matrix products, for T rows of a prefill or of a step.

``rms_norm``: sum with the residual stream, and RMS norm. ``split_heads``: biases, norms and
rotation of the projections. ``gate_rows``: act(gate) * up. Each reads its rows once, computes in
f32 and rounds its results once. cpu/layer/prefill.py has the same steps and is the reference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check

TYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "clamped", "squared_relu")


def _rows_a_program(n_rows: int, width: int) -> int:
    """Returns how many of n_rows rows a program takes. width: elements of a row, a power of 2."""
    return 1 if n_rows <= 16 else max(1, min(16, 1024 // width))


@triton.jit
def _scale_of_norm(x, n, eps):
    """Returns 1 / sqrt(mean(x^2) + eps) of rows x (ROWS, BLOCK), as (ROWS, 1)."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=1)[:, None] / n + eps)


class Added(NamedTuple):
    """The result y of a block, which becomes part of x: x = factor (x + scale norm(y + bias)).

    y (T, n) f32, f16 or bf16; bias, and norm, the weights of an RMS norm, f32 (n,), or None.
    """

    y: torch.Tensor
    scale: float = 1.0
    bias: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    factor: float = 1.0


@triton.jit
def _rms_norm_kernel(
    x_ptr, y_ptr, bias_ptr, post_norm_ptr, weight_ptr, out_ptr, n_rows, n, eps, y_scale, factor,
    stride_x, stride_y, stride_out, ADD: tl.constexpr, BIAS: tl.constexpr, POST: tl.constexpr,
    WEIGHT: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    mask, t = (t < n_rows) & (c < n), t.to(tl.int64)
    x = tl.load(x_ptr + t * stride_x + c, mask=mask, other=0)
    if ADD:
        y = tl.load(y_ptr + t * stride_y + c, mask=mask, other=0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + c, mask=c < n, other=0)
        if POST:
            y *= _scale_of_norm(y, n, eps) * tl.load(post_norm_ptr + c, mask=c < n, other=0)
        x = (x + y * y_scale) * factor
        tl.store(x_ptr + t * stride_x + c, x, mask=mask)
    if OUT:
        if WEIGHT:
            x *= _scale_of_norm(x, n, eps) * tl.load(weight_ptr + c, mask=c < n, other=0)
        tl.store(out_ptr + t * stride_out + c, x.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    added: Added | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight (T, n), after ``added`` has become part of x.

    x f32 (T, n), weight f32 (n,); None: no norm, x itself. out f32, f16 or bf16 (T, n); None: it
    is new and f32. All may have any strides of rows.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _launch_norm(x, weight, eps, added, out)
    return out


def add_rows(x: torch.Tensor, eps: float, added: Added) -> None:
    """Makes ``added`` part of x f32 (T, n), in place. eps: of its norm."""
    _launch_norm(x, None, eps, added, None)


def _launch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    added: Added | None,
    out: torch.Tensor | None,
) -> None:
    (n_rows, n), device = x.shape, x.device
    check("x", x, torch.float32, (n_rows, n), device, strided=True)
    y, y_scale, bias, post_norm, factor = Added(x, 0.0) if added is None else added
    check("added.y", y, TYPES, (n_rows, n), device, strided=True)
    vectors = {"weight": weight, "added.bias": bias, "added.norm": post_norm}
    for name, vector in vectors.items():
        if vector is not None:
            check(name, vector, torch.float32, (n,), device)
    if out is not None:
        check("out", out, TYPES, (n_rows, n), device, strided=True)
    block = triton.next_power_of_2(n)
    rows = _rows_a_program(n_rows, block)
    _rms_norm_kernel[(triton.cdiv(n_rows, rows),)](
        x, y, bias, post_norm, weight, out, n_rows, n, eps, y_scale, factor, x.stride(0),
        y.stride(0), 0 if out is None else out.stride(0), ADD=added is not None,
        BIAS=bias is not None, POST=post_norm is not None, WEIGHT=weight is not None,
        OUT=out is not None, ROWS=rows, BLOCK=block,
        num_warps=min(16, max(1, rows * block // 512)),
    )  # fmt: skip


class Heads(NamedTuple):
    """T rows of a layer, contiguous and in half-split order: (T, heads, d) or (heads, T, d)."""

    q: torch.Tensor  # H heads of d elements, rotated
    k: torch.Tensor  # G heads of d elements, rotated
    v: torch.Tensor  # G heads of d_v elements
    q_nope: torch.Tensor  # H heads of d elements, before RoPE (after bias and norm)
    k_nope: torch.Tensor  # G heads of d elements


class HeadVectors(NamedTuple):
    """A layer's vectors, f32; None: the layer has no such bias or norm.

    biases of q, k and v: one element a row of the projection. Norms of q and k: (d,), or as wide as
    all heads for a norm over all heads of a row. v_norm (d_v,).
    """

    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    v_norm: torch.Tensor | None = None


class Rotation(NamedTuple):
    """Where and how rows are rotated.

    pos int32 (T,): the place of each row in cos, sin f32 (positions, at least n_rot / 2) and
    q_scale f32 (positions,), which multiplies the queries. interleaved: whether the rotation pairs
    in the file are (0, 1), (2, 3) ...
    """

    pos: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    q_scale: torch.Tensor
    n_rot: int
    interleaved: bool = False


def empty_heads(
    n_rows: int,
    sizes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    heads_first: bool = False,
) -> Heads:
    """Allocates the output of ``split_heads``. sizes: H, G, d, d_v."""
    n_head, n_kv, d, d_v = sizes
    shapes = (n_head, d), (n_kv, d), (n_kv, d_v), (n_head, d), (n_kv, d)
    wide = ((n, n_rows, x) if heads_first else (n_rows, n, x) for n, x in shapes)
    return Heads._make(torch.empty(shape, dtype=dtype, device=device) for shape in wide)


@triton.jit
def _place(t, head, n_rows, n_head, width, HEADS_FIRST: tl.constexpr):
    """Returns where a row's head begins in a tensor of Heads."""
    if HEADS_FIRST:
        at = (head.to(tl.int64) * n_rows + t) * width
    else:
        at = (t * n_head + head) * width
    return at


@triton.jit
def _split_heads_kernel(
    raw_ptr, q_bias_ptr, k_bias_ptr, v_bias_ptr, q_norm_ptr, k_norm_ptr, v_norm_ptr, cos_ptr,
    sin_ptr, q_scale_ptr, pos_ptr, q_ptr, k_ptr, v_ptr, q_nope_ptr, k_nope_ptr, n_rows, n_head,
    n_kv_head, d, d_v, q_step, half, eps, stride_raw, stride_rope, BIAS: tl.constexpr,
    V_BIAS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, V_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, HEADS_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """WIDE: a power of 2, at least the elements of all heads under one norm; 0: each has its own.

    The programs of q come first, then those of k and v.
    """
    t, unit = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None], tl.program_id(1)
    c = tl.arange(0, BLOCK)[None, :]
    is_row, t = t < n_rows, t.to(tl.int64)
    raw_ptr += t * stride_raw
    if unit >= n_head + n_kv_head:
        g = unit - n_head - n_kv_head
        mask = is_row & (c < d_v)
        at = n_head * q_step + n_kv_head * d + g * d_v + c
        v = tl.load(raw_ptr + at, mask=mask, other=0).to(tl.float32)
        if V_BIAS:
            v += tl.load(v_bias_ptr + g * d_v + c, mask=c < d_v, other=0)
        if V_NORM:
            v *= _scale_of_norm(v, d_v, eps) * tl.load(v_norm_ptr + c, mask=c < d_v, other=0)
        at = _place(t, g, n_rows, n_kv_head, d_v, HEADS_FIRST) + c
        tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=mask)
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
        mask = is_row & (c < d)
        step = tl.where(is_q, q_step, d)
        begin = raw_ptr + tl.where(is_q, 0, n_head * q_step)  # of the first head
        x = tl.load(begin + head * step + source, mask=mask, other=0).to(tl.float32)
        other = tl.load(begin + head * step + source_of_partner, mask=mask, other=0).to(tl.float32)
        if BIAS:
            bias_ptr = tl.where(is_q, q_bias_ptr, k_bias_ptr)
            x += tl.load(bias_ptr + head * d + source, mask=c < d, other=0)
            other += tl.load(bias_ptr + head * d + source_of_partner, mask=c < d, other=0)
        if NORM:
            norm_ptr = tl.where(is_q, q_norm_ptr, k_norm_ptr)
            if WIDE > 0:
                all_c = tl.arange(0, WIDE)[None, :]
                n_all = tl.where(is_q, n_head, n_kv_head) * d
                of_head = all_c // d * step + all_c % d
                mask_of_all = is_row & (all_c < n_all)
                whole = tl.load(begin + of_head, mask=mask_of_all, other=0).to(tl.float32)
                if BIAS:
                    whole += tl.load(bias_ptr + all_c, mask=all_c < n_all, other=0)
                scale = _scale_of_norm(whole, n_all, eps)
                norm_ptr += head * d
            else:
                scale = _scale_of_norm(x, d, eps)
            x *= scale * tl.load(norm_ptr + source, mask=c < d, other=0)
            other *= scale * tl.load(norm_ptr + source_of_partner, mask=c < d, other=0)
        pos = tl.load(pos_ptr + t, mask=is_row, other=0).to(tl.int64)
        q_scale = tl.where(is_q, tl.load(q_scale_ptr + pos, mask=is_row, other=1), 1.0)
        x *= q_scale
        other *= q_scale
        angle = pos * stride_rope + pair
        cos = tl.load(cos_ptr + angle, mask=is_row & turned, other=1)
        sin = tl.load(sin_ptr + angle, mask=is_row & turned, other=0)
        rotated = (x * cos + tl.where(first, -other, other) * sin).to(q_ptr.dtype.element_ty)
        before = x.to(q_ptr.dtype.element_ty)
        if is_q:
            at = _place(t, head, n_rows, n_head, d, HEADS_FIRST) + c
            tl.store(q_nope_ptr + at, before, mask=mask)
            tl.store(q_ptr + at, rotated, mask=mask)
        else:
            at = _place(t, head, n_rows, n_kv_head, d, HEADS_FIRST) + c
            tl.store(k_nope_ptr + at, before, mask=mask)
            tl.store(k_ptr + at, rotated, mask=mask)


def _check_rotation(rotation: Rotation, n_rows: int, d: int, device: torch.device) -> None:
    n_positions, n_pair = rotation.cos.shape
    check("pos", rotation.pos, torch.int32, (n_rows,), device)
    check("cos", rotation.cos, torch.float32, (n_positions, n_pair), device)
    check("sin", rotation.sin, torch.float32, (n_positions, n_pair), device)
    check("q_scale", rotation.q_scale, torch.float32, (n_positions,), device)
    if rotation.n_rot > min(d, 2 * n_pair):
        raise ValueError(f"n_rot = {rotation.n_rot}: heads have {d} dims, cos has {n_pair} pairs")


def _check_weights(weights: HeadVectors, sizes: Sequence[int], device: torch.device) -> bool:
    """Checks a layer's vectors. Returns whether the norms of q and k are over all heads."""
    n_head, n_kv, d, d_v = sizes
    is_wide = weights.q_norm is not None and n_head > 1 and weights.q_norm.shape != (d,)
    n_q, n_k = (n_head * d, n_kv * d) if is_wide else (d, d)
    lengths = n_head * d, n_kv * d, n_kv * d_v, n_q, n_k, d_v
    for name, vector, n in zip(HeadVectors._fields, weights, lengths, strict=True):
        if vector is not None:
            check(name, vector, torch.float32, (n,), device)
    for of_q, of_k in (("q_bias", "k_bias"), ("q_norm", "k_norm")):
        given = [getattr(weights, name) is not None for name in (of_q, of_k)]
        if n_kv and given[0] != given[1]:
            raise ValueError(f"{of_q} and {of_k}: expected both or none")
    return is_wide


def split_heads(
    raw: torch.Tensor,
    out: Sequence[torch.Tensor],
    rotation: Rotation,
    weights: HeadVectors,
    eps: float = 0.0,
    *,
    heads_first: bool = False,
    gated: bool = False,
) -> None:
    """Splits projected q, k and v, raw (T, H d + G d + G d_v), to ``out``, ordered as Heads.

    raw f32, f16 or bf16; out of one of these types. q and k must both have a bias or both have
    none; norms likewise. heads_first: whether out is (heads, T, d). gated: d elements of a gate
    follow each query's d elements. G may be 0: then raw has q alone.
    """
    heads, device = Heads._make(out), raw.device
    first, second = (1, 0) if heads_first else (0, 1)
    n_rows, n_head, d = heads.q.shape[first], heads.q.shape[second], heads.q.shape[2]
    n_kv, d_v = heads.v.shape[second], heads.v.shape[2]
    q_step, half = d * (1 + gated), rotation.n_rot // 2
    width = n_head * q_step + n_kv * (d + d_v)
    check("raw", raw, TYPES, (n_rows, width), device, strided=True)
    check("out.q", heads.q, TYPES, heads.q.shape, device)
    expected = ((n_head, d), (n_kv, d), (n_kv, d_v), (n_head, d), (n_kv, d))
    for name, x, (n, size) in zip(Heads._fields, heads, expected, strict=True):
        shape = (n, n_rows, size) if heads_first else (n_rows, n, size)
        check(f"out.{name}", x, heads.q.dtype, shape, device)
    _check_rotation(rotation, n_rows, d, device)
    is_wide = _check_weights(weights, (n_head, n_kv, d, d_v), device)
    if n_kv == 0:  # the pointers of k are not used, but they must have the type of those of q
        weights = weights._replace(k_bias=weights.q_bias, k_norm=weights.q_norm)
    wide = triton.next_power_of_2(max(n_head, n_kv) * d) if is_wide else 0
    block = triton.next_power_of_2(max(d, d_v))
    rows = _rows_a_program(n_rows, max(block, wide))
    _split_heads_kernel[(triton.cdiv(n_rows, rows), n_head + 2 * n_kv)](
        raw, *weights, rotation.cos, rotation.sin, rotation.q_scale, rotation.pos, *heads, n_rows,
        n_head, n_kv, d, d_v, q_step, half, eps, raw.stride(0), rotation.cos.stride(0),
        BIAS=weights.q_bias is not None, V_BIAS=weights.v_bias is not None,
        NORM=weights.q_norm is not None, WIDE=wide, V_NORM=weights.v_norm is not None,
        INTERLEAVED=rotation.interleaved, HEADS_FIRST=heads_first, ROWS=rows, BLOCK=block,
        num_warps=min(8, max(1, rows * max(block, wide) // 512)),
    )  # fmt: skip


@triton.jit
def _gate_rows_kernel(
    gate_up_ptr, out_ptr, n_rows, n, stride_gate_up, stride_out, ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, t = (t < n_rows) & (c < n), t.to(tl.int64)
    gate = tl.load(gate_up_ptr + t * stride_gate_up + c, mask=mask, other=0).to(tl.float32)
    if ACTIVATION == "squared_relu":
        gate = tl.where(gate < 0, 0.0, gate)
        product = gate * gate
    else:
        up = tl.load(gate_up_ptr + t * stride_gate_up + n + c, mask=mask, other=0).to(tl.float32)
        slope = gate
        if ACTIVATION == "gelu":  # 2 sqrt(2 / pi) (x + 0.044715 x^3)
            slope = gate * (1.5957691216057308 + 0.07135481282603493 * gate * gate)
        if ACTIVATION == "clamped":
            gate = tl.where(gate > 7, 7.0, gate)
            up = tl.where(up > 7, 7.0, tl.where(up < -7, -7.0, up)) + 1
            slope = 1.702 * gate
        e = tl.exp(-tl.abs(slope))  # never overflows
        product = gate * (tl.where(slope >= 0, 1.0, e) / (1.0 + e)) * up
    tl.store(out_ptr + t * stride_out + c, product.to(out_ptr.dtype.element_ty), mask=mask)


def gate_rows(
    gate_up: torch.Tensor, activation: str = "silu", out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns act(gate) * up (T, n) of gate_up (T, 2 n): gate, then up. Both f32, f16 or bf16.

    activation: one of ACTIVATIONS; cpu/layer/activation.py has the formulas. With ``squared_relu``
    there is no up, and gate_up is (T, n). out: where the result is written; None: it is new and of
    the type of gate_up.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation = {activation!r}: must be one of {', '.join(ACTIVATIONS)}")
    (n_rows, width), device = gate_up.shape, gate_up.device
    n = width if activation == "squared_relu" else width // 2
    if out is None:
        out = torch.empty(n_rows, n, dtype=gate_up.dtype, device=device)
    check("gate_up", gate_up, TYPES, (n_rows, width), device, strided=True)
    check("out", out, TYPES, (n_rows, n), device, strided=True)
    block = 512
    rows = _rows_a_program(n_rows, block)
    _gate_rows_kernel[(triton.cdiv(n, block), triton.cdiv(n_rows, rows))](
        gate_up, out, n_rows, n, gate_up.stride(0), out.stride(0), ACTIVATION=activation,
        ROWS=rows, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
