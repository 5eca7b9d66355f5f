"""OpenAI's Responses API: /v1/responses."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from threading import Lock
from typing import Any

from sparsekv_cli.generation.answer import STOP_LENGTH
from sparsekv_cli.generation.fields import FieldError, shown
from sparsekv_cli.serve.answers import News
from sparsekv_cli.serve.forms.items import OutputItems, read_items
from sparsekv_cli.serve.forms.offers import offers_of
from sparsekv_cli.serve.forms.response_fields import ResponseFields
from sparsekv_cli.serve.jobs import ContextFullError, Finished
from sparsekv_cli.serve.openai import Completion, comment, event, rows_event
from sparsekv_cli.serve.requests import RequestError, Service

MAX_KEPT = 64 << 20  # bytes of all responses that are kept
MAX_ONE = 4 << 20  # bytes of one with its conversation
ENCRYPTED = "reasoning.encrypted_content"
# Fields of a request that its response repeats.
ECHO = {"background", "instructions", "max_output_tokens", "parallel_tool_calls", "reasoning"}
ECHO |= {"previous_response_id", "prompt_cache_key", "safety_identifier", "service_tier", "store"}
ECHO |= {"temp", "text", "tool_choice", "top_p", "user"}
# Fields of /v1/chat/completions under the names that they have here.
NAMES = {"messages": "input", "response_format": "text.format"}
NAMES |= {"reasoning_effort": "reasoning.effort"}
CHAT_WORDS = re.compile(r"^reasoning_effort\b|\bresponse_format\b")


class Kept:
    """The newest responses with the conversations that they end.

    Beyond MAX_KEPT the oldest ones are dropped. A response larger than MAX_ONE is not kept, because
    a continuation needs a multiple of its bytes.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[str, bytes] = OrderedDict()
        self._output: dict[str, list[str]] = {}  # the ids of a response's items
        self._owners: dict[str, str] = {}  # the response of an item
        self._n_bytes, self._lock = 0, Lock()

    def add(self, items: list[Any], response: Mapping[str, Any]) -> None:
        """Keeps a response. items: its whole conversation."""
        text = json.dumps([items, response]).encode()
        if len(text) > MAX_ONE:
            return
        name, ids = response["id"], [item["id"] for item in response.get("output", ())]
        with self._lock:
            self._texts[name], self._output[name] = text, ids
            self._owners |= dict.fromkeys(ids, name)
            self._n_bytes += len(text)
            while self._n_bytes > MAX_KEPT:
                self._drop(next(iter(self._texts)))

    def _drop(self, name: str) -> None:
        self._n_bytes -= len(self._texts.pop(name))
        for item in self._output.pop(name):
            del self._owners[item]

    def find(self, name: str) -> tuple[list[Any], dict[str, Any]]:
        """Returns the items and the response. Raises RequestError if it is not kept."""
        with self._lock:
            text = self._texts.get(name)
        if text is None:
            raise _missing(name)
        items, response = json.loads(text)
        return items, response

    def remove(self, name: str) -> None:
        """Removes a response. Raises RequestError if it was not kept."""
        with self._lock:
            if name not in self._texts:
                raise _missing(name)
            self._drop(name)

    def resolved(self, items: list[Any]) -> list[Any]:
        """Returns items of a request. Kept ones stand in the places of references to them."""
        found: dict[str, Any] = {}
        for item in items:
            name = item["id"] if _is_reference(item) else ""
            owner = self._owners.get(name)
            if owner is not None and name not in found:
                with contextlib.suppress(RequestError):  # it was dropped just now
                    found |= {each["id"]: each for each in self.find(owner)[1]["output"]}
        return [found.get(item["id"], item) if _is_reference(item) else item for item in items]


def _is_reference(item: Any) -> bool:
    is_one = isinstance(item, dict) and item.get("type") == "item_reference"
    return is_one and isinstance(item.get("id"), str)


def _missing(name: str) -> RequestError:
    return RequestError(
        f"no response {shown(name)} is kept: this server keeps the newest ones until it ends, "
        f"{MAX_KEPT >> 20} MiB in all, none over {MAX_ONE >> 20} MiB and none with store: false",
        status=404,
        param="id",
        code="response_not_found",
    )


