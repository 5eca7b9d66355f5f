"""The web application: its routes, their guards, and errors in the form of a client's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
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
from sparsekv_cli.generation.fields import MAX_SHOWN, FieldError, Fields, read_fields
from sparsekv_cli.methods import describe_methods
from sparsekv_cli.serve import anthropic, llama, openai, page
from sparsekv_cli.serve.answers import ENDS
from sparsekv_cli.serve.forms.clients import without_unused
from sparsekv_cli.serve.forms.offers import told_only
from sparsekv_cli.serve.forms.openapi import BYTES, MAX_NAME, openapi
from sparsekv_cli.serve.forms.response_fields import ResponseFields
from sparsekv_cli.serve.forms.schema import (
    ChatFields,
    CompletionFields,
    CountFields,
    DetokenizeFields,
    InfillFields,
    MessageFields,
    TokenizeFields,
)
from sparsekv_cli.serve.jobs import (
    ContextFullError,
    Finished,
    QueueFullError,
    StoppingError,
    TimeLimitError,
    TooLargeError,
)
from sparsekv_cli.serve.pool import ModelPool, NotLoadedError
from sparsekv_cli.serve.requests import RequestError, Service
from sparsekv_cli.serve.responses import Kept, ModelResponse
from sparsekv_cli.serve.wire.bodies import Bodies, BodyError, WholeBodies
from sparsekv_cli.serve.wire.documents import Documents
from sparsekv_cli.serve.wire.guard import Access, Guard
from sparsekv_cli.serve.wire.kept import KeptAnswers
from sparsekv_cli.serve.wire.metrics import Metrics
from sparsekv_cli.serve.wire.streams import EventStream, unless_gone

N_READERS = 16  # requests that are read at once; grammar_trial.N_WAITING of them may wait
RETRY_S = 2  # seconds after which a client may try again
HTTP_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}

# OpenAI's paths that a text model cannot serve, and what they are for.
OTHERS = {"embeddings": "embeddings", "images": "pictures", "audio": "sounds", "videos": "videos"}
OTHERS |= {"moderations": "moderations", "rerank": "rankings"}

Failure = Callable[[Mapping[str, Any]], str]  # from an error's body to a stream's last event
F = TypeVar("F", bound=Fields)
T = TypeVar("T")


def make_app(
    pool: ModelPool, access: Access, log: Callable[[str], None] = lambda line: None
) -> ASGIApp:
    """Returns the application. log: gets a line for each request, without prompts."""
    metrics, bodies = Metrics(pool.models), Bodies(pool.limits.body_bytes)
    created, kept, documents = int(time.time()), Kept(), Documents(pool.limits.body_bytes)

    answers = KeptAnswers(lambda error: openai.failure(error_body("", error)[1]))
    pool.ends.append(documents.end)
    readers = ThreadPoolExecutor(N_READERS, "request")

    async def read(request: Request, kind: type[F], make: Callable[[Service, F], T]) -> T:
        """Runs ``make`` on a request's fields and its model's service, in a thread."""
        values = await bodies.read(request)
        loop = asyncio.get_running_loop()
        values, unused = await loop.run_in_executor(readers, without_unused, kind, values)
        fields = await loop.run_in_executor(readers, read_fields, kind, values)
        service = await hold(request, str(getattr(fields, "model", "")))
        count_unused(unused | service.unused(fields))
        told = told_only(getattr(fields, "tools", ()))
        count_unused(told, "that the model is told and not bound by")
        return await loop.run_in_executor(readers, make, service, fields)

    def count_unused(names: Iterable[str], what: str = "that has no effect here") -> None:
        """Counts fields that do not have their full effect. The log has a line for each, once."""
        for name in names:
            if metrics.add_unused(name) == 1:
                log(f"requests have a field {what}: {name}")

    async def hold(request: Request, name: str) -> Service:
        """Returns the service of a model. The model stays loaded until the request is answered."""
        return await unless_gone(request, pool.hold(name, request.scope["held"]))

    async def chat(request: Request) -> Response:
        return await _answer(request, await read(request, ChatFields, openai.Completion))

    async def events_of(values: Mapping[str, Any]) -> AsyncGenerator[str]:
        """Yields the events of an answer that is kept, and holds its model meanwhile."""
        loop = asyncio.get_running_loop()
        fields = await loop.run_in_executor(readers, read_fields, ChatFields, values)
        if not fields.stream:
            raise RequestError("stream: expected true, because the answer is kept", param="stream")
        with contextlib.ExitStack() as held:
            service = await pool.hold(fields.model, held)
            asked = await loop.run_in_executor(readers, openai.Completion, service, fields)
            async with contextlib.aclosing(asked.stream()) as events:
                async for event in events:
                    yield event

    async def kept_answer(request: Request) -> Response:
        """Begins, reads or ends an answer that goes on without its client."""
        check_query(request)
        name = request.path_params["id"]
        if request.method == "DELETE":
            answers.remove(name)
            return JSONResponse({"id": name, "object": "answer", "deleted": True})
        if request.method == "PUT":
            answer = answers.begin(name)
            try:
                answer.start(events_of(await bodies.read(request)))
            except BaseException:
                answers.remove(name)
                raise
        return await stream(request, answers.find(name).read())

    async def complete(request: Request) -> Response:
        return await _answer(request, await read(request, CompletionFields, openai.Completion))

    async def message(request: Request) -> Response:
        return await _answer(request, await read(request, MessageFields, anthropic.Message))

    async def count(request: Request) -> Response:
        return JSONResponse(await read(request, CountFields, anthropic.count_tokens))

    async def respond(request: Request) -> Response:
        make = partial(ModelResponse, kept)
        return await _answer(request, await read(request, ResponseFields, make))

    def check_query(request: Request, *known: str) -> None:
        if query := next((each for each in request.query_params if each not in known), None):
            raise RequestError(f"{query[:MAX_SHOWN]}: no such field")

    async def document(request: Request) -> Response:
        check_query(request, "name")
        name = _plain(request.query_params.get("name", "")) or "document"
        if len(name) > MAX_NAME:
            raise RequestError(f"name has more than {MAX_NAME} characters", param="name")
        async with bodies.whole(request, BYTES) as data:
            text = await unless_gone(request, documents.read(bytes(data), name))
        return JSONResponse({"name": name, "text": text})

    async def response(request: Request) -> Response:
        check_query(request)
        name = request.path_params["id"]
        if request.method == "DELETE":
            kept.remove(name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return JSONResponse(await asyncio.to_thread(lambda: kept.find(name)[1]))

    async def infill(request: Request) -> Response:
        return await _answer(request, await read(request, InfillFields, llama.Infill))

    async def tokenize(request: Request) -> Response:
        return JSONResponse(await read(request, TokenizeFields, llama.tokenize))

    async def detokenize(request: Request) -> Response:
        return JSONResponse(await read(request, DetokenizeFields, llama.detokenize))

    async def props(request: Request) -> Response:
        return JSONResponse(llama.props(await hold(request, request.query_params.get("model", ""))))

    async def _answer(request: Request, asked: Any) -> Response:
        if asked.streams:
            return await stream(request, asked.stream(), asked.failure)
        return JSONResponse(await unless_gone(request, asked.whole()))

    async def stream(
        request: Request, events: AsyncIterator[str], failure: Failure = openai.failure
    ) -> Response:
        first = await unless_gone(request, anext(events))  # an error before it has a status
        return EventStream(first, events, lambda e: failure(error_body(request.url.path, e)[1]))

    async def models(request: Request) -> Response:
        name = request.path_params.get("name")
        if name is None:
            data = [model.listed(created) for model in pool.models]
            return JSONResponse({"object": "list", "data": data})
        found = pool.named(name)
        if found is None:
            names = ", ".join(model.name for model in pool.models)
            raise HTTPException(404, f"the model {name!r} does not exist: this server has {names}")
        return JSONResponse(found.listed(created))

    async def methods(request: Request) -> Response:
        return JSONResponse({"default": pool.method, "methods": describe_methods()})

    async def health(request: Request) -> Response:
        states = {model.name: model.status for model in pool.models}
        is_well = any(state != "failed" for state in states.values())
        status = {"status": "ok" if is_well else "failed", "model": pool.models[0].name}
        return JSONResponse({**status, "models": states}, 200 if is_well else 503)

    async def numbers(request: Request) -> Response:
        return Response(metrics.text(), media_type=metrics.media_type)

    async def description(request: Request) -> Response:
        return JSONResponse(openapi(pool.models[0].name))

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/answers/{id}", kept_answer, methods=["PUT", "GET", "DELETE"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", models, methods=["GET"]),
        Route("/v1/methods", methods, methods=["GET"]),
        Route("/v1/messages", message, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
        Route("/v1/responses", respond, methods=["POST"]),
        Route("/v1/responses/{id}", response, methods=["GET", "DELETE"]),
        Route("/documents", document, methods=["POST"]),
        Route("/infill", infill, methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/props", props, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", numbers, methods=["GET"]),
        Route("/openapi.json", description, methods=["GET"]),
        *page.routes(),
    ]
    middleware = [Middleware(_Log, log=log, metrics=metrics), Middleware(_Holds)]
    if access.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=access.origins,
                allow_methods=["GET", "POST", "PUT", "DELETE"],
                allow_headers=["*"],
            )
        )
    middleware.append(Middleware(Guard, access=access, refuse=error_response))

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(request.url.path, error)

    handlers: dict[Any, Any] = {SparseKVError: failed, HTTPException: failed}
    handlers |= {MemoryError: failed, Exception: failed, ClientDisconnect: _nobody}
    starlette = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    starlette.router.default = _no_path([route.path.replace(":path", "") for route in routes])
    return WholeBodies(starlette)


def _no_path(paths: Sequence[str]) -> ASGIApp:
    """Answers requests to paths that do not exist."""

    async def missing(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        words = f"there is no path {path[:MAX_SHOWN]!a}"
        parts = path.removeprefix("/v1").split("/")
        if kind := next((kind for name, kind in OTHERS.items() if parts[1:2] == [name]), None):
            words = f"this server makes no {kind}: its model reads and writes text"
        raise HTTPException(404, f"{words}; the paths are {', '.join(paths)}")

    return missing


def _plain(name: str) -> str:
    """Returns a name on one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in name).split())


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


