"""Exact selection of the k largest scores of every row, on the GPU, without the host.

Scores become int32 keys of the same order. One program selects from a row. It bisects the range of
the keys until k of them are at or above a threshold. A short row is read once. A long row is cut
into groups of neighbours, and the kernel that makes the scores also writes the largest key of each
group (``write_tops``). The k largest keys lie in the k groups whose largest keys are largest. So
the program selects k groups, and then selects from their keys. It reads few others. All steps count
integers, so the result does not depend on the order of programs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsekv_cli.kernels.attention.threshold import (
    LEAST,
    list_largest,
    order_keys,
    write_tops,
)
from sparsekv_cli.kernels.checks import check

ONE_PROGRAM = 8192  # a row of up to so many entries has no groups
REGISTERS = 8192  # keys that a program's registers can hold
SMALLEST, LARGEST = 4, 32  # entries of a group
CHUNK = 2048  # entries whose groups one program of ``_tops_kernel`` reads


class GroupTops(NamedTuple):
    """The largest key of each group of ``size`` neighbours of B U long rows.

    The group of a row's first entry that can be chosen, and that of its last, are not read.
    """

    keys: torch.Tensor  # int32 (B, U, n_group)
    size: int


def empty_tops(
    n_batch: int, n_list: int, n_max: int, k_max: int, device: torch.device
) -> GroupTops | None:
    """Allocates what the kernel of the scores writes for ``select_largest``; None for short rows.

    A program reads n_max / size keys, and then k_max size others. The size makes both alike.
    """
    if n_max <= ONE_PROGRAM:
        return None
    size = SMALLEST
    while size < LARGEST and 4 * size * size * k_max <= n_max:
        size *= 2
    shape = n_batch, n_list, triton.cdiv(n_max, size)
    return GroupTops(torch.empty(shape, dtype=torch.int32, device=device), size)


def parts_of_tops(
    tops: GroupTops | None, n_batch: int, n_list: int, n_max: int, device: torch.device
) -> tuple[torch.Tensor | None, int, int]:
    """Returns a kernel's arguments for ``tops``: keys, groups of a row, and the size of a group.

    Without groups the last two are 0. Raises ValueError unless ``tops`` fits.
    """
    if tops is None:
        return None, 0, 0
    n_group = triton.cdiv(n_max, tops.size)
    check("tops.keys", tops.keys, torch.int32, (n_batch, n_list, n_group), device)
    return tops.keys, n_group, tops.size


@triton.jit
def _middle_of(n_ptr, k_ptr, b, n_first, n_last, k_less):
    """Returns the first and the end of the rows to choose from, and the number to choose."""
    n = tl.load(n_ptr + b)
    begin = tl.minimum(n_first, n)
    end = tl.maximum(n - n_last, begin)
    k = tl.load(k_ptr + b) - k_less - (n - end)
    return begin, end, tl.minimum(tl.maximum(k, 0), end - begin)


@triton.jit(do_not_specialize=["n_group"])
def _tops_kernel(
    scores_ptr, n_ptr, tops_ptr, n_list, n_group, stride_sb, stride_su, SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    start, row = tl.program_id(0) * CHUNK, tl.program_id(1).to(tl.int64)
    b, u = row // n_list, row % n_list
    n = tl.load(n_ptr + b)
    j = start + tl.arange(0, CHUNK)
    scores = tl.load(scores_ptr + b * stride_sb + u * stride_su + j, mask=j < n, other=0.0)
    keys = tl.where(j < n, order_keys(scores), LEAST)
    at = row + tl.arange(0, 1)
    write_tops(keys[None, :], tops_ptr + at * n_group, at >= 0, start, n_group, SIZE)


@triton.jit
def _write_top(scores_at, tops_at, group, begin, end, SIZE: tl.constexpr):
    """Writes the largest key of a group's entries from ``begin`` to ``end`` - 1."""
    j = group * SIZE + tl.arange(0, SIZE)
    is_key = (j >= begin) & (j < end)
    keys = order_keys(tl.load(scores_at + j, mask=is_key, other=0.0))
    tl.store(tops_at + group, tl.max(tl.where(is_key, keys, LEAST), 0))


