"""From the scheduler's events to the parts of an answer that a protocol sends its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from sparsekv_cli.models.chat.calls import Part, Text, Thought
from sparsekv_cli.serve.forms.tools import Reader
from sparsekv_cli.serve.jobs import (
    Compiling,
    Event,
    Failed,
    Finished,
    Job,
    NewToken,
    PromptProgress,
    Request,
)
from sparsekv_cli.serve.requests import Service
from sparsekv_cli.settings.config import dense_below

PING_S = 10.0  # seconds without an event before a Ping
# The finished answers of the request that this context belongs to, for the log.
ENDS: ContextVar[list[Finished]] = ContextVar("ENDS")


class Ping(NamedTuple):
    """Nothing has happened for a while."""

    why: str = ""  # what the answer waits for, if that is known


class News(NamedTuple):
    """The new parts of a choice, and their data."""

    choice: int
    parts: list[Part]
    logprobs: list[dict[str, Any]]
    rows: list[list[int]] | None = None
    end: Finished | None = None
    n_tokens: int = 0  # of NewToken, as n_accepted
    n_accepted: int = 0


class Answers:
    """The growing answers to one request, one a choice; use it in an ``async with``.

    Its exit aborts unfinished answers. readers: one a choice.
    """

    def __init__(
        self, service: Service, requests: Sequence[Request], readers: Sequence[Reader]
    ) -> None:
        self._service, self._readers = service, readers
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._jobs = [self._job(i, request, loop) for i, request in enumerate(requests)]
        self._n_open = len(requests)

    def _job(self, index: int, request: Request, loop: asyncio.AbstractEventLoop) -> Job:
        def emit(event: Event) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return Job(request, emit, self._service.limits.seconds)

    async def __aenter__(self) -> Answers:
        self._service.scheduler.submit(self._jobs)
        return self

    async def __aexit__(self, *_: object) -> None:
        for job in self._jobs:
            self._service.scheduler.abort(job)

    async def parts(self) -> AsyncIterator[News | PromptProgress | Ping]:
        """Yields the news for the client. Raises the error of an answer that fails."""
        while self._n_open:
            try:
                async with asyncio.timeout(PING_S):  # wait_for loses a cancellation beside an event
                    index, event = await self._events.get()
            except TimeoutError:
                yield Ping()
                continue
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, PromptProgress):
                yield event
            elif isinstance(event, Compiling):
                count = f": {event.done} of {event.total}" if event.total else ""
                yield Ping(f"kernels of {event.method} are compiled{count}")
            else:
                yield self._news(index, event)

    def _news(self, index: int, event: NewToken | Finished) -> News:
        reader, end = self._readers[index], None
        parts: list[Part] = [Thought(event.thinking)] if event.thinking else []
        parts += reader.push(event.text)
        if isinstance(event, Finished):
            self._n_open -= 1
            parts += reader.flush()
            end = event
            ENDS.get([]).append(end)
        rows, counts = None, (0, 0)
        if isinstance(event, NewToken):
            rows, counts = event.rows, (event.n_tokens, event.n_accepted)
        return News(index, [*joined(parts)], event.logprobs, rows, end, *counts)

    async def whole(self) -> list[News]:
        """Returns every choice as a whole, when all are finished."""
        parts: list[list[Part]] = [[] for _ in self._jobs]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self._jobs]
        ends: list[Finished | None] = [None] * len(self._jobs)
        async for news in self.parts():
            if isinstance(news, News):
                parts[news.choice] += news.parts
                logprobs[news.choice] += news.logprobs
                ends[news.choice] = news.end or ends[news.choice]
        return [News(i, joined(parts[i]), logprobs[i], end=ends[i]) for i in range(len(self._jobs))]


def joined(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts. Consecutive texts are joined, and so are consecutive thoughts."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + part.text)
        elif isinstance(part, Thought) and isinstance(last, Thought):
            result[-1] = Thought(last.text + part.text)
        else:
            result.append(part)
    return result


def about(end: Finished, service: Service, request: Request) -> dict[str, Any]:
    """Returns fields that say how a response was computed, in addition to those of its protocol."""
    depth = service.model.sparse_from_of(request.method, request.sparse_from)
    return {
        "method": {
            "name": request.method.name,
            "options": request.method.options(),
            "sparse_from": depth,
            **({"note": dense_below(depth)} if end.n_prompt < depth else {}),
        },
        "context": {"used": end.n_prompt + end.n_generated, "size": service.model.n_ctx},
        "timings": {name: round(value, 4) for name, value in end.timings.items()},
        "ledger": end.ledger,
        **end.moved.usage(),
        **({} if end.difference is None else {"difference": end.difference.fields()}),
    }
