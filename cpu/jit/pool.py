"""The thread pool of a decode step, which runs numba's parallel loops.

numba runs every ``prange`` by a function called numba_parallel_for. ``install`` replaces it by
``parallel_for``. The calling thread and the idle workers take tasks until none is left. The calling
thread then waits only for tasks that a worker has started. An OpenMP loop waits for all threads at
a barrier instead. Then a token takes seven times as long when another program keeps a core busy. A
loop costs 0.6 us here and 1.6 us with OpenMP.

An idle worker spins for some tens of microseconds, longer than the time between two loops of a
step. Then it sleeps. A thread that waits prefetches the memory that ``expect`` has announced.
"""

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.np.ufunc.parallel import _launch_threads

from sparsekv_cli.cpu.jit import features
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import callback, njit
from sparsekv_cli.cpu.jit.llvm import every, keep, prefetch_lines
from sparsekv_cli.cpu.jit.value import I32, I64, Value, builder, call_named, select
from sparsekv_cli.errors import SparseKVError

# The control block, int64. Words that different threads write lie on different cache lines.
TICKET, DONE, BUSY, JOB, ASLEEP, LOCK, SIGNAL, NEXT, EXPECTED, SIZE = range(0, 160, 16)
# A job, from control[JOB] on: what numba passes (see ``_parallel_for``).
FUNCTION, ARGS, DIMENSIONS, STEPS, DATA, N_INNER, N_ARRAYS, N_THREADS = range(8)
# A ticket is (generation, number of tasks, next task); all three change in one atomic step.
COUNT_BITS = 20
MASK = (1 << COUNT_BITS) - 1
CONTROL = "sparsekv_pool_control"
_KEPT: list[Any] = []  # keeps the control block and the compiled loop until the process ends
# Expected reads, from control[EXPECTED] on: bytes in all, then address and bytes of each region.
# control[NEXT] is the number of bytes that are prefetched already.
N_REGIONS = 4
PIECE = 512  # bytes that a waiting thread prefetches between two polls
SPINS = 3000  # polls of an idle worker before it sleeps: 40 to 140 cycles each, or a piece


@emitter(returns=types.int64)
def _atomic_load(address):
    return builder().load_atomic(address.pointer(I64), "acquire", 8)


@emitter
def _atomic_store(address, value):
    builder().store_atomic(value.ir, address.pointer(I64), "release", 8)


@emitter(returns=types.int64)
def atomic_add(address, value):
    """Adds to the int64 at ``address`` as one atomic step; returns the old value."""
    return builder().atomic_rmw("add", address.pointer(I64), value.ir, "acq_rel")


@emitter(returns=types.boolean)
def _compare_and_swap(address, old, new):
    """Replaces the word at ``address`` by ``new`` if it is ``old``; returns whether it was."""
    b, pointer = builder(), address.pointer(I64)
    return b.extract_value(b.cmpxchg(pointer, old.ir, new.ir, "acq_rel", "acquire"), 1)


@emitter
def _pause():
    """Tells the core that this thread spins."""
    if features.architecture() == "x86_64":
        call_named("llvm.x86.sse2.pause", ir.VoidType())
    elif features.architecture() == "aarch64":
        call_named("llvm.aarch64.hint", ir.VoidType(), I32(1))


@emitter
def _yield():
    """Gives the core to another thread (sched_yield, on POSIX systems)."""
    if os.name == "posix":
        call_named("sched_yield", I32)


@emitter(take=LITERAL)
def _mutex(lock, take):
    """Takes or releases the pthread mutex at ``lock``; ``take`` is a literal."""
    call_named("pthread_mutex_lock" if take else "pthread_mutex_unlock", I32, lock)


@emitter
def _wait(signal, lock):
    call_named("pthread_cond_wait", I32, signal, lock)


@emitter
def _wake_all(signal):
    call_named("pthread_cond_broadcast", I32, signal)


