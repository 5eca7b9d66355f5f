"""Several models in one server: found by name, loaded when asked for, unloaded for others."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from tiny_sequences import SHAPE
from waiting import wait_for

from sparsekv_cli.commands.serve import command, hosted_models
from sparsekv_cli.errors import NoRoomError, SparseKVError
from sparsekv_cli.serve.jobs import TimeLimitError
from sparsekv_cli.serve.pool import HostedModel, ModelPool, share_of_rows, shares
from sparsekv_cli.serve.requests import RequestLimits

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
GIB = 1 << 30


@pytest.fixture(scope="module")
def files(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models, one of which is read anew where it changes, and one that is cut."""
    folder = tmp_path_factory.mktemp("models")
    found = [folder / f"{name}.gguf" for name in ("first", "second", "cut")]
    for path, n_layer in zip(found, (4, 2, 2), strict=True):
        shutil.copy(tiny_model(**{**SHAPE, "n_layer": n_layer}, wtype="Q8_0"), path)
    os.truncate(found[2], found[2].stat().st_size // 2)
    return found


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], files: list[Path]) -> Any:
    return serve(files=files, most=1, seconds=20.0)  # one at a time


@pytest.fixture
def client(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=240) as client:
        yield client


def ask(client: httpx.Client, model: str, n: int = 4) -> httpx.Response:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": n, "ignore_eos": True}
    return client.post(CHAT, json=asked)


def states(pool: ModelPool) -> list[str]:
    return [model.status for model in pool.models]


