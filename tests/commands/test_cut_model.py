"""A model file that is cut while it is mapped: one line, exit code 1, JSON valid or empty."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Cuts the file FILE at MOMENT of the command that follows.
PROGRAM = """
import os, sys, time
from sparsekv_cli import model
from sparsekv_cli.cli import main
from sparsekv_cli.commands.bench.report import JsonReport
from sparsekv_cli.models.decoder import Decoder
from sparsekv_cli.models.forward import Progress

moment, file, *arguments = sys.argv[1:]
seen = []

def cut_ahead_of(owner, name, is_now=lambda: True):
    function = getattr(owner, name)

    def cutting(*args, **keywords):
        seen.append(name)
        if is_now():
            os.truncate(file, 0)
        return function(*args, **keywords)

    setattr(owner, name, cutting)

if moment == "load":
    cut_ahead_of(model, "read_weights")
elif moment == "prefill":
    cut_ahead_of(Decoder, "forward_steps")
elif moment == "decode":
    cut_ahead_of(Decoder, "decode_batch", lambda: seen.count("decode_batch") == 4)
elif moment == "row":
    cut_ahead_of(JsonReport, "row", lambda: False)
    cut_ahead_of(Decoder, "decode_batch", lambda: "row" in seen)
elif moment == "bar":
    steps = Decoder.forward_steps

    def showing(self, ids, n_past, caches, **keywords):
        if "on_rows" in keywords:  # the prompt; kernels that are loaded have none
            yield Progress(1, 9, False)
            time.sleep(0.4)
            yield Progress(2, 9, False)
            os.truncate(file, 0)
        return (yield from steps(self, ids, n_past, caches, **keywords))

    Decoder.forward_steps = showing
main(arguments)
"""
FAST = ["-t", "1", "--repack", "off", "--prefill-dtype", "f32"]
RUN = ("run", "-p", "some words", "-n", "8", "--temp", "0", "--ignore-eos")
BENCH = ("bench", "-p", "4", "-n", "4", "-d", "0,8", "-r", "2", "-O", "json")
SHOW, HIDE = b"\x1b[?25h", b"\x1b[?25l"


@pytest.fixture(scope="module")
def whole(tiny_model: Callable[..., Path]) -> Path:
    """A model whose kernels are compiled, by the commands that are to be cut short."""
    path = tiny_model(wtype="Q8_0")
    for arguments in (RUN, BENCH):
        done = run("", str(path), *arguments)
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> str:
    """A copy of the test's own, to be cut."""
    return str(shutil.copy(whole, tmp_path / "model.gguf"))


def command(moment: str, model: str, *arguments: str) -> list[str]:
    name, *rest = arguments
    return [sys.executable, "-c", PROGRAM, moment, model, name, "-m", model, *FAST, *rest]


def run(moment: str, model: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(moment, model, *arguments),
        capture_output=True,
        encoding="utf-8",
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


@pytest.mark.parametrize("moment", ["load", "prefill", "decode"])
@pytest.mark.parametrize("as_json", [False, True])
def test_run(moment, as_json, model):
    done = run(moment, model, *RUN, *["--json"] * as_json)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {model}: ") and done.stderr.count("\n") == 1
    assert "start again" in done.stderr
    assert done.stdout == "" or (moment == "decode" and not as_json)


@pytest.mark.parametrize("moment", ["load", "prefill", "decode", "row"])
def test_bench(moment, model):
    done = run(moment, model, *BENCH)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {model}: ") and done.stderr.count("\n") == 1
    assert done.stdout == "" or isinstance(json.loads(done.stdout), list)


def test_chat_between_turns(model):
    arguments = command("", model, "chat", "-n", "4", "--temp", "0", "--ignore-eos")
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as chat:
        assert chat.stdin is not None and chat.stdout is not None and chat.stderr is not None
        chat.stdin.write(b"first\n")
        chat.stdin.flush()
        os.read(chat.stdout.fileno(), 1)  # of the first answer
        os.truncate(model, 100)
        chat.stdin.write(b"second\nthird\n")
        chat.stdin.close()
        said = chat.stderr.read().decode()
    assert chat.returncode == 1
    assert said.startswith(f"error: {model}: ") and said.count("\n") == 1


def test_chat_within_an_answer(model):
    done = subprocess.run(
        command("decode", model, "chat", "-n", "8", "--temp", "0", "--ignore-eos"),
        input=b"first\nsecond\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {model}: ".encode()) and done.stderr.count(b"\n") == 1


def test_a_bar_leaves_the_cursor_visible(model):
    terminal, end = pty.openpty()
    done = subprocess.Popen(
        command("bar", model, *RUN),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=end,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(end)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # how Linux tells that the other end is closed
        pass
    finally:
        os.close(terminal)
    done.communicate(timeout=120)
    assert done.returncode == 1
    assert HIDE in shown and shown.rindex(SHOW) > shown.rindex(HIDE)
    assert shown.splitlines()[-1].startswith(f"error: {model}: ".encode())
