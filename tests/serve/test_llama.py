"""llama-server's routes, the models, and paths that are not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.lfps import LFPS


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    return serve(tokens=32)


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=240) as client:
        yield client


def test_tokens_and_their_text(client: httpx.Client, server: Any) -> None:
    tokenizer = server.service.tokenizer
    text = "hé <|im_end|> there"
    ids = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids == tokenizer.encode(text, add_bos=False)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"content": text}
    plain = {"content": text, "parse_special": False, "with_pieces": True}
    pieces = client.post("/tokenize", json=plain).json()["tokens"]
    assert len(pieces) > len(ids) and [195] in [each["piece"] for each in pieces]
    ids = [each["id"] for each in pieces]
    assert ids == tokenizer.encode(text, add_bos=False, parse_special=False)
    whole = client.post("/tokenize", json={"content": text, "add_special": True}).json()
    assert whole["tokens"] == tokenizer.encode(text)
    assert client.post("/detokenize", json={"tokens": []}).json() == {"content": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/tokenize", {"content": "a", "x": 1}, "x"),
        ("/detokenize", {"tokens": [1, 512]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
    ],
)
def test_what_is_no_request(client: httpx.Client, path: str, fields: Any, param: str) -> None:
    answer = client.post(path, json=fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_properties_and_the_model(client: httpx.Client, server: Any) -> None:
    props = client.get("/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512 and settings["params"]["n_predict"] == 32
    assert settings["params"]["temperature"] == 0.0 and settings["params"]["top_k"] == 40
    assert props["total_slots"] == 4 and props["chat_template"] == server.service.template
    assert props["model_path"].endswith(server.service.name + ".gguf")
    (model,) = client.get("/v1/models").json()["data"]
    assert model["context_length"] == 512 and model["methods"][:2] == ["full", "topk"]
    assert model["thinking_switch"] == "enable_thinking"
    assert model["method"] == "full" and model["method_options"] == {}
    assert [*model["sparse_from"]] == model["methods"]
    lfps = server.service.model.sparse_from_of(build_method("lfps", {}), -1)
    assert lfps == 3 * LFPS.work_of_a_head and model["sparse_from"]["lfps"] == 0
    assert "fasa" not in model["methods"]  # which has to measure the model first


def test_paths_that_are_not_there(client: httpx.Client) -> None:
    for path, words in [
        ("/v1/embeddings", "makes no embeddings"),
        ("/embeddings", "makes no embeddings"),
        ("/v1/images/generations", "makes no pictures"),
        ("/v1/audio/speech", "makes no sounds"),
        ("/v1/nothing" + "\u00e9" * 500, "there is no path"),
        ("/nothing", "there is no path '/nothing'"),
    ]:
        answer = client.post(path, json={"input": "x"})
        message = answer.json()["error"]["message"]
        assert answer.status_code == 404 and words in message and len(message) < 600
        assert "/v1/chat/completions, " in message and "/tokenize" in message
    wrong = client.get("/v1/chat/completions")
    assert wrong.status_code == 405 and "expected POST" in wrong.json()["error"]["message"]
