"""Streams of events, and clients that leave before their answer is complete."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send


async def unless_gone(request: Request, answer: Any) -> Any:
    """Awaits an answer. If its client leaves, cancels the answer and raises ClientDisconnect."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_gone(request.receive))
    await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not answering.done():
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        raise ClientDisconnect
    return answering.result()


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. They end and close their source when the client disconnects."""

    def __init__(
        self, first: str, events: AsyncIterator[str], failure: Callable[[Exception], str]
    ) -> None:
        """failure: returns the last event of a stream that fails."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._events, self._failure = first, events, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        with contextlib.suppress(ClientDisconnect, OSError):
            await unless_gone(Request(scope, receive), self._send(send))
        await self._events.aclose()  # type: ignore[attr-defined]  # a generator

    async def _send(self, send: Send) -> None:
        await _send_text(send, self._first)
        try:
            async for text in self._events:
                await _send_text(send, text)
        except Exception as error:
            await _send_text(send, self._failure(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
