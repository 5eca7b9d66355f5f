"""The inner part of a prefill's integer products: a tile of inputs times a panel of weights.

A tile of TILE inputs is i8 [columns / 4][TILE][4], then f32 scales [columns / 32][TILE]. Sums of
the scaled integers follow: f32 [columns / 32][TILE] and [columns / 16][TILE]. A panel of GROUP rows
of weights is bytes [columns / 4][GROUP][4]. A span is the 16 or 32 columns under one scale. Each
span has f32 scales (GROUP,) and offsets (GROUP,). The TILE x GROUP sums of a span fill the
registers. vpdpbusd (VNNI) or sdot (ARM) adds four products to an i32. On other CPUs vpmaddubsw adds
two products to an i16, and as many i16 are added as fit.
"""

from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import F32, I8, I16, I32, I64, LANES, VF, VI, const, load, splat, vec
from sparsekv_cli.cpu.jit.pointers import call_through, function_address
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.integer import BLOCK, byte_products, pair_products, round_halves

IS_WIDE = llvm.has_feature("avx512vnni")
WIDTH = LANES if IS_WIDE else 8  # lanes of a vector
GROUP = 2 * WIDTH  # weight rows of a panel, in two vectors
TILE = 12 if IS_WIDE else 6  # inputs of a tile: 24 sums in 32 registers, or 12 in 16
SCALES_BYTES = 2 * 4 * GROUP  # bytes of the scales and offsets of a span
LARGEST_INPUT = 127


def is_available() -> bool:
    """Returns whether the CPU has the byte products."""
    return llvm.has_feature("avx2") or vnni.is_available()


class Traits(NamedTuple):
    """span: columns under one scale. room: sums of four products that are added as integers."""

    span: int
    room: int


# --- inputs ---------------------------------------------------------------------------------------