# Errors by their class (the first that fits): status, type in both protocols, OpenAI's code.
ERRORS: tuple[tuple[type[Exception], tuple[int, str, str | None]], ...] = (
    (NotLoadedError, (500, "api_error", "model_failed")),
    (QueueFullError, (429, "rate_limit_error", "queue_full")),
    (ContextFullError, (400, "invalid_request_error", "context_length_exceeded")),
    (TooLargeError, (400, "invalid_request_error", "too_large")),
    (StoppingError, (503, "api_error", "stopping")),
    (LostModelError, (503, "api_error", "stopping")),
    (BusyError, (503, "api_error", "busy")),
    (TimeLimitError, (504, "timeout_error", "time_limit")),
    (SparseKVError, (400, "invalid_request_error", None)),
    (Exception, (500, "api_error", None)),
)


def status_of(error: Exception) -> tuple[int, str, str | None]:
    """Returns the status of an error, its type in both protocols, and its code in OpenAI's."""
    if isinstance(error, RequestError | BodyError):
        return error.status, "invalid_request_error", getattr(error, "code", None)
    if isinstance(error, HTTPException):
        kind = HTTP_ERRORS.get(error.status_code, "invalid_request_error")
        return error.status_code, kind, None
    return next(status for kind, status in ERRORS if isinstance(error, kind))


