"""A mixture of experts: a router chooses a few gated feed-forward layers for each token.

``ExpertSteps`` runs the kernels of cpu/experts/ in decode steps, ``prefill_experts`` in a prefill.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sparsekv_cli.cpu.experts import routing
from sparsekv_cli.cpu.experts.state import MixtureState
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.layer import choice
from sparsekv_cli.cpu.weights.integer import quantized_stride
from sparsekv_cli.models.chunk_steps import ChunkSteps
from sparsekv_cli.models.matmul import FewRowsProducts
from sparsekv_cli.models.weights import ExpertWeights, LayerWeights, Linear, Weights


class StackProducts(Protocol):
    """The products of a prefill. Results of products with one name may share memory."""

    def of_stack(self, name: str, parts: Sequence[Linear]) -> Callable[[Any], Any]:
        """Returns the product of the stacked matrices ``parts``."""

    def of_experts(
        self, name: str, parts: Sequence[Linear], rows: np.ndarray, offsets: np.ndarray
    ) -> Callable[[Any], Any]:
        """Returns the product of all experts' matrices, each with its own rows of the inputs.

        Expert e takes the inputs rows[p], offsets[e] <= p < offsets[e + 1]. Results are ordered by
        p.
        """


def prefill_experts(
    ffn: ExpertWeights,
    ffn_norm: np.ndarray | None,
    x: np.ndarray,
    products: StackProducts,
    rows: ChunkSteps,
    n_threads: int,
) -> np.ndarray:
    """Returns the output f32 (T, n_embd) of the experts for a chunk x f32 (T, n_embd).

    ffn_norm: the norm of the layer. rows: the steps for the type of the products.
    """
    norms = ffn.norms
    assert ffn_norm is not None
    normed = rows.last_norm(x, ffn_norm if norms is None else norms.router)
    given = rows.norm(x, ffn_norm if norms is None else norms.experts)
    params, router, experts, shared = ffn.params, ffn.router, ffn.experts, ffn.shared
    n_rows, n_used = len(normed), params.n_expert_used
    logits = FewRowsProducts(n_threads).of_stack("router", [router])(normed)
    if router.bias is not None:
        logits += router.bias
    chosen, places = np.zeros((2, n_rows, n_used), np.int64)
    weights = np.zeros((n_rows, n_used), np.float32)
    bias = routing.NO_BIAS if ffn.choice_bias is None else ffn.choice_bias
    is_sigmoid = params.gating == "sigmoid"
    groups = params.n_group, params.n_group_used
    routing.route_rows(
        logits, bias, is_sigmoid, params.normalised, groups, chosen, weights, n_threads
    )
    if ffn.scales is not None:
        weights *= ffn.scales[chosen]
    offsets, taken = np.zeros(params.n_expert + 1, np.int64), np.zeros(places.size, np.int64)
    routing.group_rows(chosen, offsets, taken, places)
    gate_up = products.of_experts("expert_gate_up", experts.gate_up, taken, offsets)
    projected = gate_up(given)
    if ffn.biases is not None:
        routing.add_biases(projected, offsets, ffn.biases[0], n_threads)
    hidden = rows.gate(projected)
    down = products.of_experts("expert_down", (experts.down,), np.arange(places.size), offsets)
    results = down(hidden)
    if ffn.biases is not None:
        routing.add_biases(results, offsets, ffn.biases[1], n_threads)
    of_shared = results[:0]
    if shared is not None:
        of_all = given if norms is None else rows.norm(x, ffn_norm)
        hidden = rows.gate(products.of_stack("shared_gate_up", shared.gate_up)(of_all))
        of_shared = products.of_stack("shared_down", (shared.down,))(hidden)
    out = np.empty_like(normed)
    shared_gate = ffn.shared_gate if ffn.shared_gate is not None else normed[0, :0]
    added = of_shared if norms is None else results[:0]
    routing.add_weighted(results, places, weights, added, normed, shared_gate, out, n_threads)
    if norms is not None:
        out = rows.last_norm(out, norms.after) + rows.last_norm(as_f32(of_shared), norms.shared)
    return out


def expert_matrices(layer: LayerWeights, n_planes: int) -> np.ndarray:
    """Returns the matrix table of a layer with experts for cpu/experts/decode.py."""
    assert isinstance(layer.ffn, ExpertWeights)
    shared = layer.ffn.shared
    return np.concatenate(
        [
            choice.matrix_table(layer.attention(), n_planes),
            choice.matrix_table([layer.ffn.router], 0),
            np.zeros((3, 6), np.int64)
            if shared is None
            else choice.matrix_table(shared.linears(), n_planes),
        ]
    )


class ExpertSteps:
    """The records of the layers' experts for decode steps of up to ``capacity`` rows."""

    def __init__(self, weights: Weights, capacity: int, n_planes: int) -> None:
        mixtures = {
            i: layer.ffn
            for i, layer in enumerate(weights.layers)
            if isinstance(layer.ffn, ExpertWeights)
        }
        self.states: dict[int, MixtureState] = {}  # by the number of the layer
        if not mixtures:
            return
        params = [ffn.params for ffn in mixtures.values()]
        n_embd = weights.token_embd.n_columns
        widest = max(max(each.n_ff_expert, each.n_ff_shared) for each in params)
        n_slots = capacity * (1 + max(each.n_expert_used for each in params))
        gathered = on_lines((n_slots, 4 * n_embd + quantized_stride(n_embd)), np.uint8)
        hidden = on_lines((n_slots, 2 * widest + LANES), np.float32)
        quantized = on_lines((n_slots, quantized_stride(widest)), np.uint8)
        results = on_lines((n_slots, n_embd), np.float32)
        for i, ffn in mixtures.items():
            table = choice.matrix_table(ffn.experts.linears(), n_planes, ffn.params.n_expert)
            norms, (of_hidden, of_results) = ffn.norms, ffn.biases or (None, None)
            self.states[i] = MixtureState(
                n_expert=ffn.params.n_expert,
                n_used=ffn.params.n_expert_used,
                n_ff=ffn.params.n_ff_expert,
                n_shared=ffn.params.n_ff_shared,
                n_parts=len(ffn.experts.gate_up),
                sigmoid=ffn.params.gating == "sigmoid",
                normalised=ffn.params.normalised,
                n_group=ffn.params.n_group,
                n_group_used=ffn.params.n_group_used,
                matrices=table,
                choice_bias=ffn.choice_bias,
                router_bias=ffn.router.bias,
                result_scale=ffn.scales,
                hidden_bias=of_hidden,
                result_bias=of_results,
                shared_gate=ffn.shared_gate,
                router_norm=norms and norms.router,
                expert_norm=norms and norms.experts,
                result_norm=norms and norms.after,
                shared_norm=norms and norms.shared,
                gathered=gathered,
                hidden=hidden,
                quantized=quantized,
                results=results,
            )
