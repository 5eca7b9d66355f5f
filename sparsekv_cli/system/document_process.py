"""Reads a document in another process, because a document of other people may need much work.

``python -m sparsekv_cli.system.document_process MOST`` is that process. It reads stdin: a name, a
line break and the document. It prints {"text": text} or {"error": text}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache, lru_cache
from threading import Lock

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.documents import document_text
from sparsekv_cli.system.work import answer_of, limit_work

SECONDS, BYTES = 30, 1 << 30  # limits of CPU time and of address space
WAIT_S = 120.0  # seconds to wait for the process
MOST_TEXT = 16 << 20  # most bytes of a document's text in a message


def command(most: int) -> list[str]:
    """Returns the command line of the process. most: most bytes of the text."""
    return [sys.executable, "-m", "sparsekv_cli.system.document_process", str(most)]


def text_of(said: bytes, name: str) -> str:
    """Returns the text in the output ``said`` of the process. Raises SparseKVError if it has none.

    name: the document's name, for the error.
    """
    return answer_of(said, name, SECONDS, BYTES, "split it, or give its text")["text"]


def read_apart(data: bytes, name: str) -> str:
    """Returns the text of a document. Raises SparseKVError, which has ``name``."""
    name = " ".join(name.split())
    with _turn():
        return text_of(_said(data, name), name)


@cache
def _turn() -> Lock:
    return Lock()


@lru_cache(8)  # a conversation sends the same documents with each message
def _said(data: bytes, name: str) -> bytes:
    question = name.encode(errors="replace") + b"\n" + data
    try:
        done = subprocess.run(
            command(MOST_TEXT), input=question, capture_output=True, timeout=WAIT_S, check=False
        )
        return b"" if done.returncode else done.stdout
    except subprocess.TimeoutExpired:
        return b""


def main(most: int) -> None:
    """Runs the process. most: most bytes of the text."""
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
