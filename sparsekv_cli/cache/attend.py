"""Attention to the rows of a KVStore: by a chunk of a prefill and by a decode step."""

from collections.abc import Sequence

import numpy as np

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention import decode, prefill_bf16, prefill_f32
from sparsekv_cli.cpu.attention.flash import ALL_ROWS


def attend_causal(
    q: np.ndarray, store: KVStore, spec: LayerSpec, ends: np.ndarray | None = None
) -> np.ndarray:
    """Returns causal attention of a chunk of T queries to the rows of ``store``.

    q (H, T, d) -> (H, T, d_v), both f32 or both bf16 with an even d. ends: int64 (T,), ascending:
    query t attends to the first ends[t] stored rows. None: the chunk's own rows are the last T of
    the store. With 10 rows and T = 3 that is [8, 9, 10]. In a window layer a query attends to the
    last ``spec.window`` of these rows.
    """
    if ends is None:
        ends = np.arange(store.n - q.shape[1] + 1, store.n + 1)
    q = np.ascontiguousarray(store.k_type.rotated(q, spec.n_threads))
    kernels = prefill_f32 if q.dtype == np.float32 else prefill_bf16
    # (T, H, d_v) in memory: the output projection reads it token by token.
    out = np.empty((q.shape[1], spec.n_head, spec.value_dim), q.dtype)
    kernels.attend_causal(
        q, store.layout, spec.n_head_kv, ends, spec.scale, spec.window or ALL_ROWS, spec.softcap,
        spec.sinks, out, spec.n_threads,
    )  # fmt: skip
    return store.v_type.rotated(out, spec.n_threads).swapaxes(0, 1)


def attend_dense(
    q: np.ndarray, stores: Sequence[KVStore], counts: Sequence[int], spec: LayerSpec
) -> np.ndarray:
    """Returns the attention of the last ``counts[i]`` tokens of each store i to its rows.

    A token attends to the store's rows up to its own. q f32 (B, H, d) has the tokens of the first
    store, then of the second -> f32 (B, H, >= d_v). Counts [1, 3] give B = 4. If neighbouring
    stores share a prefix, the kernel reads its rows once for all of them.
    """
    layouts = np.repeat([store.layout for store in stores], counts, axis=0)
    pairs = zip(stores, counts, strict=True)
    stops = np.concatenate([np.arange(store.n - n + 1, store.n + 1) for store, n in pairs])
    owners = np.repeat([store.owner for store in stores], counts)
    k_type, v_type = stores[0].k_type, stores[0].v_type
    q, out = k_type.rotated(q), np.empty((*q.shape[:2], v_type.width), np.float32)
    decode.attend_dense(
        q, layouts, stops, owners, spec.window or ALL_ROWS, spec.n_head_kv, spec.scale,
        spec.softcap, spec.sinks, out, spec.n_threads,
    )  # fmt: skip
    return v_type.rotated(out)


def attend_rows(
    q: np.ndarray, store: KVStore, idx: np.ndarray, counts: np.ndarray, spec: LayerSpec
) -> np.ndarray:
    """Returns the attention of one token to listed rows: q f32 (H, d) -> f32 (H, >= d_v).

    idx: int32 (H or G, m), a list of rows for each query head or kv head. counts: int64 (H or G,),
    the number of valid rows of each list.
    """
    q, out = store.k_type.rotated(q), np.empty((q.shape[0], store.v_type.width), np.float32)
    decode.attend_rows(
        q, store.layout, idx, counts, spec.n_head_kv, spec.scale, spec.softcap, spec.sinks, out,
        spec.n_threads,
    )  # fmt: skip
    return store.v_type.rotated(out)


def score_rows(q: np.ndarray, store: KVStore, spec: LayerSpec) -> np.ndarray:
    """Returns q . k / sqrt(d) for all n stored rows: q f32 (H, d) -> f32 (H, n + padding)."""
    q, out = store.k_type.rotated(q), np.empty((q.shape[0], store.n + decode.PAD), np.float32)
    decode.score_rows(q, store.layout, store.n, spec.n_head_kv, spec.scale, out, spec.n_threads)
    return out
