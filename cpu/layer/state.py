"""Everything that decode steps read and write in a layer besides its cache, declared once.

B: rows (sequences) of a step; H heads, G kv heads; d' = d padded to 16, as d_v'.
"""

import numpy as np

from sparsekv_cli.cpu.vector.declared import Size, f32, i64, u8
from sparsekv_cli.cpu.vector.fields import KernelFields

N_COLUMNS = 6  # of a matrix table, see layer/products.py


class LayerState(KernelFields):
    """One layer: its weights and its buffers, which other layers may share."""

    capacity: Size  # most rows of a step
    n_embd: Size
    n_matrices: Size
    n_regions: Size
    n_q: Size  # rows of the matrix of q; of k and v, as far as these have a bias
    n_k: Size
    n_v: Size
    n_q_norm: Size  # elements of q_norm, of k_norm and of v_norm
    n_k_norm: Size
    n_value_norm: Size
    n_head: Size  # H; 0 for a recurrent layer
    n_kv: Size
    width: Size  # d'
    width_v: Size  # d_v'
    n_pairs: Size
    n_projected: Size  # rows of the inputs' matrices
    n_packed: Size
    value_dim: Size
    n_hidden: Size
    n_quantized: Size

    n_head_kv: int  # G, or 0 if the layer reads another layer's rows
    head_dim: int
    n_ff: int
    n_rot: int
    partner: int  # address of the next layer's record if both have the same input, or 0
    n_inputs: int  # matrices before o: q, k, v; a recurrent layer has others
    gated: bool  # whether d elements of a gate follow each query's d projected elements
    interleaved: bool  # whether the pairs of a rotation are (0, 1), (2, 3) ... in q and k
    activation: int  # of the gate, see layer/activation.py
    eps: float
    residual_scale: float  # factor of the rows that are added to x

    attn_norm: np.ndarray = f32("n_embd", optional=True)
    ffn_norm: np.ndarray = f32("n_embd", optional=True)
    attn_post_norm: np.ndarray = f32("n_embd", optional=True)  # of the rows that are added to x
    ffn_post_norm: np.ndarray = f32("n_embd", optional=True)
    q_bias: np.ndarray = f32("n_q", optional=True)
    k_bias: np.ndarray = f32("n_k", optional=True)
    v_bias: np.ndarray = f32("n_v", optional=True)
    o_bias: np.ndarray = f32("n_embd", optional=True)
    q_norm: np.ndarray = f32("n_q_norm", optional=True)  # of each head, or of all together
    k_norm: np.ndarray = f32("n_k_norm", optional=True)
    v_norm: np.ndarray = f32("n_value_norm", optional=True)
    # A matrix table: n_inputs, then the later ones, of which layers with experts have others.
    matrices: np.ndarray = i64("n_matrices", N_COLUMNS)
    regions: np.ndarray = i64(
        "n_regions", 2
    )  # ``matrix_regions`` of its matrices and the next ones
    x: np.ndarray = f32("capacity", "n_embd")  # the residual stream
    cos: np.ndarray = f32("capacity", "n_pairs")  # the rotation of each row's position
    sin: np.ndarray = f32("capacity", "n_pairs")
    q_scale: np.ndarray = f32("capacity")  # factor of a row's queries
    q: np.ndarray = f32("capacity", "n_head", 1, "width", optional=True)
    q_nope: np.ndarray = f32("capacity", "n_head", 1, "width", optional=True)
    k: np.ndarray = f32("capacity", "n_kv", 1, "width", optional=True)
    k_nope: np.ndarray = f32("capacity", "n_kv", 1, "width", optional=True)
    v: np.ndarray = f32("capacity", "n_kv", 1, "width_v", optional=True)

    # Scratch.
    normed: np.ndarray = f32("capacity", "n_embd")
    projected: np.ndarray = f32("capacity", "n_projected")  # a recurrent layer's input
    packed: np.ndarray = f32("n_packed", "value_dim")  # rows of all heads, or of a recurrent layer
    hidden: np.ndarray = f32("capacity", "n_hidden")  # 2 n_ff + 16
    quantized: np.ndarray = u8("capacity", "n_quantized")  # quantized_stride of the widest input


class InputState(KernelFields):
    """A layer's own input, see layer/layer_input.py, and the scale of the stream after it."""

    capacity: Size
    n_embd: Size
    n_all: Size  # columns of the inputs of all layers, with 16 more
    n_hidden: Size

    n: int  # elements of the input; 0: there is none
    first: int  # its column
    scale: float  # of the residual stream after the layer
    # The table of gate and output.
    matrices: np.ndarray = i64(2, N_COLUMNS, optional=True)
    norm: np.ndarray = f32("n_embd", optional=True)
    inputs: np.ndarray = f32("capacity", "n_all", optional=True)
    hidden: np.ndarray = f32("capacity", "n_hidden", optional=True)  # scratch; n + 16
