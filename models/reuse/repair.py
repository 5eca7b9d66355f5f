"""Reading a prompt of which passages are known: their rows are moved, and some are computed again.

Source: CacheBlend (arXiv:2405.16444). A passage's rows were computed after another text. Its keys
are turned to their new positions. The rows that differ most from computed ones are computed again.

    rows        known, moved        new
    layer 0     all rows are computed
    layer 1     K and V of all rows are computed and compared: those that differ most are chosen
    1 .. last   new rows, and chosen rows

Computed rows replace the moved ones. They attend to all rows up to their own position.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.attend import attend_causal
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.forward import Forward, Part, Progress, cuts_of
from sparsekv_cli.models.rope import rotate_heads

PART = 16384  # rows whose residual stream exists at a time
REPAIR = 0.15  # the share that CacheBlend computes again, by default
TINY = 1e-30  # of a mean square, which no rows have


class Known(NamedTuple):
    """The rows of a prompt, from some position on, whose moved rows the caches hold.

    rows: bool (T,). repair: the share of them that is computed again, from 0 to 1.
    """

    rows: np.ndarray
    repair: float


def share_repaired(reuse: str, repair: float | None) -> float | None:
    """Returns the share of --reuse and --reuse-repair; None: only exact rows are reused.

    Raises SparseKVError for a share without effect, or out of range.
    """
    if reuse not in ("exact", "passages"):
        raise SparseKVError(f"reuse = {reuse!r}: must be exact or passages")
    if repair is not None and reuse == "exact":
        raise SparseKVError("--reuse-repair has no effect without --reuse passages")
    if repair is not None and not 0 <= repair <= 1:
        raise SparseKVError(f"--reuse-repair {repair:g}: must be a share from 0 to 1")
    share = REPAIR if repair is None else repair
    return None if reuse == "exact" else share


def check_movable(model: Any) -> None:
    """Raises SparseKVError if the rows of a loaded model cannot be moved, and says why."""
    hparams, engine, why = model.hparams, model.engine, ""
    if not engine.shares_prefill:
        why = "rows on a GPU are not moved; use --device cpu"
    elif hparams.other_layers:
        why = f"{hparams.other_layers} do not keep the rows of all tokens"
    elif hparams.sources or hparams.n_layer < 2:
        why = "its layers do not all have rows of their own, or there is one alone"
    elif engine.draft_specs:
        why = "its next-token block needs all tokens; use --speculate off"
    if why:
        raise SparseKVError(f"--reuse passages: {why}; or leave it out")


def turned(k: np.ndarray, distance: int, spec: LayerSpec) -> np.ndarray:
    """Returns keys f32 (G, T, d) whose tokens are moved by ``distance`` positions.

    It rotates each RoPE pair by distance * theta, without a magnitude.
    """
    angles = distance * spec.theta
    return rotate_heads(k, np.cos(angles)[None].astype("f4"), np.sin(angles)[None].astype("f4"))


def repair_steps(
    forward: Forward, ids: Sequence[int], pos: int, caches: Sequence[LayerCache], known: Known
) -> Generator[Progress, None, np.ndarray]:
    """Computes rows of ids, at ``pos`` and on. Yields after chunks and layers.

    The caches' stores have room for the rows, and the known ones are there. Returns the known rows
    that were computed again, bool (T,). It does not call ``finish_prefill``.
    """
    n, again = len(ids), np.zeros(len(ids), bool)
    forward.rope.reserve(pos + n)
    for first, last in pairwise(cuts_of(n, PART)):
        forward.prepare(n)
        part, at = known.rows[first:last], np.arange(pos + first, pos + last)
        rows = _Rows(forward, ids[first:last], at)
        share = (len(part) - part.sum() * (1 - known.repair)) / max(1, len(part))
        costs = np.cumsum([0, 1, *[share] * (len(caches) - 1)])  # of the layers
        for i, cache in enumerate(caches):
            if i == 1:
                chosen = rows.choose(cache, part, known.repair)
                again[first:last] = chosen & part
                rows.keep(chosen)
            begun, cost = costs[i], costs[i + 1] - costs[i]
            for done in rows.run(i, cache):
                at_now = first + (last - first) * (begun + cost * done) / costs[-1]
                yield Progress(int(at_now), n, False)
            yield Progress(int(first + (last - first) * costs[i + 1] / costs[-1]), n, True)
            forward.prepare(n)  # another forward pass may have run between two steps
    for cache in caches:
        cache.store.n = pos + n
    return again


class _Rows:
    """Some rows of a prompt, which go through the layers."""

    def __init__(self, forward: Forward, ids: Sequence[int], at: np.ndarray) -> None:
        """at: the positions of the rows, int64 (T,), ascending."""
        self._forward, self._at = forward, at
        self._x = forward.embed(ids)

    def keep(self, chosen: np.ndarray) -> None:
        """Goes on with some rows, bool (T,)."""
        self._x, self._at = self._x[chosen], self._at[chosen]

    def run(self, i: int, cache: LayerCache) -> Generator[float, None, None]:
        """Runs layer i. Yields the finished share of it after each chunk."""
        forward, n = self._forward, len(self._x)
        if not n:
            return
        products = forward.products(i)
        for start, stop in pairwise(cuts_of(n, forward.chunk)):
            x, at = self._x[start:stop], self._at[start:stop]
            forward.forward_chunk(i, products, x, at, cache, _attend, Part())
            forward.add_inputs(i, products, x, None, 0)
            yield stop / n
        forward.end_layer(i)

    def choose(self, cache: LayerCache, known: np.ndarray, repair: float) -> np.ndarray:
        """Returns the rows that go on, bool (T,): new rows, and known ones that differ most.

        cache: of layer 1.
        """
        chosen = ~known
        n_again = math.ceil(repair * int(known.sum()))
        if not n_again:
            return chosen
        forward, layer = self._forward, self._forward.layers[1]
        products, differences = forward.products(1), np.empty(len(known), np.float32)
        for start, stop in pairwise(cuts_of(len(known), forward.chunk)):
            at = self._at[start:stop]
            raw = products["qkv"](forward.rows.norm(self._x[start:stop], layer.attn_norm))
            x = forward.attention_inputs(1, products, raw, at)
            differences[start:stop] = difference(cache.store, at, x, known[start:stop])
        places = np.flatnonzero(known)
        order = np.argsort(-differences[places], kind="stable")
        chosen[places[order[:n_again]]] = True
        return chosen


def difference(store: KVStore, at: np.ndarray, x: AttnInput, known: np.ndarray) -> np.ndarray:
    """Returns how much computed K and V differ from the rows of a store at positions ``at``, (T,).

    It is the sum of the two squared distances, each in parts of the rows' mean square. known: bool
    (T,), the rows that the store has; the others' result is 0.
    """
    total = np.zeros(len(at), np.float32)
    if not known.any():
        return total
    for held, rows, new in ((store.k, store.k_type, x.k), (store.v, store.v_type, x.v)):
        computed = as_f32(new)[:, known]
        moved = rows.elements(np.ascontiguousarray(held[:, at[known]]))
        distance = np.square(moved - computed).sum((0, 2))
        total[known] += distance / (np.square(computed).sum((0, 2)).mean() + TINY)
    return total


def _attend(cache: LayerCache, x: AttnInput) -> Any:
    """Stores a chunk's rows at their positions. Returns their attention, as ``Forward.attend``."""
    cache.store.write(x.pos, x.k, x.v)
    return attend_causal(x.q, cache.store, cache.spec, x.pos + 1)
