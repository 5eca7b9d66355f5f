"""Rows of a short prefill, laid end to end: a cache of any depth is there in seconds."""

from collections.abc import Sequence as Ids
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.model import Model
from sparsekv_cli.models.rope import rotate_heads
from sparsekv_cli.sequence import Attention, Sequence

Recorded = Ids[Ids[np.ndarray]]  # q and k before rotation, and v, of each layer


class Recorder(LayerCache):
    """A dense layer that keeps what it is shown: q and k before rotation, and v."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.chunks: list[tuple[np.ndarray, ...]] = []

    def extend(self, x: AttnInput) -> Any:
        self.chunks.append((x.q_nope, x.k_nope, x.v))
        return super().extend(x)

    def decode(self, x: AttnInput) -> np.ndarray:
        raise NotImplementedError

    def recorded(self) -> list[np.ndarray]:
        """q_nope, k_nope, v of all rows, (heads, T, d)."""
        return [np.concatenate(parts, axis=1) for parts in zip(*self.chunks, strict=True)]


def record(model: Model, ids: Ids[int]) -> Recorded:
    """Returns the rows of ``ids`` in each layer. SparseKVError: not all layers are full ones."""
    if model.hparams.other_layers:
        raise SparseKVError(f"rows laid end to end: the model has {model.hparams.other_layers}")
    caches = [Recorder(spec) for spec in model.decoder.layer_specs()]
    model.decoder.forward(ids, 0, caches)
    return [cache.recorded() for cache in caches]


def sequence_at(
    model: Model, method: Method, recorded: Recorded, depth: int, n_steps: int = 255
) -> Sequence:
    """A sequence of the method, after ``depth`` rows, with room for steps."""
    model.decoder.rope.reserve(depth + 1)
    sequence = model.sequence(Attention(method, model.prepare(method), 0))
    for cache, parts in zip(sequence.caches, recorded, strict=True):
        cache.reserve(depth + n_steps)
        table, n_rows = model.decoder.rope.of(cache.spec.kind), parts[0].shape[1]
        for first in range(0, depth, n_rows):  # a copy of all rows at a time
            stop = min(depth, first + n_rows)
            q, k, v = (part[:, : stop - first] for part in parts)
            at = table.cos[first:stop], table.sin[first:stop]
            turned = [rotate_heads(part, *at) for part in (q, k)]
            cache.extend(AttnInput(*turned, v, q, k, first))
        cache.finish_prefill()
    sequence.tokens = [0] * depth
    return sequence
