"""OpenAI's protocol: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer import STOP_LENGTH
from sparsekv_cli.generation.conversation import continues_last
from sparsekv_cli.generation.messages import read_messages
from sparsekv_cli.models.chat.calls import Part, Text, Thought, ToolCall
from sparsekv_cli.models.chat.fitting.call_forms import new_call_id
from sparsekv_cli.serve.answers import Answers, News, Ping, about
from sparsekv_cli.serve.forms.offers import custom_input
from sparsekv_cli.serve.forms.schema import MAX_CHOICES, ChatFields, CompletionFields
from sparsekv_cli.serve.forms.tools import ForcedCall, Functions, functions_of, reader_of
from sparsekv_cli.serve.jobs import Finished, PromptProgress, Request
from sparsekv_cli.serve.requests import RequestError, Service

DONE = "data: [DONE]\n\n"


class Completion:
    """One request, checked; ``stream`` or ``whole`` answers it."""

    def __init__(self, service: Service, fields: ChatFields | CompletionFields) -> None:
        """Raises RequestError for a request that cannot be answered."""
        self._service, self._fields = service, fields
        self._is_chat = is_chat = isinstance(fields, ChatFields)
        self.streams = fields.stream
        self._forced, self._kind, is_single = None, None, False
        self._think: bool | None = None
        self._budget: int | None = None
        self._continues, self._thinks = False, is_chat
        functions: Functions = {}
        self._custom: set[str] = set()  # the names of custom tools
        if isinstance(fields, ChatFields):
            tools = _tools(fields) if service.shows_tools(fields) else []
            self._forced = _forced(service, fields, tools)
            prompts = [self._chat_ids(fields, tools)]
            self._kind = service.format_for(bool(tools) and not fields.forbids_calls)
            is_single, functions = not fields.parallel_tool_calls, functions_of(tools)
            self._custom = {tool.custom.name for tool in fields.tools if tool.custom is not None}
        else:
            prompts = self._prompt_ids(fields.prompt, fields.suffix)
        requests = [self._request(fields, ids) for ids in prompts]
        self._requests = [
            each for request in requests for each in service.choices(request, fields.n)
        ]
        self._readers = [
            reader_of(
                self._kind,
                self._forced,
                functions,
                marks=service.marks,
                is_begun=self._continues,
                is_single=is_single,
            )
            for _ in self._requests
        ]
        self._places = [_Places(service.tokenizer.is_shown) for _ in self._requests]
        self._id = ("chatcmpl-" if is_chat else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())

    def _chat_ids(self, fields: ChatFields, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        given = dict(fields.chat_template_kwargs)
        think = given.pop("enable_thinking", None)
        if not isinstance(think, bool | None):
            raise RequestError(
                "chat_template_kwargs.enable_thinking: expected true or false",
                param="chat_template_kwargs.enable_thinking",
            )
        service = self._service
        effort = service.effort_of(fields.effort)
        if fields.effort == "none" and effort is None:
            think = False
        wanted, self._budget = service.thinking_of(False if self._forced is not None else think)
        variables = service.variables_of(given, effort)
        messages = read_messages(service.volatile.of_messages(fields.messages))
        adds_prompt = fields.add_generation_prompt
        try:
            self._continues = continues_last(messages, fields.continue_final_message, adds_prompt)
        except SparseKVError as error:
            raise RequestError(str(error), param="continue_final_message") from None
        self._think = think
        self._thinks = not self._continues and adds_prompt is not False
        return service.encode_chat(
            messages,
            tools,
            wanted,
            variables,
            continues=self._continues,
            add_generation_prompt=adds_prompt is not False,
        )

    def _prompt_ids(self, prompt: str | list[Any], suffix: str) -> list[list[int]]:
        """Returns the prompts of a completion: a text, ids, or a list of either.

        suffix: the text after the answer; then the prompts are texts.
        """
        is_many = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
        prompts = prompt if is_many and isinstance(prompt, list) else [prompt]
        n_vocab, encode = self._service.model.hparams.n_vocab, self._service.tokenizer.encode
        result = []
        for each in prompts[: MAX_CHOICES + 1]:
            if isinstance(each, str) and suffix:
                result.append(self._service.gap_ids(each, suffix, param="suffix"))
            elif isinstance(each, str) and each:
                result.append(encode(each, add_eos=False, parse_special=True))
            elif isinstance(each, list) and each and not suffix and _are_ids(each, n_vocab):
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

    def _request(self, fields: ChatFields | CompletionFields, ids: Sequence[int]) -> Request:
        schema, most, logprobs = None, fields.max_tokens, fields.logprobs
        if isinstance(fields, ChatFields):
            schema = fields.response_format.schema_of_answer
            most = most if fields.max_completion_tokens is None else fields.max_completion_tokens
            logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        return self._service.request(
            ids,
            fields,
            max_tokens=most,
            stops=fields.stop,
            schema=schema,
            logprobs=logprobs,
            kind=self._kind,
            forced=self._forced,
            thinks=self._thinks,
            think=self._think,
            think_budget=self._budget,
        )

    # --- as a whole -------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        """Returns the response to a request that does not stream."""
        async with self.answers() as answers:
            choices = await answers.whole()
        ends = {news.choice: news.end for news in choices if news.end is not None}
        body = self._head("chat.completion" if self._is_chat else "text_completion")
        body["choices"] = [self._choice(news) for news in choices]
        body["usage"] = usage(ends, self._fields.n)
        body["sparsekv"] = self.about(ends)
        return body

    def _choice(self, news: News) -> dict[str, Any]:
        assert news.end is not None
        calls = [part for part in news.parts if isinstance(part, ToolCall)]
        text = "".join(part.text for part in news.parts if isinstance(part, Text))
        thought = "".join(part.text for part in news.parts if isinstance(part, Thought))
        choice: dict[str, Any] = {"index": news.choice}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thought:
                message["reasoning_content"] = thought
            if calls:
                message["content"] = text.strip() or None
                message["tool_calls"] = [self._tool_call(call) for call in calls]
            choice["message"] = message
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(news)
        choice["finish_reason"] = finish_reason(news.end, bool(calls))
        return choice

    # --- as a stream ------------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[str]:
        """Yields the events of a response that streams."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        head = self._head(kind)
        async with self.answers() as answers:
            if self._is_chat:
                for i in range(len(self._requests)):
                    yield event({**head, "choices": [_delta(i, {"role": "assistant"})]})
            n_calls, ends = [0] * len(self._requests), {}
            async for news in answers.parts():
                if isinstance(news, PromptProgress) and self._fields.return_progress:
                    yield _progress(head, news)
                elif not isinstance(news, News):
                    yield comment(news)
                else:
                    for choice in self._chunks(news, n_calls):
                        yield event({**head, "choices": [choice]})
                    if news.rows is not None:
                        yield rows_event(news)
                    if news.end is not None:
                        ends[news.choice] = news.end
            options = self._fields.stream_options
            if options is not None and options.include_usage:
                told_of = {"usage": usage(ends, self._fields.n), "sparsekv": self.about(ends)}
                yield event({**head, "choices": [], **told_of})
            yield DONE

    def _chunks(self, news: News, n_calls: list[int]) -> list[dict[str, Any]]:
        chunks, entries = [], self._logprobs(news)
        parts: list[Part] = news.parts or ([Text("")] if news.logprobs else [])
        for part in parts:
            if not self._is_chat:
                text = part.text if isinstance(part, Text | Thought) else ""
                chunks.append({"index": news.choice, "text": text, "finish_reason": None})
            elif isinstance(part, ToolCall):
                call = {"index": n_calls[news.choice], **self._tool_call(part)}
                n_calls[news.choice] += 1
                chunks.append(_delta(news.choice, {"tool_calls": [call]}))
            else:
                key = "reasoning_content" if isinstance(part, Thought) else "content"
                chunks.append(_delta(news.choice, {key: part.text}))
        if chunks:
            chunks[0]["logprobs"] = entries
        if news.end is not None:
            reason = finish_reason(news.end, n_calls[news.choice] > 0)
            last = _delta(news.choice, {}) if self._is_chat else {"index": news.choice, "text": ""}
            chunks.append({**last, "finish_reason": reason})
        return chunks

    # --- both -------------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        name = self._service.name
        return {"id": self._id, "object": kind, "created": self._created, "model": name}

    def answers(self) -> Answers:
        """Returns the answers as they grow, one a choice."""
        return Answers(self._service, self._requests, self._readers)

    def failure(self, error: Mapping[str, Any]) -> str:
        """Returns the last event of a stream that fails."""
        return failure(error)

    def about(self, ends: Mapping[int, Finished]) -> dict[str, Any]:
        """Returns fields about the computation. ends: of the choices."""
        last = max(ends)
        return about(ends[last], self._service, self._requests[last])

    def _tool_call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._custom:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": new_call_id(), "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": new_call_id(), "type": "function", "function": function}

    def _logprobs(self, news: News) -> dict[str, Any] | None:
        if self._requests[news.choice].logprobs is None:
            return None
        if self._is_chat:
            entries = [
                {**_logprob(each), "top_logprobs": [_logprob(other) for other in each["top"]]}
                for each in news.logprobs
            ]
            return {"content": entries, "refusal": None}
        return {
            "tokens": [_token(each) for each in news.logprobs],
            "token_logprobs": [each["logprob"] for each in news.logprobs],
            "top_logprobs": [_by_token(each["top"]) for each in news.logprobs],
            "text_offset": [self._places[news.choice].next(each) for each in news.logprobs],
        }


