"""K of a layer in two parts: Kdom is scanned to score all keys, rows of Krest are gathered.

Kdom holds each kv head's dominant dims. It is only scanned, so it lies in blocks of 16 tokens, dim
by dim. Sixteen scores are one vector, and nothing is summed across lanes. Krest holds the other
dims. It is gathered only, so it lies by rows, as V does. f16 are moved as u16, bit for bit.
"""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import LANES

BLOCK = LANES  # tokens of a block of Kdom
PIECE = 1024  # rows that a thread moves at a time, whole blocks


@njit(cache=True, nogil=True)
def _split_rows(k, dims, first, last, dom, rest):
    """``split_keys`` of one kv head's rows first..last."""
    n_dom, n_rest = dom.shape[1], dims.shape[0] - dom.shape[1]
    for j in range(first, last):
        for c in range(n_dom):
            dom[j // BLOCK, c, j % BLOCK] = k[j, dims[c]]
        for c in range(n_rest):
            rest[j, c] = k[j, dims[n_dom + c]]
        for c in range(n_rest, rest.shape[1]):
            rest[j, c] = 0


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def split_keys(k, n, dims, dom, rest):
    """Splits the first n rows of K into its two parts.

    k u16 (G, >= n, >= d). dims int32 (G, d): a permutation of the dims, the dominant ones first.
    dom u16 (G, >= n/16, n_dom, 16). rest u16 (G, >= n, d - n_dom padded), its padding set to 0.
    """
    n_part = (n + PIECE - 1) // PIECE
    for task in prange(k.shape[0] * n_part):
        head, part = task // n_part, task % n_part
        last = min(n, PIECE * (part + 1))
        _split_rows(k[head], dims[head], PIECE * part, last, dom[head], rest[head])


@njit(cache=True, nogil=True)
def _join_rows(dom, rest, dims, first, last, k):
    """``join_keys`` of one kv head's rows first..last."""
    n_dom = dom.shape[1]
    for j in range(first, last):
        for c in range(dims.shape[0]):
            k[j, dims[c]] = dom[j // BLOCK, c, j % BLOCK] if c < n_dom else rest[j, c - n_dom]


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def join_keys(dom, rest, n, dims, k):
    """The inverse of ``split_keys``: fills k u16 (G, >= n, >= d) up to row n and dim d."""
    n_part = (n + PIECE - 1) // PIECE
    for task in prange(k.shape[0] * n_part):
        head, part = task // n_part, task % n_part
        last = min(n, PIECE * (part + 1))
        _join_rows(dom[head], rest[head], dims[head], PIECE * part, last, k[head])


def split_keys_ref(k, dims, n_dom):
    """numpy reference: k (G, n, d) -> dom (G, ceil(n / 16), n_dom, 16), rest (G, n, d - n_dom)."""
    permuted = np.stack([rows[:, order] for rows, order in zip(k, dims, strict=True)])
    n_head, n = k.shape[:2]
    dom = np.zeros((n_head, -(-n // BLOCK) * BLOCK, n_dom), k.dtype)
    dom[:, :n] = permuted[:, :, :n_dom]
    return dom.reshape(n_head, -1, BLOCK, n_dom).swapaxes(2, 3), permuted[:, :, n_dom:]