@emitter
def _run_task(job, task):
    """Calls a loop's body for one task: each array is advanced by ``task`` rows and has one row."""
    b, pointer = builder(), ir.IntType(8).as_pointer()

    def word(address: Value, i: Any) -> Value:
        return Value(b.load((address + i * 8).pointer(I64)))

    def copied(count: Value, value_of: Callable[[Value], Value]) -> ir.Value:
        """Allocates an array of ``count`` words on the stack."""
        array = b.alloca(I64, count.ir)

        @every(count)
        def copy(i: Value) -> None:
            b.store(value_of(i).ir, b.gep(array, [i.ir]))

        return b.bitcast(array, pointer)

    fields = [word(job, Value(I64(i))) for i in range(8)]
    function, arrays, dimensions, steps, data, n_inner, n_arrays, _ = fields
    stack = call_named("llvm.stacksave.p0", ir.PointerType())
    sizes = copied(n_inner + 1, lambda i: select(i == 0, 1, word(dimensions, i)))
    places = copied(n_arrays, lambda i: word(arrays, i) + word(steps, i) * task)
    type_ = ir.FunctionType(ir.VoidType(), [pointer] * 4)
    others = [b.inttoptr(each.ir, pointer) for each in (steps, data)]
    b.call(function.pointer(type_), [places, sizes, *others])
    call_named("llvm.stackrestore.p0", ir.VoidType(), stack)


@emitter(returns=types.int64)
def _control():
    """Returns the address of the control block. It is a symbol that ``install`` defines."""
    b = builder()
    block = b.module.globals.get(CONTROL) or ir.GlobalVariable(b.module, I64, CONTROL)
    return b.ptrtoint(block, I64)


@njit(nogil=True, cache=True)
def wait_for(address, least):
    """Waits until the int64 at ``address`` is at least ``least``.

    A task uses it to wait for another task of its loop. The other task must have started.
    """
    n_looks = 0
    while _atomic_load(address) < least:
        _pause()
        n_looks += 1
        if n_looks % 1024 == 0:
            _yield()


@njit(nogil=True, cache=True)
def _take_tasks(control, worker):
    """Runs tasks of the current job until all are taken; returns the number of tasks run.

    worker: 0 for the calling thread, or a worker's number. A job uses only the first workers. The
    ticket is read before the job's words and compared after them, so the words are of its job. A
    job does not change while one of its tasks is not done.
    """
    n_run = 0
    while True:
        ticket = _atomic_load(control + 8 * TICKET)
        task, count = ticket & MASK, (ticket >> COUNT_BITS) & MASK
        if task >= count or worker >= _atomic_load(control + 8 * (JOB + N_THREADS)):
            return n_run
        if _compare_and_swap(control + 8 * TICKET, ticket, ticket + 1):
            _run_task(control + 8 * JOB, task)
            atomic_add(control + 8 * DONE, 1)
            n_run += 1


@njit(nogil=True, cache=True)
def _use_the_wait(control, worker):
    """Prefetches the next piece of the memory that ``expect`` announced, then pauses.

    Only threads that the last job used prefetch.
    """
    expected = control + 8 * EXPECTED
    is_left = _atomic_load(control + 8 * NEXT) < _atomic_load(expected)
    if is_left and worker < _atomic_load(control + 8 * (JOB + N_THREADS)):
        at = atomic_add(control + 8 * NEXT, PIECE)
        for i in range(N_REGIONS):
            start, size = _atomic_load(expected + 8 + 16 * i), _atomic_load(expected + 16 + 16 * i)
            if at < size:
                prefetch_lines(start + at, PIECE)
                break
            at -= size
    _pause()


@njit(nogil=True, cache=True)
def expect(regions):
    """Announces the memory that is read after the current work. Waiting threads prefetch it.

    regions: address of N_REGIONS int64 pairs of address and bytes. The pairs are copied. The memory
    that they name is only prefetched, never read, so it may be freed meanwhile.
    """
    control = _control()
    expected = control + 8 * EXPECTED
    _atomic_store(expected, 0)
    total = 0
    for i in range(2 * N_REGIONS):
        word = _atomic_load(regions + 8 * i)
        _atomic_store(expected + 8 + 8 * i, word)
        if i % 2:
            total += word
    _atomic_store(control + 8 * NEXT, 0)
    _atomic_store(expected, total)


