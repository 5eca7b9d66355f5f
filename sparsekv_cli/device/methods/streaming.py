"""StreamingLLM on a device (methods/streaming.py): sinks and the most recent rows."""

from typing import Any

import torch

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.device.cache import CachePlan, DeviceInput, DeviceSelecting
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.kernels.attention.recent import recent_rows
from sparsekv_cli.kernels.attention.rows import NewRow


class DeviceStreaming(DeviceSelecting):
    """K and V of one layer. method: methods/streaming.py Streaming."""

    takes_drafts = True

    def __init__(self, spec: LayerSpec, device: torch.device, method: Any) -> None:
        super().__init__(spec, device, method)
        if method.reposition:
            raise SparseKVError(
                "streaming: reposition=true turns keys on the host; use --kv host or --device cpu"
            )

    def is_dense_at(self, n: int) -> bool:
        return self.budget_rows(n) + self.method.sinks >= n

    def rows_of_padding(self) -> int:
        return 1 if self._dense else self.method.sinks + 1

    def plan_selection(self, n: int, n_max: int) -> CachePlan:
        self._budget_max = self.budget_rows(n_max)
        return CachePlan(self._budget_max, n_max)

    def select(
        self, x: DeviceInput, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n, budget, new = x.step.n, x.step.budget, NewRow(x.k, x.v)
        return recent_rows(n, budget, self._budget_max, self.method.sinks, new, k, v)

    def count(self, n: int) -> tuple[int, int, int]:
        rows = self.method.sinks + self.budget_rows(n)
        n_bytes = self.spec.n_head_kv * rows * self.store.row_bytes
        return 0, self.spec.n_head * rows, n_bytes
