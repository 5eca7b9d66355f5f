"""The start of FreeKV's step on the GPU: stores the new row, finds the kv heads to correct."""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import _width
from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.freekv.pages import (
    BEST,
    CORRECTED,
    END,
    N_STATE,
    N_STATISTICS,
    QUERY,
    Layout,
    PageTensors,
)


@triton.jit(do_not_specialize=["recent"])
def _enter_row_kernel(
    q_ptr, previous_ptr, query_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, state_ptr, statistics_ptr,
    n_ptr, budget_ptr, wanted_ptr, tau, recent, reserved, n_sink, n_ring, n_kv_head, n_resident,
    PAGE: tl.constexpr, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr,
    D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CURRENT: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n = tl.load(n_ptr + b)
    page = n_sink + (n - 1) // PAGE % n_ring
    row = ((b * n_resident + page) * PAGE + (n - 1) % PAGE) * n_kv_head + g
    c, c_v, t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, TILE_H)
    k_new = tl.load(k_new_ptr + unit * D + c, mask=c < D)
    v_new = tl.load(v_new_ptr + unit * D_V + c_v, mask=c_v < D_V)
    tl.store(k_ptr + row * D + c, k_new.to(tl.float16), mask=c < D)
    tl.store(v_ptr + row * D_V + c_v, v_new.to(tl.float16), mask=c_v < D_V)

    at = (unit * GROUP + t)[:, None] * D + c[None, :]
    is_q = (t < GROUP)[:, None] & (c < D)[None, :]
    q = tl.load(q_ptr + at, mask=is_q, other=0.0)
    previous = tl.load(previous_ptr + at, mask=is_q, other=0.0)
    sizes = tl.sqrt(tl.sum(q * q, 1)) * tl.sqrt(tl.sum(previous * previous, 1))
    cosines = tl.sum(q * previous, 1) / tl.where(sizes > 0, sizes, 1.0)
    turned = (tl.sum(cosines, 0) / GROUP < tau).to(tl.int32)
    state_at = state_ptr + unit * N_STATE
    n_best = tl.maximum((tl.load(budget_ptr + b) - reserved) // PAGE, 1)
    is_new = (tl.load(state_at + QUERY) != n - 1) | (tl.load(state_at + BEST) != n_best)
    is_new = (is_new | (tl.load(state_at + END) != (n - recent) // PAGE)).to(tl.int32)
    if CURRENT:
        wanted = is_new * 0 + 1
    else:
        wanted = tl.where(turned > 0, 1, is_new * 2)
        corrected_at = statistics_ptr + unit * N_STATISTICS + CORRECTED
        tl.store(corrected_at, tl.load(corrected_at) + turned)
    tl.store(wanted_ptr + unit, wanted)
    tl.store(query_ptr + at, tl.where(wanted == 1, q, previous), mask=is_q)


def enter_row(
    pages: PageTensors,
    layout: Layout,
    q: torch.Tensor,
    previous: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    recent: int,
    reserved: int,
    tau: float,
    *,
    current: bool,
    wanted: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """Writes the row of a decode step into the window, and finds the kv heads that choose again.

    q, previous f32 (B, H, d): queries of row n - 1 and of the row before it; k_new f32 (B, G, d),
    v_new (B, G, d_v); n, budget int32 (B,). wanted int32 (B, G) is set to 1 if the kv head chooses
    with q. It does if ``current``, or if its queries' mean cosine with the previous ones is below
    tau. It is set to 2 if the kv head has not yet chosen with the previous query, else to 0. query
    f32 (B, H, d) is set to the query to choose with. Other arguments: see ``offload_pages``.
    """
    n_batch, n_resident, page, n_kv, d = pages.k.shape
    d_v, n_head, device = pages.v.shape[4], q.shape[1], q.device
    for name, x in (("q", q), ("previous", previous), ("query", query)):
        check(name, x, torch.float32, (n_batch, n_head, d), device)
    check("k_new", k_new, torch.float32, (n_batch, n_kv, d), device)
    check("v_new", v_new, torch.float32, (n_batch, n_kv, d_v), device)
    check("n", n, torch.int32, (n_batch,), device)
    check("budget", budget, torch.int32, (n_batch,), device)
    check("wanted", wanted, torch.int32, (n_batch, n_kv), device)
    if n_head % n_kv:
        raise ValueError(f"q has {n_head} heads: expected a multiple of k's {n_kv}")
    group = n_head // n_kv
    _enter_row_kernel[(n_batch * n_kv,)](
        q, previous, query, k_new, v_new, pages.k, pages.v, pages.state, pages.statistics, n,
        budget, wanted, tau, recent, reserved, layout.n_sink, layout.n_ring, n_kv, n_resident,
        PAGE=page, GROUP=group, TILE_H=triton.next_power_of_2(group), D=d, D_V=d_v,
        BLOCK_D=_width(d, d), BLOCK_V=_width(d_v, d_v), CURRENT=current, num_warps=4,
    )  # fmt: skip
