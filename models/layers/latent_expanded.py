"""Attention of a long prompt to keys and values of all heads, made from the latent rows.

    form       a query and a row, multiplied and added       made for each row
    latent     2 (R + L): 1152                               nothing
    expanded   R + N + D: 320                                (N + D) L products a head: 131072

The numbers are those of R = 64, L = 512 and N = D = 128, for one head. So the expanded form is
faster from about 160 queries on. Only the rows of one layer are expanded at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.weights import dot
from sparsekv_cli.models.gguf.linear import Linear
from sparsekv_cli.models.layers.latent_steps import LatentSteps

LEAST_ROWS = 160  # of a prompt
MOST_BYTES = 1 << 30  # of the expanded rows
ROWS_AT_ONCE = 2048  # rows that are expanded at a time
F32 = 0  # ggml's number of the type


class ExpandedRows:
    """The expanded rows of one layer of one sequence, for the chunks of a prefill."""

    def __init__(self) -> None:
        self._of: KVStore | None = None  # the store with the latent rows
        self._rows: KVStore | None = None
        self._keys: Linear | None = None  # (H N, L): makes the keys' dims that are not rotated

    def clear(self) -> None:
        """Frees the memory."""
        self._of = self._rows = self._keys = None

    def serves(self, cache: LayerCache, n_new: int, steps: LatentSteps) -> bool:
        """Returns whether a chunk of n_new rows can attend to expanded rows of ``cache``."""
        spec = cache.spec
        a_row = 2 * spec.n_head * (steps.key_dim + steps.latent.n_value)
        fits = (cache.store.n + n_new) * a_row <= MOST_BYTES
        return cache.queries_read is not None and fits

    def attend(
        self, cache: LayerCache, raw: Any, products: Any, pos: Any, steps: LatentSteps
    ) -> Any:
        """Adds a chunk's rows to ``cache``. Returns the heads' results (T, H D).

        raw, products, pos: see ``LatentSteps.inputs``.
        """
        n_rot, n_new = steps.sizes.n_rot, len(raw)
        q = steps.new(steps.sizes.n_head, n_new, steps.key_dim)
        k, k_nope, of_q_nope = steps.split(products, raw, pos, q, q[..., n_rot:])
        read = slice(n_new - min(n_new, cache.queries_read or 0), n_new)
        given = steps.absorbed((q[:, read], of_q_nope[:, read]), q[:, read, n_rot:])
        store = cache.extend(AttnInput(given[0], k, k, given[1], k_nope, pos))
        rows, spec = self._expanded(store, store.n - n_new, cache.spec, steps)
        attended = attend_causal(q, rows, spec)
        return attended.swapaxes(0, 1).reshape(n_new, -1)

    def _expanded(
        self, store: KVStore, n_past: int, spec: LayerSpec, steps: LatentSteps
    ) -> tuple[KVStore, LayerSpec]:
        """Returns the expanded rows of ``store`` and their sizes. n_past: rows before the chunk."""
        latent = steps.latent
        spec = replace(
            spec, n_head_kv=spec.n_head, head_dim=steps.key_dim, value_dim=latent.n_value,
            v_is_k=False, cache_type_k="f16", cache_type_v="f16",
        )  # fmt: skip
        if self._of is not store or self._rows is None or self._rows.n != n_past:
            self._of, self._rows, self._keys = store, KVStore(spec), key_matrix(steps)
            self._rows.reserve(store.n)
        assert self._keys is not None
        for first in range(self._rows.n, store.n, ROWS_AT_ONCE):
            last = min(store.n, first + ROWS_AT_ONCE)
            latents = store.k_type.elements(store.k[0, first:last])  # f32 (T, R + L)
            self._rows.append(*steps.expanded(latents, self._keys))
        return self._rows, spec


def key_matrix(steps: LatentSteps) -> Linear:
    """Returns the matrix (H N, L) that makes keys of latent vectors: ``heads.k``, transposed."""
    of, n_head, latent = steps.heads.k, steps.sizes.n_head, steps.latent
    weight = dot.dequantize(of.code, of.data, of.n_columns).reshape(n_head, latent.n_rank, -1)
    turned = np.ascontiguousarray(weight.swapaxes(1, 2)).reshape(-1, latent.n_rank)
    return Linear(F32, turned.view(np.uint8), latent.n_rank)
