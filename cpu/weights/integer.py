"""Integer dot products: activations are rounded once for each layer input, in blocks of 32.

The activations have 8 bits, as in llama.cpp, or 16. On CPUs with byte products, 8 bits need half as
many products. With 16 bits the error is about 2^-16 of a block's largest activation, and logits
stay within f32 noise of the f32 path. The 32 products of a block are summed exactly in i32 and
scaled once. The f32 path converts every weight instead. CPUs with vpdpbusd or sdot use
weights/vnni.py, and repacked weights use weights/interleaved.py. Others use this file: vpmaddwd on
AVX2 and AVX-512, widening multiply-adds on NEON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
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
    select,
    store,
    vec,
)
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.block import BlockFormat

VF8 = vec(F32, 8)
BLOCK = 32
# The largest integer of an activation of one or two signed bytes (planes).
LARGEST = {1: 127.0, 2: 127 * 256 + 127.0}
SMALLEST = 1e-30
ACCUMULATORS = 4  # sums in flight
BYTES_A_VALUE = 4 if vnni.has_both_forms() else 2


@njit(cache=True, nogil=True)
def quantized_bytes(n):
    """Returns the bytes of ``quantize_activations``' output for n elements, n a multiple of 32.

    Layout: i16 values (n,), or for weights/vnni.py their high bytes (n,) and low bytes (n,), both
    signed. Then come f32 scales (n / 32,), and f32 sums of scale * value over 16 (n / 16,) and over
    32 (n / 32,). With AVX2 the output has both forms, for weights/interleaved.py: i16 values first,
    bytes last.
    """
    return BYTES_A_VALUE * n + 8 * (n // BLOCK) + 4 * (n // LANES)


@njit(cache=True, nogil=True)
def quantized_stride(n):
    """Returns the bytes of a row of n quantised activations, in whole blocks and cache lines."""
    return (quantized_bytes((n + BLOCK - 1) // BLOCK * BLOCK) + 63) // 64 * 64


class Rounded(NamedTuple):
    """A block of activations as integers."""

    halves: list[Value]  # two <16 x float>
    scale: Value
    sums: list[Value]  # of scale * integer over each half


def round_halves(halves: list[Value], largest: float) -> Rounded:
    """Rounds a block's halves, two <16 x float>, to integers up to ``largest``."""
    sizes = [half.call("fabs") for half in halves]
    peak = llvm.max_lanes(call_named("llvm.maxnum.v16f32", VF, *sizes))
    # For a smaller peak 1 / scale would be infinite. Such a block is rounded to zeros.
    is_zero = peak < SMALLEST
    scale = peak / largest
    inverse = select(is_zero, 0.0, largest / peak).splat()
    scaled = (half * inverse for half in halves)
    rounded = [half.call("rint") for half in scaled]
    sums = [llvm.sum_lanes(half) * scale for half in rounded]
    return Rounded(rounded, scale, sums)


@emitter(n_planes=(1, 2))
def quantize_activations(n_planes, x, out, n):
    """Rounds x f32 (n,) to blocks at ``out``; addresses; n a multiple of 32; see quantized_bytes.

    n_planes: bytes of an integer.
    """
    places = vnni.inputs_at(out, n, n_planes)

    @llvm.every(n, BLOCK)
    def body(i):
        values = [load(VF, x + i * 4, 4 * LANES * h) for h in range(2)]
        block = round_halves(values, LARGEST[n_planes])
        for h, half in enumerate(block.halves):
            _store_values(half.to(VI), places, i + LANES * h)
            at = places.sums16 + i * 4 // LANES
            store(block.sums[h], at, 4 * h)
        at = i * 4 // BLOCK
        store(block.scale, places.scales + at)
        store(block.sums[0] + block.sums[1], places.sums32 + at)


def _store_values(q: Value, places: vnni.ByteInputs, i: Value) -> None:
    """Stores values i .. i + 16, <16 x i32>, in the layout that the dot products read."""
    if not vnni.is_available():
        store(q.to(vec(I16)), places.values + i * 2)
    if vnni.is_available() or vnni.has_both_forms():
        low = q.to(vec(I8))
        if len(places.planes) == 2:
            high = (q - low.to(VI)).signed_shift(8)
            store(high.to(vec(I8)), places.planes[0] + i)
        store(low, places.planes[-1] + i)


def byte_products(w: Value, x: Value) -> Value:
    """w <32 x u8>, x <32 x i8> -> <16 x i16> of w[2i] x[2i] + w[2i+1] x[2i+1] (AVX2)."""
    return call_named("llvm.x86.avx2.pmadd.ub.sw", vec(I16), w, x)


def pair_products(w: Value, x: Value) -> Value:
    """<16 x i16> w, x -> <8 x i32> of w[2i] x[2i] + w[2i+1] x[2i+1]."""
    if llvm.has_feature("avx2"):
        return call_named("llvm.x86.avx2.pmadd.wd", vec(I32, 8), w, x)
    wide = vec(I32, LANES)
    products = w.to(wide) * x.to(wide)
    even = products.shuffle(range(0, LANES, 2))
    odd = products.shuffle(range(1, LANES, 2))
    return even + odd


