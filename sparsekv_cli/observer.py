"""What a method does to a model's answers, and what its sparse layers attend to.

Attended rows are compared with exact attention over the sequence's exact keys: those of the prompt
come from the caches of ``full``, those of decoded rows are kept here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparsekv_cli.cache import N_SINKS, LayerCache

MAX_BYPASS_ROWS = 11  # LFPS: sinks, six local rows and the current one


@dataclass
class Measured:
    """What one method gave: a value a step, or a head and watched step."""

    kld: list[float] = field(default_factory=list)
    same_top1: list[bool] = field(default_factory=list)
    overlap: list[float] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add_step(self, reference: np.ndarray, logits: np.ndarray) -> None:
        """KLD(full || method) and top-1 of one step; logits f32 (n_vocab,)."""
        expected, actual = log_softmax(reference), log_softmax(logits)
        self.kld.append(float(np.exp(expected) @ (expected - actual)))
        self.same_top1.append(bool(expected.argmax() == actual.argmax()))


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


class Observer:
    """A layer's cache whose decode steps are compared with exact attention while ``active``.

    It keeps the keys of the decoded rows itself, behind those of the prompt, because a method may
    keep them in another form or not at all.
    """

    def __init__(self, cache: LayerCache, keys: np.ndarray, result: Measured) -> None:
        self._cache, self._keys, self._result = cache, keys, result
        self._tail = np.empty((keys.shape[0], 64, keys.shape[2]), np.float16)
        self._n_tail = 0
        self._ignored = MAX_BYPASS_ROWS if "heads_bypassed" in cache.counters() else 0

    @property
    def active(self) -> bool:
        return self._cache.traced

    @active.setter
    def active(self, value: bool) -> None:
        self._cache.traced = value

    def decode(self, x: Any) -> np.ndarray:
        if self._n_tail == self._tail.shape[1]:
            self._tail = np.concatenate([self._tail, np.empty_like(self._tail)], axis=1)
        self._tail[:, self._n_tail] = x.k[:, 0]
        self._n_tail += 1
        if not self.active:
            return self._cache.decode(x)
        q = x.q[:, 0].copy()
        out = self._cache.decode(x)
        cache, tail = self._cache, self._tail[:, : self._n_tail]
        overlap, mass = compare_rows(
            q, self._keys, cache.attended, float(cache.spec.scale), self._ignored, tail
        )
        self._result.overlap.extend(overlap)
        self._result.mass.extend(mass)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def compare_rows(
    q: np.ndarray,
    k: np.ndarray,
    attended: tuple[np.ndarray, np.ndarray] | None,
    scale: float,
    ignored: int = 0,
    tail: np.ndarray | None = None,
) -> tuple[list[float], list[float]]:
    """Overlap with exact top-k, and softmax mass, of each head's attended rows.

    q f32 (H, d), k f16 (G, n, d), tail f16 (G, m, d): rows behind those of k; attended: rows int
    (U, m) and their counts (U,), U = H, G or 1; None: every row, which has no overlap to speak of.
    A head of at most ``ignored`` rows has mass and no overlap. Sinks do not count in the overlap.
    """
    import torch

    if attended is None:
        return [], [1.0] * len(q)
    queries = torch.from_numpy(q).reshape(len(k), -1, q.shape[1])
    parts = [k] if tail is None else [k, tail]
    scores = torch.cat(
        [queries @ torch.from_numpy(part).float().transpose(1, 2) for part in parts], dim=2
    )
    scores = (scores * scale).reshape(len(q), -1)  # (H, n + m)
    weights = scores.softmax(-1).numpy()
    overlap, mass = [], []
    idx, counts = attended
    for head in range(len(q)):
        unit = head * len(counts) // len(q)
        rows = idx[unit, : counts[unit]]
        mass.append(float(weights[head, rows].sum()))
        chosen = rows[rows >= N_SINKS]
        if len(rows) <= ignored or not len(chosen):
            continue
        best = scores[head, N_SINKS:].topk(len(chosen), sorted=False).indices.numpy() + N_SINKS
        is_best = np.zeros(scores.shape[1], np.bool_)
        is_best[best] = True
        overlap.append(float(is_best[chosen].mean()))
    return overlap, mass
