"""Measures the time of a decode step on this machine: weights, and each method's attention.

A stand-in of the model decodes. Its caches have as many random rows as a context of the measured
depth. No prompt is read, so that a depth of 32768 rows takes a moment.
"""

import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli import warmup
from sparsekv_cli.cache.kinds import share_rows
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.row_sizes import padded, token_bytes
from sparsekv_cli.cache.spec import FULL, AttnInput, LayerSpec
from sparsekv_cli.calibration.calibrations import layer_products
from sparsekv_cli.evaluation.roofline import measure_bandwidth
from sparsekv_cli.machine import open_engine
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.gguf.file import GGUFFile
from sparsekv_cli.planning.speeds import DepthPoint, LayerPoint, MethodCurve, Speeds
from sparsekv_cli.planning.stand_in import StandInFile, read_stand_in
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.system.memory import available_memory
from sparsekv_cli.warmup import OnCompile

DEPTHS = (1024, 4096, 12288, 32768)
MOST_WEIGHTS = 1 << 30  # bytes of the weights of a stand-in
MOST_ROWS = 1 << 30  # bytes of K and V of all measured layers
LEAST_LAYERS = 4  # full layers that are measured at least, of which up to two are dense
N_WARM, N_STEPS = 4, 10
# A quick measurement has the first layers only, and fewer tokens of the vocabulary, depths and
# steps.
QUICK_DEPTHS, QUICK_VOCABULARY = (4096, 12288, 32768), 4096
QUICK_WARM, QUICK_STEPS = 4, 5
N_START = 64  # tokens of the prompt before the first step
N_QUERIES = 16  # different queries; half of each is common to all, as in a text
CHUNK, N_ROWS = 512, 4096  # rows of a prefill's chunk; different random rows
SEED = 0
# Spread of the logarithms of random keys' lengths. lfps, whose work depends on how uneven scores
# are, then reads about as much as with SmolLM2-135M: 72 KB a head and step at 8192.
KEY_SPREAD = 0.2
# Options that make a prefill shorter: h2o would add up all attention, for minutes.
PROBED: Mapping[str, Mapping[str, Any]] = {"h2o": {"window": 32}}


class _Inputs(NamedTuple):
    """Random q, k and v of one layer's shape: for a prompt, and for N_QUERIES steps."""

    prompt: tuple[np.ndarray, ...]  # (heads, N_ROWS, d)
    steps: Sequence[tuple[np.ndarray, ...]]  # (heads, 1, padded d)


class TimedLayer:
    """Stands in for a full layer's cache: gives it random rows, and times its steps."""

    def __init__(self, cache: LayerCache, rows: _Inputs) -> None:
        self.cache, self.rows, self.seconds = cache, rows, list[float]()

    def decode(self, x: AttnInput) -> np.ndarray:
        q, k, v = self.rows.steps[len(self.seconds) % N_QUERIES]
        for target, values in zip(x[:5], (q, k, v, q, k), strict=True):
            target[...] = values
        started = time.perf_counter()
        out = self.cache.decode(x)
        self.seconds.append(time.perf_counter() - started)
        return out

    def end_step(self, n: int) -> None:
        self.cache.end_step(n)

    @property
    def n(self) -> int:
        return self.cache.n


