"""Reads the grammars of requests in another process, which is ended if one takes too long.

llguidance has no limit of time, and a thread cannot be stopped. Some schemas of a hundred bytes
take minutes. The process is ``python -m sparsekv_cli.generation.grammar_trial MODEL SECONDS``. It
reads lines of stdin, each a JSON list of kind and text. It answers each with a line on stdout:
{"definition": text} or {"error": text}.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.sampling.grammar import Grammar, read_grammar, require_llguidance
from sparsekv_cli.system.work import answer_of, limit_work

BYTES = 3 << 30  # address space of the process
WAIT_S = 30.0  # seconds that a request waits; the process goes on and its result is stored
MOST_S = 600.0  # seconds after which the process is killed, in case something has stopped it
N_KNOWN = 256  # results that are stored
N_WAITING = 8  # most requests that wait for a grammar, and most grammars that are not read yet
# Signals of other programs. If one of them ended the process, the grammar is not to blame.
FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}


class GrammarTrial:
    """Reads grammars for one model in another process. Any thread may call ``read``.

    model: the model's file. seconds: CPU seconds that one grammar may take. wait_s: most seconds
    that ``read`` waits. ``start`` starts the process early, before the first grammar.
    """

    def __init__(self, model: Path, seconds: int = 4, wait_s: float = WAIT_S) -> None:
        self._model, self._seconds, self._wait_s = model, seconds, wait_s
        self._lock, self._n_waiting, self._is_closed = threading.Lock(), 0, False
        self._process: subprocess.Popen[bytes] | None = None
        self._is_new = False  # whether the process's first line, which reports its start, is unread
        self._thread = ThreadPoolExecutor(1, "grammars")  # sends lines to the process
        self._known: OrderedDict[tuple[str, str], Future[Grammar]] = OrderedDict()

    def start(self) -> None:
        """Starts the process. Does nothing if llguidance is missing."""
        with contextlib.suppress(SparseKVError):
            require_llguidance()
            self._running()

    def read(self, kind: str, text: str) -> Grammar:
        """Returns the grammar, as ``read_grammar`` does. Raises SparseKVError if it takes too long.

        Raises BusyError if it is not read in time for another reason. The caller may try again.
        """
        require_llguidance()
        future = self._future((kind, text))
        try:
            return future.result(self._wait_s)
        except TimeoutError:
            raise BusyError(
                f"{kind}: it is not read after {self._wait_s:g} s, because the machine is busy: "
                "try again later"
            ) from None
        except CancelledError:
            raise _busy("the server ends") from None
        finally:
            with self._lock:
                self._n_waiting -= 1

    def _future(self, place: tuple[str, str]) -> Future[Grammar]:
        """Returns the future of a grammar, which several requests may share.

        Counts one more waiter. Raises BusyError if too many requests wait, or the server ends.
        """
        with self._lock:
            future = self._known.get(place)
            n_unread = sum(not each.done() for each in self._known.values())
            is_full = self._n_waiting >= N_WAITING or (future is None and n_unread >= N_WAITING)
            if is_full and (future is None or not future.done()):
                raise _busy("other grammars are being read")
            if self._is_closed:
                raise _busy("the server ends")
            if future is None:
                future = self._known[place] = self._thread.submit(self._read, *place)
            self._known.move_to_end(place)
            if len(self._known) > N_KNOWN:
                self._known.popitem(last=False)
            self._n_waiting += 1
        return future

    def _read(self, kind: str, text: str) -> Grammar:
        """Returns the grammar that the process has read. Runs on ``_thread``."""
        try:
            line = self._ask(json.dumps([kind, text]).encode() + b"\n")
        except BusyError:
            with self._lock:
                self._known.pop((kind, text), None)  # the next request tries again
            raise
        answer = answer_of(line, f"--{kind}: it", self._seconds, BYTES, "make it simpler")
        return Grammar(kind, answer["definition"])

    def _ask(self, line: bytes) -> bytes:
        """Sends a line. Returns the process's answer; empty if the grammar ended the process.

        Raises BusyError if something else ended it. A new process starts at once.
        """
        process = self._running()
        assert process.stdin is not None
        has_started = not self._is_new or _line_of(process) != b""
        said, self._is_new = b"", False
        with contextlib.suppress(OSError):
            process.stdin.write(line)
            process.stdin.flush()
            said = _line_of(process)
        if not said:
            code = _end(process)
            self.start()
            if not has_started or code in FROM_OUTSIDE:
                raise _busy("the process that reads grammars has ended")
        return said

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process, and starts one if none runs. Raises BusyError if that fails."""
        with self._lock:
            process = self._process
            if self._is_closed:
                raise _busy("the server ends")
            if process is None or process.poll() is not None:
                options = [str(self._model), str(self._seconds)]
                command = [sys.executable, "-m", __spec__.name, *options]
                try:
                    process = self._process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                        start_new_session=True,
                    )  # fmt: skip  # its own session: an interrupt at the terminal is not for it
                except OSError as error:
                    raise _busy(f"no process starts: {error.strerror}") from None
                self._is_new = True
            return process

    def close(self) -> None:
        """Ends the process. All calls of ``read`` that wait raise BusyError."""
        with self._lock:
            self._is_closed, process = True, self._process
        if process is not None:
            process.kill()
        self._thread.shutdown(cancel_futures=True)
        if process is not None:
            _end(process)


def _busy(reason: str) -> BusyError:
    return BusyError(f"{reason}: try again later")


def _line_of(process: subprocess.Popen[bytes]) -> bytes:
    """Returns the next line of a process; empty if the process ends instead."""
    assert process.stdout is not None
    timer = threading.Timer(MOST_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[bytes]) -> int:
    """Closes the pipes of a process, which makes it end. Returns its exit code."""
    assert process.stdin is not None and process.stdout is not None
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
    return process.wait()


def main(model: str, seconds: int, questions: IO[str], answers: IO[str]) -> None:
    """Runs the process: writes an answer for each line of ``questions``."""
    from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint
    from sparsekv_cli.models.gguf.file import open_gguf
    from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

    with open_gguf(Path(model), header_only=True) as file:
        tokenizer = load_tokenizer(file.metadata)

    def make(grammar: Grammar) -> None:
        new_constraint(tokenizer, SamplingOptions({}, grammar=grammar), None)

    make(read_grammar("regex", "a"))  # the first grammar reads the vocabulary, which takes long
    answer: dict[str, Any] = {}
    print(json.dumps(answer), file=answers, flush=True)
    os.nice(10)  # a request may wait for the start, but answers do not wait for grammars
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
