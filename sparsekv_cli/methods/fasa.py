"""FASA: "Frequency-Aware Sparse Attention" (Wang et al., AMAP Alibaba and others).

RoPE turns the dims of a head in pairs, the frequency chunks. Calibration finds once a few of them
that rank the keys nearly as the whole head does. Each step scores all keys by the dominant
chunks of their kv head. Each query head attends exactly to its best N_fac keys.

| paper | here |
|---|---|
| eq 4, Algorithm 1: contextual agreement of a chunk | judge_chunks (cpu/fasa/dominance.py) |
| eq 5, the N_tip dominant chunks | rank_chunks, order_dims (cpu/fasa/dominance.py) |
| section 4.1, scores by dominant chunks, top N_fac | cpu/fasa/chunks.py score_pieces, choose_rows |
| eq 6, 7, focused attention at original positions | cpu/fasa/attend.py attend_split_rows |
| section 4.3, D.1, FASA-C and FASA-M | variant=c and variant=m of SplitStore |

Departures; docs/methods.md has their reasons and figures:
(1) ``metric=var`` ranks chunks by the variance of their scores over the keys.
(2) The query heads of a kv head share one set of chunks, because its keys are stored once.
(3) The first 4 and the last 16 rows are always among the N_fac (not with ``force=none``).
(4) The dominant part of an attended key's score is not computed twice.
(5) A context within N_fac is stored and attended to as ``full`` does it. K is whole during a
    prefill. It is split when the context outgrows N_fac.
(6) Layers have numbers of chunks of their own, with the same sum (``allocation``).
``preset=paper``: CA, d/4 chunks in all layers, nothing forced, no dense layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.layer import LayerCache, rows_alike
from sparsekv_cli.cache.spec import N_SINKS, AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cache.split_store import SplitStore
from sparsekv_cli.cache.store import padded
from sparsekv_cli.calibration.allocation import layer_count
from sparsekv_cli.calibration.fasa import (
    METRICS,
    N_RECENT,
    SHARES,
    arrays_of_chunks,
    study_chunks,
)
from sparsekv_cli.calibration.run import CALIBRATION, CalibrationArray, CalibrationRun
from sparsekv_cli.cpu.fasa import chunks, dominance
from sparsekv_cli.cpu.fasa.state import FASAState
from sparsekv_cli.cpu.fasa.step import fasa_step, run_thread
from sparsekv_cli.cpu.vector.run import KernelStep
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import option

N_FAC = Budget(tokens=256)  # paper, section 5.1


@dataclass(frozen=True)
class FASA(Method):
    """Options of FASA; symbols as in the paper."""

    paper: ClassVar[str] = "FASA: Frequency-Aware Sparse Attention (Wang et al.)"
    description: ClassVar[str] = "scores keys by the dominant RoPE frequencies, attends to the best"
    use: ClassVar[str] = "long contexts; it misses some of many keys that look alike"
    work_of_a_head: ClassVar[int] = 2048
    needs: ClassVar[str] = CALIBRATION
    cache_types: ClassVar[tuple[str, ...]] = ("f16",)
    device_cache: ClassVar[str] = "fasa:make_cache"
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "tuned": {},
        "paper": {"metric": "ca", "force": "none", "allocation": "uniform", "dense_layers": ()},
    }

    preset: str = option("tuned", "a set of values; -o overrides them", choices=tuple(presets))
    budget: Budget = option(N_FAC, "rows attended a head, N_fac: N or P%")
    n_tip: int = option(
        0, "dominant chunks of a kv head, on average; 0 = d/8 (var), d/4 (ca)", at_least=0
    )
    allocation: str = option(
        "layers", "chunks of each layer: by calibration, or uniform", choices=("layers", "uniform")
    )
    metric: str = option(
        "var", "what ranks chunks: the variance of their scores, or ca (eq 4)", choices=METRICS
    )
    force: str = option(
        "default", "rows always attended: first 4 and last 16, or none", choices=("default", "none")
    )
    variant: str = option("c", "m: V and most of K stay on a GPU's host", choices=("c", "m"))

    def is_dense_at(self, n: int) -> bool:
        """Returns whether a step attends to all rows of a context of n rows."""
        return n <= self.budget.rows(n)

    def forced(self, n_fac: int) -> tuple[int, int]:
        """Returns (first, last): how many first and last rows each head always attends to.

        n_fac: the rows that a head attends to, these included.
        """
        if self.force == "none":
            return 0, 0
        n_recent = min(N_RECENT, max(1, n_fac // 2))
        return min(N_SINKS, n_fac - n_recent), n_recent

    def dominant_dims(self, spec: LayerSpec) -> tuple[np.ndarray, int]:
        """Returns a layer's dims, int32 (G, d), dominant ones first, and how many are dominant.

        Raises SparseKVError if the calibration does not fit the layer, or n_tip is too large.
        """
        n_chunk = spec.n_chunk
        rank = spec.calibration[f"dom_{self.metric}"][: spec.n_head_kv, :n_chunk]  # (G, C)
        if rank.shape[1] != n_chunk or (np.sort(rank) != np.arange(n_chunk)).any():
            raise SparseKVError(f"calibration of fasa: layer {spec.layer} ranks other chunks")
        share = 8 if self.metric == "var" else 4
        n_tip = self.n_tip or min(n_chunk, max(1, spec.head_dim // share))
        if n_tip > n_chunk:
            raise SparseKVError(f"n_tip = {n_tip}: this model's heads have {n_chunk} chunks")
        if self.allocation == "layers":
            n_tip = layer_count(n_tip, n_chunk, spec.calibration["tip_budget"], SHARES)
        return dominance.order_dims(rank, n_tip, spec.head_dim), 2 * n_tip

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return FASACache(spec, self)

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """Returns each layer's ranks of chunks and its loss with few chunks, for any options."""
        return study_chunks(run, FASA().is_dense)

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
        return arrays_of_chunks(specs)