class Measurement:
    """Measures one model on the CPU with a stand-in. is_quick: in seconds, and less exactly."""

    def __init__(
        self,
        file: GGUFFile,
        config: SessionConfig,
        on_compile: OnCompile | None = None,
        *,
        is_quick: bool = False,
    ) -> None:
        from sparsekv_cli.cpu.jit.install import use_threads

        self._file, self.n_threads = file, use_threads(config.threads)
        self._depths = QUICK_DEPTHS if is_quick else DEPTHS
        self._n_warm = QUICK_WARM if is_quick else N_WARM
        self._n_steps = QUICK_STEPS if is_quick else N_STEPS
        self._most_weights, self._most_rows = (0, 0) if is_quick else (MOST_WEIGHTS, MOST_ROWS)
        self.whole = read_stand_in(file)
        self._full = build_method("full", {})
        n_layer = self._layers_that_fit()
        hparams, architecture, weights = read_stand_in(
            file, n_layer, QUICK_VOCABULARY if is_quick else None
        )
        on_cpu = replace(config, device="cpu")
        engine = open_engine(
            hparams, architecture, weights, self._full, on_cpu, self.n_threads, 0, on_compile
        )
        self.decoder: Any = engine.decoder
        self._on_compile = on_compile
        self.specs = self.decoder.layer_specs()
        self._rng = np.random.default_rng(SEED)
        self._rows: dict[tuple[int, ...], _Inputs] = {}
        self._pos = 0
        first, second = self._depths[:2]
        self._pace_depth = second if self._has_room(second) else first
        self._pace_caches: list[Any] = []

    def _layers_that_fit(self) -> int:
        """Returns how many first layers fit MOST_WEIGHTS and the memory, with every kind."""
        layers, weights = self.whole.hparams.layers, self.whole.weights
        if self.whole.hparams.n_layer_input:  # one tensor has parts for all layers
            return len(layers)
        room = min(self._most_weights, (available_memory() or 1 << 40) // 6)
        room -= weights.output.data.nbytes
        sizes = [sum(w.data.nbytes for w in layer.linears()) for layer in weights.layers]
        fitting = int(np.searchsorted(np.cumsum(sizes), room, side="right"))
        kinds = [layer.kind for layer in layers]
        fulls = [i for i, kind in enumerate(kinds) if kind == FULL][:LEAST_LAYERS]
        least = max([kinds.index(kind) for kind in set(kinds)] + fulls) + 1
        return min(max(fitting, least), len(layers))

    def step(self) -> tuple[float, int, int]:
        """Returns the seconds of a step without attention of full layers, and its bytes of weights.

        The third figure is the bytes of the caches of all layers that are not full.
        """
        caches = [self._full.layer(spec) for spec in self.specs]
        self._start(caches)
        seconds = self._rest(self._timed(caches), 2 * self._n_steps)
        others = [c.memory().host for c in caches if c.spec.kind != FULL]
        n_others = sum(layer.kind != FULL for layer in self.whole.hparams.layers)
        other_bytes = round(sum(others) / len(others) * n_others) if others else 0
        n_bytes = self.decoder.weights.bytes_a_step(1)
        return seconds, n_bytes, other_bytes

    def pace(self) -> float:
        """Returns the seconds of a step of ``full`` at a fixed depth in the middle of DEPTHS.

        They show how fast the machine is now. Other work changes them by up to half, for minutes.
        """
        depth = self._pace_depth
        if not self._pace_caches:
            caches, _ = self._filled(self._full, self.specs, depth)
            self._pace_caches = self._timed(caches)
        self._pos = depth
        seconds = self._steps(self._pace_caches, self._n_steps)
        for layer in self._pace_caches:
            if isinstance(layer, TimedLayer):
                layer.cache.truncate(depth)
        return _typical(seconds[self._n_warm :])

    def _rest(self, caches: Sequence[Any], n_steps: int) -> float:
        """Returns the seconds of a step without the attention of full layers.

        The first steps do not count. The step only runs the layers that have a cache in ``caches``.
        """
        wholes = self._steps(caches, n_steps)
        timed = [each.seconds for each in caches if isinstance(each, TimedLayer)]
        seconds = [whole - sum(each[i] for each in timed) for i, whole in enumerate(wholes)]
        return _typical(seconds[self._n_warm :])

    def _steps(self, caches: Sequence[Any], n_steps: int) -> list[float]:
        """Decodes n_steps after some slower first steps. Returns the seconds of each step."""
        seconds = []
        for _ in range(self._n_warm + n_steps):
            started = time.perf_counter()
            self.decoder.decode_batch([0], [self._pos], [caches])
            seconds.append(time.perf_counter() - started)
            self._pos += 1
        return seconds

    def scratch(self) -> int:
        """Returns the peak bytes of a prefill's chunk, without caches and weights."""
        specs = warmup.first_layers(self.specs)
        caches = [self._full.layer(spec) for spec in specs]
        for cache in caches:
            cache.reserve(CHUNK)
        tracemalloc.start()
        try:
            self.decoder.forward([0] * CHUNK, 0, caches)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def reading(self) -> tuple[float, float]:
        """Returns a prefill's seconds for one multiplication by a weight, and for one in attention.

        The first layers read some chunks at the start of a prompt, and the same number at a depth.
        """
        depth, n = self._depths[0], 2 * CHUNK
        deep, _ = self._filled(self._full, self.specs, depth)
        fresh = [self._full.layer(cache.spec) for cache in deep]
        share_rows(fresh)
        seconds = [np.inf, np.inf]
        for _ in range(2):  # the first passes are slower
            for i, (caches, pos) in enumerate(((fresh, 0), (deep, depth))):
                started = time.perf_counter()
                self.decoder.forward([0] * n, pos, caches)
                seconds[i] = min(seconds[i], time.perf_counter() - started)
                for cache in caches:
                    cache.truncate(pos)
        full = [cache.spec for cache in deep if cache.spec.kind == FULL]
        row = sum(spec.n_head * (spec.head_dim + spec.value_dim) for spec in full)
        attention = max(0.0, seconds[1] - seconds[0]) / (n * depth * row)
        first: Any = StandInFile(self._file, len(deep), None, has_room=False)
        products = n * layer_products(first, self.whole.hparams)
        # Where other programs slow the deep pass down, attention seems to take more than all.
        rest = max(seconds[0] / 10, seconds[0] - n * n / 2 * row * attention)
        return rest / products, attention

    def speeds(self, machine: str) -> Speeds:
        """Returns the speeds without curves of methods. ``pace`` is the mean of two values."""
        pace = self.pace()
        seconds, n_bytes, other_bytes = self.step()
        scratch_bytes, reading = self.scratch(), self.reading()
        return Speeds(
            machine=machine,
            threads=self.n_threads,
            date=datetime.now(UTC).date().isoformat(),
            bandwidth=measure_bandwidth(self.n_threads),
            pace=(pace + self.pace()) / 2,
            step_seconds=seconds,
            step_bytes=n_bytes,
            other_bytes=other_bytes,
            scratch_bytes=scratch_bytes,
            methods={},
            product_seconds=reading[0],
            attention_seconds=reading[1],
        )

    def curve(self, method: Method, calibration: Mapping[str, np.ndarray]) -> MethodCurve:
        """Returns a method's curve, at the depths whose rows fit memory, at least at the first two.

        calibration: the method's arrays (n_layer, ...); empty if it needs none.
        """
        specs = [
            replace(spec, calibration={name: array[i] for name, array in calibration.items()})
            for i, spec in enumerate(self.specs)
        ]
        warmup.compile_method_kernels(self.decoder, method, specs, self._on_compile)
        probed: Any = replace(method, **PROBED.get(method.name, {}))
        depths = [d for d in self._depths if d in self._depths[:2] or self._has_room(d)]
        points = [self._point(probed, specs, depth) for depth in depths]
        return MethodCurve(method.options(), *self.layers_of(method), points)

    def _row_bytes(self) -> int:
        """Returns the bytes of a token's K and V in one full layer, in f16."""
        return token_bytes([next(s for s in self.specs if s.kind == FULL)], "f16", "f16")

    def _has_room(self, depth: int) -> bool:
        size = LEAST_LAYERS * depth * self._row_bytes()
        return 2 * size <= (available_memory() or 1 << 40)

    def layers_of(self, method: Method) -> tuple[int, int]:
        """Returns how many of the model's full layers are dense with the method, and the others."""
        layers = self.whole.hparams.layers
        full = [i for i, layer in enumerate(layers) if layer.kind == FULL]
        of_all = replace(self.specs[0], kind=FULL, n_layer=len(layers), n_full=len(full))
        specs = [replace(of_all, layer=i, full_place=at) for at, i in enumerate(full)]
        n_dense = sum(map(method.is_dense, specs)) if method.name != "full" else 0
        return n_dense, len(full) - n_dense

    def _filled(
        self, method: Method, specs: Sequence[LayerSpec], depth: int
    ) -> tuple[list[LayerCache], int]:
        """Returns caches of as many first layers as fit, with ``depth`` rows each.

        The second result is the bytes of weights that a step of these layers reads.
        """
        full = [spec for spec in specs if spec.kind == FULL]
        room = min(self._most_rows, (available_memory() or 1 << 40) // 4)
        n_measured = max(LEAST_LAYERS, room // (depth * self._row_bytes()))
        last = full[:n_measured][-1].layer
        caches = [method.layer(spec) for spec in specs[: last + 1]]
        share_rows(caches)
        self._fill(caches, depth)
        weights = self.decoder.weights
        return caches, replace(weights, layers=weights.layers[: last + 1]).bytes_a_step(1)

    def _point(self, method: Method, specs: Sequence[LayerSpec], depth: int) -> DepthPoint:
        caches, n_bytes = self._filled(method, specs, depth)
        timed = self._timed(caches)
        rest = self._rest(timed, self._n_steps)
        found: dict[bool, list[tuple[float, LayerCache]]] = {True: [], False: []}
        for layer in timed:
            if isinstance(layer, TimedLayer):
                is_dense = method.name != "full" and method.is_dense(layer.cache.spec)
                found[is_dense].append((_typical(layer.seconds[self._n_warm :]), layer.cache))
        points = {is_dense: _mean_point(layers) for is_dense, layers in found.items()}
        sparse = points[False] or points[True]
        assert sparse is not None
        return DepthPoint(depth, rest / n_bytes, sparse, points[True])

    def _start(self, caches: Sequence[LayerCache]) -> None:
        """Prefills a short prompt. Windows get as many rows as they can have."""
        self.decoder.rope.reserve(max(self._depths) + self._n_warm + 2 * self._n_steps)
        self.decoder.forward([0] * N_START, 0, caches)
        self._pos = N_START
        for cache in caches:
            if cache.spec.window:
                self._extend(cache, N_START, cache.spec.window)
                cache.finish_prefill()

    def _fill(self, caches: Sequence[LayerCache], depth: int) -> None:
        self.decoder.rope.reserve(depth + self._n_warm + self._n_steps)
        for cache in caches:
            if cache.spec.kind == FULL:
                cache.reserve(depth + CHUNK)
                self._extend(cache, 0, depth)
                cache.finish_prefill()
        if any(cache.spec.kind != FULL for cache in caches):
            # A recurrent layer only has a state after a prompt. Plain caches take the place of full
            # layers.
            dense = [
                cache if cache.spec.kind != FULL else self._full.layer(cache.spec)
                for cache in caches
            ]
            self.decoder.forward([0] * N_START, 0, dense)
        self._pos = depth

    def _extend(self, cache: LayerCache, first: int, last: int) -> None:
        spec = cache.spec
        q, k, v = self._rows_of(spec).prompt
        for start in range(first, last, CHUNK):
            n = min(CHUNK, last - start)
            at = int(self._rng.integers(N_ROWS - CHUNK))
            part_q, part_k, part_v = (rows[:, at : at + n] for rows in (q, k, v))
            cache.extend(AttnInput(part_q, part_k, part_v, part_q, part_k, start))

    def _timed(self, caches: Sequence[LayerCache]) -> list[Any]:
        return [
            TimedLayer(cache, self._rows_of(cache.spec)) if cache.spec.kind == FULL else cache
            for cache in caches
        ]

    def _rows_of(self, spec: LayerSpec) -> _Inputs:
        shape = spec.n_head, spec.n_head_kv, spec.head_dim, spec.value_dim
        if shape not in self._rows:
            self._rows[shape] = self._new_rows(spec)
        return self._rows[shape]

    def _new_rows(self, spec: LayerSpec) -> _Inputs:
        """Returns normally distributed rows. Half of each step's row is common to all steps."""
        heads = (spec.n_head, spec.head_dim), (spec.n_head_kv, spec.head_dim)
        sizes = (*heads, (spec.n_head_kv, spec.value_dim))
        prompt = tuple(self._rng.standard_normal((h, N_ROWS, d), np.float32) for h, d in sizes)
        lengths = np.exp(KEY_SPREAD * self._rng.standard_normal((spec.n_head_kv, N_ROWS, 1)))
        prompt[1][:] *= lengths.astype(np.float32)
        steps = []
        for i in range(N_QUERIES):
            step = []
            for (h, d), rows in zip(sizes, prompt, strict=True):
                row = np.zeros((h, 1, padded(d)), np.float32)
                row[:, 0, :d] = (rows[:, 0] + rows[:, 1 + i]) * np.float32(0.5**0.5)
                step.append(row)
            steps.append(tuple(step))
        return _Inputs(prompt, steps)


def _typical(seconds: Sequence[float]) -> float:
    """Returns the median, so that a step that other processes delay does not count."""
    return float(np.median(seconds))


def _mean_point(layers: Sequence[tuple[float, LayerCache]]) -> LayerPoint | None:
    """Returns the median seconds and the mean bytes of layers that are alike, or None."""
    if not layers:
        return None
    memory = [cache.memory() for _, cache in layers]
    return LayerPoint(
        _typical([seconds for seconds, _ in layers]),
        round(sum(each.host for each in memory) / len(layers)),
        round(sum(each.index for each in memory) / len(layers)),
    )
