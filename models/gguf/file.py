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

__all__ = ["DECODABLE_TYPES", "GGMLType", "GGUFFile", "StringArray", "TensorInfo", "open_gguf"]

NOT_LANGUAGE_MODELS = {"clip": "a vision projector", "controlvector": "a control vector"}


class GGUFFile:
    """An open model.  Data are read-only views on the memory maps: nothing is copied.

    path: of the first part, by which the model is called.
    metadata: of the first part; scalars as Python values, numeric arrays as numpy, string arrays
        as StringArray.
    value_types: the type each key has in the file, e.g. ``uint32``, ``string``, ``array``.
    tensors: by name, in file order, part by part.
    parts: its files, in order.  missing: why it is only one part of several; None if it is all.
    """

    def __init__(self, parts: Sequence[GGUFPart], missing: SparseKVError | None = None) -> None:
        """The model of ``parts``, which now belong to this object."""
        self.parts = tuple(parts)
        self.missing = missing
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

    @cached_property
    def content(self) -> ModelContent:
        """Tells the model from all others, by every byte."""
        return ModelContent(self.parts)

    @property
    def size(self) -> int:
        """Bytes of all parts when they were opened."""
        return sum(part.size for part in self.parts)

    @property
    def has_data(self) -> bool:
        """Whether all tensors are there; not if it was opened for its header and is cut."""
        return all(part.has_data for part in self.parts)

    def data(self, tensor: str | TensorInfo) -> np.ndarray:
        """Returns the bytes of a tensor: (rows, bytes a row) uint8, read-only, on the memory map.

        Rows are the product of all dimensions but the last. Raises KeyError for an unknown name.
        """
        info = self.tensors[tensor] if isinstance(tensor, str) else tensor
        return self.parts[info.part].data(info)

    def release(self, data: np.ndarray) -> None:
        """Takes the pages of ``data``, a view on a map, out of this process' memory.

        They come back from the file, or the system's cache of it, when they are read again.
        """
        for part in self.parts:
            part.release(data)

    def check_intact(self) -> None:
        """Raise LostModelError if a file has become shorter: reading on would be a SIGBUS."""
        for part in self.parts:
            part.check_intact()

    def check_types(self, supported: Collection[GGMLType] = DECODABLE_TYPES) -> None:
        """Raise SparseKVError for the first tensor whose type is not in ``supported``."""
        for info in self.tensors.values():
            if info.type not in supported:
                names = ", ".join(kind.name for kind in sorted(supported))
                raise SparseKVError(
                    f"{self.parts[info.part].path}: tensor {show(info.name)} has type "
                    f"{info.type.name}, which is not supported; supported are {names}"
                )

    def close(self) -> None:
        """Close the files; arrays that view the maps keep them until they are gone."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(
    path: str | os.PathLike[str], *, vocab_only_ok: bool = False, header_only: bool = False
) -> GGUFFile:
    """Open a GGUF file, and with one part of a split model all of it; check all of the headers.

    vocab_only_ok: also accept incomplete models, for ``inspect`` and ``tokenize``. These are
    vocabulary-only files, one part of a split model whose others are missing, adapters and
    projectors. Raises SparseKVError, in one line, for everything that cannot be read.
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
    """Raise SparseKVError for models that miss a part, adapters, projectors and vocabularies."""
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
