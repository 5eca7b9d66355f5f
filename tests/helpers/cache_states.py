"""All that a cache knows of its sequence, as values that can be compared byte by byte.

Memory that no later step reads before it is written again is left out: rows after the last one,
places of pages that hold none, and the room of arrays that grow.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.queries import LastQueries, PastQueries
from sparsekv_cli.cache.split_store import SplitStore
from sparsekv_cli.cache.state import Checkpoints
from sparsekv_cli.cache.store import KVStore, padded
from sparsekv_cli.cpu.faedkv.blocks import BlockSpectrum
from sparsekv_cli.cpu.faedkv.frequencies import FourierBasis
from sparsekv_cli.cpu.faedkv.spectrum import Spectrum
from sparsekv_cli.cpu.freekv.pages import GROUPED, PageCache
from sparsekv_cli.cpu.jit.llvm import LANES
from sparsekv_cli.cpu.lfps.covariance import RowSums
from sparsekv_cli.cpu.lfps.history import BLOCK, Tables
from sparsekv_cli.cpu.lfps.scout import Scout
from sparsekv_cli.cpu.sals.latent import LatentStore, tile_bytes, words_of
from sparsekv_cli.methods.h2o import H2OCache
from sparsekv_cli.methods.quest import QuestCache
from sparsekv_cli.methods.sals import SALSCache

# Constants of a layer, arguments of kernels, outputs, and times.
SKIPPED = {
    "spec", "method", "_step", "_rules", "_basis", "_blocks", "_recurrence", "_out", "_waited",
    "_ahead", "_on_snapshot", "_announced", "_reserved", "_expected",
}  # fmt: skip


def state_of(cache: LayerCache) -> dict[str, Any]:
    """The state by names, each an array, a number or a text."""
    cache.counters()  # waits for what a thread does
    found: dict[str, Any] = {"counters": dict(cache.counters())}
    found["counters"].pop("us_waited", None)
    fields = {name: value for name, value in vars(cache).items() if name not in SKIPPED}
    fields["ledger"] = cache.ledger.counts
    if cache.attended is not None:
        rows, counts = cache.attended
        fields["attended"] = counts, [of[:n] for of, n in zip(rows, counts, strict=True)]
    if isinstance(cache, QuestCache):
        for name in ("_hi", "_lo"):
            fields[name] = fields[name][:, : cache._n_page]
    if isinstance(cache, H2OCache):
        for name in ("_positions", "_mass"):
            fields[name] = fields[name][:, : cache.store.n]
    if isinstance(cache, SALSCache):
        _crop_sals(cache, fields)
    _add(found, "", fields)
    return found


def _crop_sals(cache: SALSCache, fields: dict[str, Any]) -> None:
    exact, made = fields.pop("_exact"), fields.pop("_rows")
    if cache._latents is None:
        return
    slots = [*cache._sinks, *cache._slots_of(cache._ring_from, cache._n)]
    held = np.flatnonzero(cache._kept >= 0)
    fields |= {"exact": (exact.k[:, slots], exact.v[:, slots])}
    fields |= {"made": (made.k[:, held], made.v[:, held])}


def _pages(cache: PageCache) -> dict[str, Any]:
    pages, n_sink = cache.pages, cache.n_sink
    used = np.argwhere(pages.page_in >= 0)
    first = n_sink + cache.n_ring
    rows = KVStore.__new__(KVStore)
    width, width_v = 4 * pages.k.shape[3], 4 * pages.v.shape[3]
    n_kv, n_room = pages.k.shape[2], -(-cache.n // cache.page) * cache.page
    rows.k, rows.v = (np.zeros((n_kv, n_room, each), np.float16) for each in (width, width_v))
    rows.reserve = lambda n: None  # type: ignore[method-assign]
    cache.to_store(rows)
    n_page = cache.offloaded
    return {
        "rows": (rows.k, rows.v, cache.n, cache.offloaded),
        "slots": [(pages.k[first + s, :, g], pages.v[first + s, :, g]) for g, s in used],
        "summaries": (pages.hi[:, n_sink:n_page], pages.lo[:, n_sink:n_page]),
        "groups": [each[:, : n_page // GROUPED] for each in (pages.group_hi, pages.group_lo)],
        "slot_of": pages.slot_of[:, :n_page],
        "no other slot": int(pages.slot_of[:, n_page:].max(initial=-1)),
        "tables": pages[pages._fields.index("page_in") :],
    }


def _latents(latents: LatentStore) -> dict[str, Any]:
    n, n_words = latents.n, words_of(latents._shape[1])
    tiles = latents._scored.reshape(-1, tile_bytes(n_words) // (4 * LANES), LANES, 4)
    by_token = tiles.swapaxes(1, 2).reshape(-1, tiles.shape[1] * 4)[:n]
    return {"n": n, "scored": by_token, "records": latents._records[: n * latents._record]}


def _tables(tables: Tables) -> dict[str, Any]:
    """Entries without the zeros after the last block that has any."""
    last = max(int(np.nonzero(each.any(0))[0].max(initial=-1)) for each in tables[:2])
    n_block = last // BLOCK + 1
    bounds = [each[:, :n_block] for each in (tables.ver_bounds, tables.dist_bounds)]
    entries = [each[:, : n_block * BLOCK] for each in (tables.ver, tables.dist)]
    return {"bounds": bounds, "entries": entries, "sums": tables.sums, "gain": tables.gain}


def _rows(store: KVStore) -> dict[str, Any]:
    n, found = store.n, {"n": store.n, "v": store.v[:, : store.n]}
    if isinstance(store, SplitStore):
        width = padded(store.k_type.d)
        return found | {"k": store.whole_keys(n, width), "split": store.dom is not None}
    return found | {"k": store.k[:, :n]}


def _blocks(spectrum: BlockSpectrum) -> dict[str, Any]:
    group, lane = np.divmod(np.arange(spectrum.n_segments), LANES)
    rows = [spectrum._groups(each)[:, group, :, lane] for each in (spectrum.k, spectrum.v)]
    gains = spectrum._inverse[:, : spectrum.n_segments]
    return {"n": spectrum.n_tokens, "rows": rows, "gains": gains}


def _scout(codes: Scout) -> dict[str, Any]:
    known = codes.codes[:, : codes.n_parts]
    is_aimed = bool(codes.encode.any())
    return {"codes": known, "aim": (codes.encode, codes.directions, codes.mean) if is_aimed else ()}


# What is known of a class; the attributes of the others count.
PARTS = {
    KVStore: _rows, PageCache: _pages, LatentStore: _latents, Tables: _tables,
    BlockSpectrum: _blocks, Scout: _scout,
}  # fmt: skip
WHOLE = LastQueries, PastQueries, Checkpoints, FourierBasis, RowSums, Spectrum  # all attributes


def _add(found: dict[str, Any], name: str, value: Any) -> None:
    """Adds a value, or its parts, to what was found."""
    for kind, parts in PARTS.items():
        if isinstance(value, kind):
            value = parts(value)
    if isinstance(value, WHOLE):
        value = vars(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        for key, each in value.items():
            _add(found, f"{name}.{key}", each)
    elif isinstance(value, (list, tuple, deque)):
        found[f"{name} parts"] = len(value)
        for i, each in enumerate(value):
            _add(found, f"{name}[{i}]", each)
    elif is_dataclass(value) or callable(value):
        found[name] = type(value).__name__
    else:
        found[name] = value.copy() if isinstance(value, np.ndarray) else value


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names whose values differ in a byte, or that only one of two states has."""
    names = Counter([*one, *other])
    return [name for name in names if not _is_same(one.get(name), other.get(name))]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)
