"""OpenAI's protocol: /v1/chat/completions, /v1/completions and /v1/models."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer import STOP_LENGTH
from sparsekv_cli.generation.conversation import continues_last
from sparsekv_cli.models.chat.calls import Part, Text, Thought, ToolCall, read_json
from sparsekv_cli.models.chat.history import new_call_id
from sparsekv_cli.serve.answers import Answers, Ping, Told, about
from sparsekv_cli.serve.jobs import Finished, PromptProgress, Wish
from sparsekv_cli.serve.requests import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    RequestError,
    Service,
    content_text,
    in_range,
    shown,
    taken,
    texts,
)
from sparsekv_cli.serve.tools import ANY_OBJECT, ForcedCall, functions_of, reader_of

ROLES = ("system", "developer", "user", "assistant", "tool")
DONE = "data: [DONE]\n\n"


class Completion:
    """One request, checked; ``stream`` or ``whole`` answers it."""

    def __init__(self, service: Service, values: Mapping[str, Any], *, is_chat: bool) -> None:
        """RequestError for what is no such request."""
        self._service, self._values, self._is_chat = service, values, is_chat
        self.streams = taken(values, "stream", bool, False)
        options = taken(values, "stream_options", dict, {})
        self._tells_usage = taken(options, "include_usage", bool, False)
        self._tells_progress = taken(values, "return_progress", bool, False)
        self._tells_rows = in_range(values, "sparsekv_rows", 0, 256, 0) > 0
        taken(values, "model", str, "")
        n = in_range(values, "n", 1, MAX_CHOICES, 1)
        self._think: bool | None = None
        self._continues, self._thinks = False, is_chat
        tools = _tools(values) if is_chat else []
        self._forced = _forced(service, values, tools) if is_chat else None
        prompts = [self._chat_ids(tools)] if is_chat else self._prompt_ids()
        self._kind = service.format_for(bool(tools)) if is_chat else None
        wishes = [self._wish(ids) for ids in prompts]
        self._wishes = [each for wish in wishes for each in service.choices(wish, n)]
        functions, is_begun = functions_of(tools), self._continues
        self._readers = [
            reader_of(self._kind, self._forced, functions, is_begun=is_begun) for _ in self._wishes
        ]
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    def _chat_ids(self, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        messages = _messages(self._values)
        kwargs = taken(self._values, "chat_template_kwargs", dict, {})
        self._think = taken(kwargs, "enable_thinking", bool, None)
        if self._forced is not None and self._service.can_switch_thinking:
            self._think = False
        continues = taken(self._values, "continue_final_message", bool, None)
        adds_prompt = taken(self._values, "add_generation_prompt", bool, None)
        try:
            self._continues = continues_last(messages, continues, adds_prompt)
        except SparseKVError as error:
            raise RequestError(str(error), param="continue_final_message") from None
        self._thinks = not self._continues and adds_prompt is not False
        return self._service.encode_chat(
            messages,
            tools,
            self._think,
            continues=self._continues,
            add_generation_prompt=adds_prompt is not False,
        )

    def _prompt_ids(self) -> list[list[int]]:
        """The prompts of a completion: a text, ids, or a list of either."""
        prompt = self._values.get("prompt")
        many = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        prompts = prompt if many and isinstance(prompt, list) else [prompt]
        n_vocab, encode = self._service.session.hparams.n_vocab, self._service.tokenizer.encode
        result = []
        for each in prompts[: MAX_CHOICES + 1]:
            if isinstance(each, str) and each:
                result.append(encode(each, add_eos=False, parse_special=True))
            elif isinstance(each, list) and each and all(_is_id(x, n_vocab) for x in each):
                result.append(each)
            else:
                raise RequestError(
                    f"prompt: expected a text, token ids from 0 to {n_vocab - 1}, or a list of "
                    "those, none empty",
                    param="prompt",
                )
        if len(result) > MAX_CHOICES:
            raise RequestError(f"prompt: expected at most {MAX_CHOICES} prompts", param="prompt")
        return result

    def _wish(self, ids: Sequence[int]) -> Wish:
        values, limit = self._values, 2**31
        most = in_range(values, "max_tokens", 0 if not self._is_chat else 1, limit, None)
        if self._is_chat:
            most = in_range(values, "max_completion_tokens", 1, limit, most)
            wants = taken(values, "logprobs", bool, False)
            n_top = in_range(values, "top_logprobs", 0, MAX_LOGPROBS, 0)
            logprobs = n_top if wants else None
        else:
            logprobs = in_range(values, "logprobs", 0, MAX_LOGPROBS, None)
            most = 16 if most is None else most
        return self._service.wish(
            ids,
            values,
            max_tokens=most,
            stops=texts(values, "stop"),
            sampling=_response_format(values),
            logprobs=logprobs,
            kind=self._kind,
            forced=self._forced,
            thinks=self._thinks,
            think=self._think,
        )

    # --- as a whole -------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """The response to a request that does not stream."""
        async with Answers(self._service, self._wishes, self._readers) as answers:
            choices = await answers.whole()
        ends = [told.end for told in choices if told.end is not None]
        body = self._head("chat.completion" if self._is_chat else "text_completion")
        body["choices"] = [self._choice(told) for told in choices]
        body["usage"] = usage(ends)
        body["sparsekv"] = about(ends[-1], self._service, self._wishes[-1])
        return body

    def _choice(self, told: Told) -> dict[str, Any]:
        assert told.end is not None
        calls = [part for part in told.parts if isinstance(part, ToolCall)]
        text = "".join(part.text for part in told.parts if isinstance(part, Text))
        thought = "".join(part.text for part in told.parts if isinstance(part, Thought))
        choice: dict[str, Any] = {"index": told.choice}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thought:
                message["reasoning_content"] = thought
            if calls:
                message["content"] = text.strip() or None
                message["tool_calls"] = [_tool_call(call) for call in calls]
            choice["message"] = message
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(told, self._wishes[told.choice])
        choice["finish_reason"] = finish_reason(told.end, bool(calls))
        return choice

    # --- as a stream ------------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[str]:
        """The events of a response that streams."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = self._head(kind)
        async with Answers(self._service, self._wishes, self._readers) as answers:
            if self._is_chat:
                for i in range(len(self._wishes)):
                    yield event({**head, "choices": [_delta(i, {"role": "assistant"})]})
            n_calls, ends = [0] * len(self._wishes), []
            async for told in answers.parts():
                if isinstance(told, Ping):
                    yield f": {told.why or 'ping'}\n\n"
                elif isinstance(told, PromptProgress):
                    yield self._progress(head, told)
                else:
                    for choice in self._chunks(told, n_calls):
                        yield event({**head, "choices": [choice]})
                    if told.rows is not None and self._tells_rows:
                        yield event({"rows": told.rows, "index": told.choice}, "sparsekv.rows")
                    if told.end is not None:
                        ends.append(told.end)
            if self._tells_usage:
                extra = about(ends[-1], self._service, self._wishes[-1])
                yield event({**head, "choices": [], "usage": usage(ends), "sparsekv": extra})
            yield DONE

    def _chunks(self, told: Told, n_calls: list[int]) -> list[dict[str, Any]]:
        chunks, entries = [], self._logprobs(told, self._wishes[told.choice])
        parts: list[Part] = told.parts or ([Text("")] if told.logprobs else [])
        for part in parts:
            if not self._is_chat:
                text = part.text if isinstance(part, Text | Thought) else ""
                chunks.append({"index": told.choice, "text": text, "finish_reason": None})
            elif isinstance(part, ToolCall):
                call = {"index": n_calls[told.choice], **_tool_call(part)}
                n_calls[told.choice] += 1
                chunks.append(_delta(told.choice, {"tool_calls": [call]}))
            else:
                key = "reasoning_content" if isinstance(part, Thought) else "content"
                chunks.append(_delta(told.choice, {key: part.text}))
        if chunks:
            chunks[0]["logprobs"] = entries
        if told.end is not None:
            reason = finish_reason(told.end, n_calls[told.choice] > 0)
            last = _delta(told.choice, {}) if self._is_chat else {"index": told.choice, "text": ""}
            chunks.append({**last, "finish_reason": reason})
        return chunks

    def _progress(self, head: Mapping[str, Any], told: PromptProgress) -> str:
        """Of the prefill: an event for clients that asked for it, a comment for the others."""
        if not self._tells_progress:
            return f": prefill {told.done} of {told.total}\n\n"
        progress = {"total": told.total, "processed": told.done, "cache": told.cached}
        return event({**head, "choices": [], "prompt_progress": progress})

    # --- both -------------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        name = self._service.name
        return {"id": self._id, "object": kind, "created": self._created, "model": name}

    def _logprobs(self, told: Told, wish: Wish) -> dict[str, Any] | None:
        if wish.logprobs is None:
            return None
        if self._is_chat:
            entries = [
                {**_logprob(each), "top_logprobs": [_logprob(other) for other in each["top"]]}
                for each in told.logprobs
            ]
            return {"content": entries, "refusal": None}
        tops = [
            {other["token"]: other["logprob"] for other in each["top"]} for each in told.logprobs
        ]
        return {
            "tokens": [each["token"] for each in told.logprobs],
            "token_logprobs": [each["logprob"] for each in told.logprobs],
            "top_logprobs": tops,
            "text_offset": [],
        }


