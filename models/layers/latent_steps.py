"""Latent attention in prefill and decode, computed by the kernels of cpu/latent/.

A token's row is k and v at once: R rotated dims, then L elements of the latent vector. Queries have
the same form. The heads' results are made from the latent part of the attention.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.spec import AttnInput
from sparsekv_cli.cache.store import padded
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.latent import prefill as kernels
from sparsekv_cli.cpu.latent.state import LatentState
from sparsekv_cli.cpu.layer import choice
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
        self.heads, self.sizes, self.latent = heads, sizes, sizes.latent
        self.key_dim = sizes.n_rot + sizes.latent.n_nope  # elements of a head's key
        self._eps, self._rope = np.float32(eps), rope
        self._products, self._rows, self._n_threads = products, rows, n_threads

    def new(self, *shape: int) -> Any:
        """Returns uninitialised rows of the compute type."""
        return self._rows.new(*shape)

    def inputs(self, products: Mapping[str, Any], raw: Any, pos: Any) -> AttnInput:
        """Returns the queries and rows. raw: the result of the layer's product qkv.

        pos: see ``ChunkSteps.heads``.
        """
        n_head, n_rows, n_rot = self.sizes.n_head, len(raw), self.sizes.n_rot
        q, others = self.new(n_head, n_rows, n_rot), self.new(n_head, n_rows, self.latent.n_nope)
        k, k_nope, q_nope = self.split(products, raw, pos, q, others)
        q, q_nope = self.absorbed((q, q_nope), others)
        return AttnInput(q, k, k, q_nope, k_nope, pos)

    def split(
        self, products: Mapping[str, Any], raw: Any, pos: Any, q: Any, others: Any
    ) -> tuple[Any, Any, Any]:
        """Makes a chunk's latent rows, and splits its queries.

        q (H, T, >= R) gets the rotated dims, others (H, T, N) the other dims. Returns the rows k
        (1, T, R + L), the rows before the rotation, and q's rotated dims before it (H, T, R).
        """
        n_rows, n_rank, n_rot, n = len(raw), self.latent.n_rank, self.sizes.n_rot, self._n_threads
        at = pos if isinstance(pos, np.ndarray) else slice(pos, pos + n_rows)
        cos, sin = self._rope.cos[at], self._rope.sin[at]
        first = raw.shape[1] - n_rank - n_rot
        queries = raw[:, :first]
        if self.heads.q_norm is not None:
            normed = self.new(n_rows, first)
            kernels.norm_vectors(raw, self.heads.q_norm, self._eps, normed, n)
            queries = products["queries"](normed)
        k, k_nope = (self.new(n_rows, n_rot + n_rank) for _ in range(2))
        kernels.split_rows(raw[:, first:], self.heads.kv_norm, self._eps, cos, sin, k, k_nope, n)
        q_nope = self.new(self.sizes.n_head, n_rows, n_rot)
        kernels.split_queries(queries, cos, sin, others, q, q_nope, n)
        return k[None], k_nope[None], q_nope

    def values(self, attended: Any) -> Any:
        """Returns the heads' results (T, H D) for the attention (H, T, R + L) to latent rows."""
        of_heads = self._of_heads("head_values", self.heads.v, attended[..., self.sizes.n_rot :])
        return of_heads.swapaxes(0, 1).reshape(attended.shape[1], -1)

    def absorbed(self, turned: Sequence[Any], others: Any) -> list[Any]:
        """Returns queries for latent rows (H, T, R + L), one for each array in ``turned``.

        turned: arrays (H, T, >= R) of the first R dims. others (H, T, N): the dims that are not
        rotated; T may be 0.
        """
        n_head, n_rows = others.shape[:2]
        of_heads = self.new(n_head, 0, self.latent.n_rank)
        if n_rows:
            of_heads = self._of_heads("head_keys", self.heads.k, others)
        n_rot = self.sizes.n_rot
        return [np.concatenate([each[..., :n_rot], of_heads], axis=2) for each in turned]

    def expanded(self, latents: np.ndarray, keys: Linear) -> tuple[Any, Any]:
        """Returns keys (H, T, R + N) and values (H, T, D) of latent rows f32 (T, R + L).

        keys: (H N, L), the matrix that makes the keys' dims that are not rotated.
        """
        rows, n_rot, n_head = self._rows.rounded(latents), self.sizes.n_rot, self.sizes.n_head
        c, shape = np.ascontiguousarray(rows[:, n_rot:]), (len(rows), n_head, -1)
        of_keys = self._products.of_stack("keys", (keys,))(c).reshape(shape)
        k = self.new(n_head, len(rows), self.key_dim)
        k[..., :n_rot], k[..., n_rot:] = rows[:, :n_rot], of_keys.swapaxes(0, 1)
        of_values = self._products.of_stack("values", (self.heads.v,))(c).reshape(shape)
        return k, of_values.swapaxes(0, 1)

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
    counts = (n_head, n_head, 1)
    pairs = zip(heads.linears(), counts, strict=False)
    tables = [choice.matrix_table([w], n_planes, n) for w, n in pairs]
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
