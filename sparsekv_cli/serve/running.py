"""The answers that are decoded together: choosing of tokens, steps, and what clients are told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sparsekv_cli.errors import LostModelError
from sparsekv_cli.sampling.plain import Outcome
from sparsekv_cli.sequence import ledger_of
from sparsekv_cli.serve.jobs import Failed, Finished, Job, NewToken, bins_of
from sparsekv_cli.session import Session

N_KEPT = 10_000  # times that wait for the next look of the metrics
# What a ledger says of the memory; the rest counts what was done.
LEDGER_BYTES = {"bytes_host", "bytes_device", "index_bytes"}


@dataclass
class Stats:
    """Counts since the start; times in seconds."""

    kv_limit: int
    kv_bytes: int = 0  # of all sequences
    prompt_tokens: int = 0  # that were computed
    cached_tokens: int = 0  # of prompts, whose rows were there
    generated_tokens: int = 0
    rows_total: int = 0
    rows_attended: int = 0
    n_answers: int = 0
    n_failed: int = 0
    n_aborted: int = 0
    n_steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_KEPT))

    def add_step(self, n_tokens: int, seconds: float) -> None:
        self.n_steps += 1
        self.step_tokens += n_tokens
        self.step_s += seconds

    def add_answer(self, n_tokens: int, ledger: Mapping[str, int]) -> None:
        self.n_answers += 1
        self.generated_tokens += n_tokens
        self.rows_total += ledger["rows_total"]
        self.rows_attended += ledger["rows_attended"]


class Running:
    """Jobs whose prompts are prefilled. park: what becomes of the sequence of one that has left."""

    def __init__(self, session: Session, stats: Stats, park: Callable[[Job], None]) -> None:
        self.jobs: list[Job] = []
        self._session, self._stats, self._park = session, stats, park

    def step(self) -> None:
        """The next token of every answer; those that are done leave."""
        started = time.monotonic()
        for job in list(self.jobs):
            self._choose(job)
        if self.jobs:
            self._decode(list(self.jobs))
            self._stats.add_step(len(self.jobs), time.monotonic() - started)

    def tells_rows(self, job: Job) -> bool:
        """Whether the client is told which rows a step has attended to."""
        return job.wish.n_bins > 0 and self._session.engine.records_attended

    def fail(self, job: Job, error: Exception) -> None:
        """There is no answer, or no more of it."""
        self._stats.n_failed += 1
        job.emit(Failed(error))

    def _choose(self, job: Job) -> None:
        """Chooses the next token of an answer, which ends with it or has it decoded."""
        assert job.state is not None and job.answer is not None and job.outcome is not None
        self._session.state = job.state
        try:
            is_done = job.answer.choose(job.outcome, self._session)
            if not job.first_token:
                job.first_token = time.monotonic()
                self._stats.first_token_s.append(job.first_token - job.created)
            if is_done:
                self._finish(job)
                return
        except Exception as error:
            self.jobs.remove(job)
            self._park(job)
            self.fail(job, error)
            return
        if not self.tells_rows(job):
            job.emit(NewToken(*job.told()))

    def _decode(self, jobs: Sequence[Job]) -> None:
        """Decodes the tokens that were chosen, together; each alone where that fails."""
        lengths = [len(job.state.tokens) for job in jobs if job.state is not None]
        try:
            outcomes = self._decoded(jobs)
        except LostModelError:
            raise
        except Exception as error:
            for job, n in zip(jobs, lengths, strict=True):
                if len(jobs) > 1 and job.state is not None and len(job.state.tokens) == n:
                    self._decode([job])
                else:  # it is the cause, or its method could not go back
                    self.jobs.remove(job)
                    self.fail(job, error)
            return
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.outcome = outcome
            if self.tells_rows(job) and job.state is not None:
                n = len(job.state.tokens)
                bins = [bins_of(c.attended, n, job.wish.n_bins) for c in job.state.caches]
                job.emit(NewToken(*job.told(), bins))

    def _decoded(self, jobs: Sequence[Job]) -> list[Outcome]:
        """What a step gives; after an exception the sequences are what they were, or empty."""
        states = [job.state for job in jobs if job.state is not None]
        answers = [job.answer for job in jobs if job.answer is not None]
        tokens, samples = [each.token for each in answers], [each.sample for each in answers]
        try:
            return self._session.decode_batch_next(tokens, states, samples)
        except BaseException:
            for job, state in zip(jobs, states, strict=True):
                self._session.state = state
                self._session.rewind(len(state.tokens))  # some layers have the row already
                job.state = self._session.state
            raise

    def _finish(self, job: Job) -> None:
        assert job.state is not None and job.answer is not None
        answer = job.answer.finish()
        logprobs = [] if job.answer.logprobs is None else job.answer.logprobs.of(answer)
        n_told = job.n_told
        text, thinking, _ = job.told()
        now, ledger = time.monotonic(), ledger_of(job.state.caches)
        for name in ledger.keys() - LEDGER_BYTES:  # another answer may have used the caches before
            ledger[name] -= job.counted.get(name, 0)
        timings = {
            "queue_s": job.first_token - job.created - job.prefill_s,
            "prefill_s": job.prefill_s,
            "ttft_s": job.first_token - job.created,
            "decode_s": now - job.first_token,
        }
        self._stats.add_answer(len(answer.tokens), ledger)
        self.jobs.remove(job)
        self._park(job)
        job.emit(
            Finished(
                text, thinking, logprobs[n_told:], answer.stop_reason, answer.stopped_by,
                len(job.wish.ids), job.n_cached, len(answer.tokens), timings, ledger,
            )
        )  # fmt: skip