def models(service: Service, created: int) -> dict[str, Any]:
    """The one model that there is."""
    model = {"id": service.name, "object": "model", "created": created, "owned_by": "local"}
    return {"object": "list", "data": [{**model, "context_length": service.session.n_ctx}]}


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(value: Mapping[str, Any], name: str = "") -> str:
    """A server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"


def usage(ends: Sequence[Finished]) -> dict[str, Any]:
    """The tokens of a request; a prompt that was answered n times counts once."""
    n_prompt, n_answer = ends[0].n_prompt, sum(end.n_generated for end in ends)
    cached = min(end.n_cached for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish_reason(end: Finished, has_called: bool) -> str:
    """In OpenAI's words."""
    if end.stop_reason == STOP_LENGTH:
        return "length"
    return "tool_calls" if has_called else "stop"


def _delta(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_call_id(), "type": "function", "function": function}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    text = entry["token"]
    return {"token": text, "logprob": entry["logprob"], "bytes": list(text.encode())}


def _is_id(value: Any, n_vocab: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < n_vocab


def _response_format(values: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar that response_format asks for, by our names."""
    wanted = taken(values, "response_format", dict, {"type": "text"})
    kind = wanted.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema":
        schema = taken(wanted, "json_schema", dict, {}).get("schema")
        if isinstance(schema, dict):
            return {"json_schema": schema}
    raise RequestError(
        "response_format: expected the type text, json_object, or json_schema with "
        "json_schema.schema",
        param="response_format",
    )


def _tools(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions that may be called; none with tool_choice none."""
    tools = taken(values, "tools", list, [])
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                "tools: expected objects of type function, each with a function's name",
                param="tools",
            )
    named = ({**tool, "function": {"description": "", **tool["function"]}} for tool in tools)
    return [] if values.get("tool_choice") == "none" else [*named]  # templates ask for it


def _forced(service: Service, values: Mapping[str, Any], tools: Sequence[Any]) -> ForcedCall | None:
    """The call that tool_choice asks for, if it does."""
    choice = values.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise RequestError(
            "tool_choice: expected auto, none, required, or an object with a function's name",
            param="tool_choice",
        )
    own = [tool["function"] for tool in tools]
    schemas = {each["name"]: taken(each, "parameters", dict, ANY_OBJECT) for each in own}
    return service.forced_call(name, schemas)


def _messages(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as templates take it: texts, and arguments of calls as objects."""
    messages = taken(values, "messages", list, [])
    if not messages:
        raise RequestError("messages: expected a list that is not empty", param="messages")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, message: Any) -> dict[str, Any]:
    where = f"messages[{i}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(
            f"{where}: expected an object whose role is one of {', '.join(ROLES)}", param=where
        )
    role = "system" if message["role"] == "developer" else message["role"]
    result: dict[str, Any] = {"role": role, "content": content_text(where, message.get("content"))}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls: expected a list", param=where)
        result["tool_calls"] = [
            _call(f"{where}.tool_calls[{k}]", call) for k, call in enumerate(calls)
        ]
    return result


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        at, written = f"{where}.function.arguments", function.get("arguments")
        try:
            given = read_json(written or "{}") if isinstance(written, str) else written
        except ValueError as error:
            raise RequestError(f"{at}: expected a JSON object: {error}", param=at) from None
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise RequestError(f"{at}: expected a JSON object, found {shown(given)}", param=at)
        return {
            "id": str(call.get("id") or ""),
            "type": "function",
            "function": {"name": function["name"], "arguments": given},
        }
    raise RequestError(f"{where}: expected a function with name and arguments", param=where)
