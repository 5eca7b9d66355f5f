"""Fills the caches of several methods by one dense prefill; on a GPU by one prefill each."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Sequence as Ids
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.kinds import reserve
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.row_sizes import layer_bytes
from sparsekv_cli.cache.spec import FULL, AttnInput
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.sequence import Attention, Sequence
from sparsekv_cli.system.memory import available_memory

if TYPE_CHECKING:
    from sparsekv_cli.model import Model
    from sparsekv_cli.models.forward import OnProgress

N_TRIAL = 1100  # tokens of a trial's prompt: more than any default budget, so that all kernels run
N_TRIAL_STEPS = 3  # within so many steps a graph is captured and replayed
Keys = Ids[np.ndarray]  # one array a layer: the prompt's keys, f16 (G, n, row)


class FanOut:
    """One layer's caches of all methods, filled together by one prefill.

    own_s: for each method, the seconds of its own work, such as building its index. All layers add
    to it.
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
        """Adds the rows of x to all caches. Returns the store of the first cache."""
        rows = [self._timed(i, partial(cache.extend, x)) for i, cache in enumerate(self._caches)]
        return rows[0]

    def finish_prefill(self) -> None:
        for i, cache in enumerate(self._caches):
            self._timed(i, cache.finish_prefill)


class MethodPrefill(NamedTuple):
    """The end of a method's prefill, from which the method decodes."""

    logits: np.ndarray  # f32 (n_vocab,), after the prompt
    sequence: Sequence
    seconds: float  # of the prefill, without other methods' own work


def prefill_all(
    model: Model,
    methods: Ids[Method],
    ids: Ids[int],
    *,
    n_steps: int = 0,
    progress: OnProgress | None = None,
) -> list[MethodPrefill]:
    """Prefills ``ids`` once for all methods and makes room for ``n_steps`` more rows.

    Missing calibrations are made; ``Model.prepare`` makes them earlier, with a message. Raises
    SparseKVError if there is too little memory for all rows.
    """
    sequences = [new_sequence(model, method) for method in methods]
    own_s = [0.0] * len(methods)
    caches = [sequence.caches for sequence in sequences]
    reserve([cache for each in caches for cache in each], len(ids) + n_steps, is_checked=True)
    layers: Any = [FanOut(together, own_s) for together in zip(*caches, strict=True)]
    begin = time.perf_counter()
    logits = model.decoder.forward(ids, 0, layers, progress=progress)
    shared = time.perf_counter() - begin - sum(own_s)
    for sequence in sequences:
        sequence.tokens = list(ids)
    pairs = zip(sequences, own_s, strict=True)
    return [MethodPrefill(logits, sequence, shared + own) for sequence, own in pairs]


def new_sequence(model: Model, method: Method) -> Sequence:
    """Returns a sequence whose steps use ``method`` from the first row on."""
    return model.sequence(Attention(method, model.calibrations.specs(method), 0))


def prefill_alone(
    model: Model, method: Method, ids: Ids[int], n_steps: int, progress: OnProgress | None
) -> MethodPrefill:
    """Runs a prefill of ``ids`` for one method on a GPU, after a short trial of its kernels."""
    trial = new_sequence(model, method)
    trial.prefill(ids[:N_TRIAL])
    for _ in range(N_TRIAL_STEPS):
        trial.decode(ids[0])
    del trial  # freed before the next one
    sequence = new_sequence(model, method)
    for cache in sequence.caches:
        cache.reserve(len(ids) + n_steps)
    begin = time.perf_counter()
    logits = sequence.prefill(ids, progress)
    return MethodPrefill(logits, sequence, time.perf_counter() - begin)


def greedy_answer(
    sequence: Sequence, logits: np.ndarray, ends: Container[int], most: int
) -> Iterator[int]:
    """Yields at most ``most`` greedy tokens after ``logits``. It stops before a token in ends."""
    for n_left in range(most, 0, -1):
        token = int(logits.argmax())
        if token in ends:
            return
        yield token
        if n_left > 1:
            logits = sequence.decode(token)


def batches(
    model: Model, methods: Mapping[str, Method], n_rows: int, most_bytes: int | None
) -> Iterator[dict[str, Method]]:
    """Yields groups of methods whose K and V fit ``most_bytes``. The first method is in each group.

    n_rows: rows of a sequence. most_bytes: None for any number.
    """
    full = (layer for layer in model.hparams.layers if layer.kind == FULL)
    row_bytes = sum(layer_bytes(layer, "f16", "f16") for layer in full)
    size = len(methods)
    if most_bytes is not None:
        size = max(1, most_bytes // max(1, row_bytes * n_rows) - 1)
    (first, reference), *others = methods.items()
    for start in range(0, max(1, len(others)), size):
        yield {first: reference, **dict(others[start : start + size])}


def exact_keys(layers: Ids[LayerCache], n: int) -> Keys:
    """Returns the keys of the first n rows of each of ``full``'s caches, as views."""
    return [cache.store.k[:, :n] for cache in layers]


def prefill_each(
    model: Model,
    methods: Mapping[str, Method],
    ids: Ids[int],
    *,
    n_steps: int,
    progress: OnProgress | None = None,
) -> Iterator[tuple[str, MethodPrefill]]:
    """Yields (name, prefill) for each method.

    One pass serves as many methods as fit half the memory. A method's result does not depend on the
    others. ``full`` is the first in each pass, so that prompts attend to rows in f16. Its result is
    only yielded if it is in ``methods``. On a GPU each method has a pass of its own. The caller
    must release its caches before the next one. A method that cannot run there is refused before
    the first pass.
    """
    if not model.engine.shares_prefill:
        for method in methods.values():
            new_sequence(model, method)
        for name, method in methods.items():
            yield name, prefill_alone(model, method, ids, n_steps, progress)
        return
    full = build_method("full", {})
    lead = next((name for name, method in methods.items() if method == full), "")
    others = {name: method for name, method in methods.items() if name != lead}
    available = available_memory()
    most = None if available is None else available // 2
    for n, batch in enumerate(batches(model, {lead: full, **others}, len(ids) + n_steps, most)):
        group = list(batch.values())
        started = prefill_all(model, group, ids, n_steps=n_steps, progress=progress)
        if n or not lead:
            del batch[lead], started[0]
        for name in batch:
            yield name, started.pop(0)
