"""Numpy forms of SALS' kernels, which tests compare with them."""

from __future__ import annotations

import numpy as np

from sparsekv_cli.cpu.sals.queries import damping
from sparsekv_cli.cpu.sals.values import GROUP


def brope_ref(
    q_nope: np.ndarray,
    position: int,
    latents: np.ndarray,
    first: int,
    decode: np.ndarray,
    theta: np.ndarray,
    rope_scale: float,
    block: int,
) -> np.ndarray:
    """Returns scores (H, n) before 1/sqrt(d), block by block, of q_nope (H, d) at ``position``.

    latents (n, r*): of the positions from ``first`` on; decode D[:, :r*] (G d, r*). With block = 1
    and r* = G d the scores are the exact q . k.
    """
    n_head, d = q_nope.shape
    n_kv = len(decode) // d
    half = len(theta)
    factor = np.ones(d)
    factor[: 2 * half] = rope_scale**2 * np.tile(damping(theta, block).astype(float), 2)
    scores = np.empty((n_head, len(latents)))
    for start in range(0, len(latents), block):
        angles = (position - (first + start + (block - 1) / 2)) * theta
        a, b = q_nope[:, :half], q_nope[:, half : 2 * half]
        cos, sin = np.cos(angles), np.sin(angles)
        turned = np.concatenate([a * cos - b * sin, a * sin + b * cos, q_nope[:, 2 * half :]], 1)
        for h in range(n_head):
            g = h * n_kv // n_head
            projected = decode[g * d : (g + 1) * d].T @ (turned[h] * factor)
            scores[h, start : start + block] = latents[start : start + block] @ projected
    return scores


def summed_ref(q_nope: np.ndarray, latents: np.ndarray, decode: np.ndarray) -> np.ndarray:
    """Returns the paper's scores (n,): pre-RoPE logits summed over the heads."""
    n_head, d = q_nope.shape
    n_kv = len(decode) // d
    summed = q_nope.reshape(n_kv, n_head // n_kv, d).sum(1).reshape(-1)
    return latents @ (decode.T @ summed)


def quantize_ref(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantises values (n, d_v): returns scales f16, minima f16 (n, groups), codes int (n, d_v)."""
    n, d_v = values.shape
    groups = range(0, d_v, GROUP)
    scales, minima = (np.empty((n, len(groups)), np.float16) for _ in range(2))
    codes = np.empty((n, d_v), int)
    for i, start in enumerate(groups):
        part = values[:, start : start + GROUP].astype(np.float32)
        minima[:, i] = part.min(1)
        scales[:, i] = (part.max(1) - part.min(1)) / np.float32(2**bits - 1)
        scale = scales[:, i].astype(np.float32)[:, None]
        steps = (part - minima[:, i].astype(np.float32)[:, None]) / np.where(scale, scale, 1)
        codes[:, start : start + GROUP] = np.clip(np.floor(steps + 0.5), 0, 2**bits - 1)
    return scales, minima, codes


def dequantize_ref(scales: np.ndarray, minima: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Returns values f32 (n, d_v) of scales and minima f16 (n, groups) and codes (n, d_v)."""
    group = np.arange(codes.shape[1]) // GROUP
    return minima.astype(np.float32)[:, group] + scales.astype(np.float32)[:, group] * codes


def multiply_ref(a, x):
    """numpy reference: a (M, C), x (C, 16) -> (M, 16) in f64."""
    return a.astype(np.float64) @ x.astype(np.float64)
