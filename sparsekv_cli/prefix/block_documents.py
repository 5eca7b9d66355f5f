"""The prompts in a folder as documents, whose passages other prompts reuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.models.identity import DENSE, RowsIdentity
from sparsekv_cli.prefix.blocks import (
    BlockHeader,
    DamagedError,
    block_hash,
    read_header,
    read_piece,
)
from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.passages import Rows, can_be_turned
from sparsekv_cli.prefix.pieces import block_layers, check_finite, empty_piece, row_types
from sparsekv_cli.system.files import open_regular


class BlockDocument:
    """Blocks of one prompt that follow each other. drop: is told of a damaged file."""

    def __init__(
        self,
        folder: Path,
        headers: Sequence[BlockHeader],
        drop: Callable[[BlockHeader, Exception], None],
    ) -> None:
        self.first = headers[0].first
        self.tokens = np.concatenate([np.asarray(each.tokens, np.int64) for each in headers])
        self._folder, self._headers, self._drop = folder, headers, drop

    def rows(
        self, start: int, stop: int, caches: Sequence[LayerCache]
    ) -> Iterator[tuple[int, int, Rows]]:
        """See KnownDocument. A damaged block is dropped."""
        for header in self._headers:
            at = header.first - self.first
            begin, end = max(start, at), min(stop, at + len(header.tokens))
            if begin >= end:
                continue
            try:
                rows = self._read(header, begin - at, end - at, caches)
            except (OSError, DamagedError) as error:
                self._drop(header, error)
                continue
            yield begin, end, rows

    def _read(
        self, header: BlockHeader, start: int, stop: int, caches: Sequence[LayerCache]
    ) -> Rows:
        """Returns rows of a block. Raises OSError and DamagedError."""
        if header.layers != block_layers(caches, header.types):
            raise DamagedError("its rows have other sizes than the model's")
        rows: Rows = []
        with open_regular(self._folder / header.name) as file:
            if read_header(file) != header:
                raise DamagedError("it was replaced")
            for layer, cache in enumerate(caches):
                piece = empty_piece(cache, header.types, stop)
                read_piece(file, header, layer, piece)
                types = row_types(cache, header.types)
                check_finite(layer, piece, types)
                k, v = (of.elements(x[:, start:]) for x, of in zip(piece, types, strict=True))
                rows.append((k, v))
        return rows


def documents_in(
    folder: PrefixFolder, identity: RowsIdentity, drop: Callable[[BlockHeader, Exception], None]
) -> list[BlockDocument]:
    """Returns the prompts in a folder whose rows were read densely and have this identity.

    Blocks that prompts share are in one of them. A later part of another prompt is a document too.
    """
    root = replace(identity, reading=DENSE).known()
    if root is None or not folder.is_usable():
        return []
    children, begun = folder.children(), list[list[BlockHeader]]()
    left = [(root, list[BlockHeader]())]
    while left:
        parent, chain = left.pop()
        headers = [folder.header(name) for name in children.pop(parent, ())]
        end = chain[-1].first + len(chain[-1].tokens) if chain else 0
        usable = [each for each in headers if each is not None and _is_movable(each, end)]
        for i, header in enumerate(usable):
            if chain and i == 0:
                chain.append(header)
                own = chain
            else:
                own = [header]
                begun.append(own)
            left.append((block_hash(header.parent, header.tokens), own))
    return [BlockDocument(folder.path, chain, drop) for chain in begun]


def _is_movable(header: BlockHeader, first: int) -> bool:
    """Returns whether a block begins at token ``first`` and its rows can be turned."""
    return header.first == first and can_be_turned(header.types)
