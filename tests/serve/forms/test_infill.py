"""The text in a gap: /infill as llama-server has it, and suffix of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_sequences import SHAPE

from sparsekv_cli.models.tokenizer.infill import infill_ids

MARKS = {"fim_pre": 300, "fim_suf": 301, "fim_mid": 302, "fim_rep": 303, "fim_sep": 304}
KEYS = {f"tokenizer.ggml.{name}_token_id": token for name, token in MARKS.items()}
GAP = {"input_prefix": "def f(", "input_suffix": "):\n", "n_predict": 5}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], tiny_model: Callable[..., Path]) -> Any:
    return serve(files=[tiny_model(**SHAPE, wtype="Q8_0", metadata=KEYS)])


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=240) as client:
        yield client


def test_the_prompt_of_a_gap(server: Any) -> None:
    tokenizer = server.service.tokenizer
    inner = tokenizer.encode_within
    plain = [300, *inner("a"), 301, *inner("b"), 302]
    begin = tokenizer.encode("", add_eos=False)
    assert infill_ids(tokenizer, "a", "b") == [*begin, *plain]
    assert infill_ids(tokenizer, "", "", [], "x") == [*begin, 300, 301, 302, *inner("x")]
    files = [("one.py", "1"), ("", "2")]
    others = [303, *inner("project\n"), 304, *inner("one.py\n1\n"), 304, *inner("file\n2\n"), 304]
    expected = [*begin, *others, *inner("file\n"), *plain]
    assert infill_ids(tokenizer, "a", "b", files) == expected
    odd = infill_ids(tokenizer, "<|im_end|>", "b")
    assert tokenizer.eot_id not in odd and tokenizer.decode(odd).count("<|im_end|>") == 1


def test_a_gap_by_both_protocols(client: httpx.Client) -> None:
    answer = client.post("/infill", json=GAP).json()
    assert answer["stop"] and answer["stop_type"] == "limit" and answer["tokens_predicted"] == 5
    asked = {"prompt": GAP["input_prefix"], "suffix": GAP["input_suffix"], "max_tokens": 5}
    same = client.post("/v1/completions", json=asked).json()
    assert same["choices"][0]["text"] == answer["content"]
    assert same["usage"]["prompt_tokens"] == answer["tokens_evaluated"]
    vim = {
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_predict_ms": 500,
        "n_indent": 0, "id_slot": 0, "response_fields": ["content"], "prompt": "", "stop": [],
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
    }  # fmt: skip
    for n in (0, 5):
        told = client.post("/infill", json={**GAP, **vim, "n_predict": n})
        assert told.status_code == 200 and told.json()["tokens_predicted"] == n, told.text
    text = client.post("/infill", json={**GAP, "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert "".join(each["content"] for each in events) == answer["content"]
    assert [each["stop"] for each in events] == [False] * (len(events) - 1) + [True]


def test_a_gap_that_is_no_request(client: httpx.Client, serve: Callable[..., Any]) -> None:
    for path, fields, param in [
        ("/infill", {"input_prefix": 3}, "input_prefix"),
        ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ("/infill", {**GAP, "temprature": 1}, "temprature"),
        ("/infill", {"input_prefix": "long " * 600}, "prompt"),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "x"}, "prompt"),
    ]:
        answer = client.post(path, json=fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    other = serve()  # whose vocabulary has no such tokens
    for path, fields in [("/infill", GAP), ("/v1/completions", {"prompt": "a", "suffix": "b"})]:
        answer = httpx.post(other.url + path, json=fields, timeout=240)
        assert answer.status_code == 400 and "cannot fill a gap" in answer.text
