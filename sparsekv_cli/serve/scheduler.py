"""The thread that owns the model. A sequence can join or leave before every decode step.

A prefill is an iterator. Between two of its chunks the other sequences decode. Between two of its
layers a much shorter prompt may be prefilled first. Each sequence has the same text as alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from functools import lru_cache

from sparsekv_cli.errors import LostModelError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.methods.full import Full
from sparsekv_cli.model import Model
from sparsekv_cli.models.forward import Progress
from sparsekv_cli.prefix.prefixes import Prefixes
from sparsekv_cli.sequence import Attention, Sequence
from sparsekv_cli.serve.jobs import (
    Compiling,
    Failed,
    Job,
    Paused,
    Prefilling,
    PromptProgress,
    QueueFullError,
    Request,
    StoppingError,
    TimeLimitError,
    TooLargeError,
    does_not_fit,
)
from sparsekv_cli.serve.rows import (
    N_METHODS,
    IndexSizes,
    Parked,
    SharedRows,
    best_parked,
    bytes_of_sequence,
    give_up,
    make_room,
    replaces,
    room_beside,
    sequence_bytes,
    whole_bytes,
)
from sparsekv_cli.serve.running import Running, Stats

# A prefill computes at least as long as the last decode step, and at least so many seconds.
LEAST_PREFILL_S = 0.02
SHORTER = 4  # a prompt that is so many times shorter is prefilled first
WATCH_S = 1.0  # seconds between two measurements of the used memory


class Scheduler:
    """Answers jobs with a model, which only the scheduler uses while it runs.

    n_parallel: sequences that are decoded together. n_queue: jobs that may wait. kv_bytes: memory
    for the rows of all sequences. disk_of, repair: see SharedRows. stats: counts that it continues.
    tell: gets lines about long prefills.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_parallel: int,
        n_queue: int,
        kv_bytes: int,
        disk_of: Callable[[Method], Prefixes | None] = lambda method: None,
        repair: float | None = None,
        stats: Stats | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.model, self.n_parallel, self._n_queue = model, n_parallel, n_queue
        self.stats, self._tell = stats or Stats(), tell
        self._kv_bytes = self.stats.kv_limit = kv_bytes
        self._queue: deque[Job] = deque()
        self._running = Running(model, self.stats, self._park)
        self._parked: list[Parked] = []  # by last use, the newest last
        self._changed = threading.Condition()
        self._starting: list[Job] = []  # at most one job, whose method is being prepared
        self._prefilling: list[Prefilling] = []  # a stack: the last one continues first
        self._paused = Paused(model.engine.shares_prefill)
        self._step_ended = self._step_s = self._watched = 0.0
        self._attention = lru_cache(N_METHODS)(self._new_attention)
        self._indexes = IndexSizes()
        self._rows = SharedRows(disk_of, self._donors, repair)
        # A short prompt may be read within the prefill of a long one. It does not use the disk.
        self._short_rows = SharedRows(lambda _: None, self._donors, repair)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self.failure: Exception | None = None  # that ended the thread

    # --- from other threads -----------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, jobs: Ids[Job]) -> None:
        """Queues all jobs, or none. Raises QueueFullError, StoppingError or TooLargeError."""
        if len(jobs) > (most := self._n_queue + self.n_parallel):
            raise TooLargeError(
                f"{len(jobs)} answers are asked for, but at most {most} can run or wait: ask for "
                "fewer, or start the server with more --queue"
            )
        for job in jobs:
            n_bytes, job.n_bytes = self.bytes_of(job.request)
            if n_bytes > self._kv_bytes:
                raise does_not_fit(job.request, n_bytes, self._kv_bytes)
        with self._changed:
            if self._is_stopping or self.failure is not None:
                raise StoppingError("the server is about to end")
            if len(self._queue) + len(jobs) > self._n_queue + self._n_free:
                raise QueueFullError(
                    f"{len(self._queue)} requests wait, at most {self._n_queue} may: try later"
                )
            self._queue.extend(jobs)
            self._changed.notify()

    def abort(self, job: Job) -> None:
        """Ends a job whose client has gone. Its place is free after the next step."""
        job.abort()
        with self._changed:
            self._changed.notify()

    def end_all(self) -> None:
        """Ends every job, with the message that the server ends."""
        for job in self._all_jobs():
            job.emit(Failed(StoppingError("the server ends: try again later")))
            self.abort(job)

    def stop(self) -> None:
        """Answers the queued jobs, then ends the thread and waits for its end."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    def bytes_of(self, request: Request) -> tuple[int, int]:
        """Returns the most bytes of a job's rows, and of its rows with an estimate of the index."""
        n, method = min(self.model.n_ctx, len(request.ids) + request.n_predict), request.method
        rows = sequence_bytes(method, self.model.decoder.layer_specs(), n)
        if (draft := self.model.draft) is not None:
            rows += sequence_bytes(draft.method, draft.decoder.layer_specs(), min(n, draft.n_ctx))
        rows += sequence_bytes(Full(), self.model.engine.draft_specs, n)
        return rows, min(self._kv_bytes, rows + self._indexes.bytes_of(method, n))

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    @property
    def n_running(self) -> int:
        return len(self._running.jobs) + len(self._prefilling) + len(self._starting)

    @property
    def n_parked(self) -> int:
        return len(self._parked)

    @property
    def _n_free(self) -> int:
        return max(0, self.n_parallel - self.n_running)

    def _all_jobs(self) -> list[Job]:
        read = (each.job for each in self._prefilling)
        return [*self._starting, *read, *self._running.jobs, *list(self._queue)]

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        import numba

        numba.set_num_threads(self.model.n_threads)  # which numba keeps for each thread
        try:
            while self._waits_for_work():
                self._paused.end_late()
                self._drop_aborted()
                job = None if self._prefilling else self._next(None)
                if job is not None:
                    self._begin(job, self._rows)
                self._go_on()
                self._step()
        except Exception as error:
            self.failure = error
        finally:
            self._end()

    def _end(self) -> None:
        """Fails every job that is left, and frees all memory."""
        error = self.failure or StoppingError("the server is about to end")
        with self._changed:
            self._is_stopping = True
            left = self._all_jobs()
            self._queue.clear()
        for job in left:
            job.emit(Failed(error))
        self._paused.end()
        self._running.jobs, self._prefilling, self._parked, self.stats.kv_bytes = [], [], [], 0
        self._rows.close()
        self._short_rows.close()

    def _waits_for_work(self) -> bool:
        """Waits for a job, or the end of a pause. Returns False when the scheduler stops."""
        with self._changed:
            while not self._queue and not self._running.jobs and not self._prefilling:
                if self._is_stopping:
                    return False
                if not self._changed.wait(self._paused.seconds_left):
                    break
        return True

    def _donors(self) -> Iterable[Sequence]:
        running = (job.generation for job in self._running.jobs)
        yield from (each.sequence for each in running if each is not None)
        yield from (parked.sequence for parked in self._parked)

    # --- who goes next ----------------------------------------------------------------------------

    def _next(self, most: int | None) -> Job | None:
        """Removes from the queue the first job that has a place and memory. Returns it.

        most: the longest prompt that may pass others; None: only the first job may start.
        """
        with self._changed:
            if not self._n_free:
                return None
            for job in list(self._queue)[: 1 if most is None else None]:
                if most is not None and len(job.request.ids) > most:
                    continue
                room = self._kv_bytes - job.n_bytes + self._paused.bytes_for(job.request)
                others, of = self._reading_and_running(), job.request
                if make_room(self._parked, others, room, of.ids, of.method):
                    self._queue.remove(job)
                    return job
        return None

    def _keep_within_memory(self) -> None:
        """Removes parked sequences, the oldest first, until all sequences fit in memory."""
        give_up(self._parked, room_beside(self._reading_and_running(), self._kv_bytes))

    def _reading_and_running(self) -> list[tuple[int, Sequence]]:
        """Returns the sequences that are not parked, and the bytes reserved for each."""
        read = [(each.job.n_bytes, each.sequence) for each in self._prefilling + self._paused.all]
        jobs = self._running.jobs
        return read + [(job.n_bytes, job.generation.sequence) for job in jobs if job.generation]

    def _drop_aborted(self) -> None:
        """Removes aborted jobs, and jobs beyond their time limit."""
        with self._changed:
            for job in [job for job in self._queue if job.is_aborted or job.is_late]:
                self._queue.remove(job)
                self._give_up(job)
        for job in [job for job in self._running.jobs if job.is_aborted or job.is_late]:
            self._running.leave(job)
            self._give_up(job)

    def _give_up(self, job: Job) -> None:
        self.stats.n_aborted += 1
        late = TimeLimitError(f"the request took longer than {job.seconds:g} s, the limit")
        job.emit(Failed(late))

    # --- prefill ----------------------------------------------------------------------------------

    def _new_attention(self, method: Method, sparse_from: int) -> Attention:
        """Returns how a sequence attends. All clients get an event if kernels are compiled."""

        def tell(_: str, done: int, total: int) -> None:
            for job in self._all_jobs():
                job.emit(Compiling(method.name, done, total))

        return self.model.attention_of(method, sparse_from, tell)

    def _begin(self, job: Job, rows: SharedRows) -> None:
        """Starts the prefill of a job's prompt. rows: finds and keeps the prompt's rows."""
        if going_on := self._paused.resumed(job):
            self._prefilling += going_on
            return
        ids, engine = job.request.ids, self.model.engine
        started, self._starting = time.monotonic(), [job]
        try:
            attention = self._attention(job.request.method, job.request.sparse_from)
            sequence = self._sequence_for(attention, ids)
        except LostModelError:
            raise
        except Exception as error:
            self._starting = []
            self._running.fail(job, error)
            return
        rows.use(attention.method)
        job.n_cached = n_kept = len(sequence.tokens)
        steps = engine.prefill(sequence, ids[n_kept:], rows=rows)
        now = Prefilling(job, sequence, steps, rows, started)
        self._starting = []
        if n_kept and n_kept == len(ids):  # a parked sequence ends with the prompt
            self._run(now)
        else:
            self._prefilling.append(now)

    def _sequence_for(self, attention: Attention, ids: Ids[int]) -> Sequence:
        """Returns a parked sequence that begins as ``ids`` do, or a new one."""
        can_share = self.model.engine.shares_prefill
        best, n_best = best_parked(self._parked, attention.method, ids, can_share)
        if best is None:
            return self.model.sequence(attention)
        self._rows.wait()
        self._parked.remove(best)
        best.sequence.rewind(n_best)
        best.sequence.difference = None
        return best.sequence

    def _go_on(self) -> None:
        """Continues a prefill until the others have their turn, or until it ends."""
        while self._prefilling:
            now = self._prefilling[-1]
            job = now.job
            try:
                at = next(now.steps, None)
            except LostModelError:
                raise
            except Exception as error:
                self._prefilling.remove(now)
                self._running.fail(job, error)
                return
            if at is None:
                self._prefilling.remove(now)
                self._run(now)
                return
            if at.ends_layer:
                self._let_shorter_go_first(len(job.request.ids))
            elif self._has_turn(now, at):
                return

    def _run(self, now: Prefilling) -> None:
        """Moves a job with a finished prefill to the running ones."""
        job, sequence, request = now.job, now.sequence, now.job.request
        n_prompt, job.prefill_s = len(request.ids), time.monotonic() - now.started
        try:
            self._running.begin(job, sequence)
        except Exception as error:
            self._running.fail(job, error)
            return
        self.stats.prompt_tokens += n_prompt - job.n_cached
        self.stats.cached_tokens += job.n_cached
        self.stats.add_moved(sequence.moved, job.n_cached)
        self._indexes.add(request.method, n_prompt, sequence.caches)
        _, job.n_bytes = self.bytes_of(request)
        job.emit(PromptProgress(n_prompt, n_prompt, job.n_cached))
        now.rows.finish()

    def _has_turn(self, now: Prefilling, at: Progress) -> bool:
        """Returns, after a chunk of a prefill, whether it is the others' turn."""
        job, n_prompt = now.job, len(now.job.request.ids)
        n_done, job.n_cached = n_prompt - at.total + at.done, max(n_prompt - at.total, now.n_before)
        if job.is_aborted or job.is_late:
            self._prefilling.remove(now)
            self._paused.add(now, n_done, is_alone=not self._prefilling)
            self._give_up(job)
            return True
        moment = time.monotonic()
        if moment - self._step_ended < max(LEAST_PREFILL_S, self._step_s):
            return False
        now.report(n_done, moment, self._tell)
        return self.model.engine.shares_prefill  # otherwise steps need the prefill's buffers

    def _let_shorter_go_first(self, n: int) -> None:
        """Starts a much shorter prompt, if one waits, after a layer of a prefill of n tokens."""
        if len(self._prefilling) > 1 or not self.model.engine.shares_prefill:
            return
        if (other := self._next(n // SHORTER)) is not None:
            self._begin(other, self._short_rows)

    # --- decode -----------------------------------------------------------------------------------

    def _step(self) -> None:
        """Decodes the next token of every running answer. Removes finished answers."""
        started = time.monotonic()
        self._running.step()
        self._step_ended = time.monotonic()
        self._step_s = self._step_ended - started
        if started - self._watched > WATCH_S or not self._running.jobs:
            self._watched = started
            self._keep_within_memory()
            all_held = [of for _, of in self._reading_and_running() + self._parked]
            self.stats.kv_bytes = sum(map(bytes_of_sequence, all_held))

    def _park(self, sequence: Sequence) -> None:
        """Keeps a sequence for later prompts, instead of those that it replaces."""
        if sequence.checkpoint is not None:
            parked = [each for each in self._parked if not replaces(sequence, each.sequence)]
            self._parked = [*parked, Parked(whole_bytes(sequence), sequence)]
            self._keep_within_memory()
