"""Runs a function on all threads, with scratch memory that they share and memory of their own."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray, prange, types

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep
from sparsekv_cli.cpu.jit.pointers import LINE, caller, function_address, integer_pointer
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.vector.fields import KernelFields
from sparsekv_cli.cpu.vector.views import room, zeroed

# Calls a function through its address, so that it is optimised once, outside the loop.
_call = caller(lambda at, task, counter, shared, own: None)


class RunMemory(NamedTuple):
    """Scratch memory of a kernel's threads: one array, and addresses in it."""

    block: np.ndarray  # int64
    counter: int  # of int64 (1,)
    shared: int  # of the memory that all threads share
    own: int  # of the first thread's own memory
    n_own: int  # bytes from a thread's memory to the next one's


@njit(cache=True, nogil=True)
def memory_of(shared, own, at, n_threads):
    """Returns a RunMemory for classes of Scratch; at: of their record.

    Its user calls ``keep`` on it after the last use. It raises ZeroDivisionError if a size divides
    by 0.
    """
    n_shared, n_own = room(shared, at), room(own, at)
    block = np.empty((2 * LINE + n_shared + n_threads * n_own) // 8, np.int64)
    counter = block.ctypes.data + -block.ctypes.data % LINE
    carray(integer_pointer(counter), (LINE + zeroed(shared, at)) // 8)[:] = 0
    first = counter + LINE
    return RunMemory(block, counter, first, first + n_shared, n_own)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_threads(function, n_threads, at, task, counter, shared, own, n_own):
    for thread in prange(n_threads):
        _call(function, at, task, counter, shared, own + thread * n_own)


@njit(cache=True, nogil=True)
def run(function, n_threads, at, task, memory):
    """Calls ``function(at, task, counter, shared, own)`` in each thread.

    All arguments but the task, a number, are addresses. function: see ``function_address``. at: of
    a record of KernelFields. counter: of int64 (1,), which is 0 (``tasks_of``). memory: a
    RunMemory for n_threads. A kernel with several tasks runs them with the same memory.
    """
    carray(integer_pointer(memory.counter), 1)[0] = 0
    _run_threads(
        function, n_threads, at, task, memory.counter, memory.shared, memory.own, memory.n_own
    )
    keep(memory)


class KernelStep:
    """A record, and the function that threads run for its kernel.

    state: a record of KernelFields, whose ``thread`` is an int. run_thread: see ``run``.
    """

    def __init__(self, state: KernelFields, run_thread: Any) -> None:
        self.state, self._run_thread, self._is_ready = state, run_thread, False

    @property
    def at(self) -> int:
        """The record's address. The first use compiles the threads' function."""
        if not self._is_ready:
            self.state.set(thread=function_address(self._run_thread, (types.int64,) * 5))
            self._is_ready = True
        return self.state.at
