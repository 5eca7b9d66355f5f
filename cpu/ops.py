"""The host backend: the operations that methods call, on numpy arrays and KV stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsekv_cli.cpu.attention import decode, prefill_bf16, prefill_f32
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_tensor, bits, load_torch, seen


def dense_prefill(store: Any, x: Any, spec: Any) -> Any:
    """Causal attention of a chunk whose K and V are the last T rows of ``store``.

    x.q (H, T, d) -> (H, T, d_v), both arrays of f32 or bf16, or tensors of one type.
    """
    q = seen(x.q)
    if q.dtype == np.float32:
        out = _dense_prefill_f32(store, q, spec)
    elif bf16.is_available() and spec.head_dim % 2 == 0:
        out = _dense_prefill_bf16(store, q, spec)
    else:
        out = bits(_torch_prefill(store, as_tensor(q), spec))
    return out if isinstance(x.q, np.ndarray) else as_tensor(out)


def _dense_prefill_f32(store: Any, q: np.ndarray, spec: Any) -> np.ndarray:
    """``dense_prefill`` of f32: over the rows as they are stored, which decode sees too."""
    # The output's rows lie by token, as its projection reads them.
    out = np.empty((q.shape[1], spec.n_head, spec.value_dim), np.float32)
    prefill_f32.attend_causal(
        np.ascontiguousarray(q), store.layout, spec.n_head_kv, store.n, spec.scale, out,
        spec.n_threads,
    )  # fmt: skip
    return out.swapaxes(0, 1)


def _dense_prefill_bf16(store: Any, q: np.ndarray, spec: Any) -> np.ndarray:
    """The same of bf16, by the CPU's own products."""
    out = np.empty((q.shape[1], spec.n_head, spec.value_dim), np.uint16)
    prefill_bf16.attend_causal(
        np.ascontiguousarray(q), store.layout, spec.n_head_kv, store.n, spec.scale, out,
        spec.n_threads,
    )  # fmt: skip
    return out.swapaxes(0, 1)


def _torch_prefill(store: Any, q: Any, spec: Any) -> Any:
    """``dense_prefill`` of tensors by torch, for bf16 where there is no product of it here.

    Rows before the chunk need no mask: a kv head's queries are folded into one long list there, and
    the two softmaxes are merged by their log-sum-exp, so nothing of size T x n is ever held.
    """
    torch = load_torch()
    n, n_new = store.n, q.shape[1]
    n_past = n - n_new
    n_kv, group = spec.n_head_kv, spec.group
    scale = float(spec.scale)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    width = max(spec.head_dim, spec.value_dim)  # a torch kernel wants one head size
    pad = torch.nn.functional.pad
    k = pad(store.keys()[..., : spec.head_dim].to(q.dtype), (0, width - spec.head_dim))
    v = pad(store.values()[..., : spec.value_dim].to(q.dtype), (0, width - spec.value_dim))
    q = pad(q, (0, width - spec.head_dim))[None]  # (1, H, T, width)
    new_k, new_v = (t[:, n_past:].repeat_interleave(group, 0)[None] for t in (k, v))
    out, lse = attend(q, new_k, new_v, 0.0, True, scale=scale)  # (1, H, T, width), (1, H, T)
    out, lse = out[0], lse[0]
    if n_past:
        folded = q[0].reshape(1, n_kv, group * n_new, width)
        past, past_lse = attend(
            folded, k[None, :, :n_past], v[None, :, :n_past], 0.0, False, scale=scale
        )
        past = past[0].reshape(out.shape)
        past_lse = past_lse[0].reshape(lse.shape)
        weight = torch.sigmoid(past_lse - lse)[..., None]  # of the past in both together
        out = (out.float() * (1 - weight) + past.float() * weight).to(out.dtype)
    return out[..., : spec.value_dim]


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
