"""Exact selection of the k largest scores of every row, on the GPU, without the host.

Scores become int32 keys of the same order. One program reads a short row once. It bisects the range
of its keys until k of them are at or above a threshold. A long row takes several programs. Each
program finds the largest key of each of some strided groups. The k-th largest of these is a lower
bound of the k-th largest of all keys, and few keys lie between. Each program collects its keys that
reach the bound. One program selects from them. All steps count integers, so the result does not
depend on the order of programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.threshold import (
    LEAST,
    order_keys,
    threshold_of_row,
    threshold_of_tile,
)
from sparsekv_cli.kernels.checks import check

CHUNK = 2048  # entries of a row that one program reads
CHUNKS = 64  # fewest chunks for which a kernel is compiled, that is 131072 entries
ONE_PROGRAM = 8192  # one program selects from a whole row of up to so many entries
REGISTERS = 8192  # keys that a program's registers can hold


@triton.jit
def _middle_of(n_ptr, k_ptr, b, n_first, n_last, k_less):
    """Returns the first and the end of the rows to choose from, and the number to choose."""
    n = tl.load(n_ptr + b)
    begin = tl.minimum(n_first, n)
    end = tl.maximum(n - n_last, begin)
    k = tl.load(k_ptr + b) - k_less - (n - end)
    return begin, end, tl.minimum(tl.maximum(k, 0), end - begin)


@triton.jit
def _tops_kernel(
    scores_ptr, n_ptr, k_ptr, wanted_ptr, tops_ptr, n_list, n_first, n_last, k_less, stride_sb,
    stride_su,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SOME:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(wanted_ptr + row) == 0:
            return
    b, u = row // n_list, row % n_list
    begin, end, _ = _middle_of(n_ptr, k_ptr, b, n_first, n_last, k_less)
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    is_key = (j >= begin) & (j < end)
    scores = tl.load(scores_ptr + b * stride_sb + u * stride_su + j, mask=is_key, other=0.0)
    keys = tl.where(is_key, order_keys(scores), LEAST)
    # Large scores are often neighbours, so neighbours go to different groups.
    tops = tl.max(tl.reshape(keys, [CHUNK // GROUPS, GROUPS]), 0)
    at = (row * tl.num_programs(0) + chunk) * GROUPS
    tl.store(tops_ptr + at + tl.arange(0, GROUPS), tops)


@triton.jit(do_not_specialize=["n_top"])
def _bound_kernel(
    n_ptr, k_ptr, wanted_ptr, tops_ptr, bound_ptr, n_list, n_first, n_last, k_less, n_top,
    BLOCK: tl.constexpr, IN_REGISTERS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if SOME:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(wanted_ptr + row) == 0:
            return
    _, _, k = _middle_of(n_ptr, k_ptr, row // n_list, n_first, n_last, k_less)
    bound = tl.where(k > 0, LEAST, 0x7FFFFFFF)
    if (k > 0) & (k <= n_top):
        if IN_REGISTERS:
            j = tl.arange(0, BLOCK)
            tops = tl.load(tops_ptr + row * n_top + j, mask=j < n_top, other=LEAST)
            bound = threshold_of_tile(tops, j < n_top, k)
        else:
            bound = threshold_of_row(tops_ptr + row * n_top, n_top, k, BLOCK)
    tl.store(bound_ptr + row, bound)


@triton.jit(do_not_specialize=["n_chunk"])
def _collect_kernel(
    scores_ptr, n_ptr, k_ptr, wanted_ptr, bound_ptr, sizes_ptr, keys_ptr, rows_ptr, n_list, n_first,
    n_last, k_less, n_chunk, stride_sb, stride_su,
    CHUNK: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Writes a chunk's entries that reach the bound, and their number, to the chunk's place."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if SOME:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(wanted_ptr + row) == 0:
            return
    b, u = row // n_list, row % n_list
    begin, end, _ = _middle_of(n_ptr, k_ptr, b, n_first, n_last, k_less)
    bound = tl.load(bound_ptr + row)
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    is_key = (j >= begin) & (j < end)
    scores = tl.load(scores_ptr + b * stride_sb + u * stride_su + j, mask=is_key, other=0.0)
    keys = order_keys(scores)
    is_wanted = (is_key & (keys >= bound)).to(tl.int32)
    tl.store(sizes_ptr + row * n_chunk + chunk, tl.sum(is_wanted, 0))
    at = (row * n_chunk + chunk) * CHUNK + tl.cumsum(is_wanted, 0) - 1
    tl.store(keys_ptr + at, keys, mask=is_wanted > 0)
    tl.store(rows_ptr + at, j, mask=is_wanted > 0)


@triton.jit
def _close_gaps(
    sizes_at, keys_at, rows_at, n_chunk, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, LOG_C: tl.constexpr,
):  # fmt: skip
    """Moves the collected entries of all chunks to the front; returns their number.

    ``sizes`` are replaced by the first place of each chunk's part. A place is never after its
    source, so no entry is overwritten before it is moved.
    """
    chunks = tl.arange(0, BLOCK_C)
    sizes = tl.load(sizes_at + chunks, mask=chunks < n_chunk, other=0)
    size = tl.sum(sizes, 0)
    tl.debug_barrier()
    tl.store(sizes_at + chunks, tl.cumsum(sizes, 0) - sizes, mask=chunks < n_chunk)
    tl.debug_barrier()
    for start in range(0, size, BLOCK):
        j = start + tl.arange(0, BLOCK)
        chunk = tl.zeros([BLOCK], tl.int32)  # the last chunk whose part starts at j or before
        for i in tl.static_range(LOG_C):
            later = chunk + (BLOCK_C >> (i + 1))
            begin = tl.load(sizes_at + later, mask=later < n_chunk, other=0x7FFFFFFF)
            chunk = tl.where(begin <= j, later, chunk)
        source = chunk * CHUNK + j - tl.load(sizes_at + chunk)
        keys = tl.load(keys_at + source, mask=j < size, other=0)
        rows = tl.load(rows_at + source, mask=j < size, other=0)
        tl.debug_barrier()
        tl.store(keys_at + j, keys, mask=j < size)
        tl.store(rows_at + j, rows, mask=j < size)
        tl.debug_barrier()
    return size


@triton.jit(do_not_specialize=["n_chunk"])
def _select_kernel(
    scores_ptr, n_ptr, k_ptr, wanted_ptr, sizes_ptr, keys_ptr, rows_ptr, idx_ptr, counts_ptr,
    n_list, n_first, n_last, k_less, n_chunk, stride_sb, stride_su, stride_ib, stride_iu,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, BLOCK_C: tl.constexpr,
    LOG_C: tl.constexpr, COLLECTED: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Selects from one row: finds the threshold of its (collected) entries, lists the largest."""
    row = tl.program_id(0).to(tl.int64)
    if SOME:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(wanted_ptr + row) == 0:
            return
    b, u = row // n_list, row % n_list
    begin, end, k = _middle_of(n_ptr, k_ptr, b, n_first, n_last, k_less)
    scores_at = scores_ptr + b * stride_sb + u * stride_su + begin
    idx_at = idx_ptr + b * stride_ib + u * stride_iu
    lane = tl.arange(0, BLOCK)
    size = end - begin
    keys_at, rows_at = keys_ptr, rows_ptr
    if COLLECTED:
        keys_at, rows_at = keys_ptr + row * n_chunk * CHUNK, rows_ptr + row * n_chunk * CHUNK
        size = _close_gaps(
            sizes_ptr + row * n_chunk, keys_at, rows_at, n_chunk, CHUNK, BLOCK, BLOCK_C,
            LOG_C,
        )  # fmt: skip
        keys = tl.load(keys_at + lane, mask=lane < size, other=LEAST)
    else:
        keys = order_keys(tl.load(scores_at + lane, mask=lane < size, other=0.0))
    threshold = tl.where(k > 0, LEAST, 0x7FFFFFFF)  # all entries pass, or none
    if (k > 0) & (k < size):
        if size <= BLOCK:
            threshold = threshold_of_tile(keys, lane < size, k)
        else:
            if COLLECTED:
                threshold = threshold_of_row(keys_at, size, k, BLOCK)
    n_above = tl.sum(((lane < size) & (keys > threshold)).to(tl.int32), 0)
    if COLLECTED:
        for start in range(BLOCK, size, BLOCK):
            j = start + lane
            more = tl.load(keys_at + j, mask=j < size, other=LEAST)
            n_above += tl.sum((more > threshold).to(tl.int32), 0)
    n_tie = k - n_above  # number of entries equal to the threshold that are taken, the first ones
    above, ties = 0, 0
    lane = tl.arange(0, PIECE)
    for start in range(0, size, PIECE):
        j = start + lane
        if COLLECTED:
            piece = tl.load(keys_at + j, mask=j < size, other=LEAST)
            rows = tl.load(rows_at + j, mask=j < size, other=0)
        else:
            piece = order_keys(tl.load(scores_at + j, mask=j < size, other=0.0))
            rows = begin + j
        is_above = ((j < size) & (piece > threshold)).to(tl.int32)
        is_tie = ((j < size) & (piece == threshold)).to(tl.int32)
        sums = tl.cumsum(is_above + (is_tie << 16), 0)
        n_over, n_equal = above + (sums & 0xFFFF) - is_above, ties + (sums >> 16) - is_tie
        is_chosen = (is_above > 0) | ((is_tie > 0) & (n_equal < n_tie))
        place = begin + n_over + tl.minimum(n_equal, n_tie)
        tl.store(idx_at + place, rows, mask=is_chosen)
        above += tl.sum(is_above, 0)
        ties += tl.sum(is_tie, 0)
    n = tl.load(n_ptr + b)
    for start in range(0, begin, PIECE):
        tl.store(idx_at + start + lane, start + lane, mask=start + lane < begin)
    for start in range(0, n - end, PIECE):
        tl.store(idx_at + begin + k + start + lane, end + start + lane, mask=start + lane < n - end)
    tl.store(counts_ptr + row, begin + k + n - end)


