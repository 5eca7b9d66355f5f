"""Runs a function on all threads, with scratch memory that they share and memory of their own."""

import numpy as np
from numba import carray, prange
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep
from sparsekv_cli.cpu.jit.pointers import LINE, call_through, integer_pointer
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.vector.views import room, zeroed


@intrinsic
def _call(typingctx, function, at, task, counter, shared, own):
    """Calls a function through its address, so that it is optimised once, outside the loop."""
    return call_through(5)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _run_threads(function, n_threads, at, task, counter, shared, own, n_own):
    for thread in prange(n_threads):
        _call(function, at, task, counter, shared, own + thread * n_own)


@njit(cache=True, nogil=True)
def run(function, n_threads, at, task, shared, own):
    """Calls ``function(at, task, counter, shared, own)`` in each thread.

    All arguments but the task, a number, are addresses. function: see ``function_address``. at: of
    a record of KernelFields. counter: of int64 (1,), which is 0 (``next_task``). shared, own:
    classes of Scratch of this record. The function gets the address of the memory that all threads
    share, and of its thread's own.
    """
    n_shared, n_own = room(shared, at), room(own, at)
    block = np.empty((2 * LINE + n_shared + n_threads * n_own) // 8, np.int64)
    counter = block.ctypes.data + -block.ctypes.data % LINE
    carray(integer_pointer(counter), (LINE + zeroed(shared, at)) // 8)[:] = 0
    first = counter + LINE
    _run_threads(function, n_threads, at, task, counter, first, first + n_shared, n_own)
    keep(block)
