"""Rows of one request that another one reuses: in memory, and on disk (prefix/).

A prompt's rows do not depend on the method. So a sequence that has all rows of a prompt's beginning
gives them to any other, whose prefill computes the rest. Both read them in the same memory
(``share_prefix``). prefix/prefixes.py says where the rest may begin. Rows of decode steps are not
given. If the rest has more than FEW_ROWS tokens (models/decoder.py), the text is that of a whole
prefill, to the bit. A shorter rest is rounded less.

Memory for rows is reserved before a prefill, and released with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

from sparsekv_cli.cache.counters import held_bytes
from sparsekv_cli.cache.kinds import LEAST_SHARED, n_shared, share_prefix
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.row_sizes import layer_bytes
from sparsekv_cli.cache.spec import FULL, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.reuse.repair import Known
from sparsekv_cli.models.tokenizer.ids import n_common
from sparsekv_cli.prefix.difference import difference
from sparsekv_cli.prefix.passages import KnownDocument, MemoryDocument, can_be_turned, move_passages
from sparsekv_cli.prefix.prefixes import STEP, Prefixes
from sparsekv_cli.prefix.prompt_rows import Found
from sparsekv_cli.sequence import N_HEADROOM, Sequence
from sparsekv_cli.system import memory_file
from sparsekv_cli.system.memory import available_memory

N_METHODS = 64  # methods, with their options, that are remembered
FALLBACK = 4 << 30  # bytes for rows if the system does not say how much memory it has
LEAST_SEEN = 512  # tokens; shorter prompts say little about the growth of an index
GROWTH = 9 / 8  # the most that a cache's memory exceeds its rows by (KVStore.reserve)


class Parked(NamedTuple):
    """A sequence whose answer is finished, and the bytes that it takes."""

    n_bytes: int
    sequence: Sequence


def reusable(sequence: Sequence, ids: Ids[int], method: Method, is_exact: bool = True) -> int:
    """Returns how many first rows a sequence can give to the prompt ``ids``.

    0 if the rows have another identity, if a method has changed them, or needs all queries.
    is_exact: not those that were moved, or attend to moved ones.
    """
    gives = keeps_rows(sequence) and sequence.serves(method)
    return sequence.n_alike(ids, method, is_exact=is_exact) if gives else 0


def keeps_rows(sequence: Sequence) -> bool:
    """Returns whether all layers have the rows of all tokens of the sequence."""
    return all(layer.can_prefill_in_parts and layer.spec.kind == FULL for layer in sequence.caches)


def is_source(sequence: Sequence, method: Method) -> bool:
    """Returns whether passages may be moved from a sequence: its rows are all there, and dense."""
    is_sparse = sequence.engine.identity(sequence.method).reading
    is_exact = can_be_turned(sequence.method.kv_types) and not is_sparse
    return is_exact and keeps_rows(sequence) and sequence.serves(method)


class SharedRows:
    """Finds a prompt's rows in other sequences first, then on disk (a PromptRows).

    donors: sequences that may give rows; those on a GPU give none. disk_of: returns the store on
    disk for a method; None: the disk is not used. repair: see ``move_passages``.
    """

    def __init__(
        self,
        disk_of: Callable[[Method], Prefixes | None],
        donors: Callable[[], Iterable[Sequence]],
        repair: float | None = None,
    ) -> None:
        self._donors, self.repair = donors, repair
        self._method: Method | None = None  # the method of the next prompt
        self._disk_of = lru_cache(N_METHODS)(disk_of)
        self._disk: Prefixes | None = None  # of the sequence that is or was prefilled last
        self._donor: Sequence | None = None
        self._found = Found()  # the rows that were found on disk
        self._writer = ThreadPoolExecutor(1, "prefixes")
        self._writing: Future[None] | None = None

    def use(self, method: Method) -> None:
        """Sets the method of the next prompt."""
        self._method = method

    def find(self, ids: Ids[int]) -> Found:
        self.wait()
        method = self._method
        assert method is not None
        if self._disk is not None:
            self._disk.finish()  # writes the rest of a failed answer before it is dropped
        self._disk = self._disk_of(method)
        self._found = self._disk.find(ids) if self._disk is not None else Found()
        best, left = self._found.n, self._found.difference
        self._donor = None
        prompts = []
        for sequence in self._donors():
            can_give = sequence.engine.shares_prefill
            n = reusable(sequence, ids, method, self.repair is None) if can_give else 0
            if n > best:
                best, self._donor = n, sequence
            if sequence.checkpoint is not None:
                prompts.append(sequence.tokens[: sequence.checkpoint.n])
        nearest = max(prompts, key=lambda kept: n_common(kept, ids), default=[])
        other = difference(nearest, ids)
        if other is not None and (left is None or other.at > left.at):
            left = other
        found = self._found
        if self._donor is not None:
            found = Found((), best, best, moved=self._donor.moved)
        return found._replace(difference=left if left is not None and left.at >= best else None)

    def load(self, found: Found, caches: Ids[LayerCache], n_room: int) -> int:
        donor, self._donor = self._donor, None
        if donor is None:
            return self._disk.load(found, caches, n_room) if self._disk is not None else 0
        share_prefix(donor.caches, caches, found.n, n_room)
        return found.n

    def move(self, ids: Ids[int], first: int, caches: Ids[LayerCache], n_room: int) -> Known | None:
        method = self._method
        if method is None or method.n_queried is None:
            return None
        last = len(ids) - max(1, method.n_queried)
        documents = partial(self._documents, method)
        return move_passages(documents, ids, first, last, caches, n_room, self.repair)

    def _documents(self, method: Method) -> list[KnownDocument]:
        """Returns the prompts whose passages may be moved, on disk and in memory."""
        documents: list[KnownDocument] = [] if self._disk is None else [*self._disk.documents()]
        for each in self._donors():
            if each.checkpoint is not None and is_source(each, method):
                n = min(each.checkpoint.n, each.moved.n_exact)
                documents.append(MemoryDocument(each.tokens[:n], each.caches))
        return documents

    def begin(self, ids: Ids[int], found: Found, n_loaded: int, caches: Ids[LayerCache]) -> None:
        if self._disk is not None:
            self._disk.begin(ids, self._found._replace(n=n_loaded), n_loaded, caches)

    def take(self, layer: int, cache: LayerCache) -> None:
        if self._disk is not None:
            self._disk.take(layer, cache)

    def take_part(self, n: int) -> None:
        if self._disk is not None:
            self._disk.take_part(n)

    def abandon(self) -> None:
        if self._disk is not None:
            self._disk.abandon()

    def finish(self) -> None:
        """Writes the prompt's rows to disk in the background. ``wait`` waits for that."""
        if self._disk is not None:
            self._writing = self._writer.submit(self._disk.finish)

    def wait(self) -> None:
        """Waits for the writer. The sequence may then change."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()


def takes_over(parked: Sequence, ids: Ids[int], method: Method, can_share: bool) -> int:
    """Returns how many rows of ``parked`` stay if ``ids`` continue it; 0: they do not continue it.

    They continue it if they end where its prompt ends, so that no row is left to compute. If
    sequences cannot share rows, they also do if they begin with nearly all of its prompt.
    """
    at = parked.checkpoint
    if at is None:
        return 0
    if at.n == len(ids) and n_common(ids, parked.tokens[: at.n]) == at.n:
        return at.n
    n = 0 if can_share else reusable(parked, ids, method)
    return n if n >= at.n - 2 * STEP else 0


def replaces(new: Sequence, old: Sequence) -> bool:
    """Returns whether ``new`` can replace ``old``: its prompt starts with that of ``old``."""
    at, before = new.checkpoint, old.checkpoint
    if at is None or before is None or new.method != old.method:
        return False
    n = n_common(new.tokens[: at.n], old.tokens[: before.n])
    return n == before.n and (n == at.n or keeps_rows(new))


def held_together(sequences: Iterable[tuple[int, Sequence]]) -> int:
    """Returns the bytes of the sequences. Shared bytes count once."""
    return sum(n - sum(cache.spared_bytes for cache in of.caches) for n, of in sequences)


def room_beside(sequences: Ids[tuple[int, Sequence]], limit: int) -> int:
    """Returns the part of ``limit`` bytes that is not taken by sequences.

    sequences: bytes reserved for each, and the sequence. An index may be larger than its estimate,
    a part of the reserved bytes. So the result is negative if they take more than the limit.
    """
    return limit - held_together((max(n, whole_bytes(of)), of) for n, of in sequences)


def most_shared(sequences: Iterable[Sequence], ids: Ids[int], method: Method) -> int:
    """Returns the most bytes of the prompt's rows that one of the sequences holds."""
    most = 0
    for sequence in sequences:
        n = reusable(sequence, ids, method)
        if memory_file.is_available() and n >= LEAST_SHARED:
            stores = [each.store for each in sequence.caches if type(each.store) is KVStore]
            most = max(most, sum(of.prefix_bytes(n_shared(of, n)) for of in stores))
    return most


