"""The output of ``bench`` in four formats: llama-bench's fields in its order, then our own."""

import csv
import io
import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsekv_cli import __version__
from sparsekv_cli.evaluation.roofline import Roofline, cpu_name
from sparsekv_cli.settings.config import dense_below

# Fields without a place in CSV, as in llama-bench: a cell cannot be a list.
SAMPLE_FIELDS = ("samples_ns", "samples_ts")
MARKDOWN_NUMBERS = frozenset({"size", "params", "threads", "test", "t/s"})


@dataclass(frozen=True)
class BenchTest:
    """One test: n_prompt tokens of prefill, then n_gen tokens of decode, after n_depth tokens.

    n_seqs: the number of sequences that do this and decode together.
    """

    n_prompt: int
    n_gen: int
    n_depth: int
    n_seqs: int = 1

    @property
    def label(self) -> str:
        """llama-bench's label: pp512, tg128, pp512+tg128, and with a depth ``tg128 @ d8192``.

        Several sequences come before the depth: ``tg128 b4 @ d8192``.
        """
        prompt, gen = f"pp{self.n_prompt}", f"tg{self.n_gen}"
        label = "+".join(p for p, n in ((prompt, self.n_prompt), (gen, self.n_gen)) if n)
        if self.n_seqs > 1:
            label += f" b{self.n_seqs}"
        return f"{label} @ d{self.n_depth}" if self.n_depth else label

    @property
    def decodes_only(self) -> bool:
        return self.n_prompt == 0

    @property
    def n_tokens(self) -> int:
        """The number of timed tokens of one sequence."""
        return self.n_prompt + self.n_gen


@dataclass(frozen=True)
class BenchModel:
    """The fields that are equal in all rows: of the model and the machine.

    size: bytes of all tensors. n_params: elements of all tensors. gpu: the GPU in use; "": none.
    """

    path: Path
    type: str
    size: int
    n_params: int
    n_threads: int
    n_batch: int
    gpu: str = ""


@dataclass(frozen=True)
class BenchResult:
    """One row of the report: a test with a method, and the nanoseconds of each repetition.

    roofline: of a test that only decodes; None for others. sparse_from: see Attention.
    prefill_attention, prefill_budget: how prompts are read (SessionConfig); no budget: densely.
    """

    model: BenchModel
    test: BenchTest
    method: str
    method_options: Mapping[str, Any]
    budget: str | None
    samples_ns: Sequence[int]
    ledger: Mapping[str, Any]
    roofline: Roofline | None = None
    sparse_from: int = 0
    prefill_attention: str = "dense"
    prefill_budget: int | None = None
    test_time: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    @property
    def samples_ts(self) -> list[float]:
        """Tokens a second of each repetition, of all sequences together."""
        n_tokens = self.test.n_seqs * self.test.n_tokens
        return [1e9 * n_tokens / max(ns, 1) for ns in self.samples_ns]

    @property
    def cache_types(self) -> dict[str, str]:
        """Types of K and V in the cache, with llama-bench's names."""
        return {f"type_{x}": self.method_options.get(f"cache_type_{x}", "f16") for x in "kv"}

    def fields(self) -> dict[str, Any]:
        """Returns all fields: llama-bench's in its order, then our own."""
        model, rates, roofline = self.model, self.samples_ts, self.roofline
        return {
            "build_commit": f"sparsekv-cli-{__version__}",
            "build_number": 0,
            "cpu_info": cpu_name(),
            "gpu_info": model.gpu,
            "backends": "CUDA" if model.gpu else "CPU",
            "model_filename": str(model.path),
            "model_type": model.type,
            "model_size": model.size,
            "model_n_params": model.n_params,
            "n_batch": model.n_batch,
            "n_ubatch": model.n_batch,
            "n_threads": model.n_threads,
            **self.cache_types,
            "n_gpu_layers": -1 if model.gpu else 0,
            "n_prompt": self.test.n_prompt,
            "n_gen": self.test.n_gen,
            "n_depth": self.test.n_depth,
            "test_time": self.test_time,
            "avg_ns": round(statistics.fmean(self.samples_ns)),
            "stddev_ns": round(deviation(self.samples_ns)),
            "avg_ts": statistics.fmean(rates),
            "stddev_ts": deviation(rates),
            "samples_ns": list(self.samples_ns),
            "samples_ts": rates,
            "method": self.method,
            "method_options": dict(self.method_options),
            "budget": self.budget,
            "ledger": dict(self.ledger),
            "roofline_bytes": roofline and roofline.n_bytes,
            "bandwidth": roofline and roofline.bandwidth,
            "bound_ts": roofline and roofline.bound_ts,
            "fraction": roofline and roofline.fraction(statistics.fmean(rates)),
            "n_seqs": self.test.n_seqs,
            "sparse_from": self.sparse_from,
            "prefill_attention": self.prefill_attention,
            "prefill_budget": self.prefill_budget,
        }

    def columns(self) -> dict[str, str]:
        """Returns the cells of the markdown table."""
        rates, reading = self.samples_ts, self.prefill_attention
        budget = None if self.budget is None else self.budget.partition(" (")[0]  # no limits
        cells = {
            "model": self.model.type,
            "size": _binary_size(self.model.size),
            "params": _decimal_size(self.model.n_params),
            "backend": "CUDA" if self.model.gpu else "CPU",
            "threads": str(self.model.n_threads),
            **{key: name for key, name in self.cache_types.items() if name != "f16"},
            **({"prefill": f"{reading} {self.prefill_budget}"} if self.prefill_budget else {}),
            "method": self.method if budget is None else f"{self.method} {budget}",
            "test": self.test.label,
            "t/s": f"{statistics.fmean(rates):.2f} ± {deviation(rates):.2f}",
        }
        return cells


