"""The decoder of a next-token block: a model of one layer with its own embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.models.decoder import FEW_ROWS, Decoder
from sparsekv_cli.models.matmul import ManyRowsProducts
from sparsekv_cli.models.next_token.weights import NextTokenWeights
from sparsekv_cli.models.repack import repack_weights


class NextTokenDecoder(Decoder):
    """A decoder of one layer. Its input are rows from ``inputs`` instead of token ids."""

    def __init__(self, main: Decoder, block: NextTokenWeights) -> None:
        """main: the model's decoder. The block uses the same kernels as its layers."""
        layer, weights = main.hparams.next_block, block.model
        assert layer is not None
        super().__init__(
            replace(main.hparams, layers=(layer,), next_block=None, n_skipped=0),
            main.architecture,
            weights,
            n_threads=main.n_threads,
            prefill_dtype=main.prefill_dtype,
            chunk=main.chunk,
            repack="off",
            n_planes=main.n_planes,
        )
        self._block, repacked = block, main._decode_weights
        if repacked is not main.weights:
            if weights.output is main.weights.output:  # shares the repacked copy
                weights = replace(weights, output=repacked.output)
            self._decode_weights = repack_weights(weights)
            self._step = self._new_step(1)

    def inputs(self, tokens: Sequence[int], hidden: np.ndarray) -> np.ndarray:
        """Returns the layer's input rows, f32 (T, n_embd).

        hidden: f32 (T, n_embd), the model's hidden row of the token before each token.
        """
        block, table, norm = self._block, self.weights.token_embd, self._few[0].norm
        data = np.ascontiguousarray(table.data[np.asarray(tokens)])
        embedded = dot.dequantize(table.code, data, table.n_columns)
        parts = norm(embedded, block.embedding_norm), norm(hidden, block.hidden_norm)
        is_few = len(tokens) <= FEW_ROWS
        products = self._decode_products if is_few else ManyRowsProducts(self.n_threads)
        return products.of_stack("eh_proj", [block.projection])(np.concatenate(parts, axis=1))

    def embed(self, ids: Sequence[Any]) -> Any:
        return self.rows.stream(np.array(ids))

    def embed_row(self, token: Any, out: np.ndarray) -> None:
        out[:] = token
