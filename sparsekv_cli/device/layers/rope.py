"""The RoPE tables of a model's layers on a device."""

import torch

from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.identity import rope_tables
from sparsekv_cli.models.rope import RopeTable, RopeTables
from sparsekv_cli.models.weights import Weights


class DeviceRope:
    """A RopeTable on a device: cos, sin f32 (positions, n_rot / 2), q_scale f32 (positions,)."""

    def __init__(self, table: RopeTable, device: torch.device) -> None:
        self._table, self._device = table, device
        self.theta, self.magnitude = table.theta, table.magnitude
        self.cos = self.sin = self.q_scale = torch.empty(0, device=device)

    def reserve(self, n_positions: int) -> None:
        """Makes rows 0..n_positions valid. If the tensors grow, they are new ones."""
        self._table.reserve(n_positions)
        if len(self.cos) < len(self._table.cos):
            self.cos = torch.from_numpy(self._table.cos).to(self._device)
            self.sin = torch.from_numpy(self._table.sin).to(self._device)
            self.q_scale = torch.from_numpy(self._table.q_scale).to(self._device)


def tables_on(device: torch.device, hparams: HParams, weights: Weights) -> RopeTables:
    """Returns the tables of a model's layers on the device."""
    tables = rope_tables(hparams, weights.rope_freqs)
    full = DeviceRope(tables.full, device)
    is_one = tables.window is tables.full
    return RopeTables(full, full if is_one else DeviceRope(tables.window, device))
