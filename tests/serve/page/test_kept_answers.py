"""/v1/answers/ID: an answer goes on while its client is away, and nobody else's."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from waiting import wait_for

from sparsekv_cli.serve.answers import Answers
from sparsekv_cli.serve.app import Access
from sparsekv_cli.serve.jobs import PromptProgress
from sparsekv_cli.serve.wire import kept

KEY = {"authorization": "Bearer sesame"}
ASK = {"messages": [{"role": "user", "content": "Go on."}], "stream": True, "max_tokens": 40}
ASK |= {"stream_options": {"include_usage": True}, "ignore_eos": True, "sparsekv_rows": 8}


@pytest.fixture(scope="module")
def running(serve: Callable[..., Any]) -> Any:
    return serve(access=Access(api_key="sesame"), tokens=400)


@pytest.fixture
def client(running: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=240, headers=KEY) as client:
        yield client


@pytest.fixture
def slow(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a step take 20 ms."""
    jobs = running.service.scheduler._running
    step = jobs.step
    monkeypatch.setattr(jobs, "step", lambda: (time.sleep(0.02), step()))


def path() -> str:
    return f"/v1/answers/{uuid.uuid4().hex}"


def events(text: str) -> list[dict[str, Any]]:
    parts = [part.partition("data: ")[2] for part in text.split("\n\n") if "data: " in part]
    return [json.loads(part) for part in parts if part != "[DONE]"]


def words(text: str) -> str:
    choices = [choice for each in events(text) for choice in each.get("choices", [])]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def leave(client: httpx.Client, at: str, **fields: Any) -> None:
    """Begins an answer, and goes at its first word: from then on the job is the scheduler's."""
    with client.stream("PUT", at, json={**ASK, **fields}) as answer:
        assert answer.status_code == 200
        assert next(text for text in answer.iter_text() if '"content"' in text)


def error(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_it_is_whole_without_its_client(client: httpx.Client) -> None:
    at, other = path(), path()
    whole = client.put(at, json={**ASK, "temperature": 0}).text
    assert len(words(whole)) > 10 and whole.endswith("data: [DONE]\n\n")
    leave(client, other, temperature=0)
    with client.stream("GET", other) as twice:  # two may read
        assert words(client.get(other).text) == words(whole)
        assert words("".join(twice.iter_text())) == words(whole)
    again = client.get(other).text
    assert events(again)[-1]["usage"]["completion_tokens"] == 40
    assert again.count("event: sparsekv.rows") == 1, "the last one"
    assert error(client.put(at, json=ASK), 409) == "there is an answer with this id"


@pytest.mark.usefixtures("slow")
def test_stop(client: httpx.Client, running: Any) -> None:
    at = path()
    with client.stream("PUT", at, json={**ASK, "max_tokens": 400}) as answer:
        text = answer.iter_text()
        next(text)
        assert client.delete(at).json()["deleted"]
        assert events("".join(text))[-1]["error"]["code"] == "stopped"
    wait_for(lambda: running.service.scheduler.n_running == 0)
    assert "no answer" in error(client.get(at), 404) and error(client.delete(at), 404)


def test_a_stopped_answer_ends_no_later_one() -> None:
    """Its time without a reader may pass when another one has its id."""

    async def use() -> None:
        answers, name = kept.KeptAnswers(str), uuid.uuid4().hex
        old = answers.begin(name)
        answers.remove(name)
        new = answers.begin(name)
        old._forget()
        assert answers.find(name) is new

    asyncio.run(use())


@pytest.mark.usefixtures("slow")
def test_it_ends_when_nobody_reads_it(
    client: httpx.Client, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "ALONE_S", 0.3)
    at = path()
    scheduler = running.service.scheduler
    before = scheduler.stats.n_answers
    leave(client, at, max_tokens=400)
    wait_for(lambda: scheduler.n_waiting + scheduler.n_running == 0)
    assert scheduler.stats.n_answers == before, "it was not written to its end"
    assert error(client.get(at), 404)


def test_an_event_beside_its_end_keeps_no_answer_alive(running: Any) -> None:
    """asyncio.wait_for would lose the cancellation, and the answer would be written to its end."""

    async def use() -> None:
        answers = Answers(running.service, [], [])
        answers._n_open = 1
        reading = asyncio.ensure_future(anext(answers.parts()))
        await asyncio.sleep(0.01)
        answers._events.put_nowait((0, PromptProgress(1, 2, 0)))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(use())


@pytest.mark.parametrize(
    ("name", "body", "status", "text"),
    [
        ("1" * 31, ASK, 400, "expected an id of 32 hexadecimal digits"),
        ("..%2f" + "1" * 32, ASK, 404, ""),
        ("G" * 32, ASK, 400, "expected an id"),
        ("", {**ASK, "stream": False, "stream_options": None, "sparsekv_rows": 0}, 400, "stream: "),
        ("", {**ASK, "temprature": 1}, 400, "temprature"),
        ("", {**ASK, "messages": []}, 400, "messages"),
        ("", {**ASK, "temperature": -1}, 400, "temperature"),
    ],
)
def test_wrong_requests(
    client: httpx.Client, name: str, body: dict[str, Any], status: int, text: str
) -> None:
    at = f"/v1/answers/{name}" if name else path()
    assert text in error(client.put(at, json=body), status)
    if name == "":  # the answer failed, which a page that was loaded again is told too
        assert text in error(client.get(at), status)


def test_a_body_that_is_not_read_leaves_no_answer(client: httpx.Client) -> None:
    at = path()
    assert error(client.put(at, content=b"x", headers={"content-type": "text/plain"}), 415)
    assert error(client.get(at), 404)
    assert words(client.put(at, json=ASK).text)


def test_nobody_else_reads_it(client: httpx.Client, running: Any) -> None:
    at = path()
    leave(client, at)
    with httpx.Client(base_url=running.url) as stranger:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for verb in ("GET", "DELETE"):
                assert stranger.request(verb, at, headers=headers).status_code == 401
        asks = {"origin": "https://evil.example", "access-control-request-method": "PUT"}
        assert stranger.options(at, headers=asks).status_code != 200
    foreign = client.get(at, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in foreign.headers


def test_limits(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Whole answers that nobody reads give way, the oldest first; then there is an error."""
    monkeypatch.setattr(kept, "MAX_BYTES", 30_000)
    first, second = path(), path()
    assert client.put(first, json=ASK).status_code == 200
    for _ in range(5):
        assert words(client.put(second, json=ASK).text)
        second, last = path(), second
    assert error(client.get(first), 404) and client.get(last).status_code == 200
    told = events(client.put(path(), json={**ASK, "max_tokens": 400}).text)[-1]
    assert "more than 0 MiB of events" in told["error"]["message"]
    monkeypatch.setattr(kept, "MAX_ANSWERS", 1)
    request.getfixturevalue("slow")
    with client.stream("PUT", path(), json={**ASK, "max_tokens": 400}) as answer:
        next(answer.iter_raw())
        assert error(client.put(path(), json=ASK), 429)