def error_body(path: str, error: Exception) -> tuple[int, dict[str, Any]]:
    """Returns an error's status and body, in the protocol of ``path``."""
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
        message = error.anthropic if isinstance(error, ContextFullError) else message
        return status, anthropic.error_body(message, HTTP_ERRORS.get(status, kind))
    param = error.param if isinstance(error, RequestError | ContextFullError) else None
    if isinstance(error, FieldError):
        param = error.field or None
    return status, openai.error_body(message, kind, param, code)


def error_response(path: str, error: Exception) -> Response:
    status, body = error_body(path, error)
    headers = {"retry-after": str(RETRY_S)} if status in (429, 503) else {}
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    return JSONResponse(body, status, headers=headers)


class _Holds:
    """Releases a request's model at the end of the request, however it ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as scope["held"]:
            await self._app(scope, receive, send)


class _Log:
    """Logs each request when it has ended: method, path, status, time and tokens, but no text."""

    def __init__(self, app: ASGIApp, log: Callable[[str], None], metrics: Metrics) -> None:
        self._app, self._log, self._metrics = app, log, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, ends = time.monotonic(), 0, list[Finished]()
        ENDS.set(ends)

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
            path = ascii(scope["path"])[1:-1]
            self._log(f"{scope['method']} {path} {status} {seconds:.3f} s{_tokens(ends)}")


def _tokens(ends: Sequence[Finished]) -> str:
    """Returns the tokens of a request's answers for its line in the log."""
    if not ends:
        return ""
    counts = [(end.n_prompt, end.n_cached, end.n_generated, end.moved.reused) for end in ends]
    n_prompt, n_cached, n_generated, n_moved = map(sum, zip(*counts, strict=True))
    told = {f"; {end.difference.short()}": None for end in ends if end.difference is not None}
    cached = f"{n_cached} cached{f', {n_moved} moved' if n_moved else ''}"
    return f", prompt {n_prompt} tokens, {cached}, answer {n_generated} tokens" + "".join(told)