def make_room(
    all_parked: list[Parked],
    others: Ids[tuple[int, Sequence]],
    limit: int,
    ids: Ids[int],
    method: Method,
) -> bool:
    """Returns whether all sequences fit in ``limit`` bytes, which leave room for a prompt ``ids``.

    others: sequences that stay, and the bytes reserved for each. Rows count once that the prompt
    shares with one of them. Parked sequences are dropped, the oldest first, until the rest fits.
    """
    room, shared = room_beside(others, limit), 0
    if room < 0:
        shared = most_shared((of for _, of in others), ids, method)
    if room + shared < 0:
        return False
    give_up(all_parked, room, shared, ids, method)
    return True


def give_up(
    all_parked: list[Parked],
    room: int,
    shared: int = 0,
    ids: Ids[int] = (),
    method: Method | None = None,
) -> None:
    """Drops parked sequences, the oldest first, until the others fit in ``room`` bytes.

    A prompt of ``ids`` with ``method`` may come next. Its memory is reserved, but for ``shared``
    bytes. A sequence that gives more rows to it is dropped last, and these rows count once.
    """
    if held_together(all_parked) <= room:
        return
    gives = [(method and most_shared([each.sequence], ids, method)) or 0 for each in all_parked]
    most = max(shared, *gives, 0)
    order = zip([n == most > shared for n in gives], range(len(gives)), all_parked, strict=True)
    for _, _, each in sorted(order, key=lambda entry: entry[:2]):
        if held_together(all_parked) <= room + most:
            return
        all_parked.remove(each)