class _Places:
    """The offsets of a completion's tokens in its text, in characters."""

    def __init__(self, is_shown: Callable[[int], bool]) -> None:
        self._is_shown, self._n = is_shown, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def next(self, entry: Mapping[str, Any]) -> int:
        """Returns the place of the next token, or of the character that it continues."""
        place = self._n
        if self._is_shown(entry["id"]):
            self._n += len(self._decoder.decode(bytes(entry["bytes"])))
        return place


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Returns an error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def event(value: Mapping[str, Any], name: str = "") -> str:
    """Returns a server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"


def failure(error: Mapping[str, Any]) -> str:
    """Returns the last event of a stream that fails."""
    return event(error, "error")


def comment(news: Ping | PromptProgress) -> str:
    """Returns a comment of a stream, which says what the answer waits for."""
    if isinstance(news, PromptProgress):
        return f": prefill {news.done} of {news.total}\n\n"
    return f": {news.why or 'ping'}\n\n"


def rows_event(news: News) -> str:
    """Returns the event that says which rows a step attended to."""
    rows = {"rows": news.rows, "index": news.choice}
    return event({**rows, "tokens": news.n_tokens, "accepted": news.n_accepted}, "sparsekv.rows")


def _progress(head: Mapping[str, Any], news: PromptProgress) -> str:
    progress = {"total": news.total, "processed": news.done, "cache": news.cached}
    return event({**head, "choices": [], "prompt_progress": progress})


def usage(ends: Mapping[int, Finished], n: int) -> dict[str, Any]:
    """Returns the tokens of a request. ends: by choice. A prompt has n choices and counts once."""
    prompts = [[ends[i] for i in range(first, first + n)] for first in range(0, len(ends), n)]
    n_prompt = sum(same[0].n_prompt for same in prompts)
    n_answer = sum(end.n_generated for end in ends.values())
    cached = sum(min(end.n_cached for end in same) for same in prompts)
    moved = Counter[str]()
    for same in prompts:
        moved.update(same[0].moved.usage())
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_answer,
        "total_tokens": n_prompt + n_answer,
        "prompt_tokens_details": {"cached_tokens": cached, **moved},
    }


def finish_reason(end: Finished, has_called: bool) -> str:
    """Returns why the answer ended, in OpenAI's words."""
    if end.stop_reason == STOP_LENGTH:
        return "length"
    return "tool_calls" if has_called else "stop"


