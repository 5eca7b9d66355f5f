"""The part of one layer in a file: the sizes of its rows, and the conversion of their types."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from sparsekv_cli.cache.layer import BoundedCache, LayerCache
from sparsekv_cli.cache.store import CACHE_TYPES, RowType
from sparsekv_cli.cpu.attention.rows import F16, are_finite, quantize_rows_ref
from sparsekv_cli.prefix.blocks import BlockHeader, DamagedError, Piece, read_header, read_piece
from sparsekv_cli.system.files import open_regular

NONE = (0, 0, 0)  # the sizes of a layer without a piece


def row_types(cache: LayerCache, types: tuple[str, str]) -> tuple[RowType, RowType]:
    """Returns a layer's rows of K and of V in these types. If V is K, it has no elements here."""
    k, v = types
    spec = cache.spec
    value_dim = 0 if spec.v_is_k else spec.value_dim
    return RowType(CACHE_TYPES[k], spec.head_dim), RowType(CACHE_TYPES[v], value_dim)


def block_layers(
    caches: Sequence[LayerCache], types: tuple[str, str]
) -> tuple[tuple[int, int, int], ...]:
    """Returns for each layer its kv heads, and the bytes of a row of K and of V in these types.

    A layer has no piece in a block if it drops rows, or reads another layer's rows.
    """
    layers = []
    for cache in caches:
        if isinstance(cache, BoundedCache) or cache.spec.source >= 0:
            layers.append(NONE)
            continue
        k, v = (each.n_items * np.dtype(each.dtype).itemsize for each in row_types(cache, types))
        layers.append((cache.spec.n_head_kv, k, v))
    return tuple(layers)


def empty_piece(cache: LayerCache, types: tuple[str, str], n: int) -> Piece:
    """Returns memory for a layer's rows of n tokens in these types."""
    k, v = row_types(cache, types)
    heads = cache.spec.n_head_kv
    return np.empty((heads, n, k.n_items), k.dtype), np.empty((heads, n, v.n_items), v.dtype)


def check_finite(layer: int, piece: Piece, types: Sequence[RowType]) -> None:
    """Raises DamagedError for rows that no model has written: with infinities, or no numbers."""
    for rows, of in zip(piece, types, strict=True):
        if not all(are_finite(head, of.kind, of.width) for head in rows):  # a head fits the cache
            raise DamagedError(f"the rows of layer {layer} are not finite numbers")


def fill_from(
    path: Path, header: BlockHeader, stop: int, types: tuple[str, str], caches: Sequence[LayerCache]
) -> None:
    """Reads a block's rows up to position ``stop`` to the caches, whose rows are of these types.

    Raises OSError and DamagedError.
    """
    with open_regular(path) as file:
        if read_header(file) != header:
            raise DamagedError("it was replaced")

        def fill(layer: int, cache: LayerCache, k: np.ndarray, v: np.ndarray) -> None:
            place, is_direct = (k, v), header.types == types
            piece = place if is_direct else empty_piece(cache, header.types, stop - header.first)
            read_piece(file, header, layer, piece)
            check_finite(layer, piece, row_types(cache, header.types))
            if not is_direct:
                ways = (row_types(cache, each) for each in (header.types, types))
                for rows, to, of in zip(piece, place, zip(*ways, strict=True), strict=True):
                    to[:] = converted(rows, *of)

        for layer, cache in enumerate(caches):
            if header.layers[layer][0]:
                cache.fill_rows(header.first, stop, partial(fill, layer, cache))


def converted(rows: np.ndarray, source: RowType, target: RowType) -> np.ndarray:
    """Converts rows (G, T, items). Returns them unchanged if both types are the same."""
    if source.kind == target.kind or not target.d:
        return rows
    x = target.rotated(source.read(rows).astype(np.float32))
    # numpy converts: threads do this while the kernels of others compute.
    return x.astype(np.float16) if target.kind == F16 else quantize_rows_ref(x, target.kind)