@triton.jit(do_not_specialize=["n_group", "n_candidate"])
def _select_kernel(
    scores_ptr, n_ptr, k_ptr, tops_ptr, groups_ptr, keys_ptr, rows_ptr, idx_ptr, counts_ptr,
    n_list, n_first, n_last, k_less, n_group, n_candidate, stride_sb, stride_su, stride_ib,
    stride_iu,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, GROUPS_FIT: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Selects from one row. SIZE: entries of a group; 0: the row is short and has no groups."""
    row = tl.program_id(0).to(tl.int64)
    b, u = row // n_list, row % n_list
    begin, end, k = _middle_of(n_ptr, k_ptr, b, n_first, n_last, k_less)
    scores_at = scores_ptr + b * stride_sb + u * stride_su
    idx_at = idx_ptr + b * stride_ib + u * stride_iu
    lane = tl.arange(0, PIECE)
    if SIZE == 0:
        list_largest(
            scores_at + begin, scores_at, begin, end - begin, k, idx_at + begin, BLOCK, PIECE,
            FITS=True, ARE_SCORES=True, HAS_ROWS=False,
        )  # fmt: skip
    elif k > 0:
        tops_at, groups_at = tops_ptr + row * n_group, groups_ptr + row * n_candidate
        keys_at, rows_at = keys_ptr + row * n_candidate, rows_ptr + row * n_candidate
        first, last = begin // SIZE, (end - 1) // SIZE
        _write_top(scores_at, tops_at, first, begin, end, SIZE)
        _write_top(scores_at, tops_at, last, begin, end, SIZE)
        tl.debug_barrier()
        n_chosen = tl.minimum(k, last + 1 - first)
        bound = list_largest(
            tops_at + first, rows_at, first, last + 1 - first, n_chosen, groups_at, BLOCK_G, PIECE,
            GROUPS_FIT, ARE_SCORES=False, HAS_ROWS=False,
        )  # fmt: skip
        tl.debug_barrier()
        size = tl.zeros_like(k)
        for start in range(0, n_chosen * SIZE, PIECE):
            i = start + lane
            group = tl.load(groups_at + i // SIZE, mask=i < n_chosen * SIZE, other=0)
            j = group * SIZE + i % SIZE
            is_key = (i < n_chosen * SIZE) & (j >= begin) & (j < end)
            keys = order_keys(tl.load(scores_at + j, mask=is_key, other=0.0))
            is_candidate = (is_key & (keys >= bound)).to(tl.int32)
            at = size + tl.cumsum(is_candidate, 0) - 1
            tl.store(keys_at + at, keys, mask=is_candidate > 0)
            tl.store(rows_at + at, j, mask=is_candidate > 0)
            size += tl.sum(is_candidate, 0)
        tl.debug_barrier()
        list_largest(
            keys_at, rows_at, begin, size, k, idx_at + begin, BLOCK, PIECE, FITS=False,
            ARE_SCORES=False, HAS_ROWS=True,
        )  # fmt: skip
    n = tl.load(n_ptr + b)
    for start in range(0, begin, PIECE):
        tl.store(idx_at + start + lane, start + lane, mask=start + lane < begin)
    for start in range(0, n - end, PIECE):
        tl.store(idx_at + begin + k + start + lane, end + start + lane, mask=start + lane < n - end)
    tl.store(counts_ptr + row, begin + k + n - end)


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
    idx: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    k_less: int = 0,
    tops: GroupTops | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the first n_first rows of every list, the last n_last, and the best between them.

    scores f32 (B, U, >= n_max), no NaN among the first n int32 (B,) of a row, n_max >= all n. k
    int32 (B,) minus k_less is the number of rows chosen in addition to the first n_first; k_max is
    at least that. It includes the last n_last rows, which are chosen even if k is less. Ties go to
    the first. Returns idx int32 (B, U, n_first + max(k_max, n_last)), ascending, and the numbers of
    rows in it, counts int32 (B, U). tops: ``empty_tops``, as the kernel of the scores has filled
    them; None: another launch does that for long rows.
    """
    n_batch, n_list = scores.shape[:2]
    device, n_row = scores.device, n_batch * n_list
    check("scores", scores, torch.float32, (None, None, None), device, strided=True)
    check("n", n, torch.int32, (n_batch,), device)
    check("k", k, torch.int32, (n_batch,), device)
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
    if tops is None:
        tops = empty_tops(n_batch, n_list, n_max, k_max, device)
        if tops is not None:
            _fill_tops(scores, n, tops)
    top_keys, n_group, size = parts_of_tops(tops, n_batch, n_list, n_max, device)
    scratch: list[torch.Tensor | None] = [None] * 3
    n_candidate, block = 0, max(64, triton.next_power_of_2(n_max))
    if tops is not None:
        n_candidate = min(max(1, k_max), n_group) * size
        shape = n_row, n_candidate
        scratch = [torch.empty(shape, dtype=torch.int32, device=device) for _ in range(3)]
        block = min(REGISTERS, max(1024, triton.next_power_of_2(2 * k_max)))
    block_g = min(REGISTERS, triton.next_power_of_2(max(1, n_group)))
    widest = max(block, block_g)
    _select_kernel[(n_row,)](
        scores, n, k, top_keys, *scratch, idx, counts, n_list, n_first, n_last, k_less,
        n_group, n_candidate, *scores.stride()[:2], *idx.stride()[:2],
        SIZE=size, BLOCK=block, BLOCK_G=block_g, GROUPS_FIT=n_group <= block_g,
        PIECE=min(block, 1024 if widest > 2048 else 512), num_warps=_warps(widest),
    )  # fmt: skip
    return idx, counts


def _fill_tops(scores: torch.Tensor, n: torch.Tensor, tops: GroupTops) -> None:
    """Writes the largest key of each group of scores f32 (B, U, any)."""
    n_batch, n_list, n_group = tops.keys.shape
    grid = triton.cdiv(n_group * tops.size, CHUNK), n_batch * n_list
    _tops_kernel[grid](
        scores, n, tops.keys, n_list, n_group, *scores.stride()[:2], SIZE=tops.size, CHUNK=CHUNK,
        num_warps=4,
    )  # fmt: skip


def _warps(block: int) -> int:
    """Returns the warps of a program: eight keys a thread, 1 to 8 warps."""
    return max(1, min(8, block // 256))
