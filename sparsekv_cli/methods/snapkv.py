"""SnapKV: "LLM Knows What You are Looking for Before Generation" (Li et al., arXiv:2404.14469).

After a prompt each kv head keeps the rows to which the prompt's last queries attended most. It
drops the others for good. Decode steps store and read only the kept rows.

| paper | here |
|---|---|
| section 4, attention of the observation window, summed | cpu/eviction/scores.py add_attention |
| section 4, pooling, so that neighbours are kept together | cpu/eviction/scores.py max_pool |
| section 4, top-k of the prefix, and the window itself | finish_prefill |

Departures; docs/methods.md has their reasons:
(1) The query heads of a kv head share one choice, by the sum of their scores.
(2) The budget counts rows of the prefix. Window, sinks and generated rows are kept in addition to
    it.
(3) A later prefill, a turn of a chat, attends to the rows that are left and to its own. Then it
    chooses again among all held rows, generated ones too. Neighbours are neighbours in the cache.
(4) A sequence can go back to lengths after its last choice. For shorter lengths, its text must be
    computed again.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.layer import EvictingCache, LayerCache, by_kv_head
from sparsekv_cli.cache.queries import LastQueries
from sparsekv_cli.cache.spec import DEFAULT_BUDGET, N_SINKS, AttnInput, Budget, LayerSpec, Memory
from sparsekv_cli.cpu.attention.select import select_rows
from sparsekv_cli.cpu.eviction import scores as evict
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import option

N_ROOM = 256  # rows that decode steps can add before the store grows


@dataclass(frozen=True)
class SnapKV(Method):
    """Options of SnapKV."""

    paper: ClassVar[str] = "arXiv:2404.14469"
    description: ClassVar[str] = "keeps what the end of the prompt attends to, drops others"
    use: ClassVar[str] = "one question at the end of a prompt; later questions miss dropped rows"
    holds_all_rows: ClassVar[bool] = False

    budget: Budget = option(DEFAULT_BUDGET, "rows of the prompt kept next to the window: N or P%")
    window: int = option(32, "last rows of a prompt: they choose, and are kept", at_least=1)
    kernel: int = option(7, "width of the max-pooling of scores, odd", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel = {self.kernel}: must be an odd number")

    @property
    def n_queried(self) -> int:
        return self.window

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return SnapKVCache(spec, self)


class SnapKVCache(EvictingCache):
    """The rows of one layer: those chosen last, ascending, and all rows that came later."""

    def __init__(self, spec: LayerSpec, method: SnapKV) -> None:
        super().__init__(spec)
        self.method = method
        self._queries = LastQueries(method.window)
        self.queries_read = method.window
        self._kept = np.empty((spec.n_head_kv, 0), np.int32)  # positions of the chosen rows

    def positions(self) -> np.ndarray:
        since = np.arange(self._n_settled, self.n, dtype=np.int32)
        return np.hstack([self._kept, np.tile(since, (self.spec.n_head_kv, 1))])

    def most_held(self, n: int) -> int:
        return N_SINKS + self.method.budget.rows(n) + self.method.window + N_ROOM

    def extend(self, x: AttnInput) -> Any:
        self._queries.add(x.q)
        return super().extend(x)

    def finish_prefill(self) -> None:
        store, spec, method = self.store, self.spec, self.method
        queries, n = store.k_type.rotated(by_kv_head(self._queries.take(), spec)), store.n
        n_kept = N_SINKS + method.budget.rows(self.n) + method.window
        if n_kept >= n:
            return
        received = np.zeros((spec.n_head_kv, n), np.float32)
        evict.add_attention(
            queries, store.layout, n, spec.group, spec.scale, spec.softcap, spec.sinks, received,
            spec.n_threads,
        )  # fmt: skip
        scores = np.full((spec.n_head_kv, n), np.inf, np.float32)
        evict.max_pool(received, n - method.window, method.kernel, scores)
        scores[:, :N_SINKS] = np.inf
        slots = np.empty((spec.n_head_kv, n_kept), np.int32)
        select_rows(scores, n, 0, 0, n_kept, slots)
        kept = np.take_along_axis(self.positions(), slots, 1)
        self.keep_slots(slots, N_ROOM)
        self._kept = kept

    def decode(self, x: AttnInput) -> np.ndarray:
        return self.attend_held(x, chooses=False)

    def truncate(self, n: int) -> int:
        self._queries.clear()
        return super().truncate(n)

    def memory(self) -> Memory:
        return Memory(host=self.store.nbytes, index=self._kept.nbytes)
