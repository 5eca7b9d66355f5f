"""Per-layer inputs in prefill and decode, computed by the kernels of cpu/layer/layer_input.py."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.jit.value import LANES
from sparsekv_cli.cpu.layer import choice
from sparsekv_cli.cpu.layer import layer_input as kernels
from sparsekv_cli.cpu.layer.state import InputState
from sparsekv_cli.models.layers.layer_input import InputEmbedding, LayerInput


class PromptInputs:
    """The per-layer inputs of a prompt's rows in prefill.

    ids: the tokens. x: their embeddings in the products' type. pos: position of the first token.
    """

    def __init__(
        self, embedding: InputEmbedding, ids: Sequence[int], x: Any, pos: int, eps: np.float32
    ) -> None:
        self._embedding, self._ids, self._x, self._pos = embedding, np.asarray(ids), x, pos
        # projections are not divided by sqrt(n_embd), so eps is scaled instead
        self._eps = np.float32(eps * embedding.projection.n_columns)

    def gated(
        self, i: int, products: Mapping[str, Any], gate: Any, activation: int, pos: int, n: int
    ) -> Any:
        """Returns act(gate) * input of layer i for the rows from ``pos`` on, in gate's type."""
        at = slice(pos - self._pos, pos - self._pos + len(gate))
        projected = products["input_projection"](self._x[at])
        embedded = self._embedding.rows(self._ids[at], i)
        out = np.empty(gate.shape, gate.dtype)
        kernels.gate_inputs(
            projected, self._embedding.norm, self._eps, embedded, gate, activation, out, n
        )
        return out


class InputSteps:
    """The per-layer inputs and scales in decode steps of up to ``capacity`` rows."""

    def __init__(
        self,
        embedding: InputEmbedding | None,
        layers: Sequence[tuple[LayerInput | None, float]],
        capacity: int,
        n_planes: int,
        eps: float,
    ) -> None:
        self.states = [InputState(scale=scale) for _, scale in layers]
        self._embedding = embedding
        self.are_any = embedding is not None or any(scale != 1.0 for _, scale in layers)
        if embedding is None:
            return
        n, n_all = len(embedding.norm), embedding.projection.n_rows
        self._eps = np.float32(eps * embedding.projection.n_columns)  # as in PromptInputs
        self._table = choice.matrix_table([embedding.projection], n_planes)
        self._projected, self._inputs, hidden = (
            on_lines((capacity, width + LANES), np.float32, zeros=True)
            for width in (n_all, n_all, n)
        )
        for i, (layer, _) in enumerate(layers):
            assert layer is not None
            self.states[i].set(
                n=n,
                first=n * i,
                matrices=choice.matrix_table([layer.gate, layer.output], n_planes),
                norm=layer.norm,
                inputs=self._inputs,
                hidden=hidden,
            )

    def begin(
        self, tokens: Sequence[int], x: np.ndarray, quantized: np.ndarray, n_threads: int
    ) -> None:
        """Computes the inputs of all layers for a step's tokens. x: the tokens' embeddings."""
        if self._embedding is None:
            return
        n_all = self._embedding.projection.n_rows
        self._inputs[: len(tokens), :n_all] = self._embedding.rows(tokens)
        kernels.make_inputs(
            self._table, x, self._projected, self._embedding.norm, self._eps, quantized,
            self._inputs, len(tokens), n_threads,
        )  # fmt: skip
