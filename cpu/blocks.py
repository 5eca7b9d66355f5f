"""The GGUF weight formats as data: block sizes, and how a block becomes small integers and scales.

``decode`` of a quantised format writes LLVM IR that turns one block into groups of sixteen
elements, in order: q (<16 x i8>), a scale and, for the asymmetric formats, an offset; an element is
q * scale + offset. The f32 and the integer dot products and the dequantisation of every format come
from that one description. Layouts: FORMAT.md section 3; the values equal ``gguf.quants.dequantize``
bit for bit (tests/cpu/test_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import binding, ir

from sparsekv_cli.cpu import emit
from sparsekv_cli.cpu.emit import F16, F32, I8, I16, I32, LANES, VF, VI, const, load, splat, vec

# Element values of the non-linear 4-bit formats (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4).
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Group(NamedTuple):
    """Sixteen elements: q * scale + offset. Groups with one scale hold the same IR value."""

    q: ir.Value  # <16 x i8>
    signed: bool  # whether q is signed
    scale: ir.Value  # float
    offset: ir.Value | None = None  # float; None: 0

    def floats(self, b: ir.IRBuilder) -> ir.Value:
        """<16 x float>. q * scale is exact in f32 for every format, so this rounds once."""
        q = b.sitofp(self.q, VF) if self.signed else b.uitofp(self.q, VF)
        if self.offset is None:
            return b.fmul(q, splat(b, self.scale))
        return emit.fma(b, q, splat(b, self.scale), splat(b, self.offset))


Decode = Callable[[ir.IRBuilder, ir.Value], Iterator[Group]]


@dataclass(frozen=True)
class BlockFormat:
    """One weight format. ``code`` is ggml's type number; plain floats have no ``decode``."""

    name: str
    code: int
    n_elements: int
    n_bytes: int
    decode: Decode | None = None

    def floats(self, b: ir.IRBuilder, p: ir.Value) -> Iterator[ir.Value]:
        """The block at address p as <16 x float> vectors, in order."""
        if self.decode is None:
            yield _plain_floats(b, p, self.name)
        else:
            for group in self.decode(b, p):
                yield group.floats(b)


def _plain_floats(b: ir.IRBuilder, p: ir.Value, name: str) -> ir.Value:
    if name == "F32":
        return load(b, VF, p)
    if name == "F16":
        return emit.load_half_lanes(b, p)
    wide = b.shl(b.zext(load(b, vec(I16), p), VI), const(I32, 16))
    return b.bitcast(wide, VF)


