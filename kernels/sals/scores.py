"""SALS' scores on the GPU: the attention that each latent would get, estimated in latent space.

``score_latents`` rotates the queries to the centre of each block of 128 tokens. It projects them to
latent space, one matrix product a head. Then a block's queries of all heads score the block's
latents at once. The softmax weights of the heads are added. ``score_summed`` is the paper's score.
The queries of blocks are written to memory; they are small compared to the latents. So all blocks
share a product that reads D once. A fused kernel would read D again for every few blocks.
"""

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.arrivals import arrive_last, check_arrived
from sparsekv_cli.kernels.attention.select import GroupTops, parts_of_tops
from sparsekv_cli.kernels.attention.threshold import LEAST, order_keys, write_tops
from sparsekv_cli.kernels.checks import check
from sparsekv_cli.kernels.sals.latent import ROPE_BLOCK, DeviceBasis, _cos_sin

TILE = 32  # latents that are scored at a time; a divisor of ROPE_BLOCK
TILES_A_PROGRAM = 4
QUERY_TILE = 64  # blocks whose queries one program projects
PROGRAMS = 264  # target of the projections: two on each of 132 multiprocessors
IMPORTANCE_TILE = 512  # tokens whose weights one program adds up


@triton.jit
def _block_queries_kernel(
    q_ptr, damp_ptr, turns_ptr, decode_ptr, n_ptr, out_ptr, scale, first, n_head, n_kv, span,
    D: tl.constexpr, HALF: tl.constexpr, R_STAR: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(2)
    b, h = unit // n_head, unit % n_head
    n_block = tl.cdiv(tl.load(n_ptr + b), ROPE)
    first_block = tl.program_id(0) * BLOCK_B
    if first_block < n_block:
        i = tl.arange(0, BLOCK_H)
        block = first_block + tl.arange(0, BLOCK_B)
        q_at = q_ptr + unit * D
        damp = tl.load(damp_ptr + i, mask=i < HALF, other=0.0) * scale
        x = (tl.load(q_at + i, mask=i < HALF, other=0.0) * damp)[None, :]
        y = (tl.load(q_at + HALF + i, mask=i < HALF, other=0.0) * damp)[None, :]
        half_turns = tl.load(turns_ptr + i, mask=i < HALF, other=0)
        twice = (2 * first + ROPE - 1 + 2 * ROPE * block).to(
            tl.int64
        )  # the centre lies between two tokens
        cos, sin = _cos_sin(twice[:, None] * half_turns[None, :])
        turned1 = (x * cos + y * sin).to(tl.float16)
        turned2 = (y * cos - x * sin).to(tl.float16)
        j = 2 * HALF + tl.arange(0, BLOCK_REST)
        rest = tl.load(q_at + j, mask=j < D, other=0.0) * scale
        n_block_max = tl.num_programs(0) * BLOCK_B
        out_at = out_ptr + (((b.to(tl.int64) * n_block_max + block) * n_head + h) * R_STAR)[:, None]
        decode_at = decode_ptr + h // (n_head // n_kv) * D
        start = tl.program_id(1) * span
        for column in range(start, tl.minimum(start + span, R_STAR), BLOCK_C):
            c = column + tl.arange(0, BLOCK_C)[None, :]
            c_at = decode_at + c * (n_kv * D)
            mask = (c < R_STAR) & (i < HALF)[:, None]
            d1 = tl.load(c_at + i[:, None], mask=mask, other=0.0)
            d2 = tl.load(c_at + HALF + i[:, None], mask=mask, other=0.0)
            projected = tl.dot(turned2, d2, acc=tl.dot(turned1, d1))
            if D > 2 * HALF:
                mask = (c < R_STAR) & (j < D)[:, None]
                d3 = tl.load(c_at + j[:, None], mask=mask, other=0.0)
                projected += tl.sum(rest[:, None] * d3.to(tl.float32), axis=0)[None, :]
            mask = (c < R_STAR) & (block < n_block)[:, None]
            tl.store(out_at + c, projected.to(tl.float16), mask=mask)


@triton.jit
def _head_lses(
    peaks_at, masses_at, exact_lse_at, h, n_exact, stride_exact, n_head, n_chunk,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns the lse f32 (HEADS,) of a sequence's chunks of latents and its sets of exact rows."""
    is_head = h < n_head
    peak = tl.full(h.shape, float("-inf"), tl.float32)
    mass = tl.zeros(h.shape, tl.float32)
    for piece in range(n_exact):
        lse = tl.load(exact_lse_at + piece * stride_exact + h, mask=is_head, other=float("-inf"))
        new_peak = tl.maximum(peak, lse)
        safe = tl.where(new_peak > float("-inf"), new_peak, 0.0)
        mass = mass * tl.exp(peak - safe) + tl.exp(lse - safe)
        peak = new_peak
    for start in range(0, n_chunk, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at = i[:, None] * n_head + h[None, :]
        mask = (i < n_chunk)[:, None] & is_head[None, :]
        peaks = tl.load(peaks_at + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        masses = tl.load(masses_at + at, mask=mask, other=0.0, cache_modifier=".cg")
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        safe = tl.where(new_peak > float("-inf"), new_peak, 0.0)
        parts = tl.sum(masses * tl.exp(peaks - safe[None, :]), axis=0)
        mass = mass * tl.exp(peak - safe) + parts
        peak = new_peak
    return peak + tl.log(tl.maximum(mass, 1e-30))


@triton.jit
def _score_latents_kernel(
    queries_ptr, latents_ptr, n_ptr, scores_ptr, peaks_ptr, masses_ptr, exact_lse_ptr, arrived_ptr,
    lse_ptr, factor, first, n_head, n_exact, capacity, r, n_block_max, stride_sb, stride_sh,
    R_STAR: tl.constexpr, HEADS: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr,
    SIZE: tl.constexpr, ROPE: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The last program of a sequence writes the lse of each head."""
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n = tl.load(n_ptr + b)
    h, c = tl.arange(0, HEADS), tl.arange(0, BLOCK_C)
    is_head = h < n_head
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS], tl.float32)
    for i in range(TILES):
        start_of_tile = (chunk * TILES + i) * SIZE
        block = start_of_tile // ROPE
        j = start_of_tile + tl.arange(0, SIZE)
        is_token = j < n
        heads = tl.where(start_of_tile < n, n_head, 0)  # queries of empty blocks were not written
        queries_at = queries_ptr + ((b * n_block_max + block) * n_head + h[:, None]) * R_STAR
        latents_at = latents_ptr + (b * capacity + first + j[:, None]) * r
        scores = tl.zeros([HEADS, SIZE], tl.float32)
        for start in range(0, R_STAR, BLOCK_C):
            column = start + c[None, :]
            is_column = column < R_STAR
            mask = is_column & (h < heads)[:, None]
            queries = tl.load(queries_at + column, mask=mask, other=0.0)
            mask = is_column & is_token[:, None]
            latents = tl.load(latents_at + column, mask=mask, other=0.0)
            scores = tl.dot(queries, tl.trans(latents), acc=scores)
        scores = tl.where(is_token[None, :], scores * factor, float("-inf"))
        scores_at = scores_ptr + b * stride_sb + h[:, None] * stride_sh + j[None, :]
        tl.store(scores_at, scores, mask=is_head[:, None] & is_token[None, :])
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        safe = tl.where(new_peak > float("-inf"), new_peak, 0.0)
        exponentials = tl.exp(scores - safe[:, None])
        mass = mass * tl.exp(peak - safe) + tl.sum(exponentials, axis=1)
        peak = new_peak
    at = (b * tl.num_programs(0) + chunk) * n_head + h
    tl.store(peaks_ptr + at, peak, mask=is_head)
    tl.store(masses_ptr + at, mass, mask=is_head)
    n_chunk = tl.num_programs(0)
    if arrive_last(arrived_ptr + b, n_chunk):
        parts = b * n_chunk * n_head
        lse = _head_lses(
            peaks_ptr + parts, masses_ptr + parts, exact_lse_ptr + b * n_head, h, n_exact,
            tl.num_programs(1) * n_head, n_head, n_chunk, BLOCK_S,
        )  # fmt: skip
        tl.store(lse_ptr + b * n_head + h, lse, mask=is_head)


@triton.jit
def _importance_kernel(
    scores_ptr, lse_ptr, n_ptr, out_ptr, tops_ptr, n_head, n_group, stride_sb, stride_sh, stride_ob,
    BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """SIZE: see attention/scores.py."""
    b = tl.program_id(1).to(tl.int64)
    n = tl.load(n_ptr + b)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for h in range(n_head):
        lse = tl.load(lse_ptr + b * n_head + h)
        at = scores_ptr + b * stride_sb + h * stride_sh + j
        total += tl.exp(tl.load(at, mask=j < n, other=float("-inf")) - lse)
    tl.store(out_ptr + b * stride_ob + j, total, mask=j < n)
    if SIZE > 0:
        _write_tops(total, j < n, tops_ptr, b, tl.program_id(0) * BLOCK, n_group, SIZE)


@triton.jit
def _write_tops(scores, is_token, tops_ptr, b, start, n_group, SIZE: tl.constexpr):
    """``write_tops`` of a tile of a sequence's scores."""
    keys = tl.where(is_token, order_keys(scores), LEAST)
    at = b + tl.arange(0, 1)
    write_tops(keys[None, :], tops_ptr + at * n_group, at >= 0, start, n_group, SIZE)


def score_latents(
    q: torch.Tensor,
    damp: torch.Tensor,
    basis: DeviceBasis,
    latents: torch.Tensor,
    score_rank: int,
    n: torch.Tensor,
    n_max: int,
    scale: float,
    first: int,
    exact_lse: torch.Tensor,
    arrived: torch.Tensor,
    tops: GroupTops | None = None,
) -> torch.Tensor:
    """Returns the sum over the heads of their softmax weights of the latents, f32 (B, 1, n_max).

    q f32 (B, H, d), rotated to its position. damp f32 (pairs,): factors of the rotated pairs; 0 for
    pairs that rotate much within a block. latents f16 (B, capacity, r), by position. The positions
    first .. first + n[b] are scored, n int32 (B,) <= n_max, by their first ``score_rank`` columns.
    exact_lse f32 (S, B, H): log of the sum of exponentials of S sets of other rows. arrived: see
    ``attend_rows``, a count for each sequence. tops: memory for what ``select_largest`` needs of
    long rows.
    """
    n_batch, n_head, d = q.shape
    capacity, r = latents.shape[1:]
    half, device = len(basis.half_turns), q.device
    check("q", q, torch.float32, (None, None, basis.d), device)
    check("damp", damp, torch.float32, (half,), device)
    check("latents", latents, torch.float16, (n_batch, None, basis.decode.shape[0]), device)
    check("n", n, torch.int32, (n_batch,), device)
    check_arrived(arrived, n_batch, 1, device)
    check("exact_lse", exact_lse, torch.float32, (None, n_batch, n_head), device)
    n_tile = triton.cdiv(n_max, ROPE_BLOCK * QUERY_TILE)
    shape = n_batch, n_tile * QUERY_TILE, n_head, score_rank
    queries = torch.empty(shape, dtype=torch.float16, device=device)
    columns = max(16, min(64, triton.next_power_of_2(score_rank)))
    # A head's angles are computed once for all columns, unless that gives too few programs.
    n_span = max(1, min(triton.cdiv(score_rank, columns), PROGRAMS // (n_tile * n_batch * n_head)))
    span = triton.cdiv(triton.cdiv(score_rank, columns), n_span) * columns
    _block_queries_kernel[(n_tile, triton.cdiv(score_rank, span), n_batch * n_head)](
        q, damp, basis.half_turns, basis.decode, n, queries, scale, first, n_head, basis.n_kv,
        span, D=d, HALF=half, R_STAR=score_rank, BLOCK_H=max(16, triton.next_power_of_2(half)),
        BLOCK_REST=triton.next_power_of_2(max(1, d - 2 * half)), BLOCK_B=QUERY_TILE,
        BLOCK_C=columns, ROPE=ROPE_BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    n_chunk = triton.cdiv(n_max, TILE * TILES_A_PROGRAM)
    scores = torch.empty(n_batch, n_head, n_max, dtype=torch.float32, device=device)
    peaks, masses = torch.empty(2, n_batch, n_chunk, n_head, device=device)
    lse = torch.empty(n_batch, n_head, device=device)
    _score_latents_kernel[(n_chunk, n_batch)](
        queries, latents, n, scores, peaks, masses, exact_lse, arrived, lse, basis.decode_factor,
        first, n_head, len(exact_lse), capacity, r, shape[1], *scores.stride()[:2],
        R_STAR=score_rank,
        HEADS=max(16, triton.next_power_of_2(n_head)), BLOCK_C=columns, TILES=TILES_A_PROGRAM,
        SIZE=TILE, ROPE=ROPE_BLOCK, BLOCK_S=64, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty(n_batch, 1, n_max, dtype=torch.float32, device=device)
    top_keys, n_group, size = parts_of_tops(tops, n_batch, 1, n_max, device)
    _importance_kernel[(triton.cdiv(n_max, IMPORTANCE_TILE), n_batch)](
        scores, lse, n, out, top_keys, n_head, n_group, *scores.stride()[:2], n_max,
        BLOCK=IMPORTANCE_TILE, SIZE=size, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _score_summed_kernel(
    query_ptr, latents_ptr, n_ptr, out_ptr, tops_ptr, first, capacity, r, n_max, n_group,
    R_STAR: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """SIZE: see attention/scores.py."""
    b = tl.program_id(1).to(tl.int64)
    n = tl.load(n_ptr + b)
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK_C)
    latents_at = latents_ptr + (b * capacity + first + j[:, None]) * r
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, R_STAR, BLOCK_C):
        column = start + c
        query = tl.load(query_ptr + b * R_STAR + column, mask=column < R_STAR, other=0.0)
        mask = (j < n)[:, None] & (column < R_STAR)[None, :]
        latents = tl.load(latents_at + column[None, :], mask=mask, other=0.0)
        total += tl.sum(latents.to(tl.float32) * query[None, :], axis=1)
    tl.store(out_ptr + b * n_max + j, total, mask=j < n)
    if SIZE > 0:
        _write_tops(total, j < n, tops_ptr, b, tl.program_id(0) * BLOCK, n_group, SIZE)


def score_summed(
    query: torch.Tensor,
    latents: torch.Tensor,
    n: torch.Tensor,
    n_max: int,
    first: int,
    tops: GroupTops | None = None,
) -> torch.Tensor:
    """Returns the paper's scores f32 (B, 1, n_max).

    query f32 (B, r*): the sum of all heads' queries. latents f16 (B, capacity, r): the positions
    first .. first + n[b] are scored by their first r* columns. tops: see ``score_latents``.
    """
    n_batch, score_rank = query.shape
    capacity, r = latents.shape[1:]
    check("query", query, torch.float32, (None, None), query.device)
    check("latents", latents, torch.float16, (n_batch, None, None), query.device)
    check("n", n, torch.int32, (n_batch,), query.device)
    out = torch.empty(n_batch, 1, n_max, dtype=torch.float32, device=query.device)
    top_keys, n_group, size = parts_of_tops(tops, n_batch, 1, n_max, query.device)
    _score_summed_kernel[(triton.cdiv(n_max, 64), n_batch)](
        query, latents, n, out, top_keys, first, capacity, r, n_max, n_group, R_STAR=score_rank,
        BLOCK_C=min(128, triton.next_power_of_2(score_rank)), BLOCK=64, SIZE=size, num_warps=4,
    )  # fmt: skip
    return out
