"""Rotary position embedding: angles per position, with linear, YaRN and Llama 3 scaling.

Formulas: RoFormer (arXiv:2104.09864), YaRN (arXiv:2309.00071) as ggml_rope_yarn computes it.
Everything after the rotation uses half-split pairs (i, i + n_rot/2), whatever the file's pairing.
"""

from __future__ import annotations

import math

import numpy as np

from sparsekv_cli.models.hparams import HParams, RopeParams


def inverse_frequencies(
    n_rot: int, rope: RopeParams, freq_factors: np.ndarray | None = None
) -> np.ndarray:
    """Radians a position of each pair, f64 (n_rot/2,), scaling included.

    freq_factors: f32 (n_rot/2,) by which the unscaled angles are divided (Llama 3).
    """
    pair = np.arange(n_rot // 2, dtype=np.float64)
    theta = rope.freq_base ** (-2.0 * pair / n_rot)
    if freq_factors is not None:
        theta = theta / freq_factors.astype(np.float64)
    interpolated = theta * rope.freq_scale
    if rope.ext_factor == 0.0:
        return interpolated
    low, high = (
        n_rot
        * math.log(rope.n_ctx_original / (turns * 2 * math.pi))
        / (2 * math.log(rope.freq_base))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    low, high = max(0.0, math.floor(low)), min(n_rot - 1.0, math.ceil(high))
    ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
    ramp *= rope.ext_factor
    return interpolated * (1.0 - ramp) + theta * ramp


class RopeTable:
    """cos and sin f32 (positions, n_rot/2), extended as positions are asked for."""

    def __init__(self, hparams: HParams, freq_factors: np.ndarray | None) -> None:
        self.theta = inverse_frequencies(hparams.n_rot, hparams.rope, freq_factors)
        self.magnitude = hparams.rope.magnitude
        self.cos = np.empty((0, hparams.n_rot // 2), np.float32)
        self.sin = self.cos

    def reserve(self, n_positions: int) -> None:
        """Makes rows 0..n_positions valid; grows in steps of at least a quarter."""
        have = len(self.cos)
        if n_positions <= have:
            return
        stop = max(n_positions, have + have // 4, 512)
        angles = np.outer(np.arange(have, stop, dtype=np.float64), self.theta)
        cos = (np.cos(angles) * self.magnitude).astype(np.float32)
        sin = (np.sin(angles) * self.magnitude).astype(np.float32)
        self.cos = np.concatenate([self.cos, cos])
        self.sin = np.concatenate([self.sin, sin])
