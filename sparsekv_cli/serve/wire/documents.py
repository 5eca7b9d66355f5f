"""The texts of documents. A separate process reads each one, and ends with its client.

``python -m sparsekv_cli.serve.wire.documents MOST`` is that process. Its stdin is a name, a line
break and the document. It prints {"text": text} or {"error": text}.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.system.documents import document_text, kind_of
from sparsekv_cli.system.work import limit_work

SECONDS, BYTES = 30, 1 << 30  # of computing and of addresses that a document may take
WAIT_S = 120.0  # that it may take on a busy machine
N_WAITING = 2  # documents: one is read, another one waits


class Documents:
    """Reads documents, one at a time. most: bytes of a text."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turn, self._n_waiting = asyncio.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def end(self) -> None:
        """Ends the reading, because the server ends."""
        self._has_ended = True
        if self._process is not None:
            self._process.kill()

    async def read(self, data: bytes, name: str) -> str:
        """See ``document_text``. Raises SparseKVError also for a document that takes too long."""
        if not kind_of(data):
            raise SparseKVError(f"{name} is no PDF or Word file: send its text in a message")
        if self._n_waiting >= N_WAITING:
            raise BusyError("the server is reading other documents: try again later")
        self._n_waiting += 1
        try:
            async with self._turn:
                said = b"" if self._has_ended else await self._ask(name.encode() + b"\n" + data)
        finally:
            self._n_waiting -= 1
        if self._has_ended:
            raise BusyError("the server ends: try again later")
        if not said:
            raise SparseKVError(
                f"{name} takes more than {SECONDS} s or {BYTES >> 30} GiB to read: split it, or "
                "give its text"
            )
        answer: dict[str, str] = json.loads(said)
        if "error" in answer:
            raise SparseKVError(answer["error"])
        return answer["text"]

    async def _ask(self, question: bytes) -> bytes:
        """Returns the output of a process, or nothing if the process failed."""
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(self._most)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip  # a session of its own: an interrupt at the terminal is not for it
        try:
            said, _ = await asyncio.to_thread(process.communicate, question, WAIT_S)
            return b"" if process.returncode else said
        except subprocess.TimeoutExpired:
            return b""
        finally:
            process.kill()


def main(most: int) -> None:
    """The process."""
    os.nice(10)
    limit_work(SECONDS, BYTES)
    name, _, data = sys.stdin.buffer.read().partition(b"\n")
    source = name.decode()
    try:
        answer = {"text": document_text(data, source)}
        if (n_bytes := len(answer["text"].encode())) > most:
            raise SparseKVError(
                f"{source} has {n_bytes} bytes of text, more than {most}, the limit of serve "
                "--max-body: split it"
            )
    except SparseKVError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
