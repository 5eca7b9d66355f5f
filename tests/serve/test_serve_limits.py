"""Connections, heads and bodies without an end; requests that ask for too much; an end in time.

And clients that leave before the end, and ask again.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from asked import FULL, Asked
from tiny_sequences import tokens
from waiting import wait_for

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.serve.jobs import Failed, PromptProgress, Request
from sparsekv_cli.serve.rows import bytes_of_sequence
from sparsekv_cli.serve.scheduler import Scheduler
from sparsekv_cli.serve.wire import bodies, connections

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % CHAT.encode()
HEAD += b"Content-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BREAKERS = "dry_sequence_breakers"
MOST_BYTES = 1 << 16


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "BODY_S", 1.0)
        yield serve(body_bytes=MOST_BYTES, connections=12, head_s=1.0)


def opened(server: Any, text: bytes) -> socket.socket:
    port = int(server.url.rpartition(":")[2])
    link = socket.create_connection(("127.0.0.1", port), timeout=20)
    link.sendall(text)
    return link


def answer_of(link: socket.socket) -> bytes:
    """All that the server says until it ends the connection."""
    said = b""
    try:
        while part := link.recv(1 << 16):
            said += part
    except ConnectionResetError:
        pass
    finally:
        link.close()
    return said


def test_half_sent_heads_lock_nobody_out(server: Any) -> None:
    links = [opened(server, HEAD) for _ in range(40)]
    assert answer_of(opened(server, HEALTH)).startswith(b"HTTP/1.1 200 ")
    answers = [answer_of(link) for link in links]  # the oldest went at once, the others in time
    assert answers[0] == b"" and answers[-1].startswith(b"HTTP/1.1 408 ")


def test_bodies_end(server: Any) -> None:
    length = f"Content-Length: {MOST_BYTES}\r\n\r\n".encode()
    late = answer_of(opened(server, HEAD + length + b"{"))
    assert late.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 1 s" in late
    links = [opened(server, HEAD + length + b" " * (MOST_BYTES - 9)) for _ in range(5)]
    assert httpx.post(server.url + CHAT, json=ASKED, timeout=20).status_code == 200  # a small one
    answers = [answer_of(link) for link in links]  # of four, there is room for the bytes
    assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) == 1
    assert sum(answer.startswith(b"HTTP/1.1 408 ") for answer in answers) == 4


def test_half_sent_bodies_lock_nobody_out(server: Any) -> None:
    """Whoever has just connected stays, though its head is not there yet."""
    body = HEAD + b"Content-Length: 99\r\n\r\n{"
    links = [opened(server, body) for _ in range(12)]
    time.sleep(0.2)
    client = opened(server, b"")
    links += [opened(server, body) for _ in range(3)]
    time.sleep(0.2)
    client.sendall(HEALTH)
    assert answer_of(client).startswith(b"HTTP/1.1 200 ")
    for link in links:
        link.close()


@pytest.mark.parametrize("stale", [b"", HEAD], ids=["idle", "half-sent"])
def test_every_whole_request_gets_a_status(
    server: Any, stale: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three times as many connections as there may be, each is answered, again and again."""
    monkeypatch.setattr(connections, "STALE_S", 60.0)
    monkeypatch.setattr(connections, "PLACE_S", 0.0)

    def ask(path: str) -> list[int]:
        found = []
        with httpx.Client(base_url=server.url, timeout=240) as client:
            ready.wait()
            for _ in range(4):
                answer = client.post(path, json=ASKED)
                found.append(answer.status_code)
                if answer.status_code == 503:
                    assert answer.headers["retry-after"] and answer.json()["error"]["message"]
        return found

    n, ready = 36, threading.Barrier(36)
    links = [opened(server, stale) for _ in range(6)]
    with ThreadPoolExecutor(n) as pool:
        paths = [CHAT, "/v1/messages", "/v1/responses", CHAT] * (n // 4)
        statuses = [status for found in pool.map(ask, paths) for status in found]
    for link in links:
        link.close()
    assert len(statuses) == 4 * n and {*statuses} <= {200, 400, 429, 503}
    assert 200 in statuses and 503 in statuses


def test_idle_connections_lock_nobody_out(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALE_S", 0.1)
    links = [opened(server, b"") for _ in range(14)]
    time.sleep(0.3)
    assert answer_of(opened(server, HEALTH)).startswith(b"HTTP/1.1 200 ")
    for link in links:
        link.close()


def test_large_bodies_leave_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one was parsed, whether it is right or not, the next one waits."""
    parsed: list[float] = []

    def parse(data: bytearray) -> Any:
        parsed.append(time.monotonic())
        started = time.thread_time()
        while time.thread_time() - started < 0.02:
            pass
        raise bodies.BodyError("wrong")

    async def stream() -> Any:
        yield b"[" * 200

    async def ask() -> None:
        reader = bodies.Bodies(1000)
        asked = SimpleNamespace(headers={"content-type": "application/json"}, stream=stream)
        await asyncio.gather(*(reader.read(asked) for _ in range(2)), return_exceptions=True)

    monkeypatch.setattr(bodies, "parse", parse)
    asyncio.run(ask())
    assert parsed[1] - parsed[0] >= bodies.RESTS * 0.02


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"413"),
        (HEAD.replace(b"localhost", b"evil.example") + b"Content-Length: 99\r\n\r\n", b"421"),
        (HEAD + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n", b"400"),
    ],
)
def test_a_refusal_closes_the_connection(server: Any, head: bytes, status: bytes) -> None:
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    said = answer_of(opened(server, head + (chunk * 4 if b"chunked" in head else b"")))
    assert said.startswith(b"HTTP/1.1 " + status) and b"connection: close" in said


def test_hosts_have_no_case(server: Any) -> None:
    asked = b"GET /health HTTP/1.1\r\nHost: LocalHost:80\r\nConnection: close\r\n\r\n"
    assert answer_of(opened(server, asked)).startswith(b"HTTP/1.1 200 ")


def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    limits = [256, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.__setitem__(0, new[0]))
    assert (
        connections.most_connections(8) == 8 + connections.SPARE
        and limits[0] == 264 + connections.LOBBY
    )
    assert connections.lobby_of(72) == connections.LOBBY
    limits[:] = [256, 256]
    assert connections.most_connections(500) == 64 and connections.lobby_of(64) == 0
    limits[:] = [64, 64]
    with pytest.raises(SparseKVError, match="may open 64 files, too few"):
        connections.most_connections(8)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x"] * 500}, BREAKERS),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x" * 1025]}, BREAKERS),
        ({"stop": "x" * 1025}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"method": "freekv", "method_options": {"window": 10**9}}, "method_options"),
        ({"method": "lfps", "method_options": {"candidates": 10**8}}, "method_options"),
    ],
)
def test_what_asks_for_too_much_is_refused(server: Any, fields: Any, param: Any) -> None:
    answer = httpx.post(server.url + CHAT, json={**ASKED, **fields}, timeout=20)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_busy_machine_is_no_fault_of_a_request(server: Any, monkeypatch: Any) -> None:
    """A grammar that is not read in time is a 503, whatever field asks for it."""

    def busy(kind: str, text: str) -> None:
        raise BusyError(f"{kind}: try again later")

    monkeypatch.setattr(server.service.grammars, "read", busy)
    tool = {"name": "f", "parameters": {}}
    for fields in (
        {"regex": "a"},
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
    ):
        answer = httpx.post(server.url + CHAT, json={**ASKED, **fields}, timeout=20)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        assert answer.json()["error"]["code"] == "busy"
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    asked = {**ASKED, "tools": tools, "tool_choice": {"type": "any"}}
    answer = httpx.post(server.url + "/v1/messages", json=asked, timeout=20)
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "api_error"


def test_an_end_in_the_protocols_shapes(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What --drain does when its time is over."""
    scheduler = server.service.scheduler
    monkeypatch.setattr(scheduler._running, "step", lambda: time.sleep(0.02))
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(httpx.post, server.url + path, json=ASKED, timeout=20)
            for path in (CHAT, "/v1/messages")
        ]
        wait_for(lambda: scheduler.n_running == 2)
        threading.Thread(target=scheduler.end_all).start()
        answers = [each.result() for each in asked]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert answers[0].json()["error"]["code"] == "stopping"
    assert answers[1].json()["type"] == "error"


def leave(scheduler: Scheduler, prompt: list[int]) -> None:
    """Sends a request whose client leaves in the middle of the prefill."""
    chunk = scheduler._has_turn

    def has_turn(now: Any, at: Any) -> bool:
        if at.done > at.total // 2:
            now.job.abort()
        return chunk(now, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_has_turn", has_turn)
        assert isinstance(Asked(scheduler, prompt, 3).end, Failed)


def test_a_client_that_asks_again_goes_on_with_its_prefill(start: Callable[..., Scheduler]) -> None:
    """A client with little patience would otherwise begin anew each time, and never end."""
    most, prompt = start().bytes_of(Request(tokens(900), FULL, 0, 100))[0], tokens(800, 4)
    scheduler = start(kv_bytes=most)
    leave(scheduler, prompt)
    assert scheduler.n_running == 0 and scheduler._paused.all
    again = Asked(scheduler, prompt, 3)
    told = [event for event in again.events if isinstance(event, PromptProgress)]
    assert again.text == Asked(start(), prompt, 3).text
    assert 400 <= again.job.n_cached < 800 and not scheduler._paused.all
    assert [each.cached for each in told] == [again.job.n_cached] * len(told)
    prompt = tokens(801, 5)
    leave(scheduler, prompt)
    assert Asked(scheduler, tokens(700, 6), 3).text and not scheduler._paused.all  # it needs room
    again = Asked(scheduler, prompt, 3)
    assert again.job.n_cached < 16 and again.text == Asked(start(), prompt, 3).text
    leave(scheduler, prompt)
    scheduler.stop()
    assert not scheduler._paused.all


def test_a_paused_prefill_is_counted_and_ends_after_a_time(start, monkeypatch) -> None:
    scheduler, prompt = start(), tokens(800, 4)
    leave(scheduler, prompt)
    paused = scheduler._paused
    n_bytes = bytes_of_sequence(paused.all[0].sequence)
    wait_for(lambda: scheduler.stats.kv_bytes == n_bytes > 0)
    monkeypatch.setattr("sparsekv_cli.serve.jobs.PAUSE_S", 0.05)
    leave(scheduler, prompt)  # the same prompt goes on, and pauses again
    wait_for(lambda: not paused.all and scheduler.stats.kv_bytes == 0)
    assert Asked(scheduler, prompt, 3).job.n_cached < 16


def test_a_long_prefill_says_now_and_then_how_far_it_is(start, monkeypatch) -> None:
    said: list[str] = []
    scheduler = start(tell=said.append)
    assert Asked(scheduler, tokens(700), 2).text and not said
    monkeypatch.setattr("sparsekv_cli.serve.jobs.LINE_S", 0.0)
    monkeypatch.setattr("sparsekv_cli.serve.scheduler.LEAST_PREFILL_S", 0.0)  # after every chunk
    assert Asked(scheduler, tokens(900, 5), 2).text
    lines = [re.fullmatch(r"prefill: (\d+) of 900 tokens, \d+ t/s, \d+ s left", x) for x in said]
    assert 0 < int(lines[0][1]) < 900 and all(lines)
