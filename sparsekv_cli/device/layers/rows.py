"""The steps between matrix products on tensors, for the rows of a prefill and of a decode step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cache.spec import AttnInput
from sparsekv_cli.kernels.layer import rows as kernels
from sparsekv_cli.kernels.layer.rows import Added, HeadVectors, Rotation
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.layers.layer_params import LayerParams
from sparsekv_cli.models.rope import RopeTables
from sparsekv_cli.models.weights import AttentionWeights


class DeviceRows:
    """``ChunkSteps`` of models/chunk_steps.py on tensors, for T rows.

    A decode step has T = B rows, in f32. ``split`` and ``norm`` also do its steps. Weights and the
    tables of ``ropes`` are tensors of the device.
    """

    def __init__(
        self, hparams: HParams, ropes: RopeTables, architecture: Architecture, dtype: torch.dtype
    ) -> None:
        self._ropes, self._architecture, self._dtype = ropes, architecture, dtype
        self._eps, self._scale = hparams.norm_eps, hparams.residual_scale

    def stream(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))

    def norm(self, x: torch.Tensor, weight: Any, added: Added | None = None) -> torch.Tensor:
        """See ``ChunkSteps``. added: what first becomes part of x."""
        out = torch.empty(x.shape, dtype=self._dtype, device=x.device)
        return kernels.rms_norm(x, weight, self._eps, added, out)

    def last_norm(self, x: torch.Tensor, weight: Any, added: Added | None = None) -> torch.Tensor:
        return kernels.rms_norm(x, weight, self._eps, added)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype)

    def heads(
        self, raw: torch.Tensor, layer: AttentionWeights, sizes: LayerParams, pos: int
    ) -> AttnInput:
        n_rows, device = len(raw), raw.device
        shape = sizes.n_head, sizes.n_head_kv if layer.kv else 0, sizes.head_dim, sizes.value_dim
        out = kernels.empty_heads(n_rows, shape, device, self._dtype, heads_first=True)
        rows = torch.arange(pos, pos + n_rows, dtype=torch.int32, device=device)
        self.split(raw, layer, sizes, rows, out, heads_first=True)
        return AttnInput(*out, pos)

    def split(
        self,
        raw: torch.Tensor,
        layer: AttentionWeights,
        sizes: LayerParams,
        pos: torch.Tensor,
        out: Sequence[torch.Tensor],
        *,
        heads_first: bool = False,
    ) -> None:
        """Does ``heads`` with positions int32 (T,), and writes to ``out``, as ``split_heads``."""
        rope: Any = self._ropes.of(sizes.kind)
        biases: Any = layer.biases
        norms: Any = layer.q_norm, layer.k_norm, layer.v_norm if layer.kv else None
        interleaved = self._architecture.rope_interleaved
        kernels.split_heads(
            raw, out, Rotation(pos, rope.cos, rope.sin, rope.q_scale, sizes.n_rot, interleaved),
            HeadVectors(*biases, *norms), self._eps, heads_first=heads_first,
            gated=sizes.output_gate,
        )  # fmt: skip

    def gate_heads(
        self, attended: torch.Tensor, raw: torch.Tensor, sizes: LayerParams
    ) -> torch.Tensor:
        n_head, d = sizes.n_head, sizes.head_dim
        gates = raw[:, : 2 * n_head * d].unflatten(1, (n_head, 2, d))[:, :, 1].flatten(1)
        return (attended.float() * gates.float().sigmoid()).to(self._dtype)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.gate_rows(gate_up, self._architecture.activation)

    def add(self, x: torch.Tensor, y: torch.Tensor, norm: Any = None, bias: Any = None) -> None:
        kernels.add_rows(x, self._eps, self.added(y, norm, bias))

    def join_normed(self, x: torch.Tensor, x_norm: Any, y: Any, y_norm: Any) -> None:
        """Makes x norm(x) + norm(y), in place; x f32 (T, n)."""
        kernels.rms_norm(x, x_norm, self._eps, out=x)
        kernels.add_rows(x, self._eps, Added(y, norm=y_norm))

    def added(self, y: torch.Tensor, norm: Any, bias: Any = None, factor: float = 1.0) -> Added:
        """Returns the output y of a block as ``norm`` and ``add`` take it."""
        return Added(y, self._scale, bias, norm, factor)
