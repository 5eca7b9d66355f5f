"""Kinds of layers: ``full`` ones, which methods change, and others with caches of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import FULL, STATE, WINDOW, LayerSpec
from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.cache.window import WindowCache

# The caches of layers of other kinds than full, which are the same with every method.
CACHES: dict[str, Callable[[LayerSpec], LayerCache]] = {STATE: StateCache, WINDOW: WindowCache}


def full_layers(specs: Iterable[LayerSpec]) -> list[LayerSpec]:
    """Those in which a method has a part."""
    return [spec for spec in specs if spec.kind == FULL]
