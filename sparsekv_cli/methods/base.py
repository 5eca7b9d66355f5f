"""The base of the KV-cache methods: a method's options, and the caches that it makes for layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.kinds import CACHES
from sparsekv_cli.cache.layer import DenseCache, LayerCache
from sparsekv_cli.cache.spec import FULL, Budget, LayerSpec
from sparsekv_cli.cache.store import CACHE_TYPES
from sparsekv_cli.calibration.run import CalibrationArray, CalibrationRun
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.settings.option import check_options, option

DENSE_HELP = (
    "layers that attend to all rows, such as 0,1 or none; the default counts full layers only, "
    "not windows and recurrent ones"
)
_CACHE_TYPE_HELP = "type of {} in the cache; fasa, sals, freekv and faedkv: f16 only"


@dataclass(frozen=True)
class Method(ABC):
    """An immutable KV-cache method; its fields are its options (sparsekv_cli/settings/option.py).

    If options depend on each other, a method checks that in its own __post_init__, after calling
    this one.
    """

    paper: ClassVar[str]
    description: ClassVar[str]
    use: ClassVar[str]  # when to use it, by the tables of docs/benchmarks.md
    needs: ClassVar[str] = ""  # a requirement, such as a calibration
    cache_types: ClassVar[tuple[str, ...]] = tuple(CACHE_TYPES)  # types of K and V that it can read
    holds_all_rows: ClassVar[bool] = True  # whether it keeps all rows unchanged
    # module:class of its cache on a GPU, in device/. A method without one keeps its rows on the
    # host.
    device_cache: ClassVar[str] = ""
    # module:class of its own HostCache for sparse layers, if it has one.
    host_cache: ClassVar[str] = ""
    # The work of each query head in a sparse step, in rows of a dense step (depth.py). 0 for a
    # method that is never sparse, or that does not keep all rows.
    work_of_a_head: ClassVar[int] = 0
    # Values of options by the name of a preset. The user's options replace them.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    renamed: ClassVar[dict[str, str]] = {}  # old names of options, and their names now

    dense_layers: tuple[int, ...] = option((0, 1), DENSE_HELP)
    cache_type_k: str = option("f16", _CACHE_TYPE_HELP.format("K"), choices=CACHE_TYPES)
    cache_type_v: str = option("f16", _CACHE_TYPE_HELP.format("V"), choices=CACHE_TYPES)

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong value, or a type of rows that the method cannot read."""
        check_options(self)
        for key in ("cache_type_k", "cache_type_v"):
            value = getattr(self, key)
            if value not in self.cache_types:
                only = " or ".join(self.cache_types)
                raise ValueError(
                    f"{key} = {value!r}: method {self.name} keeps its rows as {only} only"
                )

    @property
    def n_queried(self) -> int | None:
        """The last tokens of a prompt whose queries the method needs; None means all tokens."""
        return 0

    @property
    def name(self) -> str:
        """The name on the command line. It is also the name of the method's file in methods/."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def kv_types(self) -> tuple[str, str]:
        """The types of the rows of K and of V."""
        return self.cache_type_k, self.cache_type_v

    def layer_spec(self, spec: LayerSpec) -> LayerSpec:
        """Returns ``spec`` with this method's types of rows."""
        return replace(spec, cache_type_k=self.cache_type_k, cache_type_v=self.cache_type_v)

    def is_dense(self, spec: LayerSpec) -> bool:
        """Returns whether the layer is dense, by default, by the user's choice or by its kind.

        The user names layers by their numbers in the model. The default names the first or last
        full layers.
        """
        at, n = spec.layer, spec.n_layer
        if spec.n_full and self.dense_layers == type(self).dense_layers:
            at, n = spec.full_place, spec.n_full
        return spec.kind != FULL or at in {i % n for i in self.dense_layers if -n <= i < n}

    def check_layers(self, kinds: Sequence[str]) -> None:
        """Raises SparseKVError for a layer that the user names and no method changes.

        kinds: the kinds of the model's layers.
        """
        if self.dense_layers == type(self).dense_layers:
            return
        n_layer = len(kinds)
        for layer in self.dense_layers:
            if not -n_layer <= layer < n_layer:
                raise SparseKVError(
                    f"--dense-layers names layer {layer}, but the model's layers are 0 to "
                    f"{n_layer - 1}"
                )
            if kinds[layer] != FULL:
                full = ", ".join(str(i) for i, kind in enumerate(kinds) if kind == FULL)
                raise SparseKVError(
                    f"--dense-layers names layer {layer}, a {kinds[layer]} layer, which no method "
                    f"changes; those that attend to all rows are {full or 'none'}"
                )

    def layer(self, spec: LayerSpec) -> LayerCache:
        """Returns the cache of one layer.

        A layer that is not of the kind FULL has the cache of its kind. A FULL layer has a dense
        cache if ``is_dense`` says so, else the method's own sparse cache.
        """
        spec = self.layer_spec(spec)
        if spec.kind != FULL:
            return CACHES[spec.kind](spec)
        make = self.dense_layer if self.is_dense(spec) else self.sparse_layer
        return make(spec)

    def dense_layer(self, spec: LayerSpec) -> LayerCache:
        """Returns the host's cache of a dense layer. A method may have its own class."""
        return DenseCache(spec)

    @abstractmethod
    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        """Returns the method's own cache of one layer."""

    def used(self) -> Sequence[Method]:
        """Returns the methods whose kernels this one calls, so that they are compiled too."""
        return ()

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """Returns arrays (n_layer, ...) by name; ``spec.calibration`` has each layer's part.

        Called for methods whose ``needs`` is CALIBRATION. The arrays must not depend on the
        method's options, because one sidecar serves all of them.
        """
        raise NotImplementedError

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
        """Returns the shapes and types that the arrays of ``calibrate`` must have for these layers,
        by name.

        A file with other arrays is refused before use.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Returns the options as JSON-able values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Budget) else v for k, v in values.items()}
