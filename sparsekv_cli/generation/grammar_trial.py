"""Reads the grammars of requests in a separate process, which ends if one takes too long.

llguidance has no limit of time, and nothing else ends its work: some schemas of a hundred bytes
take minutes. ``python -m sparsekv_cli.generation.grammar_trial MODEL SECONDS`` is that process.
Each line of stdin is a JSON list of kind and text. The process answers it with a line of stdout:
{"definition": text} or {"error": text}.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.sampling.grammar import Grammar, read_grammar
from sparsekv_cli.system.work import limit_work

BYTES = 3 << 30  # address space of the process
START_S, WAIT_S = 120.0, 30.0  # seconds for a start and a grammar, on a busy machine
N_KNOWN = 256  # grammars that are remembered
N_WAITING = 4  # grammars that are being read or wait


class GrammarTrial:
    """Reads grammars for one model; any thread may call ``read``.

    model: the model's file. seconds: CPU time that a grammar may take. The process starts with the
    first grammar.
    """

    def __init__(self, model: Path, seconds: int = 4) -> None:
        self._model, self._seconds = model, seconds
        self._lock, self._places = threading.Lock(), threading.Semaphore(N_WAITING)
        self._process: subprocess.Popen[bytes] | None = None
        self.read = lru_cache(N_KNOWN)(self._read)

    def _read(self, kind: str, text: str) -> Grammar:
        """See ``read_grammar``. Also raises SparseKVError for a grammar that takes too long."""
        if not self._places.acquire(blocking=False):
            raise BusyError("other grammars are being read: try again later")
        try:
            with self._lock:
                line = self._ask(json.dumps([kind, text]).encode() + b"\n")
        finally:
            self._places.release()
        if not line:
            raise SparseKVError(
                f"--{kind}: it takes more than {self._seconds} s or {BYTES >> 30} GiB to read: "
                "make it simpler"
            )
        answer: dict[str, str] = json.loads(line)
        if "error" in answer:
            raise SparseKVError(answer["error"])
        return Grammar(kind, answer["definition"])

    def _ask(self, line: bytes) -> bytes:
        """Returns the process's answer to a line; empty if it ended. The next line restarts it."""
        process = self._process
        if process is None:
            options = [str(self._model), str(self._seconds)]
            command = [sys.executable, "-m", __spec__.name, *options]
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )  # its own session: an interrupt at the terminal does not reach it
            _line_of(process, START_S)  # its first line: it has started
        assert process.stdin is not None
        answer = b""
        with contextlib.suppress(OSError):
            process.stdin.write(line)
            process.stdin.flush()
            answer = _line_of(process, WAIT_S)
        if not answer:
            self._end()
        return answer

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _line_of(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Returns the next line of a process. Ends the process if there is none in time."""
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def main(model: str, seconds: int, questions: IO[str], answers: IO[str]) -> None:
    """Runs the process: answers each line of ``questions``."""
    from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint
    from sparsekv_cli.models.gguf.file import open_gguf
    from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

    os.nice(10)
    with open_gguf(Path(model), header_only=True) as file:
        tokenizer = load_tokenizer(file.metadata)

    def make(grammar: Grammar) -> None:
        new_constraint(tokenizer, SamplingOptions({}, grammar=grammar), None)

    make(read_grammar("regex", "a"))  # reads the vocabulary
    answer: dict[str, Any] = {}
    print(json.dumps(answer), file=answers, flush=True)
    for line in questions:
        kind, text = json.loads(line)
        limit_work(seconds, BYTES)
        try:
            grammar = read_grammar(kind, text)
            make(grammar)
            answer = {"definition": grammar.definition}
        except SparseKVError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.stdin, sys.stdout)
