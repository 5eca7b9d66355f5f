"""Repacked weights: sixteen rows of a matrix side by side, each in a lane of its own.

As weights lie in a file, a row's dot product ends with a sum over lanes, scales have to be spread
over them, and vectors straddle cache lines; in rows of a few hundred columns that takes most of the
time. With a row a lane, none of it is left: three to four times the products a second in cache. It
takes a copy of the weights, of the same size (llama.cpp's "repack" does the same, eight rows wide).

Layout: block i of the 16 rows of a group follows block i - 1; in it come the f16 scales, 16 of a
kind (32 bytes), then the block's other bytes in their order, four of each row (64 bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu import emit, vnni
from sparsekv_cli.cpu.blocks import FORMAT_OF_CODE, IQ4_NL_VALUES, BlockFormat, lookup16
from sparsekv_cli.cpu.emit import F16, F32, I8, I32, I64, LANES, VF, VI, const, load, vec
from sparsekv_cli.cpu.parallel import PRANGE_ONLY
from sparsekv_cli.cpu.vnni import AHEAD, BYTES, LINE, Inputs

GROUP = LANES  # rows side by side
BLOCK = vnni.BLOCK


class Part(NamedTuple):
    """Elements of a block under one scale, of 16 rows: each is q * scale + offset."""

    q: list[ir.Value]  # <64 x i8> unsigned, four consecutive elements of every row
    scale: ir.Value  # <16 x float>
    offset: ir.Value | None = None


class Block:
    """The planes of one repacked block at address p."""

    def __init__(self, b: ir.IRBuilder, p: ir.Value, n_scales: int) -> None:
        self.b, self.p, self.n_scales = b, p, n_scales

    def scale(self, i: int) -> ir.Value:
        """f16 scale i of every row, <16 x float>."""
        return self.b.fpext(load(self.b, vec(F16), self.p, 2 * LANES * i), VF)

    def word(self, i: int) -> ir.Value:
        """Bytes 4 i .. 4 i + 3 behind the scales of every row, <16 x i32>."""
        return load(self.b, VI, self.p, 2 * LANES * self.n_scales + 4 * LANES * i)


def _bits(b: ir.IRBuilder, word: ir.Value, shift: int, mask: int) -> ir.Value:
    """(word >> shift) & mask, the mask's byte repeated four times."""
    if shift:
        word = b.lshr(word, const(I32, shift))
    return b.and_(word, const(I32, mask * 0x01010101))


def _as_bytes(b: ir.IRBuilder, word: ir.Value) -> ir.Value:
    return b.bitcast(word, vec(I8, BYTES))


def _nibbles(b: ir.IRBuilder, block: Block, first: int) -> list[ir.Value]:
    """32 four-bit integers, whose low halves come first, from four words on."""
    words = [block.word(first + i) for i in range(4)]
    return [_bits(b, word, shift, 15) for shift in (0, 4) for word in words]


def _five_bits(b: ir.IRBuilder, block: Block) -> list[ir.Value]:
    """``_nibbles`` behind a word whose bit i is the fifth of element i."""
    high = block.word(0)
    q = []
    for i, nibble in enumerate(_nibbles(b, block, 1)):
        four = b.and_(b.lshr(high, const(I32, 4 * i)), const(I32, 15))
        spread = b.mul(four, const(I32, 0x00204081))  # bit j of four to bit 8 j, and others
        q.append(b.or_(nibble, b.shl(_bits(b, spread, 0, 1), const(I32, 4))))
    return q


def _signed(b: ir.IRBuilder, q: Sequence[ir.Value], scale: ir.Value, zero: int) -> Part:
    """A part whose integers are q - zero."""
    offset = b.fmul(scale, const(F32, -float(zero)))
    return Part([_as_bytes(b, word) for word in q], scale, offset)


def _unsigned(b: ir.IRBuilder, q: Sequence[ir.Value], scale: ir.Value, offset: ir.Value) -> Part:
    return Part([_as_bytes(b, word) for word in q], scale, offset)


