"""OpenAI's Responses API, by its own client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from waiting import wait_for

from sparsekv_cli.serve import responses
from sparsekv_cli.serve.forms.items import read_items
from sparsekv_cli.serve.requests import RequestError

RESPOND = "/v1/responses"
ONE = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"]}
TOOL: dict[str, Any] = {"type": "function", "name": "pick", "parameters": ONE, "strict": True}
CALL = r'<tool_call>\n\{"name": "pick", "arguments": \{"n": 7\}\}\n</tool_call>'
THOUGHT = {"regex": "<think>well</think>yes", "think_budget": 0}


def create(client: Any, **options: Any) -> Any:
    given = {"model": "any", "input": "hello there", "max_output_tokens": 8, **options}
    return client.responses.create(**given)


def test_a_response_is_the_answer_of_a_chat(client: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    asked = {"instructions": "Be brief.", "temperature": 0}
    chat = client.chat.completions.create(model="any", messages=messages, max_tokens=8)
    parts = [{"type": "input_text", "text": text} for text in ("hel", "lo")]
    for given in ("hello", messages[1:], [{"role": "user", "content": parts}]):
        answer = create(client, input=given, **asked)
        assert answer.output_text == chat.choices[0].message.content and answer.output_text
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert (
        answer.usage.output_tokens == 8
        and answer.usage.total_tokens == 8 + chat.usage.prompt_tokens
    )
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete" and answer.sparsekv["method"]["name"] == "full"
    assert (answer.temperature, answer.instructions, answer.store) == (0, "Be brief.", True)


def test_a_stream_has_its_events_in_order(client: Any, server: Any) -> None:
    options = {"extra_body": THOUGHT, "max_output_tokens": 40}
    whole = create(client, **options)
    events = list(create(client, stream=True, **options))
    assert [each.sequence_number for each in events] == list(range(len(events)))
    kinds = [each.type.removeprefix("response.") for each in events]
    order = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    item = ["output_item.added", "content_part.added", *("x.delta", "x.done"), "content_part.done"]
    item = [*item, "output_item.done"]
    items = [kind.replace("x.", f"{x}_text.") for x in ("reasoning", "output") for kind in item]
    assert order == ["created", "in_progress", *items, "completed"]
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(deltas) == last.output_text == whole.output_text == "yes"
    assert [each.type for each in last.output] == ["reasoning", "message"]
    assert last.output[0].content[0].text == "well" and last.usage.output_tokens > 1
    assert 0 < last.usage.output_tokens_details.reasoning_tokens < last.usage.output_tokens
    rows = {"input": "hello there", "stream": True, "max_output_tokens": 4, "sparsekv_rows": 5}
    text = httpx.post(server.url + RESPOND, json=rows, timeout=240).text
    assert text.count("event: sparsekv.rows\n") == 3
    with client.responses.stream(model="any", input="hello there", **options) as stream:
        assert stream.get_final_response().output_text == "yes"  # the helper checks the order


def test_a_loop_of_tools(client: Any) -> None:
    asked = [{"role": "user", "content": "pick one"}]
    called = create(client, input=asked, tools=[TOOL], tool_choice="required", max_output_tokens=64)
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "pick") and called.status == "completed"
    assert json.loads(call.arguments) in ({"n": 7}, {"n": 8})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "seven"}
    stateless = [*asked, *[each.model_dump() for each in called.output], result]
    answers = [
        create(client, input=stateless, tools=[TOOL], store=False),
        create(client, input=[result], tools=[TOOL], previous_response_id=called.id),
    ]
    assert answers[0].output_text == answers[1].output_text and answers[0].output_text
    assert answers[0].usage.input_tokens == answers[1].usage.input_tokens
    free = {"regex": CALL, "think_budget": 0}
    named = {"type": "function", "name": "pick"}
    for options in ({"extra_body": free}, {"tool_choice": named}):
        events = list(create(client, stream=True, tools=[TOOL], max_output_tokens=64, **options))
        done = [each for each in events if each.type == "response.function_call_arguments.done"]
        assert [json.loads(each.arguments)["n"] in (7, 8) for each in done] == [True]
        assert [each.type for each in events[-1].response.output] == ["function_call"]


def test_previous_responses(client: Any, openai: Any, server: Any) -> None:
    first = create(client, instructions="Be brief.", extra_body=THOUGHT, max_output_tokens=40)
    second = create(client, input="more", previous_response_id=first.id)
    history = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "yes", "reasoning_content": "well"},
        {"role": "user", "content": "more"},
    ]
    chat = client.chat.completions.create(model="any", messages=history, max_tokens=8)
    assert second.output_text == chat.choices[0].message.content
    assert second.previous_response_id == first.id and second.instructions is None
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    unkept = create(client, store=False)
    for name in (second.id, unkept.id, "resp_no", "x" * 5000):
        with pytest.raises(openai.BadRequestError, match="is kept") as info:
            create(client, previous_response_id=name)
        assert info.value.code == "previous_response_not_found" and len(info.value.message) < 400
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask(unkept.id)
    with pytest.raises(openai.BadRequestError, match="starting_after: no such field"):
        client.responses.retrieve(first.id, starting_after=3)


def test_references_to_items(client: Any) -> None:
    """Vercel's AI SDK sends the ids of a response's items instead of the items."""
    free = {"regex": CALL, "think_budget": 0}
    first = create(client, tools=[TOOL], extra_body=free, max_output_tokens=64)
    (call,) = first.output
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    asked = {"role": "user", "content": "hello there"}
    reference = {"type": "item_reference", "id": call.id}
    whole, short = (
        create(client, tools=[TOOL], input=[asked, each, told])
        for each in (call.model_dump(), reference)
    )
    assert short.usage.input_tokens == whole.usage.input_tokens
    assert short.output_text == whole.output_text
    more = [reference, {"type": "item_reference", "id": short.output[0].id}, asked]
    assert create(client, tools=[TOOL], input=[asked, *more]).usage.input_tokens
    client.responses.delete(first.id)
    lost = create(client, tools=[TOOL], input=[asked, reference])
    assert lost.usage.input_tokens != whole.usage.input_tokens  # a line in its place


def test_formats_and_hidden_thoughts(client: Any) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"enum": [[1], [2]]}, "strict": True}
    told = create(client, text={"format": form}, max_output_tokens=90).output_text
    assert json.loads(told) in ([1], [2])  # with up to 22 blanks around the number
    hidden = {"include": ["reasoning.encrypted_content"], "extra_body": THOUGHT}
    thought = create(client, max_output_tokens=40, **hidden).output[0].model_dump()
    told = [{"role": "user", "content": "a"}, thought, {"role": "assistant", "content": "b"}]
    lengths = []
    for less in ({}, {"content": None}, {"content": None, "encrypted_content": None}):
        given = [told[0], {**thought, **less}, *told[2:], told[0]]
        lengths.append(read_items(given)[1].get("reasoning_content"))
    assert lengths == ["well", "well", ""]


BAD = [
    ({"input": 3}, "input = 3: expected a text or a list", "input"),
    ({"input": [3]}, "input[0]: expected an item of type message, ", "input[0]"),
    ({"input": [{"role": "bot"}]}, "input[0].role: expected one of user", "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content: is missing", "input[0].content"),
    ({"input": [{"type": "web_serch"}]}, 'found "web_serch"', "input[0]"),
    ({"input": [{"type": [1]}]}, "found [1]", "input[0]"),
    ({"background": True}, "background = true: expected false", "background"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "pictures, sounds and videos are not read",
        "input[0].content[0]",
    ),
    (
        {"input": [{"type": "function_call_output", "output": "1"}]},
        "call_id: expected a text that is not empty",
        "input[0].call_id",
    ),
    (
        {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "[1]"}]},
        "arguments: expected a JSON object",
        "input[0].arguments",
    ),
    (
        {"input": [{"type": "reasoning", "encrypted_content": "gAAAA_"}]},
        "expected this server's own",
        "input[0].encrypted_content",
    ),
    ({"tools": [{"type": "x"}]}, 'tools[0].type = "x"', "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "a tool of type custom needs a name", "tools"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice = ", "tool_choice"),
    ({"tool_choice": "required"}, "has no tools", "tool_choice"),
    ({"conversation": "c"}, "conversation: no such field", "conversation"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]", "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs = 2: expected at most 0", "top_logprobs"),
    ({"text": {"format": {"type": "json_schema"}}}, "needs a schema", "text.format"),
    (
        {"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
        "text.format: ",
        "text.format",
    ),
    (
        {"text": {"format": {"type": "json_object"}}, "regex": "a"},
        "text.format and regex exclude each other",
        "text.format",
    ),
    ({"input": "long " * 600}, "context of this server holds 512", "input"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
]


@pytest.mark.parametrize(("fields", "words", "param"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_what_cannot_be_honoured_is_named(
    server: Any, fields: dict[str, Any], words: str, param: str | None
) -> None:
    answer = httpx.post(server.url + RESPOND, json={"input": "hello", **fields}, timeout=240)
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert "\n" not in error["message"] and len(error["message"]) < 400
    assert param is None or error["param"] == param


def test_a_full_context_in_a_stream(client: Any) -> None:
    """Codex shortens a conversation after this event, and not after a status."""
    events = list(create(client, input="long " * 600, stream=True))
    assert [each.type for each in events] == ["response.created", "response.failed"]
    assert [each.sequence_number for each in events] == [0, 1]
    error = events[-1].response.error
    assert error.code == "context_length_exceeded" and "maximum context length" in error.message


def test_the_oldest_responses_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_KEPT", 10_000)
    monkeypatch.setattr(responses, "MAX_ONE", 5_000)
    kept = responses.Kept()
    for i in range(50):
        output = [{"id": f"item{i}"}, {"id": f"last{i}"}]
        kept.add([{"content": "x" * 900}], {"id": str(i), "output": output})
    names = ("item30", "last49", "item49", "no", "")
    references = [{"type": "item_reference", "id": name} for name in names]
    found = kept.resolved([*references, {"type": "item_reference"}, 3])
    assert found[0] == references[0] and found[1:3] == [{"id": "last49"}, {"id": "item49"}]
    assert found[3:] == [*references[3:], {"type": "item_reference"}, 3]
    assert kept.find("49")[0] == [{"content": "x" * 900}] and kept.find("45")
    with pytest.raises(RequestError):
        kept.find("30")
    kept.remove("49")
    assert kept.resolved(references) == references
    kept.add([{"content": "x" * 6_000}], {"id": "large"})
    with pytest.raises(RequestError):
        kept.find("large")
    kept.add([], {"id": "small"})
    assert kept.find("small")[1] == {"id": "small"}


def test_two_streams_and_a_client_that_goes(
    client: Any, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = create(client)
    ask = {"input": "on", "previous_response_id": first.id, "stream": True}
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(lambda: list(create(client, **ask))) for _ in range(2)]
        texts = [each.result()[-1].response.output_text for each in both]
    assert texts[0] == texts[1] and texts[0]
    scheduler = server.service.scheduler
    n_aborted = scheduler.stats.n_aborted
    monkeypatch.setattr(scheduler._running, "step", lambda: time.sleep(0.02))
    events = create(client, stream=True, max_output_tokens=64)
    name = next(iter(events)).response.id
    events.close()
    wait_for(lambda: scheduler.stats.n_aborted > n_aborted)
    assert httpx.get(f"{server.url}{RESPOND}/{name}").status_code == 404


def test_a_stream_that_fails_says_so(serve: Callable[..., Any], openai: Any) -> None:
    server = serve(seconds=20.0)
    scheduler = server.service.scheduler
    scheduler._running.step, step = lambda: time.sleep(0.02), scheduler._running.step
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        events = iter(create(client, stream=True))
        assert next(events).type == "response.created"
        threading.Thread(target=scheduler.end_all).start()
        last = list(events)[-1]
    scheduler._running.step = step
    assert last.type == "response.failed" and last.response.status == "failed"
    assert last.response.error.message
