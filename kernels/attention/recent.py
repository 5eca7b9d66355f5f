"""Lists the rows of a sliding window with sinks, for attention on the GPU."""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.decode import _width
from sparsekv_cli.kernels.attention.rows import NewRow, check_new, store_row
from sparsekv_cli.kernels.checks import check

BLOCK = 256  # rows that one program lists


def recent_rows_ref(n: torch.Tensor, budget: torch.Tensor, n_sinks: int) -> list[list[int]]:
    """Python reference: returns the rows of each sequence."""
    sizes = zip(n.tolist(), budget.tolist(), strict=True)
    return [[*range(n_sinks), *range(n_b - budget_b, n_b)] for n_b, budget_b in sizes]


@triton.jit
def _recent_rows_kernel(
    n_ptr, budget_ptr, k_new_ptr, v_new_ptr, k_ptr, v_ptr, idx_ptr, counts_ptr, n_sinks, n_kv_head,
    stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_ib, stride_ig,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    part, unit = tl.program_id(0), tl.program_id(1)
    b, g = (unit // n_kv_head).to(tl.int64), (unit % n_kv_head).to(tl.int64)
    n, budget = tl.load(n_ptr + b), tl.load(budget_ptr + b)
    if part == 0:
        row = (n - 1).to(tl.int64)
        k_at = k_ptr + b * stride_kb + g * stride_kg + row * stride_kn
        v_at = v_ptr + b * stride_vb + g * stride_vg + row * stride_vn
        store_row(k_new_ptr + unit * D, k_at, tl.arange(0, BLOCK_D), D)
        store_row(v_new_ptr + unit * D_V, v_at, tl.arange(0, BLOCK_V), D_V)
        tl.store(counts_ptr + unit, n_sinks + budget)
    i = part * BLOCK + tl.arange(0, BLOCK)
    rows = tl.where(i < n_sinks, i, n - budget + i - n_sinks)
    tl.store(idx_ptr + b * stride_ib + g * stride_ig + i, rows, mask=i < n_sinks + budget)


def recent_rows(
    n: torch.Tensor,
    budget: torch.Tensor,
    budget_max: int,
    n_sinks: int,
    new: NewRow,
    k: torch.Tensor,
    v: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the first n_sinks and last ``budget`` rows of each sequence; writes its new row, n - 1.

    n, budget int32 (B,), n_sinks + budget <= n, budget <= budget_max; k, v: rows (rows.py), (B, G,
    capacity) of any strides. Returns idx int32 (B, G, n_sinks + budget_max)
    and the numbers of rows in it, counts int32 (B, G).
    """
    n_batch, n_kv_head, d = new.k.shape
    d_v, device, width = new.v.shape[2], new.k.device, n_sinks + budget_max
    check_new(new, k, v, d)
    check("n", n, torch.int32, (n_batch,), device)
    check("budget", budget, torch.int32, (n_batch,), device)
    idx = torch.empty(n_batch, n_kv_head, width, dtype=torch.int32, device=device)
    counts = torch.empty(n_batch, n_kv_head, dtype=torch.int32, device=device)
    _recent_rows_kernel[(triton.cdiv(width, BLOCK), n_batch * n_kv_head)](
        n, budget, *new, k, v, idx, counts, n_sinks, n_kv_head, *k.stride()[:3], *v.stride()[:3],
        *idx.stride()[:2], D=d, D_V=d_v, BLOCK_D=_width(d, d), BLOCK_V=_width(d_v, d_v),
        BLOCK=BLOCK, num_warps=2,
    )  # fmt: skip
    return idx, counts
