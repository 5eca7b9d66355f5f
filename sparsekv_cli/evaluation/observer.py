"""Measures how a method changes a model's logits, and how good the rows are that it attends to.

The rows are compared with exact attention to all keys of the sequence. The prompt's keys come from
the caches of ``full``. The keys of decoded rows are collected here.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import N_SINKS

MAX_BYPASS_ROWS = 11  # LFPS: a bypassed head attends to sinks, six local rows and the current one


@dataclass
class Measured:
    """The measurements of one method: a value a step, or a value a head and watched step."""

    kld: list[float] = field(default_factory=list)
    same_top1: list[bool] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    oracle: list[float] = field(default_factory=list)  # the mass of exact top-k with as many rows
    step_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # For each watched step, the means of ``overlap``, ``mass`` and ``oracle``. For each step, how
    # much it added to each count.
    by_step: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    # layer -> the mass f64 (H,) of each watched step
    by_layer: dict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    # number of values from steps that have ended
    _n_rated: Counter[str] = field(default_factory=Counter)

    def add_step(self, reference: np.ndarray, logits: np.ndarray) -> None:
        """Adds KLD(full || method) and the agreement in the likeliest token for one step.

        reference, logits: f32 (n_vocab,), of ``full`` and of the method.
        """
        expected, actual = log_softmax(reference), log_softmax(logits)
        # A dot product would start threads of BLAS, which wait for each other most of the time.
        self.kld.append(float((np.exp(expected) * (expected - actual)).sum()))
        self.same_top1.append(bool(expected.argmax() == actual.argmax()))

    def rate(self, layer: int, overlap: list[float], mass: np.ndarray, oracle: np.ndarray) -> None:
        """Adds the results of ``compare_rows`` for one layer in one step."""
        self.overlap.extend(overlap)
        self.mass.extend(mass.tolist())
        self.oracle.extend(oracle.tolist())
        self.by_layer[layer].append(mass)

    def end_step(self, added: Mapping[str, int]) -> None:
        """Ends a step of all layers. added: how much the step added to each count."""
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
    """Stands in for a layer's cache and compares its steps with exact attention while ``active``.

    It collects the keys of decoded rows itself, because a method may change or drop them.
    """

    attends_together = False  # each step must call ``decode``

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
        """Stores the key (G, d) of a decoded row."""
        if self._n_tail == self._tail.shape[1]:
            self._tail = np.concatenate([self._tail, np.empty_like(self._tail)], axis=1)
        self._tail[:, self._n_tail] = k
        self._n_tail += 1

    def rate(self, q: np.ndarray, attended: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Measures a step. q: f32 (H, d); attended: see ``compare_rows``."""
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
    """Returns, for each head, overlap with exact top-k, attended mass, and mass of exact top-k.

    q f32 (H, d), k f16 (G, n, d), tail f16 (G, m, d): keys of the rows after those of k. attended:
    rows int32 (U, m) and counts (U,), U = H, G or 1. None: all rows; then there is no overlap. k of
    top-k is the number of attended rows. A head with at most ``ignored`` rows has a mass but no
    overlap. Sinks do not count in the overlap.
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
