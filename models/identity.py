"""The identity of rows: all that K and V depend on, except the tokens up to their own.

One question is asked of it: may rows that were made there serve here? The disk, session files,
shared memory and changes of the method ask it. Calibrations ask it of the model alone.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sparsekv_cli import __version__
from sparsekv_cli.models.gguf.content import DIGITS, ModelContent
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.hparams import HParams
from sparsekv_cli.models.rope import RopeTable, RopeTables
from sparsekv_cli.models.weights import WeightsReader
from sparsekv_cli.settings.changes import NOT_IN_ROWS, TOKENIZER

DENSE: tuple[int, ...] = ()
PAIRING = "half-split"  # RoPE pairs (i, i + n_rot/2), as the decoder gives q and k to the methods


def _hash(facts: Any) -> str:
    text = json.dumps(facts, sort_keys=True).encode()
    return hashlib.sha256(text).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class ModelIdentity:
    """The values on which q, k and v depend before they are rounded.

    rope: of the full and of the window layers, the angles' bytes in hex and the magnitude. Then the
    temperature of the queries, and the tokens at which it begins. changes: of the metadata.
    """

    content: ModelContent
    rope: tuple[Any, ...]
    changes: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def model_hash(self) -> str:
        """The hash of the file, after a wait. Raises SparseKVError for a changed file."""
        return self.content.wait()

    def digest(self) -> str:
        """Returns the name of its calibrations, 32 hex digits. Raises as ``model_hash`` does."""
        return _hash([self.model_hash, self.rope, self.changes, PAIRING])


def identify(file: GGUFFile, hparams: HParams, ropes: RopeTables) -> ModelIdentity:
    """Returns the identity of an open model. ropes: its tables, of arrays or of tensors."""
    tables = [(each.theta.tobytes().hex(), float(each.magnitude)) for each in ropes.both]
    temperature = hparams.temperature_scale
    begins = hparams.rope.n_ctx_original if temperature else 0
    changes = tuple(
        (key, value)
        for key, value in sorted(file.changed_values().items())
        if not key.startswith(TOKENIZER) and not key.partition(".")[2].startswith(NOT_IN_ROWS)
    )
    return ModelIdentity(file.content, (*tables, temperature, begins), changes)


def rope_tables(hparams: HParams, factors: np.ndarray | None) -> RopeTables:
    """Returns the RoPE tables of a model's full layers and of its window layers.

    factors f32: the angles of full layers are divided by them; None: they are not.
    """
    temperature = hparams.temperature_scale
    full = window = RopeTable(hparams.n_rot, hparams.rope, factors, temperature)
    if hparams.window_rope is not None:
        window = RopeTable(hparams.window_n_rot, hparams.window_rope, None, temperature)
    return RopeTables(full, window)


def identity_in(file: GGUFFile, hparams: HParams, n_ctx: int = 0) -> ModelIdentity:
    """Returns the identity of a model that is not loaded. n_ctx: its context; 0: the model's."""
    factors = WeightsReader(file).rope_freqs(hparams, n_ctx or hparams.n_ctx_train)
    return identify(file, hparams, rope_tables(hparams, factors))


@dataclass(frozen=True)
class RowsIdentity:
    """All that rows depend on, except their tokens.

    types: of K and of V. products: types of the prefill's products, and bytes of the inputs of few
    rows. attention: the type of the rows that the prefill attends with. reading: DENSE, or of a
    sparse prefill the budget, the chunk and the number of dense layers. gpu: what made the rows, if
    not the CPU: the GPU's name, the version of torch, the form of the weights and the chunk.
    """

    model: ModelIdentity
    types: tuple[str, ...]
    products: tuple[str, ...]
    attention: str
    reading: tuple[int, ...] = DENSE
    program: str = __version__
    gpu: tuple[Any, ...] = ()

    @property
    def grid(self) -> int:
        """Rows of a chunk, if a row's bits depend on the chunk that it was read in; 0: they do not.

        A sparse prefill chooses rows for each chunk. A GPU's libraries choose kernels by the
        chunk's size. Rows are kept and found at multiples of the grid only.
        """
        if self.reading:
            return self.reading[1]
        return int(self.gpu[-1]) if self.gpu else 0

    def serves(self, asked: "RowsIdentity") -> bool:
        """Returns whether rows that were made so may serve where those of ``asked`` are needed.

        Rows that were read densely may serve a sparse request, never the reverse.
        """
        return self in asked.sources()

    def sources(self) -> "list[RowsIdentity]":
        """Returns the identities whose rows may serve this one, itself first."""
        dense = replace(self, reading=DENSE)
        return [self] if self == dense else [self, dense]

    def of_any_products(self) -> "RowsIdentity":
        """Returns the identity without types and products, for rows that move to a machine."""
        return replace(self, types=(), products=(), attention="", gpu=())

    def known(self) -> str | None:
        """Returns a hash of all fields, 32 hex digits, or None.

        The stored blocks of rows form a tree. This hash is the name of its root, the parent of the
        first block of every prompt. It is None if the model's own hash is not known yet, or if the
        model's file has changed.
        """
        model = self.model.content.known()
        if model is None:
            return None
        of_model = {"model": model, "rope": self.model.rope, "changes": self.model.changes}
        return _hash({**vars(self), **of_model})
