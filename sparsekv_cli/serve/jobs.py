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
from sparsekv_cli.models.tokenizer.marks import SPELLED, Marks
from sparsekv_cli.prefix.difference import Explained
from sparsekv_cli.prefix.prompt_rows import NONE_MOVED, Moved
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.serve.rows import SharedRows, gib

TELL_S = 0.25  # seconds between two progress events of a prefill
LINE_S = 30.0  # seconds between two lines about it
PAUSE_S = 120.0  # seconds for which the rows of a paused prefill are kept


class QueueFullError(SparseKVError):
    """The queue is full: as many requests wait as may wait."""


class StoppingError(SparseKVError):
    """The server is about to end."""


class TooLargeError(SparseKVError):
    """The request needs more memory or more places than the server has for all requests."""


class ContextFullError(TooLargeError):
    """A prompt does not fit. Its words are those of OpenAI, at which agents shorten a conversation.

    n_answer: tokens of the answer, if they count. most: tokens that fit. hint: what else helps.
    """

    def __init__(self, n_prompt: int, n_answer: int, most: int, param: str, hint: str) -> None:
        n_answer = 0 if n_prompt >= most else n_answer
        n_prompt = max(n_prompt, most + 1 - n_answer)  # the answer has a token at least
        found = f"your {param} resulted in {n_prompt} tokens"
        if n_answer:
            found = f"you requested {n_prompt + n_answer} tokens ({n_prompt} in the {param}, "
            found += f"{n_answer} in the completion)"
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, {found}. Please "
            f"reduce the length of the {param}{' or completion' if n_answer else ''}; {hint}"
        )
        self.param = param
        self.anthropic = f"prompt is too long: {n_prompt} tokens > {most} maximum"
        if n_answer:
            self.anthropic = (
                f"input length and `max_tokens` exceed context limit: {n_prompt} + {n_answer} > "
                f"{most}, decrease input length or `max_tokens` and try again"
            )


class TimeLimitError(SparseKVError):
    """The request has taken longer than the server allows."""


class PromptProgress(NamedTuple):
    """How many tokens of a prompt have rows. ``cached`` of them had rows already."""

    done: int
    total: int
    cached: int


class Compiling(NamedTuple):
    """Kernels of a method are being compiled. All requests wait for them."""

    method: str
    done: int = 0  # kernels
    total: int = 0


class NewToken(NamedTuple):
    """A token was chosen; after a draft, several."""

    text: str  # certain text that is new, maybe none
    thinking: str  # certain thinking that is new, maybe none
    logprobs: list[dict[str, Any]]  # the entries of new tokens, if they were asked for
    # The rows that the last step attended to: for each layer the percentage in each bin.
    rows: list[list[int]] | None = None
    n_tokens: int = 1  # new tokens of the answer
    n_accepted: int = 0  # new tokens that were in a draft


class Finished(NamedTuple):
    """The answer is whole."""

    text: str  # after the last piece, as are ``thinking`` and ``logprobs``
    thinking: str
    logprobs: list[dict[str, Any]]
    stop_reason: str  # of generation/answer.py
    stopped_by: str
    n_prompt: int
    n_cached: int  # tokens of the prompt that had rows already
    n_generated: int
    timings: dict[str, float]
    ledger: dict[str, int]  # as ``run --json`` has it
    difference: Explained | None = None  # why known tokens were computed again
    moved: Moved = NONE_MOVED  # rows of other prompts


class Failed(NamedTuple):
    """There is no answer, or the answer ends here."""

    error: Exception


Event = PromptProgress | Compiling | NewToken | Finished | Failed


@dataclass(frozen=True)
class Request:
    """The request of a job. ``sparse_from``: as SessionConfig has it."""

    ids: Ids[int]
    method: Method
    sparse_from: int
    n_predict: int
    sampling: SamplingOptions = SamplingOptions({})
    seed: int | None = None
    stops: Ids[str] = ()
    logprobs: int | None = None
    constraint: AnswerConstraint | None = None
    marks: Marks = SPELLED  # tokens that the reader of the answer's calls needs
    thinking: Thinking | None = None
    n_bins: int = 0  # of the live picture of attended rows; 0: none


