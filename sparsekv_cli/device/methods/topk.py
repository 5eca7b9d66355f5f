"""Exact top-k on a device (methods/topk.py): every key is scored, the best are attended to."""

import torch

from sparsekv_cli.cache.layer import rows_alike
from sparsekv_cli.cache.spec import N_SINKS
from sparsekv_cli.device.cache import CachePlan, DeviceInput, DeviceSelecting
from sparsekv_cli.kernels.attention import select
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.attention.scores import score_rows


class DeviceTopK(DeviceSelecting):
    """K and V of one layer. method: methods/topk.py TopK."""

    takes_drafts = True

    def most_rows(self, n: int) -> int:
        first = self._recent_of(self.n + 1)  # the launches of a step have one such number
        return super().most_rows(rows_alike(lambda n: self._recent_of(n) == first, self.n + 1, n))

    def is_dense_at(self, n: int) -> bool:
        return self.budget_rows(n) + N_SINKS >= n

    def plan_selection(self, n: int, n_max: int) -> CachePlan:
        self._recent = self._recent_of(n)
        self._k_max = self.budget_rows(n_max)
        until = n_max if self._recent == self._recent_of(n_max) else n
        return CachePlan((self._recent, self._k_max), until)

    def _recent_of(self, n: int) -> int:
        return min(self.method.recent, max(1, self.budget_rows(n) // 2))

    def select(
        self, x: DeviceInput, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n, n_max = x.step.n, self._n_max
        new, scale = NewRow(x.k, x.v), float(self.spec.scale)
        tops = select.empty_tops(len(x.q), self.spec.n_head, n_max, self._k_max, self.device)
        scores = score_rows(x.q, k, n, n_max, scale, new=new, v=v, tops=tops)
        return select.select_largest(
            scores, n, n_max, x.step.budget, self._k_max, N_SINKS, self._recent, tops=tops
        )

    def count(self, n: int) -> tuple[int, int, int]:
        spec, store = self.spec, self.store
        attended = spec.n_head * (N_SINKS + self.budget_rows(n))
        scan = spec.n_head_kv * n * store.k_bytes
        return spec.n_head * n, attended, scan + attended * store.row_bytes