@njit(nogil=True, cache=True)
def _work(control, worker):
    """Runs a worker's endless loop: it runs tasks, spins for a while, sleeps."""
    n_idle = 0
    while True:
        if _take_tasks(control, worker) > 0:
            n_idle = 0
            continue
        n_idle += 1
        _use_the_wait(control, worker)
        if n_idle < SPINS:
            continue
        ticket = _atomic_load(control + 8 * TICKET)
        _mutex(control + 8 * LOCK, 1)
        atomic_add(control + 8 * ASLEEP, 1)
        while _atomic_load(control + 8 * TICKET) == ticket:
            _wait(control + 8 * SIGNAL, control + 8 * LOCK)
        atomic_add(control + 8 * ASLEEP, -1)
        _mutex(control + 8 * LOCK, 0)
        n_idle = 0


@njit(nogil=True, cache=True)
def _run_job(control, job, n_tasks):
    """Runs the tasks of ``job`` (the address of its eight words) with the workers' help."""
    for i in range(8):
        _atomic_store(control + 8 * (JOB + i), _atomic_load(job + 8 * i))
    _atomic_store(control + 8 * DONE, 0)
    old = _atomic_load(control + 8 * TICKET)
    generation = ((old >> (2 * COUNT_BITS)) + 1) & 0x7FFFFF
    ticket = (generation << (2 * COUNT_BITS)) | (n_tasks << COUNT_BITS)
    _atomic_store(control + 8 * TICKET, ticket)
    if atomic_add(control + 8 * ASLEEP, 0) > 0:  # a plain load might pass the store above
        _mutex(control + 8 * LOCK, 1)
        _wake_all(control + 8 * SIGNAL)
        _mutex(control + 8 * LOCK, 0)
    _take_tasks(control, 0)
    n_looks = 0
    while _atomic_load(control + 8 * DONE) < n_tasks:
        _use_the_wait(control, 0)
        n_looks += 1
        if n_looks % 1024 == 0:
            _yield()


@njit(nogil=True, cache=True)
def work(worker):
    """Runs the endless loop of worker number ``worker`` (from 1)."""
    _work(_control(), worker)


def parallel_for(function, args, dimensions, steps, data, n_inner, n_arrays, n_threads):
    """numba_parallel_for: calls ``function`` for each of dimensions[0] tasks; addresses and counts.

    If another loop is running, in another thread or around this one, this loop runs on the calling
    thread only.
    """
    job = np.array((function, args, dimensions, steps, data, n_inner, n_arrays, n_threads))
    n_tasks = _atomic_load(dimensions)
    control = _control()
    shared = 1 < n_tasks <= MASK and n_threads > 1
    if shared and _compare_and_swap(control + 8 * BUSY, 0, 1):
        _run_job(control, job.ctypes.data, n_tasks)
        _atomic_store(control + 8 * BUSY, 0)
    else:
        for task in range(n_tasks):
            _run_task(job, task)
    keep(job)


def install() -> bool:
    """Replaces numba's threads by the pool, once a process. Its workers start in install.py.

    Returns False on a system without POSIX threads, where numba keeps its own threads. Call it
    before any parallel kernel is compiled or loaded.
    """
    if _KEPT:
        return len(_KEPT) > 1
    try:
        _launch_threads()
    except ValueError as error:
        raise SparseKVError(f"NUMBA_THREADING_LAYER in the environment: {error}") from None
    block = np.zeros(SIZE + 16, np.int64)
    start = block.ctypes.data + -block.ctypes.data % 128
    binding.add_symbol(CONTROL, start)  # kernels that call ``expect`` are linked to it
    _KEPT.append(block)
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    names = ("pthread_mutex_lock", "pthread_mutex_unlock", "pthread_cond_wait",
             "pthread_cond_broadcast", "sched_yield")  # fmt: skip
    if libc is None or not all(hasattr(libc, name) for name in names):
        return False
    for name in names:
        binding.add_symbol(name, ctypes.cast(getattr(libc, name), ctypes.c_void_p).value)
    for name, at in (("pthread_mutex_init", LOCK), ("pthread_cond_init", SIGNAL)):
        if getattr(libc, name)(ctypes.c_void_p(start + 8 * at), None) != 0:
            return False
    entry = callback(parallel_for, types.void(*[types.int64] * 8))
    binding.add_symbol("numba_parallel_for", entry.address)
    _KEPT.append(entry)
    work.compile((types.int64,))
    return True
