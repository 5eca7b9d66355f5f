"""A GGUF model: one file, or the parts of a split model, as one set of metadata and tensors."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sparsekv_cli.cpu.weights.types import DECODABLE_TYPES, GGMLType
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.content import ModelContent
from sparsekv_cli.models.gguf.header import StringArray, show
from sparsekv_cli.models.gguf.part import GGUFPart, TensorInfo, open_part
from sparsekv_cli.models.gguf.split import open_others, part_paths
from sparsekv_cli.settings.changes import GGUF_TYPES, ModelChanges, type_of_key

__all__ = ["DECODABLE_TYPES", "GGMLType", "GGUFFile", "StringArray", "TensorInfo", "open_gguf"]

NOT_LANGUAGE_MODELS = {"clip": "a vision projector", "controlvector": "a control vector"}

TEMPLATE_KEY = "tokenizer.chat_template"


class GGUFFile:
    """An open model. Data are read-only views on the memory maps: nothing is copied.

    path: of the first part, which names the model.
    metadata: of the first part; scalars as Python values, numeric arrays as numpy, string arrays
        as StringArray.
    value_types: the type of each key in the file, e.g. ``uint32``, ``string``, ``array``.
    tensors: by name, in file order, part by part.
    parts: its files, in order. missing: why other parts are missing; None if none is missing.
    """

    def __init__(self, parts: Sequence[GGUFPart], missing: SparseKVError | None = None) -> None:
        """Makes the model of ``parts`` and takes ownership of them."""
        self.parts = tuple(parts)
        self.missing = missing
        self.changes = ModelChanges()  # the user's changes, set by ``change``
        first = self.parts[0]
        self.path = first.path
        self.version = first.version
        self.metadata: Mapping[str, Any] = first.metadata
        self.value_types: Mapping[str, str] = first.value_types
        self.tensors: Mapping[str, TensorInfo] = first.tensors
        if len(self.parts) > 1:
            self.tensors = MappingProxyType(
                {
                    name: dataclasses.replace(info, part=number)
                    for number, part in enumerate(self.parts)
                    for name, info in part.tensors.items()
                }
            )

    def change(self, changes: ModelChanges) -> None:
        """Applies the user's changes to the metadata.

        A second call replaces the changes of the first.
        """
        first, self.changes = self.parts[0], changes
        values = changes.overrides()
        types = {key: GGUF_TYPES[type_of_key(key)] for key in values}
        if changes.chat_template:
            values[TEMPLATE_KEY], types[TEMPLATE_KEY] = changes.chat_template, "string"
        self.metadata = {**first.metadata, **values}
        self.value_types = {**first.value_types, **types}

    def changed_values(self) -> dict[str, Any]:
        """Returns key -> the user's value, for keys to which the file gives another value."""
        own, changed = self.parts[0].metadata, self.changes.overrides()
        return {key: value for key, value in changed.items() if own.get(key) != value}

    @cached_property
    def content(self) -> ModelContent:
        """The hash of the model's bytes."""
        return ModelContent(self.parts)

    @property
    def size(self) -> int:
        """Bytes of all parts when they were opened."""
        return sum(part.size for part in self.parts)

    @property
    def has_data(self) -> bool:
        """Whether the data of all tensors are there.

        A file that was opened for its header may be cut.
        """
        return all(part.has_data for part in self.parts)

    def data(self, tensor: str | TensorInfo) -> np.ndarray:
        """Returns the bytes of a tensor: (rows, bytes a row) uint8, read-only, on the memory map.

        Rows are the product of all dimensions but the last. Raises KeyError for an unknown name.
        """
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        return self.parts[info.part].data(info)

    def release(self, data: np.ndarray) -> None:
        """Removes the pages of ``data``, a view on a memory map, from this process's memory.

        A later access reads them again, from the file or from the system's cache of it.
        """
        for part in self.parts:
            part.release(data)

    def check_intact(self) -> None:
        """Raises LostModelError if a file has become shorter. A read of its end raises SIGBUS."""
        for part in self.parts:
            part.check_intact()

    def check_types(self, supported: Collection[GGMLType] = DECODABLE_TYPES) -> None:
        """Raises SparseKVError for the first tensor whose type is not in ``supported``."""
        for info in self.tensors.values():
            if info.type not in supported:
                names = ", ".join(kind.name for kind in sorted(supported))
                raise SparseKVError(
                    f"{self.parts[info.part].path}: tensor {show(info.name)} has type "
                    f"{info.type.name}, which is not supported; supported are {names}"
                )

    def close(self) -> None:
        """Closes the files. Arrays that view the maps keep the maps open."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(
    path: str | os.PathLike[str], *, vocab_only_ok: bool = False, header_only: bool = False
) -> GGUFFile:
    """Opens a GGUF file, or all parts of a split model from one of them. Checks all headers.

    vocab_only_ok: whether incomplete models are accepted, for ``inspect`` and ``tokenize``. These
    are vocabularies, parts of a split model without the others, adapters and projectors.
    header_only: whether files may end before their last tensor. Raises SparseKVError, in one line,
    for a file that cannot be read.
    """
    part = open_part(Path(path), header_only)
    try:
        paths = part_paths(part)
    except SparseKVError as error:
        file = GGUFFile([part], error)
    else:
        file = GGUFFile(open_others(part, paths, header_only))
    if not vocab_only_ok:
        try:
            check_whole_model(file)
        except SparseKVError:
            file.close()
            raise
    return file


def check_whole_model(file: GGUFFile) -> None:
    """Raises SparseKVError for models that lack a part, adapters, projectors and vocabularies."""
    if file.missing is not None:
        raise file.missing
    kind = file.metadata.get("general.type", "model")
    if not isinstance(kind, str):
        found = file.value_types["general.type"]
        raise SparseKVError(f"{file.path}: general.type is of type {found}; it must be string")
    architecture = file.metadata.get("general.architecture")
    if isinstance(architecture, str) and architecture in NOT_LANGUAGE_MODELS:
        kind = f"{architecture} ({NOT_LANGUAGE_MODELS[architecture]})"
    if kind != "model":
        raise SparseKVError(
            f"{file.path}: holds {show(kind)}, not a language model; name the model's own file"
        )
    if not file.tensors:
        raise SparseKVError(
            f"{file.path}: holds a vocabulary only (no tensors); it can be inspected and used by "
            "tokenize, not run"
        )
