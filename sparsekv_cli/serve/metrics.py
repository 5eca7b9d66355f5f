"""The text of /metrics: the scheduler's numbers in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sparsekv_cli.serve.scheduler import Scheduler

PREFIX = "sparsekv_"
BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)  # seconds
# Paths that are told apart; clients may ask for any other.
PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
PATHS |= {"/v1/models", "/health"}


class Metrics:
    """Collects when it is asked, so that a decode step counts plain numbers only."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry()
        self._first_token = Histogram(
            PREFIX + "first_token_seconds", "From a request to its first token.",
            buckets=BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._registry.register(self)

    def add_request(self, path: str, status: int) -> None:
        """A request has ended."""
        self._requests[path if path in PATHS else "other", str(status)] += 1

    def text(self) -> bytes:
        """Returns the page."""
        times = self._scheduler.stats.first_token_s
        while times:
            self._first_token.observe(times.popleft())
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client: everything but the histogram."""
        scheduler, stats = self._scheduler, self._scheduler.stats
        requests = CounterMetricFamily(
            PREFIX + "requests", "Requests that have ended.", labels=("path", "status")
        )
        for labels, n in self._requests.items():
            requests.add_metric(labels, n)
        yield requests
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that were computed.", stats.prompt_tokens),
            ("cached_tokens", "Tokens of prompts whose rows were there.", stats.cached_tokens),
            ("generated_tokens", "Tokens of answers.", stats.generated_tokens),
            ("rows", "KV rows, in each step those of the context.", stats.rows_total),
            ("rows_attended", "KV rows that steps attended to.", stats.rows_attended),
            ("answers", "Answers that are whole.", stats.n_answers),
            ("failures", "Answers that failed.", stats.n_failed),
            ("aborts", "Answers that nobody waited for, or that took too long.", stats.n_aborted),
            ("steps", "Decode steps.", stats.n_steps),
            ("step_tokens", "Tokens of decode steps.", stats.step_tokens),
            ("drafted_tokens", "Tokens of drafts.", stats.drafted_tokens),
            ("accepted_tokens", "Tokens of drafts that are in answers.", stats.accepted_tokens),
            ("step_seconds", "Time of decode steps.", stats.step_s),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in (
            ("queue", "Requests that wait.", scheduler.n_waiting),
            ("running", "Sequences that are prefilled or decoded.", scheduler.n_running),
            ("parked", "Sequences that wait for a prompt that goes on.", scheduler.n_parked),
            ("kv_bytes", "Memory of all sequences' rows and indexes.", stats.kv_bytes),
            ("kv_limit_bytes", "Memory that there is for them.", stats.kv_limit),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