@dataclass(eq=False)
class Job:
    """A request in the scheduler. Only the scheduler's thread changes it."""

    request: Request
    emit: Callable[[Event], None]  # called with all events; the last one is Finished or Failed
    seconds: float  # its time limit
    created: float = field(default_factory=time.monotonic)
    generation: Generation | None = None  # while its answer is generated
    n_cached: int = 0
    n_bytes: int = 0  # reserved for it
    difference: Explained | None = None
    prefill_s: float = 0.0
    first_token: float = 0.0
    text: str = ""  # not sent yet, as is ``thinking``
    thinking: str = ""
    counted: dict[str, int] = field(default_factory=dict)  # ledger of the caches at the start
    n_sent: int = 0  # tokens whose log probabilities were sent
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
        """Ends the generation. Returns its sequence and drops the reference to it."""
        assert self.generation is not None
        generation, self.generation = self.generation, None
        return generation.sequence

    def write(self, text: str) -> None:
        """Adds certain text of the answer."""
        self.text += text

    def write_thinking(self, text: str) -> None:
        """Adds certain text of the thinking."""
        self.thinking += text

    def take_new(self) -> tuple[str, str, list[dict[str, Any]]]:
        """Returns the new text, thinking and log probabilities, and counts them as sent."""
        text, thinking, self.text, self.thinking = self.text, self.thinking, "", ""
        generation = self.generation
        assert generation is not None
        kept, n = generation.logprobs, len(generation.answer.tokens)
        entries = [] if kept is None else kept.entries[self.n_sent : n]  # none of the end token
        self.n_sent += len(entries)
        return text, thinking, entries


@dataclass
class Prefilling:
    """A job whose prompt is being prefilled."""

    job: Job
    sequence: Sequence
    steps: Generator[Progress, None, Any]
    rows: SharedRows  # finds and keeps the prompt's rows
    started: float
    reported: float = 0.0  # time of the last progress event
    told: float = 0.0  # time of the last line about it
    n_before: int = 0  # rows that were there when it went on for another job

    def report(self, n_done: int, moment: float, tell: Callable[[str], None]) -> None:
        """Sends an event after TELL_S seconds, and a line to ``tell`` after LINE_S seconds."""
        job, n = self.job, len(self.job.request.ids)
        if moment - self.reported > TELL_S:
            self.reported = moment
            job.emit(PromptProgress(n_done, n, job.n_cached))
        if moment - max(self.told, self.started) > LINE_S:
            self.told, rate = moment, (n_done - job.n_cached) / (moment - self.started)
            left = f", {rate:.0f} t/s, {(n - n_done) / rate:.0f} s left" if rate else ""
            tell(f"prefill: {n_done} of {n} tokens{left}")


class Paused:
    """The prefill of a job whose client has left; none or one.

    It goes on for a request with the same prompt, and ends before another prompt begins. So a
    client with little patience that asks again does not begin anew each time. It also ends after
    PAUSE_S seconds.
    """

    def __init__(self, can_pause: bool) -> None:
        self.all: list[Prefilling] = []
        self._can_pause, self._since = can_pause, 0.0

    def add(self, now: Prefilling, n_done: int, *, is_alone: bool) -> None:
        """Pauses a prefill that has n_done rows. It ends if others run, or none can pause."""
        self.end()
        now.n_before, self._since = n_done, time.monotonic()
        self.all.append(now)
        if not (is_alone and self._can_pause):
            self.end()

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the prefill ends by itself; None if there is none."""
        return max(0.0, self._since + PAUSE_S - time.monotonic()) if self.all else None

    def end_late(self) -> None:
        """Ends a prefill that has been paused for too long."""
        if self.seconds_left == 0:
            self.end()

    def end(self) -> None:
        """Frees the rows."""
        while self.all:
            self.all.pop().steps.close()

    def bytes_for(self, request: Request) -> int:
        """Returns the bytes that are reserved for a request. Ends the prefill of another prompt."""
        for each in self.all:
            old = each.job.request
            alike = old.method == request.method and old.sparse_from == request.sparse_from
            if alike and list(old.ids) == list(request.ids):
                return each.job.n_bytes
        self.end()
        return 0

    def resumed(self, job: Job) -> list[Prefilling]:
        """Returns the prefill, which goes on for a job. ``bytes_for`` was called for the job."""
        found, self.all = self.all, []
        for now in found:
            now.job, now.started, now.reported, job.n_cached = (
                job,
                time.monotonic(),
                0,
                now.n_before,
            )
        return found


def does_not_fit(request: Request, n_bytes: int, most: int) -> ContextFullError:
    """Returns the error of a request whose rows take n_bytes where ``most`` are there."""
    n_prompt, n_answer = len(request.ids), request.n_predict
    n_most = (n_prompt + n_answer) * most // n_bytes
    hint = f"rows of {gib(n_bytes)} do not fit into {gib(most)}, or start the server with more "
    return ContextFullError(n_prompt, n_answer, n_most, "messages", hint + "--kv-memory")


def bins_of(attended: tuple[np.ndarray, np.ndarray] | None, n: int, n_bins: int) -> list[int]:
    """Returns the percentage of attended rows in each of ``n_bins`` equal parts of n rows.

    attended: as LayerCache has it, None: all rows.
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
