"""Dense attention on a device: the method full, and the dense layers of every other method."""

from typing import Any

import torch

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.device.cache import DeviceCache, DeviceInput, attend_all, count_dense


class DeviceDense(DeviceCache):
    """The cache of a layer that attends to every row."""

    attends_to_some = False
    can_prefill_in_parts = True
    takes_drafts = True

    def __init__(self, spec: LayerSpec, device: torch.device, _method: Any = None) -> None:
        super().__init__(spec, device)

    def decode(self, x: DeviceInput, out: torch.Tensor | None = None) -> torch.Tensor:
        k, v = self.batch_tensors(len(x.q))
        return attend_all(x, k, v, self._n_max, self.softmax, out)

    def end_step(self, n: int) -> None:
        self.store.n = n
        count_dense(self, n, sparse=False)
