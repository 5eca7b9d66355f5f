"""The steps of latent attention in a chunk of a prefill, on rows of bf16 or f32."""

import numpy as np
from numba import prange

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.rows import normed, rounded, widen


@njit(cache=True, nogil=True)
def turn_pairs(pairs, cos, sin, nope, turned):
    """Writes elements (0, 1), (2, 3) .. in half-split order, before and after the rotation.

    pairs, nope, turned: f32 or bf16. cos, sin f32 (pairs,).
    """
    half = cos.shape[0]
    for i in range(half):
        a, b = widen(pairs[2 * i]), widen(pairs[2 * i + 1])
        nope[i], nope[half + i] = rounded(nope, a), rounded(nope, b)
        turned[i] = rounded(turned, a * cos[i] - b * sin[i])
        turned[half + i] = rounded(turned, a * sin[i] + b * cos[i])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def norm_vectors(x, weight, eps, out, n_threads):
    """out (T, n) = the RMS norm of the first n elements of x (T, >= n); both f32 or both bf16."""
    n_rows, n = out.shape
    for part in prange(n_threads):
        work = np.empty(n, np.float32)
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            normed(x[t, :n], weight[:0], weight, eps, np.float32(0), work)
            for c in range(n):
                out[t, c] = rounded(out, work[c])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def split_rows(raw, norm, eps, cos, sin, k, k_nope, n_threads):
    """Makes a chunk's latent rows: k and k_nope (T, R + L) of raw (T, L + R).

    raw: the latent vector, then the rotated dims. norm f32 (L,). cos, sin f32 (T, R / 2).
    """
    n_rows, n_rank, n_rot = k.shape[0], norm.shape[0], 2 * cos.shape[1]
    for part in prange(n_threads):
        work = np.empty(n_rank, np.float32)
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            normed(raw[t, :n_rank], norm[:0], norm, eps, np.float32(0), work)
            for c in range(n_rank):
                value = rounded(k, work[c])
                k[t, n_rot + c], k_nope[t, n_rot + c] = value, value
            turn_pairs(raw[t, n_rank:], cos[t], sin[t], k_nope[t], k[t])


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def split_queries(raw, cos, sin, others, q, q_nope, n_threads):
    """Splits a chunk's queries raw (T, H (N + R)) into rotated and other dims.

    others (H, T, N): the dims that are not rotated. q, q_nope (H, T, >= R): the first R elements
    are set, in half-split order, q's rotated. cos, sin f32 (T, R / 2).
    """
    n_head, n_rows, n_nope = others.shape
    size = n_nope + 2 * cos.shape[1]
    for part in prange(n_threads):
        for t in range(part * n_rows // n_threads, (part + 1) * n_rows // n_threads):
            for h in range(n_head):
                head = raw[t, h * size : (h + 1) * size]
                for c in range(n_nope):
                    others[h, t, c] = head[c]
                turn_pairs(head[n_nope:], cos[t], sin[t], q_nope[h, t], q[h, t])
