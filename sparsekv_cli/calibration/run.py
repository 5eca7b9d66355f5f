"""What a method gets to calibrate itself, and what calibration asks of a method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparsekv_cli.cache.kinds import CACHES
from sparsekv_cli.cache.layer import ChunkAttention, LayerCache
from sparsekv_cli.cache.spec import LayerSpec

CALIBRATION = "calibration"  # ``needs`` of methods that read a sidecar
STATISTICS_SHARE = 0.2  # of a calibration's time: for a pass over the text, ahead of trials
MOST_STATISTICS = 0.4  # of its rows that this pass may take
LEAST_TEXT = 1024  # tokens of the text that it takes at least


class CalibrationForward(Protocol):
    def __call__(
        self,
        ids: Sequence[int],
        pos: int,
        caches: Sequence[LayerCache],
        *,
        all_logits: bool = False,
        attend: ChunkAttention | None = None,
    ) -> np.ndarray: ...


@dataclass(frozen=True)
class CalibrationRun:
    """What a method gets to calibrate itself: a model, a text, and a forward pass over it.

    specs: one a layer, ``calibration`` empty. ids: the text. forward: as ``Forward.forward``
    (models/forward.py), through one LayerCache a layer; the method may pass caches of its own that
    keep what they need. progress: called with the share that is done, 0 to 1. n_rows: about as many
    as all forward passes together may take.
    """

    specs: Sequence[LayerSpec]
    ids: Sequence[int]
    forward: CalibrationForward
    progress: Callable[[float], None]
    n_rows: int = 1 << 30

    @property
    def statistics_ids(self) -> Sequence[int]:
        """The beginning of the text, for a pass ahead of trials."""
        return self.ids[: max(LEAST_TEXT, int(MOST_STATISTICS * self.n_rows))]

    @property
    def statistics_share(self) -> float:
        """Of the time, that this pass takes."""
        return max(STATISTICS_SHARE, min(1.0, len(self.statistics_ids) / self.n_rows))

    def caches(self, make: Callable[[LayerSpec], LayerCache]) -> list[LayerCache]:
        """One cache a layer: ``make``'s of full layers, those of their kinds of the others."""
        return [CACHES.get(spec.kind, make)(spec) for spec in self.specs]


class Calibrated(Protocol):
    """A method as calibration sees it (methods/base.py)."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> str: ...

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]: ...
