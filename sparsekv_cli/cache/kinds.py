"""The kinds of layers: ``full`` layers, which methods change, and layers with caches of their own.

A layer of any kind may read the rows of an earlier layer.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.row_sizes import check_memory
from sparsekv_cli.cache.spec import FULL, STATE, WINDOW, LayerSpec
from sparsekv_cli.cache.state import StateCache
from sparsekv_cli.cache.store import KVStore, Prefix
from sparsekv_cli.cache.window import WindowCache
from sparsekv_cli.system import memory_file

LEAST_SHARED = 1024  # rows; a shorter prefix is copied

# The cache classes of layers that are not full. They are the same with every method.
CACHES: dict[str, Callable[[LayerSpec], LayerCache]] = {STATE: StateCache, WINDOW: WindowCache}


def full_layers(specs: Iterable[LayerSpec]) -> list[LayerSpec]:
    """Returns the layers that methods change."""
    return [spec for spec in specs if spec.kind == FULL]


class SharedStore(KVStore):
    """The store of a layer that reads the rows of an earlier layer, ``of``.

    It has no memory of its own. The earlier layer stores each row first. Then ``append`` only
    raises ``n``, the number of rows that this layer sees.
    """

    is_shared = True
    can_share_rows = False

    def __init__(self, of: KVStore) -> None:
        self.k_type, self.v_type, self._n_threads = of.k_type, of.v_type, of._n_threads
        self._of, self.n = of, 0
        self.reserve(0)

    @property
    def nbytes(self) -> int:
        return 0

    def reserve(self, n: int) -> None:
        self._of.reserve(n)
        self.k, self.v, self.layout = self._of.k, self._of.v, self._of.layout

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        self.reserve(self.n + k.shape[1])
        self.n += k.shape[1]

    def append_rows(self, k: np.ndarray, v: np.ndarray) -> None:
        self.reserve(self.n + len(k))
        self.n += len(k)


def share_rows(caches: Sequence[LayerCache]) -> None:
    """Lets layers read the rows of their source layers in the same memory, if their caches can.

    Caches of windows, and of methods that drop, move or compress rows, have their own memory.
    """
    for cache in caches:
        spec = cache.spec
        if spec.source < 0 or spec.kind != FULL:
            continue
        pair = caches[spec.source], cache
        if all(each.store.can_share_rows and each.can_prefill_in_parts for each in pair):
            cache.store = SharedStore(pair[0].store)


def share_prefix(
    given: Sequence[LayerCache], into: Sequence[LayerCache], n: int, n_room: int
) -> None:
    """Gives the empty caches ``into`` the first n rows of ``given``, another sequence's caches.

    ``given`` must have all n rows. If the system can map memory twice, both sequences read the rows
    in the same memory. Short prefixes, and rows that a method stores in its own form, are copied.
    n_room: the number of rows to make room for.
    """
    pairs = [(cache.store, to.store) for cache, to in zip(given, into, strict=True)]
    if memory_file.is_available() and n >= LEAST_SHARED:
        _share([pair for pair in pairs if all(each.can_share_rows for each in pair)], n, n_room)
    for of, to in pairs:
        first = to.n
        to.reserve(n_room)
        if not to.is_shared:
            for rows, given_rows in zip(to.arrays, of.arrays, strict=True):
                rows[:, first:n] = given_rows[:, first:n]
        to.n = n
    for cache, other in zip(given, into, strict=True):
        if type(cache) is type(other):
            other.copy_index(cache, n)


def n_shared(of: KVStore, n: int) -> int:
    """Returns how many of the first n rows of ``of`` another store can read in the same memory.

    If ``of`` has a prefix that is less than LEAST_SHARED rows too short, this is its length. So a
    conversation that grows by few rows a turn does not make a new prefix each turn.
    """
    n_whole = of.n_whole(n)
    return of.n_prefix if n_whole - LEAST_SHARED < of.n_prefix < n_whole else n_whole


def _share(pairs: Sequence[tuple[KVStore, KVStore]], n: int, n_room: int) -> None:
    """Lets each second store of ``pairs`` read the first ``n_shared`` rows of its first store."""
    given = [(of, to, n_shared(of, n)) for of, to in pairs]
    given = [each for each in given if each[2]]  # fewer rows than a page are not shared
    if any(of.n_prefix < n_whole for of, _, n_whole in given):
        sizes = [of.prefix_bytes(n_whole) for of, _, n_whole in given]
        check_memory(f"K and V of {n} tokens that are shared", sum(sizes), "ask for less at a time")
        file, start = memory_file.MemoryFile(sum(sizes)), 0
        for (of, _, n_whole), size in zip(given, sizes, strict=True):
            of.read_prefix(Prefix(of, n_whole, file, start), n_whole, of.capacity)
            start += size
    for of, to, n_whole in given:
        assert of.prefix is not None
        to.read_prefix(of.prefix, n_whole, n_room)


def hand_over(
    old: Sequence[LayerCache], new: Sequence[LayerCache], n: int, n_room: int
) -> list[LayerCache] | None:
    """Returns caches with a new method that have the first n rows of ``old``. All are on the host.

    new: empty caches of the new method, with the same types of rows. A layer that methods do not
    change keeps its old cache. Returns None unless the old caches have all n rows. Do not use
    ``old`` afterwards. n_room: the number of rows to make room for. A prefill of more rows must
    follow.
    """
    if not all(cache.can_prefill_in_parts and cache.truncate(n) == n for cache in old):
        return None
    taken = []
    for cache, into in zip(old, new, strict=True):
        if cache.spec.kind == FULL:
            of, to = cache.store, into.store
            to.reserve(n_room)
            for rows, given in zip(to.arrays, of.arrays, strict=True):
                rows[:, :n] = given[:, :n]
            to.n = n
        taken.append(into if cache.spec.kind == FULL else cache)
    return taken


def reachable(caches: Sequence[LayerCache], n: int) -> int:
    """Returns the largest length, at most n, to which every cache's ``reach`` allows to go back."""
    while (least := min((cache.reach(n) for cache in caches), default=n)) < n:
        n = least
    return n


def reserve(caches: Sequence[LayerCache], n: int, *, is_checked: bool, more_bytes: int = 0) -> None:
    """Announces that the caches will have n rows.

    is_checked: the caches are on the host, and their memory is checked. Raises SparseKVError if
    there is too little memory for the rows and for ``more_bytes``.
    """
    if is_checked:
        n_bytes = bytes_to_come(caches, n) + more_bytes
        has_index = any(cache.has_index for cache in caches)
        what = f"K and V of {n} tokens" + (" and their index" if has_index else "")
        check_memory(what, n_bytes, "shorten the prompt")
    for cache in caches:
        cache.reserve(n)


def bytes_to_come(caches: Iterable[LayerCache], n: int) -> int:
    """Returns the bytes that caches on the host must add to their memory for n rows.

    These are the rows and indexes of all layers after the prefill. Some methods move or drop rows
    at the end of a prefill. Then all rows of the largest such layer count too, because layers
    finish one by one.
    """
    kept, largest = 0, 0
    for cache in caches:
        now = cache.memory()
        has = now.host + now.device + now.index + cache.spared_bytes
        kept += max(0, cache.held_bytes(n) - has)
        if not cache.can_prefill_in_parts:
            largest = max(largest, LayerCache.held_bytes(cache, n))
    return kept + largest
