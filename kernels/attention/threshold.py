"""Finds and lists the k largest of int32 keys by bisection: parts of kernels that choose."""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31))  # below the key of every number


@triton.jit
def order_keys(scores):
    """Returns int32 keys with the order of f32 scores (no NaN), by a signed-magnitude flip."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """Returns (low + high) / 2, rounded up, of int32 whose sum may overflow.

    It is the bits that either has, minus half of the bits that differ.
    """
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def threshold_of_tile(keys, is_key, k):
    """Returns t with at least k keys >= t and at most k keys > t; 1 <= k <= number of keys."""
    low = tl.min(tl.where(is_key, keys, 0x7FFFFFFF), 0)
    high = tl.max(tl.where(is_key, keys, LEAST), 0)
    while low < high:
        middle = _middle(low, high)
        count = tl.sum((is_key & (keys >= middle)).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count == k, middle, tl.where(count > k, high, middle - 1))
    return low


@triton.jit
def threshold_of_row(at, n, k, BLOCK: tl.constexpr):
    """``threshold_of_tile`` for n int32 keys in memory, more than a tile holds."""
    low = tl.full([], 0x7FFFFFFF, tl.int32)
    high = tl.full([], LEAST, tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        low = tl.minimum(low, tl.min(tl.load(at + j, mask=j < n, other=0x7FFFFFFF), 0))
        high = tl.maximum(high, tl.max(tl.load(at + j, mask=j < n, other=LEAST), 0))
    while low < high:
        middle = _middle(low, high)
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            count += (tl.load(at + j, mask=j < n, other=LEAST) >= middle).to(tl.int32)
        total = tl.sum(count, 0)
        low = tl.where(total >= k, middle, low)
        high = tl.where(total == k, middle, tl.where(total > k, high, middle - 1))
    return low


@triton.jit
def _load_keys(at, j, size, ARE_SCORES: tl.constexpr):
    if ARE_SCORES:
        return order_keys(tl.load(at + j, mask=j < size, other=0.0))
    else:
        return tl.load(at + j, mask=j < size, other=LEAST)


@triton.jit
def list_largest(
    keys_at, rows_at, first, size, k, out_at,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, FITS: tl.constexpr, ARE_SCORES: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the rows of the k largest of ``size`` entries, ascending; ties go to the first.

    Row j is first + j, or HAS_ROWS: what ``rows_at`` says. 0 <= k <= size. FITS: size <= BLOCK. If
    not, entries are read again and again, and they must be keys, not scores. Returns the k-th
    largest key, or a lower bound of all keys if k == size.
    """
    lane = tl.arange(0, BLOCK)
    keys = _load_keys(keys_at, lane, size, ARE_SCORES)
    threshold = tl.where(k > 0, LEAST, 0x7FFFFFFF)  # all entries pass, or none
    if (k > 0) & (k < size):
        if FITS:  # noqa: SIM114 - decided when the kernel is compiled
            threshold = threshold_of_tile(keys, lane < size, k)
        elif size <= BLOCK:
            threshold = threshold_of_tile(keys, lane < size, k)
        else:
            threshold = threshold_of_row(keys_at, size, k, BLOCK)
    n_above = tl.sum(((lane < size) & (keys > threshold)).to(tl.int32), 0)
    if not FITS:
        for start in range(BLOCK, size, BLOCK):
            more = _load_keys(keys_at, start + lane, size, ARE_SCORES)
            n_above += tl.sum((more > threshold).to(tl.int32), 0)
    n_tie = k - n_above  # number of entries equal to the threshold that are taken, the first ones
    above, ties = 0, 0
    lane = tl.arange(0, PIECE)
    for start in range(0, size, PIECE):
        j = start + lane
        piece = _load_keys(keys_at, j, size, ARE_SCORES)
        rows = first + j
        if HAS_ROWS:
            rows = tl.load(rows_at + j, mask=j < size, other=0)
        is_above = ((j < size) & (piece > threshold)).to(tl.int32)
        is_tie = ((j < size) & (piece == threshold)).to(tl.int32)
        sums = tl.cumsum(is_above + (is_tie << 16), 0)
        n_over, n_equal = above + (sums & 0xFFFF) - is_above, ties + (sums >> 16) - is_tie
        is_chosen = (is_above > 0) | ((is_tie > 0) & (n_equal < n_tie))
        place = n_over + tl.minimum(n_equal, n_tie)
        tl.store(out_at + place, rows, mask=is_chosen)
        above += tl.sum(is_above, 0)
        ties += tl.sum(is_tie, 0)
    return threshold


@triton.jit
def write_tops(keys, at, is_list, start, n_group, SIZE: tl.constexpr):
    """Writes the largest key of each group of SIZE neighbours of a tile of lists.

    keys int32 (T, N): entries start .. start + N - 1, LEAST for those that there are not. at (T,):
    where the tops of each list begin. is_list (T,): which lists there are.
    """
    T: tl.constexpr = keys.shape[0]
    N: tl.constexpr = keys.shape[1] // SIZE
    tops = tl.max(tl.reshape(keys, [T, N, SIZE]), 2)
    group = start // SIZE + tl.arange(0, N)
    is_group = is_list[:, None] & (group < n_group)[None, :]
    tl.store(at[:, None] + group[None, :], tops, mask=is_group)
