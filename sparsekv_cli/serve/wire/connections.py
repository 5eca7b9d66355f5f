"""Connections: how many there may be, and how much time each has to send its request.

There are so many places. A further connection waits for a place when its request is whole, and gets
the status 503 if there is none. One that leaves its request half-sent for a while loses its place,
and so does one that has sent nothing yet. So these lock nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sparsekv_cli.errors import SparseKVError

BACKLOG = 1024  # connections that the system accepts before the server does; it resets others
SPARE = 64  # connections in addition to those whose requests run or wait
FILES = 192  # other open files, and connections that were just accepted
HEAD_S = 10.0  # seconds in which the head of a request must arrive
WRITE_S = 60.0  # seconds after which a client that reads nothing is dropped
LOBBY = 1024  # further connections
STALE_S = 2.0  # seconds with a half-sent request, or without a first one, that cost a place
PLACE_S, LOOK_S = 2.5, 0.05  # seconds that a request waits for a place, and between two looks
IS_FURTHER = "is_further_connection"  # key of a scope: the request gets the status 503


def most_connections(n_requests: int) -> int:
    """Returns how many connections there may be, with n_requests that run or wait.

    Raises the limit of open files if it is lower. Raises SparseKVError if not even one fits.
    """
    wanted = n_requests + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = wanted + LOBBY + FILES
    if soft != unlimited and soft < most:
        soft = most if hard == unlimited else min(hard, most)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == unlimited:
        return wanted
    if soft <= FILES:
        raise SparseKVError(
            f"the process may open {soft} files, too few to serve: raise the limit to {FILES + 1} "
            "or more (ulimit -n)"
        )
    return min(wanted, soft - FILES)


def lobby_of(most: int) -> int:
    """Returns how many further connections there may be, because of the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LOBBY if soft == resource.RLIM_INFINITY else max(0, min(LOBBY, soft - FILES - most))


class Places:
    """The places of a server's connections."""

    def __init__(self) -> None:
        self.n_taken = 0
        self.looked = -math.inf  # when a stale connection was looked for


class Connection(H11Protocol):
    """uvicorn's connection, with limits. ``limited`` makes the class for a server."""

    most, lobby = 256, LOBBY
    head_s, write_s = HEAD_S, WRITE_S
    places = Places()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._n_bytes = 0  # of the request that is not whole yet
        self._has_place = self.places.n_taken < self.most
        self.places.n_taken += self._has_place
        self._inner, self.app = self.app, self._serve
        self._time_head()
        if len(self.connections) > self.most + self.lobby and not self._take_place():
            self._refuse(503, "Service Unavailable")

    @property
    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits(self) -> bool:
        """Whether there is no whole request yet."""
        return self._waits_for_head or self.cycle.more_body

    @property
    def _is_stale(self) -> bool:
        """Whether the connection may lose its place."""
        is_late = self.loop.time() - self._since > min(STALE_S, self.head_s / 2)
        is_new = self.cycle is None  # later uvicorn ends a connection that is idle
        return is_late and self._has_place and self._waits and (is_new or self._n_bytes > 0)

    def _take_place(self) -> bool:
        """Takes a free place, or that of the stale connection that has waited longest."""
        if self.places.n_taken < self.most:
            self.places.n_taken, self._has_place = self.places.n_taken + 1, True
        elif self.loop.time() - self.places.looked > LOOK_S:
            self.places.looked = self.loop.time()
            every: list[Any] = [*self.connections]
            stale = [each for each in every if each is not self and each._is_stale]
            if stale:
                oldest = min(stale, key=lambda each: each._since)
                oldest._has_place, self._has_place = False, True
                self.connections.discard(oldest)
                oldest.transport.abort()
        return self._has_place

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application. It refuses the request of a connection without a place."""
        until = self.loop.time() + PLACE_S
        while not self._has_place and not self._take_place() and self.loop.time() < until:
            await asyncio.sleep(LOOK_S)
        scope[IS_FURTHER] = not self._has_place

        async def ending(message: Message) -> None:
            if message["type"] == "http.response.start" and not self._has_place:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._inner(scope, receive, ending)

    def _refuse(self, status: int, phrase: str) -> None:
        head = f"HTTP/1.1 {status} {phrase}\r\nretry-after: 2\r\ncontent-length: 0\r\n"
        self.transport.write((head + "connection: close\r\n\r\n").encode())
        self.transport.close()

    def _time_head(self) -> None:
        """Starts the time limit of a head: HEAD_S from its first byte, or from the connection."""
        if self._waits_for_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)
        elif not self._waits_for_head and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._waits_for_head and not self.transport.is_closing():
            self._refuse(408, "Request Timeout")

    def data_received(self, data: bytes) -> None:
        if not self._n_bytes:
            self._since = self.loop.time()
        self._n_bytes += len(data)
        super().data_received(data)
        self._time_head()
        if not self._waits:
            self._n_bytes = 0

    def on_response_complete(self) -> None:
        self._since, self._n_bytes = self.loop.time(), 0
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_timer(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.places.n_taken -= self._has_place
        self._has_place = False
        self._end_timer(self._head_timer)
        self._end_timer(self._write_timer)

    @staticmethod
    def _end_timer(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def limited(most: int, head_s: float = HEAD_S) -> type[Connection]:
    """Returns the class of a server's connections. most: how many there may be."""
    given = {"most": most, "lobby": lobby_of(most), "head_s": head_s, "places": Places()}
    return type("LimitedConnection", (Connection,), given)