class SelectScratch(NamedTuple):
    """Memory between the launches of ``select_largest`` over R long rows."""

    tops: torch.Tensor  # int32 (R, n_top): the largest key of each group
    bound: torch.Tensor  # int32 (R,)
    sizes: torch.Tensor  # int32 (R, n_chunk): entries of a chunk that reach the bound
    keys: torch.Tensor  # int32 (R, n_chunk CHUNK): keys of these entries, at each chunk's place
    rows: torch.Tensor  # int32 (R, n_chunk CHUNK): their rows


def _groups(n_max: int, k_max: int) -> int:
    """Returns the groups of a chunk. All chunks have, if possible, 2 k_max groups or more."""
    size = 32
    while size > 2 and n_max < 2 * size * k_max:
        size //= 2
    return CHUNK // size


def select_scratch(n_row: int, n_max: int, k_max: int, device: torch.device) -> SelectScratch:
    """Allocates memory for ``select_largest`` of n_row = B U rows."""
    n_chunk = triton.cdiv(n_max, CHUNK) if n_max > ONE_PROGRAM else 0
    sizes = (n_chunk * _groups(n_max, k_max), 1, n_chunk, n_chunk * CHUNK, n_chunk * CHUNK)
    return SelectScratch(*(_empty(n_row, size, device) for size in sizes))


