"""The new files of a prompt on their way to disk."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparsekv_cli.cache.layer import BoundedCache, LayerCache, Snapshot
from sparsekv_cli.prefix.blocks import BLOCK, BlockHeader, BlockWriter, Piece, block_hash
from sparsekv_cli.prefix.pieces import converted, row_types

N_PENDING = 2  # layers with rows that wait for the disk


class RowsWriter:
    """The new blocks of one prompt on their way to disk, and its snapshots.

    A cache that keeps its rows is read after the answer. If a cache drops or moves rows, a thread
    writes a copy of them while the next layers are computed. A layer's snapshot is written as soon
    as it exists.

    ids: of the whole prompt. path_of: a header's file. failed: called with the error of a snapshot.
    """

    def __init__(
        self,
        ids: Sequence[int],
        headers: Sequence[BlockHeader],
        snapshots: Sequence[BlockHeader],
        caches: Sequence[LayerCache],
        path_of: Callable[[BlockHeader], Path],
        failed: Callable[[OSError], None],
    ) -> None:
        """Raises OSError if the folder cannot be written."""
        self._ids, self._path_of, self._failed = ids, path_of, failed
        self._writers: list[BlockWriter] = []
        self._snapshots: dict[int, BlockWriter] = {}  # by the tokens before their ends
        self._keeping: list[tuple[int, LayerCache]] = []
        self._pending: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None
        try:
            for header in headers:
                self._writers.append(BlockWriter(path_of(header).parent, header))
            for header in snapshots:
                writer = BlockWriter(path_of(header).parent, header)
                self._snapshots[header.first + BLOCK] = writer
        except BaseException:
            self.abandon()
            raise
        for i, cache in enumerate(caches if snapshots else ()):
            if isinstance(cache, BoundedCache) and cache.spec.source < 0:
                cache.take_snapshots(self._snapshots, partial(self._write_snapshot, i))

    def take(self, layer: int, cache: LayerCache) -> None:
        if not self._writers[0].header.layers[layer][0]:
            return
        if cache.can_prefill_in_parts:
            self._keeping.append((layer, cache))
            return
        first, stop = self._writers[0].rows.start, self._writers[-1].rows.stop
        k, v = (rows[:, first:stop].copy() for rows in (cache.store.k, cache.store.v))
        self._thread = self._thread or ThreadPoolExecutor(1, "prefix")
        self._pending.append(self._thread.submit(self._write, layer, (k, v), first, cache))
        while len(self._pending) > N_PENDING:
            self._pending.pop(0).result()

    def _write(self, layer: int, rows: Piece, first: int, cache: LayerCache) -> None:
        """Writes one layer's rows, which begin at position ``first``, to all blocks."""
        for writer in self._writers:
            at = slice(writer.rows.start - first, writer.rows.stop - first)
            own = cache.store.k_type, cache.store.v_type
            kept = row_types(cache, writer.header.types)
            k, v = (converted(x[:, at], *of) for x, *of in zip(rows, own, kept, strict=True))
            writer.write(layer, (k, v))

    def _write_snapshot(self, layer: int, n: int, held: Snapshot) -> None:
        if n not in self._snapshots:
            return
        try:
            self._snapshots[n].write(layer, held)
        except OSError as error:
            self._failed(error)

    def finish(self, begun: str, root: str) -> tuple[BlockHeader, int]:
        """Finishes the files. Returns the first one's header, and how many tokens they hold.

        begun: the root that their names have now. root: the right one.
        """
        for layer, cache in self._keeping:
            self._write(layer, (cache.store.k, cache.store.v), 0, cache)
        for future in self._pending:
            future.result()
        self._close()
        parents = {}
        for first in range(0, len(self._ids), BLOCK):
            tokens = self._ids[first : first + BLOCK]
            parents[begun] = root
            begun, root = block_hash(begun, tokens), block_hash(root, tokens)
        # The first blocks are the ones used last.
        for writer in (*reversed(self._writers), *self._snapshots.values()):
            writer.header = replace(writer.header, parent=parents[writer.header.parent])
            writer.finish(self._path_of(writer.header))
        return self._writers[0].header, self._writers[-1].rows.stop

    def abandon(self) -> None:
        self._close()
        for writer in (*self._writers, *self._snapshots.values()):
            writer.abandon()
        self._snapshots = {}

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
