"""Measures how a method changes a model's answers, and how good its attended rows are.

Attended rows are compared with exact attention over the sequence's exact keys. The caches of
``full`` give the prompt's keys. The keys of decoded rows are kept here.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import N_SINKS

MAX_BYPASS_ROWS = 11  # LFPS: sinks, six local rows and the current one


@dataclass
class Measured:
    """Measurements of one method: a value a step, or a value a head and watched step."""

    kld: list[float] = field(default_factory=list)
    same_top1: list[bool] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    oracle: list[float] = field(default_factory=list)  # the mass of exact top-k with as many rows
    step_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # For each watched step the means of ``overlap``, ``mass`` and ``oracle``, and what it added to
    # each count.
    by_step: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # the mass f64 (H,) in each watched step
    by_layer: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    _n_rated: Counter[str] = field(default_factory=Counter)  # values in steps that have ended

    def add_step(self, reference: np.ndarray, logits: np.ndarray) -> None:
        """Adds KLD(full || method) and top-1 of one step; logits f32 (n_vocab,)."""
        expected, actual = log_softmax(reference), log_softmax(logits)
        # No dot product: threads of BLAS would wait for each other for longer than they work.
        self.kld.append(float((np.exp(expected) * (expected - actual)).sum()))
        self.same_top1.append(bool(expected.argmax() == actual.argmax()))

    def rate(self, layer: int, overlap: list[float], mass: np.ndarray, oracle: np.ndarray) -> None:
        """Adds the results of ``compare_rows`` for a layer's step."""
        self.overlap.extend(overlap)
        self.mass.extend(mass.tolist())
        self.oracle.extend(oracle.tolist())
        self.by_layer[layer].append(mass)

    def end_step(self, added: Mapping[str, int]) -> None:
        """Ends a step of all layers. Its arguments are the step's additions to the counts."""
        for name in ("overlap", "mass", "oracle"):
            values = getattr(self, name)[self._n_rated[name] :]
            if values:
                self.by_step[name].append(float(np.mean(values)))
            self._n_rated[name] += len(values)
        for name, count in added.items():
            self.by_step[name].append(count)
        self.counts.update(added)


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class Observer:
    """A layer's cache whose decode steps are compared with exact attention while ``active``.

    It keeps the keys of the decoded rows itself, after those of the prompt. A method may keep them
    in another form or not at all.
    """

    attends_together = False  # each step goes through ``decode``

    def __init__(self, cache: LayerCache, keys: np.ndarray, result: Measured) -> None:
        self.cache, self._keys, self._result = cache, keys, result
        self._tail = np.empty((keys.shape[0], 64, keys.shape[2]), np.float16)
        self._n_tail = 0
        self._ignored = MAX_BYPASS_ROWS if "heads_bypassed" in cache.counters() else 0

    @property
    def active(self) -> bool:
        return self.cache.records_attended

    @active.setter
    def active(self, value: bool) -> None:
        self.cache.records_attended = value

    def decode(self, x: Any) -> np.ndarray:
        self.keep_key(x.k[:, 0])
        if not self.active:
            return self.cache.decode(x)
        q = x.q[:, 0].copy()
        out = self.cache.decode(x)
        self.rate(q, self.cache.attended)
        return out

    def keep_key(self, k: np.ndarray) -> None:
        """Notes the key of a decoded row, (G, d)."""
        if self._n_tail == self._tail.shape[1]:
            self._tail = np.concatenate([self._tail, np.empty_like(self._tail)], axis=1)
        self._tail[:, self._n_tail] = k
        self._n_tail += 1

    def rate(self, q: np.ndarray, attended: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Measures a step of query f32 (H, d); attended as in ``compare_rows``."""
        spec, tail = self.cache.spec, self._tail[:, : self._n_tail]
        rated = compare_rows(
            q, self._keys, attended, float(spec.scale), self._ignored, tail, spec.n_threads,
            float(spec.softcap),
        )  # fmt: skip
        self._result.rate(spec.layer, *rated)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def compare_rows(
    q: np.ndarray,
    k: np.ndarray,
    attended: tuple[np.ndarray, np.ndarray] | None,
    scale: float,
    ignored: int = 0,
    tail: np.ndarray | None = None,
    n_threads: int = 1,
    softcap: float = 0.0,
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Returns each head's overlap with exact top-k, mass, and top-k's mass.

    q f32 (H, d), k f16 (G, n, d), tail f16 (G, m, d): the rows after those of k. attended: rows
    int32 (U, m) and their counts (U,), U = H, G or 1. None: all rows, which have no overlap. A head
    of at most ``ignored`` rows has mass and no overlap. Sinks do not count in the overlap.
    """
    from sparsekv_cli.cpu.coverage import rate_rows

    if attended is None:
        return [], np.ones(len(q)), np.ones(len(q))
    tail = k[:, :0] if tail is None else tail
    idx, counts = attended
    n_chosen, n_best = np.empty((2, len(q)), np.int64)
    mass, best_mass = np.empty((2, len(q)))
    (k_at, k_head), (tail_at, tail_head) = (
        (keys.__array_interface__["data"][0], keys.strides[0]) for keys in (k, tail)
    )
    rate_rows(
        q, k_at, k_head, k.shape[1], tail_at, tail_head, tail.shape[1], k.strides[1], len(k), scale,
        softcap, np.ascontiguousarray(idx), counts, N_SINKS, n_chosen, n_best, mass, best_mass,
        n_threads,
    )  # fmt: skip
    rows = counts.repeat(len(q) // len(counts))
    rated = (n_chosen > 0) & (rows > ignored)
    return (n_best[rated] / n_chosen[rated]).tolist(), mass, best_mass
