"""The answers that are decoded together: choice of tokens, decode steps, and events for clients."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from sparsekv_cli.cache.counters import Speculation, ledger_since
from sparsekv_cli.errors import LostModelError
from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.generation.sampler import new_sampler
from sparsekv_cli.model import Model
from sparsekv_cli.prefix.difference import explain
from sparsekv_cli.prefix.prompt_rows import Moved
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.serve.jobs import Failed, Finished, Job, NewToken, bins_of

N_KEPT = 10_000  # times that are kept until the metrics are read


@dataclass
class Stats:
    """Counts since the start of the server; times in seconds."""

    kv_limit: int = 0
    kv_bytes: int = 0  # of all sequences
    prompt_tokens: int = 0  # that were computed
    cached_tokens: int = 0  # tokens of prompts whose rows existed already
    reused_tokens: int = 0  # tokens of known passages, whose rows were moved
    repaired_tokens: int = 0  # of these, the tokens whose rows were computed again
    differences: Counter[str] = field(default_factory=Counter)  # prompts, by Explained.cause
    volatile_lines: Counter[str] = field(default_factory=Counter)  # left out, by header
    generated_tokens: int = 0
    rows_total: int = 0
    rows_attended: int = 0
    n_answers: int = 0
    n_failed: int = 0
    n_aborted: int = 0
    n_steps: int = 0
    step_s: float = 0.0
    step_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of drafts
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=N_KEPT))

    def add_moved(self, moved: Moved, n_cached: int) -> None:
        """Adds the rows that a prefill moved, after n_cached rows that existed."""
        new = moved.after(n_cached)
        self.reused_tokens += new.reused
        self.repaired_tokens += new.repaired

    def add_step(self, n_tokens: int, seconds: float) -> None:
        self.n_steps += 1
        self.step_tokens += n_tokens
        self.step_s += seconds

    def add_drafts(self, of_answer: Speculation) -> None:
        self.drafted_tokens += of_answer.drafted
        self.accepted_tokens += of_answer.accepted
        self.step_tokens += of_answer.accepted

    def add_answer(self, n_tokens: int, ledger: Mapping[str, int]) -> None:
        self.n_answers += 1
        self.generated_tokens += n_tokens
        self.rows_total += ledger["rows_total"]
        self.rows_attended += ledger["rows_attended"]


class Running:
    """Jobs whose prompts are prefilled. park: called with the sequence of a removed job."""

    def __init__(self, model: Model, stats: Stats, park: Callable[[Sequence], None]) -> None:
        self.jobs: list[Job] = []
        self._model, self._stats, self._park = model, stats, park

    def begin(self, job: Job, sequence: Sequence) -> None:
        """Adds a job. ``sequence`` holds its prefilled prompt.

        Raises SparseKVError for a wrong sampler or grammar.
        """
        request, model = job.request, self._model
        sample = new_sampler(model, request.sampling, request.seed, request.constraint)
        job.generation = Generation(
            model.tokenizer,
            sequence,
            sample,
            n_predict=request.n_predict,
            stops=request.stops,
            constraint=request.constraint,
            marks=request.marks,
            logprobs=request.logprobs,
            thinking=request.thinking,
            write=job.write,
            write_thinking=job.write_thinking,
        )
        for cache in sequence.caches:
            cache.records_attended = self._tells_rows(job)
        if (found := sequence.difference) is not None:
            job.difference = explain(found, request.ids, model.tokenizer)
            self._stats.differences[job.difference.cause] += 1
        sequence.timings.reset()
        job.counted = sequence.ledger()
        self.jobs.append(job)

    def step(self) -> None:
        """Decodes the next token of every answer. Removes finished answers."""
        started = time.monotonic()
        for job in list(self.jobs):
            self._choose(job)
        if self.jobs:
            self._decode(list(self.jobs))
            self._stats.add_step(len(self.jobs), time.monotonic() - started)

    def fail(self, job: Job, error: Exception) -> None:
        """Ends the answer with an error."""
        self._stats.n_failed += 1
        job.emit(Failed(error))

    def leave(self, job: Job) -> None:
        """Removes a job. Its sequence is kept for later prompts."""
        self.jobs.remove(job)
        sequence = job.end()
        sequence.rewind(len(sequence.tokens))  # takes back the draft of an aborted job
        for cache in sequence.caches:
            cache.records_attended = False
        self._stats.add_drafts(sequence.timings.speculation)
        self._park(sequence)

    def _tells_rows(self, job: Job) -> bool:
        """Returns whether the client gets the rows that a step has attended to."""
        return job.request.n_bins > 0 and self._model.engine.records_attended

    def _choose(self, job: Job) -> None:
        """Chooses the next tokens of an answer. The last one is not decoded yet."""
        generation = job.generation
        assert generation is not None
        try:
            tokens, counts = generation.answer.tokens, generation.sequence.timings.speculation
            n, n_accepted = len(tokens), counts.accepted
            is_done = generation.choose()
            if not job.first_token:
                job.first_token = time.monotonic()
                self._stats.first_token_s.append(job.first_token - job.created)
            rows = self._rows(job, generation.sequence)
            if rows or not is_done:
                n_new = len(tokens) - n, counts.accepted - n_accepted
                job.emit(NewToken(*job.take_new(), rows, *n_new))
            if is_done:
                self._finish(job, generation)
        except Exception as error:
            if job in self.jobs:  # leaving may have failed
                self.leave(job)
            self.fail(job, error)

    def _rows(self, job: Job, sequence: Sequence) -> list[list[int]] | None:
        """Returns ``NewToken.rows`` of the last row that is kept, if the client asks for it."""
        n, n_bins = len(sequence.tokens), job.request.n_bins
        if not self._tells_rows(job) or n <= len(job.request.ids):
            return None
        return [bins_of(cache.attended, n, n_bins) for cache in sequence.caches]

    def _decode(self, jobs: Ids[Job]) -> None:
        """Decodes the chosen tokens together. An answer whose cache fails ends.

        If the step fails as a whole, it decodes each token alone.
        """
        generations = [job.generation for job in jobs if job.generation is not None]
        lengths = [len(each.sequence.tokens) for each in generations]
        try:
            failed = step(self._model.engine, generations)
            for i, error in failed.items():
                self._drop(jobs[i], error)
        except LostModelError:
            raise
        except Exception as error:
            for job, generation, n in zip(jobs, generations, lengths, strict=True):
                if len(jobs) > 1 and len(generation.sequence.tokens) == n:
                    self._decode([job])
                else:  # it is the cause, or its method could not go back
                    self._drop(job, error)

    def _drop(self, job: Job, error: Exception) -> None:
        """Ends an answer whose sequence has failed, without keeping the sequence."""
        self.jobs.remove(job)
        job.end()
        self.fail(job, error)

    def _finish(self, job: Job, generation: Generation) -> None:
        answer = generation.finish()
        text, thinking, logprobs = job.take_new()
        # Another answer may have used the caches before.
        now, ledger = time.monotonic(), ledger_since(generation.sequence.ledger(), job.counted)
        timings = {
            "queue_s": job.first_token - job.created - job.prefill_s,
            "prefill_s": job.prefill_s,
            "ttft_s": job.first_token - job.created,
            "decode_s": now - job.first_token,
        }
        self._stats.add_answer(len(answer.tokens), ledger)
        self.leave(job)
        job.emit(
            Finished(
                text, thinking, logprobs, answer.stop_reason, answer.stopped_by,
                len(job.request.ids), job.n_cached, len(answer.tokens), timings, ledger,
                job.difference, generation.sequence.moved,
            )
        )  # fmt: skip
