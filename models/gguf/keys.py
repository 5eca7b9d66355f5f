"""Reads hyper-parameters (keys ``{architecture}.*``) of a file and checks type and range."""

import math
from typing import Any

import numpy as np

from sparsekv_cli.errors import SparseKVError, UnsupportedModelError
from sparsekv_cli.models.gguf.file import GGUFFile, StringArray
from sparsekv_cli.settings.changes import TOKENIZER

MAX_TOKENS = 1 << 31  # limit of a context and of a vocabulary; llama.cpp counts both in i32


def read_architecture(file: GGUFFile) -> str:
    """Returns ``general.architecture``. Raises SparseKVError without a non-empty string."""
    key = "general.architecture"
    name = file.metadata.get(key)
    if name is None:
        raise SparseKVError(f"{file.path}: has no {key}, so what it holds cannot be told")
    if not isinstance(name, str):
        raise SparseKVError(f"{file.path}: {key} is of type {file.value_types[key]}, not string")
    if not name:
        raise SparseKVError(f"{file.path}: {key} is empty")
    return name


class ModelKeys:
    """Reads the keys ``{architecture}.*`` of one file. Errors are SparseKVErrors with the key."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture
        self._asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        self._asked.add(f"{self.architecture}.{name}")
        return f"{self.architecture}.{name}" in self.file.metadata

    def check_changes(self) -> None:
        """Raises SparseKVError for a changed key that the model does not use."""
        for key in self.file.changes.overrides():
            if key not in self._asked and not key.startswith(TOKENIZER):
                raise SparseKVError(
                    f"{self.file.path}: --override-kv {key} has no effect: this "
                    f"{self.architecture} model does not read it"
                )

    def fail(self, name: str, message: str) -> SparseKVError:
        return SparseKVError(f"{self.file.path}: {self.architecture}.{name} {message}")

    def unsupported(self, name: str, message: str) -> UnsupportedModelError:
        return UnsupportedModelError(str(self.fail(name, message)))

    def get(self, name: str) -> Any:
        key = f"{self.architecture}.{name}"
        if name not in self:
            raise self.fail(name, "is missing, and the model cannot be run without it")
        return self.file.metadata[key]

    def mistyped(self, name: str, wanted: str) -> SparseKVError:
        found = self.file.value_types[f"{self.architecture}.{name}"]
        return self.fail(name, f"is of type {found}; it must be {wanted}")

    def _bounded(self, name: str, value: int, low: int, high: int, where: str = "") -> int:
        if not low <= value <= high:
            raise self.fail(name, f"is {value}{where}; it must be {low} to {high}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        if name not in self:
            return default
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.mistyped(name, "bool")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        if default is not None and name not in self:
            return default
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.mistyped(name, "an integer")
        return self._bounded(name, value, low, high)

    def per_layer(self, name: str, n_layer: int, high: int, low: int = 1) -> tuple[int, ...]:
        """Returns one integer per layer. A scalar in the file applies to every layer."""
        value = self.get(name)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
            if len(value) != n_layer:
                raise self.fail(name, f"has {len(value)} values for {n_layer} layers")
            return tuple(
                self._bounded(name, one, low, high, f" in layer {layer}")
                for layer, one in enumerate(value.tolist())
            )
        if isinstance(value, np.ndarray | StringArray | str | float | bool):
            raise self.mistyped(name, "an integer or an array of integers")
        return (self._bounded(name, value, low, high),) * n_layer

    def number(
        self, name: str, *, low: float, high: float = math.inf, default: float | None = None
    ) -> float:
        """Returns a finite float with low <= value <= high."""
        if default is not None and name not in self:
            return default
        value = self.get(name)
        if not isinstance(value, float):
            raise self.mistyped(name, "float32")
        if not math.isfinite(value) or not low <= value <= high:
            limits = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            raise self.fail(name, f"is {value:g}; it must be {limits} and finite")
        return value
