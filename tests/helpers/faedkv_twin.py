"""FAEDKV step by step as docs/methods.md numbers it, in numpy f64: slow, literal, no shared code.

All tokens are kept; what a step attends to is built from them anew: sinks, every segment through
its whole DFT (no rfft, no projection) with the other bins set to 0, recent rows.
Letters: H query heads, G kv heads, n tokens, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

C = 22


@dataclass(frozen=True)
class TwinOptions:
    """The options that change what is computed, as in the method; share: of this layer."""

    share: float
    update: str = "block"
    block: int = 128
    sinks: int = 10
    recent: int = 50


@dataclass
class Segment:
    """Tokens first .. first + filled of the sequence, in a basis of ``length``."""

    first: int
    filled: int
    length: int


class FAEDKVTwin:
    """One layer: ``prefill`` for every turn, ``step`` for every token."""

    def __init__(self, options: TwinOptions, importance: np.ndarray, n_head: int, n_head_kv: int):
        self.options, self.importance = options, importance
        self.n_head, self.group = n_head, n_head // n_head_kv
        self.k = self.v = np.zeros((n_head_kv, 0, 0))
        self.segments: list[Segment] = []
        self._rebuilt: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    @property
    def first_exact(self) -> int:
        """The first token behind the sinks that is not in a segment."""
        return self.options.sinks + sum(segment.filled for segment in self.segments)

    def prefill(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Dense attention f64 (H, T, d_v) of T new rows, to old tokens as segments have them."""
        n_past, n_new = self.k.shape[1], k.shape[1]
        self._append(k, v)
        keys, values = self.view()
        out = np.empty((self.n_head, n_new, v.shape[2]))
        for i in range(n_new):
            out[:, i] = self._attend(q[:, i], keys[:, : n_past + i + 1], values)
        self._age()
        return out

    def step(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """One token: q (H, d), k (G, d), v (G, d_v) -> (H, d_v)."""
        self._append(k[:, None], v[:, None])
        least = self.options.block if self.options.update == "block" else 8
        if self.k.shape[1] - self.options.recent - self.first_exact >= least:
            self._age()
        return self._attend(q, *self.view())

    def _append(self, k: np.ndarray, v: np.ndarray) -> None:
        if not self.k.shape[1]:
            self.k, self.v = k.astype(np.float64), v.astype(np.float64)
        else:
            self.k = np.concatenate([self.k, k], axis=1)
            self.v = np.concatenate([self.v, v], axis=1)

    def _age(self) -> None:
        """Puts tokens that are no longer recent into segments."""
        o = self.options
        least = o.block if o.update == "block" else 8
        aged = self.k.shape[1] - o.recent - self.first_exact
        if aged < least:
            return
        while aged >= (o.block if o.update == "block" else 1):
            last = self.segments[-1] if self.segments else Segment(0, 0, 0)
            if o.update == "additive" and last.filled < last.length:
                count = min(aged, last.length - last.filled)
                last.filled += count
            elif aged < 512 or o.update == "block":
                count = min(aged, o.block)
                self.segments.append(Segment(self.first_exact, count, o.block))
            else:
                count, length = aged, aged + o.block
                while not good_length(length):
                    length += 1
                self.segments.append(Segment(self.first_exact, count, length))
            aged -= count

    def view(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V as they are attended to, (G, n, d)."""
        keys, values = self.k.copy(), self.v.copy()
        for segment in self.segments:
            tokens = slice(segment.first, segment.first + segment.filled)
            key = (segment.first, segment.filled)
            if key not in self._rebuilt:
                self._rebuilt[key] = (
                    self.filtered(self.k[:, tokens], segment.length),
                    self.filtered(self.v[:, tokens], segment.length),
                )
            keys[:, tokens], values[:, tokens] = self._rebuilt[key]
        return keys, values

    def filtered(self, x: np.ndarray, length: int) -> np.ndarray:
        """x (G, m, d) through the DFT of ``length`` points with only the kept bins."""
        m = x.shape[1]
        bins = self.kept(length)
        if bins == {0}:
            return np.repeat(x.mean(1, keepdims=True), m, axis=1)
        both = sorted({k for low in bins for k in (low, -low % length)})
        n = np.arange(m)
        forward = np.exp(-2j * np.pi * (np.outer(both, n) % length) / length)
        coefficients = np.einsum("kn,gnd->gkd", forward, x)
        rebuilt = np.einsum("kn,gkd->gnd", forward.conj(), coefficients) / length
        assert np.abs(rebuilt.imag).max() < 1e-9
        return rebuilt.real

    def kept(self, length: int) -> set[int]:
        """Bins 0 .. length // 2 that are kept: whole chunks by importance, the last one cut."""
        n_bins = length // 2 + 1
        wanted = 1 if self.options.share <= 0.001 else max(1, round(self.options.share * n_bins))
        bins: list[int] = []
        for c in sorted(range(C), key=lambda c: (-self.importance[c], c)):
            bins += range(c * n_bins // C, (c + 1) * n_bins // C)
        return set(bins[:wanted])

    def _attend(self, q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        out = np.empty((self.n_head, values.shape[2]))
        for h in range(self.n_head):
            g = h // self.group
            scores = keys[g] @ q[h].astype(np.float64) / np.sqrt(keys.shape[2])
            weights = np.exp(scores - scores.max())
            out[h] = weights @ values[g, : keys.shape[1]] / weights.sum()
        return out


def good_length(n: int) -> bool:
    """Whether n is a product of two factors of 16 or more, and of primes up to 5."""
    rest = n
    for prime in (2, 3, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1 and any(n % i == 0 and n // i >= 16 for i in range(16, n // 16 + 1))
