"""The text of /metrics: the numbers of all models, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

ValueOf = Callable[[Any], float]  # returns a number of a HostedModel (serve/pool.py)
PREFIX = "sparsekv_"
BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # seconds
# Paths with their own counts; all other paths share one.
PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
PATHS |= {"/v1/models", "/health"}


class Metrics:
    """Collects numbers when it is asked. A decode step only counts."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, models: Sequence[Any]) -> None:
        """models: each a HostedModel."""
        self._models = models
        self._requests: Counter[tuple[str, str]] = Counter()
        self._unused: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._first_token = Histogram(
            PREFIX + "first_token_seconds", "From a request to its first token.",
            buckets=BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._registry.register(self)

    def add_request(self, path: str, status: int) -> None:
        """Counts a request that has ended."""
        self._requests[path if path in PATHS else "other", str(status)] += 1

    def add_unused(self, name: str) -> int:
        """Counts a field without an effect, and returns how many requests have had it."""
        self._unused[name] += 1
        return self._unused[name]

    def text(self) -> bytes:
        """Returns the page."""
        for model in self._models:
            times = model.stats.first_token_s
            while times:
                self._first_token.observe(times.popleft())
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics but the histogram, for prometheus_client."""
        requests = CounterMetricFamily(
            PREFIX + "requests", "Requests that have ended.", labels=("path", "status")
        )
        for labels, n in self._requests.items():
            requests.add_metric(labels, n)
        yield requests
        yield _labelled(
            "unused_fields", "field", "Fields of requests without full effect.", self._unused
        )
        for name, label, text, counts_of in LABELLED:
            counts = sum(map(counts_of, self._models), Counter[str]())
            yield _labelled(name, label, text, counts)
        names = ("model",) if len(self._models) > 1 else ()
        for kind, families in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, text, value_of in families:
                family = kind(PREFIX + name, text, labels=names)
                for model in self._models:
                    family.add_metric((model.name,)[: len(names)], value_of(model))
                yield family


LABELLED: tuple[tuple[str, str, str, Callable[[Any], Counter[str]]], ...] = (
    (
        "prompt_differences", "cause", "Prompts with known tokens that were computed again.",
        lambda model: model.stats.differences,
    ),
    (
        "volatile_lines", "header", "Lines of system prompts that were left out.",
        lambda model: model.stats.volatile_lines,
    ),
)  # fmt: skip


def _labelled(name: str, label: str, text: str, counts: Counter[str]) -> CounterMetricFamily:
    """Returns a counter with a value for each label."""
    family = CounterMetricFamily(PREFIX + name, text, labels=(label,))
    for value, n in counts.items():
        family.add_metric((value,), n)
    return family


def _of_scheduler(name: str) -> ValueOf:
    """Returns a number of the scheduler; 0 while the model is not loaded."""

    def value(model: Any) -> float:
        return 0 if model.loaded is None else getattr(model.loaded.service.scheduler, name)

    return value


COUNTERS: tuple[tuple[str, str, ValueOf], ...] = (
    ("prompt_tokens", "Tokens of prompts that were computed.", lambda m: m.stats.prompt_tokens),
    ("cached_tokens", "Tokens of prompts that had rows already.", lambda m: m.stats.cached_tokens),
    ("reused_tokens", "Tokens of known passages, moved.", lambda m: m.stats.reused_tokens),
    ("repaired_tokens", "Of these, computed again.", lambda m: m.stats.repaired_tokens),
    ("generated_tokens", "Tokens of answers.", lambda m: m.stats.generated_tokens),
    ("rows", "KV rows of the context, added up over steps.", lambda m: m.stats.rows_total),
    ("rows_attended", "KV rows that steps attended to.", lambda m: m.stats.rows_attended),
    ("answers", "Answers that were completed.", lambda m: m.stats.n_answers),
    ("failures", "Answers that failed.", lambda m: m.stats.n_failed),
    ("aborts", "Answers whose client left, or that took too long.", lambda m: m.stats.n_aborted),
    ("steps", "Decode steps.", lambda m: m.stats.n_steps),
    ("step_tokens", "Tokens of decode steps.", lambda m: m.stats.step_tokens),
    ("drafted_tokens", "Tokens of drafts.", lambda m: m.stats.drafted_tokens),
    ("accepted_tokens", "Tokens of drafts that were accepted.", lambda m: m.stats.accepted_tokens),
    ("step_seconds", "Time of decode steps.", lambda m: m.stats.step_s),
    ("model_loads", "Times that a model was loaded.", lambda m: m.n_loads),
)
GAUGES: tuple[tuple[str, str, ValueOf], ...] = (
    ("queue", "Requests that wait.", _of_scheduler("n_waiting")),
    ("running", "Sequences that are prefilled or decoded.", _of_scheduler("n_running")),
    ("parked", "Sequences kept for a prompt that continues them.", _of_scheduler("n_parked")),
    ("kv_bytes", "Memory of all sequences' rows and indexes.", lambda m: m.stats.kv_bytes),
    ("kv_limit_bytes", "Most memory for these rows and indexes.", lambda m: m.stats.kv_limit),
    ("model_loaded", "Whether a model is in memory.", lambda m: m.loaded is not None),
)
