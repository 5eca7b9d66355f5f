"""The thread that owns the model: sequences join and leave its decode steps at any of them.

A prefill is not cut: between two of its chunks the other sequences decode, and between two of its
layers a much shorter prompt may be prefilled. So texts are those of sequences that run alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

import numpy as np

from sparsekv_cli.errors import LostModelError
from sparsekv_cli.generation.growing import GrowingAnswer
from sparsekv_cli.methods.base import Method
from sparsekv_cli.prefix.prefixes import Prefixes
from sparsekv_cli.sequence import Attention, SequenceState, ledger_of
from sparsekv_cli.serve.jobs import (
    Compiling,
    Failed,
    Job,
    PromptProgress,
    QueueFullError,
    StoppingError,
    TimeLimitError,
    TooLargeError,
    Wish,
)
from sparsekv_cli.serve.rows import (
    IndexSizes,
    Parked,
    SharedRows,
    best_parked,
    gib,
    held_bytes,
    sequence_bytes,
)
from sparsekv_cli.serve.running import Running, Stats
from sparsekv_cli.session import Session

N_ATTENTIONS = 64  # methods with their options that are remembered
# A prefill computes at least as long as the step that interrupted it took, and at least so long.
LEAST_PREFILL_S = 0.02
SHORTER = 4  # times shorter than the prompt of a prefill is one that goes first
TELL_S = 0.25  # between two words about a prefill
WATCH_S = 1.0  # between two looks at the memory that is in use


class _Gone(Exception):
    """The job that is being prefilled is aborted or late."""


class Scheduler:
    """Answers jobs with a session, which nobody else uses while the scheduler runs.

    n_parallel: sequences that are decoded together. n_queue: jobs that may wait. kv_bytes: memory
    for the rows of all sequences. disk_of: as SharedRows takes it.
    """

    def __init__(
        self,
        session: Session,
        *,
        n_parallel: int,
        n_queue: int,
        kv_bytes: int,
        disk_of: Callable[[Method], Prefixes | None] = lambda method: None,
    ) -> None:
        self.session, self.stats = session, Stats(kv_limit=kv_bytes)
        self._n_parallel, self._n_queue, self._kv_bytes = n_parallel, n_queue, kv_bytes
        self._queue: deque[Job] = deque()
        self._running = Running(session, self.stats, self._park)
        self._parked: list[Parked] = []  # the one used last is the last
        self._changed = threading.Condition()
        self._is_stopping = False
        self._prefilling: list[Job] = []  # one within another
        self._step_ended = self._step_s = self._watched = self._told = 0.0
        self._own = session.attention
        self._attention = lru_cache(N_ATTENTIONS)(self._new_attention)
        self._indexes = IndexSizes()
        self._rows: SharedRows | None = None
        if session.engine.shares_prefill:
            self._rows = session.prefixes = SharedRows(session, disk_of, self._donors)
        self._has_disk = disk_of(session.method) is not None
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self.failure: Exception | None = None  # that ended the thread

    # --- from other threads -----------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues all of the jobs, or none: QueueFullError, StoppingError, TooLargeError."""
        for job in jobs:
            n_bytes, job.n_bytes = self.bytes_of(job.wish)
            if n_bytes > self._kv_bytes:
                raise TooLargeError(
                    f"the request takes {gib(n_bytes)} for the rows of {len(job.wish.ids)} "
                    f"tokens and an answer of up to {job.wish.n_predict}, but there are "
                    f"{gib(self._kv_bytes)} for all requests: shorten one of them, or start the "
                    "server with more --kv-memory"
                )
        with self._changed:
            if self._is_stopping or self.failure is not None:
                raise StoppingError("the server is about to end")
            if len(self._queue) + len(jobs) > self._n_queue + self._n_free:
                raise QueueFullError(
                    f"{len(self._queue)} wait already, at most {self._n_queue} may: try later"
                )
            self._queue.extend(jobs)
            self._changed.notify()

    def abort(self, job: Job) -> None:
        """Ends a job that nobody waits for any more; its place is free within a step."""
        job.abort()
        with self._changed:
            self._changed.notify()

    def end_all(self) -> None:
        """Tells every job that the server ends, and ends it."""
        for job in (*self._prefilling, *self._running.jobs, *list(self._queue)):
            job.emit(Failed(StoppingError("the server ends: try again later")))
            self.abort(job)

    def stop(self) -> None:
        """Answers what has been queued, then ends the thread and waits for that."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def bytes_of(self, wish: Wish) -> tuple[int, int]:
        """The memory that a job's rows take at most; and with an index, which is an estimate."""
        n = min(self.session.n_ctx, len(wish.ids) + wish.n_predict)
        rows = sequence_bytes(Attention(wish.method, self._own.specs, 0), n)
        return rows, min(self._kv_bytes, rows + self._indexes.bytes_of(wish.method, n))

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    @property
    def n_running(self) -> int:
        return len(self._running.jobs) + len(self._prefilling)

    @property
    def n_parked(self) -> int:
        return len(self._parked)

    @property
    def _n_free(self) -> int:
        return max(0, self._n_parallel - self.n_running)

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        import numba

        numba.set_num_threads(self.session.n_threads)  # which numba keeps for each thread
        try:
            while self._waits_for_work():
                self._drop_aborted()
                job = self._next(None)
                if job is not None:
                    self._start(job)
                self._step()
        except Exception as error:
            self.failure = error
        finally:
            self._end()

    def _end(self) -> None:
        """Tells every job that is left that there is no answer, and frees all."""
        error = self.failure or StoppingError("the server is about to end")
        with self._changed:
            self._is_stopping = True
            left = [*self._prefilling, *self._running.jobs, *self._queue]
            self._queue.clear()
        for job in left:
            job.emit(Failed(error))
        self._running.jobs, self._prefilling, self._parked = [], [], []
        if self._rows is not None:
            self._rows.close()

    def _waits_for_work(self) -> bool:
        """Returns when there is some; False: never again."""
        with self._changed:
            while not self._queue and not self._running.jobs:
                if self._is_stopping:
                    return False
                self._changed.wait()
        return True

    def _donors(self) -> Iterable[SequenceState]:
        yield from (job.state for job in self._running.jobs if job.state is not None)
        yield from (parked.state for parked in self._parked)

    # --- who goes next ----------------------------------------------------------------------------

    def _next(self, most: int | None) -> Job | None:
        """Takes the first job for which there is a place and memory from the queue.

        most: the longest prompt that may go ahead of others; None: only the first one may go.
        """
        with self._changed:
            if not self._n_free:
                return None
            for job in list(self._queue)[: 1 if most is None else None]:
                if (most is None or len(job.wish.ids) <= most) and self._makes_room(job.n_bytes):
                    self._queue.remove(job)
                    return job
        return None

    def _makes_room(self, n_bytes: int) -> bool:
        """Whether so much memory is free, parked sequences given up from the oldest on."""
        taken = sum(job.n_bytes for job in (*self._running.jobs, *self._prefilling))
        if taken + n_bytes > self._kv_bytes:
            return False
        while self._parked and taken + n_bytes + self._parked_bytes > self._kv_bytes:
            del self._parked[0]
        return True

    @property
    def _parked_bytes(self) -> int:
        return sum(parked.n_bytes for parked in self._parked)

    def _drop_aborted(self) -> None:
        """Frees the places of jobs that nobody waits for, and of those that take too long."""
        with self._changed:
            waiting = [job for job in self._queue if job.is_aborted or job.is_late]
            for job in waiting:
                self._queue.remove(job)
                self._give_up(job)
        for job in [job for job in self._running.jobs if job.is_aborted or job.is_late]:
            self._running.jobs.remove(job)
            self._park(job)
            self._give_up(job)

    def _give_up(self, job: Job) -> None:
        self.stats.n_aborted += 1
        job.emit(
            Failed(TimeLimitError(f"the request took longer than {job.seconds:g} s, the limit"))
        )

    # --- prefill ----------------------------------------------------------------------------------

    def _new_attention(self, method: Method, dense_rows: int) -> Attention:
        """How a sequence attends; everybody is told if kernels are compiled for it."""

        def tell(*_: object) -> None:
            for job in (*self._prefilling, *self._running.jobs, *list(self._queue)):
                job.emit(Compiling(method.name))

        return self.session.attention_of(method, dense_rows, tell)

    def _start(self, job: Job) -> None:
        """Prefills the prompt of a job, which then runs; what goes wrong is its failure alone."""
        self._prefilling.append(job)
        started = time.monotonic()
        try:
            logits = self._prefill(job)
            self._make_answer(job)
        except LostModelError:
            raise
        except _Gone:
            self._prefilling.remove(job)
            self._give_up(job)
            return
        except Exception as error:
            self._prefilling.remove(job)
            self._running.fail(job, error)
            return
        self._prefilling.remove(job)
        job.prefill_s = time.monotonic() - started
        job.state, job.outcome = self.session.state, logits.copy()
        self.stats.prompt_tokens += len(job.wish.ids) - job.n_cached
        self.stats.cached_tokens += job.n_cached
        self._indexes.add(job.wish.method, len(job.wish.ids), job.state.caches)
        _, job.n_bytes = self.bytes_of(job.wish)
        for cache in job.state.caches:
            cache.records_attended = self._running.tells_rows(job)
        job.counted = ledger_of(job.state.caches)
        self._running.jobs.append(job)
        if self.session.prefixes is not None:
            self.session.prefixes.finish()

    def _make_answer(self, job: Job) -> None:
        wish = job.wish
        job.answer = GrowingAnswer(
            self.session,
            wish.sampling,
            seed=wish.seed,
            n_predict=wish.n_predict,
            stops=wish.stops,
            logprobs=wish.logprobs,
            constraint=wish.constraint,
            special=wish.special,
            write=job.write,
            thinking=wish.thinking,
            write_thinking=job.write_thinking,
            prompt=wish.ids,
        )

    def _prefill(self, job: Job) -> np.ndarray:
        """The logits f32 (n_vocab,) after the prompt, which becomes the session's sequence."""
        session, ids = self.session, job.wish.ids
        attention = self._attention(job.wish.method, job.wish.dense_rows)
        self._take_sequence(attention, ids)
        n_kept = len(session.tokens)
        at = session.checkpoint
        if at is not None and n_kept == at.n == len(ids):
            job.n_cached = n_kept
            return at.logits
        job.n_cached, before = n_kept, session.timings.cached_tokens
        self._step_ended = time.monotonic()

        def progress(done: int, total: int) -> None:
            job.n_cached = len(ids) - total
            self._between_chunks(job, job.n_cached + done)

        between = partial(self._between_layers, len(ids))
        if session.engine.shares_prefill:  # where steps do not share a prefill's buffers
            logits = session.prefill(ids[n_kept:], progress, between_layers=between)
        else:
            logits = session.prefill(ids[n_kept:])
        job.n_cached = n_kept + session.timings.cached_tokens - before
        job.emit(PromptProgress(len(ids), len(ids), job.n_cached))
        return logits

    def _take_sequence(self, attention: Attention, ids: Sequence[int]) -> None:
        """The session works on a parked sequence that begins as ``ids`` do, or on a new one."""
        session = self.session
        best, n_best = best_parked(self._parked, attention, ids, self._has_disk)
        if best is None:
            session.attention = attention
            session.reset()
            return
        if self._rows is not None:
            self._rows.wait()
        self._parked.remove(best)
        session.state = best.state
        session.rewind(n_best)

    def _between_chunks(self, job: Job, done: int) -> None:
        """A chunk of a prefill is done: the others have their turn."""
        if job.is_aborted or job.is_late:
            raise _Gone
        now = time.monotonic()
        if now - self._step_ended < max(LEAST_PREFILL_S, self._step_s):
            return
        if now - self._told > TELL_S:
            self._told = now
            job.emit(PromptProgress(done, len(job.wish.ids), job.n_cached))
        state = self.session.state
        try:
            self._drop_aborted()
            self._step()
        finally:
            self.session.state = state
            self._step_ended = time.monotonic()

    def _between_layers(self, n: int) -> None:
        """A layer of a prefill of n tokens is done: a much shorter prompt may go first."""
        if len(self._prefilling) > 1:
            return
        other = self._next(n // SHORTER)
        if other is None:
            return
        state, rows = self.session.state, self.session.prefixes
        self.session.prefixes = None
        try:
            self._start(other)
        finally:
            self.session.state, self.session.prefixes = state, rows

    # --- decode -----------------------------------------------------------------------------------

    def _step(self) -> None:
        """The next token of every answer that runs; those that are done leave."""
        started = time.monotonic()
        self._running.step()
        self._step_s = time.monotonic() - started
        if started - self._watched > WATCH_S:
            self._watched = started
            running = sum(held_bytes(job.state.caches) for job in self._running.jobs if job.state)
            self.stats.kv_bytes = running + self._parked_bytes

    def _park(self, job: Job) -> None:
        """Keeps a job's sequence for later prompts, unless its rows are none of theirs."""
        state, job.state = job.state, None
        if state is not None and state.checkpoint is not None:
            for cache in state.caches:
                cache.records_attended = False
            self._parked.append(Parked(state, held_bytes(state.caches)))
            self._makes_room(0)
