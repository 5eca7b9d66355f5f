"""StreamingLLM on a device (methods/streaming.py): sinks and the most recent rows."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from sparsekv_cli.cache import LayerSpec
from sparsekv_cli.device.cache import DeviceInput, DeviceSelecting
from sparsekv_cli.errors import SparseKVError


class DeviceStreaming(DeviceSelecting):
    """K and V of one layer. method: methods/streaming.py Streaming."""

    def __init__(self, spec: LayerSpec, ops: Any, method: Any) -> None:
        super().__init__(spec, ops)
        if method.reposition:
            raise SparseKVError(
                "streaming: reposition=true turns keys on the host; use --kv host or --device cpu"
            )
        self.method = method
        self._places = torch.empty(0, dtype=torch.int32, device=ops.device)

    def budget_rows(self, n: int) -> int:
        return self.method.budget.rows(n)

    def selects_all(self, n: int) -> bool:
        return self.budget_rows(n) + self.method.sinks >= n

    def plan_selection(self, n: int, n_max: int) -> Hashable:
        width = self.method.sinks + self.budget_rows(n_max)
        if width != len(self._places):
            self._places = torch.arange(width, dtype=torch.int32, device=self._places.device)
        return self._places.data_ptr(), width

    def select(self, x: DeviceInput) -> tuple[torch.Tensor, torch.Tensor]:
        sinks, step, n_kv = self.method.sinks, x.step, self.spec.n_head_kv
        # The i-th row attended to: a sink, or one of the last ``budget``.
        rows = torch.where(
            self._places < sinks, self._places, self._places - sinks + step.n - step.budget
        )
        counts = (sinks + step.budget).int().expand(1, n_kv).contiguous()
        return rows.int().expand(1, n_kv, -1), counts

    def count(self, n: int) -> tuple[int, int, int]:
        rows = self.method.sinks + self.budget_rows(n)
        n_bytes = self.spec.n_head_kv * rows * self.store.row_bytes
        return 0, self.spec.n_head * rows, n_bytes
