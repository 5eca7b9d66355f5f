"""SALS' calibration: the directions of a text's pre-RoPE keys, and how many of them a layer needs.

Layers need different ranks, and eigenvalues do not predict them well. Most layers of the default
model need an eighth of the columns. A few need half. So one layer at a time is cut to several ranks
(calibration/trials.py). The layers in which more columns save the most KLD get more columns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.calibration.run import CalibrationArray, CalibrationRun, budgets_array
from sparsekv_cli.calibration.study import Study, TextCache, study_shares
from sparsekv_cli.calibration.trials import Change, Trial
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.cpu.sals import latent

BASES = ("diag", "pca")  # keys weighted by queries, and plain keys
# shares of the columns to which a trial cuts a layer
SHARES = (1 / 8, 1 / 6, 1 / 4, 3 / 8, 1 / 2, 1.0)


def study_keys(
    run: CalibrationRun, is_dense: Callable[[LayerSpec], bool], n_sinks: int, n_recent: int
) -> dict[str, np.ndarray]:
    """Returns both bases of every layer and each layer's loss with fewer columns.

    The bases are made from pre-RoPE keys and queries: see ``study_directions``. rank_kld f32 (L,
    shares): KLD(full || one layer's keys cut to a share of the columns). rank_budget f32 (L,
    shares, 2): see ``study_shares``. Layers that are dense by default are not cut, and their share
    is the mean.
    """
    specs = [spec for spec in run.specs if not is_dense(spec)]
    layers = [spec.layer for spec in specs for _ in SHARES[:-1]]
    study = Study(run, n_sinks, n_recent, layers, len(run.statistics_ids))
    tensors = study_directions(study)

    def cut(spec: LayerSpec, share: float) -> Trial:
        return Trial(spec.layer, _cut(spec, tensors, study.middle, share))

    # Half of the columns are as good as all. At that share the KLD is little more than that of
    # rounding (0.0002 in bf16), which more columns do not lower.
    tensors["rank_kld"], tensors["rank_budget"] = study_shares(study, specs, cut, SHARES)
    return tensors


def arrays_of_keys(specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
    """Returns name -> shape and type of the arrays that ``study_keys`` returns."""
    n_layer = len(specs)
    width = max(spec.n_head_kv * spec.head_dim for spec in full_layers(specs))
    found = {
        "weights": CalibrationArray("f4", (n_layer, width), 0.0),
        "rank_kld": CalibrationArray("f4", (n_layer, len(SHARES))),
        "rank_budget": budgets_array(n_layer, SHARES),
    }
    for basis in BASES:
        found[f"vectors_{basis}"] = CalibrationArray("f4", (n_layer, width, width))
        found[f"eigenvalues_{basis}"] = CalibrationArray("f4", (n_layer, width))
    return found


def _cut(spec: LayerSpec, tensors: dict[str, np.ndarray], middle: slice, share: float) -> Change:
    """Returns a change of keys: each becomes what the first columns of its latent reconstruct.

    share: of the columns of the basis ``diag``. middle: the rows whose keys change.
    """
    size, d = spec.n_head_kv * spec.head_dim, spec.head_dim
    weights = tensors["weights"][spec.layer, :size]
    vectors = tensors["vectors_diag"][spec.layer, :size, : max(1, round(share * size))]
    positions = np.arange(middle.start, middle.stop)

    def change(k: np.ndarray, v: np.ndarray) -> None:
        encode, decode = weights[:, None] * vectors, vectors / weights[:, None]
        rows = latent.encode_ref(k[..., :d], positions, encode, spec.theta, spec.rope_scale)
        k[..., :d] = latent.reconstruct_ref(
            rows, positions, decode, spec.theta, spec.rope_scale, spec.n_head_kv
        )

    return change


def study_directions(study: Study) -> dict[str, np.ndarray]:
    """Returns both bases of every layer, by name.

    weights f32 (L, G d): w, kv head by kv head. vectors_diag, vectors_pca f32 (L, G d, G d): the
    eigenvectors U of W C W and of C. Columns are by falling eigenvalue, so that the first r columns
    are the basis of rank r. eigenvalues_* f32 (L, G d). Encoder E = w U, decoder D = U / w; for pca
    w = 1.
    """
    specs = study.run.specs
    width = max(spec.n_head_kv * spec.head_dim for spec in full_layers(specs))
    tensors = {"weights": np.zeros((len(specs), width), np.float32)}
    for basis in BASES:
        shape = (len(specs), width, width)
        tensors[f"vectors_{basis}"] = np.zeros(shape, np.float32)
        tensors[f"eigenvalues_{basis}"] = np.zeros(shape[:2], np.float32)

    study.pass_over_text(lambda spec: _StatisticsCache(spec, tensors))
    return tensors


class _StatisticsCache(TextCache):
    """Sums products of a layer's keys and squares of its queries in the pass over the text."""

    def __init__(self, spec: LayerSpec, tensors: dict[str, np.ndarray]) -> None:
        super().__init__(spec)
        self._tensors = tensors
        size = spec.n_head_kv * spec.head_dim
        self._products = np.zeros((size, size))  # K'K
        self._energy = np.zeros((spec.n_head_kv, spec.head_dim))  # squared queries

    def extend(self, x: AttnInput) -> Any:
        n_kv, d = self.spec.n_head_kv, self.spec.head_dim
        keys = as_f32(x.k_nope).swapaxes(0, 1).reshape(-1, n_kv * d)  # (T, G d)
        self._products += keys.T @ keys
        queries = as_f32(x.q_nope).reshape(n_kv, -1, d)  # (G, H/G T, d)
        self._energy += np.square(queries).sum(1)
        return super().extend(x)

    def finish_prefill(self) -> None:
        spec, n = self.spec, self.store.n
        super().finish_prefill()
        energy, half = self._energy / (n * spec.group), len(spec.theta)
        pairs = (energy[:, :half] + energy[:, half : 2 * half]) / 2 * spec.rope_scale**4
        energy[:, : 2 * half] = np.tile(pairs, 2)
        weights = np.sqrt(energy.reshape(-1))
        # Any common factor would do. With this one latents are about as large as keys and fit f16.
        weights = np.maximum(weights, 1e-4 * weights.max() + 1e-30)
        weights /= np.exp(np.log(weights).mean())
        size, covariance, tensors = len(weights), self._products / n, self._tensors
        tensors["weights"][spec.layer, :size] = weights
        for basis, w in zip(BASES, (weights, np.ones(size)), strict=True):
            values, vectors = np.linalg.eigh(w[:, None] * covariance * w)
            tensors[f"eigenvalues_{basis}"][spec.layer, :size] = values[::-1]
            tensors[f"vectors_{basis}"][spec.layer, :size, :size] = vectors[:, ::-1]
