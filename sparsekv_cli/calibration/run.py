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
    keep what they need. progress: called with the share that is done, 0 to 1.
    """

    specs: Sequence[LayerSpec]
    ids: Sequence[int]
    forward: CalibrationForward
    progress: Callable[[float], None]

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
