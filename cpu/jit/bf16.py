"""Products of small bf16 matrices by the CPU's own instructions: AMX tiles, or vdpbf16ps.

Both instructions read pairs of bf16, multiply pair by pair and add to sums in f32. The left matrix
is stored by rows. The right one is stored in pairs of rows: the elements (2i, 2i + 1) of a column
are neighbours in 32 bits.
"""

import ctypes
import struct
import sys
from collections.abc import Sequence

from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.llvm import F32, I8, I16, I32, I64, LANES, VF, VI, const, load, splat, vec

HAS_TILES = llvm.has_feature("amx-bf16") and llvm.has_feature("avx512bf16")
TILE = 16  # rows of a tile, and its 32-bit lanes a row
# Rows of the left matrix a call. Two tiles of rows and two of columns need four tiles of sums.
# Without tiles, six rows and four vectors of columns need 24 of 32 registers for sums.
ROWS = 2 * TILE if HAS_TILES else 6
PAIRS = TILE  # pairs in a unit of the summed index
DOT = "llvm.x86.avx512bf16.dpbf16ps.512"
# Linux lets a process use tiles only after it has asked for them.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18


def _ask_for_tiles() -> bool:
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0


# Requested at import: without the permission, an instruction on tiles kills the process.
_MAY_USE_TILES = HAS_TILES and _ask_for_tiles()


def is_available() -> bool:
    """Returns whether the CPU has these instructions and the system allows them.

    LLVM 16 changed the argument types of its vdpbf16ps intrinsic. Older versions are not used.
    """
    if not llvm.has_feature("avx512bf16") or binding.llvm_version_info < (16, 0, 0):
        return False
    return _MAY_USE_TILES or not HAS_TILES


class _BFloat(ir.Type):
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()


