"""The inputs of a method's calibration, and the part of a method that calibration calls."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sparsekv_cli.cache.spec import LayerSpec

CALIBRATION = "calibration"  # ``needs`` of methods that need a calibration
MOST_STATISTICS = 0.4  # share of a calibration's rows for the pass over the text before trials
LEAST_TEXT = 1024  # tokens of the text that this pass reads at least


class CalibrationArray(NamedTuple):
    """The shape, type and values that an array of a calibration must have."""

    dtype: str
    shape: tuple[int, ...]  # (n_layer, ...)
    least: float = -math.inf  # the least value allowed
    most: float = math.inf  # the largest value allowed
    is_rising: bool = False  # whether the values of a layer, in stored order, must never fall

    def problem(self, array: np.ndarray) -> str:
        """Returns what is wrong with ``array``, for a message; "" if it is right."""
        if array.dtype != np.dtype(self.dtype) or array.shape != self.shape:
            expected = f"{np.dtype(self.dtype).name} {self.shape}"
            return f"is {array.dtype.name} {array.shape}, but {expected} was expected"
        if not np.isfinite(array).all():
            return "holds values that are not finite"
        if array.size and not self.least <= array.min() <= array.max() <= self.most:
            return f"holds values that are not within {self.least:g} and {self.most:g}"
        if self.is_rising and (np.diff(array.reshape(len(array), -1)) < 0).any():
            return "holds values that fall"
        return ""


def budgets_array(n_layer: int, shares: Sequence[float]) -> CalibrationArray:
    """Returns what the array of ``allocation.budgets_of_levels`` must be."""
    return CalibrationArray("f4", (n_layer, len(shares), 2), 0.0, 1.0, is_rising=True)


def measured_now(n: int, measure: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns what ``measure`` returns, as ``CalibrationRun.scores_of``."""
    return measure()


@dataclass(frozen=True)
class CalibrationRun:
    """The inputs of a method's calibration: a model's layers, a text, and forward passes."""

    specs: Sequence[LayerSpec]  # one a layer, with empty ``calibration``
    ids: Sequence[int]  # the text
    # Forward.forward (models/forward.py). It needs one LayerCache a layer. A method may pass caches
    # of its own, which collect what it needs.
    forward: Callable[..., np.ndarray]
    progress: Callable[[float], None]  # called with the share that is done, 0 to 1
    # about how many rows all forward passes together may send through all layers
    n_rows: int = 1 << 30
    # (n, measure) -> scores of the next n trials: measured now, or by a run that was interrupted
    scores_of: Callable[[int, Callable[[], np.ndarray]], np.ndarray] = measured_now
    n_scored: int = 0  # rows of a window that score a trial; 0: as many as n_rows allows

    @property
    def statistics_ids(self) -> Sequence[int]:
        """The first ids of the text, for the pass over the text before trials."""
        return self.ids[: max(LEAST_TEXT, int(MOST_STATISTICS * self.n_rows))]


class Calibrated(Protocol):
    """The part of a method that calibration needs (methods/base.py)."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> str: ...

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]: ...

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]: ...
