"""The record of a layer with latent attention, which decode steps read and write.

B: rows (sequences) of a step; H heads; R rotated dims of a head's key, N other dims. A latent
vector has L elements, a head's value has D. W is R + L, padded to 16.
"""

import numpy as np

from sparsekv_cli.cpu.layer.state import N_COLUMNS
from sparsekv_cli.cpu.vector.declared import Size, f32, i64, u8
from sparsekv_cli.cpu.vector.fields import KernelFields


class LatentState(KernelFields):
    """The steps between a layer's first products and its attention, and after the attention."""

    capacity: Size
    n_head: Size
    n_projected: Size
    n_queries: Size  # H (N + R)
    n_rank: Size  # L
    n_rank_q: Size
    n_pairs: Size  # R / 2, or more
    width: Size  # W
    n_attended: Size  # H D
    n_normed: Size
    n_quantized: Size
    quantized_row: Size

    n_nope: int  # N
    n_rot: int  # R
    eps: float

    # The matrices of head 0 that take its N dims and its latent vector, then the one of queries.
    # The matrices of further heads follow those of head 0. The last is zeros without ``q_norm``.
    matrices: np.ndarray = i64(3, N_COLUMNS)
    kv_norm: np.ndarray = f32("n_rank")
    # of the vector from which queries are projected; without it they are in ``projected``
    q_norm: np.ndarray = f32("n_rank_q", optional=True)
    projected: np.ndarray = f32("capacity", "n_projected")
    cos: np.ndarray = f32("capacity", "n_pairs")  # the rotation of each row's position
    sin: np.ndarray = f32("capacity", "n_pairs")
    # rotated dims, then the latent vector
    q: np.ndarray = f32("capacity", "n_head", 1, "width")
    q_nope: np.ndarray = f32("capacity", "n_head", 1, "width")
    k: np.ndarray = f32("capacity", 1, 1, "width")
    k_nope: np.ndarray = f32("capacity", 1, 1, "width")
    values: np.ndarray = f32("capacity", "n_attended")  # the heads' results

    # Scratch.
    queries: np.ndarray = f32("capacity", "n_queries")
    normed: np.ndarray = f32("capacity", "n_normed")
    quantized: np.ndarray = u8("n_quantized", "quantized_row")  # inputs: one of a head of a row
