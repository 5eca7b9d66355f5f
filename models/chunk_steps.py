"""The fused steps of a prefilled chunk between its matrix products (cpu/layer/prefill.py).

``ChunkSteps`` is the interface that a forward pass uses. device/prefill.py implements it with
tensors.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sparsekv_cli.cache.spec import AttnInput
from sparsekv_cli.cpu.jit.pointers import on_lines
from sparsekv_cli.cpu.layer import prefill as kernels
from sparsekv_cli.cpu.layer.activation import ACTIVATIONS
from sparsekv_cli.cpu.layer.rows import HeadWeights
from sparsekv_cli.models.architectures import Architecture
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.layers.layer_params import LayerParams
from sparsekv_cli.models.rope import RopeTables
from sparsekv_cli.models.weights import AttentionWeights

NONE = np.empty(0, np.float32)


class ChunkSteps(Protocol):
    """The steps between the products, on T rows of a chunk: arrays, or tensors on a device.

    x f32 (T, n_embd) is the residual stream. Products take and return rows of the compute type.
    """

    def stream(self, x: np.ndarray) -> Any:
        """Returns embeddings f32 (T, n_embd) as the residual stream, in the same memory."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Returns residual streams joined in new memory."""

    def norm(self, x: Any, weight: np.ndarray | None) -> Any:
        """Returns the RMS norm of x in the compute type, or x itself without a weight."""

    def last_norm(self, x: Any, weight: np.ndarray) -> Any:
        """Returns the RMS norm of x in f32, for the output head."""

    def rounded(self, x: Any) -> Any:
        """Returns x in the compute type."""

    def heads(self, raw: Any, layer: AttentionWeights, sizes: LayerParams, pos: Any) -> AttnInput:
        """Makes q, k and v of projections raw (T, H d + G d + G d_v): bias, norm, rotation, scale.

        With an output gate q has H 2 d elements. A layer may lack k and v. pos: position of the
        first row, or on the CPU int64 (T,) of each row.
        """

    def gate_heads(self, attended: Any, raw: Any, sizes: LayerParams) -> Any:
        """Returns attended (T, H d) times the sigmoid of the gates in ``raw`` (see ``heads``)."""

    def gate(self, gate_up: Any) -> Any:
        """Returns act(gate) * up of gate_up (T, 2 n_ff): gate, then up; act(gate) without an up."""

    def add(self, x: Any, y: Any, norm: Any = None, bias: Any = None) -> None:
        """Adds s y to x, s the model's residual_scale. y first gets its bias and norm, if any."""


class FusedChunkSteps:
    """Each step is one pass over f32 arrays; each result is rounded once."""

    def __init__(
        self, hparams: HParams, ropes: RopeTables, architecture: Architecture, n_threads: int
    ) -> None:
        self._ropes, self._n_threads = ropes, n_threads
        self._interleaved = architecture.rope_interleaved
        self._activation = ACTIVATIONS[architecture.activation]
        self._n_parts = len(architecture.gate_up)
        self._eps = np.float32(hparams.norm_eps)
        self._scale = np.float32(hparams.residual_scale)

    def new(self, *shape: int) -> Any:
        """Returns uninitialised rows of the compute type."""
        return np.empty(shape, np.float32)

    def stream(self, x: np.ndarray) -> np.ndarray:
        return x

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def norm(self, x: np.ndarray, weight: np.ndarray | None) -> Any:
        out = self.new(*x.shape)
        kernels.norm_rows(x, given(weight), self._eps, out, self._n_threads)
        return out

    def last_norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        out = np.empty_like(x)
        kernels.norm_rows(x, weight, self._eps, out, self._n_threads)
        return out

    def rounded(self, x: np.ndarray) -> Any:
        return self.norm(x, None)

    def heads(self, raw: Any, layer: AttentionWeights, sizes: LayerParams, pos: Any) -> AttnInput:
        n_head, n_rows = sizes.n_head, len(raw)
        at = pos if isinstance(pos, np.ndarray) else slice(pos, pos + n_rows)
        n_kv = sizes.n_head_kv if layer.kv else 0
        q, k, v = (n_head, sizes.head_dim), (n_kv, sizes.head_dim), (n_kv, sizes.value_dim)
        half = sizes.n_rot // 2
        outs = tuple(self.new(n, n_rows, d) for n, d in (q, k, v, q, k))
        rope, norms = self._ropes.of(sizes.kind), (layer.q_norm, layer.k_norm, layer.v_norm)
        weights = HeadWeights(*map(given, (*layer.biases, *norms)))
        form = self._interleaved, sizes.output_gate, sizes.head_dim, sizes.value_dim
        kernels.split_heads(
            raw, weights, self._eps, rope.cos[at, :half], rope.sin[at, :half], rope.q_scale[at],
            form, outs, self._n_threads,
        )  # fmt: skip
        return AttnInput._make((*outs, pos))

    def gate_heads(self, attended: Any, raw: Any, sizes: LayerParams) -> Any:
        out = self.new(*attended.shape)
        kernels.gate_heads(attended, raw, sizes.value_dim, out, self._n_threads)
        return out

    def gate(self, gate_up: Any) -> Any:
        out = self.new(len(gate_up), gate_up.shape[1] // self._n_parts)
        kernels.gate_rows(gate_up, self._activation, out, self._n_threads)
        return out

    def add(
        self, x: np.ndarray, y: Any, norm: np.ndarray | None = None, bias: np.ndarray | None = None
    ) -> None:
        kernels.add_rows(x, y, given(bias), given(norm), self._eps, self._scale, self._n_threads)


class FusedBF16ChunkSteps(FusedChunkSteps):
    """FusedChunkSteps in bf16."""

    def new(self, *shape: int) -> Any:
        return on_lines(shape, np.uint16)


def given(array: np.ndarray | None) -> np.ndarray:
    """Returns a weight, or for None the empty array, which tells a kernel that there is none."""
    return NONE if array is None else array
