"""The new files of a prompt on their way to disk."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparsekv_cli.cache.layer import BoundedCache, LayerCache, Snapshot
from sparsekv_cli.prefix.blocks import BLOCK, BlockHeader, BlockWriter, Piece, block_hash
from sparsekv_cli.prefix.pieces import converted, row_types
from sparsekv_cli.prefix.snapshots import snapshot_of

RowsLater = Callable[[], Piece]  # LayerCache.rows_of
N_PENDING = 2  # layers with rows that wait for the disk


class RowsWriter:
    """The new blocks of one prompt on their way to disk, and its snapshots.

    A cache that keeps its rows is read after the answer, and after each part of a long prompt. If a
    cache drops or moves rows, a thread writes a copy of them while the next layers are computed. A
    layer's snapshot is written as soon as it exists. After a part there is one more snapshot, until
    the next one comes. Rows that a GPU has read wait in the host's memory until the answer ends.

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
        self._caches = caches
        self._n_finished = 0  # blocks that have their names
        self._part_snapshot: Path | None = None  # goes when there is a later one
        self._writers: list[BlockWriter] = []
        self._snapshots: dict[int, BlockWriter] = {}  # by the tokens before their ends
        self._keeping: list[tuple[int, RowsLater, LayerCache]] = []
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
        first, stop = self._writers[0].rows.start, self._writers[-1].rows.stop
        rows = cache.rows_of(first, stop)
        if cache.can_prefill_in_parts or cache.reads_on_gpu:
            self._keeping.append((layer, rows, cache))
            return
        self._thread = self._thread or ThreadPoolExecutor(1, "prefix")
        self._pending.append(self._thread.submit(self._write, layer, rows(), first, cache))
        while len(self._pending) > N_PENDING:
            self._pending.pop(0).result()

    def take_part(self, n: int, begun: str, root: str) -> None:
        """Finishes the blocks of the first n rows, which all caches hold. See ``finish``."""
        if any(each.reads_on_gpu for each in self._caches):
            return
        parents = self._parents(begun, root)
        for writer in self._writers[self._n_finished :]:
            if writer.rows.stop > n:
                break
            for layer, cache in enumerate(self._caches):
                if writer.header.layers[layer][0]:
                    rows = cache.rows_of(writer.rows.start, writer.rows.stop)()
                    self._write_block(writer, layer, rows, writer.rows.start, cache)
            self._name(writer, parents)
            self._n_finished += 1
            if writer.rows.stop == n and any(
                isinstance(each, BoundedCache) for each in self._caches
            ):
                self._take_part_snapshot(snapshot_of(writer.header, self._caches), n)

    def _take_part_snapshot(self, header: BlockHeader, n: int) -> None:
        """Writes the snapshot of length n, which all caches have, and removes the one before."""
        path = self._path_of(header)
        writer = BlockWriter(path.parent, header)
        try:
            for layer, cache in enumerate(self._caches):
                if header.layers[layer][0] and isinstance(cache, BoundedCache):
                    writer.write(layer, cache.snapshot(n))
            writer.finish(path)
        except BaseException:
            writer.abandon()
            raise
        self._drop_part_snapshot()
        self._part_snapshot = path

    def _drop_part_snapshot(self) -> None:
        if self._part_snapshot is not None:
            with contextlib.suppress(OSError):
                self._part_snapshot.unlink()
            self._part_snapshot = None

    def _write(self, layer: int, rows: Piece, first: int, cache: LayerCache) -> None:
        """Writes one layer's rows, which begin at position ``first``, to all open blocks."""
        for writer in self._writers[self._n_finished :]:
            self._write_block(writer, layer, rows, first, cache)

    def _write_block(
        self, writer: BlockWriter, layer: int, rows: Piece, first: int, cache: LayerCache
    ) -> None:
        """Writes one layer's rows to a block. first: position of the first of ``rows``."""
        at = slice(writer.rows.start - first, writer.rows.stop - first)
        own = row_types(cache, (cache.spec.cache_type_k, cache.spec.cache_type_v))
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

    def finish(self, begun: str, root: str) -> tuple[BlockHeader, int, list[str]]:
        """Finishes the files. Returns the first one's header, how many tokens they hold, and the
        names of those that were finished in parts.

        begun: the root that their names have now. root: the right one.
        """
        for layer, rows, cache in self._keeping:
            self._write(layer, rows(), self._writers[0].rows.start, cache)
        for future in self._pending:
            future.result()
        self._close()
        parents = self._parents(begun, root)
        # The first blocks are the ones used last.
        self._drop_part_snapshot()
        open_ones = self._writers[self._n_finished :]
        for writer in (*reversed(open_ones), *self._snapshots.values()):
            self._name(writer, parents)
        parts = [writer.header.name for writer in self._writers[: self._n_finished]]
        return self._writers[0].header, self._writers[-1].rows.stop, parts

    def _parents(self, begun: str, root: str) -> dict[str, str]:
        """Returns the right parent of each block by the one that it was given."""
        parents = {}
        for first in range(0, len(self._ids), BLOCK):
            tokens = self._ids[first : first + BLOCK]
            parents[begun] = root
            begun, root = block_hash(begun, tokens), block_hash(root, tokens)
        return parents

    def _name(self, writer: BlockWriter, parents: dict[str, str]) -> None:
        writer.header = replace(writer.header, parent=parents[writer.header.parent])
        writer.finish(self._path_of(writer.header))

    def abandon(self) -> tuple[BlockHeader, int] | None:
        """Removes unfinished files. Returns the first header and the tokens of the others."""
        self._close()
        finished = self._writers[: self._n_finished]
        for writer in (*self._writers[self._n_finished :], *self._snapshots.values()):
            writer.abandon()
        self._snapshots = {}
        return (finished[0].header, finished[-1].rows.stop) if finished else None

    def _close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
