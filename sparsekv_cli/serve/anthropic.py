"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sparsekv_cli.generation.answer import STOP_LENGTH, STOP_TEXT
from sparsekv_cli.generation.conversation import continues_last
from sparsekv_cli.generation.fields import FieldError, shown
from sparsekv_cli.generation.messages import PartTexts, content_text, message_text
from sparsekv_cli.models.chat.calls import Part, Text, Thought, ToolCall
from sparsekv_cli.models.chat.fitting.call_forms import new_call_id
from sparsekv_cli.serve.answers import Answers, News, Ping, about
from sparsekv_cli.serve.forms.schema import CountFields, MessageFields
from sparsekv_cli.serve.forms.tools import ForcedCall, functions_of, reader_of
from sparsekv_cli.serve.forms.volatile import VolatileHeaders
from sparsekv_cli.serve.jobs import Finished
from sparsekv_cli.serve.openai import comment, event, rows_event
from sparsekv_cli.serve.requests import Service

ROLES = ("user", "assistant", "system")
BLOCKS = (
    "expected a block of type text, document, thinking, tool_use, tool_result or tool_reference"
)


class Message:
    """One checked request; ``stream`` or ``whole`` answers it."""

    def __init__(self, service: Service, fields: MessageFields) -> None:
        """Raises RequestError for a request that cannot be answered."""
        self._service = service
        self.streams = fields.stream
        tools = _tools(service, fields)
        self._kind = service.format_for(bool(tools) and not fields.forbids_calls)
        self._forced = _forced(service, fields, tools)
        messages = _conversation(fields, service.volatile)
        continues = continues_last(messages, None, None)
        self._reader = reader_of(
            self._kind,
            self._forced,
            functions_of(tools),
            marks=service.marks,
            is_begun=continues,
            is_single=fields.tool_choice.disable_parallel_tool_use,
        )
        self._shows_thoughts = fields.thinking is None or fields.thinking.display != "omitted"
        form = fields.output_config.format
        think, budget = _thinking(fields)
        _, budget = service.thinking_of(think, budget)
        self._request = service.request(
            _prompt_ids(service, fields, messages, tools, is_forced=self._forced is not None),
            fields,
            max_tokens=fields.max_tokens,
            stops=fields.stop_sequences,
            schema=None if form is None else form.definition,
            kind=self._kind,
            forced=self._forced,
            thinks=not continues,
            think=think,
            think_budget=budget,
        )
        self._id = f"msg_{uuid.uuid4().hex}"

    async def whole(self) -> dict[str, Any]:
        """Returns the response to a request that does not stream."""
        async with Answers(self._service, [self._request], [self._reader]) as answers:
            (news,) = await answers.whole()
        assert news.end is not None
        blocks = [_block(part) for part in self._shown(news.parts)]
        has_called = any(isinstance(part, ToolCall) for part in news.parts)
        if has_called:
            blocks = [each for each in blocks if each.get("text", "x").strip()]
        message = self._message(blocks, _usage(news.end))
        message |= _stop(news.end, has_called)
        return {**message, "sparsekv": about(news.end, self._service, self._request)}

    async def stream(self) -> AsyncIterator[str]:
        """Yields the events of a response that streams."""
        n_prompt = len(self._request.ids)
        start = self._message([], {"input_tokens": n_prompt, "output_tokens": 0})
        blocks, has_called = _Blocks(), False
        async with Answers(self._service, [self._request], [self._reader]) as answers:
            yield _event("message_start", message=start)
            yield _event("ping")
            async for news in answers.parts():
                if not isinstance(news, News):
                    yield _event("ping") if isinstance(news, Ping) else comment(news)
                    continue
                for part in self._shown(news.parts):
                    has_called = has_called or isinstance(part, ToolCall)
                    for each in blocks.add(part):
                        yield each
                if news.rows is not None:
                    yield rows_event(news)
                if news.end is not None:
                    for each in blocks.close():
                        yield each
                    delta, spent = _stop(news.end, has_called), _usage(news.end)
                    yield _event("message_delta", delta=delta, usage=spent)
        yield _event("message_stop")

    def failure(self, error: Mapping[str, Any]) -> str:
        """Returns the last event of a stream that fails."""
        return event(error, "error")

    def _shown(self, parts: Sequence[Part]) -> list[Part]:
        return [each for each in parts if self._shows_thoughts or not isinstance(each, Thought)]

    def _message(self, blocks: Sequence[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._service.name,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }


class _Blocks:
    """The blocks of a stream, one open at a time."""

    def __init__(self) -> None:
        self._n, self._open, self._blank = 0, "", ""  # white space gets no block of its own

    def add(self, part: Part) -> list[str]:
        """Returns the events of a part of the answer."""
        if isinstance(part, Text) and not self._open:
            self._blank += part.text
            if not self._blank.strip():
                return []
            part = Text(self._blank)
        kind = _KINDS[type(part)]
        events = [] if self._open == kind != "tool_use" else self.close() + self._begin(part)
        if isinstance(part, ToolCall):
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
        elif isinstance(part, Thought):
            delta = {"type": "thinking_delta", "thinking": part.text}
        else:
            delta = {"type": "text_delta", "text": part.text}
        events.append(_event("content_block_delta", index=self._n, delta=delta))
        return events + (self.close() if kind == "tool_use" else [])

    def _begin(self, part: Part) -> list[str]:
        self._open, self._blank, block = _KINDS[type(part)], "", _block(part)
        empty: dict[str, Any] = {"input": {}} if isinstance(part, ToolCall) else {self._open: ""}
        return [_event("content_block_start", index=self._n, content_block={**block, **empty})]

    def close(self) -> list[str]:
        """Ends the open block."""
        if not self._open:
            return []
        self._open, self._n = "", self._n + 1
        return [_event("content_block_stop", index=self._n - 1)]


_KINDS: dict[type, str] = {Text: "text", Thought: "thinking", ToolCall: "tool_use"}


def count_tokens(service: Service, fields: CountFields) -> dict[str, int]:
    """Returns how many tokens a request's prompt has."""
    tools = _tools(service, fields)
    is_forced = _forced(service, fields, tools) is not None
    ids = _prompt_ids(
        service, fields, _conversation(fields, service.volatile), tools, is_forced=is_forced
    )
    return {"input_tokens": len(ids)}


def error_body(message: str, kind: str) -> dict[str, Any]:
    """Returns an error in Anthropic's shape."""
    return {"type": "error", "error": {"type": kind, "message": message}}


def _prompt_ids(
    service: Service,
    fields: CountFields,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    is_forced: bool,
) -> list[int]:
    """Returns the ids of a request's conversation (see ``_conversation``) and tools.

    is_forced: the answer is a tool call without thinking.
    """
    wanted = False if is_forced else _thinking(fields)[0]
    think = wanted if service.thinking_switch else None
    variables = service.variables_of({}, service.effort_of(fields.effort))
    continues = continues_last(messages, None, None)
    return service.encode_chat(messages, tools, think, variables, continues=continues)


def _conversation(fields: CountFields, volatile: VolatileHeaders) -> list[dict[str, Any]]:
    """Returns the messages of a request as templates read them, its system text first."""
    messages, last = [], len(fields.messages) - 1
    system = content_text("system", volatile.of_system(fields.system))
    if system:
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(fields.messages):
        messages += _messages(f"messages[{i}]", message, is_last=i == last)
    return messages


def _thinking(fields: CountFields) -> tuple[bool | None, int | None]:
    """Returns whether the model thinks (None: as its template says), and for how many tokens."""
    thinking = fields.thinking
    if thinking is None:
        return None, None
    think = thinking.type != "disabled"
    return think, thinking.budget_tokens if think else None


def _messages(where: str, message: Any, *, is_last: bool) -> list[dict[str, Any]]:
    """Returns a message as templates take it. Results of tools become messages of their own."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise FieldError(where, f": expected an object whose role is one of {', '.join(ROLES)}")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message["role"], "content": message_text(where, message)}]
    result: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": message["role"]}
    pieces = PartTexts()
    kinds = [block.get("type") if isinstance(block, dict) else None for block in content]
    is_new = is_last and message["role"] == "user" and "tool_result" not in kinds
    for i, (kind, block) in enumerate(zip(kinds, content, strict=True)):
        at = f"{where}.content[{i}]"
        if kind == "tool_reference":
            pieces.add(at, _reference(at, block), BLOCKS)
        elif kind == "thinking":
            thought = content_text(at, block.get("thinking"))
            own["reasoning_content"] = own.get("reasoning_content", "") + thought
        elif kind == "tool_use" and isinstance(block.get("name"), str):
            given = block.get("input")
            if not isinstance(given, dict | None):
                raise FieldError(f"{at}.input", f": expected an object, found {shown(given)}")
            call = {"name": block["name"], "arguments": given or {}}
            calls = own.setdefault("tool_calls", [])
            calls.append({"id": str(block.get("id") or ""), "type": "function", "function": call})
        elif kind == "tool_result":
            text = _result_text(at, block.get("content"))
            answered = {"tool_call_id": str(block.get("tool_use_id") or ""), "content": text}
            result.append({"role": "tool", **answered})
        elif kind != "redacted_thinking":
            pieces.add(at, block, BLOCKS, is_new=is_new)
    own["content"] = pieces.text
    has_own = own["content"] or "tool_calls" in own or not result
    return [*result, own] if has_own else result


def _result_text(where: str, content: Any) -> str:
    """Returns the text of a tool's result: its texts, and the names of tools that it refers to."""
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and part.get("type") == "tool_reference":
                _reference(where, part)
    return content_text(where, content)


def _reference(where: str, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a reference to a found tool. The prompt describes all tools."""
    if not isinstance(block.get("tool_name"), str):
        raise FieldError(where, ": expected a tool_reference with a tool_name")
    return block


def _tools(service: Service, fields: CountFields) -> list[dict[str, Any]]:
    """Returns the tools as templates take them, if the prompt has them."""
    if not service.shows_tools(fields):
        return []
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        for tool in fields.tools
    ]
    return [{"type": "function", "function": function} for function in functions]


def _forced(
    service: Service, fields: CountFields, tools: Sequence[Mapping[str, Any]]
) -> ForcedCall | None:
    """Returns the call that tool_choice asks for, or None."""
    if fields.tool_choice.type in ("auto", "none"):
        return None
    return service.forced_call(fields.tool_choice.name, functions_of(tools))


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, ToolCall):
        name, given = part.name, json.loads(part.arguments)
        return {"type": "tool_use", "id": new_call_id(), "name": name, "input": given}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _stop(end: Finished, has_called: bool) -> dict[str, str | None]:
    """Returns why the answer ended, in Anthropic's words, and the stop sequence that ended it."""
    is_stopped = end.stop_reason == STOP_TEXT and not has_called
    reason = "tool_use" if has_called else "stop_sequence" if is_stopped else "end_turn"
    reason = "max_tokens" if end.stop_reason == STOP_LENGTH else reason
    return {"stop_reason": reason, "stop_sequence": end.stopped_by if is_stopped else None}


def _usage(end: Finished) -> dict[str, int]:
    """Returns the tokens as Anthropic counts them. Input tokens are those that were computed."""
    return {
        "input_tokens": end.n_prompt - end.n_cached,
        "cache_read_input_tokens": end.n_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": end.n_generated,
    }


def _event(kind: str, **fields: Any) -> str:
    return event({"type": kind, **fields}, kind)
