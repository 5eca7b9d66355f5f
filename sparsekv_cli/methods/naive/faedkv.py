"""FAEDKV, naively ("Infinite-Window Fourier Transform", Li et al.).

| paper | here |
|---|---|
| eq 4, 5, DFT of the middle segment and back | NaiveFAEDKV.filtered |
| section 4.2.1, the chunks B* that are kept | NaiveFAEDKV.kept_bins |
| eq 9, 12, update of aged tokens | NaiveFAEDKV.age |
| eq 11, 13, attention | Naive.attend over ``view`` |

K and V stay whole. For attention, ``view`` replaces the rows of each segment by their DFT and back,
with only the kept bins. Letters: S sinks, R recent tokens, C chunks of bins, r share of the bins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.cache.spec import AttnInput, LayerSpec
from sparsekv_cli.calibration.allocation import layer_share
from sparsekv_cli.methods.naive.base import Choice, Naive

if TYPE_CHECKING:
    from sparsekv_cli.methods.faedkv import FAEDKV

C = 22
AGED_TOGETHER = 8  # tokens that an additive update adds together
ONE_BASIS_FROM = 512  # with so many aged tokens, a new basis has their own length


@dataclass
class NaiveSegment:
    """Tokens first .. first + filled - 1, which share a DFT of ``length`` points."""

    first: int
    filled: int
    length: int


class NaiveFAEDKV(Naive):
    """The segments of a layer. They lie between the sinks and the exact last tokens."""

    method: FAEDKV

    def __init__(self, method: FAEDKV, spec: LayerSpec) -> None:
        super().__init__(method, spec)
        self.importance = spec.calibration[f"imp_{method.importance}"]
        self.segments: list[NaiveSegment] = []
        self.share = self.of_layer(method.budget.share or 0.0)  # r; 0: not known yet
        self.start: tuple[int, list[NaiveSegment], float] = (0, [], self.share)
        self.filtered_rows: dict[tuple[int, int], np.ndarray] = {}

    def of_layer(self, share: float) -> float:
        if not share or self.method.allocation == "uniform":
            return share
        return layer_share(share, self.spec.calibration["layer_budget"])

    def is_dense_at(self, n: int) -> bool:
        return True

    def choose(self, x: AttnInput) -> list[Choice]:
        choices = super().choose(x)
        self.age()
        return choices

    def finish_prefill(self, q: np.ndarray) -> None:
        self.age()
        self.start = self.n, [replace(each) for each in self.segments], self.share

    @property
    def first_exact(self) -> int:
        """The position of the first token after the sinks and all segments."""
        return self.method.sinks + sum(each.filled for each in self.segments)

    def age(self) -> None:
        """Step 3: moves tokens that are no longer recent into segments, as many as possible."""
        o, is_block = self.method, self.method.update == "block"
        aged = self.n - o.recent - self.first_exact
        if aged < (o.block if is_block else AGED_TOGETHER):
            return
        if not self.share:
            assert o.budget.tokens is not None
            if aged < 2 * o.budget.tokens:
                return
            self.share = self.of_layer(o.budget.tokens / aged)
        while self.share < 1 and aged >= (o.block if is_block else 1):
            last = self.segments[-1] if self.segments else NaiveSegment(0, 0, 0)
            if not is_block and last.filled < last.length:
                count = min(aged, last.length - last.filled)
                last.filled += count
            elif is_block or aged < ONE_BASIS_FROM:
                count = min(aged, o.block)
                self.segments.append(NaiveSegment(self.first_exact, count, o.block))
            else:
                count, length = aged, aged + o.block
                while not is_good(length):
                    length += 1
                self.segments.append(NaiveSegment(self.first_exact, count, length))
            aged -= count

    def view(self) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.k.copy(), self.v.copy()
        for each in self.segments:
            tokens, key = slice(each.first, each.first + each.filled), (each.first, each.filled)
            if key not in self.filtered_rows:
                both = np.concatenate([k[:, tokens], v[:, tokens]], axis=2)
                self.filtered_rows[key] = self.filtered(both, each.length)
            rows = self.filtered_rows[key]
            k[:, tokens], v[:, tokens] = rows[..., : k.shape[2]], rows[..., k.shape[2] :]
        return k, v

    def filtered(self, x: np.ndarray, length: int) -> np.ndarray:
        """Returns x (G, m, d) after a DFT of ``length`` points and back with the kept bins."""
        bins = self.kept_bins(length)
        if bins == {0}:  # only the mean is kept: it is the mean of the m tokens
            return np.repeat(x.mean(1, keepdims=True), x.shape[1], axis=1)
        both = sorted({k for low in bins for k in (low, -low % length)})
        f = np.exp(-2j * np.pi * np.outer(both, np.arange(x.shape[1])) / length)
        spectrum = np.einsum("kn,gnd->gkd", f, x)
        return np.einsum("kn,gkd->gnd", f.conj(), spectrum).real / length

    def kept_bins(self, length: int) -> set[int]:
        """Step 2: returns the kept bins of 0 .. length // 2: whole chunks by importance.

        The last kept chunk may be cut.
        """
        n_bins = length // 2 + 1
        wanted = 1 if self.share <= 0.001 else max(1, round(self.share * n_bins))
        bins: list[int] = []
        for c in np.argsort(-self.importance, kind="stable"):
            bins += range(c * n_bins // C, (c + 1) * n_bins // C)
        return set(bins[:wanted])

    def truncate(self, n: int) -> None:
        if n == self.start[0]:
            self.segments, self.share = [replace(each) for each in self.start[1]], self.start[2]
        self.filtered_rows.clear()
        super().truncate(n)


def is_good(n: int) -> bool:
    """Returns whether n is a product of two factors >= 16, and has no prime factor above 5."""
    rest = n
    for prime in (2, 3, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1 and any(n % i == 0 and n // i >= 16 for i in range(16, n // 16 + 1))