def narrowed(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Returns the bf16 bits of a <16 x float> or float, rounded to nearest, ties to even."""
    is_vector = isinstance(value.type, ir.VectorType)
    if is_vector and llvm.has_feature("avx512bf16"):
        return b.bitcast(b.fptrunc(value, vec(BF16)), vec(I16))
    one, half, sixteen = (const(I32, x) if is_vector else I32(x) for x in (1, 0x7FFF, 16))
    bits = b.bitcast(value, VI if is_vector else I32)
    rounded = b.add(bits, b.add(b.and_(b.lshr(bits, sixteen), one), half))
    return b.trunc(b.lshr(rounded, sixteen), vec(I16) if is_vector else I16)


def widened(b: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Returns the bits of a bf16, or <16 x i16>, as f32."""
    is_vector = isinstance(bits.type, ir.VectorType)
    wide = b.zext(bits, VI if is_vector else I32)
    sixteen = const(I32, 16) if is_vector else I32(16)
    return b.bitcast(b.shl(wide, sixteen), VF if is_vector else F32)


# --- tiles ----------------------------------------------------------------------------------------


def _tile(b: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    llvm.call_named(b, f"llvm.x86.{name}", ir.VoidType(), *args)


@intrinsic
def begin(typingctx):
    """Sets the tiles' sizes. A thread calls it once, before its first ``multiply``."""

    def codegen(context, builder, signature, args):
        if HAS_TILES:
            shape = struct.pack("<BB14x8H16x8B8x", 1, 0, *[4 * TILE] * 8, *[TILE] * 8)
            place = context.insert_const_bytes(builder.module, shape, "tiles")
            _tile(builder, "ldtilecfg", builder.bitcast(place, ir.PointerType()))
        return context.get_dummy_value()

    return types.void(), codegen


@emitter
def end(builder):
    """Frees the tiles after a thread's last ``multiply``, so that the system need not save them."""
    if HAS_TILES:
        _tile(builder, "tilerelease")


def _multiply_tiles(b: ir.IRBuilder, n: int, given: Sequence[ir.Value], adding: bool) -> None:
    """``multiply`` with AMX: two tiles of rows by n tiles of columns, two of columns at a time."""
    a, a_row, a_unit, right, b_row, n_units, c, c_row = given

    def pointer(address: ir.Value) -> ir.Value:
        return b.inttoptr(address, ir.PointerType())

    lefts = [b.add(a, b.mul(a_row, I64(TILE * i))) for i in range(2)]
    for first in range(0, n, 2):
        columns = range(first, min(n, first + 2))
        sums = [
            (I8(2 * i + j - first), b.add(b.add(c, b.mul(c_row, I64(TILE * i))), I64(4 * TILE * j)))
            for i in range(2)
            for j in columns
        ]
        for tile, place in sums:
            if adding:
                _tile(b, "tileloadd64", tile, pointer(place), c_row)
            else:
                _tile(b, "tilezero", tile)

        @llvm.every(b, n_units)
        def step(unit, columns=columns, first=first):
            for i, left in enumerate(lefts):
                at = b.add(left, b.mul(unit, a_unit))
                _tile(b, "tileloadd64", I8(4 + i), pointer(at), a_row)
            at = b.add(right, b.mul(b.mul(unit, I64(PAIRS)), b_row))
            for j in columns:
                place = pointer(b.add(at, I64(4 * TILE * j)))
                _tile(b, "tileloadd64", I8(6 + j - first), place, b_row)
            for i in range(2):
                for j in range(len(columns)):
                    _tile(b, "tdpbf16ps", I8(2 * i + j), I8(4 + i), I8(6 + j))

        for tile, place in sums:
            _tile(b, "tilestored64", tile, pointer(place), c_row)


# --- vectors --------------------------------------------------------------------------------------


def _multiply_vectors(b: ir.IRBuilder, n: int, given: Sequence[ir.Value], adding: bool) -> None:
    """``multiply`` with vdpbf16ps, for ROWS rows and n vectors of columns."""
    a, a_row, a_unit, right, b_row, n_units, c, c_row = given
    pairs = vec(BF16, 2 * LANES)
    a_rows = [b.add(a, b.mul(a_row, I64(i))) for i in range(ROWS)]
    c_rows = [b.add(c, b.mul(c_row, I64(i))) for i in range(ROWS)]

    def step(unit, sums):
        lefts = [b.add(row, b.mul(unit, a_unit)) for row in a_rows]

        def pair(k, sums):
            at = b.add(right, b.mul(b.add(b.mul(unit, I64(PAIRS)), k), b_row))
            columns = [load(b, pairs, at, 4 * LANES * j) for j in range(n)]
            new = []
            for i in range(ROWS):
                word = load(b, I32, b.add(lefts[i], b.mul(k, I64(4))))
                row = b.bitcast(splat(b, word), pairs)
                new += [
                    llvm.call_named(b, DOT, VF, sums[i * n + j], row, column)
                    for j, column in enumerate(columns)
                ]
            return new

        return llvm.loop(b, I64(0), I64(PAIRS), 1, sums, pair)

    zero = const(F32, 0.0)
    start = [load(b, VF, at, 4 * LANES * j) if adding else zero for at in c_rows for j in range(n)]
    sums = llvm.loop(b, I64(0), n_units, 1, start, step)
    for i, at in enumerate(c_rows):
        for j in range(n):
            llvm.store(b, sums[i * n + j], at, 4 * LANES * j)


@emitter(n_vectors=LITERAL, add=(0, 1))
def multiply(builder, n_vectors, a, a_row, a_unit, b, b_row, n_units, c, c_row, add):
    """c (ROWS, 16 n_vectors) f32 = a b, or c + a b where ``add``. a, b and c are addresses.

    a: ROWS rows, a_row bytes apart; a row is n_units units of PAIRS pairs of bf16, a_unit bytes
    apart. b: a row of 16 n_vectors pairs for each pair of a, b_row bytes apart. n_vectors: a
    literal. Call it between ``begin`` and ``end``.
    """
    emitted = _multiply_tiles if HAS_TILES else _multiply_vectors
    emitted(builder, n_vectors, (a, a_row, a_unit, b, b_row, n_units, c, c_row), add == 1)
