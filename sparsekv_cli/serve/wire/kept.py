"""Answers that go on while their client is away: /v1/answers/ID.

A task collects the events of an answer. Clients read them from the first one on, at any time. An
answer that nobody reads for ALONE_S is ended and forgotten. Its id is the client's secret.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

from sparsekv_cli.generation.fields import shown
from sparsekv_cli.serve.wire.bodies import BodyError

ALONE_S = 300.0  # seconds without a reader after which an answer is ended
MAX_ANSWERS = 64
MAX_BYTES = 64 << 20  # of all events that are kept
ID = re.compile(r"[0-9a-f]{32}")
# Events of which only the last one matters: comments, rows that a step read, the prompt's progress.
PASSING = {": ": 0, "event: sparsekv.rows": 0, '"prompt_progress": ': 512}

Failure = Callable[[Exception], str]  # returns the last event of a stream that fails


class KeptError(BodyError):
    """An answer that is not kept, or no more. code: a word for programs."""

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message, status)
        self.code = code


class KeptAnswer:
    """The events of one answer.

    failure: see Failure. make_room: called after each event. forget: called when the answer is
    ended because nobody reads it.
    """

    def __init__(
        self, failure: Failure, make_room: Callable[[], None], forget: Callable[[], None]
    ) -> None:
        self._failure, self._make_room, self._forget = failure, make_room, forget
        self._events: list[str] = []
        self._passing: dict[str, int] = {}  # the place of the last event of each kind
        self._changed, self._task = asyncio.Event(), asyncio.Future[None]()
        self._error: Exception | None = None  # before the first event
        self._timer: asyncio.TimerHandle | None = None
        self.n_bytes, self.n_readers, self.is_whole = 0, 0, False
        self._time()

    def start(self, events: AsyncGenerator[str]) -> None:
        """Begins to collect the events, unless the answer was stopped before."""
        if not self.is_whole:
            self._task = asyncio.ensure_future(self._collect(events))

    def end(self, error: Exception) -> None:
        """Ends the answer with an error, if it is not whole."""
        if not self.is_whole:
            self._fail(error)
            self._task.cancel()

    async def read(self) -> AsyncIterator[str]:
        """Yields the events, but only the last passing ones. Raises an error without events."""
        with self._reading():
            at = 0
            while at < len(self._events) or not self.is_whole:
                if at == len(self._events):
                    self._changed.clear()
                    await self._changed.wait()
                elif text := self._events[at]:
                    at += 1
                    yield text
                else:
                    at += 1
            if self._error is not None:
                raise self._error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self.n_readers += 1
        self._time()
        try:
            yield
        finally:
            self.n_readers -= 1
            self._time()

    def _time(self) -> None:
        """Starts the time without a reader, or ends it."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if self.n_readers else loop.call_later(ALONE_S, self._forget)

    async def _collect(self, events: AsyncGenerator[str]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for text in events:
                    self._add(text)
                    self._make_room()
            self.is_whole = True
            self._changed.set()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.is_whole = True
        if self._events:
            self._add(self._failure(error))
        else:
            self._error = error
            self._changed.set()

    def _add(self, text: str) -> None:
        kind = next((kind for kind, n in PASSING.items() if kind in text[: n + len(kind)]), None)
        if kind is not None:
            if (before := self._passing.get(kind)) is not None:
                self.n_bytes -= len(self._events[before])
                self._events[before] = ""
            self._passing[kind] = len(self._events)
        self._events.append(text)
        self.n_bytes += len(text)
        self._changed.set()


class KeptAnswers:
    """The answers of a server by their ids."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._answers: dict[str, KeptAnswer] = {}  # the oldest one first

    def begin(self, name: str) -> KeptAnswer:
        """Returns a new answer. Raises KeptError for a wrong id or one that is there."""
        if not ID.fullmatch(name):
            words = "expected an id of 32 hexadecimal digits, in lower case"
            raise KeptError(words, 400, "answer_id")
        if name in self._answers:
            raise KeptError("there is an answer with this id", 409, "answer_exists")
        if len(self._answers) >= MAX_ANSWERS and not self._drop():
            words = f"{MAX_ANSWERS} answers are kept, at most so many may: try later"
            raise KeptError(words, 429, "queue_full")

        def forget() -> None:
            if self._answers.get(name) is answer:  # and not one that came later
                self.remove(name)

        answer = self._answers[name] = KeptAnswer(self._failure, self._make_room, forget)
        return answer

    def find(self, name: str) -> KeptAnswer:
        """Returns an answer. Raises KeptError if it is not kept."""
        if name not in self._answers:
            raise KeptError(
                f"no answer {shown(name)} is kept: one that nobody reads for {ALONE_S:g} s is "
                "ended and forgotten",
                404,
                "answer_not_found",
            )
        return self._answers[name]

    def remove(self, name: str) -> None:
        """Stops an answer and forgets it. Raises KeptError if it is not kept."""
        self.find(name).end(KeptError("the answer was stopped", 400, "stopped"))
        self._answers.pop(name)

    def _drop(self) -> bool:
        """Forgets the oldest whole answer that nobody reads. Returns whether there was one."""
        for name, answer in self._answers.items():
            if answer.is_whole and not answer.n_readers:
                self.remove(name)
                return True
        return False

    def _make_room(self) -> None:
        """Raises KeptError if the answers that must be kept have too many bytes."""
        while sum(answer.n_bytes for answer in self._answers.values()) > MAX_BYTES:
            if not self._drop():
                words = f"all kept answers have more than {MAX_BYTES >> 20} MiB of events"
                raise KeptError(words, 400, "too_large")
