"""Scores of pages on the GPU, for Quest and FreeKV: the mean of a group's softmax.

cpu/quest/pages.py defines the scores of pages. Several programs score the pages of a kv head, a
split each (``score_split``). Each counts its arrival when it is done. The last to arrive pools the
scores of all and chooses (``list_best_pages``). No program waits for another.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.arrivals import check_arrived
from sparsekv_cli.kernels.attention.decode import QUERY_TYPES, TILE, _tiling, _width
from sparsekv_cli.kernels.attention.select import REGISTERS
from sparsekv_cli.kernels.attention.threshold import list_largest, order_keys
from sparsekv_cli.kernels.checks import check

PIECE = 1024  # pages that are pooled, and rows that are listed, at a time
READ_AGAIN = 2048  # keys that are read at a time if they are read again and again


@triton.jit
def _halves(q):
    """Returns two f16 whose sum is the f32 ``q``."""
    high = q.to(tl.float16)
    return high, (q - high.to(tl.float32)).to(tl.float16)


@triton.jit
def split_query(
    q_ptr, unit, GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # -> f16 (TILE_H, BLOCK_D): relu(q) and -relu(-q) of a kv head's group, two halves each
    """Returns the queries for ``score_pages``."""
    t, c = tl.arange(0, TILE_H), tl.arange(0, BLOCK_D)
    head = unit.to(tl.int64) * GROUP + t
    q = tl.load(
        q_ptr + head[:, None] * D + c[None, :],
        mask=(t < GROUP)[:, None] & (c < D)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    up_high, up_low = _halves(tl.maximum(q, 0.0))
    down_high, down_low = _halves(tl.minimum(q, 0.0))
    return up_high, up_low, down_high, down_low


@triton.jit
def score_pages(
    up_high, up_low, down_high, down_low, hi_ptr, lo_ptr, at, stride_hn, j, last, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip # -> f32 (TILE_H, BLOCK_N): scores of the pages j < last
    """Returns scale (relu(q) . hi - relu(-q) . lo). at: offset of the first candidate's summary."""
    c = tl.arange(0, BLOCK_D)
    place = at + j.to(tl.int64)[:, None] * stride_hn + c[None, :]
    is_page = (j < last)[:, None] & (c < D)[None, :]
    hi = tl.load(hi_ptr + place, mask=is_page, other=0.0)
    lo = tl.load(lo_ptr + place, mask=is_page, other=0.0)
    scores = tl.dot(up_high, tl.trans(hi))
    scores = tl.dot(up_low, tl.trans(hi), acc=scores)
    scores = tl.dot(down_high, tl.trans(lo), acc=scores)
    return tl.dot(down_low, tl.trans(lo), acc=scores) * scale


