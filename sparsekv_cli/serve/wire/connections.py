"""Connections: how many there may be, and how much time each has to send its request.

If there are too many, the one that has waited longest without a whole request is ended. So
half-sent requests lock nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from sparsekv_cli.errors import SparseKVError

BACKLOG = 64  # connections that the system accepts before the server does
SPARE = 64  # connections in addition to those whose requests run or wait
FILES = 128 + BACKLOG  # other open files, and connections that were just accepted
HEAD_S = 10.0  # seconds in which the head of a request must arrive
WRITE_S = 60.0  # seconds after which a client that reads nothing is dropped
BUSY = json.dumps({"error": {"message": "too many connections", "type": "rate_limit_error"}})


def most_connections(n_requests: int) -> int:
    """Returns how many connections there may be, with n_requests that run or wait.

    Raises the limit of open files if it is lower. Raises SparseKVError if not even one fits.
    """
    wanted = n_requests + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted + FILES:
        soft = wanted + FILES if hard == unlimited else min(hard, wanted + FILES)
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


class Connection(H11Protocol):
    """uvicorn's connection, with limits. ``limited`` makes the class for a server."""

    most = 256
    head_s, write_s = HEAD_S, WRITE_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._time_head()
        if len(self.connections) > self.most:
            self._make_room()

    @property
    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits(self) -> bool:
        """Whether there is no whole request yet."""
        return self._waits_for_head or self.cycle.more_body

    def _make_room(self) -> None:
        """Ends the connection that has waited longest for a whole request, or else this one."""
        others: list[Any] = [each for each in self.connections if each is not self]
        waiting = [each for each in others if each._waits]
        if waiting:
            oldest = min(waiting, key=lambda each: each._since)
            self.connections.discard(oldest)
            oldest.transport.abort()
        else:
            self._refuse(503, "Service Unavailable", BUSY)

    def _refuse(self, status: int, phrase: str, body: str = "") -> None:
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\nretry-after: 2\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write((head + body).encode())
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
        super().data_received(data)
        self._time_head()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_timer(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_timer(self._head_timer)
        self._end_timer(self._write_timer)

    @staticmethod
    def _end_timer(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def limited(most: int, head_s: float = HEAD_S) -> type[Connection]:
    """Returns the class of a server's connections. most: how many there may be."""
    return type("LimitedConnection", (Connection,), {"most": most, "head_s": head_s})
