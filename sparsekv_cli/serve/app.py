"""The web application: routes, what guards them, and errors in the shape that a client expects."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparsekv_cli.errors import BusyError, LostModelError, SparseKVError
from sparsekv_cli.generation.fields import MAX_SHOWN, FieldError, Fields
from sparsekv_cli.methods import describe_methods
from sparsekv_cli.serve import anthropic, llama, openai, page
from sparsekv_cli.serve.forms.openapi import openapi
from sparsekv_cli.serve.forms.response_fields import ResponseFields
from sparsekv_cli.serve.forms.schema import (
    ChatFields,
    CompletionFields,
    CountFields,
    DetokenizeFields,
    MessageFields,
    TokenizeFields,
)
from sparsekv_cli.serve.jobs import QueueFullError, StoppingError, TimeLimitError, TooLargeError
from sparsekv_cli.serve.metrics import Metrics
from sparsekv_cli.serve.requests import RequestError, Service, read_request
from sparsekv_cli.serve.responses import Kept, ModelResponse
from sparsekv_cli.serve.wire.bodies import Bodies, BodyError, WholeBodies

N_READERS = 16  # requests that are read at once, of which grammar_trial.N_WAITING may wait
RETRY_S = 2  # after which a client may ask again
LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
HTTP_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

# Paths of OpenAI's that a model which writes text cannot have, by what they are for.
OTHERS = {"embeddings": "embeddings", "images": "pictures", "audio": "sounds", "videos": "videos"}
OTHERS |= {"moderations": "moderations", "rerank": "rankings"}

F = TypeVar("F", bound=Fields)
T = TypeVar("T")


@dataclass(frozen=True)
class Access:
    """Who may ask: api_key: empty: everyone. origins: of pages elsewhere that may, none by default.

    only_local: requests must name this machine, so that no page elsewhere can pass for it.
    """

    api_key: str = ""
    origins: tuple[str, ...] = ()
    only_local: bool = True


def make_app(
    service: Service, access: Access, log: Callable[[str], None] = lambda line: None
) -> ASGIApp:
    """Returns the application. log: told a line a request, without prompts."""
    metrics, bodies = Metrics(service.scheduler), Bodies(service.limits.body_bytes)
    created, kept = int(time.time()), Kept()

    readers = ThreadPoolExecutor(N_READERS, "request")

    async def read(request: Request, kind: type[F], make: Callable[[Service, F], T]) -> T:
        """Runs ``make`` on a request's fields, in a thread."""
        values = await bodies.read(request)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            readers, lambda: make(service, read_request(kind, values))
        )

    async def chat(request: Request) -> Response:
        return await _answer(request, await read(request, ChatFields, openai.Completion))

    async def complete(request: Request) -> Response:
        return await _answer(request, await read(request, CompletionFields, openai.Completion))

    async def message(request: Request) -> Response:
        return await _answer(request, await read(request, MessageFields, anthropic.Message))

    async def count(request: Request) -> Response:
        return JSONResponse(await read(request, CountFields, anthropic.count_tokens))

    async def respond(request: Request) -> Response:
        make = partial(ModelResponse, kept)
        return await _answer(request, await read(request, ResponseFields, make))

    async def response(request: Request) -> Response:
        if query := next(iter(request.query_params), None):
            raise RequestError(f"{query[:MAX_SHOWN]}: no such field")
        name = request.path_params["id"]
        if request.method == "DELETE":
            kept.remove(name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(await asyncio.to_thread(lambda: kept.find(name)[1]))

    async def tokenize(request: Request) -> Response:
        return JSONResponse(await read(request, TokenizeFields, llama.tokenize))

    async def detokenize(request: Request) -> Response:
        return JSONResponse(await read(request, DetokenizeFields, llama.detokenize))

    async def props(request: Request) -> Response:
        return JSONResponse(llama.props(service))

    async def _answer(request: Request, asked: Any) -> Response:
        if asked.streams:
            events = asked.stream()
            first = await _unless_gone(request, anext(events))  # errors before it have a status
            return EventStream(first, events, request.url.path, asked.failure)
        return JSONResponse(await _unless_gone(request, asked.whole()))

    async def models(request: Request) -> Response:
        listed = openai.models(service, created)
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse(listed)
        if name != service.name:
            raise HTTPException(404, f"the model {name!r} is not here: {service.name} is")
        return JSONResponse(listed["data"][0])

    async def methods(request: Request) -> Response:
        return JSONResponse({"default": service.model.method.name, "methods": describe_methods()})

    async def health(request: Request) -> Response:
        failure = service.scheduler.failure
        status = {"status": "ok" if failure is None else "failed", "model": service.name}
        return JSONResponse(status, 200 if failure is None else 503)

    async def numbers(request: Request) -> Response:
        return Response(metrics.text(), media_type=metrics.media_type)

    async def description(request: Request) -> Response:
        return JSONResponse(openapi(service.name))

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", models, methods=["GET"]),
        Route("/v1/methods", methods, methods=["GET"]),
        Route("/v1/messages", message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
        Route("/v1/responses", respond, methods=["POST"]),
        Route("/v1/responses/{id}", response, methods=["GET", "DELETE"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/props", props, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", numbers, methods=["GET"]),
        Route("/openapi.json", description, methods=["GET"]),
        *page.routes(),
    ]
    middleware = [Middleware(_Log, log=log, metrics=metrics)]
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=access.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
            )
        )
    middleware.append(Middleware(_Guard, access=access))

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, error)

    handlers: dict[Any, Any] = {SparseKVError: failed, HTTPException: failed}
    handlers |= {MemoryError: failed, Exception: failed, ClientDisconnect: _nobody}
    starlette = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    starlette.router.default = _no_path([route.path.replace(":path", "") for route in routes])
    return WholeBodies(starlette)


