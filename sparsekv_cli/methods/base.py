"""The base class of the methods: a method has options and makes a cache for each layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.kinds import CACHES
from sparsekv_cli.cache.layer import DenseCache, LayerCache
from sparsekv_cli.cache.row_sizes import Sizes
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

    A method whose options depend on each other checks them in its own ``__post_init__``. It first
    calls the ``__post_init__`` of this class.
    """

    paper: ClassVar[str]
    description: ClassVar[str]
    use: ClassVar[str]  # when to use it, by the tables of docs/benchmarks.md
    needs: ClassVar[str] = ""  # a requirement, such as a calibration
    cache_types: ClassVar[tuple[str, ...]] = tuple(CACHE_TYPES)  # types of K and V that it can read
    holds_all_rows: ClassVar[bool] = True  # False: it drops or changes rows
    # module:class in device/methods/ of its cache on a GPU. A method without one keeps its rows on
    # the host.
    device_cache: ClassVar[str] = ""
    # module:class of its own HostCache for sparse layers; empty: it uses HostCache.
    host_cache: ClassVar[str] = ""
    # How many rows a dense step reads in the time of one query head's work in a sparse step
    # (depth.py). 0: the method is never sparse, or does not keep all rows.
    work_of_a_head: ClassVar[int] = 0
    # Why V must not be K, as in latent attention; empty: it may be.
    needs_values: ClassVar[str] = ""
    # The option values of each preset, by name. Options that the user gives override them.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    renamed: ClassVar[dict[str, str]] = {}  # old names of options -> their present names

    dense_layers: tuple[int, ...] = option((0, 1), DENSE_HELP)
    cache_type_k: str = option("f16", _CACHE_TYPE_HELP.format("K"), choices=CACHE_TYPES)
    cache_type_v: str = option("f16", _CACHE_TYPE_HELP.format("V"), choices=CACHE_TYPES)

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong value or for a type of rows that the method cannot read."""
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
        """How many of a prompt's last tokens need queries; None: all tokens."""
        return 0

    @property
    def name(self) -> str:
        """The name on the command line, and of the method's file in methods/."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def kv_types(self) -> tuple[str, str]:
        """The types of the rows of K and of V."""
        return self.cache_type_k, self.cache_type_v

    def layer_spec(self, spec: LayerSpec) -> LayerSpec:
        """Returns ``spec`` with this method's types of rows."""
        return replace(spec, cache_type_k=self.cache_type_k, cache_type_v=self.cache_type_v)

    def is_dense(self, spec: LayerSpec) -> bool:
        """Returns whether the method leaves the layer as it is, without a sparse cache.

        This holds for layers that are not full, and for those in ``dense_layers``. The user's
        ``dense_layers`` are numbers of layers of the model. The default ``dense_layers`` count full
        layers only: (0, -1) are the first and the last full layer.
        """
        at, n = spec.layer, spec.n_layer
        if spec.n_full and self.dense_layers == type(self).dense_layers:
            at, n = spec.full_place, spec.n_full
        return spec.kind != FULL or at in {i % n for i in self.dense_layers if -n <= i < n}

    def misfit(self, layers: Sequence[Sizes]) -> str:
        """Returns why no options make the method run on these layers; "" if it can run.

        A method may need K and V to be different rows.
        """
        if self.needs_values and any(layer.v_is_k for layer in layers):
            return f"does not run with latent attention: {self.needs_values}"
        return ""

    def check_layers(self, layers: Sequence[Sizes]) -> None:
        """Raises SparseKVError if the method or its options do not fit the model's layers.

        The user's ``dense_layers`` may name a missing or a non-full layer.
        """
        if reason := self.misfit(layers):
            raise SparseKVError(f"method {self.name} {reason}")
        if self.cache_type_k != self.cache_type_v and any(layer.v_is_k for layer in layers):
            raise SparseKVError(
                f"--cache-type-k {self.cache_type_k} and --cache-type-v {self.cache_type_v}: with "
                "latent attention a token has one row for both; give both the same type"
            )
        if self.dense_layers == type(self).dense_layers:
            return
        kinds, n_layer = [layer.kind for layer in layers], len(layers)
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
        """Returns a new cache of one layer: of its kind, dense, or the method's sparse cache.

        A layer that is not of the kind FULL has the cache of its kind. A FULL layer has a dense
        cache if ``is_dense`` says so.
        """
        spec = self.layer_spec(spec)
        if spec.kind != FULL:
            return CACHES[spec.kind](spec)
        make = self.dense_layer if self.is_dense(spec) else self.sparse_layer
        return make(spec)

    def dense_layer(self, spec: LayerSpec) -> LayerCache:
        """Returns a new cache of a dense layer on the host. A method may use its own class."""
        return DenseCache(spec)

    @abstractmethod
    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        """Returns a new cache of a sparse layer on the host."""

    def used(self) -> Sequence[Method]:
        """Returns other methods whose kernels this method calls. Their kernels are compiled too."""
        return ()

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """Returns the arrays of a calibration by name, each (n_layer, ...).

        ``spec.calibration`` later has row i of each array for layer i. Called for methods whose
        ``needs`` is CALIBRATION. The arrays must not depend on the method's options, because all
        options use the same file.
        """
        raise NotImplementedError

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
        """Returns, by name, the shape and type that ``calibrate`` must give each of its arrays.

        specs: the model's layers. A file with other arrays is refused before use.
        """
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Returns the options with values that JSON can hold."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: str(v) if isinstance(v, Budget) else v for k, v in values.items()}
