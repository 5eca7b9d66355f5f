"""One answer that a client waits for: its request, and the events that are sent to the client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.constraint import AnswerConstraint
from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.chat.thinking import Thinking
from sparsekv_cli.models.forward import Progress
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.serve.rows import SharedRows


class QueueFullError(SparseKVError):
    """The queue is full: no more requests may wait."""


class StoppingError(SparseKVError):
    """The server is ending."""


class TooLargeError(SparseKVError):
    """The request needs more memory or more places than the server has for all requests."""


class TimeLimitError(SparseKVError):
    """The request has taken longer than the server allows."""


class PromptProgress(NamedTuple):
    """How many tokens of a prompt have rows. ``cached`` of them had rows at the start."""

    done: int
    total: int
    cached: int


class Compiling(NamedTuple):
    """Kernels of a method are compiled. All requests wait for them."""

    method: str


class NewToken(NamedTuple):
    """A token was chosen, or several after a draft."""

    text: str  # new text that will not change, maybe empty
    thinking: str  # new thinking that will not change, maybe empty
    logprobs: list[dict[str, Any]]  # the entries of new tokens, if they were asked for
    # The rows that the last step attended to: for each layer the percentage in each bin.
    rows: list[list[int]] | None = None
    n_tokens: int = 1  # new tokens of the answer
    n_accepted: int = 0  # new tokens that were in a draft


class Finished(NamedTuple):
    """The answer is complete."""

    text: str  # the rest after the last piece, as in ``thinking`` and ``logprobs``
    thinking: str
    logprobs: list[dict[str, Any]]
    stop_reason: str  # see generation/answer.py
    stopped_by: str
    n_prompt: int
    n_cached: int  # tokens of the prompt that had rows at the start
    n_generated: int
    timings: dict[str, float]
    ledger: dict[str, int]  # as in ``run --json``


class Failed(NamedTuple):
    """The answer has failed, before its first token or later."""

    error: Exception


Event = PromptProgress | Compiling | NewToken | Finished | Failed


@dataclass(frozen=True)
class Request:
    """The request of a job. ``sparse_from``: see SessionConfig."""

    ids: Ids[int]
    method: Method
    sparse_from: int
    n_predict: int
    sampling: SamplingOptions = SamplingOptions({})
    seed: int | None = None
    stops: Ids[str] = ()
    logprobs: int | None = None
    constraint: AnswerConstraint | None = None
    special: bool = False
    thinking: Thinking | None = None
    n_bins: int = 0  # bins of the live picture of attended rows; 0: no picture


@dataclass(eq=False)
class Job:
    """A request in the scheduler. Only the scheduler's thread changes it."""

    request: Request
    emit: Callable[[Event], None]  # gets all events; the last one is Finished or Failed
    seconds: float  # the most that it may take
    created: float = field(default_factory=time.monotonic)
    generation: Generation | None = None  # set while its answer is generated
    n_cached: int = 0
    n_bytes: int = 0  # bytes that are reserved for it
    prefill_s: float = 0.0
    first_token: float = 0.0
    text: str = ""  # text that was not sent yet, as ``thinking``
    thinking: str = ""
    counted: dict[str, int] = field(default_factory=dict)  # the caches' ledger at the start
    n_told: int = 0  # tokens whose log probabilities were sent
    _aborted: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        """Marks the job as aborted. Any thread may call this."""
        self._aborted.set()

    @property
    def is_aborted(self) -> bool:
        return self._aborted.is_set()

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.created > self.seconds

    def end(self) -> Sequence:
        """Ends the generation. Returns its sequence, which the job then releases."""
        assert self.generation is not None
        generation, self.generation = self.generation, None
        return generation.sequence

    def write(self, text: str) -> None:
        """Adds text of the answer that will not change."""
        self.text += text

    def write_thinking(self, text: str) -> None:
        """Adds text of the thinking that will not change."""
        self.thinking += text

    def told(self) -> tuple[str, str, list[dict[str, Any]]]:
        """Returns the new text, thinking and log probabilities."""
        text, self.text = self.text, ""
        thinking, self.thinking = self.thinking, ""
        logprobs = self.generation.logprobs if self.generation is not None else None
        entries = [] if logprobs is None else logprobs.entries[self.n_sent :]
        self.n_sent += len(entries)
        return text, thinking, entries


@dataclass
class Prefilling:
    """A job whose prompt is being prefilled."""

    job: Job
    sequence: Sequence
    steps: Generator[Progress, None, Any]
    rows: SharedRows | None  # finds and keeps the prompt's rows
    started: float
    told: float = 0.0  # time of the last news of the prefill


def bins_of(attended: tuple[np.ndarray, np.ndarray] | None, n: int, n_bins: int) -> list[int]:
    """Returns the percentage of attended rows in each of ``n_bins`` equal parts of n rows.

    attended: see LayerCache; None: all rows.
    """
    n_bins = min(n_bins, n)
    if attended is None:
        return [100] * n_bins
    idx, counts = attended
    valid = np.arange(idx.shape[1]) < counts[:, None]
    rows = idx[valid].astype(np.int64)
    edges = np.bincount(np.arange(n) * n_bins // n, minlength=n_bins) * len(idx)
    shares = np.bincount(rows * n_bins // n, minlength=n_bins)[:n_bins] / edges
    return np.ceil(100 * np.minimum(shares, 1)).astype(int).tolist()
