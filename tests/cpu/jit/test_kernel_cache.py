"""Kernels kept on disk: what a process does with a cache that is damaged, full or not its own.

Each test runs a small kernel with a cache folder of its own. Where a process must start or end, it
is another one.
"""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numba import types
from sweeps import sweep
from tiny_models import make_model

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.compiling import kernel_cache
from sparsekv_cli.cpu.jit.compiling.store import KernelStore
from sparsekv_cli.cpu.jit.kernel import njit

PROGRAM = """
{first}
import numpy as np
from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.install import install
install()
{before}
assert llvm.sum_squares(np.full(100, 2, np.float32)) == 400
hits = sum(llvm.sum_squares.stats.cache_hits.values())
print("loaded" if hits else "compiled")
"""
NOBODY = 65534


def start(cache: Path, before: str = "", first: str = "") -> subprocess.Popen[str]:
    """A process that runs the kernel ``sum_squares`` after the statements ``before``, and ``first``
    before it imports anything.
    """
    return subprocess.Popen(
        [
            sys.executable, "-c",
            PROGRAM.format(before=textwrap.dedent(before), first=textwrap.dedent(first)),
        ],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> tuple[str, str]:
    """How the kernel came to the process, "compiled" or "loaded", and what was said on stderr."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip(), err


Run = Callable[[Path], tuple[str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``finished`` of a run in this process, of a kernel that is new to it."""

    def run_here(cache: Path) -> tuple[str, str]:
        monkeypatch.setattr(kernel_cache, "STORE", KernelStore(cache / "sparsekv-cli" / "kernels"))
        kernel = njit(cache=True, nogil=True)(llvm.sum_squares.py_func)
        assert kernel(np.full(100, 2, np.float32)) == 400
        hits = sum(kernel.stats.cache_hits.values())
        return "loaded" if hits else "compiled", capsys.readouterr().err

    return run_here


def kernel_files(cache: Path) -> list[Path]:
    """Files with content, which lock files have not."""
    return [path for path in cache.rglob("*sum_squares*") if path.stat().st_size]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the kernel."""
    cache = tmp_path_factory.mktemp("cache")
    assert finished(start(cache)) == ("compiled", "")
    return cache


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def flipped(data: bytes) -> bytes:
    at = 2 * len(data) // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_another_process_loads_what_the_first_has_compiled(cache, run):
    assert finished(start(cache)) == ("loaded", "")
    assert run(cache) == ("loaded", "")


def test_a_loaded_kernel_has_no_ir_to_copy(cache, monkeypatch):
    """Without an error LLVM would let a function call the place of the kernel's name."""
    monkeypatch.setattr(kernel_cache, "STORE", KernelStore(cache / "sparsekv-cli" / "kernels"))
    kernel = njit(cache=True, nogil=True)(llvm.sum_squares.py_func)
    kernel.compile((types.float32[::1],))
    (loaded,) = kernel.overloads.values()
    with pytest.raises(RuntimeError, match="sum_squares is called by a function that is no"):
        loaded.library._get_module_for_linking()


OTHERS = """
from numba import njit, vectorize

@njit(cache=True)
def f(x):
    return max(x, 2.0) ** 2

@njit(cache=True)
def g(x):
    return f(x) + 1

@vectorize
def u(x):
    return f(x) + 1
"""


def test_functions_of_other_packages_are_kept_apart(tmp_path):
    """A process without this package would call a callee, which has no code."""
    (tmp_path / "others.py").write_text(OTHERS)
    ours = "from sparsekv_cli.cpu.jit.install import install\ninstall()\n"
    for first, call in (
        (ours, "g(3.0)"),
        ("", "f(3.0) + 1"),
        (ours, "f(3.0) + 1"),
        (ours, "u(3.0)"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", f"{first}from others import *\nprint({call})"],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, cwd=tmp_path,
            capture_output=True, text=True,
        )  # fmt: skip
        assert (run.returncode, run.stdout) == (0, "10.0\n"), run.stderr


STEP = """
import sys
from pathlib import Path
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig
model = load_model(Path(sys.argv[1]), build_method("full", {}), SessionConfig(threads=1))
sequence = model.sequence()
sequence.prefill([1, 2, 3])
sequence.decode(4)
print([name for name in ("numba.cpython.printimpl", "torch", "docx") if name in sys.modules])
"""


def test_a_step_with_kernels_from_disk_starts_no_compiler(tmp_path):
    """numba's compiler takes a fifth of the time from the start to the first token."""
    path = make_model(tmp_path / "model.gguf")
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", STEP, str(path)],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "damaged",
    sweep([lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-1], flipped]),
    ids=["empty", "half", "last byte", "flipped"],
)
def test_a_damaged_file_is_compiled_again(cache, damaged, run):
    files = kernel_files(cache)
    assert files
    for path in files:
        path.write_bytes(damaged(path.read_bytes()))
    assert run(cache) == ("compiled", "")
    assert run(cache) == ("loaded", "")


