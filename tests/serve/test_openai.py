"""OpenAI's protocol, by its own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from sparsekv_cli.serve.jobs import ContextFullError

ASKED = [{"role": "user", "content": "hello there"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 1\}\}\n</tool_call>'
THOUGHT = "<think>well</think>yes"


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "any", "messages": ASKED, "max_tokens": 8, **options}
    return client.chat.completions.create(**given)


def test_a_stream_has_the_text_of_the_whole(client: Any) -> None:
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    usage = chunks[-1].usage
    assert (usage.completion_tokens, usage.prompt_tokens) == (8, whole.usage.prompt_tokens)
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens  # the same prompt
    assert usage.total_tokens == 8 + usage.prompt_tokens


def test_choices_seeds_and_log_probabilities(client: Any) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.5, "logprobs": True}
    first, again = (chat(client, top_logprobs=2, **options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and len(set(texts)) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    entries = first.choices[0].logprobs.content
    assert len(entries) == 8 and all(len(each.top_logprobs) == 2 for each in entries)
    assert all(each.logprob <= each.top_logprobs[0].logprob <= 0 for each in entries)
    streamed = list(chat(client, stream=True, logprobs=True))
    told = [c.choices[0].logprobs for c in streamed if c.choices and c.choices[0].logprobs]
    assert sum(len(each.content) for each in told) == 8


def test_bias_stops_and_formats(client: Any, server: Any) -> None:
    letter = server.service.tokenizer.encode("q", add_bos=False, add_eos=False)[0]
    biased = chat(client, logit_bias={str(letter): 100}).choices[0].message.content
    assert biased == "q" * 8
    stopped = chat(client, logit_bias={str(letter): 100}, stop=["qqq"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("", "stop")
    schema = {"name": "x", "schema": {"enum": [1, 2]}}
    one = chat(client, response_format={"type": "json_schema", "json_schema": schema})
    assert one.choices[0].message.content in ("1", "2") and one.choices[0].finish_reason == "stop"
    yes = chat(client, extra_body={"regex": "(yes|no)!"}, n=2)
    assert {choice.message.content for choice in yes.choices} <= {"yes!", "no!"}


def test_calls_of_tools_and_thinking(client: Any) -> None:
    calls = {"regex": CALL, "think_budget": 0}
    options: dict[str, Any] = {"tools": [TOOL], "extra_body": calls, "max_tokens": 64}
    choice = chat(client, **options).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    deltas = [c.choices[0].delta for c in chat(client, stream=True, **options)]
    (streamed,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert streamed.function.name == "add" and not any(d.content for d in deltas)
    answered = [*ASKED, choice.message.model_dump(exclude_none=True)]
    answered.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    assert chat(client, messages=answered, tools=[TOOL]).choices[0].message.content
    thought = {"regex": THOUGHT, "think_budget": 0}
    message = chat(client, extra_body=thought, max_tokens=40).choices[0].message
    assert (message.reasoning_content, message.content) == ("well", "yes")
    off: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = [chat(client, extra_body=each).usage.prompt_tokens for each in ({}, off)]
    assert plain[1] > plain[0]


def test_calls_that_are_asked_for(client: Any, openai: Any) -> None:
    one = {"properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}
    one |= {"additionalProperties": False, "$defs": {"n": {"enum": [7, 8]}}}
    named = {"type": "function", "function": {"name": "pick", "parameters": one}}
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        tools = [named] if choice == "required" else [TOOL, named]
        options: dict[str, Any] = {"tools": tools, "tool_choice": choice, "max_tokens": 64}
        told = chat(client, n=2, temperature=1, seed=3, **options)
        for each in told.choices:
            (call,) = each.message.tool_calls
            assert call.function.name == "pick" and each.finish_reason == "tool_calls"
            assert json.loads(call.function.arguments) in ({"n": 7}, {"n": 8})
    deltas = [c.choices[0].delta for c in chat(client, stream=True, **options)]
    assert sum(len(delta.tool_calls or ()) for delta in deltas) == 1
    bad = {**named, "function": {**named["function"], "parameters": {"type": "no"}}}
    with pytest.raises(openai.BadRequestError, match="tool_choice: "):
        chat(client, tools=[bad], tool_choice="required")


def test_a_method_of_its_own_and_its_rows(client: Any, server: Any) -> None:
    asked = [{"role": "user", "content": "many words " * 30}]
    ours: dict[str, Any] = {"method": "topk", "budget": 16, "sparse_from": 0}
    ours["method_options"] = {"dense_layers": []}
    answer = chat(client, messages=asked, extra_body=ours)
    ledger = answer.sparsekv["ledger"]
    assert answer.sparsekv["method"]["options"]["budget"] == "16"
    assert 0 < ledger["rows_attended"] < ledger["rows_total"] / 5
    body = {"messages": asked, "stream": True, "max_tokens": 4, "sparsekv_rows": 10, **ours}
    url = f"{server.url}/v1/chat/completions"
    text = httpx.post(url, json=body, timeout=240).text
    events = [json.loads(e.split("data: ")[1]) for e in text.split("\n\n") if "sparsekv.rows" in e]
    rows = np.array(events[0]["rows"])
    assert rows.shape == (4, 10) and 0 < rows.mean() < 50 and len(events) == 3
    ends = {"regex": "yes!*", "logit_bias": {str(server.service.tokenizer.eos_id): 100}}
    body |= {"logprobs": True, "max_tokens": 20, "think_budget": 0, **ends}
    told = [httpx.post(url, json=body | {"sparsekv_rows": n}, timeout=240).text for n in (0, 10)]
    assert told[0].count("top_logprobs") == told[1].count("top_logprobs") > 0


def test_completions_and_models(client: Any, server: Any) -> None:
    given: dict[str, Any] = {"model": "any", "max_tokens": 4}
    both = client.completions.create(prompt=["hello", "one two"], **given)
    alone = client.completions.create(prompt="one two", logprobs=1, **given)
    assert both.choices[1].text == alone.choices[0].text and both.choices[0].text
    assert len(alone.choices[0].logprobs.tokens) == 4
    chunks = client.completions.create(prompt="one two", stream=True, **given)
    assert "".join(c.choices[0].text for c in chunks) == alone.choices[0].text
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == server.service.name


BAD = [
    ({"method": "lpfs"}, "unknown method 'lpfs' (did you mean lfps?): choose from full, topk"),
    ({"method": "quest", "method_options": {"pagee": 1}}, "its options: "),
    ({"budget": "0%", "method": "topk"}, "budget = '0%': must be from 1 to "),
    ({"temperature": "warm"}, 'temperature = "warm": expected a number'),
    ({"n": 0}, "n = 0: expected 1 or more"),
    ({"messages": []}, "messages is []: expected one that is not empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type text"),
    ({"messages": [{"role": "user", "text": "a"}]}, "messages[0].content: is missing"),
    ({"regex": "("}, "regex"),
    ({"tool_choice": "required"}, "has no tools"),
    ({"tool_choice": "any"}, "expected 'auto', 'none' or 'required' or an object"),
    ({"tool_choice": {"a": 1}}, "'required' or an object with function"),
    ({"tool_choice": {"function": {"name": "f"}}, "tools": [TOOL]}, "no tool 'f'"),
    ({"tool_choice": "required", "tools": [TOOL], "regex": "a"}, "leave out ignore_eos"),
    ({"method": "fasa"}, "or start the server with --prepare fasa"),
    ({"sparsekv_rows": True}, "expected a whole number"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[next(iter(f)) for f, _ in BAD])
def test_what_is_no_request(client: Any, openai: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        chat(client, extra_body=fields)
    assert words in info.value.message and "\n" not in info.value.message


def test_a_prompt_that_is_too_long(client: Any, openai: Any) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"maximum context length is 512 tokens"
    ) as info:
        chat(client, messages=[{"role": "user", "content": "long " * 600}])
    assert info.value.code == "context_length_exceeded" and info.value.param == "messages"
    assert "reduce the length of the messages" in info.value.message
    with pytest.raises(openai.BadRequestError, match="context of this server holds 512") as info:
        client.completions.create(model="any", prompt="long " * 600)
    assert info.value.code == "context_length_exceeded" and info.value.param == "prompt"


def test_a_prompt_and_an_answer_that_are_too_long_for_the_memory() -> None:
    error = ContextFullError(100, 200, 120, "messages", "more memory helps")
    words = "you requested 300 tokens (100 in the messages, 200 in the completion)"
    assert words in str(error) and "maximum context length is 120 tokens" in str(error)
    assert error.anthropic.startswith(
        "input length and `max_tokens` exceed context limit: 100 + 200 > 120"
    )
    assert "200" not in ContextFullError(130, 200, 120, "prompt", "").anthropic
    assert "121 tokens > 120 maximum" in ContextFullError(120, 0, 120, "prompt", "").anthropic
