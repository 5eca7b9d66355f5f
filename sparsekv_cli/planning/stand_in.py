"""A stand-in for a model: its shapes, but zeros for its weights.

A decode step takes the same time with any weights. So the header of a file is enough to measure a
step. A few layers of a large model stand for all.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.models.architectures import Architecture, architecture_of
from sparsekv_cli.models.gguf.file import GGMLType, GGUFFile, TensorInfo
from sparsekv_cli.models.gguf.keys import read_architecture
from sparsekv_cli.models.hparams import HParams, read_hparams
from sparsekv_cli.models.weights import Weights, read_weights

SMALL = 1 << 20  # bytes; larger tensors are zeros
# a step reads one row of this table, so its zeros need no memory
TABLE = "per_layer_token_embd.weight"
OF_TOKENS = (TABLE, "token_embd.weight", "output.weight")  # tensors with a row for each token
NEGATIVE = "ssm_a"  # end of the names of tensors whose values must be negative


class StandInFile:
    """Replaces a GGUFFile: it has the tensors of the first layers, with made-up data.

    n_layer: number of first layers. has_room: whether large tensors have memory; if not, only their
    shapes are right. n_vocab: tokens of the vocabulary; None: all.
    """

    def __init__(
        self, file: GGUFFile, n_layer: int, n_vocab: int | None, *, has_room: bool
    ) -> None:
        self.path, self.metadata, self.value_types = file.path, file.metadata, file.value_types
        self.parts = file.parts
        self.check_types = file.check_types
        self._has_room = has_room
        self.tensors: Mapping[str, TensorInfo] = {
            name: _first_rows(info, n_vocab) if name in OF_TOKENS else info
            for name, info in file.tensors.items()
            if _layer_of(name) < n_layer
        }

    def data(self, tensor: str | TensorInfo) -> np.ndarray:
        """Returns uint8 (rows, bytes a row): ones for small tensors of f32, else zeros."""
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        row = info.type.row_bytes(info.shape[-1])
        shape = info.n_bytes // row, row
        if info.type == GGMLType.F32 and info.n_bytes <= SMALL:
            value = np.float32(-1 if info.name.endswith(NEGATIVE) else 1)
            return np.full(info.n_elements, value).view(np.uint8).reshape(shape)
        if self._has_room and info.name != TABLE:
            data = np.empty(shape, np.uint8)
            data.fill(0)  # writes each page, so that it has memory of its own
            return data
        if info.n_bytes <= SMALL or self._has_room:
            return np.zeros(shape, np.uint8)
        return np.broadcast_to(np.uint8(0), shape)

    def release(self, data: np.ndarray) -> None:
        """Does nothing: there is no file to read it from again."""

    def check_intact(self) -> None:
        """Does nothing: no file can become shorter."""


class StandIn(NamedTuple):
    """The parts from which a decoder is made."""

    hparams: HParams
    architecture: Architecture
    weights: Weights


def _layer_of(name: str) -> int:
    """Returns the number of a tensor's layer; -1 if it belongs to no layer."""
    prefix, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if prefix == "blk" and number.isdecimal() else -1


def _first_rows(info: TensorInfo, n: int | None) -> TensorInfo:
    if n is None or n >= info.shape[0]:
        return info
    return replace(info, shape=(n, *info.shape[1:]), n_bytes=info.n_bytes // info.shape[0] * n)


def read_stand_in(
    file: GGUFFile, n_layer: int | None = None, n_vocab: int | None = None
) -> StandIn:
    """Returns the model with its first ``n_layer`` layers, and all layers of the last one's block.

    n_layer: None: all layers, and large weights have no memory. n_vocab: most tokens of its
    vocabulary; None: all. Raises SparseKVError for a model that this program cannot run.
    """
    architecture = architecture_of(read_architecture(file))
    hparams = read_hparams(file)
    if n_layer is not None:
        n_layer += sum(layer.shares_input for layer in hparams.layers[n_layer : n_layer + 1])
        hparams = replace(hparams, layers=hparams.layers[:n_layer], n_skipped=0)
    if n_vocab is not None:
        hparams = replace(hparams, n_vocab=min(n_vocab, hparams.n_vocab))
    has_room = n_layer is not None
    n_tensors = hparams.n_block + hparams.n_skipped
    standing: Any = StandInFile(file, n_tensors, n_vocab, has_room=has_room)
    return StandIn(hparams, architecture, read_weights(standing, hparams, architecture))
