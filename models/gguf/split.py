"""Finds and checks the files of a split model: ``NAME-00001-of-00003.gguf`` and so on.

Source: llama.cpp's llama-gguf-split and llama_model_loader. ``split.count`` is the number of files,
``split.no`` the number of this file (from 0). ``split.tensors.count`` is the number of tensors in
all files. The first file has the metadata, and the other files may repeat them.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.header import StringArray, show
from sparsekv_cli.models.gguf.part import GGUFPart, open_part

NAME = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
COUNT, NUMBER, N_TENSORS = "split.count", "split.no", "split.tensors.count"


def split_integer(part: GGUFPart, key: str, default: int) -> int:
    """Returns the value of a ``split.*`` key. Raises SparseKVError if it is no integer."""
    value = part.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        wanted = "int32" if key == N_TENSORS else "uint16"
        found = part.value_types[key]
        raise SparseKVError(f"{part.path}: {key} is of type {found}; it must be {wanted}")
    return value


def part_paths(part: GGUFPart) -> list[Path]:
    """Returns the paths of all files of ``part``'s model, in order.

    Raises SparseKVError if a file is missing, or if the name of ``part`` does not fit its number.
    """
    count = split_integer(part, COUNT, 1)
    if count < 2:
        return [part.path]
    number = split_integer(part, NUMBER, 0)
    if not 0 <= number < count:
        raise SparseKVError(f"{part.path}: {NUMBER} is {number}; 0 to {count - 1} were expected")
    name = NAME.fullmatch(part.path.name)
    ending = f"-{number + 1:05}-of-{count:05}.gguf"
    if name is None or not part.path.name.endswith(ending):
        raise SparseKVError(
            f"{part.path}: is part {number + 1} of {count} of a split model by its metadata, so "
            f"its name must end in {ending} (rename it, or download it again)"
        )
    names = [f"{name['prefix']}-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    missing = [each for each in names if not os.path.lexists(part.path.with_name(each))]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise SparseKVError(
            f"{part.path}: is part {number + 1} of {count} of a split model, of which "
            f"{missing[0]} is missing{others}: put all parts into one folder"
        )
    return [part.path.with_name(each) for each in names]


def open_others(part: GGUFPart, paths: Sequence[Path], header_only: bool = False) -> list[GGUFPart]:
    """Opens the other files of ``part``'s model. Returns all files in order, ``part`` included.

    Raises SparseKVError with the name of a file of another model. Then all files are closed.
    """
    if len(paths) == 1:
        return [part]
    parts: list[GGUFPart] = []
    try:
        for number, path in enumerate(paths):
            parts.append(part if path == part.path else open_part(path, header_only))
            _check_number(parts[-1], number, len(paths))
            _check_metadata(parts[0], parts[-1])
        _check_tensors(parts)
    except BaseException:
        for opened in {part, *parts}:
            opened.close()
        raise
    return parts


def _check_number(part: GGUFPart, number: int, count: int) -> None:
    found = split_integer(part, COUNT, 1)
    if found != count:
        raise SparseKVError(
            f"{part.path}: {COUNT} is {found}, but the model is split into {count} files: it is "
            "of another model (download it again)"
        )
    found = split_integer(part, NUMBER, 0)
    if found != number:
        raise SparseKVError(
            f"{part.path}: {NUMBER} is {found}, but {number} was expected by the file's name"
        )


def _check_metadata(first: GGUFPart, part: GGUFPart) -> None:
    """Checks that the metadata of a later file agree with those of the first file."""
    for key, value in part.metadata.items():
        if key == NUMBER or part is first:
            continue
        if key == N_TENSORS or key in first.metadata:
            expected = first.metadata.get(key)
            if _plain(expected) != _plain(value):
                words = f"is {_shown(value)}, but {_shown(expected)} in"
                if isinstance(value, StringArray | np.ndarray):
                    words = "is not what it is in"
                raise SparseKVError(
                    f"{part.path}: {show(key)} {words} {first.path.name}: it is of another model "
                    "(download it again)"
                )
        elif key == "general.architecture":
            raise SparseKVError(
                f"{first.path}: has no {key}, but {part.path.name} has: it is not the first part"
            )


def _check_tensors(parts: Sequence[GGUFPart]) -> None:
    """Checks that each tensor is in one file only, and that the first file has the right number."""
    holder: dict[str, GGUFPart] = {}
    for part in parts:
        for name in part.tensors:
            if name in holder:
                raise SparseKVError(
                    f"{part.path}: tensor {show(name)} is in {holder[name].path.name} too: one of "
                    "them is of another model (download both again)"
                )
            holder[name] = part
    expected = split_integer(parts[0], N_TENSORS, len(holder))
    if len(holder) != expected:
        raise SparseKVError(
            f"{parts[0].path}: the {len(parts)} files of the model hold {len(holder)} tensors, but "
            f"{N_TENSORS} is {expected}: one of them is of another model (download all again)"
        )


def _plain(value: Any) -> Any:
    """Returns a metadata value in a form that ``==`` can compare."""
    if isinstance(value, StringArray):
        return value.raw
    return value.tolist() if isinstance(value, np.ndarray) else value


def _shown(value: Any) -> str:
    return show(value) if isinstance(value, str) else str(value)
