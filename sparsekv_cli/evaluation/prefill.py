"""One dense prefill that fills the caches of several methods; on a GPU, a prefill for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Ids
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import FULL, AttnInput
from sparsekv_cli.cache.store import padded
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.sequence import Attention, Sequence
from sparsekv_cli.system.memory import available_memory

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.forward import OnProgress

N_TRIAL = 1100  # tokens of a prompt that kernels are tried on: more than any default budget
N_TRIAL_STEPS = 3  # a graph is captured and replayed by then
Keys = Ids[np.ndarray]  # one a layer: the prompt's keys, f16 (G, n, row)


class FanOut:
    """One layer's caches of all methods, filled by one prefill.

    own_s: seconds that each method spends on its own work, such as its index; added to.
    """

    can_prefill_in_parts = False  # a method may drop or compress its rows in ``finish_prefill``

    def __init__(self, caches: Ids[LayerCache], own_s: list[float]) -> None:
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
    """The result of one prefill for all methods."""

    logits: np.ndarray  # f32 (n_vocab,) after the prompt
    sequences: list[Sequence]  # one a method
    seconds: list[float]  # of the prefill without the other methods' own work, one a method


def prefill_all(
    model: Model,
    methods: Ids[Method],
    ids: Ids[int],
    *,
    n_steps: int = 0,
    progress: OnProgress | None = None,
) -> SharedPrefill:
    """Prefills ``ids`` for all methods and makes room for ``n_steps`` more rows.

    The methods are calibrated if need be; ``Model.prepare`` does it beforehand and says so.
    """
    sequences = [new_sequence(model, method) for method in methods]
    for cache in (cache for sequence in sequences for cache in sequence.caches):
        cache.reserve(len(ids) + n_steps)
    own_s = [0.0] * len(methods)
    caches = [sequence.caches for sequence in sequences]
    layers: Any = [FanOut(together, own_s) for together in zip(*caches, strict=True)]
    begin = time.perf_counter()
    logits = model.decoder.forward(ids, 0, layers, progress=progress)
    shared = time.perf_counter() - begin - sum(own_s)
    for sequence in sequences:
        sequence.tokens = list(ids)
    return SharedPrefill(logits, sequences, [shared + own for own in own_s])


def new_sequence(model: Model, method: Method) -> Sequence:
    """Returns a sequence that attends with ``method`` from the first row on."""
    return model.sequence(Attention(method, model.calibrations.specs(method), 0))


class MethodPrefill(NamedTuple):
    """The start of one method's decoding."""

    logits: np.ndarray  # f32 (n_vocab,) after the prompt
    sequence: Sequence
    seconds: float


def prefills(
    model: Model,
    methods: Ids[Method],
    ids: Ids[int],
    *,
    n_steps: int,
    progress: OnProgress | None = None,
) -> Iterator[MethodPrefill]:
    """One ``prefill_all`` for all methods; where caches lie on a GPU, a prefill for each method.

    On a GPU each method's kernels are tried first. Its caches must be released before the next
    method begins. A method that cannot run there is refused ahead of all prefills.
    """
    if model.engine.shares_prefill:
        together = prefill_all(model, methods, ids, n_steps=n_steps, progress=progress)
        together.sequences.reverse()
        for seconds in together.seconds:
            yield MethodPrefill(together.logits, together.sequences.pop(), seconds)
        return

    def try_kernels(method: Method) -> None:
        sequence, trial = new_sequence(model, method), ids[:N_TRIAL]
        sequence.prefill(trial)
        for _ in range(N_TRIAL_STEPS):
            sequence.decode(ids[0])

    def prefilled(method: Method) -> MethodPrefill:
        sequence = new_sequence(model, method)
        for cache in sequence.caches:
            cache.reserve(len(ids) + n_steps)
        begin = time.perf_counter()
        logits = sequence.prefill(ids, progress)
        return MethodPrefill(logits, sequence, time.perf_counter() - begin)

    for method in methods:
        new_sequence(model, method)
    for method in methods:
        try_kernels(method)
        yield prefilled(method)


def batches(
    model: Model, methods: Mapping[str, Method], n_rows: int, most_bytes: int | None
) -> Iterator[dict[str, Method]]:
    """``methods`` in groups that take at most ``most_bytes`` of K and V, each led by the first."""
    row_bytes = sum(
        2 * (padded(layer.head_dim) + padded(layer.value_dim)) * layer.n_head_kv
        for layer in model.hparams.layers
        if layer.kind == FULL
    )
    size = len(methods)
    if most_bytes is not None:
        size = max(1, most_bytes // max(1, row_bytes * n_rows) - 1)
    (first, reference), *others = methods.items()
    for start in range(0, max(1, len(others)), size):
        yield {first: reference, **dict(others[start : start + size])}


def exact_keys(layers: Ids[LayerCache], n: int) -> Keys:
    """The keys of the first ``n`` rows in the caches of ``full``; valid when those are gone."""
    return [cache.store.k[:, :n] for cache in layers]


def prefill_each(
    model: Model,
    methods: Mapping[str, Method],
    ids: Ids[int],
    *,
    n_steps: int,
    progress: OnProgress | None = None,
) -> Iterator[tuple[str, MethodPrefill]]:
    """``prefills`` by the names of the methods, of as many at once as half the memory holds.

    A method's result does not depend on the others. ``full`` leads every prefill, so that prompts
    attend to rows in f16. It is among the results only if it is asked for.
    """
    if not model.engine.shares_prefill:
        started = prefills(model, list(methods.values()), ids, n_steps=n_steps, progress=progress)
        for name in methods:
            yield name, next(started)  # nobody here keeps it when the next one is made
        return
    full = build_method("full", {})
    lead = next((name for name, method in methods.items() if method == full), None)
    others = {name: method for name, method in methods.items() if name != lead}
    available = available_memory()
    most = None if available is None else available // 2
    for n, batch in enumerate(batches(model, {"": full, **others}, len(ids) + n_steps, most)):
        group = list(batch.values())
        started = prefills(model, group, ids, n_steps=n_steps, progress=progress)
        for name in batch:
            if name:
                yield name, next(started)
            elif lead is not None and n == 0:
                yield lead, next(started)
            else:
                next(started)
