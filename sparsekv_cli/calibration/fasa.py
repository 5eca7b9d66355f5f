"""FASA's calibration: how well each frequency chunk of a head ranks the keys of a text.

Layers need different numbers of chunks. In most layers of the default model an eighth of them is
enough. One layer, whose heads recall, needs half. So one layer at a time chooses rows by several
shares of its chunks (calibration/trials.py). The layers in which more chunks save the most KLD get
more chunks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.spec import N_SINKS, AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.calibration.run import CalibrationArray, CalibrationRun, budgets_array
from sparsekv_cli.calibration.study import Study, TextCache, study_shares
from sparsekv_cli.calibration.trials import Attend, Trial, unchanged
from sparsekv_cli.cpu.fasa import dominance
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of

METRICS = ("var", "ca")  # in the order in which dominance.judge_chunks returns them
# shares of a layer's chunks by which a trial chooses rows
SHARES = (1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1.0)
N_RECENT = 16  # last rows to which a trial always attends
N_QUERIES, TOP_K = 16, 64  # queries of the text that judge the chunks; K of CA's top K
N_CHOSEN = 128  # of the 1000 rows of a trial; fewer chosen rows give more noise


def study_chunks(
    run: CalibrationRun, is_dense: Callable[[LayerSpec], bool]
) -> dict[str, np.ndarray]:
    """Returns the rank of each chunk, and each layer's loss with a share of its chunks.

    tip_kld f32 (L, shares): KLD(full || one layer attends to the N_CHOSEN rows that its best chunks
    by var score highest). tip_budget f32 (L, shares, 2): see ``study_shares``. The other arrays:
    see ``rank_all``.
    """
    specs = [spec for spec in run.specs if not is_dense(spec)]
    layers = [spec.layer for spec in specs for _ in SHARES[:-1]]
    study = Study(run, N_SINKS, N_RECENT, layers, len(run.statistics_ids))
    tensors = rank_all(study)

    def choose(spec: LayerSpec, share: float) -> Trial:
        n_chunk = spec.n_chunk
        rank = tensors["dom_var"][spec.layer, : spec.n_head_kv, :n_chunk]
        dims = dominance.order_dims(rank, max(1, round(share * n_chunk)), spec.head_dim)
        dims = dims[:, : 2 * max(1, round(share * n_chunk))]
        return Trial(spec.layer, unchanged, _attend_best(dims, N_SINKS, N_RECENT))

    tensors["tip_kld"], tensors["tip_budget"] = study_shares(study, specs, choose, SHARES)
    return tensors


def arrays_of_chunks(specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
    """Returns name -> shape and type of the arrays that ``study_chunks`` returns."""
    n_layer, (n_head, n_kv, n_chunk) = len(specs), _most(specs)
    found = {
        "tip_kld": CalibrationArray("f4", (n_layer, len(SHARES))),
        "tip_budget": budgets_array(n_layer, SHARES),
    }
    for metric in METRICS:
        found[f"score_{metric}"] = CalibrationArray("f4", (n_layer, n_head, n_chunk))
        shape = n_layer, n_kv, n_chunk
        found[f"dom_{metric}"] = CalibrationArray("u1", shape, 0, n_chunk - 1)
    return found


def _most(specs: Sequence[LayerSpec]) -> tuple[int, int, int]:
    """Returns the largest numbers of query heads, kv heads and chunks among the full layers."""
    full = full_layers(specs)
    n_head, n_kv = max(s.n_head for s in full), max(s.n_head_kv for s in full)
    return n_head, n_kv, max(s.n_chunk for s in full)


def _attend_best(dims: np.ndarray, n_sinks: int, n_recent: int) -> Attend:
    """Returns a function of attention to the first, the last and the best other rows.

    dims (G, m): the dims by which a kv head scores rows.
    """

    def attend(q_new: np.ndarray, store: KVStore, spec: LayerSpec) -> np.ndarray:
        n, n_new = store.n, q_new.shape[1]
        k = store.k[:, :n, : spec.head_dim].astype(np.float32)  # (G, n, d)
        v = store.v[:, :n, : spec.value_dim].astype(np.float32)
        q = as_f32(q_new).reshape(spec.n_head_kv, -1, spec.head_dim)  # (G, H/G T, d)
        of_q, of_k = (np.take_along_axis(rows, dims[:, None], 2) for rows in (q, k))
        row, own = np.arange(n), np.tile(np.arange(n - n_new, n), spec.group)[:, None]
        scores = of_q @ of_k.swapaxes(1, 2)  # (G, H/G T, n)
        scores[:, (row < n_sinks) | (row > own - n_recent)] = np.inf
        scores[:, row > own] = -np.inf
        least = max(0, n - N_CHOSEN)
        chosen = scores >= np.partition(scores, least, axis=2)[..., least, None]
        exact = q @ k.swapaxes(1, 2) * spec.scale
        if spec.softcap:
            exact = spec.softcap * np.tanh(exact / spec.softcap)
        weights = np.where(chosen & (row <= own), exact, -np.inf)
        sinks = np.full(spec.n_head, -np.inf, np.float32)
        sinks[: len(spec.sinks)] = spec.sinks
        of_row = np.repeat(sinks, n_new).reshape(spec.n_head_kv, -1, 1)
        peak = np.maximum(weights.max(2, keepdims=True), of_row)
        weights = np.exp(weights - peak)
        mass = weights.sum(2, keepdims=True) + np.exp(of_row - peak)
        out = (weights / mass) @ v  # (G, H/G T, d_v)
        return as_type_of(q_new, out.reshape(spec.n_head, n_new, spec.value_dim))

    return attend


def rank_all(study: Study) -> dict[str, np.ndarray]:
    """Returns the score of every chunk by both metrics, and the chunks of kv heads by rank.

    score_var, score_ca f32 (L, H, C). dom_var, dom_ca u8 (L, G, C), the best chunk first. C is
    LayerSpec.n_chunk. A layer with fewer heads or chunks than others has zeros at the end.
    """
    specs = study.run.specs
    positions = dominance.query_positions(len(study.run.statistics_ids), N_QUERIES)
    n_head, n_kv, n_chunk = _most(specs)
    tensors = {}
    for metric in METRICS:
        tensors[f"score_{metric}"] = np.zeros((len(specs), n_head, n_chunk), np.float32)
        tensors[f"dom_{metric}"] = np.zeros((len(specs), n_kv, n_chunk), np.uint8)

    study.pass_over_text(lambda spec: _JudgingCache(spec, positions, tensors))
    return tensors


class _JudgingCache(TextCache):
    """Collects queries in the pass over the text, and judges the layer's chunks at its end."""

    def __init__(
        self, spec: LayerSpec, positions: Sequence[int], tensors: dict[str, np.ndarray]
    ) -> None:
        super().__init__(spec)
        self._positions, self._tensors = positions, tensors
        self._queries: list[np.ndarray] = []  # f32 (H, d) each, one for each position

    def extend(self, x: AttnInput) -> Any:
        inside = [t - x.pos for t in self._positions if 0 <= t - x.pos < x.q.shape[1]]
        self._queries += [as_f32(x.q[:, t]).copy() for t in inside]  # copies, so that x is freed
        return super().extend(x)

    def finish_prefill(self) -> None:
        spec, store = self.spec, self.store
        keys = store.k[:, : store.n, : spec.head_dim].astype(np.float32)
        keys = np.ascontiguousarray(keys.swapaxes(1, 2))  # (G, d, n)
        judged = [
            dominance.judge_chunks(q, t, keys, spec.n_chunk, TOP_K)
            for q, t in zip(self._queries, self._positions, strict=True)
        ]
        self._queries = []
        super().finish_prefill()
        for metric, values in zip(METRICS, zip(*judged, strict=True), strict=True):
            score = np.mean(values, axis=0)
            rank = dominance.rank_chunks(score, spec.n_head_kv)
            self._tensors[f"score_{metric}"][spec.layer, : spec.n_head, : spec.n_chunk] = score
            self._tensors[f"dom_{metric}"][spec.layer, : spec.n_head_kv, : spec.n_chunk] = rank
