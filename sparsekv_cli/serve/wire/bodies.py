"""Bodies of requests: limits of bytes and time. An unread body is discarded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.fields import read_object

BODY_S = 60.0  # seconds in which a body must arrive
TOGETHER = 4  # the limit of all bodies that are read or parsed, in limits of one body
SMALL = 64  # a body of at most the limit / SMALL is always accepted, and parsed at once
# Parsing a larger body stops the model. Then for RESTS times as long no other large body is
# parsed.
RESTS = 9
DISCARD_S = 1.0  # seconds in which the body of a refused request is still received


class BodyError(SparseKVError):
    """A body that is not read. status: the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Bodies:
    """Reads bodies of at most ``most`` bytes, each within BODY_S."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._n_held = 0  # bytes of bodies that are read or parsed
        self._parsing = asyncio.Lock()
        self._rests_until = 0.0

    async def read(self, request: Request) -> Mapping[str, Any]:
        """Returns a request's JSON object. Raises BodyError beyond a limit, else FieldError."""
        async with self.whole(request, "application/json") as data:
            if len(data) <= self._most // SMALL:
                return await asyncio.to_thread(parse, data)
            async with self._parsing:  # one at a time: parsing takes a multiple of a body's memory
                await asyncio.sleep(self._rests_until - time.monotonic())
                return await asyncio.to_thread(self._parse_large, data)

    @contextlib.asynccontextmanager
    async def whole(self, request: Request, expected: str) -> AsyncIterator[bytearray]:
        """Yields a body, which counts as being read meanwhile. Raises BodyError beyond a limit.

        expected: the content type. For such a type a browser asks before a foreign page may send.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != expected:
            raise BodyError(f"expected the content type {expected}", status=415)
        data = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    async for part in request.stream():
                        data += part
                        self._n_held += len(part)
                        self._check(len(data))
            except TimeoutError:
                late = f"the body did not arrive within {BODY_S:g} s"
                raise BodyError(late, status=408) from None
            yield data
        finally:
            self._n_held -= len(data)

    def _check(self, n: int) -> None:
        if n > self._most:
            raise BodyError(
                f"the body has more than {self._most} bytes, the limit of serve --max-body",
                status=413,
            )
        if self._n_held > TOGETHER * self._most and n > self._most // SMALL:
            raise BodyError(
                f"all bodies together have more than {TOGETHER * self._most} bytes: try again "
                "later",
                status=503,
            )

    def _parse_large(self, data: bytearray) -> Mapping[str, Any]:
        started = time.monotonic()
        try:
            return parse(data)
        finally:
            now = time.monotonic()
            self._rests_until = now + RESTS * (now - started)


def parse(data: bytearray) -> Mapping[str, Any]:
    """Returns the JSON object of a body. Raises FieldError if the body is no JSON object.

    Python's garbage collector pauses, because a million new lists would start it again and again.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return read_object(data)
    finally:
        if collects:
            gc.enable()


class WholeBodies:
    """Ends the connection of a request that is answered before its body is read.

    Some of the body is received first, because a client that still sends would miss the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def reading() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def discard() -> None:
            while not is_read:
                await reading()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_read:
                if not any(name == b"expect" for name, _ in scope["headers"]):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(DISCARD_S):
                            await discard()
                if not is_read:
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, reading, sending)


def _has_body(scope: Scope) -> bool:
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    return any(name == b"transfer-encoding" for name, _ in scope["headers"]) or any(
        value.strip() != b"0" for value in lengths
    )
