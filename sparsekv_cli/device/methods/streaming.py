"""StreamingLLM on a device (methods/streaming.py): sinks and the most recent rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.device.cache import DeviceInput, DeviceSelecting
from sparsekv_cli.errors import SparseKVError


class DeviceStreaming(DeviceSelecting):
    """K and V of one layer. method: methods/streaming.py Streaming."""

    def __init__(self, spec: LayerSpec, device: torch.device, method: Any) -> None:
        super().__init__(spec, device)
        if method.reposition:
            raise SparseKVError(
                "streaming: reposition=true turns keys on the host; use --kv host or --device cpu"
            )
        self.method = method

    def budget_rows(self, n: int) -> int:
        return self.method.budget.rows(n)

    def selects_all(self, n: int) -> bool:
        return self.budget_rows(n) + self.method.sinks >= n

    def plan_selection(self, n: int, n_max: int) -> Hashable:
        self._width = self.method.sinks + self.budget_rows(n_max)
        return self._width

    def select(
        self, x: DeviceInput, k: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sinks, n_kv = self.method.sinks, self.spec.n_head_kv
        n, budget = x.step.n[:, None], x.step.budget[:, None]  # (B, 1)
        places = torch.arange(self._width, dtype=torch.int32, device=k.device)
        # The i-th row attended to: a sink, or one of the last ``budget``.
        rows = torch.where(places < sinks, places, places - sinks + n - budget)  # (B, width)
        counts = (sinks + budget).expand(-1, n_kv).contiguous()
        return rows[:, None].expand(-1, n_kv, -1), counts

    def count(self, n: int) -> tuple[int, int, int]:
        rows = self.method.sinks + self.budget_rows(n)
        n_bytes = self.spec.n_head_kv * rows * self.store.row_bytes
        return 0, self.spec.n_head * rows, n_bytes
