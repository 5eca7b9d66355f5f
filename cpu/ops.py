"""The host backend: the operations that methods call, on numpy arrays and KV stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsekv_cli.cpu.attention import decode, prefill_bf16, prefill_f32


def dense_prefill(store: Any, x: Any, spec: Any) -> np.ndarray:
    """Causal attention of a chunk whose K and V are the last T rows of ``store``.

    x.q (H, T, d) -> (H, T, d_v), both f32 or both bf16 with an even d.
    """
    q = np.ascontiguousarray(x.q)
    kernels = prefill_f32 if q.dtype == np.float32 else prefill_bf16
    # The output's rows lie by token, as its projection reads them.
    out = np.empty((q.shape[1], spec.n_head, spec.value_dim), q.dtype)
    kernels.attend_causal(q, store.layout, spec.n_head_kv, store.n, spec.scale, out, spec.n_threads)
    return out.swapaxes(0, 1)


def append_row(store: Any, x: Any) -> None:
    """Adds the one row of a decode step."""
    store.reserve(store.n + 1)
    decode.append_row(x.k[:, 0], x.v[:, 0], store.layout, store.n)
    store.n += 1


def attend_dense(store: Any, q: np.ndarray, spec: Any) -> np.ndarray:
    """Attention over all rows: q f32 (H, d) -> f32 (H, d_v)."""
    out = np.empty((q.shape[0], store.v_type.width), np.float32)
    decode.attend_dense(q, store.layout, store.n, spec.n_head_kv, spec.scale, out, spec.n_threads)
    return out


def attend_rows(
    store: Any, q: np.ndarray, idx: np.ndarray, counts: np.ndarray, spec: Any
) -> np.ndarray:
    """Attention over listed rows: idx int32 (H or G, m), counts int64 -> f32 (H, d_v)."""
    out = np.empty((q.shape[0], store.v_type.width), np.float32)
    decode.attend_rows(
        q, store.layout, idx, counts, spec.n_head_kv, spec.scale, out, spec.n_threads
    )
    return out


def score_rows(store: Any, q: np.ndarray, spec: Any) -> np.ndarray:
    """q . k / sqrt(d) for all rows: f32 (H, n + padding)."""
    out = np.empty((q.shape[0], store.n + decode.PAD), np.float32)
    decode.score_rows(
        q, store.addresses[0], store.strides[0], store.strides[2], store.k_type.kind, store.n,
        spec.n_head_kv, spec.scale, out, spec.n_threads,
    )  # fmt: skip
    return out
