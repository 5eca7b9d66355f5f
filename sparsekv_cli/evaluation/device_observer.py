"""Observes to which rows the caches of a decoder on the device attend; see observer.py.

A watched step does not run as a captured graph: rows and queries come to the host layer by layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.store import padded
from sparsekv_cli.device.cache import DeviceCache, DeviceInput
from sparsekv_cli.device.host import HostCache
from sparsekv_cli.evaluation.observer import Measured, Observer


class DeviceObserver(Observer):
    """An observer of a cache of one sequence on the device, which calls it in each step."""

    def __init__(self, cache: DeviceCache, keys: np.ndarray, result: Measured) -> None:
        super().__init__(cache, keys, result)
        cache.on_step = self.see

    def see(self, x: DeviceInput) -> None:
        self.keep_key(_on_host(x.k[0]))
        if self.active:
            attended = self.cache.attended
            if attended is not None:
                idx, counts = (part[0].cpu().numpy() for part in attended)
                attended = idx, counts.astype(np.int64)
            self.rate(_on_host(x.q[0]), attended)


def observe(
    layers: Sequence[LayerCache], keys: Sequence[np.ndarray], result: Measured
) -> Iterator[Observer]:
    """Yields an observer for each layer that chooses rows. They watch from now on."""
    for cache, of_layer in zip(layers, keys, strict=True):
        if isinstance(cache, HostCache):
            if cache.cache.attends_to_some:
                observer: Any = Observer(cache.cache, of_layer, result)
                cache.cache = observer
                yield observer
        elif isinstance(cache, DeviceCache) and cache.attends_to_some:
            yield DeviceObserver(cache, of_layer, result)


def leave_alone(layers: Sequence[LayerCache]) -> None:
    """Ends the watching that ``observe`` started. layers: the same caches."""
    for cache in layers:
        if isinstance(cache, HostCache) and isinstance(cache.cache, Observer):
            cache.cache = cache.cache.cache
        elif isinstance(cache, DeviceCache):
            cache.on_step = None


def exact_keys(layers: Sequence[LayerCache], n: int) -> list[np.ndarray]:
    """Returns copies on the host of the keys of the first n rows, f16 (G, n, d), one a layer.

    layers: the caches of ``full``.
    """
    keys = []
    for cache in layers:
        if isinstance(cache, HostCache):
            keys.append(cache.cache.store.k[:, :n])
        elif isinstance(cache, DeviceCache):
            keys.append(_on_host(cache.store.k[0, :, :n]))
    return keys


def _on_host(rows: Any) -> np.ndarray:
    """Returns a copy on the host of ``rows`` (..., d), padded with zeros to whole vectors."""
    n_zeros = padded(rows.shape[-1]) - rows.shape[-1]
    return np.pad(rows.cpu().numpy(), [(0, 0)] * (rows.ndim - 1) + [(0, n_zeros)])