def default_limit() -> int:
    """Returns half of the memory that is available to this process, within its container."""
    available = available_memory()
    return FALLBACK if available is None else available // 2


def sequence_bytes(method: Method, specs: Ids[LayerSpec], n: int) -> int:
    """Returns the bytes that the rows of n tokens take, in all layers."""
    total = 0
    n = int((n + N_HEADROOM) * GROWTH)
    for spec in specs:
        row = layer_bytes(spec, *method.kv_types)
        total += row * (min(n, spec.window) if spec.window else n)
    return total


def best_parked(
    all_parked: Iterable[Parked], method: Method, ids: Ids[int], can_share: bool
) -> tuple[Parked | None, int]:
    """Returns the parked sequence from which most of ``ids`` can be taken, and how many rows."""
    best, n_best = None, 0
    for parked in all_parked:
        if parked.sequence.method == method:  # its budget holds ``sparse_from``
            n = takes_over(parked.sequence, ids, method, can_share)
            best, n_best = (parked, n) if n > n_best else (best, n_best)
    return best, n_best


class IndexSizes:
    """The memory of methods' indexes, learnt from prompts."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}  # by method: tokens, bytes

    def add(self, method: Method, n: int, caches: Iterable[LayerCache]) -> None:
        """Notes the index of a prompt of n tokens. The longest prompt counts."""
        if n >= self._seen.get(method.name, (0, 0))[0]:
            self._seen[method.name] = n, sum(cache.memory().index for cache in caches)

    def bytes_of(self, method: Method, n: int) -> int:
        """Returns the bytes of an index of n tokens, in proportion to the longest prompt's."""
        n_seen, n_bytes = self._seen.get(method.name, (0, 0))
        return int(n_bytes * max(1.0, n / max(n_seen, LEAST_SEEN)))


def bytes_of_sequence(sequence: Sequence) -> int:
    """Returns the bytes of a sequence's caches, including caches that make drafts."""
    return held_bytes([*sequence.caches, *sequence.draft_caches])


def whole_bytes(sequence: Sequence) -> int:
    """Returns the bytes that a sequence would take if it shared no rows."""
    return bytes_of_sequence(sequence) + sum(cache.spared_bytes for cache in sequence.caches)


def gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2g} GiB"
