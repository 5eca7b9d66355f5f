"""Declared records: what they check, and what compiled code sees of them."""

import gc
import weakref
from typing import NamedTuple

import numpy as np
import pytest
from numba import carray, njit, types

from sparsekv_cli.cpu.jit.compiling.kernel_cache import SOURCES, STORE, KernelCache
from sparsekv_cli.cpu.jit.llvm import keep, next_task
from sparsekv_cli.cpu.jit.pointers import function_address, integer_pointer, on_lines
from sparsekv_cli.cpu.vector import declared, fields
from sparsekv_cli.cpu.vector.declared import Size, f16, f32, f64, i32, i64, u64, words
from sparsekv_cli.cpu.vector.fields import KernelFields, Scratch
from sparsekv_cli.cpu.vector.run import KernelStep, memory_of, run
from sparsekv_cli.cpu.vector.views import room, scratch, view, zeroed


class Rules(NamedTuple):
    share: float
    steps: int
    is_new: bool


class Place(NamedTuple):
    at: int
    row: int


class Pair(NamedTuple):
    weight: np.float32
    count: int
    first: np.ndarray = i32("n_head", "n_pair", optional=True)
    second: np.ndarray = f16("n_pair", optional=True)


class State(KernelFields):
    n_head: Size
    n_wide: Size
    n_pair: Size
    n: int
    n_threads: int
    scale: np.float32
    is_on: bool
    layout: np.ndarray = words(3)
    rules: Rules
    place: Place
    x: np.ndarray = f32("n_head", 1, "n_wide")
    sums: np.ndarray = f64("n_head", 2)
    sinks: np.ndarray = f32("n_head", optional=True)
    pair: Pair


class Shared(Scratch, of=State):
    taken: np.ndarray = i64("n_threads + 1", zeros=True)
    bits: np.ndarray = u64("n_head", "n // 64 + 2")


class Own(Scratch, of=State):
    keys: np.ndarray = i32("(n + 16) * 2 - n_head")
    rows: np.ndarray = f32(3, "n_wide")


RULES = Rules(0.25, -7, True)


def arrays_of(n_head: int = 3, n_wide: int = 5):
    x = np.arange(n_head * n_wide, dtype=np.float32).reshape(n_head, 1, n_wide)
    return {"x": x, "sums": np.zeros((n_head, 2))}


def state_of(**values) -> State:
    return State(**arrays_of(), rules=RULES, scale=0.5, n=130, n_threads=2, **values)


@njit
def _read(at, told):
    this = view(State, at)
    told[0], told[1], told[2], told[3] = this.n_head, this.n_wide, this.n, this.rules.steps
    told[4], told[5], told[6] = this.scale, this.rules.share, this.layout[2]
    told[7], told[8] = this.is_on, this.rules.is_new
    told[9], told[10] = this.sinks.shape[0], this.pair.first.shape[1]
    told[11], told[12] = this.pair.second.shape[0], this.x.shape[1]
    told[13], told[14] = this.place.at, this.place.row
    told[15], told[16] = this.pair.weight, this.pair.count
    this.sums[2, 1] = this.x[1, 2]
    if this.pair.first.shape[0]:
        this.pair.first[2, 3] = this.pair.second[1]


def read(state: State) -> list[float]:
    told = np.zeros(17)
    _read(state.at, told)
    return told.tolist()


def test_compiled_code_sees_the_fields():
    state = state_of(is_on=False)
    state.set(layout=np.arange(3) + 2**40, is_on=True, n=2**33)
    state.set(place=Place(2**50, -4))
    told = [3, 5, 2**33, -7, 0.5, 0.25, 2**40 + 2, 1, 1, 0, 0, 0, 5, 2**50, -4, 0, 0]
    assert read(state) == told and state.place == (2**50, -4)
    assert state.sums[2, 1] == 7
    assert (state.n_head, state.n, state.scale, state.sinks) == (3, 2**33, 0.5, None)
    first, second = np.zeros((3, 4), np.int32), np.array([1, 2, 3, 4], np.float16)
    state.set(pair=Pair(0.5, 9, first, second), sinks=np.zeros(3, np.float32))
    assert read(state)[9:12] == [3, 4, 4] and first[2, 3] == 0x4000
    assert read(state)[15:] == [0.5, 9]
    state.set(pair=Pair(0.5, 9, None, None), sinks=None)
    assert read(state)[9:12] == [0, 0, 0]
    state.set(pair=Pair(1.5, 8, first[:, ::1], second))
    assert read(state)[9:12] == [0, 4, 4]


class OfOne(KernelFields):
    n_steps: np.ndarray = i64(1)
    last: np.ndarray = f32(1, 1)


@njit
def _raise_by_two(at):
    this = view(OfOne, at)
    this.n_steps[0] += 2
    this.last[0] = this.n_steps[0]


