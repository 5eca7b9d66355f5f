"""Merges attention over disjoint sets of rows by their log-sum-exp, on the GPU."""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.checks import check


def merge_ref(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch reference: outs (S, B, H, d_v), lses (S, B, H) -> out (B, H, d_v), lse (B, H), f64."""
    lse = torch.logsumexp(lses.double(), 0)
    weight = torch.where(lse > -torch.inf, torch.exp(lses.double() - lse), 0)[..., None]
    return torch.where(weight > 0, weight * outs.double(), 0).sum(0), lse


@triton.jit
def merge_row(
    outs_ptr, lses_ptr, out_ptr, n_piece, n_row, row, c, D_V: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Merges the elements c of a row of n_piece pieces of n_row rows. Returns the row's lse."""
    peak = float("-inf")
    for start in range(0, n_piece, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        lses = tl.load(
            lses_ptr + s * n_row + row, mask=s < n_piece, other=float("-inf"), cache_modifier=".cg"
        )
        peak = tl.maximum(peak, tl.max(lses, 0))
    top = tl.where(peak > float("-inf"), peak, 0.0)
    mass = 0.0
    acc = tl.zeros([c.shape[0]], tl.float32)
    for start in range(0, n_piece, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        at = s * n_row + row
        lses = tl.load(lses_ptr + at, mask=s < n_piece, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2((lses - top) * 1.4426950408889634)
        outs = tl.load(
            outs_ptr + at[:, None] * D_V + c[None, :],
            mask=(weight > 0)[:, None] & (c < D_V)[None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        mass += tl.sum(weight, 0)
        acc += tl.sum(weight[:, None] * outs, 0)
    safe = tl.where(mass > 0, mass, 1.0)
    tl.store(out_ptr + row * D_V + c, acc / safe, mask=c < D_V)
    return tl.where(mass > 0, top + tl.log(safe), float("-inf"))


@triton.jit(do_not_specialize=["n_piece"])
def _merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, n_piece, n_row, D_V: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    lse = merge_row(outs_ptr, lses_ptr, out_ptr, n_piece, n_row, row, c, D_V, BLOCK_S)
    if HAS_LSE:
        tl.store(lse_ptr + row, lse, mask=tl.program_id(1) == 0)


def merge(
    outs: torch.Tensor,
    lses: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Merges attention over S disjoint sets of rows to attention over their union (B, H, d_v).

    outs f32 (S, B, H, d_v), lses f32 (S, B, H); an output whose lse is -inf is ignored. lse f32 (B,
    H), if given, is set to the lse of the union.
    """
    n_piece, n_batch, n_head, d_v = outs.shape
    device = outs.device
    check("outs", outs, torch.float32, (None, None, None, None), device)
    check("lses", lses, torch.float32, (n_piece, n_batch, n_head), device)
    if out is None:
        out = torch.empty(n_batch, n_head, d_v, dtype=torch.float32, device=device)
    check("out", out, torch.float32, (n_batch, n_head, d_v), device)
    if lse is not None:
        check("lse", lse, torch.float32, (n_batch, n_head), device)
    block = min(32, triton.next_power_of_2(d_v))
    _merge_kernel[(n_batch * n_head, triton.cdiv(d_v, block))](
        outs, lses, out, lse, n_piece, n_batch * n_head, D_V=d_v, BLOCK_S=64, BLOCK_V=block,
        HAS_LSE=lse is not None, num_warps=4,
    )  # fmt: skip
    return out
