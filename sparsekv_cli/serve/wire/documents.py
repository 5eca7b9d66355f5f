"""The texts of documents. A process of its own reads each one, and ends with its client."""

from __future__ import annotations

import asyncio
import subprocess

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.system.document_process import WAIT_S, command, text_of
from sparsekv_cli.system.documents import kind_of

N_WAITING = 2  # documents: one is being read, another one waits


class Documents:
    """Reads documents, one at a time. most: bytes of a text."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._turn, self._n_waiting = asyncio.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def end(self) -> None:
        """Ends the reading, because the server is ending."""
        self._has_ended = True
        if self._process is not None:
            self._process.kill()

    async def read(self, data: bytes, name: str) -> str:
        """See ``document_text``. Also raises SparseKVError for a document that takes too long."""
        if not kind_of(data):
            raise SparseKVError(f"{name} is no PDF or Word file: send a text in a message instead")
        if self._n_waiting >= N_WAITING:
            raise BusyError("other documents are being read: try again later")
        self._n_waiting += 1
        try:
            async with self._turn:
                said = b"" if self._has_ended else await self._ask(name.encode() + b"\n" + data)
        finally:
            self._n_waiting -= 1
        if self._has_ended:
            raise BusyError("the server ends: try again later")
        return text_of(said, name)

    async def _ask(self, question: bytes) -> bytes:
        """Returns the output of a process, or nothing if the process failed."""
        process = self._process = subprocess.Popen(
            command(self._most),
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
