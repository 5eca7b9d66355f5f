"""What a method gets to calibrate itself, and what a method that does so has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

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
    """What a method gets to calibrate itself: a model, a text, and a way to run one over it.

    specs: one a layer, ``calibration`` empty. ids: the text. forward: as ``Forward.forward``
    (models/forward.py), through one LayerCache a layer; the method may make caches of its own that
    keep what they are shown. progress: told the share that is done, 0 to 1.
    """

    specs: Sequence[LayerSpec]
    ids: Sequence[int]
    forward: CalibrationForward
    progress: Callable[[float], None]


class Calibrated(Protocol):
    """A method, as far as calibration sees it (methods/base.py)."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> str: ...

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]: ...