def _delta(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("token", "logprob", "bytes")}


def _token(entry: Mapping[str, Any]) -> str:
    """Returns a token's text, or the bytes of a part of a character, as OpenAI writes them."""
    data = bytes(entry["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _by_token(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns log probabilities by text. The most likely token of a text counts."""
    found: dict[str, float] = {}
    for entry in entries:
        found.setdefault(_token(entry), entry["logprob"])
    return found


def _are_ids(values: Sequence[Any], n_vocab: int) -> bool:
    return all(type(value) is int and 0 <= value < n_vocab for value in values)


def _tools(fields: ChatFields) -> list[dict[str, Any]]:
    """Returns the functions as templates take them."""
    functions = [tool.as_function.model_dump(exclude_unset=True) for tool in fields.tools]
    return [  # templates ask for type and description
        {
            "type": "function",
            "function": {"description": "", **function},
            **(tool.model_extra or {}),
        }
        for tool, function in zip(fields.tools, functions, strict=True)
    ]


def _forced(
    service: Service, fields: ChatFields, tools: Sequence[Mapping[str, Any]]
) -> ForcedCall | None:
    """Returns the call that tool_choice requires, if any."""
    choice = fields.tool_choice
    if choice in ("auto", "none"):
        return None
    name = None if isinstance(choice, str) else choice.function.name
    return service.forced_call(name, functions_of(tools))