class BlockInputs(NamedTuple):
    """The addresses of one input's activations of one block, in the order of ``quantized_bytes``.

    values: i16, one an element. scales: f32, one for 32 elements. sums16, sums32: f32, the sum of
    scale * value over each 16 or 32 elements.
    """

    values: Value
    scales: Value
    sums16: Value
    sums32: Value


class Sums(NamedTuple):
    """A row's running sums: <8 x float> accumulators, and the sum of the offsets."""

    totals: list[Value]
    offset: Value


def _emit_block(
    format_: BlockFormat, p: Value, rows: Sequence[BlockInputs], old: Sequence[Sums]
) -> list[Sums]:
    """Adds the products of one block of weights with each input's activations to its sums.

    p: address of the block. rows: for each input, where its activations of this block lie. old: the
    sums of each input so far. Returns the new sums, in the order of ``rows``.
    """
    assert format_.decode is not None
    block = format_.decode(p)
    widen = Value.to if block.signed else Value.unsigned_to
    weights = [widen(q, vec(I16)) for q in block.sixteens()]
    n_scales, n_blocks = block.scales.type.count, format_.n_elements // BLOCK
    a_scale = len(weights) // n_scales  # 1 or 2 vectors of 16 elements under one scale
    lanes = [i * n_blocks // n_scales for i in range(n_scales)]
    new = []
    for inputs, sums in zip(rows, old, strict=True):
        x_scales = load(vec(F32, n_blocks), inputs.scales)
        scales = block.scales * x_scales.shuffle(lanes)
        totals, offset = list(sums.totals), sums.offset
        products = [
            pair_products(w, load(vec(I16), inputs.values, 2 * LANES * i))
            for i, w in enumerate(weights)
        ]
        for i in range(n_scales):
            part = products[i * a_scale]
            if a_scale == 2:
                part = part + products[2 * i + 1]
            slot = i % ACCUMULATORS
            scale = scales.shuffle([i] * 8)
            totals[slot] = part.to(VF8).fma(scale, totals[slot])
        if block.offsets is not None:
            x_sums = load(vec(F32, n_scales), inputs.sums32 if a_scale == 2 else inputs.sums16)
            offset = offset + llvm.sum_lanes(block.offsets * x_sums)
        new.append(Sums([*totals[1:], totals[0]] if n_scales == 1 else totals, offset))
    return new


def emit_row(
    format_: BlockFormat, n_planes: int, w: Value, xs: Sequence[Value], n: Value
) -> list[Value]:
    """Returns the dot products, floats, of one row at w with each of ``xs``; see weights/vnni.py.

    CPUs with byte products use ``vnni.emit_row``.
    """
    if vnni.is_available():
        return vnni.emit_row(format_, n_planes, w, xs, n)
    n_blocks = n // format_.n_elements
    sizes = [format_.n_elements // BLOCK * size for size in (2 * BLOCK, 4, 8, 4)]  # per block
    starts = []
    for x in xs:
        at = vnni.inputs_at(x, n, n_planes)
        starts.append([at.values, at.scales, at.sums16, at.sums32])
    unroll = ACCUMULATORS if format_.n_elements == BLOCK else 1
    width = ACCUMULATORS + 1

    def blocks(start: Value, count: int, carried: list[Value]) -> list[Value]:
        parts = [carried[i : i + width] for i in range(0, len(carried), width)]
        sums = [Sums(part[:-1], part[-1]) for part in parts]
        for u in range(count):
            i = start + u
            rows = [
                BlockInputs(*(at + i * s for at, s in zip(row, sizes, strict=True)))
                for row in starts
            ]
            sums = _emit_block(format_, w + i * format_.n_bytes, rows, sums)
        return [value for each in sums for value in (*each.totals, each.offset)]

    start = ([const(F32, 0.0, 8)] * ACCUMULATORS + [F32(0.0)]) * len(xs)
    whole = n_blocks - n_blocks % unroll
    carried = llvm.loop(0, whole, unroll, start, lambda i, c: blocks(i, unroll, c))
    carried = llvm.loop(whole, n_blocks, 1, carried, lambda i, c: blocks(i, 1, c))
    dots = []
    for j in range(0, len(carried), width):
        first, second, third, fourth, offset = carried[j : j + width]
        dots.append(llvm.sum_lanes(first + second + (third + fourth)) + offset)
    return dots


@njit(cache=True, nogil=True)
def quantize_rows(x, x_row, n_rows, n, n_planes, out, out_row):
    """Runs ``quantize_activations`` on rows x_row bytes apart, to rows out_row bytes apart."""
    for i in range(n_rows):
        quantize_activations(n_planes, x + i * x_row, out + i * out_row, n)


def quantize_ref(x: np.ndarray, n_planes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """numpy reference: values i16 (n,), scales f32 (n / 32,), sums f32 (n / 16,)."""
    blocks = x.reshape(-1, BLOCK)
    peak = np.abs(blocks).max(1)
    largest = np.float32(LARGEST[n_planes])
    scale = peak / largest
    inverse = np.divide(largest, peak, out=np.zeros_like(peak), where=peak >= SMALLEST)
    rounded = np.rint(blocks * inverse[:, None])
    sums = rounded.reshape(-1, LANES).sum(1) * np.repeat(scale, 2)
    return rounded.astype(np.int16).reshape(-1), scale, sums.astype(np.float32)
