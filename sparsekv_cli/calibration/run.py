"""The inputs of a method's calibration, and the interface of a method's calibration."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sparsekv_cli.cache.spec import LayerSpec

CALIBRATION = "calibration"  # ``needs`` of methods that read a sidecar
MOST_STATISTICS = 0.4  # of a calibration's rows, for a pass over the text ahead of trials
LEAST_TEXT = 1024  # tokens of the text that it takes at least


class CalibrationArray(NamedTuple):
    """The shape, type and values that one array of a calibration must have."""

    dtype: str
    shape: tuple[int, ...]  # (n_layer, ...)
    least: float = -math.inf  # the least value allowed
    most: float = math.inf  # the largest value allowed
    is_rising: bool = False  # the stored values of a layer never fall

    def problem(self, array: np.ndarray) -> str:
        """Returns the fault of an array; empty if there is none."""
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
    """Returns the CalibrationArray of the result of ``allocation.budgets_of_levels``."""
    return CalibrationArray("f4", (n_layer, len(shares), 2), 0.0, 1.0, is_rising=True)


@dataclass(frozen=True)
class CalibrationRun:
    """The inputs of a method's calibration: a model, a text, and a forward pass over it."""

    specs: Sequence[LayerSpec]  # one a layer, with empty ``calibration``
    ids: Sequence[int]  # the text
    # Forward.forward (models/forward.py), with one LayerCache a layer. The method may pass its own
    # caches, which keep what they need.
    forward: Callable[..., np.ndarray]
    progress: Callable[[float], None]  # called with the share that is done, 0 to 1
    # limit, approximate, of rows through all layers in all forward passes together
    n_rows: int = 1 << 30

    @property
    def statistics_ids(self) -> Sequence[int]:
        """The start of the text, for a pass before the trials."""
        return self.ids[: max(LEAST_TEXT, int(MOST_STATISTICS * self.n_rows))]


class Calibrated(Protocol):
    """The part of a method that calibration uses (methods/base.py)."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> str: ...

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]: ...

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]: ...
