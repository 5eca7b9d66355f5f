"""Finds the k-th largest of int32 keys by bisection; parts of kernels in attention/select.py."""

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
