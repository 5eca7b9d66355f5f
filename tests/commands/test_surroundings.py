"""The commands where the environment, the locale or the limits of a process are odd."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from sparsekv_cli.cli import describe

pytestmark = pytest.mark.slow

PROGRAM = [sys.executable, "-m", "sparsekv_cli"]
POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(
    *arguments: str | bytes, environment: Mapping[str, str] | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        input=stdin,
        env={**os.environ, **(environment or {})},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NUMBA_DISABLE_JIT", "1"),
        ("NUMBA_NUM_THREADS", "0"),
        ("NUMBA_NUM_THREADS", "-3"),
        ("NUMBA_THREADING_LAYER", "nonsense"),
        ("NUMBA_CPU_NAME", "generic"),
    ],
)
def test_what_numba_is_told_and_cannot_work_is_a_line(name, value):
    done = run("methods", environment={name: value})
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.startswith(f"error: {name}".encode()) and done.stderr.count(b"\n") == 1


def test_a_warning_of_a_library_is_a_line():
    done = run("methods", environment={"NUMBA_OPT": "x"})
    assert done.returncode == 0 and b"lfps" in done.stdout
    assert done.stderr.startswith(b"warning: ") and done.stderr.count(b"\n") == 1
    assert b"NUMBA_OPT" in done.stderr


def with_limit(name: str, value: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in a process that sets a limit of its own once the program is loaded."""
    program = (
        "import resource, sys\nfrom sparsekv_cli.cli import main\n"
        f"resource.setrlimit(resource.{name}, ({value}, {value}))\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RLIMIT_NOFILE", 4),
        ("RLIMIT_NOFILE", 5),
        ("RLIMIT_FSIZE", 0),
        *[("RLIMIT_AS", mebibytes << 20) for mebibytes in (60, 150, 250, 300)],
    ],
)
def test_a_limit_is_a_line_or_no_hindrance(name, value, tiny_model):
    arguments = ("run", "-m", str(tiny_model(wtype="Q8_0")), "-p", "x", "-n", "2", "-t", "1")
    assert run(*arguments).returncode == 0  # compiles what is not compiled yet
    done = with_limit(name, value, *arguments)
    assert done.returncode in (0, 1)
    said = done.stderr.splitlines()
    if done.returncode == 0:
        assert len(said) <= 2  # a warning, and the speed
    else:
        assert "unexpected" not in done.stderr and "Traceback" not in done.stderr
        assert said[-1].startswith(("error: ", "OpenBLAS error: Memory"))
        aborted = "its words are above" in said[-1]
        assert aborted or len(said) == 1


@pytest.mark.parametrize("n", [3, 4, 8])
def test_too_few_open_files_are_one_line_that_says_what_to_do(n, tiny_model):
    for command in ("run", "serve"):
        more = () if command == "serve" else ("-p", "x", "-n", "2")
        model = str(tiny_model(wtype="Q8_0"))
        done = with_limit("RLIMIT_NOFILE", n, command, "-m", model, "-t", "1", *more)
        if command == "run" and n == 8 and done.returncode == 0:
            continue
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert "ulimit -n" in done.stderr


def test_a_library_that_finds_no_room_is_out_of_memory():
    try:
        try:
            raise OSError("libx.so: failed to map segment from shared object")
        except OSError as error:
            raise ImportError("please read this for advice") from error
    except ImportError as error:
        assert describe(error).startswith("out of memory")
    assert describe(ImportError("no module x")).startswith("unexpected ImportError")
    silent = SystemError("error return without exception set")  # an import that found no room
    assert describe(silent).startswith("out of memory")


@pytest.mark.parametrize("environment", [{}, POSIX])
def test_utf8_in_every_locale(environment, tiny_model):
    text, model = "Zürich ✓", str(tiny_model(wtype="Q8_0"))
    as_options = [text], ["-p", text], ["-f", "-"]
    expected = None
    for arguments in as_options:
        stdin = text.encode() if "-f" in arguments else b""
        tokenize = ["tokenize", "-m", model, "--json", *arguments]
        done = run(*tokenize, environment=environment, stdin=stdin)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.decode("utf-8"))
        assert "Z" in found["tokens"] and found == (expected or found)
        expected = found
    for arguments in ([b"Z\xffrich"], [b"-p", b"Z\xffrich"]):
        done = run("tokenize", "-m", model, *arguments, environment=environment)
        assert done.returncode == 1 and b"not UTF-8: byte 0xff at offset 1" in done.stderr


def test_stdout_is_utf8_in_every_locale(tiny_model, tmp_path):
    file = tmp_path / "ü.txt"
    file.write_text("é", encoding="utf-8")
    arguments = ("tokenize", "-m", str(tiny_model(wtype="Q8_0")), "--no-bos", "-f", str(file))
    plain, posix = run(*arguments), run(*arguments, environment=POSIX)
    assert plain.returncode == 0 and (posix.returncode, posix.stdout) == (0, plain.stdout)


def test_texts_of_options_are_utf8(tiny_model):
    command = ["run", "-m", str(tiny_model(wtype="Q8_0")), "-p", "x"]
    for option in ("-sys", "--stop", "--dry-sequence-breaker"):
        done = run(*command, option, b"\xff")
        assert done.returncode == 1 and b"is not UTF-8: byte 0xff" in done.stderr
        assert done.stderr.count(b"\n") == 1
