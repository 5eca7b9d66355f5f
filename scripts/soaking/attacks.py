"""Attacks on a server, and the first token of a client that behaves meanwhile."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import PROSE
from soaking.server import COMPLETIONS, Server, serving

from sparsekv_cli.errors import SparseKVError

KEY = "sesame"
RATE, N_LINKS = 200.0, 150  # requests a second of a flood; connections of a slow attack
MOST = 2.0  # times its usual time that the client's first token may take
TRIES = 3  # of an attack: other programs use the machine, too
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WITH_KEY = f"{HEAD}authorization: Bearer {KEY}\r\n"


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def slow(port: int, start: str) -> Iterator[None]:
    """Connections that begin a request and then send a byte now and then."""
    links: list[socket.socket] = []
    while True:
        if len(links) < N_LINKS:
            links.append(connect(port))
            links[-1].sendall(start.encode())
        for link in links[:: max(1, len(links) // 8)]:
            try:
                link.send(b"a")
            except OSError:
                links.remove(link)
        yield


def one(port: int, data: bytes, *, reads: bool) -> Iterator[None]:
    """One request after another. reads: whether the answer is read; else the connection breaks."""
    while True:
        with contextlib.suppress(OSError), connect(port) as link:
            if not reads:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.sendall(data)
            if reads:
                while link.recv(1 << 16):
                    pass
        yield


def posted(head: str, body: bytes) -> bytes:
    return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def asked(n_characters: int) -> bytes:
    prompt = PROSE.read_text(encoding="utf-8")[:n_characters]
    return json.dumps({"prompt": prompt, "max_tokens": 99}).encode()


HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
GIANT = b'{"prompt": [' + b"[]," * 1_300_000 + b"[]]}"
# Requests, and how many of them are sent a second at most.
ATTACKS: dict[str, tuple[Callable[[int], Iterator[None]], float]] = {
    "slow heads": (lambda port: slow(port, HEAD), RATE),
    "slow bodies": (lambda port: slow(port, f"{HEAD}content-length: 60000\r\n\r\n"), RATE),
    "slow bodies with the key": (
        lambda port: slow(port, f"{WITH_KEY}content-length: 60000\r\n\r\n"), RATE,
    ),
    "a flood of health checks": (lambda port: one(port, HEALTH, reads=True), RATE),
    "wrong keys": (lambda port: one(port, posted(HEAD, asked(400)), reads=True), RATE),
    "broken JSON": (lambda port: one(port, posted(WITH_KEY, b"{" * 9999), reads=True), RATE),
    "giant lists": (lambda port: one(port, posted(WITH_KEY, GIANT), reads=True), 2.0),
    "abrupt ends": (lambda port: one(port, posted(WITH_KEY, asked(400)), reads=False), 20.0),
}  # fmt: skip


def attack(name: str, port: int, n_done: Any) -> None:
    """Attacks until the process is ended."""
    os.nice(5)  # an attacker has a machine of its own
    make, rate = ATTACKS[name]
    for _ in make(port):
        n_done.value += 1
        time.sleep(1 / rate)


def first_token(server: Server, which: int) -> float:
    """Seconds to the first token of a prompt that nobody has asked."""
    prompt = f"Note {which}: {PROSE.read_text(encoding='utf-8')[which * 7 % 5000 :][:600]}"
    fields = {"prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True}
    started = time.perf_counter()
    with contextlib.closing(server.send(fields, authorization=f"Bearer {KEY}")) as link:
        answer = link.getresponse()
        if answer.status != 200:
            raise SparseKVError(f"a client that behaves gets {answer.status}: {answer.read()!r}")
        while line := answer.readline():
            if line.startswith(b"data: {"):
                return time.perf_counter() - started
    raise SparseKVError("a client that behaves gets no answer")


def soak(model: Path, seconds: float) -> list[dict[str, Any]]:
    """Attacks in turn with rests. Raises SparseKVError if the client waits too long each time."""
    spans = seconds / len(ATTACKS) / 2
    which = 0
    rows: list[dict[str, Any]] = []

    def times(server: Server, span: float) -> list[float]:
        nonlocal which
        found, begun = list[float](), time.monotonic()
        while time.monotonic() - begun < span or len(found) < 3:
            which += 1
            found.append(first_token(server, which))
            time.sleep(0.1)
        return found

    with serving("-m", str(model), "--no-cache", "--api-key", KEY, "-c", "4096") as server:
        times(server, 1)
        for name in ATTACKS:
            for _ in range(TRIES):
                row = attacked(server, name, times, spans)
                if row["times"] <= MOST:
                    break
            rows.append(row)
            print(
                f"| {name} | {row['requests']} | {1000 * row['usual_s']:.0f} ms "
                f"| {1000 * row['meanwhile_s']:.0f} ms | {row['times']:.2f} |", flush=True,
            )  # fmt: skip
    if late := [row["attack"] for row in rows if row["times"] > MOST]:
        raise SparseKVError(f"more than {MOST:g} times the usual first token: {', '.join(late)}")
    return rows


def attacked(
    server: Server, name: str, times: Callable[[Server, float], list[float]], span: float
) -> dict[str, Any]:
    """The medians of a client's first tokens before, after and during an attack."""
    usual = times(server, span / 2)
    context = multiprocessing.get_context("fork")
    n_done = context.Value("l", 0)
    process = context.Process(target=attack, args=(name, server.port, n_done), daemon=True)
    process.start()
    try:
        time.sleep(0.5)
        meanwhile = times(server, span)
    finally:
        process.kill()
        process.join()
    usual += times(server, span / 2)
    before, during = statistics.median(usual), statistics.median(meanwhile)
    return {
        "attack": name, "requests": n_done.value, "usual_s": before, "meanwhile_s": during,
        "most_s": max(meanwhile), "times": during / before,
    }  # fmt: skip
