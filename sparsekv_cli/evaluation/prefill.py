"""One dense prefill that fills the caches of several methods; on a GPU, a prefill for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.kinds import share_rows
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import FULL, AttnInput
from sparsekv_cli.cache.store import padded
from sparsekv_cli.memory import available_memory
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method

if TYPE_CHECKING:
    from sparsekv_cli.session import Progress, Session

N_TRIAL = 1100  # tokens of a prompt that kernels are tried on: more than any default budget
N_TRIAL_STEPS = 3  # a graph is captured and replayed by then
Keys = Sequence[np.ndarray]  # one a layer: the prompt's keys, f16 (G, n, row)


class FanOut:
    """One layer's caches of all methods, filled by one prefill.

    own_s: seconds that each method spends on its own work, such as its index; added to.
    """

    can_prefill_in_parts = False  # a method may drop or compress its rows in ``finish_prefill``

    def __init__(self, caches: Sequence[LayerCache], own_s: list[float]) -> None:
        self._caches, self._own_s = caches, own_s
        self.spec = caches[0].spec

    def _timed(self, i: int, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        out = call()
        self._own_s[i] += time.perf_counter() - begin
        return out

    def extend(self, x: AttnInput) -> Any:
        """Adds the rows to all caches; returns the first one's, whatever types the others store."""
        rows = [self._timed(i, partial(cache.extend, x)) for i, cache in enumerate(self._caches)]
        return rows[0]

    def finish_prefill(self) -> None:
        for i, cache in enumerate(self._caches):
            self._timed(i, cache.finish_prefill)


class SharedPrefill(NamedTuple):
    """The result of one prefill for all methods.

    seconds: one a method: the time of the prefill without the other methods' own work.
    """

    logits: np.ndarray  # f32 (n_vocab,) after the prompt
    caches: list[list[LayerCache]]  # a list a method
    seconds: list[float]


def prefill_all(
    session: Session,
    methods: Sequence[Method],
    ids: Sequence[int],
    *,
    n_steps: int = 0,
    progress: Progress | None = None,
) -> SharedPrefill:
    """Prefills ``ids`` for all methods and makes room for ``n_steps`` more rows.

    The methods are calibrated if need be; ``Session.prepare`` does it beforehand and says so.
    """
    caches = [
        [method.layer(spec) for spec in session.calibrations.specs(method)] for method in methods
    ]
    for layers_of_one in caches:
        share_rows(layers_of_one)
    for cache in (cache for layers in caches for cache in layers):
        cache.reserve(len(ids) + n_steps)
    own_s = [0.0] * len(methods)
    layers: Any = [FanOut(together, own_s) for together in zip(*caches, strict=True)]
    begin = time.perf_counter()
    logits = session.decoder.forward(ids, 0, layers, progress=progress)
    shared = time.perf_counter() - begin - sum(own_s)
    return SharedPrefill(logits, caches, [shared + own for own in own_s])


class MethodPrefill(NamedTuple):
    """What one method starts to decode from."""

    logits: np.ndarray  # f32 (n_vocab,) after the prompt
    caches: list[LayerCache]  # one a layer
    seconds: float


def prefills(
    session: Session,
    methods: Sequence[Method],
    ids: Sequence[int],
    *,
    n_steps: int,
    progress: Progress | None = None,
) -> Iterator[MethodPrefill]:
    """One ``prefill_all`` for all methods; where caches lie on a GPU, a prefill for each method.

    On a GPU each method's kernels are tried first, and its caches must be released when the next
    method's turn comes. A method that cannot run there is refused ahead of all prefills.
    """
    if session.engine.shares_prefill:
        together = prefill_all(session, methods, ids, n_steps=n_steps, progress=progress)
        for i, seconds in enumerate(together.seconds):
            layers, together.caches[i] = together.caches[i], []
            yield MethodPrefill(together.logits, layers, seconds)
            del layers
        return

    def new_caches(method: Method) -> list[LayerCache]:
        specs = session.calibrations.specs(method)
        layers = [session.engine.layer(method, spec) for spec in specs]
        share_rows(layers)
        return layers

    def try_kernels(method: Method) -> None:
        layers, trial = new_caches(method), ids[:N_TRIAL]
        session.decoder.forward(trial, 0, layers)
        for pos in range(len(trial), len(trial) + N_TRIAL_STEPS):
            session.decoder.decode(ids[0], pos, layers)

    def prefilled(method: Method) -> MethodPrefill:
        layers = new_caches(method)
        for cache in layers:
            cache.reserve(len(ids) + n_steps)
        begin = time.perf_counter()
        logits = session.decoder.forward(ids, 0, layers, progress=progress)
        return MethodPrefill(logits, layers, time.perf_counter() - begin)

    for method in methods:
        new_caches(method)
    for method in methods:
        try_kernels(method)
        yield prefilled(method)


def batches(
    session: Session, methods: Mapping[str, Method], n_rows: int, most_bytes: int | None
) -> Iterator[dict[str, Method]]:
    """``methods`` in groups that take at most ``most_bytes`` of K and V, each led by the first."""
    row_bytes = sum(
        2 * (padded(layer.head_dim) + padded(layer.value_dim)) * layer.n_head_kv
        for layer in session.hparams.layers
        if layer.kind == FULL
    )
    size = len(methods)
    if most_bytes is not None:
        size = max(1, most_bytes // max(1, row_bytes * n_rows) - 1)
    (first, reference), *others = methods.items()
    for start in range(0, max(1, len(others)), size):
        yield {first: reference, **dict(others[start : start + size])}


def resume(session: Session, ids: Sequence[int], caches: Sequence[Any]) -> None:
    """Makes the session continue behind ``ids`` with ``caches`` that hold them."""
    session.tokens, session.caches, session.checkpoint = list(ids), list(caches), None


def exact_keys(layers: Sequence[LayerCache], n: int) -> Keys:
    """The keys of the first ``n`` rows in the caches of ``full``; valid when those are gone."""
    return [cache.store.k[:, :n] for cache in layers]


def prefill_each(
    session: Session,
    methods: Mapping[str, Method],
    ids: Sequence[int],
    *,
    n_steps: int,
    progress: Progress | None = None,
) -> Iterator[tuple[str, MethodPrefill]]:
    """``prefills`` by the names of the methods, of as many at once as half the memory holds.

    What a method gets does not depend on the others: ``full``, which is not among the results
    unless it is asked for, leads every prefill, so that prompts attend to rows in f16.
    """
    if not session.engine.shares_prefill:
        started = prefills(session, list(methods.values()), ids, n_steps=n_steps, progress=progress)
        for name in methods:
            yield name, next(started)  # nobody here keeps it when the next one is made
        return
    full = build_method("full", {})
    lead = next((name for name, method in methods.items() if method == full), None)
    others = {name: method for name, method in methods.items() if name != lead}
    available = available_memory()
    most = None if available is None else available // 2
    for n, batch in enumerate(batches(session, {"": full, **others}, len(ids) + n_steps, most)):
        group = list(batch.values())
        started = prefills(session, group, ids, n_steps=n_steps, progress=progress)
        for name in batch:
            if name:
                yield name, next(started)
            elif lead is not None and n == 0:
                yield lead, next(started)
            else:
                next(started)
