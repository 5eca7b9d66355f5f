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
from sparsekv_cli.cpu.jit.value import (
    F32,
    I8,
    I16,
    I32,
    LANES,
    VF,
    VI,
    Value,
    call_named,
    const,
    load,
    store,
    vec,
    write,
)

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


def narrowed(value: Value) -> Value:
    """Returns the bf16 bits of a <16 x float> or float, rounded to nearest, ties to even."""
    is_vector = isinstance(value.type, ir.VectorType)
    if is_vector and llvm.has_feature("avx512bf16"):
        return value.to(vec(BF16)).bitcast(vec(I16))
    bits = value.bitcast(VI if is_vector else I32)
    rounded = bits + ((bits >> 16 & 1) + 0x7FFF)
    return (rounded >> 16).to(vec(I16) if is_vector else I16)


def widened(bits: Value) -> Value:
    """Returns the bits of a bf16, or <16 x i16>, as f32."""
    is_vector = isinstance(bits.type, ir.VectorType)
    wide = bits.unsigned_to(VI if is_vector else I32)
    return (wide << 16).bitcast(VF if is_vector else F32)


# --- tiles ----------------------------------------------------------------------------------------


def _tile(name: str, *args: Value) -> None:
    call_named(f"llvm.x86.{name}", ir.VoidType(), *args)


@intrinsic
def begin(typingctx):
    """Sets the tiles' sizes. A thread calls it once, before its first ``multiply``."""

    def codegen(context, b, signature, args):
        if HAS_TILES:
            shape = struct.pack("<BB14x8H16x8B8x", 1, 0, *[4 * TILE] * 8, *[TILE] * 8)
            place = context.insert_const_bytes(b.module, shape, "tiles")
            write(b, _tile, "ldtilecfg", b.bitcast(place, ir.PointerType()))
        return context.get_dummy_value()

    return types.void(), codegen


@emitter
def end():
    """Frees the tiles after a thread's last ``multiply``, so that the system need not save them."""
    if HAS_TILES:
        _tile("tilerelease")


def _multiply_tiles(n: int, given: Sequence[Value], adding: bool) -> None:
    """``multiply`` with AMX: two tiles of rows by n tiles of columns, two of columns at a time."""
    a, a_row, a_unit, right, b_row, n_units, c, c_row = given

    lefts = [a + a_row * (TILE * i) for i in range(2)]
    for first in range(0, n, 2):
        columns = range(first, min(n, first + 2))
        sums = [
            (I8(2 * i + j - first), c + c_row * (TILE * i) + 4 * TILE * j)
            for i in range(2)
            for j in columns
        ]
        for tile, place in sums:
            if adding:
                _tile("tileloadd64", tile, place.pointer(), c_row)
            else:
                _tile("tilezero", tile)

        @llvm.every(n_units)
        def step(unit, columns=columns, first=first):
            for i, left in enumerate(lefts):
                at = left + unit * a_unit
                _tile("tileloadd64", I8(4 + i), at.pointer(), a_row)
            at = right + unit * PAIRS * b_row
            for j in columns:
                place = (at + 4 * TILE * j).pointer()
                _tile("tileloadd64", I8(6 + j - first), place, b_row)
            for i in range(2):
                for j in range(len(columns)):
                    _tile("tdpbf16ps", I8(2 * i + j), I8(4 + i), I8(6 + j))

        for tile, place in sums:
            _tile("tilestored64", tile, place.pointer(), c_row)


# --- vectors --------------------------------------------------------------------------------------


def _multiply_vectors(n: int, given: Sequence[Value], adding: bool) -> None:
    """``multiply`` with vdpbf16ps, for ROWS rows and n vectors of columns."""
    a, a_row, a_unit, right, b_row, n_units, c, c_row = given
    pairs = vec(BF16, 2 * LANES)
    a_rows = [a + a_row * i for i in range(ROWS)]
    c_rows = [c + c_row * i for i in range(ROWS)]

    def step(unit, sums):
        lefts = [row + unit * a_unit for row in a_rows]

        def pair(k, sums):
            at = right + (unit * PAIRS + k) * b_row
            columns = [load(pairs, at, 4 * LANES * j) for j in range(n)]
            new = []
            for i in range(ROWS):
                word = load(I32, lefts[i] + k * 4)
                row = word.splat().bitcast(pairs)
                new += [
                    call_named(DOT, VF, sums[i * n + j], row, column)
                    for j, column in enumerate(columns)
                ]
            return new

        return llvm.loop(0, PAIRS, 1, sums, pair)

    zero = const(F32, 0.0)
    start = [load(VF, at, 4 * LANES * j) if adding else zero for at in c_rows for j in range(n)]
    sums = llvm.loop(0, n_units, 1, start, step)
    for i, at in enumerate(c_rows):
        for j in range(n):
            store(sums[i * n + j], at, 4 * LANES * j)


@emitter(n_vectors=LITERAL, add=(0, 1))
def multiply(n_vectors, a, a_row, a_unit, b, b_row, n_units, c, c_row, add):
    """c (ROWS, 16 n_vectors) f32 = a b, or c + a b where ``add``. a, b and c are addresses.

    a: ROWS rows, a_row bytes apart; a row is n_units units of PAIRS pairs of bf16, a_unit bytes
    apart. b: a row of 16 n_vectors pairs for each pair of a, b_row bytes apart. n_vectors: a
    literal. Call it between ``begin`` and ``end``.
    """
    emitted = _multiply_tiles if HAS_TILES else _multiply_vectors
    emitted(n_vectors, (a, a_row, a_unit, b, b_row, n_units, c, c_row), add == 1)
