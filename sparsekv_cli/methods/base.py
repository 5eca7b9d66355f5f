"""What a KV-cache method is: its options, and the cache that it makes of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.layer import Backend, DenseCache, LayerCache
from sparsekv_cli.cache.spec import Budget, LayerSpec
from sparsekv_cli.cache.store import CACHE_TYPES

CALIBRATION = "calibration"  # Method.needs of methods that read a sidecar


@dataclass(frozen=True)
class CalibrationRun:
    """What a method gets to calibrate itself: a model, a text, and a way to run one over it.

    specs: one a layer, ``calibration`` empty. ids: the text. forward(ids, pos, caches, all_logits):
    a dense forward pass of rows from ``pos`` on through one LayerCache a layer, which may be of the
    method's own making and keep what they are shown; logits f32 (n_vocab,), or (T, n_vocab).
    progress: told the share that is done, 0 to 1.
    """

    specs: Sequence[LayerSpec]
    backend: Backend
    ids: Sequence[int]
    forward: Callable[[Sequence[int], int, Sequence[LayerCache], bool], np.ndarray]
    progress: Callable[[float], None]


_CACHE_TYPE_HELP = "type of {} in the cache: f16, or q8_0 with methods that read it"


@dataclass(frozen=True)
class Method(ABC):
    """An immutable KV-cache method; its fields are its options, checked in __post_init__."""

    paper: ClassVar[str]
    description: ClassVar[str]
    needs: ClassVar[str] = ""  # what must exist before it runs, such as a calibration
    cache_types: ClassVar[tuple[str, ...]] = ("f16",)  # of K and of V that it can read
    # Its cache on a GPU, module:class of device/; a method without one keeps its rows on the host.
    device_cache: ClassVar[str] = ""

    dense_layers: tuple[int, ...] = (0, 1)
    cache_type_k: str = field(default="f16", metadata={"help": _CACHE_TYPE_HELP.format("K")})
    cache_type_v: str = field(default="f16", metadata={"help": _CACHE_TYPE_HELP.format("V")})

    def check_cache_types(self, name: str) -> None:
        """ValueError for a type that does not exist, or that this method, ``name``, cannot read."""
        for key in ("cache_type_k", "cache_type_v"):
            value = getattr(self, key)
            if value not in CACHE_TYPES:
                raise ValueError(f"{key} = {value!r}: must be {' or '.join(CACHE_TYPES)}")
            if value not in self.cache_types:
                only = " or ".join(self.cache_types)
                raise ValueError(f"{key} = {value!r}: method {name} keeps its rows as {only} only")

    def layer_spec(self, spec: LayerSpec) -> LayerSpec:
        """``spec`` with this method's types of the rows."""
        self.check_cache_types(type(self).__name__)
        return replace(spec, cache_type_k=self.cache_type_k, cache_type_v=self.cache_type_v)

    def is_dense(self, spec: LayerSpec) -> bool:
        """Whether the user or the default wants that layer dense (see ``dense_layer``)."""
        return spec.layer in {
            i % spec.n_layer for i in self.dense_layers if -spec.n_layer <= i < spec.n_layer
        }

    def layer(self, spec: LayerSpec, backend: Backend) -> LayerCache:
        """The cache of one layer."""
        spec = self.layer_spec(spec)
        make = self.dense_layer if self.is_dense(spec) else self.sparse_layer
        return make(spec, backend)

    def dense_layer(self, spec: LayerSpec, backend: Backend) -> LayerCache:
        """The cache of a dense layer on the host; a method may have its own for long contexts."""
        return DenseCache(spec, backend)

    @abstractmethod
    def sparse_layer(self, spec: LayerSpec, backend: Backend) -> LayerCache:
        """The method's own cache of one layer."""

    def used(self) -> Sequence[Method]:
        """Other methods whose kernels it calls, to be compiled with its own."""
        return ()

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """What every layer's ``spec.calibration`` is to hold: arrays (n_layer, ...) by name.

        Called for methods whose ``needs`` is CALIBRATION. The arrays must not depend on the
        method's options: one sidecar serves them all.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The options as JSON-able values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Budget) else v for k, v in values.items()}
