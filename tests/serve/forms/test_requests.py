"""Fields of requests: a bad value is refused by its name, and no field is without effect."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sparsekv_cli.generation.fields import FieldError, read_fields
from sparsekv_cli.serve.forms.openapi import PATHS
from sparsekv_cli.serve.forms.schema import ChatFields

CHAT, COMPLETE, MESSAGE, COUNT, RESPOND, TOKENS, TEXT, GAP = (path for path, _, _ in PATHS)
ASKED = [{"role": "user", "content": "hello there"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED},
    COMPLETE: {"prompt": "hello"},
    MESSAGE: {"messages": ASKED, "max_tokens": 4},
    COUNT: {"messages": ASKED},
    RESPOND: {"input": "hello"},
    TOKENS: {"content": "hello"},
    TEXT: {"tokens": [1]},
    GAP: {"input_prefix": "hello"},
}
HUGE = 10**400
ODD = [
    None, True, -1, 0, 1.5, HUGE, -HUGE, 2**64, "", "x", "9" * 5000, [], [1], [None], [[]], [{}],
    {}, {"a": 1}, {"1" * 5000: 1}, {"5": HUGE}, {"type": "x"}, {"type": 1}, {"name": 1}, 1e308,
    1e-320, {"type": "json_schema"}, {"type": "json_object", "schema": 3},
]  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
MANY = 20_000
TWO_CALLS = (CALL * 2).replace("{", r"\{").replace("}", r"\}")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve(tokens=128)


@pytest.fixture(scope="module")
def post(server: Any) -> Any:
    """Posts fields to a path, with those that it needs: the status and the answer."""
    with httpx.Client(base_url=server.url, timeout=240) as client:

        def send(path: str, **fields: Any) -> tuple[int, Any]:
            answer = client.post(path, json={**LEAST[path], **fields})
            return answer.status_code, answer.json()

        yield send


def refused(answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 400, body
    return body["error"]["message"]


def told(answer: tuple[int, Any]) -> Any:
    status, body = answer
    assert status == 200, body
    return body


def test_an_odd_value_is_taken_or_refused_in_a_line() -> None:
    n_refused = 0
    for path, _, model in PATHS:
        for field in model.model_fields:
            for value in ODD:
                try:
                    read_fields(model, {**LEAST[path], field: value})
                except FieldError as error:
                    n_refused += 1
                    assert "\n" not in str(error) and len(str(error)) < 400, error
    assert n_refused > 2000


def test_values_that_are_refused_later_than_by_their_type(post: Any) -> None:
    assert "budget = '99999" in refused(post(CHAT, method="h2o", budget="9" * 20))
    most = {"recent": int("9" * 20)}
    assert "recent = 99999" in refused(post(CHAT, method="topk", method_options=most))
    ours = {"method": "lfps", "sparse_from": 0, "max_tokens": 3}
    told(post(CHAT, method_options={"candidates": 2048}, **ours))  # more than there are rows
    most = {"candidates": 2**31 - 1}
    assert "candidates = 2147483647" in refused(post(CHAT, method_options=most, **ours))
    assert "vocabulary has 512" in refused(post(CHAT, logit_bias={"512": 1}))
    assert "temperature = 1" in refused(post(CHAT, temperature=HUGE))


def test_a_depth_is_that_of_its_method(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service, none = server.service, {"method_options": {}, "budget": None, "sparse_from": None}
    chosen = service.model.attention._replace(sparse_from=7)  # as --method auto may choose it
    monkeypatch.setattr(service, "model", replace(service.model, attention=chosen))
    for method, depth in ((None, 7), ("full", 7), ("quest", service.model.config.sparse_from)):
        assert service.method_of(SimpleNamespace(method=method, **none))[1] == depth


def test_fields_that_nothing_reads_are_refused_by_name(post: Any) -> None:
    assert refused(post(CHAT, tool=[])) == "tool: no such field (did you mean tools?)"
    for fields in ({"echo": True}, {"best_of": 3}):
        assert refused(post(COMPLETE, **fields)).startswith(next(iter(fields)))
    assert refused(post(MESSAGE, max_tokens=None)) == "max_tokens: is missing"
    assert refused(post(CHAT, temprature=1)).startswith("temprature: no such field (did you mean")
    assert refused(post(CHAT, top_logprobs=2)) == "top_logprobs needs logprobs: true"
    assert refused(post(CHAT, sparsekv_rows=2)) == "sparsekv_rows needs stream: true"
    assert refused(post(CHAT, stream=True, regex="(a{1000}){1000}")).startswith("regex: lexer")
    both = {"response_format": {"type": "json_object"}, "regex": "a"}
    assert refused(post(CHAT, **both)) == "response_format and regex exclude each other"
    odd = refused(post(CHAT, chat_template_kwargs={"colour": 1}))
    assert odd.startswith("chat_template_kwargs.colour: the model's chat template has no such")
    assert "reasoning_effort" in odd
    for name in ("messages", "add_generation_prompt", "bos_token"):
        assert refused(post(CHAT, chat_template_kwargs={name: "x"})).endswith("reasoning_effort")


def test_variables_of_the_chat_template(post: Any) -> None:
    plain = told(post(CHAT))["usage"]["prompt_tokens"]
    given = [{"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "high"}}]
    for fields in given:
        assert told(post(CHAT, **fields))["usage"]["prompt_tokens"] > plain
    counted = [
        told(post(COUNT, **fields))["input_tokens"]
        for fields in ({}, {"output_config": {"effort": "high"}})
    ]
    assert counted[1] > counted[0]
    longer = [
        told(post(CHAT, reasoning_effort=effort))["usage"]["prompt_tokens"]
        for effort in ("<|im_end|>", "<|im_end|>" * 2)
    ]
    assert longer[1] > longer[0] + 2  # the text of a control token is no control token


def test_schemas_of_both_protocols(post: Any) -> None:
    schema = {"enum": [[1], [2]]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for each in ({"type": "json_object", "schema": schema}, named):
        answer = told(post(CHAT, max_tokens=90, response_format=each))
        assert json.loads(answer["choices"][0]["message"]["content"]) in ([1], [2])
    own = {"format": {"type": "json_schema", "schema": schema}}
    content = told(post(MESSAGE, max_tokens=90, output_config=own))["content"]
    assert json.loads(content[-1]["text"]) in ([1], [2])


def test_one_call_where_calls_must_not_be_parallel(post: Any) -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    calls = {"regex": TWO_CALLS, "think_budget": 0}
    asked = {"tools": [{"type": "function", "function": function}], **calls}
    numbers = [
        len(told(post(CHAT, **asked, **more))["choices"][0]["message"]["tool_calls"])
        for more in ({}, {"parallel_tool_calls": False})
    ]
    assert numbers == [2, 1]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked = {"tools": [{"name": "add"}], "tool_choice": choice, **calls}
    blocks = told(post(MESSAGE, **{**asked, "max_tokens": -1}))["content"]
    assert [block["type"] for block in blocks] == ["tool_use"]


def test_all_prompts_are_counted_and_a_seed_of_minus_1_is_random(post: Any) -> None:
    prompts = ["hello", "one two three", "x"]
    each = [told(post(COMPLETE, prompt=one))["usage"]["prompt_tokens"] for one in prompts]
    usage = told(post(COMPLETE, prompt=prompts, n=2, max_tokens=1))["usage"]
    assert usage["prompt_tokens"] == sum(each) and usage["completion_tokens"] == 6
    drawn = {"temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0, "ignore_eos": True}
    texts = [
        choice["text"]
        for _ in range(2)
        for choice in told(post(COMPLETE, **drawn, seed=-1, n=2))["choices"]
    ]
    assert len(set(texts)) == 4
    ended = told(post(COMPLETE, **drawn, max_tokens=-1))["usage"]
    assert ended["completion_tokens"] == 128  # the server's limit


def test_bytes_of_log_probabilities(post: Any, server: Any) -> None:
    """Tokens that are parts of characters keep their bytes, and have keys of their own."""
    encode = server.service.tokenizer.encode
    (first, second) = encode("\u00e9", add_bos=False, add_eos=False)
    asked = {"logit_bias": {str(first): 90, str(second): 89}, "max_tokens": 3}
    entry = told(post(CHAT, **asked, logprobs=True, top_logprobs=5))["choices"][0]["logprobs"]
    assert entry["content"][0]["bytes"] == [0xC3]
    thought = "<think>well</think>yes"
    assert told(post(COMPLETE, regex=thought, max_tokens=90))["choices"][0]["text"] == thought
    plain = {"max_tokens": 3, "logprobs": 5, "regex": "a\u00e9b"}
    found = told(post(COMPLETE, **plain))["choices"][0]
    assert found["text"] == "a\u00e9"
    assert found["logprobs"]["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert found["logprobs"]["text_offset"] == [0, 1, 1]
    assert all(len(top) == 5 for top in found["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [[]] * MANY},
        {"tools": [{}] * MANY},
        {"samplers": [1] * MANY},
        {"logit_bias": {f"x{i}": 1 for i in range(MANY)}},
        {"method_options": {f"x{i}": {} for i in range(MANY)}},
        {f"x{i}": 1 for i in range(MANY)},
    ],
)
def test_of_many_wrong_values_one_is_reported(fields: dict[str, Any]) -> None:
    """pydantic keeps a kilobyte for each of them."""
    tracemalloc.start()
    with pytest.raises(FieldError):
        read_fields(ChatFields, {"messages": [{}], **fields})
    assert tracemalloc.get_traced_memory()[1] < 4e6
    tracemalloc.stop()
