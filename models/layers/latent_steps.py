"""Latent attention in prefill and decode, computed by the kernels of cpu/latent/.

A token's row is k and v at once: R rotated dims, then L elements of the latent vector. Queries have
the same form. The heads' results are made from the latent part of the attention.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsekv_cli.cache.spec import AttnInput
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.latent import prefill as kernels
from sparsekv_cli.cpu.latent.state import LatentState
from sparsekv_cli.cpu.layer import decode as fused
from sparsekv_cli.cpu.weights.integer import quantized_stride
from sparsekv_cli.models.gguf.linear import Linear
from sparsekv_cli.models.layers.latent_weights import LatentHeads


class LatentSteps:
    """The steps of one layer on a chunk of T rows of a prefill."""

    def __init__(
        self,
        heads: LatentHeads,
        sizes: Any,
        eps: float,
        rope: Any,
        products: Any,
        rows: Any,
        n_threads: int,
    ) -> None:
        """sizes: LayerParams. rope: a RopeTable. products: a StackProducts (models/experts.py).

        rows: the steps for its type of rows.
        """
        self._heads, self._sizes, self._latent = heads, sizes, sizes.latent
        self._eps, self._rope = np.float32(eps), rope
        self._products, self._rows, self._n_threads = products, rows, n_threads

    def inputs(self, products: Mapping[str, Any], raw: Any, pos: Any) -> AttnInput:
        """Returns the queries and rows. raw: the result of the layer's product qkv.

        pos: see ``ChunkSteps.heads``.
        """
        n_rows, n_head, width = len(raw), self._sizes.n_head, self._sizes.head_dim
        n_rot, n_rank, n = self._sizes.n_rot, self._latent.n_rank, self._n_threads
        at = pos if isinstance(pos, np.ndarray) else slice(pos, pos + n_rows)
        cos, sin = self._rope.cos[at], self._rope.sin[at]
        first = raw.shape[1] - n_rank - n_rot
        queries = raw[:, :first]
        if self._heads.q_norm is not None:
            normed = self._rows.new(n_rows, first)
            kernels.norm_vectors(raw, self._heads.q_norm, self._eps, normed, n)
            queries = products["queries"](normed)
        k, k_nope = self._rows.new(n_rows, width), self._rows.new(n_rows, width)
        kernels.split_rows(raw[:, first:], self._heads.kv_norm, self._eps, cos, sin, k, k_nope, n)
        q, q_nope = (self._rows.new(n_head, n_rows, width) for _ in range(2))
        others = self._rows.new(n_head, n_rows, self._latent.n_nope)
        kernels.split_queries(queries, cos, sin, others, q, q_nope, n)
        q[..., n_rot:] = self._of_heads("head_keys", self._heads.k, others)
        q_nope[..., n_rot:] = q[..., n_rot:]
        return AttnInput(q, k[None], k[None], q_nope, k_nope[None], pos)

    def values(self, attended: Any) -> Any:
        """Returns the heads' results (T, H D) for the attention (H, T, R + L) to latent rows."""
        of_heads = self._of_heads("head_values", self._heads.v, attended[..., self._sizes.n_rot :])
        return of_heads.swapaxes(0, 1).reshape(attended.shape[1], -1)

    def _of_heads(self, name: str, matrices: Linear, x: Any) -> Any:
        """Returns the product of each head's matrix with its rows: (H, T, n) -> (H, T, rows)."""
        n_head, n_rows = x.shape[:2]
        offsets, taken = np.arange(n_head + 1) * n_rows, np.arange(n_head * n_rows)
        product = self._products.of_experts(name, (matrices,), taken, offsets)
        return product(np.ascontiguousarray(x).reshape(n_head * n_rows, -1)).reshape(
            n_head, n_rows, -1
        )


def new_latent_state(
    capacity: int,
    sizes: Any,
    heads: LatentHeads,
    n_planes: int,
    like: LatentState | None,
    **given: Any,
) -> LatentState:
    """Returns the record of a layer for decode steps of up to ``capacity`` rows.

    sizes: LayerParams. like: the record of another layer, which shares its scratch. given: further
    fields.
    """
    of, n_head, n_rot, width = sizes.latent, sizes.n_head, sizes.n_rot, padded(sizes.head_dim)

    def rows(*shape: int, dtype: type = np.float32) -> np.ndarray:
        return on_lines((capacity, *shape), dtype, zeros=True)

    if like is None:
        widest = quantized_stride(max(of.n_nope, of.n_rank, of.n_rank_q))
        scratch = {
            "queries": rows(n_head * (of.n_nope + n_rot)),
            "normed": rows(max(1, of.n_rank_q)),
            "quantized": on_lines((capacity * n_head, widest), np.uint8),
        }
    else:
        scratch = {name: getattr(like, name) for name in ("queries", "normed", "quantized")}
    tables = [fused.matrix_table([w], n_planes) for w in heads.linears()]
    for table in tables[:2]:
        table[:, fused.ROWS] //= n_head
    tables += [np.zeros_like(tables[0])] * (3 - len(tables))
    return LatentState(
        n_nope=of.n_nope,
        n_rot=n_rot,
        matrices=np.concatenate(tables),
        kv_norm=heads.kv_norm,
        q_norm=heads.q_norm,
        q=rows(n_head, 1, width),
        q_nope=rows(n_head, 1, width),
        k=rows(1, 1, width),
        k_nope=rows(1, 1, width),
        values=rows(n_head * of.n_value),
        **scratch,
        **given,
    )


def latent_inputs_of(state: LatentState) -> list[tuple[np.ndarray, ...]]:
    """Returns each row's inputs of the attention, in the order of AttnInput."""
    k = state.k
    return list(zip(state.q, k, k, state.q_nope, state.k_nope, strict=True))
