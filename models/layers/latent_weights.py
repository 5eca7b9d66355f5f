"""The tensors of a layer with latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.linear import Linear
from sparsekv_cli.models.layers.latent_params import LatentParams


@dataclass(frozen=True)
class LatentHeads:
    """The weights between a layer's first products and its attention, and after the attention."""

    k: Linear  # (H L, N): each head's matrix takes the N dims of its query
    v: Linear  # (H D, L): each head's matrix takes a latent vector
    kv_norm: np.ndarray  # f32 (L,)
    # The queries are projected from a vector with a norm, f32 (elements,). None: they are made by
    # the layer's first product.
    q: Linear | None
    q_norm: np.ndarray | None

    def linears(self) -> tuple[Linear, ...]:
        return (self.k, self.v) if self.q is None else (self.k, self.v, self.q)

    def mapped(self, change: Callable[[Linear], Linear]) -> LatentHeads:
        """Returns a copy with ``change`` applied to each matrix."""
        q = None if self.q is None else change(self.q)
        return replace(self, k=change(self.k), v=change(self.v), q=q)


def read_latent_attention(
    reader: Any, at: str, n_embd: int, n_head: int, n_rot: int, params: LatentParams
) -> dict[str, Any]:
    """Returns the fields of LatentWeights that other layers lack, and ``o``.

    reader: a ``WeightsReader``. at: the beginning of the tensors' names.
    """
    old = f"{at}attn_kv_b.weight"
    if old in reader.file.tensors:
        raise SparseKVError(
            f"{reader.file.path}: tensor {old}: it is not split into attn_k_b and attn_v_b, an "
            "old form of such files; convert or download the model again"
        )
    n_rank, n_rank_q, n_queries = params.n_rank, params.n_rank_q, n_head * (params.n_nope + n_rot)
    name, of_queries, q_norm = f"{at}attn_q", None, None
    if n_rank_q:
        of_queries = reader.linear(f"{at}attn_q_b", n_queries, n_rank_q)
        q_norm = reader.vector(f"{at}attn_q_a_norm.weight", n_rank_q)
        name = f"{at}attn_q_a"
    return {
        "q": reader.linear(name, n_rank_q or n_queries, n_embd),
        "row": reader.linear(f"{at}attn_kv_a_mqa", n_rank + n_rot, n_embd),
        "heads": LatentHeads(
            k=reader.stack(f"{at}attn_k_b", n_head, n_rank, params.n_nope),
            v=reader.stack(f"{at}attn_v_b", n_head, params.n_value, n_rank),
            kv_norm=reader.vector(f"{at}attn_kv_a_norm.weight", n_rank),
            q=of_queries,
            q_norm=q_norm,
        ),
        "o": reader.linear(f"{at}attn_output", n_embd, n_head * params.n_value),
    }
