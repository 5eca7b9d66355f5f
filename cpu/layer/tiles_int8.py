"""The inner part of a prefill's integer products: a tile of inputs times a panel of weights.

A tile of TILE inputs is i8 [columns / 4][TILE][4], then f32 scales [columns / 32][TILE]. Sums of
the integers follow: i32 [columns / 32][TILE] and [columns / 16][TILE]. A panel of GROUP rows of
weights is bytes [columns / 4][GROUP][4]. A span is the 16 or 32 columns under one scale. Each span
has f32 scales (GROUP,) and offsets (GROUP,). vpdpbusd (VNNI) or sdot (ARM) adds four products to an
i32. On other CPUs vpmaddubsw adds two products to an i16, and as many i16 are added as fit. With
weights q and inputs x, a block of 32 columns adds to a result, span by span:

    scale of x * (scale of q * sum of q x + offset * sum of x)      formats with offsets
    scale of x * scale of q * (sum of bytes x - zero * sum of x)    the others, bytes = q + zero
"""

from collections.abc import Iterator, Sequence
from functools import cache
from operator import mul
from typing import NamedTuple

from numba import types
from numba.core.cgutils import alloca_once

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.bf16 import widened
from sparsekv_cli.cpu.jit.emitter import LITERAL, TYPE, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.pointers import caller, function_address
from sparsekv_cli.cpu.jit.value import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    Value,
    builder,
    const,
    load,
    store,
    vec,
)
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.integer import BLOCK, byte_products, pair_products, round_halves

