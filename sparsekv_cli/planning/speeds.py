"""The measured speeds of a model's shape on a machine, from which speeds at any context follow.

A step has two parts: the weights, and in each full layer the attention of the method. A stand-in
(stand_in.py) was measured at a few depths: seconds a byte of weights, and seconds of a layer's
attention. Between these depths they are interpolated. Beyond them they are a line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True)
class LayerPoint:
    """One layer at one depth: seconds of its attention in a step, bytes of its rows and index."""

    seconds: float
    host: int
    index: int


@dataclass(frozen=True)
class DepthPoint:
    """The measurements of a method at a depth of n rows."""

    n: int
    # Seconds of a step without attention of full layers, divided by the bytes of its weights. They
    # depend on how much of the weights the attention leaves in the CPU's caches.
    byte_seconds: float
    sparse: LayerPoint
    # the method's layers that attend to all rows; None: it has no such layers
    dense: LayerPoint | None


@dataclass(frozen=True)
class MethodCurve:
    """A method with its options, measured at several depths, the smallest first."""

    options: Mapping[str, Any]
    dense_layers: int
    sparse_layers: int
    points: Sequence[DepthPoint]

    def seconds(self, n: int) -> float:
        """Returns the seconds of the attention of all full layers in a step at depth n."""
        return self._sum(n, lambda point: point.seconds)

    def byte_seconds(self, n: int) -> float:
        """Returns the seconds for a byte of weights at depth n, without attention."""
        n = min(max(n, self.points[0].n), self.points[-1].n)
        return interpolate([(point.n, point.byte_seconds) for point in self.points], n)

    def host(self, n: int) -> int:
        """Returns the bytes of rows in all full layers at depth n."""
        return round(self._sum(n, lambda point: point.host))

    def index(self, n: int) -> int:
        """Returns the bytes of the method's indexes in all full layers at depth n."""
        return round(self._sum(n, lambda point: point.index))

    def times(self, factor: float) -> MethodCurve:
        """Returns a copy with all seconds multiplied by ``factor``."""

        def layer(point: LayerPoint) -> LayerPoint:
            return replace(point, seconds=factor * point.seconds)

        points = []
        for at in self.points:
            dense = None if at.dense is None else layer(at.dense)
            points.append(DepthPoint(at.n, factor * at.byte_seconds, layer(at.sparse), dense))
        return replace(self, points=points)

    def with_dense_layers_of(self, full: MethodCurve) -> MethodCurve:
        """Returns a copy whose dense layers have the figures of ``full``."""
        of_full = {point.n: point.sparse for point in full.points}
        points = [replace(each, dense=of_full.get(each.n, each.dense)) for each in self.points]
        return replace(self, points=points)

    def _sum(self, n: int, value: Callable[[LayerPoint], float]) -> float:
        sparse = [(point.n, value(point.sparse)) for point in self.points]
        dense = [(point.n, value(point.dense)) for point in self.points if point.dense]
        total = self.sparse_layers * interpolate(sparse, n)
        return total + (self.dense_layers * interpolate(dense, n) if dense else 0.0)


def middle(curves: Sequence[MethodCurve]) -> MethodCurve:
    """Returns the median of several curves of a method, at the depths that all of them have."""
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
    """The speeds of one model's shape on one machine. All seconds are those of the stand-in."""

    machine: str
    threads: int
    date: str
    bandwidth: float  # bytes a second that all threads read from memory
    pace: float  # seconds of a step of ``full`` when the other figures were measured
    step_seconds: float  # seconds of a step without attention of full layers
    step_bytes: int  # bytes of weights that this step reads
    other_bytes: int  # bytes of the caches of layers that are not full
    scratch_bytes: int  # bytes of a prefill's chunk, without caches and weights
    methods: Mapping[str, MethodCurve]  # by ``method_key``, ``full`` among them
    is_quick: bool = False  # measured in seconds, less exactly
    is_busy: bool = False  # measured while the machine had more work than cores
    # Seconds of a prefill for one multiplication by a weight, and for one in attention.
    product_seconds: float = 0.0
    attention_seconds: float = 0.0

    @property
    def byte_seconds(self) -> float:
        """The seconds for a byte of weights, in a step with hardly any attention."""
        return self.step_seconds / self.step_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Speeds:
        """Returns the speeds in an object that ``as_dict`` made.

        Raises KeyError or TypeError for others.
        """
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
    """Returns the value at n: of the line through its two neighbours among ``points``.

    points: (n, value), at least one, by rising n. Before the first and after the last point, the
    line through the first or last two goes on. The value is at least 0, and after the last point at
    least that point's value.
    """
    if len(points) == 1:
        return points[0][1]
    i = next((i for i, (at, _) in enumerate(points[1:-1], 1) if at >= n), len(points) - 1)
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return max(0.0 if n < x1 else y1, y0 + (n - x0) * (y1 - y0) / (x1 - x0))
