"""Repacked weights: sixteen rows of a matrix are interleaved, so that each has a lane of its own.

As weights lie in a file, a row's dot product ends with a sum over lanes, scales have to be spread
over lanes, and vectors straddle cache lines; in rows of a few hundred columns that takes most of
the time. None of it is left when each lane is a row. The price is a copy of the weights of the same
size. Formats are repacked where it pays: not Q8_0 and Q5_K, whose products are as slow as memory,
and Q4_K and Q6_K only where the CPU has no byte products.

Layout: the blocks i of a group's 16 rows lie together, behind the blocks i - 1. First come the f16
scales, 16 of a kind (32 bytes), then the block's other bytes in the order of their use, four of
each row (64 bytes). They are multiplied with four activations of 16 bits, as two bytes each: by
vpdpbusd (weights/vnni.py), else by vpmaddubsw, whose sums of two products are i16; some of these
can be added ahead of widening them. IQ4_NL's integers are too large for that and become i16 first.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.llvm import F32, I8, I16, I32, I64, LANES, VF, const, load, shuffle, vec
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.formats import ALWAYS, FORMAT_OF_CODE, BlockFormat
from sparsekv_cli.cpu.weights.integer import byte_products, pair_products
from sparsekv_cli.cpu.weights.interleaved_blocks import DECODERS, InterleavedBlock
from sparsekv_cli.cpu.weights.vnni import BLOCK, BYTES, LINE, ByteInputs

GROUP = LANES  # rows side by side
AHEAD = 8192 if llvm.ON_AMD else 16384  # bytes by which weights are fetched before their use


def scales_of(format_: BlockFormat) -> tuple[int, int]:
    """Offset in bytes of a block's f16 scales, its start or its end, and how many they are."""
    ((at, count),) = format_.type.scales
    return at, count


def word_order(format_: BlockFormat) -> tuple[int, ...]:
    """For each word of a repacked block, its number in the file's block; scales are not counted."""
    n_words = (format_.n_bytes - 2 * scales_of(format_)[1]) // 4
    return format_.word_order or tuple(range(n_words))


def can_repack(code: int, n_rows: int) -> bool:
    """Whether this CPU gains by repacking a matrix of ggml type ``code``."""
    interleaves = FORMAT_OF_CODE[code].interleaves
    if not interleaves or n_rows % GROUP != 0:
        return False
    return interleaves == ALWAYS if vnni.is_available() else llvm.has_feature("avx2")


