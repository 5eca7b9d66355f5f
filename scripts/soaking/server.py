"""A server in a process of its own, and what it tells of itself."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from sparsekv_cli.errors import SparseKVError

READY_S, ANSWER_S = 120.0, 600.0
COMPLETIONS = "/v1/completions"
TEXT = Path(__file__).resolve().parents[1] / "accuracy" / "texts" / "prose.txt"


class Server(NamedTuple):
    """A server that runs."""

    port: int
    pid: int

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)

    def metrics(self) -> Mapping[str, float]:
        """Returns the numbers of /metrics; those with labels are added up."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            text = answer.read().decode()
        found = Counter[str]()
        for name, n in re.findall(r"(?m)^sparsekv_(\w+)(?:{.*})? (\S+)$", text):
            found[name] += float(n)
        return found

    def send(self, fields: dict[str, Any], **headers: str) -> HTTPConnection:
        """Sends a request for a completion, whose answer is not read yet."""
        link = self.connect()
        headers = {"content-type": "application/json", **headers}
        link.request("POST", COMPLETIONS, json.dumps({"model": "any", **fields}), headers)
        return link

    def ask(self, fields: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        """Returns the status and the body of the answer to a completion."""
        with contextlib.closing(self.send(fields, **headers)) as link:
            answer = link.getresponse()
            return answer.status, json.loads(answer.read())


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """A server that runs while the block does. Raises SparseKVError if it ends before."""
    command = [sys.executable, "-m", "sparsekv_cli", "serve", "-m", str(model), "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + READY_S
            while True:
                log.seek(0)
                said = log.read()
                if at := re.search(r"http://[^:]+:(\d+)/", said):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SparseKVError(f"the server does not start: {said[-300:].strip()}")
                time.sleep(0.1)
            yield Server(int(at[1]), process.pid)
            if process.poll() is not None:
                raise SparseKVError(f"the server has ended with {process.returncode}")
        finally:
            process.terminate()
            process.wait()
