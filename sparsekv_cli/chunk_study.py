"""FASA's calibration: how well each frequency chunk of a head ranks the keys of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache import AttnInput, Backend, CalibrationRun, KVStore, LayerCache, LayerSpec
from sparsekv_cli.cpu import dominance

METRICS = ("var", "ca")  # as dominance.judge_chunks returns them


def study_chunks(run: CalibrationRun, n_query: int, top_k: int) -> dict[str, np.ndarray]:
    """Both metrics of every chunk, and each kv head's chunks by rank, the best first.

    n_query: how many queries of the text judge; top_k: K of CA. score_var, score_ca f32 (L, H, C);
    dom_var, dom_ca u8 (L, G, C); C = n_rot/2, which is d/2 where all dims are rotated. Layers with
    fewer heads than others end in zeros.
    """
    specs, n_chunk = run.specs, len(run.specs[0].theta)
    positions = dominance.query_positions(len(run.ids), n_query)
    n_head, n_kv = (max(getattr(s, f) for s in specs) for f in ("n_head", "n_head_kv"))
    tensors = {}
    for metric in METRICS:
        tensors[f"score_{metric}"] = np.zeros((len(specs), n_head, n_chunk), np.float32)
        tensors[f"dom_{metric}"] = np.zeros((len(specs), n_kv, n_chunk), np.uint8)

    def keep(spec: LayerSpec, scores: dict[str, np.ndarray]) -> None:
        for metric, score in scores.items():
            rank = dominance.rank_chunks(score, spec.n_head_kv)
            tensors[f"score_{metric}"][spec.layer, : spec.n_head] = score
            tensors[f"dom_{metric}"][spec.layer, : spec.n_head_kv] = rank
        run.progress((spec.layer + 1) / len(specs))

    caches = [_JudgingCache(spec, run.backend, positions, top_k, keep) for spec in specs]
    run.forward(run.ids, 0, caches, False)
    return tensors


class _JudgingCache(LayerCache):
    """Judges a layer's chunks at the end of the calibration's prefill, and keeps nothing."""

    def __init__(
        self,
        spec: LayerSpec,
        backend: Backend,
        positions: Sequence[int],
        top_k: int,
        keep: Callable[[LayerSpec, dict[str, np.ndarray]], None],
    ) -> None:
        super().__init__(spec, backend)
        self._positions, self._top_k, self._keep = positions, top_k, keep
        self._queries: list[Any] = []  # torch f32 (H, d), one a position

    def prefill(self, x: AttnInput) -> Any:
        inside = [t - x.pos for t in self._positions if 0 <= t - x.pos < x.q.shape[1]]
        self._queries += [x.q[:, t].float() for t in inside]
        return super().prefill(x)

    def finish_prefill(self) -> None:
        import torch

        spec, store = self.spec, self.store
        keys = torch.from_numpy(store.k[:, : store.n, : spec.head_dim]).float()
        keys = keys.transpose(1, 2).contiguous()  # (G, d, n)
        judged = [
            dominance.judge_chunks(q, t, keys, len(spec.theta), self._top_k)
            for q, t in zip(self._queries, self._positions, strict=True)
        ]
        means = [torch.stack(values).mean(0).numpy() for values in zip(*judged, strict=True)]
        self.store, self._queries = KVStore(spec), []
        self._keep(spec, dict(zip(METRICS, means, strict=True)))

    def decode(self, x: AttnInput) -> np.ndarray:
        raise AssertionError("a calibration only prefills")
