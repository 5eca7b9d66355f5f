"""The header of a model, to check texts before kernels are compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sparsekv_cli.models.gguf.file import GGUFFile
    from sparsekv_cli.models.hparams import HParams
    from sparsekv_cli.settings.changes import ModelChanges


class ModelHeader(NamedTuple):
    """An open file, its tokenizer and its sizes, with the names that a Model has for them."""

    gguf: GGUFFile
    tokenizer: Any
    hparams: HParams


@contextlib.contextmanager
def model_header(path: Path, changes: ModelChanges) -> Iterator[ModelHeader]:
    """Yields the header of a model, with the user's changes.

    Raises SparseKVError for a file that is no model.
    """
    from sparsekv_cli.models.gguf.file import open_gguf
    from sparsekv_cli.models.hparams import read_hparams
    from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

    with open_gguf(path) as file:
        file.change(changes)
        yield ModelHeader(file, load_tokenizer(file.metadata), read_hparams(file))