def _no_path(paths: Sequence[str]) -> ASGIApp:
    """Answers requests to paths that are not there."""

    async def missing(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        words = f"there is no path {path[:MAX_SHOWN]!a}"
        parts = path.removeprefix("/v1").split("/")
        if kind := next((kind for name, kind in OTHERS.items() if parts[1:2] == [name]), None):
            words = f"this server makes no {kind}: its model reads and writes text"
        raise HTTPException(404, f"{words}; the paths are {', '.join(paths)}")

    return missing


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def status_of(error: Exception) -> tuple[int, str, str | None]:
    """Returns the status of an error, its type in both protocols, and its code in OpenAI's."""
    if isinstance(error, RequestError):
        return error.status, "invalid_request_error", error.code
    if isinstance(error, BodyError):
        return error.status, "invalid_request_error", None
    if isinstance(error, HTTPException):
        kind = HTTP_ERRORS.get(error.status_code, "invalid_request_error")
        return error.status_code, kind, None
    if isinstance(error, QueueFullError):
        return 429, "rate_limit_error", "queue_full"
    if isinstance(error, TooLargeError):
        return 400, "invalid_request_error", "too_large"
    if isinstance(error, StoppingError | LostModelError):
        return 503, "api_error", "stopping"
    if isinstance(error, BusyError):
        return 503, "api_error", "busy"
    if isinstance(error, TimeLimitError):
        return 504, "timeout_error", "time_limit"
    if isinstance(error, SparseKVError):
        return 400, "invalid_request_error", None
    return 500, "api_error", None


def error_body(path: str, error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error, in the shape of the protocol that has ``path``."""
    status, kind, code = status_of(error)
    if isinstance(error, HTTPException):
        message = str(error.detail)
        if error.status_code == 405 and error.headers:
            message = f"{path}: expected {error.headers['Allow']}"
    elif isinstance(error, SparseKVError):
        message = " ".join(str(error).removeprefix("--").split())
    elif isinstance(error, MemoryError):
        message = "out of memory"
    else:
        message = f"unexpected {type(error).__name__}"
    if path.startswith("/v1/messages"):
        return status, anthropic.error_body(message, kind)
    param = error.param if isinstance(error, RequestError) else None
    if isinstance(error, FieldError):
        param = error.field or None
    return status, openai.error_body(message, kind, param, code)


def error_response(path: str, error: Exception) -> Response:
    status, body = error_body(path, error)
    headers = {"retry-after": str(RETRY_S)} if status in (429, 503) else {}
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return JSONResponse(body, status, headers=headers)


async def _unless_gone(request: Request, answer: Any) -> Any:
    """Awaits an answer; ClientDisconnect, and the answer is cancelled, when its client goes."""
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
    """Server-sent events. They end, and what makes them is told, when the client goes."""

    def __init__(
        self,
        first: str,
        events: AsyncIterator[str],
        path: str,
        failure: Callable[[Mapping[str, Any]], str],
    ) -> None:
        """failure: returns the last event of one that fails, from the body of the error."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._events, self._path, self._failure = first, events, path, failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head: Message = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
        await self._events.aclose()  # type: ignore[attr-defined]  # a generator

    async def _send(self, send: Send) -> None:
        await _send_text(send, self._first)
        try:
            async for text in self._events:
                await _send_text(send, text)
        except Exception as error:
            _, body = error_body(self._path, error)
            await _send_text(send, self._failure(body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_text(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


class _Guard:
    """Lets those in who name this machine, if that is asked, and have the key, if there is one."""

    OPEN = ("/", "/health")  # which tell nothing

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (error := self._reason_against(scope)) is None:
            await self._app(scope, receive, send)
        else:
            await error_response(scope["path"], error)(scope, receive, send)

    def _reason_against(self, scope: Scope) -> Exception | None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        if "transfer-encoding" in headers and "content-length" in headers:  # two ends of one body
            return RequestError("Content-Length and Transfer-Encoding exclude each other")
        if self._access.only_local:
            host = headers.get("host", b"").decode("latin-1").lower()
            if host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
                return HTTPException(421, "this server answers requests to localhost only")
        is_open = scope["path"] in self.OPEN or scope["path"].startswith(page.STATIC)
        if self._access.api_key and not is_open:
            given = headers.get("authorization", b"").partition(b" ")
            key = given[2].strip() if given[0].lower() == b"bearer" else b""
            key = key or headers.get("x-api-key", b"")
            if not hmac.compare_digest(key, self._access.api_key.encode()):
                return HTTPException(
                    401, "the API key is missing or wrong", {"www-authenticate": "Bearer"}
                )
        return None


class _Log:
    """Tells of each request when it has ended: method, path, status and time; no words of it."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None], metrics: Metrics) -> None:
        self._app, self._log, self._metrics = app, log, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def remember(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, remember)
        finally:
            seconds = time.monotonic() - started
            self._metrics.add_request(scope["path"], status)
            self._log(f"{scope['method']} {ascii(scope['path'])[1:-1]} {status} {seconds:.3f} s")
