"""SALS' calibration: in which directions the pre-RoPE keys of a text lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsekv_cli.cache import AttnInput, Backend, CalibrationRun, KVStore, LayerCache, LayerSpec

BASES = ("diag", "pca")  # weighted by queries, and not


def study_keys(run: CalibrationRun) -> dict[str, np.ndarray]:
    """Both bases of every layer, from the pre-RoPE keys and queries of the text.

    weights f32 (L, G d): w, kv-head-major. vectors_diag, vectors_pca f32 (L, G d, G d): U of W C W
    and of C, columns by falling eigenvalue, all of them, so that any rank is a prefix;
    eigenvalues_* f32 (L, G d). E = w U and D = U / w; for pca w = 1.
    """
    width = max(spec.n_head_kv * spec.head_dim for spec in run.specs)
    tensors = {"weights": np.zeros((len(run.specs), width), np.float32)}
    for basis in BASES:
        shape = (len(run.specs), width, width)
        tensors[f"vectors_{basis}"] = np.zeros(shape, np.float32)
        tensors[f"eigenvalues_{basis}"] = np.zeros(shape[:2], np.float32)

    def keep(spec: LayerSpec, covariance: np.ndarray, weights: np.ndarray) -> None:
        size = len(weights)
        tensors["weights"][spec.layer, :size] = weights
        for basis, w in zip(BASES, (weights, np.ones(size)), strict=True):
            values, vectors = np.linalg.eigh(w[:, None] * covariance * w)
            tensors[f"eigenvalues_{basis}"][spec.layer, :size] = values[::-1]
            tensors[f"vectors_{basis}"][spec.layer, :size, :size] = vectors[:, ::-1]
        run.progress((spec.layer + 1) / spec.n_layer)

    run.forward(run.ids, 0, [_StatisticsCache(s, run.backend, keep) for s in run.specs], False)
    return tensors


class _StatisticsCache(LayerCache):
    """Sums up a layer's keys and queries during the calibration's prefill, and keeps no rows."""

    def __init__(
        self,
        spec: LayerSpec,
        backend: Backend,
        keep: Callable[[LayerSpec, np.ndarray, np.ndarray], None],
    ) -> None:
        super().__init__(spec, backend)
        self._keep = keep
        size = spec.n_head_kv * spec.head_dim
        self._products = np.zeros((size, size))  # K'K
        self._energy = np.zeros((spec.n_head_kv, spec.head_dim))  # squared queries

    def prefill(self, x: AttnInput) -> Any:
        keys = x.k_nope.float().transpose(0, 1).flatten(1)  # (T, G d)
        self._products += (keys.T @ keys).double().numpy()
        queries = x.q_nope.float().unflatten(0, (self.spec.n_head_kv, self.spec.group))
        self._energy += queries.square().sum((1, 2)).double().numpy()
        return super().prefill(x)

    def finish_prefill(self) -> None:
        spec, n = self.spec, self.store.n
        self.store = KVStore(spec)
        energy, half = self._energy / (n * spec.group), len(spec.theta)
        pairs = (energy[:, :half] + energy[:, half : 2 * half]) / 2 * spec.rope_scale**4
        energy[:, : 2 * half] = np.tile(pairs, 2)
        weights = np.sqrt(energy.reshape(-1))
        # A common factor cancels; with this one latents are as large as keys, which fit f16.
        weights = np.maximum(weights, 1e-4 * weights.max() + 1e-30)
        weights /= np.exp(np.log(weights).mean())
        self._keep(spec, self._products / n, weights)

    def decode(self, x: AttnInput) -> np.ndarray:
        raise AssertionError("a calibration only prefills")
