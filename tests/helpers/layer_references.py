"""Numpy forms of the kernels of a layer, which tests compare with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsekv_cli.cpu.layer.activation import (
    CLAMP,
    CLAMPED,
    CLAMPED_SLOPE,
    CUBIC,
    GELU,
    SIGMOID,
    SLOPE,
    SQUARED,
)
from sparsekv_cli.cpu.layer.hadamard import block_of
from sparsekv_cli.cpu.weights.dot import matvec_ref


def gate_ref(activation: int, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """numpy reference of ``gate_lanes`` in the type of its arguments."""
    if activation == CLAMPED:
        gate, up = np.minimum(gate, CLAMP), np.clip(up, -CLAMP, CLAMP) + 1
        return gate / (1 + np.exp(-CLAMPED_SLOPE * gate)) * up
    if activation == GELU:
        return gate / (1 + np.exp(-gate * (SLOPE + CUBIC * gate**2))) * up
    if activation == SIGMOID:
        return up / (1 + np.exp(-gate))
    if activation == SQUARED:
        return np.maximum(gate, 0) ** 2
    return gate / (1 + np.exp(-gate)) * up


def rotate_rows_ref(x: np.ndarray) -> np.ndarray:
    """Returns the product of x (..., d) with the matrix, in f64."""
    d = x.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < block_of(d):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, len(matrix))
    return (blocks @ matrix / np.sqrt(len(matrix))).reshape(x.shape)


def gate_inputs_ref(projected, norm, eps, embedded, gate, activation) -> np.ndarray:
    """numpy reference of ``gate_inputs``, f32 or wider."""
    normed = projected / np.sqrt((projected**2).mean(-1, keepdims=True) + eps) * norm
    return gate_ref(activation, gate, (normed + embedded) / np.sqrt(2))


def multiply_ref(
    matrices: Sequence[tuple[int, np.ndarray]], offsets: np.ndarray, rows: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """Reference: f32 (pairs, rows of an expert) from gguf's own dequantisation, summed in f64."""
    parts = []
    for e, own in enumerate(np.split(x[rows], offsets[1:-1])):
        weights = [(code, np.split(w, len(offsets) - 1)[e]) for code, w in matrices]
        parts.append(np.hstack([matvec_ref(code, w, x.shape[1], own.T).T for code, w in weights]))
    return np.concatenate(parts)
