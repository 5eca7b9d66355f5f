"""Loops, prefetches and sums over lanes, written with the values of jit/value.py.

The IR names no CPU. LLVM maps a <16 x float> to the CPU of this machine: one AVX-512 register, two
AVX2 registers or four NEON registers.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import features
from sparsekv_cli.cpu.jit.emitter import TYPE, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.value import (
    F16,
    F32,
    I1,
    I16,
    I32,
    I64,
    LANES,
    VF,
    Value,
    builder,
    call_named,
    const,
    load,
    raw,
    store,
    vec,
)


def has_feature(name: str) -> bool:
    """Returns whether this CPU has a feature. name: LLVM's."""
    return features.cpu_features().get(name, False)


ON_AMD = has_feature("sse4a")  # AMD's CPUs, and CPUs with AMD's cores; Intel's lack it


def transposed(rows: list[Value]) -> list[Value]:
    """Transposes n vectors of n lanes, by Eklundh's exchange of ever smaller squares."""
    n = len(rows)
    distance = n // 2
    while distance:
        for i in range(n):
            if not i & distance:
                above, below = rows[i], rows[i + distance]
                first = [lane if not lane & distance else n + lane - distance for lane in range(n)]
                second = [lane + distance if not lane & distance else n + lane for lane in range(n)]
                rows[i] = above.shuffle(first, below)
                rows[i + distance] = above.shuffle(second, below)
        distance //= 2
    return rows


def add_in_order(total: Value, part: Value) -> Value:
    """Returns total + part, vectors of integers of 256 bits, added exactly in this order.

    LLVM would otherwise add several parts to each other first and run out of registers. A fence
    forbids this. It emits no instruction.
    """
    value = (total + part).bitcast(vec(F32, 8))
    return value.call("arithmetic.fence").bitcast(total.type)


def memory_fence() -> None:
    """Keeps LLVM from moving a load or store past this place. It emits no instruction."""
    type_ = ir.FunctionType(ir.VoidType(), [])
    builder().call(ir.InlineAsm(type_, "", "~{memory}", side_effect=True), [])


def together(values: Sequence[Value]) -> list[Value]:
    """Returns the vectors unchanged, through inline assembly that has no instruction.

    LLVM computes all of them before it uses one of the results. It moves no load or store past this
    place.
    """
    b, n, kinds = builder(), len(values), [v.type for v in values]
    type_ = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    places = ",".join(["=x"] * n + [str(i) for i in range(n)] + ["~{memory}"])
    results = b.call(ir.InlineAsm(type_, "", places, side_effect=True), [v.ir for v in values])
    return [Value(b.extract_value(results, i)) for i in range(n)]


def prefetch(address: Value) -> None:
    """Prefetches the cache line at ``address`` into L2; any address is allowed.

    L2 tracks more outstanding lines than L1. So this is faster than prefetchnta, which goes through
    L1. It is faster even for weights, which are read once a token.
    """
    kind = I32(0), I32(2), I32(1)  # read, into L2, data
    call_named("llvm.prefetch.p0", ir.VoidType(), address.pointer(), *kind)