class ModelResponse:
    """One request, checked; ``stream`` or ``whole`` answers it."""

    def __init__(self, kept: Kept, service: Service, fields: ResponseFields) -> None:
        """Raises RequestError for a request that cannot be answered."""
        self._service, self._fields, self._kept = service, fields, kept
        self.streams = fields.stream
        before = [] if fields.previous_response_id is None else self._before()
        text = fields.input
        given = [{"role": "user", "content": text}] if isinstance(text, str) else text
        self._items = [*before, *kept.resolved(given)]
        messages = read_items(self._items, len(before))
        if not messages:
            messages.append({"role": "user", "content": ""})
        if fields.instructions:
            messages.insert(0, {"role": "system", "content": fields.instructions})
        self._full: ContextFullError | None = None
        try:
            self._completion = Completion(service, fields.as_chat(messages))
        except (RequestError, FieldError) as error:
            words = CHAT_WORDS.sub(lambda found: NAMES[found[0]], str(error))
            if isinstance(error, FieldError):
                field = NAMES.get(error.field, error.field)
                raise RequestError(words, param=field or None) from None
            param = None if error.param is None else NAMES.get(error.param, error.param)
            raise RequestError(words, status=error.status, param=param, code=error.code) from None
        except ContextFullError as error:
            error.param, self._full = "input", error
            if not fields.stream:
                raise
        offers = {tool.as_function.name: offer for offer, tool in offers_of(fields.tools)}
        encrypts = ENCRYPTED in fields.include
        self._output = OutputItems(encrypts=encrypts, offers=offers)
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._n_events = 0

    def _before(self) -> list[Any]:
        """Returns the items of the previous response's conversation."""
        try:
            return self._kept.find(str(self._fields.previous_response_id))[0]
        except RequestError as error:
            raise RequestError(
                f"previous_response_id: {error}; send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None

    async def whole(self) -> dict[str, Any]:
        """Returns the response to a request that does not stream."""
        async with self._completion.answers() as answers:
            (news,) = await answers.whole()
        assert news.end is not None
        for part in news.parts:
            list(self._output.add(part))
        list(self._output.end(_status(news.end)))
        return self._ended(news.end)

    async def stream(self) -> AsyncIterator[str]:
        """Yields the events of a response that streams. A full context is the event failed."""
        try:
            if self._full is None:
                async for text in self._parts():
                    yield text
        except ContextFullError as error:
            self._full = error
        if self._full is not None:
            yield self._event("created", {"response": self._body("in_progress")})
            fault = {"code": "context_length_exceeded", "message": str(self._full)}
            yield self._event("failed", {"response": self._body("failed", error=fault)})

    async def _parts(self) -> AsyncIterator[str]:
        async with self._completion.answers() as answers:
            for name in ("created", "in_progress"):
                yield self._event(name, {"response": self._body("in_progress")})
            async for news in answers.parts():
                if not isinstance(news, News):
                    yield comment(news)
                    continue
                for part in news.parts:
                    for each in self._output.add(part):
                        yield self._event(*each)
                if news.rows is not None:
                    yield rows_event(news)
                if news.end is not None:
                    status = _status(news.end)
                    for each in self._output.end(status):
                        yield self._event(*each)
                    yield self._event(status, {"response": self._ended(news.end)})

    def failure(self, error: Mapping[str, Any]) -> str:
        """Returns the last event of a stream that fails."""
        fault = {"code": "server_error", "message": error["error"]["message"]}
        return self._event("failed", {"response": self._body("failed", error=fault)})

    def _event(self, name: str, values: Mapping[str, Any]) -> str:
        kind, number = f"response.{name}", self._n_events
        self._n_events += 1
        return event({"type": kind, "sequence_number": number, **values}, kind)

    def _ended(self, end: Finished) -> dict[str, Any]:
        """Returns the whole response, and keeps it if the request says so."""
        status, more = _status(end), {}
        if status == "incomplete":
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        thought = self._service.tokenizer.encode_within(self._output.thought)
        usage = {
            "input_tokens": end.n_prompt,
            "input_tokens_details": {"cached_tokens": end.n_cached, "cache_write_tokens": 0},
            "output_tokens": end.n_generated,
            "output_tokens_details": {"reasoning_tokens": len(thought)},
            "total_tokens": end.n_prompt + end.n_generated,
        }
        body = self._body(status, usage=usage, sparsekv=self._completion.about({0: end}), **more)
        if self._fields.store:
            self._kept.add([*self._items, *self._output.items], body)
        return body

    def _body(self, status: str, **more: Any) -> dict[str, Any]:
        echo = self._fields.model_dump(include=ECHO, by_alias=True)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._service.name,
            "output": self._output.items,
            "usage": None,
            "temperature": echo.pop("temp"),
            "tools": [tool.told() for tool in self._fields.tools],
            "truncation": "disabled",
            **echo,
            "metadata": self._fields.metadata or {},
            **more,
        }


def _status(end: Finished) -> str:
    return "incomplete" if end.stop_reason == STOP_LENGTH else "completed"
