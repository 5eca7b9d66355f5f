"""The prefix cache on disk: it finds the rows of a prompt's beginning, and keeps new rows.

A row depends on the model, on the tokens up to its own, and on the prefill's products. It does not
depend on the method. A method builds its index from loaded rows as from computed ones, at the end
of the prefill. Some methods need the queries of the last tokens (Method.n_queried). These tokens
are computed again.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparsekv_cli.cache.layer import BoundedCache, LayerCache
from sparsekv_cli.models.forward import Forward
from sparsekv_cli.models.identity import RowsIdentity
from sparsekv_cli.models.reuse.repair import Known
from sparsekv_cli.models.tokenizer.ids import n_common
from sparsekv_cli.prefix.block_documents import BlockDocument, documents_in
from sparsekv_cli.prefix.blocks import (
    BLOCK,
    NAME_DIGITS,
    BlockHeader,
    DamagedError,
    block_hash,
    block_name,
)
from sparsekv_cli.prefix.difference import LEAST_AGAIN, difference
from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.passages import move_passages
from sparsekv_cli.prefix.pieces import block_layers, fill_from
from sparsekv_cli.prefix.prompt_rows import Found
from sparsekv_cli.prefix.rows_writer import RowsWriter
from sparsekv_cli.prefix.snapshots import latest_snapshot, restore_snapshot, snapshot_headers
from sparsekv_cli.system.memory import available_memory

LEAST = 512  # the least tokens for which a file is written or read
# A multiple of so many tokens is reused: rows of chunks that start at such a position have the same
# bits as rows of chunks that start at 0.
STEP = 16
Q8_FROM = 32 << 20  # bytes of a block in f16 beyond which it is kept in q8_0
UNKNOWN = "0" * NAME_DIGITS  # placeholder of the root while the model's hash is unknown


class Prefixes:
    """Blocks of one model's prompts in a folder.

    model: its file's name. identity: of the rows. The name of it is the root, the parent of the
    first block of all prompts. types: of the sequence's rows. n_queried: last tokens of a prompt
    that are always computed. tell: called with remarks for -v. is_bounded: whether the model has
    layers that need snapshots. While the root is not known, no rows are found. A prompt is kept if
    the root is known at the end of its answer.
    """

    repair: float | None = None  # see ``move_passages``

    def __init__(
        self,
        folder: PrefixFolder,
        model: str,
        identity: RowsIdentity,
        types: tuple[str, str],
        n_queried: int,
        tell: Callable[[str], None],
        is_bounded: bool = False,
    ) -> None:
        self.folder, self.model, self.identity, self.types = folder, model, identity, types
        self._n_queried, self._tell = max(1, n_queried), tell
        self._is_bounded = is_bounded
        self._storing: RowsWriter | None = None
        self._begun = UNKNOWN  # the root when the prefill began

    # --- from disk --------------------------------------------------------------------------------

    def find(self, ids: Sequence[int]) -> Found:
        """Returns the longest beginning of ``ids`` in the folder."""
        if len(ids) < LEAST or not self.folder.is_usable():
            return Found()
        parents = self.known_roots()
        children = self.folder.children()
        headers: list[BlockHeader] = []
        n, goes_on = 0, bool(parents)
        while goes_on and n < len(ids):
            header, common = self._closest(children, parents, ids[n : n + BLOCK])
            if header is None or header.first != n:
                break
            headers.append(header)
            n += common
            goes_on = common == BLOCK
            parents = [block_hash(parent, header.tokens) for parent in parents]
        if not parents:
            return Found()
        found = self._found(headers, n, ids, LEAST)
        if len(ids) - n < LEAST_AGAIN:
            return found
        kept = [*ids[:n], *self.folder.tokens_behind(n, headers, parents, children)]
        return found._replace(difference=difference(kept, ids))

    def known_roots(self) -> list[str]:
        """Returns the roots of rows that may serve, its own first; none while it is unknown."""
        if self.known_root("looked for") is None:
            return []
        return [root for each in self.identity.sources() if (root := each.known()) is not None]

    def known_root(self, what: str) -> str | None:
        """Returns the root, or None with a remark that the prompt is not ``what``."""
        root = self.identity.known()
        if root is None:
            reason = "the model is still being read, or its file has changed"
            self._tell(f"prefix cache: not {what}, {reason}")
        return root

    def _found(
        self, headers: Sequence[BlockHeader], n: int, ids: Sequence[int], least: int
    ) -> Found:
        """Returns how many tokens to reuse of blocks that share n with ``ids``; adds a remark."""
        step = self.identity.grid or STEP
        n_reused = min(n, len(ids) - self._n_queried) // step * step
        if self._is_bounded:
            n_reused = latest_snapshot(self.folder, headers, n_reused)
        n_reused = n_reused if n_reused >= least else 0
        said = f"{n_reused} of {len(ids)} tokens are reused"
        if any(each.first < n_reused and each.types != self.types for each in headers):
            said += " from rows of another type"
        if headers and n < min(len(ids), _end(headers[-1])):
            said += f"; the prompt differs from the kept one at token {n}"
        self._tell(f"prefix cache: {said}")
        return Found(tuple(headers), n, n_reused)

    def _closest(
        self, children: Mapping[str, Sequence[str]], parents: Sequence[str], ids: Sequence[int]
    ) -> tuple[BlockHeader | None, int]:
        """Returns the child of ``parents`` that shares most first tokens with ``ids``, and their
        number. The first parent comes first.
        """
        best: BlockHeader | None = None
        most = 0
        for parent in parents:
            names, exact = children.get(parent, ()), block_name(parent, ids)
            for name in [exact] if exact in names else names:
                header = self.folder.header(name)
                if header is not None and (common := n_common(header.tokens, ids)) > most:
                    best, most = header, common
        return best, most

    def load(self, found: Found, caches: Sequence[LayerCache], n_room: int) -> int:
        """Loads the rows of ``found`` into empty caches. Returns how many tokens have rows.

        n_room: rows in all that the caches will hold.
        """
        if not found.n:
            return 0
        wanted: list[BlockHeader] = []
        for header in found.headers:
            if header.first >= found.n:
                break
            if header.layers != block_layers(caches, header.types):
                self._drop(header, DamagedError("its rows have other sizes than the model's"))
                break
            wanted.append(header)
        full = [cache for cache in caches if not isinstance(cache, BoundedCache)]
        for cache in full:
            cache.store.reserve(n_room)
        n = 0
        with ThreadPoolExecutor(caches[0].spec.n_threads) as pool:
            stops = [min(found.n, _end(header)) for header in wanted]
            reads = [
                pool.submit(fill_from, self._path(header), header, stop, self.types, caches)
                for header, stop in zip(wanted, stops, strict=True)
            ]
            for header, stop, read in zip(wanted, stops, reads, strict=True):
                try:
                    read.result()
                except (OSError, DamagedError) as error:
                    self._drop(header, error)
                    break
                n = stop
        n -= n % (self.identity.grid or 1)
        if self._is_bounded:
            n = restore_snapshot(self.folder, wanted, n, caches)
        for cache in full:
            if cache.spec.source >= 0 and not cache.store.is_shared:
                of = caches[cache.spec.source].store
                cache.store.k[:, :n], cache.store.v[:, :n] = of.k[:, :n], of.v[:, :n]
            cache.store.n = n
        self.folder.touch(header.name for header in wanted)
        return n

    def _drop(self, header: BlockHeader, error: Exception) -> None:
        """Removes a damaged file, with a remark."""
        self.folder.remove_damaged(header.name, error)

    def _path(self, header: BlockHeader) -> Path:
        return self.folder.path / header.name

    def documents(self) -> list[BlockDocument]:
        """Returns the prompts whose passages others may reuse."""
        return documents_in(self.folder, self.identity, self._drop)

    def move(
        self, ids: Sequence[int], first: int, caches: Sequence[LayerCache], n_room: int
    ) -> Known | None:
        """See PromptRows."""
        last = len(ids) - self._n_queried
        return move_passages(self.documents, ids, first, last, caches, n_room, self.repair)

    # --- to disk ----------------------------------------------------------------------------------

    def begin(
        self, ids: Sequence[int], found: Found, n_loaded: int, caches: Sequence[LayerCache]
    ) -> None:
        """See PromptRows."""
        self.finish()
        self._begun, types = self.identity.known() or UNKNOWN, self.types
        row_bytes = sum(heads * (k + v) for heads, k, v in block_layers(caches, types))
        is_over_half = self._is_over_half(len(ids) * row_bytes)
        k, v = ("q8_0" if each == "f16" else each for each in types)
        # Rows that follow rows from q8_0 are as far from exact ones, so their type says so too.
        follows = any(each.first < n_loaded and each.types == (k, v) for each in found.headers)
        if is_over_half or follows or BLOCK * row_bytes > Q8_FROM:
            types = k, v
        n_kept, n_known = n_loaded, n_loaded
        if self._is_bounded:  # without a missing snapshot, rows computed again are not new
            has_last = n_loaded >= found.n_common // BLOCK * BLOCK
            n_known = found.n_common if has_last else n_loaded
        elif n_loaded == found.n:
            n_kept = found.n_common
        headers = self._new_blocks(ids, n_known, n_kept, types, block_layers(caches, types))
        snapshots: list[BlockHeader] = []
        if self._is_bounded and headers:
            of = self.model, self._begun, ids, n_loaded, self.types, caches
            snapshots = snapshot_headers(*of)
            headers = headers if snapshots else []  # without any, rows are of no use
        if headers:
            try:
                n_bytes = row_bytes * (len(ids) - n_loaded)
                if self._may_hold(caches, n_bytes) and self._may_keep([*headers, *snapshots]):
                    self._storing = RowsWriter(
                        ids, headers, snapshots, caches, self._path, self._not_kept
                    )
                    if is_over_half and types != self.types:
                        self._say_over_half(len(ids) * row_bytes)
            except OSError as error:
                self._not_kept(error)

    def _new_blocks(
        self,
        ids: Sequence[int],
        n_known: int,
        n_kept: int,
        types: tuple[str, str],
        layers: tuple[tuple[int, int, int], ...],
    ) -> list[BlockHeader]:
        """Returns the blocks of ``ids`` that are worth keeping.

        n_known: tokens that are not new. n_kept: those whose blocks are not written again. Rows of
        a chunk that the prompt's end cuts off are not those of a longer prompt.
        """
        parent, headers = self._begun, []
        ids = ids[: len(ids) - len(ids) % (self.identity.grid or 1)]
        for first in range(0, len(ids) if len(ids) - n_known >= LEAST else 0, BLOCK):
            tokens = tuple(int(token) for token in ids[first : first + BLOCK])
            if first + BLOCK > n_kept:
                headers.append(BlockHeader(self.model, parent, first, tokens, types, layers))
            parent = block_hash(parent, tokens)
        return headers

    def _is_over_half(self, n_bytes: int) -> bool:
        """Returns whether a prompt's rows are more than half of what the folder may hold."""
        return 2 * n_bytes > self.folder.limit

    def _say_over_half(self, n_bytes: int) -> None:
        self.folder.warn(
            f"the prompt's rows take {n_bytes / 2**30:.3g} GiB, more than half of the "
            f"{self._limit} for kept prompts: they are kept in q8_0, so later answers may differ "
            "a little; a larger --cache-limit keeps them as they are"
        )

    @property
    def _limit(self) -> str:
        return f"{self.folder.limit / 2**30:.3g} GiB"

    def _may_hold(self, caches: Sequence[LayerCache], n_bytes: int) -> bool:
        """Returns whether the host's memory can hold the rows until the answer ends."""
        if not any(each.reads_on_gpu for each in caches):
            return True
        available = available_memory()
        if available is None or 2 * n_bytes <= available:
            return True
        self.folder.warn(
            f"the prompt is not kept: its rows take {n_bytes / 2**30:.3g} GiB of the host's memory "
            "until the answer ends, more than half of what is available"
        )
        return False

    def _may_keep(self, headers: Sequence[BlockHeader]) -> bool:
        """Returns whether the folder can keep the blocks. Raises OSError if it cannot be made."""
        folder, size = self.folder, sum(each.n_packed + sum(each.piece_bytes) for each in headers)
        if size > folder.limit:
            folder.warn(
                f"the prompt is not kept: its rows take {size / 2**30:.3g} GiB, --cache-limit is "
                f"{self._limit}"
            )
            return False
        if folder.make():
            folder.warn(
                f"prompts of {LEAST} tokens and more are kept in {folder.path}, at most "
                f"{self._limit}, for later ones that begin alike; --no-cache or "
                "SPARSEKV_NO_CACHE=1 switches that off, 'sparsekv-cli cache clear' removes them"
            )
        return folder.is_usable()

    def take(self, layer: int, cache: LayerCache) -> None:
        """See PromptRows."""
        if self._storing is not None:
            try:
                self._storing.take(layer, cache)
            except OSError as error:
                self._not_kept(error)

    def take_part(self, n: int) -> None:
        """See PromptRows."""
        root = self.identity.known()
        if self._storing is not None and root is not None and self._begun in (root, UNKNOWN):
            try:
                self._storing.take_part(n, self._begun, root)
            except OSError as error:
                self._not_kept(error)

    def finish(self) -> None:
        """Writes the rest of the prompt's rows. Called when the answer is finished."""
        if self._storing is None:
            return
        root = self.known_root("kept")
        if root is None or self._begun not in (root, UNKNOWN):
            self.abandon()
            return
        try:
            first, n, parts = self._storing.finish(self._begun, root)
        except OSError as error:
            self._not_kept(error)
            return
        except BaseException:  # Ctrl-C leaves no part of the files
            self.abandon()
            raise
        self._settle(first)
        self.folder.touch(parts)
        self._storing = None
        self._tell(f"prefix cache: {n} tokens are kept in {self._place}")

    def _settle(self, new: BlockHeader) -> None:
        """Removes blocks that the new first block contains, and blocks beyond the limit."""
        for name in self.folder.children().get(new.parent, ()):
            old = None if name == new.name else self.folder.header(name)
            if old is not None and n_common(old.tokens, new.tokens) == len(old.tokens):
                self.folder.remove([name])
        self.folder.trim()

    @property
    def _place(self) -> Path:
        return self.folder.path

    def abandon(self) -> None:
        """See PromptRows."""
        if self._storing is not None:
            kept = self._storing.abandon()
            self._storing = None
            if kept is not None:
                first, n = kept
                self._settle(first)
                self.folder.warn(
                    f"{n} tokens of the prompt are kept in {self._place}: the same prompt goes on "
                    "from there"
                )

    def _not_kept(self, error: OSError) -> None:
        self.abandon()
        reason = error.strerror or type(error).__name__
        self.folder.warn(f"warning: the prompt is not kept: {self._place}: {reason}")


def _end(header: BlockHeader) -> int:
    return header.first + len(header.tokens)


def prompts_in(
    folder: PrefixFolder,
    decoder: Forward,
    types: tuple[str, str],
    n_queried: int,
    tell: Callable[[str], None],
) -> Prefixes:
    """Returns a model's prompts in a folder. Begins to read the model, to identify it.

    types: of the sequence's rows. The others: see Prefixes.
    """
    identity = decoder.identity_of(types)
    identity.known()
    name, is_bounded = decoder.weights.file.path.name, bool(decoder.hparams.other_layers)
    return Prefixes(folder, name, identity, types, n_queried, tell, is_bounded)
