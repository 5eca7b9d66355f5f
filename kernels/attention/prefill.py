"""Attention of a prefill on the GPU, for layers with windows, softcaps or sinks.

A program takes some queries of one head and reads the rows that they attend to, block by block.
Rows before the window of its first query are not read. Layers without any of these use torch.
"""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import QUERY_TYPES, _width
from sparsekv_cli.kernels.attention.softmax import ScoreSoftmax, scaled, softmax_of
from sparsekv_cli.kernels.checks import check


def _tiling(width: int, is_f32: bool) -> tuple[int, int, int, int]:
    """Returns the queries and the rows of a tile, warps and stages. width: padded head size.

    Queries of f32 are two tiles of f16. All must fit into 99 KB.
    """
    if width <= 64:
        return 128, 64, 8, 2
    if width <= 128:
        return 64, 32, 4, 3
    if width <= 256:
        return (32, 32, 8, 1) if is_f32 else (64, 32, 8, 2)
    return 32, 16, 8, 1


@triton.jit
def _dot_halves(x, y, acc, HALVES: tl.constexpr):
    """Returns acc + x . y for y f16. HALVES: x is f32 and enters as two f16 halves."""
    high = x.to(tl.float16)
    acc = tl.dot(high, y, acc=acc)
    if HALVES:
        acc = tl.dot((x - high.to(tl.float32)).to(tl.float16), y, acc=acc)
    return acc


@triton.jit
def _attend_causal_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, scale, softcap, window, n_new, n, n_head,
    stride_qh, stride_qt, stride_kg, stride_kn, stride_vg, stride_vn, GROUP: tl.constexpr,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALVES: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    part = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries have most rows
    head = tl.program_id(1)
    t = part * BLOCK_M + tl.arange(0, BLOCK_M)
    is_query = t < n_new
    before = n - n_new  # rows before the first query
    end = before + t + 1  # of the rows that a query attends to
    first, last = 0, tl.minimum(n, before + (part + 1) * BLOCK_M)
    if WINDOW:
        first = tl.maximum(0, before + part * BLOCK_M + 1 - window) // BLOCK_N * BLOCK_N
    c, c_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    q = tl.load(
        q_ptr + head * stride_qh + t.to(tl.int64)[:, None] * stride_qt + c[None, :],
        mask=is_query[:, None] & (c < D)[None, :], other=0.0,
    )  # fmt: skip
    k_at = k_ptr + (head // GROUP).to(tl.int64) * stride_kg
    v_at = v_ptr + (head // GROUP).to(tl.int64) * stride_vg
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        peak = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head) * 1.4426950408889634
        mass += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(first, last, BLOCK_N):
        row = start + tl.arange(0, BLOCK_N)
        at = row.to(tl.int64)[:, None]
        is_row = (row < last)[:, None]
        k = tl.load(k_at + at * stride_kn + c[None, :], mask=is_row & (c < D)[None, :], other=0.0)
        v = tl.load(
            v_at + at * stride_vn + c_v[None, :], mask=is_row & (c_v < D_V)[None, :], other=0.0
        )
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = _dot_halves(q, tl.trans(k), scores, HALVES)
        scores = scaled(scores, scale, softcap, CAPPED)
        is_seen = row[None, :] < end[:, None]
        if WINDOW:
            is_seen = is_seen & (row[None, :] >= end[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(new_peak > float("-inf"), new_peak, 0.0)  # no row of a window so far
        old = tl.exp2(peak - safe)
        p = tl.exp2(scores - safe[:, None])
        mass = mass * old + tl.sum(p, 1)
        acc = _dot_halves(p, v, acc * old[:, None], HALVES)
        peak = new_peak
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    at = (t.to(tl.int64) * n_head + head)[:, None] * D_V + c_v[None, :]
    mask = is_query[:, None] & (c_v < D_V)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


def attend_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax: ScoreSoftmax | float,
    window: int = 0,
) -> torch.Tensor:
    """Returns attention of T queries to n rows, (H, T, d_v) of the type of q.

    q f32, f16 or bf16 (H, T, d), k f16 (G, n, d), v f16 (G, n, d_v), any strides of rows. Query t
    is row n - T + t. It attends to itself and the rows before it, with a window only to the last
    ``window`` of them. The queries and sums of f32 keep at least 20 bits, others 11.
    """
    (n_head, n_new, d), (n_kv, n, d_v), device = q.shape, v.shape, q.device
    softmax = softmax_of(softmax, n_head, device)
    check("q", q, QUERY_TYPES, (None, None, None), device, strided=True)
    check("k", k, torch.float16, (n_kv, n, d), device, strided=True)
    check("v", v, torch.float16, (n_kv, n, d_v), device, strided=True)
    if n_head % n_kv:
        raise ValueError(f"q has {n_head} heads: expected a multiple of k's {n_kv}")
    if n_new > n or window < 0:
        raise ValueError(f"{n_new} queries of {n} rows, a window of {window}")
    out = torch.empty(n_new, n_head, d_v, dtype=q.dtype, device=device)  # as products read it
    queries, rows, warps, stages = _tiling(_width(d, d_v), q.dtype == torch.float32)
    if n_new <= 16:
        queries, warps = 16, 4
    _attend_causal_kernel[(triton.cdiv(n_new, queries), n_head)](
        q, k, v, softmax.sinks, out, softmax.scale, softmax.softcap, window, n_new, n, n_head,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], GROUP=n_head // n_kv, D=d, D_V=d_v,
        BLOCK_D=_width(d, d), BLOCK_V=_width(d_v, d_v), BLOCK_M=queries, BLOCK_N=rows,
        HALVES=q.dtype == torch.float32, CAPPED=softmax.softcap > 0,
        SINKS=softmax.sinks is not None, WINDOW=window > 0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.transpose(0, 1)
