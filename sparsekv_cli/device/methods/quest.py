"""Quest on a device (methods/quest.py): whole pages, chosen by summaries of their keys."""

from collections.abc import Sequence
from typing import Any

import torch

from sparsekv_cli.cache.spec import N_SINKS, LayerSpec, Memory
from sparsekv_cli.device.cache import CachePlan, DeviceInput, DeviceSelecting
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.quest import pages
from sparsekv_cli.kernels.quest.step import PageRules, step_rows


class DeviceQuest(DeviceSelecting):
    """K, V and the summaries of one layer's whole pages. method: methods/quest.py Quest."""

    takes_drafts = True
    takes_softcap = False

    def __init__(self, spec: LayerSpec, device: torch.device, method: Any) -> None:
        super().__init__(spec, device, method)
        self._n_page = 0  # whole pages that have their summaries
        self._hi, self._lo = (self._summaries(0) for _ in range(2))

    def _summaries(self, n_page: int) -> torch.Tensor:
        shape = (1, self.spec.n_head_kv, n_page, self.spec.head_dim)
        return torch.zeros(shape, dtype=torch.float16, device=self.store.k.device)

    def finish_prefill(self) -> None:
        if not self.is_dense_at(self.store.n + 1):
            self._summarise(self.store.n)

    def _summarise(self, n: int) -> None:
        """Summarises the whole pages before row n, the next one, that have no summary yet."""
        page = self.method.page
        n_page = n // page
        if n_page > self._hi.shape[2]:
            self._grow(max(n_page, self.store.capacity // page))
        if n_page > self._n_page:
            pages.page_summaries(
                self.store.k, self._hi, self._lo, page, self._meanstd, self._n_page, n_page, N_SINKS
            )
            self._n_page = n_page

    def _grow(self, n_page: int) -> None:
        """Makes room for the summaries of ``n_page`` pages, up to a number that kernels know."""
        n_page, grown = -(-n_page // 16) * 16, []
        for old in (self._hi, self._lo):
            new = self._summaries(n_page)
            new[:, :, : self._n_page] = old[:, :, : self._n_page]
            grown.append(new)
        self._hi, self._lo = grown

    @property
    def _meanstd(self) -> bool:
        return self.method.summary == "meanstd"

    def is_dense_at(self, n: int) -> bool:
        return self.budget_rows(n) + N_SINKS >= n

    def plan_selection(self, n: int, n_max: int) -> CachePlan:
        page = self.method.page
        self._summarise(n - 1)  # pages of prompts and of dense steps
        if n_max // page > self._hi.shape[2]:
            self._grow(n_max // page)
        self._k_max = max(1, self.budget_rows(n_max) // page)
        return CachePlan(self._k_max, n_max)

    def most_rows(self, n: int) -> int:
        """See StepContract. The row that completes a page is the last of its step."""
        page = self.method.page
        return super().most_rows(min(n, page - self.n % page))

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self._hi, self._lo]

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        super().replace_tensors(tensors[:2])
        self._hi, self._lo = tensors[2:]

    def select(
        self, x: DeviceInput, k: torch.Tensor, v: torch.Tensor, *index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hi, lo = index
        rules = PageRules(self.method.page, self._meanstd, N_SINKS, float(self.spec.scale))
        return step_rows(
            x.q, NewRow(x.k, x.v), k, v, hi, lo, x.step.arrived, x.step.n, x.step.budget,
            self._k_max, rules,
        )  # fmt: skip

    def end_step(self, n: int) -> None:
        super().end_step(n)
        if not self._dense:  # the step has summarised the page that it completed
            self._n_page = n // self.method.page

    def count(self, n: int) -> tuple[int, int, int]:
        spec, page = self.spec, self.method.page
        n_page = (n - 1) // page
        current = n - n_page * page
        n_best = min(n_page, (self.budget_rows(n) - 1) // page)
        # Sinks count once: a chosen first page holds them, and only the device knows if it was.
        attended = N_SINKS + n_best * page + current
        n_bytes = spec.n_head_kv * (attended * self.store.row_bytes + n_page * 4 * spec.head_dim)
        return 2 * spec.n_head * n_page, spec.n_head * attended, n_bytes

    def save_own(self) -> Any:
        return (self._n_page,)

    def take_back_own(self, own: Any) -> None:
        (self._n_page,) = own

    def truncate(self, n: int) -> int:
        self._n_page = min(self._n_page, n // self.method.page)
        return super().truncate(n)

    def memory(self) -> Memory:
        return Memory(device=self.store.nbytes, index=self._hi.nbytes + self._lo.nbytes)