IS_WIDE = llvm.has_feature("avx512vnni")
WIDTH = LANES if IS_WIDE else 8  # lanes of a vector
GROUP = 2 * WIDTH  # weight rows of a panel, in two vectors
TILE = 12 if IS_WIDE else 6  # inputs of a tile; the sums of half of them are in registers
VECTORS = range(GROUP // WIDTH)
SCALES_BYTES = 2 * 4 * GROUP  # bytes of the scales and offsets of a span
LARGEST_INPUT = 127


def is_available() -> bool:
    """Returns whether the CPU has the byte products."""
    return llvm.has_feature("avx2") or vnni.is_available()


class Traits(NamedTuple):
    """span: columns under one scale. room: sums of four products that are added as i16.

    zero: what the bytes of a panel have more than the weights. has_offsets: 0 or 1.
    """

    span: int
    room: int
    zero: int
    has_offsets: int


# --- inputs ---------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def tile_bytes(n):
    """Returns the bytes of a tile of inputs of n values, n a multiple of 32: whole cache lines."""
    return (TILE * (n + 4 * 4 * (n // BLOCK)) + 63) // 64 * 64


def _halves(x: Value, is_bf16: bool) -> list[Value]:
    """Returns the 32 elements at address x as two <16 x float>."""
    if not is_bf16:
        return [load(VF, x, 4 * LANES * h) for h in range(2)]
    return [widened(half) for half in [load(vec(I16), x, 2 * LANES * h) for h in range(2)]]


@emitter(rows=TYPE)
def round_input(rows, x, tile, n):
    """Rounds one input (n,) at x into a tile. tile: the address of the input's first four bytes.

    rows: an array of the inputs' type, f32 or bf16 as uint16; x and tile are addresses.
    """
    is_bf16 = rows.dtype == types.uint16
    row = 4 * TILE  # bytes from four columns to the next, and from one f32 to the next
    small = n // BLOCK * row
    scales = tile + n * TILE
    sums32 = scales + small
    sums16 = sums32 + small

    @llvm.every(n, BLOCK)
    def body(i):
        at = x + i * (2 if is_bf16 else 4)
        block = round_halves(_halves(at, is_bf16), LARGEST_INPUT)
        to = tile + i * TILE
        for h, half in enumerate(block.halves):
            words = half.to(vec(I8)).bitcast(vec(I32, 4))
            for w in range(4):
                store(words.lane(w), to, row * (4 * h + w))
        at = (i // BLOCK) * row
        totals = [llvm.sum_lanes(half).to(I32) for half in block.halves]
        store(block.scale, scales + at)
        store(totals[0] + totals[1], sums32 + at)
        for h, total in enumerate(totals):
            store(total, sums16 + at * 2, row * h)


# --- products -------------------------------------------------------------------------------------


def _operands(
    w: Value, x: Value, step: Value, inputs: Sequence[int]
) -> Iterator[tuple[Value, Value]]:
    """Yields (weights, an input's four values) of four columns, for each input and vector."""
    bytes_ = vec(I8, 4 * WIDTH)
    w, x = w + step * (4 * GROUP), x + step * (4 * TILE)
    weights = [load(bytes_, w, 4 * WIDTH * v) for v in VECTORS]
    for t in inputs:
        four = load(I32, x, 4 * t).splat(WIDTH)
        for weight in weights:
            yield weight, four.bitcast(bytes_)


def _dots(
    traits: Traits, w: Value, x: Value, inputs: Sequence[int], totals: list[Value]
) -> list[Value]:
    """Returns totals + the sums over a span, <WIDTH x i32>, for each input and vector."""

    def add(step: Value, sums: list[Value]) -> list[Value]:
        pairs = zip(sums, _operands(w, x, step, inputs), strict=True)
        if vnni.is_available():
            return [vnni.add_dots(total, *pair) for total, pair in pairs]
        return [llvm.add_in_order(total, byte_products(*pair)) for total, pair in pairs]

    n_steps = traits.span // 4
    if vnni.is_available():
        return llvm.loop(0, n_steps, 1, totals, add)
    none, ones = const(I16, 0, 2 * WIDTH), const(I16, 1, 2 * WIDTH)
    for first in range(0, n_steps, traits.room):
        sums = llvm.loop(first, first + traits.room, 1, [none] * len(totals), add)
        wide = [pair_products(each, ones) for each in sums]
        totals = [total + part for total, part in zip(totals, wide, strict=True)]
    return totals


class _Span(NamedTuple):
    """Addresses of a span's parts: of weights, of inputs, and of the block's results."""

    w: Value  # u8 [span / 4][GROUP][4]
    scales: Value  # f32 (GROUP,), then offsets
    x: Value  # i8 [span / 4][TILE][4]
    x_scales: Value  # f32 (TILE,)
    x_sums: Value  # i32 (TILE,)
    before: Value | None  # f32 (TILE, GROUP): of the block's earlier span
    out: Value  # f32 (TILE, GROUP)
    ends_block: bool


def _add_span(traits: Traits, span: _Span, inputs: Sequence[int]) -> None:
    """Adds a block's products to the results, or stores those of its first span.

    The sums of ``inputs`` fill half of the registers. So the CPU scales them while it adds the next
    ones.
    """
    floats = vec(F32, WIDTH)
    known = [load(I32, span.x_sums, 4 * t) for t in inputs]
    starts = [(each * -traits.zero).splat(WIDTH) for each in known for _ in VECTORS]
    dots = iter(_dots(traits, span.w, span.x, inputs, starts))
    scales, offsets = (
        [load(floats, span.scales, 4 * (first + WIDTH * v)) for v in VECTORS]
        for first in (0, GROUP)
    )
    for t, total in zip(inputs, known, strict=True):
        x_sum = total.to(F32).splat(WIDTH)
        x_scale = load(F32, span.x_scales, 4 * t).splat(WIDTH)
        for v in VECTORS:
            place = 4 * (GROUP * t + WIDTH * v)
            terms = [(next(dots).to(floats), scales[v])]
            if traits.has_offsets:
                terms.append((x_sum, offsets[v]))
            value = load(floats, span.before, place) if span.before else mul(*terms.pop())
            for x, scale in terms:
                value = x.fma(scale, value)
            if span.ends_block:
                value = value.fma(x_scale, load(floats, span.out, place))
            store(value, span.out, place)
    llvm.memory_fence()


@emitter(span=LITERAL, room=LITERAL, zero=LITERAL, has_offsets=LITERAL)
def _multiply_tile(span, room, zero, has_offsets, panel, scales, n_spans, tile, n, column, sums):
    """sums f32 (TILE, GROUP) += n_spans of a panel times inputs from ``column`` on; addresses.

    span, room, zero, has_offsets: literals (see Traits). tile: inputs of n values. The spans are
    whole blocks of inputs.
    """
    traits = Traits(span, room, zero, has_offsets)
    n_parts = BLOCK // traits.span
    small = n // BLOCK * (4 * TILE)
    x_scales = tile + n * TILE
    x_sums = x_scales + small * n_parts  # of spans of this size
    b = builder()
    kept = Value(b.ptrtoint(alloca_once(b, vec(F32, WIDTH), TILE * len(VECTORS)), I64))

    @llvm.every(n_spans // n_parts)
    def add_block(i):
        start = column + i * BLOCK
        number = start // BLOCK * (4 * TILE)
        for j in range(n_parts):
            s, ends_block = i * n_parts + j, j + 1 == n_parts
            each = _Span(
                w=panel + s * (GROUP * traits.span),
                scales=scales + s * SCALES_BYTES,
                x=tile + (start + j * traits.span) * TILE,
                x_scales=x_scales + number,
                x_sums=x_sums + number * n_parts + 4 * TILE * j,
                before=kept if j else None,
                out=sums if ends_block else kept,
                ends_block=ends_block,
            )
            for inputs in (range(TILE // 2), range(TILE // 2, TILE)):
                _add_span(traits, each, inputs)


@njit(cache=True, nogil=True)
def _multiply_panel(
    span, room, zero, has_offsets, panel, scales, n_spans, tiles, tile_row, n, column, n_tiles, sums
):
    """``_multiply_tile`` over n_tiles of inputs, tile_row bytes apart."""
    for tile in range(n_tiles):
        at, to = tiles + tile * tile_row, sums + tile * 4 * TILE * GROUP
        _multiply_tile(span, room, zero, has_offsets, panel, scales, n_spans, at, n, column, to)


@cache
def product_address(traits: Traits) -> int:
    """Returns the address of ``_multiply_panel`` compiled for Traits.

    It is compiled separately. Inside a larger function LLVM optimises it a second time. Then LLVM
    merges the loads of inputs and runs out of registers, which halves the speed.
    """
    literals = tuple(map(types.literal, traits))
    return function_address(_multiply_panel, literals + (types.int64,) * 9)


call_product = caller(_multiply_panel, 4)
