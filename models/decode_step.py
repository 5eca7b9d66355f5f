"""The layers' records and the buffers of the fused CPU kernels of a decode step.

A step has a row for each sequence. Only this file fills the records of cpu/layer/decode.py.
"""

from collections.abc import Sequence

import numpy as np

from sparsekv_cli.cache.spec import WINDOW
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.experts import decode as experts
from sparsekv_cli.cpu.jit.pointers import address, on_lines
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.latent import decode as latent
from sparsekv_cli.cpu.latent.state import LatentState
from sparsekv_cli.cpu.layer import choice, products
from sparsekv_cli.cpu.layer import decode as fused
from sparsekv_cli.cpu.layer.activation import ACTIVATIONS
from sparsekv_cli.cpu.layer.layer_input import add_input
from sparsekv_cli.cpu.weights.integer import quantized_stride
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.experts import ExpertSteps, expert_matrices
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.layers.input_steps import InputSteps
from sparsekv_cli.models.layers.latent_steps import latent_inputs_of, new_latent_state
from sparsekv_cli.models.layers.layer_params import LayerParams
from sparsekv_cli.models.rope import RopeTables
from sparsekv_cli.models.weights import (
    AttentionWeights,
    ExpertWeights,
    LatentWeights,
    LayerWeights,
    StateWeights,
    Weights,
)

LayerInputs = tuple[np.ndarray, ...]


