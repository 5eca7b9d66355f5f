"""A small method that needs a calibration, so that the machinery is tested without a real one."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from sparsekv_cli import methods
from sparsekv_cli.cache.layer import LayerCache, SelectingCache
from sparsekv_cli.cache.spec import N_SINKS, Budget, LayerSpec
from sparsekv_cli.calibration.run import CALIBRATION, CalibrationArray, CalibrationRun
from sparsekv_cli.cpu.jit.floats import as_f32
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import option

NAME, MODULE = "fake", "sparsekv_cli.methods.fake"


@dataclass(frozen=True)
class Fake(Method):
    """Sinks, and every ``stride``-th of the other rows; stride was found by calibration."""

    paper: ClassVar[str] = "none"
    description: ClassVar[str] = "every n-th row"
    use: ClassVar[str] = "tests"
    needs: ClassVar[str] = CALIBRATION
    runs: ClassVar[list[list[int]]] = []  # the ids of every calibration
    scored: ClassVar[list[int]] = []  # and its ``n_scored``

    budget: Budget = option(Budget(share=0.5), "rows: N or P%")

    def sparse_layer(self, spec: LayerSpec) -> LayerCache:
        return FakeCache(spec, self)

    def calibrate(self, run: CalibrationRun) -> dict[str, np.ndarray]:
        """Means of the keys before RoPE, f32 (L, G, d); strides u8 (L,), 2 and more."""
        self.runs.append(list(run.ids))
        self.scored.append(run.n_scored)
        means = np.zeros((len(run.specs), run.specs[0].n_head_kv, run.specs[0].head_dim), "f4")
        caches = [MeanKeys(spec, means[spec.layer]) for spec in run.specs]
        run.progress(0.5)
        run.forward(run.ids, 0, caches)
        run.progress(1.0)
        return {"means": means, "stride": np.arange(2, 2 + len(run.specs), dtype=np.uint8)}

    def calibration_arrays(self, specs: Sequence[LayerSpec]) -> dict[str, CalibrationArray]:
        n_layer, first = len(specs), specs[0]
        return {
            "means": CalibrationArray("f4", (n_layer, first.n_head_kv, first.head_dim)),
            "stride": CalibrationArray("u1", (n_layer,), 1),
        }


class MeanKeys(LayerCache):
    """Collects the mean key of a layer."""

    def __init__(self, spec: LayerSpec, mean: np.ndarray) -> None:
        super().__init__(spec)
        self.mean = mean

    def extend(self, x: Any) -> Any:
        self.mean += as_f32(x.k_nope).sum(1)
        return super().extend(x)

    def finish_prefill(self) -> None:
        self.mean /= self.store.n

    def decode(self, x: Any) -> np.ndarray:
        raise AssertionError("a calibration does not decode")


class FakeCache(SelectingCache):
    def __init__(self, spec: LayerSpec, method: Fake) -> None:
        super().__init__(spec)
        self.method = method
        self.stride = int(spec.calibration["stride"])
        assert spec.calibration["means"].shape == (spec.n_head_kv, spec.head_dim)

    def is_dense_at(self, n: int) -> bool:
        return self.method.budget.rows(n) >= n

    def select(self, q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
        rows = [*range(N_SINKS), *range(N_SINKS, n - 1, self.stride), n - 1]
        n_kv = self.spec.n_head_kv
        return np.tile(np.array(rows, np.int32), (n_kv, 1)), np.full(n_kv, len(rows)), 0


def install(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """Puts the method into the table, under the name ``fake``."""
    monkeypatch.setattr(Fake, "__module__", MODULE)
    monkeypatch.setattr(Fake, "runs", [])
    monkeypatch.setattr(Fake, "scored", [])
    monkeypatch.setitem(sys.modules, MODULE, sys.modules[__name__])
    monkeypatch.setitem(methods.METHODS, NAME, f"{NAME}:Fake")
    return Fake