def _empty(n_row: int, size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(n_row, size, dtype=torch.int32, device=device)


def select_largest_ref(
    scores: torch.Tensor, n: torch.Tensor, k: torch.Tensor, n_first: int = 0, n_last: int = 0
) -> list[list[list[int]]]:
    """Python reference of ``select_largest``: returns the rows of each list, ascending."""
    chosen = []
    for of_sequence, n_row, k_row in zip(scores.tolist(), n.tolist(), k.tolist(), strict=True):
        begin = min(n_first, n_row)
        end = max(n_row - n_last, begin)
        room = max(0, k_row - (n_row - end))
        lists = []
        for of_list in of_sequence:
            best = sorted(range(begin, end), key=lambda j: (-of_list[j], j))[:room]
            lists.append([*range(begin), *sorted(best), *range(end, n_row)])
        chosen.append(lists)
    return chosen


def select_largest(
    scores: torch.Tensor,
    n: torch.Tensor,
    n_max: int,
    k: torch.Tensor,
    k_max: int,
    n_first: int = 0,
    n_last: int = 0,
    wanted: torch.Tensor | None = None,
    idx: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    scratch: SelectScratch | None = None,
    k_less: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the first n_first rows of every list, the last n_last, and the best between them.

    scores f32 (B, U, >= n_max), no NaN among the first n int32 (B,) of a row, n_max >= all n. k
    int32 (B,) minus k_less is the number of rows chosen in addition to the first n_first; k_max is
    at least that. It includes the last n_last rows, which are chosen even if k is less. Ties go to
    the first. Returns idx int32 (B, U, n_first + max(k_max, n_last)), ascending, and the numbers of
    rows in it, counts int32 (B, U). wanted int32 (B, U), if given: lists whose entry is 0 are not
    written.
    """
    n_batch, n_list = scores.shape[:2]
    device, n_row = scores.device, n_batch * n_list
    check("scores", scores, torch.float32, (None, None, None), device, strided=True)
    check("n", n, torch.int32, (n_batch,), device)
    check("k", k, torch.int32, (n_batch,), device)
    if wanted is not None:
        check("wanted", wanted, torch.int32, (n_batch, n_list), device)
    some = wanted is not None
    if scores.shape[2] < n_max:
        raise ValueError(f"scores has {scores.shape[2]} a row: expected {n_max} or more")
    width = n_first + max(k_max, n_last)
    if idx is None:
        idx = torch.empty(n_batch, n_list, width, dtype=torch.int32, device=device)
    if counts is None:
        counts = torch.empty(n_batch, n_list, dtype=torch.int32, device=device)
    check("idx", idx, torch.int32, (n_batch, n_list, None), device, strided=True)
    check("counts", counts, torch.int32, (n_batch, n_list), device)
    if idx.shape[2] < width:
        raise ValueError(f"idx has room for {idx.shape[2]} rows: expected {width}")
    if scratch is None:
        scratch = select_scratch(n_row, n_max, k_max, device)
    n_chunk = triton.cdiv(n_max, CHUNK)
    block_c = max(CHUNKS, triton.next_power_of_2(n_chunk))
    strides = scores.stride()[:2]
    of_rows = (n_list, n_first, n_last, k_less)
    collected = n_max > ONE_PROGRAM
    if collected:
        groups = _groups(n_max, k_max)
        n_top = n_chunk * groups
        for name, x, size in zip(
            SelectScratch._fields,
            scratch,
            (n_top, 1, n_chunk, n_chunk * CHUNK, n_chunk * CHUNK),
            strict=True,
        ):
            check(f"scratch.{name}", x, torch.int32, (n_row, size), device)
        tops, bound, sizes, keys, rows = scratch
        _tops_kernel[(n_chunk, n_row)](
            scores, n, k, wanted, tops, *of_rows, *strides, CHUNK=CHUNK, GROUPS=groups, SOME=some,
            num_warps=4,
        )  # fmt: skip
        block = min(REGISTERS, triton.next_power_of_2(n_top))
        _bound_kernel[(n_row,)](
            n, k, wanted, tops, bound, *of_rows, n_top, BLOCK=block, IN_REGISTERS=n_top <= block,
            SOME=some, num_warps=_warps(block),
        )  # fmt: skip
        _collect_kernel[(n_chunk, n_row)](
            scores, n, k, wanted, bound, sizes, keys, rows, *of_rows, n_chunk, *strides,
            CHUNK=CHUNK, SOME=some, num_warps=4,
        )  # fmt: skip
        block = min(REGISTERS, max(1024, triton.next_power_of_2(2 * k_max)))
    else:
        block = max(64, triton.next_power_of_2(n_max))
    _select_kernel[(n_row,)](
        scores, n, k, wanted, scratch.sizes, scratch.keys, scratch.rows, idx, counts, *of_rows,
        n_chunk, *strides, *idx.stride()[:2], CHUNK=CHUNK,
        BLOCK=block, PIECE=min(block, 1024 if block > 2048 else 512), BLOCK_C=block_c,
        LOG_C=block_c.bit_length() - 1, COLLECTED=collected, SOME=some, num_warps=_warps(block),
    )  # fmt: skip
    return idx, counts


def _warps(block: int) -> int:
    """Returns the warps of a program: eight keys a thread, 1 to 8 warps."""
    return max(1, min(8, block // 256))