class DecodeStep:
    """Records and buffers for steps of up to ``capacity`` rows.

    x: f32 (capacity, n_embd), the residual stream. inputs[i][b]: the inputs of layer i and row b.
    These are q, k, v, q_nope, k_nope, f32 views (heads, 1, d padded to 16), in the order of
    AttnInput. For a recurrent layer they are the rows and gates of StateInput, f32 views (1,
    width).
    """

    def __init__(
        self,
        hparams: HParams,
        weights: Weights,
        architecture: Architecture,
        capacity: int,
        n_planes: int,
        n_threads: int,
    ) -> None:
        h = hparams
        self.capacity, self.n_threads, self._n_planes = capacity, n_threads, n_planes
        n_attended = [each.n_attended for each in h.layers]
        n_projected = [sum(w.n_rows for w in each.inputs()) for each in weights.layers]
        n_ff = max(each.n_ff for each in h.layers)
        widest = max(h.n_embd, *n_attended, n_ff, h.n_layer_input)
        self.x, self._q_scale = self._rows(h.n_embd), self._rows(1).reshape(-1)
        halves = (h.n_rot // 2, h.window_n_rot // 2)
        # cos, sin, and those of window layers
        self._turns = [self._rows(half) for half in halves for _ in range(2)]
        self._normed = self._rows(h.n_embd)
        self._quantized = self._rows(quantized_stride(widest), np.uint8)
        self._projected = self._rows(max(n_projected))
        self._packed = self._rows(max(n_attended))
        self._hidden = self._rows(2 * n_ff + LANES)
        self.inputs: list[Sequence[LayerInputs]] = []
        self._own: list[dict[str, np.ndarray]] = []  # for each layer, the arrays of ``inputs``
        self._tables = [
            expert_matrices(each, n_planes)
            if isinstance(each.ffn, ExpertWeights)
            else choice.matrix_table(each.stages(), n_planes)
            for each in weights.layers
        ]
        self._output = choice.matrix_table([weights.output], n_planes)
        self._regions = products.matrix_regions([*self._tables, self._output])
        self._experts = ExpertSteps(weights, capacity, n_planes)
        inputs = [(each.input, each.scale) for each in weights.layers]
        self._layer_inputs = InputSteps(weights.inputs, inputs, capacity, n_planes, h.norm_eps)
        self._latents: dict[int, LatentState] = {}  # by the number of the layer
        self._layers = [
            self._state(i, h, layer, architecture) for i, layer in enumerate(weights.layers)
        ]
        self._at = [layer.at for layer in self._layers]
        self._shares_input = [each.shares_input for each in h.layers]
        for layer, at, shares_input in zip(
            self._layers, self._at[1:], self._shares_input[1:], strict=False
        ):
            layer.set(partner=at if shares_input else 0)
        self._output_norm, self._eps = weights.output_norm, np.float32(h.norm_eps)

    def _rows(self, width: int, dtype: type = np.float32) -> np.ndarray:
        """Returns zeros (capacity, width)."""
        return on_lines((self.capacity, width), dtype, zeros=True)

    def set_position(self, b: int, pos: int, ropes: RopeTables) -> None:
        """Sets the values that depend on the position of row b."""
        cos, sin, window_cos, window_sin = self._turns
        cos[b], sin[b], self._q_scale[b] = (
            ropes.full.cos[pos], ropes.full.sin[pos], ropes.full.q_scale[pos]
        )  # fmt: skip
        if ropes.window is not ropes.full:
            window_cos[b], window_sin[b] = ropes.window.cos[pos], ropes.window.sin[pos]

    def _state(
        self, i: int, h: HParams, weights: LayerWeights, architecture: Architecture
    ) -> fused.LayerState:
        """Returns the record of layer i, and allocates its ``inputs``."""
        sizes, n_projected = h.layers[i], sum(w.n_rows for w in weights.inputs())
        arrays: dict[str, np.ndarray | None] = {}
        if isinstance(weights, AttentionWeights):
            results = self._attention_inputs(sizes)
            if sizes.source >= 0:
                results |= {name: self._own[sizes.source][name] for name in ("k", "v", "k_nope")}
            arrays |= dict(zip(("q_bias", "k_bias", "v_bias"), weights.biases, strict=True))
            arrays |= {name: getattr(weights, name) for name in ("q_norm", "k_norm", "v_norm")}
            self.inputs.append(list(zip(*results.values(), strict=True)))
        elif isinstance(weights, LatentWeights):
            results = {}
            self._latents[i] = state = self._latent_state(h, sizes, weights, n_projected)
            self.inputs.append(latent_inputs_of(state))
        else:
            assert isinstance(weights, StateWeights)
            results = {}
            self.inputs.append(self._state_inputs(weights))
        self._own.append(results)
        has_own = h.window_rope is not None and sizes.kind == WINDOW
        cos, sin = self._turns[2 * has_own :][:2]
        is_one = sizes.latent is not None  # the heads' results are one row
        value_dim = sizes.n_attended if is_one else sizes.value_dim or sizes.n_attended
        return fused.LayerState(
            n_head_kv=sizes.n_head_kv if sizes.source < 0 else 0,
            head_dim=sizes.head_dim,
            n_ff=sizes.n_ff,
            n_rot=sizes.n_rot,
            partner=0,
            n_inputs=len(weights.inputs()),
            gated=sizes.output_gate,
            interleaved=architecture.rope_interleaved,
            activation=ACTIVATIONS[architecture.activation],
            eps=h.norm_eps,
            residual_scale=h.residual_scale,
            attn_norm=weights.attn_norm,
            ffn_norm=weights.ffn_norm,
            attn_post_norm=weights.attn_post_norm,
            ffn_post_norm=weights.ffn_post_norm,
            o_bias=weights.o.bias,
            matrices=self._tables[i],
            regions=self._regions[sum(map(len, self._tables[:i])) :],
            x=self.x,
            cos=cos,
            sin=sin,
            q_scale=self._q_scale,
            normed=self._normed,
            projected=self._first(self._projected, self.capacity, n_projected),
            packed=self._first(
                self._packed, self.capacity * (1 if is_one else max(1, sizes.n_head)), value_dim
            ),
            hidden=self._first(self._hidden, self.capacity, 2 * sizes.n_ff + LANES),
            quantized=self._quantized,
            **arrays,
            **results,
        )

    def _first(self, array: np.ndarray, n_rows: int, width: int) -> np.ndarray:
        """Returns the first elements of an array, as (n_rows, width)."""
        return array.reshape(-1)[: n_rows * width].reshape(n_rows, width)

    def _attention_inputs(self, sizes: LayerParams) -> dict[str, np.ndarray]:
        """Returns zeros (capacity, heads, 1, d padded to 16) for the rows of AttnInput."""
        n_head, n_kv, d = sizes.n_head, sizes.n_head_kv, padded(sizes.head_dim)
        shapes = {
            "q": (n_head, d),
            "k": (n_kv, d),
            "v": (n_kv, padded(sizes.value_dim)),
            "q_nope": (n_head, d),
            "k_nope": (n_kv, d),
        }
        return {
            name: self._rows(heads * width).reshape(self.capacity, heads, 1, width)
            for name, (heads, width) in shapes.items()
        }

    def _latent_state(
        self, h: HParams, sizes: LayerParams, weights: LatentWeights, n_projected: int
    ) -> LatentState:
        """Returns the record of a layer with latent attention. Layers share its scratch."""
        assert sizes.latent is not None
        scratch = next(iter(self._latents.values()), None)
        return new_latent_state(
            self.capacity, sizes, weights.heads, self._n_planes, scratch,
            eps=h.norm_eps, cos=self._turns[0], sin=self._turns[1],
            projected=self._first(self._projected, self.capacity, n_projected),
        )  # fmt: skip

    def _state_inputs(self, weights: StateWeights) -> list[LayerInputs]:
        """Returns views (1, width) of each row's projections, which are contiguous."""
        n_wide, n_gates = (sum(w.n_rows for w in part) for part in (weights.wide, weights.gates))
        rows = self._first(self._projected, self.capacity, n_wide + n_gates)[:, None]
        return [(row[:, :n_wide], row[:, n_wide:]) for row in rows]

    def begin(self, tokens: Sequence[int]) -> None:
        """Computes all per-layer inputs, and ``inputs`` of layer 0. x has the embeddings."""
        self._layer_inputs.begin(tokens, self.x, self._quantized, self.n_threads)
        fused.project_qkv(self._at[0], len(tokens), self.n_threads)
        self._end_inputs(0, len(tokens))

    def _end_inputs(self, i: int, n_rows: int) -> None:
        """Makes ``inputs`` of layer i from its products, if its attention is latent."""
        if i in self._latents:
            latent.latent_inputs(self._latents[i].at, n_rows, self.n_threads)

    def finish(self, i: int, attended: np.ndarray, n_rows: int) -> None:
        """Computes layer i after its attention, and ``inputs`` of the next layer.

        attended: f32 (n_rows H, >= d_v): the heads of the first row, then those of the next.
        """
        experts_of, inputs_of, n = self._experts.states, self._layer_inputs, self.n_threads
        at, following = self._at[i], 0
        if i + 1 < len(self._at) and not self._shares_input[i + 1]:
            following = self._at[i + 1]
        if i in self._latents:
            latent.latent_values(self._latents[i].at, attended, n_rows, n)
            attended = self._latents[i].values
        if inputs_of.are_any:
            if i in experts_of:
                fused.finish_attention(at, attended, n_rows, n)
                experts.add_experts(at, experts_of[i].at, n_rows, n)
            else:
                fused.finish_layer(at, attended, n_rows, n)
            add_input(at, inputs_of.states[i].at, n_rows, n)
            if following:
                fused.project_qkv(following, n_rows, n)
        elif i in experts_of:
            experts.next_expert_layer(at, experts_of[i].at, following, attended, n_rows, n)
        else:
            fused.next_layer(at, following, attended, n_rows, n)
        self._end_inputs(i + 1, n_rows)

    def hidden(self, n_rows: int) -> np.ndarray:
        """Returns a copy of the output head's last input, f32 (n_rows, n_embd)."""
        return self._normed[:n_rows].copy()

    def new_logits(self, n_rows: int) -> np.ndarray:
        """Returns memory for logits, f32 (n_rows, n_vocab)."""
        return np.empty((n_rows, self._output[0, products.ROWS]), np.float32)

    def write_logits(self, logits: np.ndarray) -> None:
        """Writes the logits f32 (n_rows, n_vocab)."""
        fused.output_logits(
            self.x, self._output_norm, self._eps, self._output, address(self._regions),
            self._normed, self._quantized,
            logits, self.n_threads,
        )  # fmt: skip