@njit(cache=True, nogil=True)
def tile_bytes(n):
    """Returns the bytes of a tile of inputs of n values, n a multiple of 32: whole cache lines."""
    return (TILE * (n + 4 * 4 * (n // BLOCK)) + 63) // 64 * 64


def _halves(b: ir.IRBuilder, x: ir.Value, is_bf16: bool) -> list[ir.Value]:
    """Returns the 32 elements at address x as two <16 x float>."""
    if not is_bf16:
        return [load(b, VF, x, 4 * LANES * h) for h in range(2)]
    halves = [load(b, vec(I16), x, 2 * LANES * h) for h in range(2)]
    return [b.bitcast(b.shl(b.zext(half, VI), const(I32, 16)), VF) for half in halves]


@intrinsic
def round_input(typingctx, rows, x, tile, n):
    """Rounds one input (n,) at x into a tile. tile: the address of the input's first four bytes.

    rows: an array of the inputs' type, f32 or bf16 as uint16; x and tile are addresses.
    """
    is_bf16 = rows.dtype == types.uint16

    def codegen(context, b, signature, args):
        _, x, tile, n = args
        row = 4 * TILE  # bytes from four columns to the next, and from one f32 to the next
        small = b.mul(b.sdiv(n, I64(BLOCK)), I64(row))
        scales = b.add(tile, b.mul(n, I64(TILE)))
        sums32 = b.add(scales, small)
        sums16 = b.add(sums32, small)

        def body(i, carried):
            at = b.add(x, b.mul(i, I64(2 if is_bf16 else 4)))
            block = round_halves(b, _halves(b, at, is_bf16), LARGEST_INPUT)
            to = b.add(tile, b.mul(i, I64(TILE)))
            for h, half in enumerate(block.halves):
                words = b.bitcast(b.fptosi(half, vec(I8)), vec(I32, 4))
                for w in range(4):
                    llvm.store(b, b.extract_element(words, I32(w)), to, row * (4 * h + w))
            number = b.sdiv(i, I64(BLOCK))
            at = b.mul(number, I64(row))
            llvm.store(b, block.scale, b.add(scales, at))
            llvm.store(b, b.fadd(*block.sums), b.add(sums32, at))
            for h, total in enumerate(block.sums):
                llvm.store(b, total, b.add(sums16, b.mul(at, I64(2))), row * h)
            return []

        llvm.loop(b, I64(0), n, BLOCK, [], body)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 3), codegen


# --- products -------------------------------------------------------------------------------------


@intrinsic
def _multiply_tile(typingctx, span, room, panel, scales, n_spans, tile, n, column, sums):
    """sums f32 (TILE, GROUP) += n_spans of a panel times inputs from ``column`` on; addresses.

    span, room: literals (see Traits). tile: inputs of n values.
    """
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (span, room)):
        return None

    def codegen(context, b, signature, args):
        span_, room_ = (type_.literal_value for type_ in signature.args[:2])
        panel, scales, n_spans, tile, n, column, sums = args[2:]
        vectors = range(GROUP // WIDTH)
        floats, bytes_ = vec(F32, WIDTH), vec(I8, 4 * WIDTH)
        places = [4 * WIDTH * i for i in range(TILE * len(vectors))]
        small = b.mul(b.sdiv(n, I64(BLOCK)), I64(4 * TILE))
        x_scales = b.add(tile, b.mul(n, I64(TILE)))
        x_sums = b.add(x_scales, b.mul(small, I64(1 if span_ == BLOCK else 2)))

        def operands(w, x, step):
            """Yields (weights, four values of an input) for each input and vector."""
            weights = [load(b, bytes_, w, 4 * (GROUP * step + WIDTH * v)) for v in vectors]
            for t in range(TILE):
                four = splat(b, load(b, I32, x, 4 * (TILE * step + t)), WIDTH)
                for weight in weights:
                    yield weight, b.bitcast(four, bytes_)

        def dots(w, x):
            """Returns the sums, i32, over 4 room columns for each input and vector."""
            totals: list[ir.Value] = []
            if vnni.is_available():
                totals = [const(I32, 0, WIDTH)] * len(places)
                for step in range(room_):
                    pairs = zip(totals, operands(w, x, step), strict=True)
                    totals = [vnni.add_dots(b, total, *pair) for total, pair in pairs]
                return totals
            for step in range(room_):
                products = [byte_products(b, *pair) for pair in operands(w, x, step)]
                totals = (
                    [llvm.add_in_order(b, *pair) for pair in zip(totals, products, strict=True)]
                    if totals
                    else products
                )
            return [pair_products(b, total, const(I16, 1, 2 * WIDTH)) for total in totals]

        def add_span(s, carried):
            start = b.add(column, b.mul(s, I64(span_)))
            w = b.add(panel, b.mul(s, I64(GROUP * span_)))
            x = b.add(tile, b.mul(start, I64(TILE)))
            span_at = b.add(scales, b.mul(s, I64(SCALES_BYTES)))
            block = b.add(x_scales, b.mul(b.sdiv(start, I64(BLOCK)), I64(4 * TILE)))
            for part in range(0, span_, 4 * room_):
                found = dots(b.add(w, I64(GROUP * part)), b.add(x, I64(TILE * part)))
                w_scales = [load(b, floats, span_at, 4 * WIDTH * v) for v in vectors]
                for t in range(TILE):
                    scale = splat(b, load(b, F32, block, 4 * t), WIDTH)
                    for v in vectors:
                        i = len(vectors) * t + v
                        old = load(b, floats, sums, places[i])
                        dot = b.sitofp(found[i], floats)
                        new = llvm.fma(b, dot, b.fmul(w_scales[v], scale), old)
                        llvm.store(b, new, sums, places[i])
            return []

        def add_offsets(s, totals):
            span_at = b.add(scales, b.mul(s, I64(SCALES_BYTES)))
            offsets = [load(b, floats, span_at, 4 * (GROUP + WIDTH * v)) for v in vectors]
            number = b.add(b.sdiv(column, I64(span_)), s)
            at = b.add(x_sums, b.mul(number, I64(4 * TILE)))
            new = []
            for t in range(TILE):
                known = splat(b, load(b, F32, at, 4 * t), WIDTH)
                for v in vectors:
                    new.append(llvm.fma(b, offsets[v], known, totals[len(vectors) * t + v]))
            return new

        llvm.loop(b, I64(0), n_spans, 1, [], add_span)
        totals = [load(b, floats, sums, at) for at in places]
        totals = llvm.loop(b, I64(0), n_spans, 1, totals, add_offsets)
        for at, total in zip(places, totals, strict=True):
            llvm.store(b, total, sums, at)
        return context.get_dummy_value()

    return types.void(span, room, *[types.int64] * 7), codegen


@njit(cache=True, nogil=True)
def _multiply_panel(span, room, panel, scales, n_spans, tiles, tile_row, n, column, n_tiles, sums):
    """``_multiply_tile`` over n_tiles of inputs, tile_row bytes apart."""
    for tile in range(n_tiles):
        at, to = tiles + tile * tile_row, sums + tile * 4 * TILE * GROUP
        _multiply_tile(span, room, panel, scales, n_spans, at, n, column, to)


@cache
def product_address(span: int, room: int) -> int:
    """Returns the address of ``_multiply_panel`` compiled for Traits.

    It is compiled separately. Inside a larger function LLVM optimises it a second time. Then LLVM
    merges the loads of inputs and runs out of registers, which halves the speed.
    """
    literals = (types.literal(span), types.literal(room))
    return function_address(_multiply_panel, literals + (types.int64,) * 9)


@intrinsic
def call_product(
    typingctx, kernel, panel, scales, n_spans, tiles, tile_row, n, column, n_tiles, sums
):  # fmt: skip
    return call_through(9, n_literals=2)
