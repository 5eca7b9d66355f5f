"""Passages of a prompt whose tokens are known from other prompts, in memory or on disk.

    known document     .... A A A A A A B B B B C C C C ....
    prompt             system  C C C C  new line  A A A A A A B
    passages                   -------            -------------

A document is the tokens of a kept prompt, or of a part of one. Windows of WINDOW tokens are hashed.
A window whose hash is a multiple of EVERY is an anchor. So the text decides where anchors lie, and
an inserted line moves none of them. A passage grows from an anchor while the tokens are equal.

Rows that attend to moved ones are no source for later prompts. So passages are moved only if they
are a large part (SHARE) of the tokens that are left to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.models.reuse.repair import Known, turned
from sparsekv_cli.prefix.blocks import BLOCK

WINDOW = 16  # tokens
EVERY = 8  # windows an anchor, on average
LEAST = 64  # tokens of a passage
SHARE = 0.5  # of the tokens that are left to read, which passages must have
N_FIRST = 16  # first tokens of a document and of a prompt: they are attended as sinks, so they stay
MOST_ALIKE = 8  # anchors of equal hash that are compared with one of the prompt
TURNED = ("f16", "q8_0")  # types of rows that are exact enough to be turned
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio (Knuth's multiplicative hashing)
Rows = list[tuple[np.ndarray, np.ndarray]]  # K and V of each layer, f32 (G, T, d)


class KnownDocument(Protocol):
    """Known tokens in order, whose rows can be read.

    first: position of the first token. tokens: int64 (n,).
    """

    first: int
    tokens: np.ndarray

    def rows(
        self, start: int, stop: int, caches: Sequence[LayerCache]
    ) -> Iterator[tuple[int, int, Rows]]:
        """Yields rows of tokens[start:stop] in pieces: first token, last token, rows.

        Rows that cannot be read are left out.
        """


class Passage(NamedTuple):
    """n tokens of a prompt, from ``first`` on, that a document has from ``at`` on."""

    first: int
    n: int
    document: int
    at: int


def anchors(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first tokens of the windows that are anchors, and their hashes, uint64."""
    n = len(tokens) - WINDOW + 1
    if n < 1:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * MIX
    mixed ^= mixed >> np.uint64(29)
    hashes = np.zeros(n, np.uint64)
    for i in range(WINDOW):
        hashes = hashes * MIX + mixed[i : i + n]
    hashes ^= hashes >> np.uint64(32)
    places = np.flatnonzero(hashes % np.uint64(EVERY) == 0)
    return places, hashes[places]


class PassageIndex:
    """The anchors of documents, ordered by hash."""

    def __init__(self, documents: Sequence[KnownDocument]) -> None:
        self._documents = documents
        found = [_movable_anchors(document) for document in documents]
        owners = [np.full(len(places), i) for i, (places, _) in enumerate(found)]
        hashes = np.concatenate([np.empty(0, np.uint64), *(h for _, h in found)])
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._places = np.concatenate([np.empty(0, np.int64), *(p for p, _ in found)])[order]
        self._owners = np.concatenate([np.empty(0, np.int64), *owners])[order]

    def find(self, ids: Sequence[int], first: int, last: int) -> list[Passage]:
        """Returns passages of ids[first:last] in order. They do not overlap."""
        tokens = np.asarray(ids[:last], np.int64)
        begin = max(first, N_FIRST)
        places, hashes = anchors(tokens[begin:])
        passages: list[Passage] = []
        for place, value in zip(places + begin, hashes, strict=True):
            if place < begin:
                continue
            i = int(np.searchsorted(self._hashes, value))
            alike = slice(i, i + MOST_ALIKE)
            grown = [
                self._grown(tokens, begin, int(place), int(owner), int(at))
                for key, owner, at in zip(
                    self._hashes[alike], self._owners[alike], self._places[alike], strict=True
                )
                if key == value
            ]
            best = max(grown, key=lambda each: each.n, default=None)
            if best is not None and best.n >= LEAST:
                passages.append(best)
                begin = best.first + best.n
        return passages

    def _grown(self, tokens: np.ndarray, begin: int, place: int, owner: int, at: int) -> Passage:
        """Returns the longest passage through a window at ``place``, ``at`` in a document."""
        document = self._documents[owner]
        known = document.tokens
        n_before = min(place - begin, at - _first_movable(document))
        before = n_equal(tokens[place - n_before : place][::-1], known[at - n_before : at][::-1])
        after = n_equal(tokens[place:], known[at:])
        return Passage(place - before, before + after, owner, at - before)


def _first_movable(document: KnownDocument) -> int:
    """Returns the first token of a document whose row can be moved."""
    return max(0, N_FIRST - document.first)


def _movable_anchors(document: KnownDocument) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``anchors`` of the tokens whose rows can be moved."""
    first = _first_movable(document)
    places, hashes = anchors(document.tokens[first:])
    return places + first, hashes


def n_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many first elements of two arrays are equal."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def can_be_turned(types: Sequence[str]) -> bool:
    """Returns whether rows of these types, of K and of V, are exact enough to be moved."""
    return all(each in TURNED for each in types)


def move_passages(
    list_documents: Callable[[], Sequence[KnownDocument]],
    ids: Sequence[int],
    first: int,
    last: int,
    caches: Sequence[LayerCache],
    n_room: int,
    repair: float | None,
) -> Known | None:
    """Writes the rows of known passages of ids[first:last] into the caches' stores.

    Their keys are turned to their new positions. list_documents: called if a passage may fit.
    n_room: rows in all that the caches will hold. repair: the share of the rows that will be
    computed again; None: nothing is moved. Returns None if too few tokens are known; else the rows
    from ``first`` up to the end of the last passage.
    """
    if repair is None or last - max(first, N_FIRST) < LEAST:
        return None
    documents, known = list_documents(), np.zeros(last - first, bool)
    passages = PassageIndex(documents).find(ids, first, last)
    if sum(passage.n for passage in passages) < SHARE * (last - first):
        return None
    for cache in caches:
        cache.store.reserve(n_room)
    for passage in passages:
        document = documents[passage.document]
        distance = passage.first - (document.first + passage.at)
        start, stop = passage.at, passage.at + passage.n
        for begin, end, rows in document.rows(start, stop, caches):
            to = slice(begin + passage.first - passage.at, end + passage.first - passage.at)
            for cache, (k, v) in zip(caches, rows, strict=True):
                cache.store.write(to, turned(k, distance, cache.spec), v)
            known[to.start - first : to.stop - first] = True
    if not known.any():
        return None
    return Known(known[: int(np.flatnonzero(known)[-1]) + 1], repair)


class MemoryDocument:
    """The first tokens of a sequence in memory, whose caches keep all rows."""

    first = 0

    def __init__(self, tokens: Sequence[int], caches: Sequence[LayerCache]) -> None:
        self.tokens, self._caches = np.asarray(tokens, np.int64), caches

    def rows(
        self, start: int, stop: int, caches: Sequence[LayerCache]
    ) -> Iterator[tuple[int, int, Rows]]:
        for begin in range(start, stop, BLOCK):
            end, stores = min(stop, begin + BLOCK), [cache.store for cache in self._caches]
            rows = [
                (
                    store.k_type.elements(store.k[:, begin:end]),
                    store.v_type.elements(store.v[:, begin:end]),
                )
                for store in stores
            ]
            yield begin, end, rows
