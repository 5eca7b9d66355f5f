"""Small helpers that write LLVM IR on vectors; the kernels in this package are built from them.

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

LANES = 16
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)


def has_feature(name: str) -> bool:
    """Returns whether this CPU has a feature. name: LLVM's."""
    return features.cpu_features().get(name, False)


ON_AMD = has_feature("sse4a")  # AMD's CPUs, and CPUs with AMD's cores; Intel's lack it


def vec(element: ir.Type, count: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, count)


def const(element: ir.Type, value: float, count: int = LANES) -> ir.Constant:
    """Returns a vector constant with ``value`` in every lane."""
    return ir.Constant(vec(element, count), [value] * count)


def offset(builder: ir.IRBuilder, address: ir.Value, n_bytes: Any) -> ir.Value:
    """``address + n_bytes`` (i64 addresses; ``n_bytes`` an int or an i64)."""
    if isinstance(n_bytes, int):
        if n_bytes == 0:
            return address
        n_bytes = I64(n_bytes)
    return builder.add(address, n_bytes)


def load(builder: ir.IRBuilder, type_: ir.Type, address: ir.Value, n_bytes: Any = 0) -> ir.Value:
    """Returns an unaligned load of ``type_`` at ``address + n_bytes``."""
    pointer = builder.inttoptr(offset(builder, address, n_bytes), type_.as_pointer())
    return builder.load(pointer, align=1)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, n_bytes: Any = 0) -> None:
    pointer = builder.inttoptr(offset(builder, address, n_bytes), value.type.as_pointer())
    builder.store(value, pointer, align=1)


def splat(builder: ir.IRBuilder, scalar: ir.Value, count: int = LANES) -> ir.Value:
    """Returns a vector with ``scalar`` in every lane."""
    type_ = vec(scalar.type, count)
    one = builder.insert_element(ir.Constant(type_, ir.Undefined), scalar, I32(0))
    zeros = ir.Constant(vec(I32, count), [0] * count)
    return builder.shuffle_vector(one, ir.Constant(type_, ir.Undefined), zeros)


def shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(vec(I32, len(lanes)), list(lanes)))


