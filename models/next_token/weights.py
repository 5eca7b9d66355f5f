"""The tensors of a next-token block: a layer with attention, two norms and a projection."""

from dataclasses import dataclass, replace

import numpy as np

from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.gguf.linear import Linear
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.weights import Weights, WeightsReader


@dataclass(frozen=True)
class NextTokenWeights:
    """The weights of a block. Sources: llama.cpp and DeepSeek-V3 (arXiv:2412.19437, 2.2)."""

    embedding_norm: np.ndarray  # f32 (n_embd,), enorm
    hidden_norm: np.ndarray  # f32 (n_embd,), hnorm
    projection: Linear  # eh_proj (n_embd, 2 n_embd); the columns of the embedding come first
    # a model of one layer with the block's embeddings and output head
    model: Weights


def read_next_token(
    weights: Weights, hparams: HParams, architecture: Architecture
) -> NextTokenWeights:
    """Returns the first next-token block of a file. The model's tensors replace missing ones.

    Raises SparseKVError for a missing tensor or another shape.
    """
    assert hparams.next_block is not None
    reader, i, n_embd = WeightsReader(weights.file), hparams.n_layer, hparams.n_embd
    at = f"blk.{i}.nextn."

    def table(name: str, otherwise: Linear) -> Linear:
        if f"{at}{name}.weight" not in weights.file.tensors:
            return otherwise
        return reader.linear(f"{at}{name}", hparams.n_vocab, n_embd)

    blocks = replace(hparams, layers=(*hparams.layers, hparams.next_block))
    head_norm = reader.vector(f"{at}shared_head_norm.weight", n_embd, required=False)
    return NextTokenWeights(
        embedding_norm=reader.floats(f"{at}enorm.weight", (n_embd,)),
        hidden_norm=reader.floats(f"{at}hnorm.weight", (n_embd,)),
        projection=reader.linear(f"{at}eh_proj", n_embd, 2 * n_embd),
        model=replace(
            weights,
            layers=(reader.layer(i, blocks, architecture, None),),
            token_embd=table("embed_tokens", weights.token_embd),
            output_norm=weights.output_norm if head_norm is None else head_norm,
            output=table("shared_head_head", weights.output),
        ),
    )
