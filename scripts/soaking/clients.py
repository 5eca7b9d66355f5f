"""A server whose 32 clients ask about long documents, and of which many leave."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring import PROSE
from soaking.server import COMPLETIONS, Server, serving
from soaking.usage import Curve

from sparsekv_cli.errors import SparseKVError

N_CLIENTS, N_DOCUMENTS, N_TOKENS = 32, 4, 24
METHODS = ("full", "lfps", "quest", "snapkv", "streaming", "topk")
N_CTX, LOOK_S, IDLE_S = 4096, 1.0, 120.0
GIB = {True: "0.06", False: "0.5"}  # memory of rows: of the tiny model, and of larger ones
CHARACTERS = {True: 2600, False: 9000}  # of a document


class Crowd:
    """The clients. counts: what has become of their requests."""

    def __init__(self, server: Server, n_characters: int) -> None:
        self.server, self.counts = server, Counter[str]()
        self.is_over, self.faults = threading.Event(), list[str]()
        text = PROSE.read_text(encoding="utf-8")
        self._documents = [
            f"Document {i}. {text[5000 * i : 5000 * i + n_characters]}" for i in range(N_DOCUMENTS)
        ]
        self._lock = threading.Lock()

    def fields(self, rng: random.Random) -> dict[str, Any]:
        """A question about a part of a document."""
        document = rng.choice(self._documents)
        part = document[: rng.choice((300, len(document) // 2, len(document)))]
        fields: dict[str, Any] = {"method": rng.choice(METHODS), "sparse_from": 0}
        if fields["method"] != "full":
            fields["budget"] = "128"
        return {
            **fields, "prompt": f"{part}\nQuestion {rng.randrange(50)}: what is it?",
            "max_tokens": rng.randint(1, N_TOKENS), "ignore_eos": True,
        }  # fmt: skip

    def live(self, seed: int) -> None:
        """A client's life."""
        rng = random.Random(seed)
        while not self.is_over.is_set():
            try:
                what, status = self._once(rng)
            except (OSError, SparseKVError) as error:
                what, status = "faults", 0
                self.faults.append(f"{type(error).__name__}: {error}")
            with self._lock:
                self.counts[what] += 1
            if status not in (0, 200, 429):
                self.faults.append(f"status {status}")
            if status == 429:
                time.sleep(rng.random())

    def _once(self, rng: random.Random) -> tuple[str, int]:
        """One request. Returns what has become of it, and the status if there was one."""
        fields, chosen = self.fields(rng), rng.random()
        if chosen < 0.55:
            status, _ = self.server.ask(fields)
            return {200: "answers", 429: "queue full"}.get(status, "faults"), status
        if chosen < 0.6:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999\r\n"
            with socket.create_connection(("127.0.0.1", self.server.port)) as link:
                link.sendall(f"{head}content-type: application/json\r\n\r\n{{".encode())
            return "half a body", 0
        with contextlib.closing(self.server.send({**fields, "stream": True})) as link:
            if chosen < 0.8:
                time.sleep(rng.random() * 2)
                return "left while it waited", 0
            answer = link.getresponse()
            if answer.status == 200:
                for _ in range(rng.randint(1, 6)):
                    answer.readline()
                answer.close()
            return "left the stream", answer.status


def wait_until_idle(server: Server) -> Mapping[str, float]:
    """Returns the metrics when nothing runs or waits. Raises SparseKVError if that takes long."""
    deadline = time.monotonic() + IDLE_S
    while True:
        told = server.metrics()
        if told["running"] == told["queue"] == 0:
            return told
        if time.monotonic() > deadline:
            raise SparseKVError(f"{told['running']:g} run and {told['queue']:g} wait for nobody")
        time.sleep(0.2)


def soak(model: Path, place: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Lets the clients ask. Raises SparseKVError for what does not hold."""
    is_tiny = model.stem == "tiny"
    options = ["-m", str(model), "-c", str(N_CTX), "--kv-memory", GIB[is_tiny], "--queue", "20"]
    options += ["--parallel", "8", "--cache-dir", str(place / "served"), "--cache-limit", "0.2"]
    options += ["--prefill-dtype", "f32"]  # the same text if some rows come from memory
    with serving(*options) as server:
        crowd = Crowd(server, CHARACTERS[is_tiny])
        fixed = {**crowd.fields(random.Random(seed)), "temperature": 0}
        for name in METHODS:  # which compiles and loads what the steps need
            budget = {} if name == "full" else {"budget": "128"}
            server.ask({**fixed, "method": name, **budget})
        before = server.ask(fixed)[1]["choices"][0]["text"]
        threads = [
            threading.Thread(target=crowd.live, args=(1000 * seed + i,)) for i in range(N_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        curve, begun = Curve(server.pid), time.monotonic()
        while time.monotonic() - begun < seconds and not crowd.faults:
            time.sleep(LOOK_S)
            curve.look()
        crowd.is_over.set()
        for thread in threads:
            thread.join()
        told = wait_until_idle(server)
        after = server.ask(fixed)[1]["choices"][0]["text"]
        flat = curve.check("serve", N_CLIENTS)
    if crowd.faults:
        raise SparseKVError(f"serve: {len(crowd.faults)} faults, such as {crowd.faults[0]}")
    n_asked = crowd.counts.total() + len(METHODS) + 1
    n_ended = told["answers_total"] + told["aborts_total"]
    if before != after:
        raise SparseKVError(f"serve: a greedy answer has changed from {before!r} to {after!r}")
    if told["failures_total"] or not crowd.counts["answers"] <= n_ended <= n_asked:
        raise SparseKVError(f"serve: {dict(crowd.counts)} asked, and the server counts {told}")
    if told["kv_bytes"] > told["kv_limit_bytes"]:
        raise SparseKVError(f"serve: {told['kv_bytes']:g} bytes of {told['kv_limit_bytes']:g}")
    names = ("answers_total", "aborts_total", "cached_tokens_total", "prompt_tokens_total")
    return {
        "model": model.stem, "requests": crowd.counts.total(), **crowd.counts,
        **{f"counted {name.removesuffix('_total')}": int(told[name]) for name in names},
        **flat,
    }  # fmt: skip
