"""Compiles kernels ahead of their first call, in several processes at once.

This process forks copies of itself. A copy makes the calls. It notes each kernel and its argument
types instead of running the kernel. Then it compiles the kernels that no other copy compiles. The
copies end when all kernels are on disk. This process loads them from there.
"""

import ast
import contextlib
import inspect
import os
import selectors
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from numba.core import dispatcher, types
from numba.core.compiler_lock import global_compiler_lock

from sparsekv_cli.cpu.jit.compiling import callees
from sparsekv_cli.cpu.jit.compiling.kernel_cache import STORE, KernelCache
from sparsekv_cli.cpu.jit.compiling.store import Busy
from sparsekv_cli.system.work import usable_cores

Call = Callable[[], object]
Report = Callable[[str, int, int], None]  # the current kernel, kernels done, kernels in all
SILENT_SECONDS = 120.0  # the copies are killed when none has reported for so long


class Kernel(NamedTuple):
    """A function and the types of its arguments."""

    function: Any  # numba's dispatcher
    signature: tuple[Any, ...]

    @property
    def name(self) -> str:
        return self.function.__name__

    def is_kept(self) -> bool:
        """Returns whether its machine code is on disk."""
        target = self.function.targetctx
        return STORE.has(self.function._cache.name(self.signature, target.codegen()))


@cache
def _returns_value(function: Any) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Return) and node.value for node in ast.walk(tree))


class _NoCode:
    """Replaces a compiled function where code asks for its address. The address is 0."""

    fndesc = library = property(lambda self: self)
    llvm_cfunc_wrapper_name = ""

    def get_pointer_to_function(self, name: str) -> int:
        return 0


def kernels_of(calls: Sequence[Call]) -> list[Kernel]:
    """Returns the kernels that ``calls`` need and that this process has not loaded.

    Only kernels that return a value are run. The results of the calls are therefore wrong.
    """
    noted: dict[Kernel, None] = {}
    kind = dispatcher.Dispatcher
    call, compiled = kind._compile_for_args, callees.compiled

    def note_call(self: Any, *args: Any, **keywords: Any) -> Any:
        if not isinstance(self._cache, KernelCache) or _returns_value(self.py_func):
            return call(self, *args, **keywords)
        omitted = dispatcher.OmittedArg
        signature = tuple(
            types.Omitted(a.value) if isinstance(a, omitted) else self.typeof_pyval(a) for a in args
        )
        noted[Kernel(self, signature)] = None
        return lambda *_, **__: None  # numba calls it instead of the kernel

    def note_address(function: Any, signature: tuple[Any, ...]) -> Any:
        noted[Kernel(function, signature)] = None
        return _NoCode()

    kind._compile_for_args, callees.compiled = note_call, note_address
    try:
        for each in calls:
            with contextlib.suppress(Exception):  # the wrong results may break Python code
                each()
    finally:
        kind._compile_for_args, callees.compiled = call, compiled
    return list(noted)


def _compile_in_copy(calls: Sequence[Call], number: int, pipe: int) -> None:
    """Compiles missing kernels in copy ``number`` of the process; reports in lines to ``pipe``."""
    parent = os.getppid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    missing = [kernel for kernel in kernels_of(calls) if not kernel.is_kept()]

    def tell(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    tell(f"{len(missing)} missing")
    STORE.is_patient = False
    for kernel in missing if number % 2 == 0 else reversed(missing):
        if os.getppid() != parent:
            return
        if not kernel.is_kept():
            tell(f"0 {kernel.name}")
            with contextlib.suppress(Busy):
                kernel.function.compile(kernel.signature)
                tell(f"1 {kernel.name}")


def _start_copy(calls: Sequence[Call], number: int) -> tuple[int, int]:
    """Forks this process. Returns the copy's process id and the pipe that the copy writes to."""
    reading, writing = os.pipe()
    # SIGINT is blocked in the copy from its first instruction on. The parent process kills it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    process = -1
    try:
        # This thread holds the lock: in the copy, a lock of another thread would stay locked.
        with global_compiler_lock, warnings.catch_warnings():
            # Python warns that there are threads. The threads of jit/pool.py hold no locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
    finally:
        if process:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if process:
        os.close(writing)
        return process, reading
    code = 1
    try:
        os.close(reading)
        _compile_in_copy(calls, number, writing)
        code = 0
    finally:
        os._exit(code)


def can_compile_ahead() -> bool:
    """Returns whether this process can be forked and machine code can be kept on disk.

    On macOS a copy of a process with threads may hang or crash in the system's own libraries.
    """
    return sys.platform == "linux" and STORE.may_write() and "torch" not in sys.modules


def compile_ahead(calls: Sequence[Call], report: Report | None) -> bool:
    """Compiles the kernels that ``kernels_of`` finds for ``calls``, and reports the progress.

    The caller then makes the calls. They load these kernels and compile any others. Returns False,
    without a report, if there are no calls or ``can_compile_ahead`` is false.
    """
    if not calls or not can_compile_ahead():
        return False
    sys.stdout.flush()
    sys.stderr.flush()
    copies = [_start_copy(calls, number) for number in range(usable_cores())]
    try:
        _follow([pipe for _, pipe in copies], report)
    finally:
        for process, pipe in copies:
            os.close(pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)  # some run after an exception or a long silence
            os.waitpid(process, 0)
    return True


def _follow(pipes: Sequence[int], report: Report | None) -> None:
    """Reports the copies' progress until all end or none writes for SILENT_SECONDS."""
    n_missing = n_done = 0
    rest = dict.fromkeys(pipes, b"")
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        until = time.monotonic() + SILENT_SECONDS
        while rest and time.monotonic() < until:
            for key, _ in selector.select(1.0):
                until = time.monotonic() + SILENT_SECONDS
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                    del rest[key.fd]
                    continue
                *lines, rest[key.fd] = (rest[key.fd] + data).split(b"\n")
                for number, word in (line.decode().split() for line in lines):
                    if word == "missing":
                        n_missing = max(n_missing, int(number))
                    else:
                        n_done += int(number)
                        if report is not None:
                            report(word, min(n_done, n_missing - 1), n_missing)
    if n_missing and report is not None:
        report("done", n_missing, n_missing)