def deviation(samples: Sequence[float]) -> float:
    """Returns the sample standard deviation; 0 for a single sample."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


class Report(ABC):
    """Writes results one by one, in most formats. There is a subclass for each format of ``-O``."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self.n_rows = 0

    @abstractmethod
    def row(self, result: BenchResult) -> None:
        """Writes one result. Before the first one it writes the header."""

    def close(self) -> None:  # noqa: B027 - a format may need nothing here
        """Writes what comes after the last result."""


class MarkdownReport(Report):
    """A table for people, with columns as wide as the first row needs.

    Lines after the table tell from which depth methods are sparse, and the roofline of each test
    that decodes.
    """

    def row(self, result: BenchResult) -> None:
        cells = result.columns()
        if self.n_rows == 0:
            self.rooflines: list[str] = []
            self.depths: dict[str, int] = {}
            self.widths = {name: max(len(name), len(cell)) for name, cell in cells.items()}
            for name, least in {"method": 12, "test": 16, "t/s": 20}.items():
                self.widths[name] = max(self.widths[name], least)
            self._line({name: name for name in cells})
            rules = {}
            for name, width in self.widths.items():
                rules[name] = "-" * (width - 1) + (":" if name in MARKDOWN_NUMBERS else "-")
            self._line(rules)
        self._line(cells)
        self.n_rows += 1
        if result.sparse_from:
            self.depths[result.method] = result.sparse_from
        if result.roofline is not None:
            what = f"{result.test.label} {result.method}"
            rate = statistics.fmean(result.samples_ts)
            self.rooflines.append(result.roofline.line(what, rate))

    def close(self) -> None:
        if not self.n_rows:
            return
        lines = [
            f"{name}: {dense_below(n)}, sparse from there on (--sparse-from)"
            for name, n in self.depths.items()
        ]
        if lines or self.rooflines:
            self.write("\n" + "\n".join(lines + self.rooflines) + "\n")

    def _line(self, cells: Mapping[str, str]) -> None:
        padded = []
        for name, cell in cells.items():
            width = self.widths[name]
            padded.append(cell.rjust(width) if name in MARKDOWN_NUMBERS else cell.ljust(width))
        self.write("| " + " | ".join(padded) + " |\n")


class JsonReport(Report):
    """One JSON array of objects, written at the end, also if an error ends the run early.

    A process that is killed writes nothing.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(write)
        self.rows: list[dict[str, Any]] = []

    def row(self, result: BenchResult) -> None:
        self.rows.append(result.fields())

    def close(self) -> None:
        self.write(json.dumps(self.rows, indent=2) + "\n")


class JsonLinesReport(Report):
    """One object a line."""

    def row(self, result: BenchResult) -> None:
        self.write(json.dumps(result.fields()) + "\n")


class CsvReport(Report):
    """A header, then one line a result. method_options and ledger are JSON within a cell."""

    def row(self, result: BenchResult) -> None:
        fields = {k: v for k, v in result.fields().items() if k not in SAMPLE_FIELDS}
        if self.n_rows == 0:
            self._line(list(fields))
        self._line([json.dumps(v) if isinstance(v, dict) else v for v in fields.values()])
        self.n_rows += 1

    def _line(self, cells: Sequence[Any]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        self.write(text.getvalue())


REPORTS: dict[str, type[Report]] = {
    "md": MarkdownReport,
    "json": JsonReport,
    "jsonl": JsonLinesReport,
    "csv": CsvReport,
}


def _binary_size(n_bytes: int) -> str:
    if n_bytes >= 1 << 30:
        return f"{n_bytes / (1 << 30):.2f} GiB"
    return f"{n_bytes / (1 << 20):.2f} MiB"


def _decimal_size(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