def test_a_full_disk_stops_nothing(tmp_path, run, monkeypatch):
    def replace(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", replace)
    how, said = run(tmp_path)
    assert how == "compiled" and said.count("\n") == 1
    assert str(tmp_path) in said and "No space left" in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def test_only_the_user_may_read_or_write_what_is_kept(tmp_path, run):
    old = os.umask(0)
    try:
        run(tmp_path)
    finally:
        os.umask(old)
    files = kernel_files(tmp_path)
    assert files
    for path in files:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_not_loaded_from(cache, run):
    folder = kernel_files(cache)[0].parent
    folder.chmod(0o777)
    how, said = run(cache)
    assert how == "compiled" and said.count("\n") == 1 and str(folder) in said
    assert "others may write" in said


def test_a_folder_of_another_user_is_not_loaded_from(cache, run, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    how, said = run(cache)
    assert how == "compiled" and said.count("\n") == 1
    assert str(kernel_files(cache)[0].parent) in said and "another user" in said


@pytest.fixture
def read_only(filled: Path) -> Iterator[Path]:
    """A copy of the cache, which its user, who is not root, may read and not write."""
    with tempfile.TemporaryDirectory() as place:
        cache = Path(shutil.copytree(filled, Path(place) / "cache"))
        for path in [Path(place), cache, *cache.rglob("*")]:
            path.chmod(0o500 if path.is_dir() else 0o400)
            if os.geteuid() == 0:
                os.chown(path, NOBODY, NOBODY)
        yield cache
        for path in [Path(place), *Path(place).rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_cache_that_cannot_be_written_is_read(read_only, run):
    before = sorted(read_only.rglob("*"))
    with without_root():
        assert run(read_only) == ("loaded", "")
    assert sorted(read_only.rglob("*")) == before


def test_a_kernel_that_cannot_be_kept_is_compiled(read_only, run):
    (path,) = kernel_files(read_only)
    path.parent.chmod(0o700)
    path.unlink()
    path.parent.chmod(0o500)
    with without_root():
        how, said = run(read_only)
    assert how == "compiled" and said.count("\n") == 1 and str(path.parent) in said
    assert "Permission denied" in said and not kernel_files(read_only)


def test_nothing_is_written_beside_the_sources(tmp_path, run):
    (tmp_path / "file").write_text("")
    how, said = run(tmp_path / "file" / "cache")  # where no folder can be
    assert how == "compiled" and said.count("\n") == 1 and str(tmp_path) in said
    beside = Path(__file__).parents[3] / "cpu" / "jit"
    assert not [path for path in beside.rglob("*") if path.suffix in (".nbi", ".nbc", ".kernel")]


@pytest.mark.slow
def test_processes_that_start_together_compile_once(cache):
    for path in kernel_files(cache):
        path.unlink()
    together = """
        import time
        from numba.core import typed_passes
        lower = typed_passes.NativeLowering.run_pass
        def slowly(self, state):
            time.sleep(3)  # until the others wait, too
            return lower(self, state)
        typed_passes.NativeLowering.run_pass = slowly
    """
    processes = [start(cache, together) for _ in range(3)]
    ends = [finished(process) for process in processes]
    assert sorted(out for out, _ in ends) == ["compiled", "loaded", "loaded"]
    waiting = [err for _, err in ends if err]
    assert len(waiting) == 2
    for said in waiting:
        assert said == "waiting for another process that compiles sum_squares\n"


def test_an_interrupt_within_llvm_is_neither_lost_nor_printed(cache):
    """LLVM hands machine code over by a callback, whose exceptions Python prints and drops."""
    first = """
        import os, signal
        from numba.core import codegen
        library = codegen.CPUCodeLibrary
        take = library._object_compiled_hook.__func__
        is_now = False
        def interrupted(cls, *rest):
            if is_now:
                os.kill(os.getpid(), signal.SIGINT)
            return take(cls, *rest)
        library._object_compiled_hook = classmethod(interrupted)
    """
    before = """
        is_now = True
        try:
            llvm.sum_squares(np.ones(16, np.float32))
        except KeyboardInterrupt:
            print("interrupted")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    """
    for path in kernel_files(cache):
        path.unlink()
    how, said = finished(start(cache, before, first))
    assert how.startswith("interrupted\n") and said == ""
