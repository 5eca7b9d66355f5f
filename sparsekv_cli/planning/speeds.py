"""The measurements of a model's shape on a machine, and speeds for any context from them.

A step is its weights, and in each full layer the attention of the method. Both were measured with a
stand-in (stand_in.py) at a few depths. The weights have seconds a byte, the attention has seconds a
layer. Figures are interpolated between these depths, and extrapolated as a line beyond them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True)
class LayerPoint:
    """One layer at a depth: seconds of a step's attention, bytes of rows and of the index."""

    seconds: float
    host: int
    index: int


@dataclass(frozen=True)
class DepthPoint:
    """A method at a depth of n rows."""

    n: int
    # Seconds of a step without the attention of full layers, a byte of weights. They depend on how
    # much of the weights the attention leaves in the CPU's caches.
    byte_seconds: float
    sparse: LayerPoint
    dense: LayerPoint | None  # of its layers that attend to all rows, if it has any


@dataclass(frozen=True)
class MethodCurve:
    """A method with its options, at growing depths."""

    options: Mapping[str, Any]
    dense_layers: int
    sparse_layers: int
    points: Sequence[DepthPoint]

    def seconds(self, n: int) -> float:
        """Returns the seconds of the attention of all full layers in a step at depth n."""
        return self._sum(n, lambda point: point.seconds)

    def byte_seconds(self, n: int) -> float:
        """Returns the seconds a byte of weights, without attention in full layers, at depth n."""
        n = min(max(n, self.points[0].n), self.points[-1].n)
        return interpolate([(point.n, point.byte_seconds) for point in self.points], n)

    def host(self, n: int) -> int:
        """Returns the bytes of rows in all full layers at depth n."""
        return round(self._sum(n, lambda point: point.host))

    def index(self, n: int) -> int:
        """Returns the bytes that the method adds to the rows."""
        return round(self._sum(n, lambda point: point.index))

    def times(self, factor: float) -> MethodCurve:
        """Returns the curve with all times multiplied by ``factor``."""

        def layer(point: LayerPoint) -> LayerPoint:
            return replace(point, seconds=factor * point.seconds)

        points = []
        for at in self.points:
            dense = None if at.dense is None else layer(at.dense)
            points.append(DepthPoint(at.n, factor * at.byte_seconds, layer(at.sparse), dense))
        return replace(self, points=points)

    def with_dense_layers_of(self, full: MethodCurve) -> MethodCurve:
        """Returns the curve with the figures of ``full`` for the dense layers."""
        of_full = {point.n: point.sparse for point in full.points}
        points = [replace(each, dense=of_full.get(each.n, each.dense)) for each in self.points]
        return replace(self, points=points)

    def _sum(self, n: int, value: Callable[[LayerPoint], float]) -> float:
        sparse = [(point.n, value(point.sparse)) for point in self.points]
        dense = [(point.n, value(point.dense)) for point in self.points if point.dense]
        total = self.sparse_layers * interpolate(sparse, n)
        return total + (self.dense_layers * interpolate(dense, n) if dense else 0.0)


def middle(curves: Sequence[MethodCurve]) -> MethodCurve:
    """Returns the medians of several curves of a method, at the depths that all of them have."""
    together = zip(*(curve.points for curve in curves), strict=False)
    return replace(curves[-1], points=[_middle_point(points) for points in together])


def _middle_point(points: Sequence[DepthPoint]) -> DepthPoint:
    def layer(found: Sequence[LayerPoint]) -> LayerPoint:
        return replace(found[-1], seconds=median(each.seconds for each in found))

    dense = [point.dense for point in points if point.dense is not None]
    return DepthPoint(
        points[-1].n,
        median(point.byte_seconds for point in points),
        layer([point.sparse for point in points]),
        layer(dense) if dense else None,
    )


@dataclass(frozen=True)
class Speeds:
    """The speeds of one model's shape on one machine."""

    machine: str
    threads: int
    date: str
    bandwidth: float  # bytes a second that threads read from memory
    pace: float  # seconds of a step of ``full`` at the machine's pace to which all figures refer
    step_seconds: float  # of a step without the attention of full layers, of the stand-in
    step_bytes: int  # bytes of weights that this step reads
    other_bytes: int  # bytes that layers of other kinds hold
    scratch_bytes: int  # of a prefill's chunk
    methods: Mapping[str, MethodCurve]  # by ``method_key``, ``full`` among them
    is_quick: bool = False  # measured in seconds, less exactly
    is_busy: bool = False  # measured while the machine had more work than cores
    # Seconds of a prefill, for a product of weights and for a product of attention.
    product_seconds: float = 0.0
    attention_seconds: float = 0.0

    @property
    def byte_seconds(self) -> float:
        """The seconds a byte of weights, in a step with hardly any attention."""
        return self.step_seconds / self.step_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Speeds:
        """Raises KeyError or TypeError for an object that ``as_dict`` did not make."""
        methods = {name: _curve(curve) for name, curve in values["methods"].items()}
        return Speeds(**{**values, "methods": methods})


def _curve(values: Mapping[str, Any]) -> MethodCurve:
    points = []
    for each in values["points"]:
        sparse, dense = LayerPoint(**each["sparse"]), each["dense"]
        dense = None if dense is None else LayerPoint(**dense)
        points.append(DepthPoint(each["n"], each["byte_seconds"], sparse, dense))
    return MethodCurve(**{**values, "points": points})


def interpolate(points: Sequence[tuple[int, float]], n: int) -> float:
    """Returns the value at n of the line through its two neighbours, or through the two last or
    first points.

    The value is not below 0, and after the last point not below that point's value. points: at
    least one, by growing n.
    """
    if len(points) == 1:
        return points[0][1]
    i = next((i for i, (at, _) in enumerate(points[1:-1], 1) if at >= n), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0 if n < x1 else y1, y0 + (n - x0) * (y1 - y0) / (x1 - x0))