@triton.jit
def score_split(
    q_ptr, hi_ptr, lo_ptr, scores_ptr, peak_ptr, mass_ptr, at, stride_hn, n_page, scale, n_split,
    n_page_max,
    GROUP: tl.constexpr, TILE_H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Writes each head's scores of a split's pages, and peak and mass of their softmax.

    at: offset of the first candidate's summary. n_page: candidates of the kv head.
    """
    split, unit = tl.program_id(0), tl.program_id(1)
    chunk = tl.cdiv(tl.cdiv(n_page, n_split), BLOCK_N) * BLOCK_N
    last = tl.minimum((split + 1) * chunk, n_page)
    up_high, up_low, down_high, down_low = split_query(q_ptr, unit, GROUP, TILE_H, D, BLOCK_D)
    t = tl.arange(0, TILE_H)
    head = unit.to(tl.int64) * GROUP + t
    peak = tl.full([TILE_H], float("-inf"), tl.float32)
    mass = tl.zeros([TILE_H], tl.float32)
    for start in range(split * chunk, last, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        scores = score_pages(
            up_high, up_low, down_high, down_low, hi_ptr, lo_ptr, at, stride_hn, j, last, scale, D,
            BLOCK_D,
        )  # fmt: skip
        out_at = scores_ptr + head[:, None] * n_page_max + j[None, :]
        tl.store(out_at, scores, mask=(t < GROUP)[:, None] & (j < last)[None, :])
        scores = tl.where((j < last)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        p = tl.exp2((scores - new_peak[:, None]) * 1.4426950408889634)
        mass = mass * tl.exp2((peak - new_peak) * 1.4426950408889634) + tl.sum(p, 1)
        peak = new_peak
    piece = (split * tl.num_programs(1) + unit) * GROUP + t
    tl.store(peak_ptr + piece, peak, mask=t < GROUP)
    tl.store(mass_ptr + piece, mass, mask=t < GROUP)


@triton.jit
def _pool_splits(
    scores_ptr, peak_ptr, mass_ptr, keys_at, unit, n_page, n_split, n_page_max,
    GROUP: tl.constexpr, TILE_G: tl.constexpr, BLOCK_S: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Writes the keys (``order_keys``) of the mean of a group's softmax over the candidates."""
    t, s = tl.arange(0, TILE_G), tl.arange(0, BLOCK_S)
    at = (s[None, :] * tl.num_programs(1) + unit) * GROUP + t[:, None]
    is_part = (t < GROUP)[:, None] & (s < n_split)[None, :]
    peaks = tl.load(peak_ptr + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    masses = tl.load(mass_ptr + at, mask=is_part, other=0.0, cache_modifier=".cg")
    peak = tl.where((t < GROUP) & (n_page > 0), tl.max(peaks, 1), 0.0)
    mass = tl.sum(masses * tl.exp2((peaks - peak[:, None]) * 1.4426950408889634), 1)
    mass = tl.where(t < GROUP, mass, 1.0)
    head = unit.to(tl.int64) * GROUP + t
    for start in range(0, n_page, PIECE):
        j = start + tl.arange(0, PIECE)
        scores = tl.load(
            scores_ptr + head[:, None] * n_page_max + j[None, :],
            mask=(t < GROUP)[:, None] & (j < n_page)[None, :], other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        shares = tl.exp2((scores - peak[:, None]) * 1.4426950408889634) / (mass[:, None] * GROUP)
        tl.store(keys_at + j, order_keys(tl.sum(shares, 0)), mask=j < n_page)


@triton.jit
def list_best_pages(
    scores_ptr, peak_ptr, mass_ptr, keys_at, unit, n_page, n_split, n_page_max, n_chosen, chosen_at,
    GROUP: tl.constexpr, TILE_G: tl.constexpr, BLOCK_S: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr, FITS: tl.constexpr,
):  # fmt: skip
    """Pools the scores of all splits, and writes the n_chosen best pages to ``chosen_at``."""
    _pool_splits(
        scores_ptr, peak_ptr, mass_ptr, keys_at, unit, n_page, n_split, n_page_max, GROUP, TILE_G,
        BLOCK_S, PIECE,
    )  # fmt: skip
    tl.debug_barrier()
    list_largest(
        keys_at, keys_at, 0, n_page, n_chosen, chosen_at, BLOCK, PIECE, FITS, ARE_SCORES=False,
        HAS_ROWS=False,
    )  # fmt: skip
    tl.debug_barrier()


class PageScratch(NamedTuple):
    """Memory between the programs of a launch that chooses pages, S splits."""

    scores: torch.Tensor  # f32 (B, H, n_page_max)
    peak: torch.Tensor  # f32 (S, B, H)
    mass: torch.Tensor  # f32 (S, B, H)
    keys: torch.Tensor  # int32 (B, G, n_page_max), of the pooled scores


class PageTiling(NamedTuple):
    """A launch over splits and kv heads, and the constants of its kernel."""

    grid: tuple[int, int]
    constants: dict[str, int]
    n_warp: int


def page_tiling(n_batch: int, n_head: int, n_kv_head: int, d: int, n_page_max: int) -> PageTiling:
    """Returns how a launch chooses among at most n_page_max pages."""
    group = n_head // n_kv_head
    block_n, n_split = _tiling(n_batch * n_kv_head, n_page_max, _width(d, d))
    fits = n_page_max <= REGISTERS
    block = max(64, triton.next_power_of_2(n_page_max)) if fits else min(REGISTERS, READ_AGAIN)
    constants = {
        "GROUP": group, "TILE_H": max(TILE, triton.next_power_of_2(group)),
        "TILE_G": triton.next_power_of_2(group), "D": d, "BLOCK_D": _width(d, d),
        "BLOCK_N": block_n, "BLOCK_S": triton.next_power_of_2(n_split), "BLOCK": block,
        "FITS": fits, "PIECE": min(block, PIECE),
    }  # fmt: skip
    n_warp = 4 if n_page_max <= REGISTERS // 2 else 8
    return PageTiling((n_split, n_batch * n_kv_head), constants, n_warp)


def page_scratch(
    n_batch: int, n_head: int, n_kv_head: int, d: int, n_page_max: int, device: torch.device
) -> PageScratch:
    """Allocates scratch for a launch that chooses among at most n_page_max pages."""
    n_split = page_tiling(n_batch, n_head, n_kv_head, d, n_page_max).grid[0]

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return PageScratch(
        scores=floats(n_batch, n_head, n_page_max),
        peak=floats(n_split, n_batch, n_head),
        mass=floats(n_split, n_batch, n_head),
        keys=torch.empty(n_batch, n_kv_head, n_page_max, dtype=torch.int32, device=device),
    )


def check_scored(
    q: torch.Tensor,
    hi: torch.Tensor,
    lo: torch.Tensor,
    n: torch.Tensor,
    budget: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Raises ValueError unless the arguments of a launch that chooses pages fit each other."""
    n_batch, n_head, d = q.shape
    n_kv_head, device = hi.shape[1], q.device
    check("q", q, QUERY_TYPES, (None, None, None), device)
    check("hi", hi, torch.float16, (n_batch, None, None, d), device, strided=True)
    check("lo", lo, torch.float16, tuple(hi.shape), device, strided=True)
    check("n", n, torch.int32, (n_batch,), device)
    check("budget", budget, torch.int32, (n_batch,), device)
    check_arrived(arrived, n_batch, n_kv_head, device)
    if n_head % n_kv_head:
        raise ValueError(f"q has {n_head} heads: expected a multiple of hi's {n_kv_head}")
    if hi.stride() != lo.stride():
        raise ValueError(f"lo has strides {lo.stride()}: expected hi's, {hi.stride()}")


def check_scratch(scratch: PageScratch, q: torch.Tensor, n_kv_head: int, n_page_max: int) -> None:
    """Raises ValueError unless ``scratch`` fits."""
    n_batch, n_head, d = q.shape
    n_split = page_tiling(n_batch, n_head, n_kv_head, d, n_page_max).grid[0]
    f32, parts = torch.float32, (n_split, n_batch, n_head)
    check("scratch.scores", scratch.scores, f32, (n_batch, n_head, n_page_max), q.device)
    check("scratch.peak", scratch.peak, f32, parts, q.device)
    check("scratch.mass", scratch.mass, f32, parts, q.device)
    shape = n_batch, n_kv_head, n_page_max
    check("scratch.keys", scratch.keys, torch.int32, shape, q.device)
