"""The forecast of a model with each method at a context: memory, speed, and where it is faster.

Seconds come from speeds.py, measured with a stand-in on this machine. Bytes come from each method's
caches.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from sparsekv_cli.cache.row_sizes import FITTING, token_bytes
from sparsekv_cli.cache.spec import FULL
from sparsekv_cli.calibration.calibrations import layer_products
from sparsekv_cli.methods import build_method, depth
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.forward import ROWS_AT_ONCE
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.models.reading.sparse_prefill import summary_bytes
from sparsekv_cli.planning.kept import NOT_CALIBRATED, method_key
from sparsekv_cli.planning.measure import CHUNK
from sparsekv_cli.planning.speeds import MethodCurve, Speeds
from sparsekv_cli.planning.stand_in import read_stand_in
from sparsekv_cli.planning.work import attention_work
from sparsekv_cli.system.memory import available_memory

SEARCHED = 1 << 18  # the largest context at which a method is compared with ``full``
LOW = 1.5  # gains below this ratio count as little
# Fields of a plan that it takes from its speeds.
OF_SPEEDS = ("machine", "threads", "date", "bandwidth", "is_quick", "is_busy")


@dataclass(frozen=True)
class PlannedMethod:
    """One method at the context. A figure is None if it was not measured; ``note`` says why."""

    name: str
    options: Mapping[str, Any]
    weights_bytes: int
    kv_bytes: int | None = None
    index_bytes: int | None = None
    scratch_bytes: int | None = None
    fits: bool | None = None
    # most tokens that fit the memory; None: the system does not tell its memory
    fitting_context: int | None = None
    decode_tps: float | None = None
    sparse_from: int = 0  # tokens up to which ``run`` attends to all rows
    # from this context on a step is faster than a dense one; None: never
    pays_from: int | None = None
    is_dense: bool = False  # True: attention at this context is dense, so the speed is full's
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The forecast of a model at a context."""

    model: str
    context: int
    machine: str
    threads: int
    date: str
    bandwidth: float
    weights_bandwidth: float
    memory_available: int | None
    full_layers: int
    layers: int
    # how many times as fast as ``full`` a step would be without attention in full layers
    ceiling: float
    methods: Sequence[PlannedMethod]
    is_quick: bool = False  # see Speeds; also is_busy
    is_busy: bool = False
    reading_s: float = 0.0  # seconds to read a prompt as long as the context
    # rows that sparse reading attends to; None: prompts are read densely
    prefill_budget: int | None = None

    @property
    def doubt(self) -> str:
        """Why the speeds are not to be believed; empty if they are."""
        if not self.is_busy:
            return ""
        return (
            f"the machine was busy (weights read at {self.weights_bandwidth / 1e9:.1f} GB/s, the "
            f"memory at {self.bandwidth / 1e9:.1f} GB/s)"
        )

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_believable": not self.doubt}

    def verdict(self) -> str:
        """Returns a sentence that says how much sparse attention can gain at this context."""
        low = "; that is little" if self.ceiling < LOW else ""
        part = ""
        if self.full_layers < self.layers:
            part = f" ({self.full_layers} of {self.layers} layers attend to all rows)"
        return (
            f"at {self.context} tokens no method can be more than {self.ceiling:.2f} times as fast "
            f"as full{part}{low}"
        )