def _nibbles(b: ir.IRBuilder, bytes_: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Low and high four bits of <16 x i8>."""
    return b.and_(bytes_, const(I8, 15)), b.lshr(bytes_, const(I8, 4))


def _bits_of_i16(b: ir.IRBuilder, mask: ir.Value, value: int) -> ir.Value:
    """<16 x i8> holding ``value`` in the lanes whose bit is set in the i16 ``mask``."""
    lanes = b.bitcast(mask, vec(ir.IntType(1)))
    return b.select(lanes, const(I8, value), const(I8, 0))


def _lookup16(b: ir.IRBuilder, table: tuple[int, ...], idx: ir.Value) -> ir.Value:
    """table[idx] for <16 x i8> indices 0..15, by the byte shuffle of the CPU where it has one."""
    table_vec = ir.Constant(vec(I8), [value & 255 for value in table])
    triple = binding.get_default_triple()
    name = {"x86_64": "llvm.x86.ssse3.pshuf.b.128", "aarch64": "llvm.aarch64.neon.tbl1.v16i8"}.get(
        triple.split("-")[0].replace("arm64", "aarch64")
    )
    if name is not None:
        return emit.call_named(b, name, vec(I8), table_vec, idx)
    result = const(I8, table[0] & 255)
    for position in range(1, 16):
        hit = b.icmp_unsigned("==", idx, const(I8, position))
        result = b.select(hit, const(I8, table[position] & 255), result)
    return result


def _q4_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d = emit.half_to_float(b, p)
    for q in _nibbles(b, load(b, vec(I8), p, 2)):
        yield Group(b.sub(q, const(I8, 8)), True, d)


def _q4_1(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d, m = (emit.half_to_float(b, p, at) for at in (0, 2))
    for q in _nibbles(b, load(b, vec(I8), p, 4)):
        yield Group(q, False, d, m)


def _five_bits(b: ir.IRBuilder, p: ir.Value, qh_at: int, qs_at: int) -> Iterator[ir.Value]:
    for half, q in enumerate(_nibbles(b, load(b, vec(I8), p, qs_at))):
        high = _bits_of_i16(b, load(b, I16, p, qh_at + 2 * half), 16)
        yield b.or_(q, high)


def _q5_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d = emit.half_to_float(b, p)
    for q in _five_bits(b, p, 2, 6):
        yield Group(b.sub(q, const(I8, 16)), True, d)


def _q5_1(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d, m = (emit.half_to_float(b, p, at) for at in (0, 2))
    for q in _five_bits(b, p, 4, 8):
        yield Group(q, False, d, m)


def _q8_0(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d = emit.half_to_float(b, p)
    for half in range(2):
        yield Group(load(b, vec(I8), p, 2 + 16 * half), True, d)


def _q2_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d, dmin = (emit.half_to_float(b, p, at) for at in (80, 82))
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        scale = load(b, I8, p, group)
        dl = b.fmul(d, b.uitofp(b.and_(scale, I8(15)), F32))
        ml = b.fmul(dmin, b.uitofp(b.lshr(scale, I8(4)), F32))
        q = load(b, vec(I8), p, 16 + 32 * n + 16 * half)
        q = b.and_(b.lshr(q, const(I8, 2 * shift)), const(I8, 3))
        yield Group(q, False, dl, b.fneg(ml))


def _q3_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d = emit.half_to_float(b, p, 108)
    for group in range(16):
        n, shift, half = group // 8, group // 2 % 4, group % 2
        low = load(b, I8, p, 96 + group % 8)
        low = b.and_(low, I8(15)) if group < 8 else b.lshr(low, I8(4))
        high = b.and_(b.lshr(load(b, I8, p, 104 + group % 4), I8(2 * (group // 4))), I8(3))
        scale = b.sub(b.or_(low, b.shl(high, I8(4))), I8(32))
        dl = b.fmul(d, b.sitofp(scale, F32))
        q = load(b, vec(I8), p, 32 + 32 * n + 16 * half)
        q = b.and_(b.lshr(q, const(I8, 2 * shift)), const(I8, 3))
        mask = b.and_(load(b, vec(I8), p, 16 * half), const(I8, 1 << (4 * n + shift)))
        is_set = b.icmp_unsigned("!=", mask, const(I8, 0))
        yield Group(b.sub(q, b.select(is_set, const(I8, 0), const(I8, 4))), True, dl)


def _k_scale_min(b: ir.IRBuilder, p: ir.Value, group: int) -> tuple[ir.Value, ir.Value]:
    """6-bit scale and min (i8) of sub-block ``group`` of Q4_K and Q5_K; 12 bytes at offset 4."""
    if group < 4:
        scale = b.and_(load(b, I8, p, 4 + group), I8(63))
        minimum = b.and_(load(b, I8, p, 8 + group), I8(63))
        return scale, minimum
    both = load(b, I8, p, 8 + group)
    scale_high = b.lshr(load(b, I8, p, group), I8(6))
    min_high = b.lshr(load(b, I8, p, 4 + group), I8(6))
    scale = b.or_(b.and_(both, I8(15)), b.shl(scale_high, I8(4)))
    minimum = b.or_(b.lshr(both, I8(4)), b.shl(min_high, I8(4)))
    return scale, minimum


def _k_affine(b: ir.IRBuilder, p: ir.Value, group: int) -> tuple[ir.Value, ir.Value]:
    """Scale and offset of sub-block ``group`` of Q4_K and Q5_K."""
    d, dmin = (emit.half_to_float(b, p, at) for at in (0, 2))
    scale, minimum = _k_scale_min(b, p, group)
    return b.fmul(d, b.uitofp(scale, F32)), b.fneg(b.fmul(dmin, b.uitofp(minimum, F32)))


def _q4_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    for group in range(8):
        dl, ml = _k_affine(b, p, group)
        for half in range(2):
            bytes_ = load(b, vec(I8), p, 16 + 32 * (group // 2) + 16 * half)
            yield Group(_nibbles(b, bytes_)[group % 2], False, dl, ml)


def _q5_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    for group in range(8):
        dl, ml = _k_affine(b, p, group)
        for half in range(2):
            bytes_ = load(b, vec(I8), p, 48 + 32 * (group // 2) + 16 * half)
            high = b.lshr(load(b, vec(I8), p, 16 + 16 * half), const(I8, group))
            high = b.shl(b.and_(high, const(I8, 1)), const(I8, 4))
            yield Group(b.or_(_nibbles(b, bytes_)[group % 2], high), False, dl, ml)


def _q6_k(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d = emit.half_to_float(b, p, 208)
    for group in range(16):
        dl = b.fmul(d, b.sitofp(load(b, I8, p, 192 + group), F32))
        n, quarter, half = group // 8, group // 2 % 4, group % 2
        low_at = 64 * n + 32 * (quarter % 2) + 16 * half
        low = _nibbles(b, load(b, vec(I8), p, low_at))[quarter // 2]
        high = b.lshr(load(b, vec(I8), p, 128 + 32 * n + 16 * half), const(I8, 2 * quarter))
        q = b.or_(low, b.shl(b.and_(high, const(I8, 3)), const(I8, 4)))
        yield Group(b.sub(q, const(I8, 32)), True, dl)


def _iq4_nl(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d = emit.half_to_float(b, p)
    for q in _nibbles(b, load(b, vec(I8), p, 2)):
        yield Group(_lookup16(b, IQ4_NL_VALUES, q), True, d)


def _iq4_xs(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    d = emit.half_to_float(b, p)
    scales_high = load(b, I16, p, 2)
    for group in range(8):
        low = b.lshr(load(b, I8, p, 4 + group // 2), I8(4 * (group % 2)))
        high = b.trunc(b.lshr(scales_high, I16(2 * group)), I8)
        scale = b.or_(b.and_(low, I8(15)), b.shl(b.and_(high, I8(3)), I8(4)))
        dl = b.fmul(d, b.sitofp(b.sub(scale, I8(32)), F32))
        for q in _nibbles(b, load(b, vec(I8), p, 8 + 16 * group)):
            yield Group(_lookup16(b, IQ4_NL_VALUES, q), True, dl)


def _mxfp4(b: ir.IRBuilder, p: ir.Value) -> Iterator[Group]:
    # Half of the E8M0 scale 2^(e - 127): the table holds doubled values. e < 2 is subnormal.
    exponent = b.zext(load(b, I8, p), I32)
    normal = b.shl(b.sub(exponent, I32(1)), I32(23))
    tiny = b.shl(I32(0x00200000), exponent)
    bits = b.select(b.icmp_unsigned("<", exponent, I32(2)), tiny, normal)
    d = b.bitcast(bits, F32)
    for q in _nibbles(b, load(b, vec(I8), p, 1)):
        yield Group(_lookup16(b, MXFP4_VALUES, q), True, d)


# Plain floats are read as blocks of 16; rows that are no multiple of 16 have a scalar tail.
FORMATS: dict[str, BlockFormat] = {
    name: BlockFormat(name, code, n_elements, n_bytes, decode)
    for name, code, n_elements, n_bytes, decode in (
        ("F32", 0, LANES, 4 * LANES, None),
        ("F16", 1, LANES, 2 * LANES, None),
        ("Q4_0", 2, 32, 18, _q4_0),
        ("Q4_1", 3, 32, 20, _q4_1),
        ("Q5_0", 6, 32, 22, _q5_0),
        ("Q5_1", 7, 32, 24, _q5_1),
        ("Q8_0", 8, 32, 34, _q8_0),
        ("Q2_K", 10, 256, 84, _q2_k),
        ("Q3_K", 11, 256, 110, _q3_k),
        ("Q4_K", 12, 256, 144, _q4_k),
        ("Q5_K", 13, 256, 176, _q5_k),
        ("Q6_K", 14, 256, 210, _q6_k),
        ("IQ4_NL", 20, 32, 18, _iq4_nl),
        ("IQ4_XS", 23, 256, 136, _iq4_xs),
        ("BF16", 30, LANES, 2 * LANES, None),
        ("MXFP4", 39, 32, 17, _mxfp4),
    )
}
FORMAT_OF_CODE = {format_.code: format_ for format_ in FORMATS.values()}
PLAIN_FLOATS = {"F32": F32, "F16": F16, "BF16": I16}