def test_an_array_of_one_number_has_one_dim():
    of_one = OfOne(n_steps=np.array([5]), last=np.zeros((1, 1), np.float32))
    _raise_by_two(of_one.at)
    _raise_by_two(of_one.at)
    assert of_one.n_steps.tolist() == [9] and of_one.last.tolist() == [[9]]


def test_sizes_follow_from_the_arrays():
    state = state_of()
    state.set(**arrays_of(n_wide=9))
    assert read(state)[1] == 9
    state.set(**arrays_of(7, 2))
    assert read(state)[:2] == [7, 2]
    shape = (7, 1, 2)
    with pytest.raises(ValueError, match=r"State\.x: float32 \(6, 1, 2\), .* n_head|State\.sums"):
        state.set(x=np.zeros((6, 1, 2), np.float32))
    for wrong in (
        np.zeros(shape), np.zeros((7, 2), np.float32), np.zeros((7, 2, 2), np.float32),
        np.zeros((7, 1, 4), np.float32)[..., ::2], np.zeros((2, 1, 7), np.float32).T,
        np.zeros(shape, ">f4"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"State\.(x|sums)"):
            state.set(x=wrong)
        assert state.x.dtype == np.float32 and state.x.shape == shape
        assert read(state)[:2] == [7, 2]
    with pytest.raises(ValueError, match=r"State\.x: not optional"):
        state.set(x=None)
    read_only = np.ones(shape, np.float32)
    read_only.flags.writeable = False
    state.set(x=read_only)
    state.sums[:] = 0
    assert read(state)[1] == 2 and state.sums[2, 1] == 1


def test_shapes_that_never_come_again_are_forgotten():
    """A server meets ever new lengths, and the memory for their sizes has a bound."""
    state = state_of()
    for n in range(3, 2 * fields._MOST_ALIKE):
        state.set(**arrays_of(n, 2))
        assert read(state)[:2] == [n, 2]
    assert 0 < len(fields._ALIKE) <= fields._MOST_ALIKE


def test_numbers_are_checked():
    state = state_of()
    for name, value in (("n", 1.5), ("n", "1"), ("n", 2**63), ("scale", "x"), ("is_on", None)):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            state.set(**{name: value})
    with pytest.raises(ValueError, match="different structures"):
        state.set(layout=np.zeros(4, np.int64))
    with pytest.raises(ValueError, match="different structures"):
        state.set(layout=np.zeros(3, np.int32))
    with pytest.raises(TypeError, match=r"State\.n_head: follows from arrays"):
        state.set(n_head=4)
    for call in (state.set, State):
        with pytest.raises(TypeError, match=r"State\.nothing: there is no such field"):
            call(nothing=1)
    for place in ((1, 2, 3), (1,)):
        with pytest.raises(ValueError, match="different structures"):
            state.set(place=place)
    with pytest.raises(TypeError, match="float"):
        state.set(place=(1, 2.5))
    with pytest.raises(ValueError, match="shorter"):
        state.set(rules=RULES[:2])
    assert read(state)[:4] == [3, 5, 130, -7]
    assert state.rules == RULES and state.layout.tolist() == [0, 0, 0]
    with pytest.raises(AttributeError, match=r"State\.nothing"):
        state.nothing  # noqa: B018


def test_a_record_with_a_missing_array_has_no_address():
    state = State(sums=np.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"State\.x: not given"):
        state.at  # noqa: B018
    state.set(x=arrays_of()["x"])
    assert state.at % 64 == 0


def test_arrays_stay_alive_until_others_take_their_place():
    state = state_of()
    array = np.zeros((3, 1, 5), np.float32)
    gone = weakref.ref(array)
    state.set(x=array)
    del array
    gc.collect()
    assert gone() is not None
    state.set(x=np.zeros((3, 1, 5), np.float32))
    gc.collect()
    assert gone() is None


@njit
def _measure(at, memory, told):
    shared, own = scratch(Shared, at, memory), scratch(Own, at, memory)
    told[0], told[1], told[2] = room(Shared, at), room(Own, at), zeroed(Shared, at)
    for i, part in enumerate((shared.taken.size, shared.bits.shape[1], own.keys.size)):
        told[3 + i] = part
    told[6] = own.rows.ctypes.data - memory
    told[7] = shared.bits.ctypes.data - memory


def test_scratch_memory_has_the_sizes_of_the_record():
    told = np.zeros(8, np.int64)
    _measure(state_of().at, on_lines(4096, np.uint8).ctypes.data, told)
    keys = 2 * (130 + 16) - 3
    of_keys = -(-4 * keys // 64) * 64
    assert told.tolist() == [64 + 128, of_keys + 64, 64, 3, 4, keys, of_keys, 64]


@njit
def _take(at, task, counter, shared, own):
    this, shared_arrays = view(State, at), scratch(Shared, at, shared)
    keys, tasks = scratch(Own, at, own).keys, carray(integer_pointer(counter), 1)
    keys[:] = task
    i = next_task(tasks)
    while i < 1000:
        keys[i % len(keys)] += 1
        i = next_task(tasks)
    if (keys >= task).all():
        next_task(shared_arrays.taken[1:])
    if next_task(shared_arrays.taken) % this.n_threads == this.n_threads - 1:
        this.sums[0, 0] = shared_arrays.taken[1]


@njit
def _run(at, function, task):
    n_threads = view(State, at).n_threads
    memory = memory_of(Shared, Own, at, n_threads)
    for each in range(task, task + 2):
        run(function, n_threads, at, each, memory)
    keep(memory)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_share_some_memory_and_have_their_own(n_threads):
    state, function = state_of(), function_address(_take, (types.int64,) * 5)
    state.set(n_threads=n_threads)
    for task in range(3):
        _run(state.at, function, task)
        assert state.sums[0, 0] == 2 * n_threads


class Counted(KernelFields):
    thread: int
    n_threads: int
    counts: np.ndarray = i64(2)


class Nothing(Scratch, of=Counted):
    unused: np.ndarray = i64("n_threads")


@njit
def _count(at, task, counter, shared, own):
    counts = view(Counted, at).counts
    next_task(counts[1:])
    while next_task(carray(integer_pointer(counter), 1)) < 100:
        next_task(counts)


@njit
def _run_counts(at):
    this = view(Counted, at)
    run(this.thread, this.n_threads, at, 0, memory_of(Nothing, Nothing, at, this.n_threads))


def test_a_step_has_the_address_of_its_threads_function():
    step = KernelStep(Counted(n_threads=2, counts=np.zeros(2, np.int64)), _count)
    for n in (1, 2):
        _run_counts(step.at)
        assert step.state.counts.tolist() == [100 * n, 2 * n]


class Divided(Scratch, of=State):
    x: np.ndarray = f32("min(n_wide, 3) // (n - 130)", "min(n, 7)")


@njit
def _divide(at):
    return memory_of(Divided, Divided, at, 1).n_own


@njit
def _look(at):
    return scratch(Divided, at, at).x.size


@pytest.mark.parametrize("function", [_divide, _look])
def test_a_size_that_divides_by_0_is_an_error(function):
    state = state_of()
    for n, size in ((131, 21), (133, 7)):
        state.set(n=n)
        assert function(state.at) == (size if function is _look else -(-4 * size // 64) * 64)
    state.set(n=130)
    with pytest.raises(ZeroDivisionError, match=r"Divided\.x: a divisor is 0: .*n - 130"):
        function(state.at)


@pytest.mark.parametrize(
    ("told", "base", "of", "space"),
    [
        ("n_haed is no size", KernelFields, None, {"x": f32("n_haed")}),
        (r"n \+ 1 is no size", KernelFields, None, {"n": Size, "x": f32("n + 1")}),
        ("n is no size", KernelFields, None, {"n": int, "x": f32("n")}),
        ("zeros come first", KernelFields, None, {"x": f32(4, zeros=True)}),
        ("declares no field", KernelFields, None, {"x": str}),
        ("arrays only", Scratch, State, {"n": int}),
        ("zeros come first", Scratch, State, {"x": f32(4), "y": f32(4, zeros=True)}),
        ("y is no size", Scratch, State, {"x": f32("y")}),
    ],
)
def test_a_wrong_declaration(told, base, of, space):
    kinds = {name: kind if isinstance(kind, type) or kind is Size else np.ndarray
             for name, kind in space.items()}  # fmt: skip
    defaults = {name: kind for name, kind in space.items() if isinstance(kind, declared.Array)}
    with pytest.raises(TypeError, match=told):
        type(base)("Wrong", (base,), {"__annotations__": kinds, **defaults}, of=of)


def test_a_size_is_a_sum_or_a_product():
    class Power(Scratch, of=State):
        x: np.ndarray = f32("n ** 2")

    @njit
    def size(at):
        return room(Power, at)

    with pytest.raises(ValueError, match=r"n \*\* 2: a size has names"):
        size(state_of().at)


def test_kernels_are_kept_by_what_they_name():
    """The key of a kernel changes with the declaration alone."""
    names = set()
    for dim in ("n", "n + 1", "n"):
        space = {"__annotations__": {"x": np.ndarray}, "x": f32(dim), "__module__": __name__}
        kind = type(Scratch)("Kind", (Scratch,), space, of=State)
        function = compile("def kernel(at): return room(Kind, at)", "<text>", "exec")
        scope = {"room": room, "Kind": kind, "__name__": "sparsekv_cli.cpu.vector.run"}
        exec(function, scope)
        cache = KernelCache(scope["kernel"], STORE, SOURCES)
        names.add(repr(cache._function_key))
        names.add(repr(str(kind.View.__qualname__)))
    assert len(names) == 3