class FASACache(LayerCache):
    """The rows of one layer. K is split into dominant and other dims while steps are sparse."""

    store: SplitStore
    queries_read = 0

    def __init__(self, spec: LayerSpec, method: FASA) -> None:
        super().__init__(spec)
        self.method = method
        self.store = SplitStore(spec, *method.dominant_dims(spec))
        state = FASAState(
            dims=self.store.dims, scale=spec.scale, softcap=spec.softcap,
            sinks=spec.sinks if len(spec.sinks) else None, n_threads=spec.n_threads,
        )  # fmt: skip
        self._step = KernelStep(state, run_thread)

    def extend(self, x: AttnInput) -> Any:
        self.store.join()
        return super().extend(x)

    def finish_prefill(self) -> None:
        if not self.method.is_dense_at(self.store.n + 1):
            self.store.split()

    def decode(self, x: AttnInput) -> np.ndarray:
        store, spec = self.store, self.spec
        n = store.n + 1
        n_fac = self.method.budget.rows(n)
        if self.method.is_dense_at(n):
            store.join()  # after a rewind a short context may be split
            store.append_row(x.k, x.v)
            return self.attend_all(x.q)
        store.reserve(n)
        dom = store.split()
        forced = self.method.forced(n_fac)
        rows = np.empty((spec.n_head, n_fac), np.int32)
        out = np.empty((spec.n_head, store.v.shape[2]), np.float32)
        state, (rest, values) = self._step.state, store.halves
        state.set(
            n=n, n_sinks=forced[0], n_recent=forced[1], dom=dom, rest=rest, values=values, q=x.q,
            k=x.k, v=None if spec.v_is_k else x.v, rows=rows, out=out,
        )  # fmt: skip
        fasa_step(self._step.at)
        store.n = n
        self.attended = rows, np.full(spec.n_head, n_fac)
        row_bytes = store.row_bytes  # of Krest and V
        n_again = spec.n_head * chunks.n_blocks_opened(n, *forced, n_fac)
        n_scored = spec.n_head_kv * n + n_again * chunks.BLOCK  # rows of Kdom
        n_bytes = 2 * dom.shape[2] * n_scored + rows.size * row_bytes
        self.ledger.step(spec.n_head * n, spec.n_head * n, rows.size, n_bytes, True)
        if self.method.variant == "m":
            n_moved = chunks.count_distinct(rows, spec.group, n)
            self.ledger.counts["bytes_moved"] += n_moved * row_bytes
        return self._with_all_dims(out) if spec.v_is_k else out

    def _with_all_dims(self, rest: np.ndarray) -> np.ndarray:
        """Returns sums of rows of Krest (H, d - n_dom) as (H, d), with zeros for dominant dims.

        Latent attention has one kv head, and does not read the values' rotated dims.
        """
        others = self.store.dims[0, self.store.n_dom :]
        out = np.zeros((len(rest), padded(self.spec.head_dim)), np.float32)
        out[:, others] = rest[:, : len(others)]
        return out

    def most_rows(self, n: int) -> int:
        return rows_alike(self.method.is_dense_at, self.store.n + 1, n)

    def held_bytes(self, n: int) -> int:
        rows = super().held_bytes(n)
        if self.method.is_dense_at(n):
            return rows
        more = self.store.split_width - padded(self.spec.head_dim)
        return rows + 2 * self.spec.n_head_kv * n * more

    def memory(self) -> Memory:
        """Returns the bytes of Kdom, Krest and V: with variant m, Kdom counts as device memory.

        Krest and V then count as host memory, although on a CPU all is host memory. If K is whole,
        all rows count as device memory. bytes_moved counts Krest and V of the rows that a step
        attends to, once a kv head. device/methods/fasa.py keeps some of these rows on the device.
        """
        store = self.store
        if self.method.variant == "c":
            return Memory(host=store.nbytes)
        device = store.nbytes if store.dom is None else store.dom.nbytes
        return Memory(host=store.nbytes - device, device=device)
