"""The record of a layer's experts, which decode steps read and write, declared once.

A row of a step uses n_used experts, and the shared expert, if there is one. A row and an expert
have a slot in the scratch. With B rows there are B (n_used + 1) slots. The B slots of the shared
expert are last. Two rows of four experts have slots 0 to 7, then 8 and 9 for the shared expert.
"""

import numpy as np

from sparsekv_cli.cpu.layer.state import N_COLUMNS
from sparsekv_cli.cpu.vector.declared import Size, f32, i64, u8
from sparsekv_cli.cpu.vector.fields import KernelFields


class MixtureState(KernelFields):
    """The experts of one layer. Layers share the scratch."""

    n_embd: Size
    n_matrices: Size
    n_of_experts: Size  # n_expert, or 0 if there is no vector of this length
    n_hidden_bias: Size  # 2 n_ff
    n_slots: Size
    gathered_row: Size
    n_hidden: Size
    quantized_row: Size

    n_expert: int
    n_used: int
    n_ff: int
    n_shared: int  # the shared expert's n_ff, or 0
    n_parts: int  # matrices of gate and up: two, or one if they are merged or there is no gate
    sigmoid: bool  # whether the weights are sigmoids, not a softmax
    normalised: bool  # whether the weights of the chosen experts sum to 1
    n_group: int  # groups of experts
    n_group_used: int  # groups from which a row's experts are chosen

    # The first expert's matrices, down last; the others follow.
    matrices: np.ndarray = i64("n_matrices", N_COLUMNS)
    choice_bias: np.ndarray = f32("n_of_experts", optional=True)  # see ``route_row``
    router_bias: np.ndarray = f32("n_of_experts", optional=True)
    result_scale: np.ndarray = f32("n_of_experts", optional=True)  # of the experts' results
    hidden_bias: np.ndarray = f32("n_of_experts", "n_hidden_bias", optional=True)
    result_bias: np.ndarray = f32("n_of_experts", "n_embd", optional=True)
    shared_gate: np.ndarray = f32("n_embd", optional=True)
    router_norm: np.ndarray = f32("n_embd", optional=True)  # of x; without it both take ``normed``
    expert_norm: np.ndarray = f32("n_embd", optional=True)
    result_norm: np.ndarray = f32("n_embd", optional=True)  # of both sums
    shared_norm: np.ndarray = f32("n_embd", optional=True)

    # Scratch.
    gathered: np.ndarray = u8("n_slots", "gathered_row")  # rows as f32, then quantised
    hidden: np.ndarray = f32("n_slots", "n_hidden")  # 2 n_ff + 16 of the widest expert
    quantized: np.ndarray = u8("n_slots", "quantized_row")  # rows of n_ff
    results: np.ndarray = f32("n_slots", "n_embd")