def test_names(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["first", "second", "cut"]
    assert client.get("/v1/models/second").json()["id"] == "second"
    answer = client.get("/v1/models/none")
    assert answer.status_code == 404 and "'none' does not exist: this server has " in answer.text
    answers = [ask(client, name).json()["model"] for name in ("second", "", "first")]
    assert answers == ["second", "first", "first"]
    error = ask(client, "other").json()["error"]
    assert error["code"] == "model_not_found" and "first, second, cut" in error["message"]
    asked = {"model": "other", "messages": MESSAGES, "max_tokens": 4}
    refused = client.post("/v1/messages", json=asked)
    assert refused.status_code == 404 and refused.json()["error"]["type"] == "not_found_error"
    assert client.get("/props", params={"model": "second"}).json()["model_alias"] == "second"


def test_further_names_and_patterns() -> None:
    models = [
        HostedModel(("first",), Path("a")),
        HostedModel(("second", "gpt-4o"), Path("b"), patterns=("claude-*", "*")),
    ]
    pool = ModelPool(models, lambda hosted: None, 0, RequestLimits(1, 1, 1), "full", print)
    asked = ("first", "gpt-4o", "claude-x", "o3", "", "[", "a" * 5000)
    found = [pool.find(name).name for name in asked]
    assert found == ["first", "second", "second", "second", "first", "second", "second"]
    assert models[1].listed(0)["aliases"] == ["gpt-4o", "claude-*", "*"]


def test_an_unloaded_model_leaves_nothing(client: httpx.Client, server: Any) -> None:
    assert ask(client, "first").status_code == 200
    model = weakref.ref(server.pool.models[0].loaded.service.model)
    thread = server.pool.models[0].loaded.service.scheduler._thread
    assert ask(client, "second").status_code == 200
    assert states(server.pool)[:2] == ["unloaded", "loaded"]
    gc.collect()
    assert model() is None and not thread.is_alive()
    text = client.get("/metrics").text
    assert 'sparsekv_model_loaded{model="first"} 0.0' in text
    assert 'sparsekv_answers_total{model="first"}' in text  # which are counted on
    listed = client.get("/v1/models").json()["data"][0]
    assert listed["status"] == "unloaded" and "lfps" in listed["methods"]


def test_a_damaged_model_hurts_no_other(
    client: httpx.Client, server: Any, files: list[Path]
) -> None:
    refused = ask(client, "cut")
    assert refused.status_code == 500 and refused.json()["error"]["code"] == "model_failed"
    assert "bytes are missing" in refused.json()["error"]["message"]
    health = client.get("/health")
    assert health.status_code == 200 and health.json()["models"]["cut"] == "failed"
    assert ask(client, "first").status_code == 200
    shutil.copy(files[1], files[2])
    assert ask(client, "cut").status_code == 200


def test_a_file_that_changed_is_read_anew(
    client: httpx.Client, server: Any, files: list[Path]
) -> None:
    assert ask(client, "second").status_code == 200
    n_loads = server.pool.models[1].n_loads
    assert ask(client, "second").status_code == 200
    assert server.pool.models[1].n_loads == n_loads
    other = files[1].with_suffix(".new")
    shutil.copy(files[0], other)
    other.replace(files[1])
    assert ask(client, "second").status_code == 200
    assert server.pool.models[1].loaded.service.model.hparams.n_layer == SHAPE["n_layer"]


def test_requests_in_flight_keep_their_model(client: httpx.Client, server: Any) -> None:
    """Another model waits for them, and later requests wait for that model."""
    assert ask(client, "first").status_code == 200
    loaded = server.pool.models[0].loaded
    scheduler, ended = loaded.service.scheduler, []
    step, gate = scheduler._running.step, threading.Event()

    def held() -> None:
        gate.wait(20)
        step()

    def timed(name: str, n: int) -> int:
        status = ask(client, name, n).status_code
        ended.append((name, n))
        return status

    scheduler._running.step = held
    with ThreadPoolExecutor() as pool:
        first = pool.submit(timed, "first", 24)
        wait_for(lambda: scheduler.n_running)
        second = pool.submit(timed, "second", 4)
        wait_for(lambda: server.pool._lacks_memory)
        with pytest.raises(httpx.TimeoutException):  # it leaves, and is not waited for
            httpx.post(server.url + CHAT, json={"messages": MESSAGES}, timeout=0.1)
        third = pool.submit(timed, "first", 1)
        wait_for(lambda: len(server.pool._tasks) == 2)
        assert server.pool.models[0].loaded is loaded
        gate.set()
        assert [each.result() for each in (first, second, third)] == [200, 200, 200]
    assert ended == [("first", 24), ("second", 4), ("first", 1)]
    wait_for(lambda: not any(each.loaded and each.loaded.n_held for each in server.pool.models))


def test_a_model_that_is_given_when_the_time_is_over() -> None:
    """Nobody holds it then. With no time at all, both happen in one turn of the loop."""
    model = HostedModel(("a",), Path("a"))
    service: Any = SimpleNamespace(model=SimpleNamespace(n_bytes=1, gguf=SimpleNamespace(parts=[])))
    service.scheduler = SimpleNamespace(failure=None)
    limits: Any = SimpleNamespace(seconds=0.0)
    pool = ModelPool([model], lambda _: service, 1, limits, "full", lambda text: None)
    pool.load_first()
    pool._lacks_memory = True  # so requests wait for their turn
    with pytest.raises(TimeLimitError, match="not loaded within 0 s"), ExitStack() as held:
        asyncio.run(pool.hold("a", held))
    assert model.loaded is not None and model.loaded.n_held == 0


def test_two_models_at_once(serve: Callable[..., Any], files: list[Path]) -> None:
    server = serve(files=files[:2], most=1 << 40)
    with httpx.Client(base_url=server.url, timeout=240) as client:
        alone = [ask(client, name, 24).json()["choices"] for name in ("first", "second")]
        assert states(server.pool) == ["loaded", "loaded"]
        with ThreadPoolExecutor() as pool:
            names = ["first", "second"] * 4
            answers = [*pool.map(lambda name: ask(client, name, 24).json()["choices"], names)]
    assert answers == alone * 4


def test_a_gpu_without_room_loses_an_idle_model(
    serve: Callable[..., Any], files: list[Path]
) -> None:
    """The limit is of the host's memory, so the models' memory on a GPU is not known before."""
    server = serve(files=files[:2], most=1 << 40)
    load, tried = server.pool._load, []

    def lacks_room(model: Any) -> Any:
        tried.append(states(server.pool))
        if "loaded" in tried[-1]:
            raise NoRoomError("the GPU has 1 GiB to use, but 2 are needed; use --device cpu")
        return load(model)

    server.pool._load = lacks_room
    with httpx.Client(base_url=server.url, timeout=240) as client:
        assert [ask(client, name).status_code for name in ("first", "second")] == [200, 200]
    assert states(server.pool) == ["unloaded", "loaded"]
    assert tried == [["loaded", "unloaded"], ["unloaded", "unloaded"]]


def test_rows_on_a_gpu() -> None:
    assert share_of_rows(None, 2, 7, None) == share_of_rows(None, 2, 7, 5) == 7
    assert share_of_rows(40, 2, 7, None) == 20
    assert share_of_rows(40, 1, 7, 12) == 12
    assert share_of_rows(40, 1, 7, 0) == 0


def test_shares_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekv_cli.serve.pool.default_limit", lambda: 8 * GIB)  # half of 16
    assert shares([4 * GIB, 4 * GIB], None, None) == (12 * GIB, 2 * GIB)
    assert shares([4 * GIB, 9 * GIB], None, None) == (12 * GIB, 2 * GIB)
    assert shares([14 * GIB], None, None) == (12 * GIB, GIB)
    assert shares([GIB, GIB, GIB], 2 * GIB, 6 * GIB) == (2 * GIB, 3 * GIB)
    with pytest.raises(SparseKVError, match="models-memory"):
        shares([GIB, 3 * GIB], 2 * GIB, None)


def test_the_port_is_taken_before_a_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(command, ["-m", "nothing.gguf", "--port", port])
    assert isinstance(result.exception, SparseKVError)
    assert f"cannot listen on 127.0.0.1:{port}: " in str(result.exception)


def test_names_on_the_command_line(files: list[Path], tiny_model: Callable[..., Path]) -> None:
    from sparsekv_cli.commands.options.model import ModelOptions
    from sparsekv_cli.settings.config import SessionConfig

    options = ModelOptions(None, SessionConfig(), None)
    given = [str(path) for path in files[:2]]
    hosted = hosted_models(given, ["tiny"], options)
    assert [each.names for each in hosted] == [("tiny", "first"), ("second",)]
    more = hosted_models(given, ["claude-*,tiny,gpt-4o", "*"], options)
    assert [(each.names, each.patterns) for each in more] == [
        (("tiny", "gpt-4o", "first"), ("claude-*",)), (("second",), ("*",)),
    ]  # fmt: skip
    assert hosted[0].about["context_length"] and "full" in hosted[0].about["methods"]
    thinks = tiny_model(**SHAPE, chat_template="{{ enable_thinking }}")
    hosted += hosted_models([str(thinks)], [], options)
    switches = [each.about["thinking_switch"] for each in hosted]
    assert switches == [None, None, "enable_thinking"]
    for wrong, aliases in (
        (given[:1] * 2, []),
        (given, ["a", "a"]),
        (given[:1], ["a", "b"]),
        (given, ["a,b", "b"]),
    ):
        words = [*(("-m", each) for each in wrong), *(("-a", each) for each in aliases)]
        result = CliRunner().invoke(command, [*chain(*words), "--port=0"])
        assert result.exit_code == 2 and "--alias" in result.output
        assert "1 models" not in result.output