# --- repacking ------------------------------------------------------------------------------------


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _repack(rows, n_scales, scales_at, order, out):
    """rows uint16 (n, units a row) in blocks -> out uint16 (n / GROUP, GROUP * ...).

    A block has n_scales units at ``scales_at``, the start or the end, and words of two, which take
    the ``order``.
    """
    n_units, rest_at = n_scales + 2 * len(order), 0 if scales_at > 0 else n_scales
    for group in prange(out.shape[0]):
        for i in range(rows.shape[1] // n_units):
            for r in range(GROUP):
                row = rows[group * GROUP + r, i * n_units : (i + 1) * n_units]
                at = i * GROUP * n_units
                for unit in range(n_scales):
                    out[group, at + r] = row[scales_at + unit]
                    at += GROUP
                for word in order:
                    out[group, at + 2 * r] = row[rest_at + 2 * word]
                    out[group, at + 2 * r + 1] = row[rest_at + 2 * word + 1]
                    at += 2 * GROUP


def repack(code: int, w: np.ndarray, out: np.ndarray) -> None:
    """Repacks w, uint8 (rows, row bytes) in format ``code``, to ``out`` of the same shape."""
    scales_at, n_scales = scales_of(FORMAT_OF_CODE[code])
    units = out.reshape(len(w) // GROUP, -1).view(np.uint16)
    order = np.array(word_order(FORMAT_OF_CODE[code]))
    _repack(w.view(np.uint16), n_scales, scales_at // 2, order, units)


def repack_ref(code: int, w: np.ndarray) -> np.ndarray:
    """numpy reference of ``repack``: the layout above, written as reshapes."""
    format_ = FORMAT_OF_CODE[code]
    start, n_scales = scales_of(format_)
    end = start + 2 * n_scales
    blocks = w.reshape(len(w) // GROUP, GROUP, -1, format_.n_bytes)

    def planes(part: np.ndarray, size: int) -> np.ndarray:
        units = part.reshape(*blocks.shape[:3], -1, size)  # group, row, block, unit, byte
        moved = units.transpose(0, 2, 3, 1, 4)
        return moved.reshape(len(blocks), blocks.shape[2], -1)

    rest = np.concatenate([blocks[..., :start], blocks[..., end:]], -1)
    places = [4 * word + byte for word in word_order(format_) for byte in range(4)]
    parts = planes(blocks[..., start:end], 2), planes(rest[..., places], 4)
    return np.concatenate(parts, -1).reshape(w.shape)


# --- dot products ---------------------------------------------------------------------------------


def _dots(
    b: ir.IRBuilder, qs: list[ir.Value], inputs: ByteInputs, at: ir.Value, lines: llvm.Prefetches
) -> ir.Value:
    """<16 x i32>: a row's integers times the activations from ``at`` on."""
    sums = []
    for plane in (inputs.high, inputs.low):
        dots = const(I32, 0)
        for i, q in enumerate(qs):
            lines.step(b)
            four = llvm.splat(b, load(b, I32, b.add(plane, at), 4 * i))
            dots = vnni.dot_bytes(b, dots, q, four)
        sums.append(dots)
    return b.add(b.shl(sums[0], const(I32, 8)), sums[1])


def _short_dots(
    b: ir.IRBuilder,
    qs: list[ir.Value],
    inputs: ByteInputs,
    at: ir.Value,
    lines: llvm.Prefetches,
    room: int,
) -> ir.Value:
    """The same with AVX2, of integers so small that ``room`` sums of two products fit i16."""
    planes = ((inputs.high, 256), (inputs.low, 1))
    dots = [const(I32, 0, 8)] * 2
    for first in range(0, len(qs), room):
        sums = [[const(I16, 0)] * 2 for _ in planes]
        for i, q in enumerate(qs[first : first + room], first):
            for (plane, _), of_plane in zip(planes, sums, strict=True):
                lines.step(b)
                four = llvm.splat(b, load(b, I32, b.add(plane, at), 4 * i), 8)
                for half, part in enumerate(_halves(b, q)):
                    products = byte_products(b, part, b.bitcast(four, part.type))
                    of_plane[half] = llvm.add_in_order(b, of_plane[half], products)
        for (_, unit), of_plane in zip(planes, sums, strict=True):
            for half, total in enumerate(of_plane):
                dots[half] = b.add(dots[half], pair_products(b, total, const(I16, unit)))
    low, high = dots
    return shuffle(b, low, high, range(LANES))


def _pair_dots(
    b: ir.IRBuilder, qs: list[ir.Value], inputs: ByteInputs, at: ir.Value, lines: llvm.Prefetches
) -> ir.Value:
    """The same with AVX2, of any bytes."""
    values = b.add(inputs.values, b.mul(at, I64(2)))
    zeros = const(I8, 0, 32)
    # Of each half of the rows, what punpcklbw and punpckhbw make 16 bits of: rows 0, 1, 4 and 5,
    # and the others, of each the sum of the first two products and that of the last two.
    sums = [const(I32, 0, 8)] * 4
    places = [[start + i for start in (first, first + 16) for i in range(8)] for first in (0, 8)]
    for i, q in enumerate(qs):
        four = b.bitcast(llvm.splat(b, load(b, I64, values, 8 * i), 4), vec(I16))
        wide = [
            shuffle(b, half, zeros, [lane for place in each for lane in (place, 32)])
            for half in _halves(b, q)
            for each in places
        ]
        for part, pairs in enumerate(wide):
            products = pair_products(b, b.bitcast(pairs, vec(I16)), four)
            sums[part] = llvm.add_in_order(b, sums[part], products)
        lines.step(b)
        lines.step(b)
    even = [0, 2, 8, 10, 4, 6, 12, 14]
    odd = [lane + 1 for lane in even]
    low, high = (
        b.add(shuffle(b, first, second, even), shuffle(b, first, second, odd))
        for first, second in (sums[:2], sums[2:])
    )
    return shuffle(b, low, high, range(LANES))


def _halves(b: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """The bytes of a word's first 8 rows and of the others, <32 x i8>."""
    bytes_ = b.bitcast(word, vec(I8, BYTES))
    return [shuffle(b, bytes_, bytes_, range(start, start + 32)) for start in (0, 32)]


def _add_block(
    b: ir.IRBuilder,
    block: InterleavedBlock,
    largest: int,
    inputs: ByteInputs,
    at: ir.Value,
    total: ir.Value,
    lines: llvm.Prefetches,
) -> ir.Value:
    """total <16 x float> + the products of the block with the activations from ``at`` on."""
    room = np.iinfo(np.int16).max // (2 * 128 * largest)
    if vnni.is_available():
        dots = _dots(b, block.q, inputs, at, lines)
    elif room > 0:
        dots = _short_dots(b, block.q, inputs, at, lines, room)
    else:
        dots = _pair_dots(b, block.q, inputs, at, lines)
    dots = b.sitofp(dots, VF)
    n = 4 * len(block.q)
    sums = inputs.sums32 if n == BLOCK else inputs.sums16
    scale, known = (
        llvm.splat(b, load(b, F32, b.add(part, b.mul(b.udiv(at, I64(size)), I64(4)))))
        for part, size in ((inputs.scales, BLOCK), (sums, n))
    )
    total = llvm.fma(b, dots, b.fmul(block.scale, scale), total)
    return llvm.fma(b, block.offset, known, total)


@intrinsic
def _group_dots(typingctx, code, count, w, x, x_row, n, out, out_row):
    """The dot products of 16 rows with each of ``count`` inputs, f32 (16,) at out, out_row apart.

    code, count: literals. Addresses of the group, of quantised activations (weights/integer.py)
    x_row bytes apart, and of the results; each is the same bits whatever the others are.
    """
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (code, count)):
        return None

    def codegen(context, b, signature, args):
        code_, count_ = (type_.literal_value for type_ in signature.args[:2])
        w, x, x_row, n, out, out_row = args[2:]
        format_ = FORMAT_OF_CODE[code_]
        block_bytes = GROUP * format_.n_bytes
        rows = [vnni.inputs_at(b, b.add(x, b.mul(I64(j), x_row)), n) for j in range(count_)]

        def body(i, totals):
            p = b.add(w, b.mul(i, I64(block_bytes)))
            at = b.mul(i, I64(format_.n_elements))
            ahead = []
            if format_.n_elements == BLOCK:  # the K formats' products are slower than the memory
                ahead = [b.add(p, I64(AHEAD + line)) for line in range(0, block_bytes, LINE)]
            lines = llvm.Prefetches(ahead, 2 * BLOCK // 4, once=True)
            for block in DECODERS[format_.name](b, p):
                totals = [
                    _add_block(b, block, format_.largest, inputs, at, total, lines)
                    for inputs, total in zip(rows, totals, strict=True)
                ]
                at = b.add(at, I64(4 * len(block.q)))
            return totals

        zeros = [const(F32, 0.0)] * count_
        totals = llvm.loop(b, I64(0), b.sdiv(n, I64(format_.n_elements)), 1, zeros, body)
        for j, total in enumerate(totals):
            llvm.store(b, total, b.add(out, b.mul(I64(j), out_row)))
        return context.get_dummy_value()

    return types.void(code, count, *[types.int64] * 6), codegen


@njit(cache=True, nogil=True)
def groups_dot(
    code, integer, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):  # fmt: skip
    """``rows_dot`` (weights/dot.py) over repacked weights; first, last: multiples of GROUP."""
    for r in range(first, last, GROUP):
        at = w + r * row_bytes
        for i in range(0, n_inputs, 4):
            source, to, count = x + i * x_row, out + i * out_row + 4 * r, n_inputs - i
            if count == 1:
                _group_dots(code, 1, at, source, x_row, n_columns, to, out_row)
            elif count == 2:
                _group_dots(code, 2, at, source, x_row, n_columns, to, out_row)
            elif count == 3:
                _group_dots(code, 3, at, source, x_row, n_columns, to, out_row)
            else:
                _group_dots(code, 4, at, source, x_row, n_columns, to, out_row)