def _q4_0(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    yield _signed(b, _nibbles(b, block, 0), block.scale(0), 8)


def _q4_1(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    yield _unsigned(b, _nibbles(b, block, 0), block.scale(0), block.scale(1))


def _q5_0(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    yield _signed(b, _five_bits(b, block), block.scale(0), 16)


def _q5_1(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    yield _unsigned(b, _five_bits(b, block), block.scale(0), block.scale(1))


def _q8_0(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    q = [b.xor(block.word(i), const(I32, -0x7F7F7F80)) for i in range(8)]  # adds 128 to each byte
    yield _signed(b, q, block.scale(0), 128)


def _iq4_nl(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    values = tuple(value + 128 for value in IQ4_NL_VALUES)
    q = [lookup16(b, values, _as_bytes(b, word)) for word in _nibbles(b, block, 0)]
    yield _signed(b, q, block.scale(0), 128)


def _k_scales(b: ir.IRBuilder, block: Block, i: int) -> tuple[ir.Value, ir.Value]:
    """Scale and offset of 32 elements i of a Q4_K or Q5_K block: 6-bit pairs in 12 bytes."""
    first, second, third = (block.word(j) for j in range(3))
    shift = 8 * (i % 4)

    def field(word: ir.Value, at: int, mask: int) -> ir.Value:
        return b.and_(b.lshr(word, const(I32, at)), const(I32, mask))

    if i < 4:
        integers = [field(word, shift, 63) for word in (first, second)]
    else:
        integers = [
            b.or_(field(third, shift + low, 15), b.shl(field(word, shift + 6, 3), const(I32, 4)))
            for word, low in ((first, 0), (second, 4))
        ]
    scale, minimum = (b.sitofp(integer, VF) for integer in integers)
    return b.fmul(block.scale(0), scale), b.fneg(b.fmul(block.scale(1), minimum))


def _q4_k(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    for i in range(8):
        words = [block.word(3 + 8 * (i // 2) + j) for j in range(8)]
        q = [_bits(b, word, 4 * (i % 2), 15) for word in words]
        yield _unsigned(b, q, *_k_scales(b, block, i))


def _q5_k(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    for i in range(8):
        q = []
        for j in range(8):
            low = _bits(b, block.word(11 + 8 * (i // 2) + j), 4 * (i % 2), 15)
            q.append(b.or_(low, b.shl(_bits(b, block.word(3 + j), i, 1), const(I32, 4))))
        yield _unsigned(b, q, *_k_scales(b, block, i))


def _q6_k(b: ir.IRBuilder, block: Block) -> Iterator[Part]:
    for i in range(16):  # 16 elements each; words: 32 of low bits, 16 of high ones, 4 of scales
        n, quarter, half = i // 8, i // 2 % 4, i % 2
        q = []
        for j in range(4):
            low = block.word(16 * n + 8 * (quarter % 2) + 4 * half + j)
            high = _bits(b, block.word(32 + 8 * n + 4 * half + j), 2 * quarter, 3)
            q.append(b.or_(_bits(b, low, 4 * (quarter // 2), 15), b.shl(high, const(I32, 4))))
        word = b.shl(block.word(48 + i // 4), const(I32, 24 - 8 * (i % 4)))
        scale = b.sitofp(b.ashr(word, const(I32, 24)), VF)
        yield _signed(b, q, b.fmul(block.scale(0), scale), 32)


class Repacking(NamedTuple):
    """Where a format's block has its f16 scales (bytes), and how its planes become integers."""

    scales: tuple[int, ...]
    parts: Callable[[ir.IRBuilder, Block], Iterator[Part]]


REPACKED: dict[int, Repacking] = {
    2: Repacking((0,), _q4_0),
    3: Repacking((0, 2), _q4_1),
    6: Repacking((0,), _q5_0),
    7: Repacking((0, 2), _q5_1),
    8: Repacking((0,), _q8_0),
    12: Repacking((0, 2), _q4_k),
    13: Repacking((0, 2), _q5_k),
    14: Repacking((208,), _q6_k),
    20: Repacking((0,), _iq4_nl),
}


def can_repack(code: int, n_rows: int) -> bool:
    """Whether this CPU gains by repacking a matrix of ggml type ``code``."""
    return code in REPACKED and n_rows % GROUP == 0 and vnni.is_available()


# --- repacking ------------------------------------------------------------------------------------


def _places(code: int) -> tuple[np.ndarray, np.ndarray]:
    """Of each 16-bit word of a block: its place in the repacked block for row 0, and the step from
    one row to the next; int64, in words.
    """
    n_words = FORMAT_OF_CODE[code].n_bytes // 2
    scales = [at // 2 for at in REPACKED[code].scales]
    place, step = np.empty(n_words, np.int64), np.empty(n_words, np.int64)
    others = [word for word in range(n_words) if word not in scales]
    for i, word in enumerate(scales):
        place[word], step[word] = i * GROUP, 1
    for i, word in enumerate(others):
        place[word] = len(scales) * GROUP + i // 2 * 2 * GROUP + i % 2
        step[word] = 2
    return place, step


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def _repack(rows, place, step, out):
    """rows uint16 (n, words a row) -> out uint16 (n / GROUP, GROUP * words a row)."""
    n_words = place.shape[0]
    for group in prange(out.shape[0]):
        for i in range(rows.shape[1] // n_words):
            at = i * GROUP * n_words
            for word in range(n_words):
                to = at + place[word]
                for r in range(GROUP):
                    out[group, to + r * step[word]] = rows[group * GROUP + r, i * n_words + word]


def repack(code: int, w: np.ndarray, out: np.ndarray) -> None:
    """Repacks w, uint8 (rows, row bytes) in format ``code``, to ``out`` of the same shape."""
    place, step = _places(code)
    words = out.reshape(len(w) // GROUP, -1).view(np.uint16)
    _repack(w.view(np.uint16), place, step, words)


def repack_ref(code: int, w: np.ndarray) -> np.ndarray:
    """numpy reference of ``repack``: the layout above, said in reshapes."""
    n_bytes = FORMAT_OF_CODE[code].n_bytes
    scales = [at + i for at in REPACKED[code].scales for i in range(2)]
    others = [at for at in range(n_bytes) if at not in scales]
    blocks = w.reshape(len(w) // GROUP, GROUP, -1, n_bytes)

    def planes(columns: list[int], size: int) -> np.ndarray:
        part = blocks[..., columns].reshape(*blocks.shape[:3], -1, size)
        return part.transpose(0, 2, 3, 1, 4).reshape(len(blocks), blocks.shape[2], -1)

    return np.concatenate([planes(scales, 2), planes(others, 4)], -1).reshape(w.shape)


# --- dot products ---------------------------------------------------------------------------------


def _add_part(
    b: ir.IRBuilder, part: Part, inputs: Inputs, at: ir.Value, first: int, total: ir.Value
) -> ir.Value:
    """total <16 x float> + the part's products with activations ``first`` of the block at ``at``."""
    sums = []
    for plane in (inputs.high, inputs.low):
        dots = const(I32, 0)
        for i, q in enumerate(part.q):
            four = load(b, I32, b.add(plane, at), first + 4 * i)
            dots = vnni.dot_bytes(b, dots, q, emit.splat(b, four))
        sums.append(dots)
    dots = b.sitofp(b.add(b.shl(sums[0], const(I32, 8)), sums[1]), VF)
    scales = b.add(inputs.scales, b.sdiv(at, I64(BLOCK // 4)))
    scale = emit.splat(b, load(b, F32, scales, first // BLOCK * 4))
    total = emit.fma(b, dots, b.fmul(part.scale, scale), total)
    if part.offset is None:
        return total
    size = 4 * len(part.q)  # elements: 16 or 32
    known = inputs.sums32 if size == BLOCK else inputs.sums16
    known = b.add(known, b.sdiv(at, I64(size // 4)))
    return emit.fma(b, part.offset, emit.splat(b, load(b, F32, known, first // size * 4)), total)


def emit_group(
    b: ir.IRBuilder, format_: BlockFormat, w: ir.Value, xs: Sequence[ir.Value], n: ir.Value
) -> list[ir.Value]:
    """The dot products, <16 x float>, of the 16 rows at w with each of ``xs``: addresses of n
    quantised activations (integer.py). Each is the same bits whatever the others are.
    """
    repacking = REPACKED[format_.code]
    group_bytes = GROUP * format_.n_bytes
    rows = [vnni.inputs_at(b, x, n) for x in xs]

    def body(i: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        p = b.add(w, b.mul(i, I64(group_bytes)))
        for line in range(0, group_bytes, LINE):
            emit.prefetch(b, b.add(p, I64(AHEAD + line)), once=True)
        at = b.mul(i, I64(format_.n_elements))
        first = 0
        for part in repacking.parts(b, Block(b, p, len(repacking.scales))):
            totals = [
                _add_part(b, part, inputs, at, first, total)
                for inputs, total in zip(rows, totals, strict=True)
            ]
            first += 4 * len(part.q)
        return totals

    n_blocks = b.sdiv(n, I64(format_.n_elements))
    return emit.loop(b, I64(0), n_blocks, 1, [const(F32, 0.0)] * len(xs), body)


@intrinsic
def _group_dots(typingctx, code, count, w, x, x_row, n, out, out_row):
    """``emit_group`` for ``count`` inputs x_row bytes apart; sums f32 (16,) at out, out_row apart.

    code, count: literals. Addresses.
    """
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (code, count)):
        return None

    def codegen(context, b, signature, args):
        code_, count_ = (type_.literal_value for type_ in signature.args[:2])
        w, x, x_row, n, out, out_row = args[2:]
        xs = [b.add(x, b.mul(I64(j), x_row)) for j in range(count_)]
        for j, total in enumerate(emit_group(b, FORMAT_OF_CODE[code_], w, xs, n)):
            emit.store(b, total, b.add(out, b.mul(I64(j), out_row)))
        return context.get_dummy_value()

    return types.void(code, count, *[types.int64] * 6), codegen


@njit(cache=True, nogil=True)
def groups_dot(
    code, integer, w, row_bytes, n_columns, x, x_row, n_inputs, out, out_row, first, last
):  # fmt: skip
    """``matvec.rows_dot`` over repacked weights; first and last are multiples of GROUP."""
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
