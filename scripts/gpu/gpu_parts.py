"""The parts of scripts/gpu/bench: what each of them measures, row by row of its tables."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_decoding import BACKENDS, Decoding, attention_of, profile_rows
from gpu_host import HostPart
from gpu_launches import recorded
from gpu_models import RandomModel, filled_caches, open_engine, random_model, tiny_model
from gpu_operators import SHAPES, Operator, OperatorInputs, Shape, cache_operators
from gpu_references import compare
from gpu_report import Row, Task
from gpu_timing import copy_bandwidth, link_bandwidth, time_calls
from gpu_weights import FORMATS, pair_rows, weight_rows

from sparsekv_cli.cache.counters import ledger_of
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.cpu.jit.install import use_threads
from sparsekv_cli.device.engine import DeviceEngine
from sparsekv_cli.device.methods import device_cache
from sparsekv_cli.evaluation.compare import build_spec
from sparsekv_cli.evaluation.observer import Measured
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.models.sources.locate import resolve_model
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.system.work import usable_cores

TEXT = Path(__file__).resolve().parents[1] / "accuracy" / "texts" / "mixed.txt"
LOGITS_OF = (
    "full", "topk", "streaming", "quest", "fasa", "fasa:variant=m", "sals", "freekv", "lfps",
    "snapkv", "h2o",
)  # fmt: skip
WHOLE_OF = ("topk", "streaming", "quest", "fasa", "fasa:variant=m", "freekv")
TOKENS_OF = (
    "full", "quest", "fasa", "topk", "streaming", "sals", "torch sdpa", "cudnn sdpa", "freekv",
    "fasa:variant=m",
)  # fmt: skip
OVER_THE_BUS = ("freekv", "fasa:variant=m")
# Of ``tokens``: the settings that are claimed come first.
DEPTHS = (
    ("llama-3.1-8b", 32768, 1),
    ("llama-3.1-8b", 32768, 8),
    ("llama-3.1-8b", 131072, 1),
    ("llama-3.1-8b", 8192, 1),
    ("llama-3.1-8b", 8192, 8),
    ("llama-3.2-1b", 32768, 1),
)
PREFILLED = (2048, 8192, 32768)  # tokens
PROFILED = ("full", "quest", "fasa")
OPERATOR_ROWS, OPERATOR_BATCHES = (32768, 131072, 8192), (1, 8)
DEFAULT_MODEL = "smollm2"
LARGEST_KLD = 1e-3
ABLATION = (
    "freekv", "freekv:speculate=false", "freekv:correct=false", "freekv:tau=0.8",
    "freekv:cache_pages=1", "freekv:preset=paper", "freekv:preset=paper;speculate=false",
)  # fmt: skip
COUNTERS = (
    "pages_recalled", "pages_hit", "heads_corrected", "us_waited", "rows_hit", "rows_recalled",
)  # fmt: skip


class Bench:
    """Where to measure, and how large.

    tiny: sizes for Triton's interpreter, to see that it runs. model: a GGUF file for ``logits``.
    """

    def __init__(self, device: torch.device, tiny: bool, model: str | None) -> None:
        self.device, self.tiny, self._model = device, tiny, model
        self.n_threads = use_threads(usable_cores())  # ahead of every kernel of the CPU
        self._budget = Budget(tokens=64 if tiny else 512)

    @cached_property
    def bandwidth(self) -> float:
        """GB/s of copies within the device."""
        return copy_bandwidth(self.device)

    @cached_property
    def link(self) -> float:
        """GB/s from the host."""
        return link_bandwidth(self.device)

    # --- logits: the device against the CPU -------------------------------------------------------

    def logits(self) -> Iterator[Task]:
        """KLD(CPU || device) of every method over the same tokens; KLD(full || method) of those
        whose budget holds the context, on the device. Prefills are f32, so that they are alike."""
        with tempfile.TemporaryDirectory() as folder:
            use_tiny = self.tiny and not self._model
            path = tiny_model(folder) if use_tiny else resolve_model(self._model or DEFAULT_MODEL)
            for name in LOGITS_OF:
                yield Task("logits", name, partial(self._logits_of, path, name))
            for name in WHOLE_OF:
                yield Task("whole budget", name, partial(self._whole_budget_of, path, name))

    def _open(self, path: Path, spec: str, device: str, common: dict[str, str]) -> Model:
        config = SessionConfig(
            threads=self.n_threads, ctx_size=4096, device=device, prefill_dtype="f32",
            activations="16",  # to which the CPU rounds; the GPU rounds less
        )  # fmt: skip
        if self.tiny:
            config = replace(config, ctx_size=256)
        return load_model(path, build_spec(spec, common), config)

    def _ids(self, model: Model, n: int) -> list[int]:
        if self.tiny:
            return np.random.default_rng(0).integers(3, model.hparams.n_vocab, n).tolist()
        return list(model.tokenizer.encode(TEXT.read_text(encoding="utf-8")))[:n]

    def _logits_of(self, path: Path, spec: str) -> Iterator[Row]:
        n_prompt, n_steps = (100, 1) if self.tiny else (2000, 16)
        common = {"budget": "40", "dense_layers": "0"} if self.tiny else {}
        model = self._open(path, spec, "cpu", common)
        cpu, gpu = model.sequence(), self._open(path, spec, "cuda", common).sequence()
        at_prompt, kld, top1 = _compare(cpu, gpu, self._ids(model, n_prompt), n_steps)
        counts = gpu.ledger()
        yield {
            "method": spec, "KLD": kld, "top-1": top1, "KLD of prefill": at_prompt,
            "ok": kld < LARGEST_KLD, "cache": "device" if device_cache(cpu.method) else "host",
            # Of a text and a model, not of random rows.
            "counts a step": ", ".join(
                f"{name} {counts[name] / n_steps:.4g}" for name in COUNTERS if name in counts
            ),
        }  # fmt: skip

    def _whole_budget_of(self, path: Path, spec: str) -> Iterator[Row]:
        n_prompt, n_steps = (40, 1) if self.tiny else (600, 4)
        whole = {"budget": "4096", **({"dense_layers": "0"} if self.tiny else {})}
        model = self._open(path, "full", "cuda", whole)
        full, method = model.sequence(), self._open(path, spec, "cuda", whole).sequence()
        at_prompt, kld, top1 = _compare(full, method, self._ids(model, n_prompt), n_steps)
        yield {
            "method": spec, "KLD": kld, "top-1": top1, "KLD of prefill": at_prompt,
            "ok": kld < 1e-6,
        }  # fmt: skip

    # --- one layer --------------------------------------------------------------------------------

    def weights(self) -> Iterator[Task]:
        """Products with quantised matrices."""
        for name in FORMATS:
            rows = partial(weight_rows, name, self.device, self.tiny, self.bandwidth)
            yield Task("weights", name, rows)
        yield Task("weights", "pair", partial(pair_rows, self.device, self.tiny, self.bandwidth))

    def operators(self) -> Iterator[Task]:
        """Attention of one layer; the shapes and depths that are claimed first."""
        shapes: Ids[Shape] = [Shape("tiny", 4, 2, 64)] if self.tiny else SHAPES
        for n in (200,) if self.tiny else OPERATOR_ROWS:
            for n_batch in (2,) if self.tiny else OPERATOR_BATCHES:
                for shape in shapes:
                    name = f"{shape.name} B={n_batch} {n}"
                    yield Task("operators", name, partial(self._operators_at, shape, n_batch, n))

    def _operators_at(self, shape: Shape, n_batch: int, n: int) -> Iterator[Row]:
        """A row an operator; none where the rows do not fit."""
        n_bytes = 4 * n_batch * shape.n_head_kv * n * shape.d
        if not self._fits(1.6 * n_bytes):
            return
        # Several sets of inputs where one might stay in the device's cache.
        n_set = max(1, min(8, (400 << 20) // n_bytes)) if self.device.type == "cuda" else 1
        sets = [OperatorInputs(shape, n_batch, n, self.device) for _ in range(n_set)]
        base = 0.0
        for together in zip(*(each.operators() for each in sets), strict=True):
            first = together[0]
            ms = time_calls([operator.run for operator in together], self.device)
            base = ms if first.name == "torch sdpa" else base
            yield self._operator_row(shape, n_batch, n, first, ms, base)
        del sets, together, first
        # To pin more memory of the host than that takes longer than all the measuring.
        # freekv's row holds its side stream; without speculation there is none to hide.
        names = ("sals", "freekv", "freekv:speculate=false") if n_bytes <= 4 << 30 else ("sals",)
        for operator in cache_operators(names, shape, n_batch, n, self.device):
            ms = time_calls([operator.run], self.device, restore=operator.restore)
            yield self._operator_row(shape, n_batch, n, operator, ms, base)

    def _operator_row(
        self, shape: Shape, n_batch: int, n: int, operator: Operator, ms: float, base: float
    ) -> Row:
        with recorded(run=True) as launches:
            out = operator.run()
        error, ok = compare(out, operator.expected())
        operator.restore()
        return {
            "shape": shape.name, "B": n_batch, "context": n, "operator": operator.name, "ms": ms,
            "over sdpa": base / ms, "MB": operator.n_bytes / 1e6,
            "of bandwidth": operator.n_bytes / ms / 1e6 / self.bandwidth,
            "launches": sum(not x.beside for x in launches), "error": error, "ok": ok,
        }  # fmt: skip

    def _fits(self, n_bytes: float) -> bool:
        if self.device.type != "cuda":
            return True
        return n_bytes < torch.cuda.mem_get_info(self.device)[0]

    # --- whole tokens -----------------------------------------------------------------------------

    def tokens(self) -> Iterator[Task]:
        """Decode with random weights, K and V on the device."""
        names = ("tiny",) if self.tiny else ("llama-3.1-8b", "llama-3.2-1b")
        models = {name: random_model(name) for name in names}

        @lru_cache
        def engine_of(name: str) -> DeviceEngine:
            return open_engine(models[name], self.device, self.n_threads, "auto")

        for name, n, n_batch in [("tiny", 150, 2)] if self.tiny else DEPTHS:
            model, engine = models[name], engine_of(name)
            for spec in TOKENS_OF:
                if spec == "cudnn sdpa" and self.device.type != "cuda":
                    continue
                if (n_batch > 1 or n > 32768) and spec in OVER_THE_BUS:
                    continue  # to pin that much memory of the host takes longer than to measure
                decode = partial(self._decode_speed, model, engine, spec, n, n_batch)
                yield Task(f"tokens, {name}", f"{spec} B={n_batch} {n}", decode)

    def prefill(self) -> Iterator[Task]:
        """Prompts with random weights, K and V on the device."""
        name = "tiny" if self.tiny else "llama-3.1-8b"
        model = random_model(name)
        engine = open_engine(model, self.device, self.n_threads, "auto")
        for n in (100,) if self.tiny else PREFILLED:
            prefill = partial(self._prefill_speed, model, engine, n)
            yield Task(f"prefill, {name}", f"full {n}", prefill)

    def host(self) -> Iterator[Task]:
        """Decode with random weights, K and V on the host."""
        model = random_model("tiny" if self.tiny else "llama-3.1-8b")

        @lru_cache
        def engine_of(kv: str) -> DeviceEngine:
            return open_engine(model, self.device, self.n_threads, kv)

        yield from HostPart(self.device, self.tiny, engine_of, self.method).tasks()

    def _prefill_speed(self, model: RandomModel, engine: DeviceEngine, n: int) -> Iterator[Row]:
        ids = np.random.default_rng(0).integers(0, model.hparams.n_vocab, n).tolist()
        seconds = []
        for _ in range(2):  # the first compiles
            caches = [engine.layer(build_spec("full"), s) for s in engine.decoder.layer_specs()]
            for cache in caches:
                cache.reserve(n)
            begin = time.perf_counter()
            engine.decoder.forward(ids, 0, caches)
            seconds.append(time.perf_counter() - begin)
        yield {"tokens": n, "t/s": n / seconds[-1], "s": seconds[-1]}

    def _decode_speed(
        self, model: RandomModel, engine: DeviceEngine, spec: str, n: int, n_batch: int = 1
    ) -> Iterator[Row]:
        """Steps of n_batch sequences that choose their tokens greedily, as generation does."""
        if not self._fits(1.4 * n_batch * model.hparams.kv_bytes(n)):
            return
        # The first steps are compiled, captured, and replayed once.
        n_first, n_steps = (0, 1) if self.tiny else (3, 16)
        method = self.method("full" if spec in BACKENDS else spec)
        with attention_of(spec):
            steps = Decoding(engine, method, n, n_first + n_steps, n_batch)
            for _ in range(n_first):
                steps.step()
            before = steps.ledger()
            ms = statistics.median(1e3 * steps.timed_step() for _ in range(n_steps))
        after = steps.ledger()
        moved = (after["bytes_moved"] - before.get("bytes_moved", 0)) / n_steps
        waited = (after.get("us_waited", 0) - before.get("us_waited", 0)) / n_steps
        yield {
            "method": spec, "B": n_batch, "context": n, "K and V": "auto", "ms": ms,
            "t/s": 1e3 * n_batch / ms,
            "device MB": after["bytes_device"] / 1e6, "host MB": after["bytes_host"] / 1e6,
            "MB moved a token, random rows": moved / 1e6, "us waited": waited,
        }  # fmt: skip

    def method(self, spec: str) -> Any:
        """A method as ``tokens`` runs it: 512 rows, and its own dense layers."""
        method: Any = build_spec(spec)
        if hasattr(method, "budget") and not spec.startswith("sals"):
            method = replace(method, budget=self._budget)
        if self.tiny:  # it has two layers
            method = replace(method, dense_layers=(0,))
        return method

    def profile(self) -> Iterator[Task]:
        """Where a step's time goes, by kernel."""
        name, n = ("tiny", 40) if self.tiny else ("llama-3.1-8b", 32768)
        engine = open_engine(random_model(name), self.device, self.n_threads, "auto")
        for n_batch in (1,) if self.tiny else (1, 8):
            for spec in PROFILED:
                rows = partial(self._profile_of, engine, spec, n, n_batch)
                yield Task(f"profile, {spec} B={n_batch}", spec, rows)

    def _profile_of(self, engine: DeviceEngine, spec: str, n: int, n_batch: int) -> Iterator[Row]:
        n_first, n_steps = (0, 1) if self.tiny else (3, 4)
        steps = Decoding(engine, self.method(spec), n, n_first + 2 * n_steps, n_batch)
        for _ in range(n_first):
            steps.step()
        ms = statistics.median(1e3 * steps.timed_step() for _ in range(n_steps))
        yield from profile_rows(steps.step, n_steps, ms, self.device)

    def freekv(self) -> Iterator[Task]:
        """FreeKV's parts switched on and off."""
        model = random_model("tiny" if self.tiny else "llama-3.1-8b")
        engine = open_engine(model, self.device, self.n_threads, "auto")
        n = 150 if self.tiny else 32768
        for spec in ABLATION:
            decode = partial(self._decode_speed, model, engine, spec, n)
            yield Task("freekv", spec, decode)

    def memory(self) -> Iterator[Task]:
        """What caches hold beside full's."""
        model = random_model("tiny" if self.tiny else "llama-3.2-1b")
        engine = open_engine(model, self.device, self.n_threads, "auto")
        n = 300 if self.tiny else 32768
        for spec in ("full", "fasa", "fasa:variant=m", "sals", "freekv", "quest"):
            yield Task("memory", spec, partial(self._memory_of, model, engine, spec, n))

    def _memory_of(
        self, model: RandomModel, engine: DeviceEngine, spec: str, n: int
    ) -> Iterator[Row]:
        method = replace(build_spec(spec), dense_layers=())
        held = ledger_of(filled_caches(engine, method, n, 4))
        yield {
            "method": spec, "context": n, "device": held["bytes_device"] / 1e6,
            "host": held["bytes_host"] / 1e6, "index": held["index_bytes"] / 1e6,
            "device of full": held["bytes_device"] / model.hparams.kv_bytes(n + 4),
        }  # fmt: skip


def _compare(
    one: Sequence, other: Sequence, ids: Ids[int], n_steps: int
) -> tuple[float, float, float]:
    """KLD(one || other) after ``ids``, and its mean and the shared top-1 of steps, in which both
    get what ``one`` predicts."""
    measured = Measured()
    expected, found = one.prefill(ids), other.prefill(ids)
    measured.add_step(expected, found)
    at_prompt = measured.kld.pop()
    for _ in range(n_steps):
        token = int(expected.argmax())
        expected, found = one.decode(token), other.decode(token)
        measured.add_step(expected, found)
    return at_prompt, statistics.mean(measured.kld), statistics.mean(measured.same_top1[1:])