class Prefetches:
    """Prefetches of several lines, spread evenly over ``n_steps`` pieces of other work.

    Prefetches that are issued all at once fill the core's queue, and loads wait for them.

    fixed: LLVM moves nothing across a prefetch. Otherwise LLVM may move all prefetches to one
    place. Set it for short pieces of work only: long pieces lose more than they gain.
    """

    def __init__(self, addresses: Sequence[Value], n_steps: int, *, fixed: bool = False):
        self._addresses, self._n_steps = addresses, n_steps
        self._fixed = fixed
        self._step = self._n_asked = 0

    def step(self) -> None:
        """Issues the lines that are due; call it ``n_steps`` times or more, between the work."""
        due = -(-(self._step + 1) * len(self._addresses) // self._n_steps)
        for address in self._addresses[self._n_asked : due]:
            prefetch(address)
            if self._fixed:
                builder().fence("seq_cst", "singlethread")  # no instruction, a barrier for LLVM
        self._step, self._n_asked = self._step + 1, due


def load_half_lanes(address: Value, n_bytes: Any = 0, count: int = LANES) -> Value:
    """Returns ``count`` consecutive f16 as a vector of f32."""
    return load(vec(F16, count), address, n_bytes).to(vec(F32, count))


def _reduced(value: Value, join: Callable[[Value, Value], Value]) -> Value:
    """Joins the upper half of a vector's lanes to the lower half, until one lane is left."""
    while value.count > 1:
        count = value.count // 2
        low, high = value.shuffle(range(count)), value.shuffle(range(count, 2 * count))
        value = join(low, high)
    return value.lane(0)


def sum_lanes(value: Value) -> Value:
    """Returns the sum of a float vector's lanes, pairwise."""
    return _reduced(value, lambda low, high: low + high)


def bits_where(type_: ir.Type, address: Value, holds: Callable[[Value], Value]) -> Value:
    """Returns a u64 whose bit j says whether ``holds`` is true for element j of 64 at an address.

    type_: of a vector of LANES elements of 32 bits.
    """
    word: Value = I64(0)
    for first in range(0, 64, LANES):
        found = holds(load(type_, address, 4 * first))
        word = word | (found.bitcast(I16).unsigned_to(I64) << first)
    return word


@emitter(returns=types.float32)
def dot_product(x, y, count):
    """Returns x . y of f32 at addresses; count: a multiple of 16."""

    def body(j, sums):
        return [load(VF, x + j * 4).fma(load(VF, y + j * 4), sums[0])]

    return sum_lanes(loop(0, count, LANES, [const(F32, 0.0)], body)[0])


@njit(cache=True, nogil=True)
def sum_squares(x):
    """Returns the sum of x^2, x f32 (n,) contiguous, always added in the same order.

    A loop compiled with ``reassoc`` may be summed in another order where it is inlined. Then a run
    that compiles the kernel would differ in the last bits from runs that load it.
    """
    whole = x.shape[0] - x.shape[0] % LANES
    total = dot_product(x, x, whole)
    for i in range(whole, x.shape[0]):
        total += x[i] * x[i]
    return total


def max_lanes(value: Value) -> Value:
    """Returns the largest of a float vector's lanes."""
    return _reduced(value, Value.maxnum)


def sum_many(values: Sequence[Value]) -> Value:
    """Lane i of the result is the sum of the lanes of ``values[i]``; n vectors of n lanes.

    A binary tree of interleaves takes 15 additions for 16 sums. Separate sums take 64.
    """
    n = len(values)
    assert n == values[0].count
    level = list(values)
    width = 1
    while len(level) > 1:
        stride = n // (2 * width)  # lanes between the two partial sums to add
        first_lanes = [lane for lane in range(n) if not (lane // stride) & 1]
        second_lanes = [lane for lane in range(n) if (lane // stride) & 1]
        paired = []
        for a, b in zip(level[0::2], level[1::2], strict=True):
            first = a.shuffle(first_lanes + [n + i for i in first_lanes], b)
            second = a.shuffle(second_lanes + [n + i for i in second_lanes], b)
            paired.append(first + second)
        level = paired
        width *= 2
    return level[0]


def loop(
    start: Any,
    stop: Any,
    step: int,
    carried: Sequence[Value],
    body: Callable[[Value, list[Value]], Sequence[Value] | None],
) -> list[Value]:
    """Emits ``for i in range(start, stop, step)``; returns the ``carried`` values after it.

    body(i, carried) returns the next values, or nothing if none are carried.
    """
    b = builder()
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    phis = []
    for value in (Value(I64(0)).like(start).ir, *map(raw, carried)):
        phi = b.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    index, *now = (Value(phi) for phi in phis)
    b.cbranch((index < stop).ir, inside, after)
    b.position_at_end(inside)
    results = body(index, list(now)) or ()
    following = index + step
    for phi, value in zip(phis, (following, *results), strict=True):
        phi.add_incoming(raw(value), b.block)
    b.branch(head)
    b.position_at_end(after)
    return now


def every(stop: Any, step: int = 1, start: Any = 0) -> Callable[[Callable[[Value], None]], None]:
    """Emits ``for i in range(start, stop, step)`` around the code of the decorated function.

    @every(count, LANES)
    def vector(i):
        ...
    """

    def emit(body: Callable[[Value], None]) -> None:
        loop(start, stop, step, [], lambda i, _: body(i))

    return emit


@emitter(returns=types.int64, word=types.uint64)
def trailing_zeros(word):
    """Returns the position of the lowest set bit of a u64, 64 for 0 (numba code)."""
    return builder().cttz(word.ir, I1(0))


@emitter(returns=types.uint64, word=types.uint64)
def reversed_bits(word):
    """Returns a u64 with its bits in reverse order (numba code)."""
    return word.call("bitreverse")


@emitter(returns=types.int64, word=types.uint64)
def set_bits(word):
    """Returns the number of set bits of a u64 (numba code)."""
    return builder().ctpop(word.ir)


@intrinsic
def next_task(typingctx, counter):
    """Adds 1 to counter int64 (1,) in one atomic step; returns the old value (numba code)."""

    def codegen(context, builder, signature, args):
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.atomic_rmw("add", array.data, I64(1), "monotonic")

    return types.int64(counter), codegen


@njit(nogil=True)
def tasks_of(counter, n):
    """Yields the numbers below n that no other thread has taken (numba code).

    Threads share the counter int64 (1,), which begins at 0, and each takes the next number when it
    is free: ``for thread in prange(n_threads): for task in tasks_of(counter, n): ...``.
    """
    while True:
        task = next_task(counter)
        if task >= n:
            return
        yield task


@emitter
def prefetch_lines(address, n_bytes):
    """Prefetches the cache lines of ``n_bytes`` at ``address`` (numba code)."""
    every(address + n_bytes, 64, address & -64)(prefetch)


@emitter
def copy_bytes(source, target, count):
    """Copies ``count`` bytes, an even number, from one address to another (numba code)."""

    @every(count, 2)
    def body(j):
        store(load(I16, source + j), target + j)


@emitter(array=TYPE)
def keep(array):
    """Keeps an array alive up to this call (numba code).

    numba frees an array after its last use, and does not count the use of its address. Call it
    after the last call that gets only the address.
    """
