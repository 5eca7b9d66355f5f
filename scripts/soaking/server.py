"""A server in a process of its own, and what it tells of itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection
from typing import IO, Any, NamedTuple

from sparsekv_cli.errors import SparseKVError

READY_S, ANSWER_S = 120.0, 600.0
COMPLETIONS = "/v1/completions"
OURS = (sys.executable, "-m", "sparsekv_cli", "serve", "--port", "0")


class Server(NamedTuple):
    """A server that runs."""

    port: int
    pid: int
    log: IO[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def said(self) -> str:
        """Returns its log so far."""
        return os.pread(self.log.fileno(), 1 << 30, 0).decode() if self.log else ""

    def metrics(self) -> Mapping[str, float]:
        """Returns the numbers of /metrics; those with labels are added up."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_S) as answer:
            text = answer.read().decode()
        found = Counter[str]()
        for name, n in re.findall(r"(?m)^sparsekv_(\w+)(?:{.*})? (\S+)$", text):
            found[name] += float(n)
        return found

    def send(self, fields: dict[str, Any], **headers: str) -> HTTPConnection:
        """Sends a request for a completion, whose answer is not read yet."""
        link = HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        headers = {"content-type": "application/json", **headers}
        link.request("POST", COMPLETIONS, json.dumps({"model": "any", **fields}), headers)
        return link

    def ask(self, fields: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body of the answer to a completion."""
        with contextlib.closing(self.send(fields, **headers)) as link:
            answer = link.getresponse()
            return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def serving(*options: str, program: Sequence[str] = OURS) -> Iterator[Server]:
    """A server that runs while the block does. Raises SparseKVError if it ends before.

    program: a server that prints its address.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*program, *options], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY_S
            while True:
                log.seek(0)
                said = log.read()
                if at := re.search(r"http://[^:\s]+:(\d+)", said):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SparseKVError(f"the server does not start: {said[-300:].strip()}")
                time.sleep(0.1)
            yield Server(int(at[1]), process.pid, log)
            if process.poll() is not None:
                raise SparseKVError(f"the server has ended with {process.returncode}")
        finally:
            process.terminate()
            process.wait()