def call_named(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """Returns a call of the LLVM intrinsic ``name``, declared in the module on first use."""
    function = builder.module.globals.get(name)
    if function is None:
        type_ = ir.FunctionType(result, [arg.type for arg in args])
        function = ir.Function(builder.module, type_, name)
    return builder.call(function, args)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Returns a * b + c, rounded once; floats or float vectors."""
    lanes = f"v{a.type.count}" if isinstance(a.type, ir.VectorType) else ""
    return call_named(builder, f"llvm.fma.{lanes}f32", a.type, a, b, c)


def transposed(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Transposes n vectors of n lanes, by Eklundh's exchange of ever smaller squares."""
    n = len(rows)
    distance = n // 2
    while distance:
        for i in range(n):
            if not i & distance:
                above, below = rows[i], rows[i + distance]
                first = [lane if not lane & distance else n + lane - distance for lane in range(n)]
                second = [lane + distance if not lane & distance else n + lane for lane in range(n)]
                rows[i] = shuffle(b, above, below, first)
                rows[i + distance] = shuffle(b, above, below, second)
        distance //= 2
    return rows


def add_in_order(b: ir.IRBuilder, total: ir.Value, part: ir.Value) -> ir.Value:
    """Returns total + part, vectors of integers of 256 bits, added exactly in this order.

    LLVM would otherwise add several parts to each other first and run out of registers. A fence
    forbids this. It emits no instruction.
    """
    floats = vec(F32, 8)
    value = b.bitcast(b.add(total, part), floats)
    fenced = call_named(b, "llvm.arithmetic.fence.v8f32", floats, value)
    return b.bitcast(fenced, total.type)


def memory_fence(b: ir.IRBuilder) -> None:
    """Keeps LLVM from moving a load or store past this place. It emits no instruction."""
    type_ = ir.FunctionType(ir.VoidType(), [])
    b.call(ir.InlineAsm(type_, "", "~{memory}", side_effect=True), [])


def together(b: ir.IRBuilder, values: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the vectors unchanged, through inline assembly that has no instruction.

    LLVM computes all of them before it uses one of the results. It moves no load or store past this
    place.
    """
    n = len(values)
    type_ = ir.FunctionType(
        ir.LiteralStructType([v.type for v in values]), [v.type for v in values]
    )
    places = ",".join(["=x"] * n + [str(i) for i in range(n)] + ["~{memory}"])
    results = b.call(ir.InlineAsm(type_, "", places, side_effect=True), values)
    return [b.extract_value(results, i) for i in range(n)]


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetches the cache line at ``address`` into L2; any address is allowed.

    L2 tracks more outstanding lines than L1. So this is faster than prefetchnta, which goes through
    L1. It is faster even for weights, which are read once a token.
    """
    pointer = builder.inttoptr(address, ir.PointerType())
    kind = I32(0), I32(2), I32(1)  # read, into L2, data
    call_named(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *kind)


class Prefetches:
    """Prefetches of several lines, spread evenly over ``n_steps`` pieces of other work.

    Prefetches that are issued all at once fill the core's queue, and loads wait for them.

    fixed: LLVM moves nothing across a prefetch. Otherwise LLVM may move all prefetches to one
    place. Set it for short pieces of work only: long pieces lose more than they gain.
    """

    def __init__(self, addresses: Sequence[ir.Value], n_steps: int, *, fixed: bool = False):
        self._addresses, self._n_steps = addresses, n_steps
        self._fixed = fixed
        self._step = self._n_asked = 0

    def step(self, builder: ir.IRBuilder) -> None:
        """Issues the lines that are due; call it ``n_steps`` times or more, between the work."""
        due = -(-(self._step + 1) * len(self._addresses) // self._n_steps)
        for address in self._addresses[self._n_asked : due]:
            prefetch(builder, address)
            if self._fixed:
                builder.fence("seq_cst", "singlethread")  # no instruction, a barrier for LLVM
        self._step, self._n_asked = self._step + 1, due


def load_half_lanes(
    builder: ir.IRBuilder, address: ir.Value, n_bytes: Any = 0, count: int = LANES
) -> ir.Value:
    """Returns ``count`` consecutive f16 as a vector of f32."""
    return builder.fpext(load(builder, vec(F16, count), address, n_bytes), vec(F32, count))


def sum_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Returns the sum of a float vector's lanes, pairwise."""
    count = value.type.count
    while count > 1:
        count //= 2
        low = shuffle(builder, value, value, range(count))
        high = shuffle(builder, value, value, range(count, 2 * count))
        value = builder.fadd(low, high)
    return builder.extract_element(value, I32(0))


@emitter(returns=types.float32)
def _sum_squares(b, address, count):
    """Returns the sum of squares of ``count`` f32 at an address; count: a multiple of 16."""

    def body(j, sums):
        lanes = load(b, VF, b.add(address, b.mul(j, I64(4))))
        return [fma(b, lanes, lanes, sums[0])]

    return sum_lanes(b, loop(b, I64(0), count, LANES, [const(F32, 0.0)], body)[0])


@njit(cache=True, nogil=True)
def sum_squares(x):
    """Returns the sum of x^2, x f32 (n,) contiguous, always added in the same order.

    A loop compiled with ``reassoc`` may be summed in another order where it is inlined. Then a run
    that compiles the kernel would differ in the last bits from runs that load it.
    """
    whole = x.shape[0] - x.shape[0] % LANES
    total = _sum_squares(x.ctypes.data, whole)
    for i in range(whole, x.shape[0]):
        total += x[i] * x[i]
    return total


def max_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Returns the largest of a float vector's lanes."""
    count = value.type.count
    while count > 1:
        count //= 2
        low = shuffle(builder, value, value, range(count))
        high = shuffle(builder, value, value, range(count, 2 * count))
        value = call_named(builder, f"llvm.maxnum.v{count}f32", low.type, low, high)
    return builder.extract_element(value, I32(0))


def sum_many(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    """Lane i of the result is the sum of the lanes of ``values[i]``; n vectors of n lanes.

    A binary tree of interleaves takes 15 additions for 16 sums. Separate sums take 64.
    """
    n = len(values)
    assert n == values[0].type.count
    level = list(values)
    width = 1
    while len(level) > 1:
        stride = n // (2 * width)  # lanes between the two partial sums to add
        first_lanes = [lane for lane in range(n) if not (lane // stride) & 1]
        second_lanes = [lane for lane in range(n) if (lane // stride) & 1]
        paired = []
        for a, b in zip(level[0::2], level[1::2], strict=True):
            first = shuffle(builder, a, b, first_lanes + [n + i for i in first_lanes])
            second = shuffle(builder, a, b, second_lanes + [n + i for i in second_lanes])
            paired.append(builder.fadd(first, second))
        level = paired
        width *= 2
    return level[0]


def loop(
    builder: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value] | None],
) -> list[ir.Value]:
    """Emits ``for i in range(start, stop, step)``; returns the ``carried`` values after it.

    body(i, carried) returns the next values, or nothing if none are carried.
    """
    before = builder.block
    head = builder.append_basic_block("head")
    inside = builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(start, before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
    builder.position_at_end(inside)
    results = body(index, list(phis))
    following = builder.add(index, I64(step))
    last = builder.block
    index.add_incoming(following, last)
    for phi, value in zip(phis, results or (), strict=True):
        phi.add_incoming(value, last)
    builder.branch(head)
    builder.position_at_end(after)
    return list(phis)


def every(
    builder: ir.IRBuilder, stop: ir.Value, step: int = 1, start: ir.Value | None = None
) -> Callable[[Callable[[ir.Value], None]], None]:
    """Emits ``for i in range(start, stop, step)`` around the code of the decorated function.

        @every(b, count, LANES)
        def vector(i):
            ...

    start: None for 0.
    """

    def emit(body: Callable[[ir.Value], None]) -> None:
        first = I64(0) if start is None else start
        loop(builder, first, stop, step, [], lambda i, _: body(i))

    return emit


@emitter(returns=types.int64, word=types.uint64)
def trailing_zeros(builder, word):
    """Returns the position of the lowest set bit of a u64, 64 for 0 (numba code)."""
    return builder.cttz(word, ir.IntType(1)(0))


@emitter(returns=types.uint64, word=types.uint64)
def reversed_bits(builder, word):
    """Returns a u64 with its bits in reverse order (numba code)."""
    return call_named(builder, "llvm.bitreverse.i64", I64, word)


@emitter(returns=types.int64, word=types.uint64)
def set_bits(builder, word):
    """Returns the number of set bits of a u64 (numba code)."""
    return builder.ctpop(word)


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
def prefetch_lines(b, address, n_bytes):
    """Prefetches the cache lines of ``n_bytes`` at ``address`` (numba code)."""

    @every(b, b.add(address, n_bytes), 64, b.and_(address, I64(-64)))
    def line(at):
        prefetch(b, at)


@emitter(array=TYPE)
def keep(b, array):
    """Keeps an array alive up to this call (numba code).

    numba frees an array after its last use, and does not count the use of its address. Call it
    after the last call that gets only the address.
    """
