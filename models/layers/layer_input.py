"""Per-layer inputs: a second input of a layer besides the residual stream (Gemma 4).

Two vectors of P elements are added for a token. The first is the norm of a projection of its
embedding. The second is the layer's own embedding of it. The input is their sum divided by sqrt(2).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.linear import Linear
from sparsekv_cli.models.gguf.tensors import TensorReader


@dataclass(frozen=True)
class LayerInput:
    """One layer's weights for an input of P elements: x += norm(output (act(gate x) * input))."""

    projection: Linear  # (P, n_embd), times the token's embedding
    gate: Linear  # (P, n_embd), times the residual stream
    output: Linear  # (n_embd, P)
    norm: np.ndarray  # f32 (n_embd,), weights of the output's RMS norm

    def linears(self) -> tuple[Linear, ...]:
        return (self.projection, self.gate, self.output)


@dataclass(frozen=True)
class InputEmbedding:
    """The tensors that make the inputs of P elements of all layers."""

    table: Linear  # (n_vocab, layers P)
    projection: Linear  # (layers P, n_embd)
    norm: np.ndarray  # f32 (P,)

    def rows(self, ids: Sequence[int] | np.ndarray, layer: int | None = None) -> np.ndarray:
        """Returns the embeddings of T tokens, times sqrt(P).

        They are f32 (T, P) for one layer, or (T, layers P) for all layers (``layer`` None).
        """
        table, n = self.table, len(self.norm)
        data, n_columns = table.data[np.asarray(ids)], table.n_columns
        if layer is not None:
            n_bytes = data.shape[1] // (n_columns // n)
            data, n_columns = data[:, layer * n_bytes : (layer + 1) * n_bytes], n
        values = dot.dequantize(table.code, np.ascontiguousarray(data), n_columns)
        values *= np.float32(n**0.5)
        return values


def read_embedding(
    reader: TensorReader, n_vocab: int, n_layer: int, n_input: int, n_embd: int
) -> InputEmbedding:
    table = reader.linear("per_layer_token_embd", n_vocab, n_layer * n_input)
    block = FORMAT_OF_CODE[table.code].n_elements
    if n_input % block:
        raise SparseKVError(
            f"{reader.file.path}: tensor per_layer_token_embd.weight has blocks of {block} "
            f"elements, which inputs of {n_input} do not fill: take another quantisation"
        )
    projection = reader.linear("per_layer_model_proj", n_layer * n_input, n_embd)
    norm = reader.floats("per_layer_proj_norm.weight", (n_input,))
    return InputEmbedding(table, projection, norm)


def read_layer_input(reader: TensorReader, layer: int, embedding: InputEmbedding) -> LayerInput:
    n, whole, at = len(embedding.norm), embedding.projection, f"blk.{layer}."
    n_embd = whole.n_columns
    return LayerInput(
        projection=replace(whole, data=whole.data[layer * n : (layer + 1) * n]),
        gate=reader.linear(f"{at}inp_gate", n, n_embd),
        output=reader.linear(f"{at}proj", n_embd, n),
        norm=reader.floats(f"{at}post_norm.weight", (n_embd,)),
    )
