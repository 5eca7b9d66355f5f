"""Snapshots of prompts: the memory of windows and states at the end of some blocks.

A model with such layers can continue a prompt from disk only at a snapshot. Snapshots are taken at
ends of blocks, because chunks and the delta net's groups start there too. The later rows then have
the bits of a whole prefill. The last block has a snapshot. The distances grow towards the start.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparsekv_cli.cache.layer import BoundedCache, LayerCache, Snapshot
from sparsekv_cli.cache.window import WindowCache
from sparsekv_cli.models.forward import Forward
from sparsekv_cli.prefix.blocks import (
    BLOCK,
    SNAPSHOT,
    SUFFIX,
    BlockHeader,
    DamagedError,
    block_hash,
    read_header,
    read_piece,
)
from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.pieces import NONE, check_finite
from sparsekv_cli.system.files import open_regular

SPREAD = 4  # ratio of the distances of two snapshots from the last one


def snapshot_lengths(n: int, most: int) -> list[int]:
    """Returns the lengths at which a prompt of n tokens has a snapshot, the last first."""
    last, distance = n // BLOCK, 0
    lengths: list[int] = []
    while distance < last and len(lengths) < most:
        lengths.append((last - distance) * BLOCK)
        distance = distance * SPREAD or 1
    return lengths


def snapshot_headers(
    model: str,
    root: str,
    ids: Sequence[int],
    n_loaded: int,
    types: tuple[str, str],
    caches: Sequence[LayerCache],
) -> list[BlockHeader]:
    """Returns the headers of a prompt's snapshots that will be taken after n_loaded tokens."""
    lengths = snapshot_lengths(len(ids), caches[0].spec.n_checkpoints)
    parent, headers = root, []
    for first in range(0, max(lengths, default=0), BLOCK):
        tokens = tuple(int(token) for token in ids[first : first + BLOCK])
        stop = first + BLOCK
        if stop in lengths and stop > n_loaded:
            block = BlockHeader(model, parent, first, tokens, types, ())
            headers.append(snapshot_of(block, caches))
        parent = block_hash(parent, tokens)
    return headers


def snapshot_of(block: BlockHeader, caches: Sequence[LayerCache]) -> BlockHeader:
    """Returns the header of the snapshot at a whole block's end."""
    layers, rows = _sizes(caches, block.first + BLOCK)
    return replace(block, layers=layers, rows=rows, sums="")


def latest_snapshot(folder: PrefixFolder, headers: Sequence[BlockHeader], n: int) -> int:
    """Returns the largest length, at most n, at which these blocks have a snapshot; or 0."""
    for header in reversed(headers):
        is_whole = len(header.tokens) == BLOCK and header.first + BLOCK <= n
        if is_whole and (folder.path / _name_of(header)).exists():
            return header.first + BLOCK
    return 0


def restore_snapshot(
    folder: PrefixFolder, headers: Sequence[BlockHeader], n: int, caches: Sequence[LayerCache]
) -> int:
    """Fills empty caches from the latest snapshot of at most n tokens. Returns its length, or 0.

    A damaged one is removed, and the previous one is used.
    """
    while length := latest_snapshot(folder, headers, n):
        name = _name_of(headers[length // BLOCK - 1])
        try:
            pieces = _read(folder.path / name, length, caches)
        except (OSError, DamagedError) as error:
            folder.remove_damaged(name, error)
            n = length - 1
            continue
        for i, cache in enumerate(caches):
            if isinstance(cache, BoundedCache):
                cache.restore(length, pieces[i if cache.spec.source < 0 else cache.spec.source])
        folder.touch([name])
        return length
    return 0


def _read(path: Path, length: int, caches: Sequence[LayerCache]) -> dict[int, Snapshot]:
    """Returns a snapshot's pieces by layer. Raises OSError and DamagedError."""
    pieces = {}
    with open_regular(path) as file:
        header = read_header(file)
        if header.name != path.name or (header.layers, header.rows) != _sizes(caches, length):
            raise DamagedError("its pieces have other sizes than the model's")
        for i, cache in enumerate(caches):
            if isinstance(cache, BoundedCache) and cache.spec.source < 0:
                pieces[i] = cache.empty_snapshot(length)
                read_piece(file, header, i, pieces[i])
                _check_finite(i, pieces[i], cache)
    return pieces


def _check_finite(layer: int, piece: Snapshot, cache: BoundedCache) -> None:
    """Raises DamagedError for a window's rows or a state with infinities, or no numbers."""
    if isinstance(cache, WindowCache):
        check_finite(layer, piece, (cache.store.k_type, cache.store.v_type))
    elif not all(np.isfinite(each.view(np.float32)).all() for each in piece):  # bytes of f32
        raise DamagedError(f"the state of layer {layer} is not of finite numbers")


def _sizes(
    caches: Sequence[LayerCache], length: int
) -> tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]]:
    """Returns for each layer the sizes of its piece, and its rows; 0 if it has no own rows."""
    layers, rows = [NONE] * len(caches), [0] * len(caches)
    for i, cache in enumerate(caches):
        if isinstance(cache, BoundedCache) and cache.spec.source < 0:
            k, v = cache.empty_snapshot(length)
            layers[i] = len(k), k.shape[2] * k.itemsize, v.shape[2] * v.itemsize
            rows[i] = k.shape[1]
    return tuple(layers), tuple(rows)


def _name_of(header: BlockHeader) -> str:
    """Returns the file of the snapshot at a block's end."""
    return header.name.removesuffix(SUFFIX) + SNAPSHOT


def can_keep(decoder: Forward) -> bool:
    """Returns whether a decoder's rows can be kept. On a GPU those of window layers cannot."""
    return not (decoder.gpu and decoder.hparams.other_layers)
