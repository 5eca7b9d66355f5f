"""What a method gets to calibrate itself, and what a method that does so has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sparsekv_cli.cache.layer import Backend, LayerCache
from sparsekv_cli.cache.spec import LayerSpec

CALIBRATION = "calibration"  # ``needs`` of methods that read a sidecar


@dataclass(frozen=True)
class CalibrationRun:
    """What a method gets to calibrate itself: a model, a text, and a way to run one over it.

    specs: one a layer, ``calibration`` empty. ids: the text. forward(ids, pos, caches, all_logits):
    a dense forward pass of rows from ``pos`` on through one LayerCache a layer, which may be of the
    method's own making and keep what they are shown; logits f32 (n_vocab,), or (T, n_vocab).
    progress: told the share that is done, 0 to 1.
    """

    specs: Sequence[LayerSpec]
    backend: Backend
    ids: Sequence[int]
    forward: Callable[[Sequence[int], int, Sequence[LayerCache], bool], np.ndarray]
    progress: Callable[[float], None]


class Calibrated(Protocol):
    """A method, as far as calibration sees it (methods/base.py)."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> str: ...

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]: ...