class Forecast:
    """Predicts seconds and bytes of a model's steps with the methods that were measured."""

    def __init__(self, file: GGUFFile, speeds: Speeds, sparse_from: int = -1) -> None:
        """sparse_from: the value of SessionConfig.sparse_from."""
        self._file, self.speeds, self._sparse_from = file, speeds, sparse_from
        self.hparams, _, weights = read_stand_in(file)
        self._step_bytes = weights.bytes_a_step(1)
        tied = weights.output is weights.token_embd
        self.weights_bytes = weights.n_bytes_held + (0 if tied else weights.token_embd.data.nbytes)
        self.full = speeds.methods[method_key(build_method("full", {}))]

    def sparse_from(self, method: Method) -> int:
        """Returns up to how many rows a context is dense with ``method``."""
        if method.work_of_a_head and self._sparse_from >= 0:
            return self._sparse_from
        layers: Any = self.hparams.layers
        return depth.sparse_from(method, layers)

    def curve(self, method: Method) -> MethodCurve:
        return self.speeds.methods[method_key(method)]

    def seconds(self, method: Method, n: int) -> float:
        """Returns the seconds of a step in a context of n tokens.

        Dense steps take ``full``'s seconds.
        """
        curve = self.full if n <= self.sparse_from(method) else self.curve(method)
        return self._step(curve, n)

    def _step(self, curve: MethodCurve, n: int) -> float:
        return self._step_bytes * curve.byte_seconds(n) + curve.seconds(n)

    def ceiling(self, n: int) -> float:
        """Returns how many times as fast as ``full`` a step without attention in full layers is."""
        return self._step(self.full, n) / (self._step_bytes * self.speeds.byte_seconds)

    def pays_from(self, method: Method) -> int | None:
        """Returns from which context on a step is faster than a dense one; None: it never is."""
        curve, found = self.curve(method), None
        for n in range(FITTING, SEARCHED + 1, FITTING):
            if self._step(curve, n) >= self._step(self.full, n):
                found = None
            elif found is None:
                found = n
        return found

    def reading(self, n: int, budget: int | None) -> float:
        """Returns the seconds of a prefill of n tokens.

        budget: the rows that sparse reading attends to; None: prompts are read densely.
        """
        products = n * layer_products(self._file, self.hparams)
        attended = attention_work(self.hparams, n, budget)
        return products * self.speeds.product_seconds + attended * self.speeds.attention_seconds

    def kv_bytes(self, method: Method, n: int) -> int:
        """Returns the bytes of rows of n tokens.

        Rows that several layers read count once if possible. A method that does not keep all rows
        stores them once for each layer.
        """
        n_bytes = self.curve(method).host(n)
        if method.holds_all_rows:
            layers = self.hparams.layers
            alone = [replace(layer, source=-1) for layer in layers]
            once, each = (token_bytes(of, "f16", "f16") for of in (layers, alone))
            n_bytes = n_bytes * once // each
        return n_bytes + self.speeds.other_bytes

    def scratch(self, method: Method, n: int) -> int:
        """Returns the bytes of a prefill of n tokens besides weights and caches.

        These are the memory of a chunk and the residual stream. If a method changes rows when a
        layer is finished, all rows of one layer are added.
        """
        n_at_once, more = min(n, ROWS_AT_ONCE), 0
        if not method.holds_all_rows:
            n_at_once = n
            more = max(layer.kv_bytes(n) for layer in self.hparams.layers)
        residual = 4 * self.hparams.n_embd * max(0, n_at_once - CHUNK)
        return self.speeds.scratch_bytes + residual + more

    def total(self, method: Method, n: int) -> int:
        """Returns all bytes of a context of n tokens: weights, rows, index and scratch."""
        index = self.curve(method).index(n)
        return self.weights_bytes + self.kv_bytes(method, n) + index + self.scratch(method, n)

    def fitting_context(self, method: Method, available: int) -> int:
        """Returns the most tokens that fit ``available`` bytes, a multiple of FITTING."""
        lengths = range(FITTING, SEARCHED * 16 + 1, FITTING)
        return FITTING * bisect_right(lengths, available, key=partial(self.total, method))


def make_plan(
    file: GGUFFile,
    speeds: Speeds,
    methods: Sequence[Method],
    n_ctx: int,
    sparse_from: int = -1,
    prefill_budget: int | None = None,
) -> Plan:
    """Returns the plan of ``methods`` at a context of n_ctx tokens.

    prefill_budget: the rows that sparse reading attends to; None: prompts are read densely.
    """
    forecast = Forecast(file, speeds, sparse_from)
    available, layers = available_memory(), forecast.hparams.layers
    reading = 0 if prefill_budget is None else summary_bytes(layers, n_ctx)
    return Plan(
        model=str(file.path),
        context=n_ctx,
        weights_bandwidth=1 / speeds.byte_seconds,
        memory_available=available,
        full_layers=sum(layer.kind == FULL for layer in layers),
        layers=len(layers),
        ceiling=forecast.ceiling(n_ctx),
        methods=[_planned(each, forecast, n_ctx, available, reading) for each in methods],
        reading_s=forecast.reading(n_ctx, prefill_budget),
        prefill_budget=prefill_budget,
        **{name: getattr(speeds, name) for name in OF_SPEEDS},
    )


def _planned(
    method: Method, forecast: Forecast, n_ctx: int, available: int | None, reading: int
) -> PlannedMethod:
    """Returns the forecast of a method.

    available: bytes of free memory; None: the system does not tell. reading: bytes that only a
    prefill takes.
    """
    is_known = method_key(method) in forecast.speeds.methods
    note = method.misfit(forecast.hparams.layers) or ("" if is_known else NOT_CALIBRATED)
    if note:
        return PlannedMethod(method.name, method.options(), forecast.weights_bytes, note=note)
    left = None if available is None else available - reading
    return PlannedMethod(
        name=method.name,
        options=method.options(),
        weights_bytes=forecast.weights_bytes,
        kv_bytes=forecast.kv_bytes(method, n_ctx),
        index_bytes=forecast.curve(method).index(n_ctx),
        scratch_bytes=forecast.scratch(method, n_ctx) + reading,
        fits=None if left is None else forecast.total(method, n_ctx) <= left,
        fitting_context=None if left is None else forecast.fitting_context(method, left),
        decode_tps=1 / forecast.seconds(method, n_ctx),
        sparse_from=forecast.sparse_from(method),
        is_dense=method.name != "full" and n_ctx <= forecast.sparse_from(method),
        pays_from=forecast.pays_from(method) if method.name != "full" else None,
    )
