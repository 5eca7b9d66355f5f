"""One dense prefill that fills the caches of several methods; on a GPU, a prefill for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Sequence as Ids
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparsekv_cli.cache.kinds import reserve
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

    own_s: sums of the seconds that each method spends on its own work, such as its index.
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
        """Adds the rows to all caches. Returns the store of the first one. Types may differ."""
        rows = [self._timed(i, partial(cache.extend, x)) for i, cache in enumerate(self._caches)]
        return rows[0]

    def finish_prefill(self) -> None:
        for i, cache in enumerate(self._caches):
            self._timed(i, cache.finish_prefill)


class MethodPrefill(NamedTuple):
    """The start of one method's decoding."""

    logits: np.ndarray  # f32 (n_vocab,) after the prompt
    sequence: Sequence
    seconds: float  # of the prefill, without the other methods' own work


def prefill_all(
    model: Model,
    methods: Ids[Method],
    ids: Ids[int],
    *,
    n_steps: int = 0,
    progress: OnProgress | None = None,
) -> list[MethodPrefill]:
    """Prefills ``ids`` once for all methods and makes room for ``n_steps`` more rows.

    The methods are calibrated if necessary. ``Model.prepare`` does that beforehand with a remark.
    Raises SparseKVError if there is no memory for their rows.
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
    """Returns a sequence that attends with ``method`` from the first row on."""
    return model.sequence(Attention(method, model.calibrations.specs(method), 0))


def prefill_alone(
    model: Model, method: Method, ids: Ids[int], n_steps: int, progress: OnProgress | None
) -> MethodPrefill:
    """Runs a prefill for one method on a GPU, after a trial of its kernels."""
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
    """Yields the greedy tokens after ``logits``, up to one of ``ends``; it is not yielded."""
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
    """Yields groups of methods that fit ``most_bytes`` of K and V. The first leads each group."""
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
    """Returns the keys of the first n rows of ``full``'s caches. They outlive the caches."""
    return [cache.store.k[:, :n] for cache in layers]


def prefill_each(
    model: Model,
    methods: Mapping[str, Method],
    ids: Ids[int],
    *,
    n_steps: int,
    progress: OnProgress | None = None,
) -> Iterator[tuple[str, MethodPrefill]]:
    """Yields a prefill by the name of each method. One pass serves as many as fit half the memory.

    A method's result does not depend on the others. ``full`` leads every prefill, so that prompts
    attend to rows in f16. It is a result only if it is in ``methods``. On a GPU each method has its
    own prefill. Its caches must be released before the next method starts. A method that cannot run
    there is refused before all prefills.
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
