"""The process that reads grammars: limits of its work, and what ends or stops it."""

import fcntl
import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.generation import grammar_trial
from sparsekv_cli.generation.grammar_trial import N_WAITING, GrammarTrial
from sparsekv_cli.sampling.grammar import read_grammar

SLOW = '{"type": "integer", "multipleOf": 999983}'  # a quarter of a minute for llguidance


@pytest.fixture(scope="module")
def shared(tiny_model) -> Iterator[GrammarTrial]:
    trial = GrammarTrial(tiny_model(wtype="Q8_0"), seconds=1)
    trial.start()
    yield trial
    trial.close()


@pytest.fixture
def trial(shared, monkeypatch) -> GrammarTrial:
    """A process that has started, and a trial that does not wait."""
    shared.read("regex", "begin")
    monkeypatch.setattr(shared, "_wait_s", 0.05)
    return shared


def process_of(trial: GrammarTrial) -> int:
    assert trial._process is not None
    return trial._process.pid


def patient(trial: GrammarTrial, text: str) -> str:
    trial._wait_s = 60.0
    return trial.read("regex", text).definition


def test_a_grammar_that_takes_too_long_is_refused(shared):
    """The next grammar is read again. The same one is refused without another process."""
    with pytest.raises(SparseKVError, match=r"json-schema: it takes more than 1 s"):
        shared.read("json-schema", SLOW)
    process = process_of(shared)
    for _ in range(2):
        with pytest.raises(SparseKVError, match=r"takes more than 1 s") as caught:
            shared.read("json-schema", SLOW)
        assert not isinstance(caught.value, BusyError)
    assert shared.read("regex", "a+") == read_grammar("regex", "a+")
    with pytest.raises(SparseKVError, match="regex"):
        shared.read("regex", "(")
    assert process_of(shared) == process


def test_a_busy_machine_is_no_fault_of_a_grammar(trial):
    """A stopped process stands for one that gets no time. Its work goes on after the answer."""
    process = process_of(trial)
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(BusyError, match="busy: try again later"):
            trial.read("regex", "b+")
    finally:
        os.kill(process, signal.SIGCONT)
    assert patient(trial, "b+") == read_grammar("regex", "b+").definition
    assert process_of(trial) == process


def n_unread(trial) -> int:
    """Bytes that were written to the process and that it has not read."""
    found = fcntl.ioctl(trial._process.stdin.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)


def test_a_process_that_is_killed_starts_again(trial):
    os.kill(process_of(trial), signal.SIGKILL)
    trial._process.wait()
    assert patient(trial, "c+") == read_grammar("regex", "c+").definition
    os.kill(process_of(trial), signal.SIGSTOP)
    caught: list[Exception] = []

    def ask() -> None:
        try:
            trial.read("regex", "d+")
        except SparseKVError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not n_unread(trial):
        pass
    os.kill(process_of(trial), signal.SIGKILL)
    thread.join()
    assert [type(each) for each in caught] == [BusyError]
    assert patient(trial, "d+") == read_grammar("regex", "d+").definition


def test_many_requests_wait_in_bounds(trial):
    """Beyond the places a request gets an answer at once, and one for a known grammar its own."""
    process = process_of(trial)
    os.kill(process, signal.SIGSTOP)
    try:
        for i in range(N_WAITING):
            with pytest.raises(BusyError, match="not read after"):
                trial.read("regex", f"e{i}")
        with pytest.raises(BusyError, match="other grammars"):
            trial.read("regex", "f")
        assert trial.read("regex", "begin") == read_grammar("regex", "begin")
    finally:
        os.kill(process, signal.SIGCONT)
    assert patient(trial, "e7") == read_grammar("regex", "e7").definition
    assert trial._n_waiting == 0


def test_the_same_grammar_is_read_once(trial, monkeypatch):
    asked: list[bytes] = []
    ask = trial._ask
    monkeypatch.setattr(trial, "_ask", lambda line: (asked.append(line), ask(line))[1])
    trial._wait_s = 60.0
    threads = [threading.Thread(target=trial.read, args=("regex", "g+")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1


def test_a_process_that_cannot_start(tmp_path, capfd):
    trial = GrammarTrial(tmp_path / "gone.gguf")
    try:
        with pytest.raises(BusyError, match="has ended"):
            trial.read("regex", "a")
    finally:
        trial.close()
    capfd.readouterr()


def test_an_end_while_a_request_waits(tiny_model, monkeypatch):
    trial = GrammarTrial(tiny_model(wtype="Q8_0"))
    trial.start()
    errors: list[Exception] = []

    def ask(text: str) -> None:
        try:
            trial.read("regex", text)
        except SparseKVError as error:
            errors.append(error)

    os.kill(process_of(trial), signal.SIGSTOP)
    threads = [threading.Thread(target=ask, args=(text,)) for text in ("a", "b")]
    for thread in threads:
        thread.start()
    while trial._n_waiting < 2:
        pass
    trial.close()
    for thread in threads:
        thread.join()
    assert [type(each) for each in errors] == [BusyError, BusyError]
    with pytest.raises(BusyError):
        trial.read("regex", "a")


def test_without_llguidance(tmp_path, monkeypatch):
    def missing() -> None:
        raise SparseKVError("constrained answers need llguidance")

    monkeypatch.setattr(grammar_trial, "require_llguidance", missing)
    trial = GrammarTrial(tmp_path / "any.gguf")
    trial.start()
    assert trial._process is None
    with pytest.raises(SparseKVError, match="need llguidance"):
        trial.read("regex", "a")
    trial.close()
