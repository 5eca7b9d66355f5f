"""FASA's calibration: how well each frequency chunk of a head ranks the keys of a text.

How many chunks a layer needs differs, too: in most layers of the default model an eighth of them
chooses well enough, and a single layer, in which heads recall, needs half. So every layer chooses
rows by some shares of its chunks by itself (calibration/trials.py), and chunks go where they save
most KLD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import Backend, LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.calibration.trials import Attend, Trial, middle_rows, study_shares, unchanged
from sparsekv_cli.cpu.faedkv import frequencies
from sparsekv_cli.cpu.fasa import dominance
from sparsekv_cli.cpu.jit.floats import load_torch
from sparsekv_cli.methods.base import CalibrationRun, Method

METRICS = ("var", "ca")  # as dominance.judge_chunks returns them
SHARES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1.0)  # of all chunks, at which layers choose rows
N_CHOSEN = 128  # of the thousand rows of a trial; fewer are measured with more noise
STATISTICS_SHARE = 0.2  # of the time of a calibration


def study_chunks(
    run: CalibrationRun, method: Method, n_query: int, top_k: int, n_sinks: int, n_recent: int
) -> dict[str, np.ndarray]:
    """What each chunk is worth, and what a layer loses with a share of them.

    tip_kld f32 (L, shares): KLD(full || one layer that attends to the best N_CHOSEN rows by its
    first chunks, var); tip_budget f32 (L, shares, 2); see ``trials.study_shares``. The others:
    see ``rank_all``. n_sinks, n_recent: rows that are always attended.
    """
    tensors = rank_all(run, n_query, top_k)
    middle = middle_rows(len(run.ids), n_sinks, n_recent)

    def choose(spec: LayerSpec, share: float) -> Trial:
        n_chunk = len(spec.theta)
        rank = tensors["dom_var"][spec.layer, : spec.n_head_kv]
        dims = dominance.order_dims(rank, max(1, round(share * n_chunk)), spec.head_dim)
        dims = dims[:, : 2 * max(1, round(share * n_chunk))]
        return Trial(spec.layer, unchanged, _attend_best(spec, dims, n_sinks, n_recent))

    def progress(share: float) -> None:
        run.progress(STATISTICS_SHARE + (1 - STATISTICS_SHARE) * share)

    tensors["tip_kld"], tensors["tip_budget"] = study_shares(
        run, method, choose, SHARES, middle, n_recent, progress
    )
    return tensors


def even_budgets() -> np.ndarray:
    """A row of ``tip_budget`` of a layer that has the share that all have: f32 (shares, 2)."""
    return frequencies.even_budgets(SHARES)


def tips_of(mean_tip: int, n_chunk: int, budgets: np.ndarray) -> int:
    """A layer's N_tip where all have ``mean_tip`` of ``n_chunk`` chunks on average.

    budgets: its row of ``tip_budget``. Below the least share that was studied, all have the mean.
    """
    return frequencies.layer_count(mean_tip, n_chunk, budgets, SHARES)


def _attend_best(spec: LayerSpec, dims: np.ndarray, n_sinks: int, n_recent: int) -> Attend:
    """Attention to the first and last rows, and the best of the others by ``dims`` (G, m)."""

    def attend(store: KVStore, x: AttnInput) -> Any:
        torch = load_torch()
        n, n_new = store.n, x.q.shape[1]
        k = torch.from_numpy(store.k[:, None, :n, : spec.head_dim]).float()  # (G, 1, n, d)
        v = torch.from_numpy(store.v[:, None, :n, : spec.value_dim]).float()
        q = x.q.float().unflatten(0, (spec.n_head_kv, spec.group))  # (G, group, T, d)
        wide = torch.from_numpy(dims.astype(np.int64))[:, None, None]  # (G, 1, 1, m)
        of_q, of_k = (rows.gather(3, wide.expand(*rows.shape[:3], -1)) for rows in (q, k))
        row, own = torch.arange(n), torch.arange(n - n_new, n)[:, None]
        scores = of_q @ of_k.transpose(2, 3)  # (G, group, T, n)
        scores.masked_fill_((row < n_sinks) | (row > own - n_recent), torch.inf)
        scores.masked_fill_(row > own, -torch.inf)
        least = scores.topk(min(N_CHOSEN, n), dim=3).values[..., -1:]
        weights = (q @ k.transpose(2, 3)) * float(spec.scale)
        weights.masked_fill_((scores < least) | (row > own), -torch.inf)
        return (weights.softmax(3) @ v).flatten(0, 1).to(x.v.dtype)

    return attend


def rank_all(run: CalibrationRun, n_query: int, top_k: int) -> dict[str, np.ndarray]:
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
        run.progress(STATISTICS_SHARE * (spec.layer + 1) / len(specs))

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
        x = x.in_torch()
        inside = [t - x.pos for t in self._positions if 0 <= t - x.pos < x.q.shape[1]]
        self._queries += [x.q[:, t].float() for t in inside]
        return super().prefill(x)

    def finish_prefill(self) -> None:
        torch = load_torch()
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
