"""Value rows in 4 or 2 bits. A group is 32 channels of a token, with a scale and a minimum.

Asymmetric: value = minimum + scale * code. A group is stored as f16 scale, f16 minimum and codes.
With 4 bits byte i holds the channels i and i + 16. With 2 bits it holds the channels i, i + 8, i +
16 and i + 24. The first channel has the lowest bits. 16 bits means plain f16 rows. If a head's size
is no multiple of 32, its last group is stored whole and used in part.
"""

import numpy as np

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import copy_bytes
from sparsekv_cli.cpu.jit.value import F16, F32, I8, LANES, VF, VI, Value, load, select, store, vec
from sparsekv_cli.cpu.sals.vectors import rounded_to_half, scatter_halves

GROUP = 32  # channels that share a scale
BITS = (2, 4, 16)


def head_bytes(d_v: int, bits: int) -> int:
    """Returns the bytes of one token's values in one kv head."""
    if bits == 16:
        return 2 * (-(-d_v // LANES) * LANES)
    return -(-d_v // GROUP) * (4 + 4 * bits)


def quantize_ref(values: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantises values (n, d_v): returns scales f16, minima f16 (n, groups), codes int (n, d_v)."""
    n, d_v = values.shape
    groups = range(0, d_v, GROUP)
    scales, minima = (np.empty((n, len(groups)), np.float16) for _ in range(2))
    codes = np.empty((n, d_v), int)
    for i, start in enumerate(groups):
        part = values[:, start : start + GROUP].astype(np.float32)
        minima[:, i] = part.min(1)
        scales[:, i] = (part.max(1) - part.min(1)) / np.float32(2**bits - 1)
        scale = scales[:, i].astype(np.float32)[:, None]
        steps = (part - minima[:, i].astype(np.float32)[:, None]) / np.where(scale, scale, 1)
        codes[:, start : start + GROUP] = np.clip(np.floor(steps + 0.5), 0, 2**bits - 1)
    return scales, minima, codes


def dequantize_ref(scales: np.ndarray, minima: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Returns values f32 (n, d_v) of scales and minima f16 (n, groups) and codes (n, d_v)."""
    group = np.arange(codes.shape[1]) // GROUP
    return minima.astype(np.float32)[:, group] + scales.astype(np.float32)[:, group] * codes


@njit(cache=True, nogil=True)
def quantize_head(values, d_v, bits, out):
    """Quantises one token's values of one kv head, f32 (>= d_v,), to address ``out``."""
    if bits == 16:
        scatter_halves(values, (d_v + LANES - 1) // LANES * LANES, out, 2)
        return
    top = (1 << bits) - 1
    n_bytes = 4 * bits
    ends = np.empty(2, np.float32)  # scale, minimum
    packed = np.empty(GROUP // 2, np.uint8)
    for start in range(0, d_v, GROUP):
        stop = min(start + GROUP, d_v)
        low, high = values[start], values[start]
        for c in range(start, stop):
            low, high = min(low, values[c]), max(high, values[c])
        # Scale and minimum are rounded first, so that the codes compensate for the rounding.
        ends[0] = rounded_to_half((high - low) / np.float32(top))
        ends[1] = rounded_to_half(low)
        scatter_halves(ends, 2, out, 2)
        packed[:] = 0
        for c in range(start, stop):
            code = 0
            if ends[0] > 0:
                step = np.floor((values[c] - ends[1]) / ends[0] + np.float32(0.5))
                code = int(min(np.float32(top), max(np.float32(0), step)))
            at = c - start
            packed[at % n_bytes] |= np.uint8(code << (bits * (at // n_bytes)))
        copy_bytes(packed, out + 4, n_bytes)
        out += 4 + n_bytes


def _codes(bits: int, block: Value, second: int) -> Value:
    """Sixteen codes of a group as <16 x float>: channels 0 to 15, or (second = 1) 16 to 31."""
    if bits == 4:
        lanes = load(vec(I8), block, 4).unsigned_to(VI)
        shifts = [4 * second] * LANES
    else:
        lanes = load(vec(I8, 8), block, 4)
        lanes = lanes.shuffle([*range(8)] * 2).unsigned_to(VI)
        shifts = [4 * second] * 8 + [4 * second + 2] * 8
    lanes = lanes >> shifts
    return (lanes & (1 << bits) - 1).unsigned_to(VF)


@emitter(bits=BITS)
def read_head(bits, source, d_v, out):
    """Writes one token's values of one kv head as f16 to ``out``; d_v is rounded up to 16."""
    if bits == 16:

        @llvm.every(d_v, LANES)
        def copy(c):
            at = c * 2
            store(load(vec(F16), source + at), out + at)

        return

    def read_group(c, n_halves):
        block = source + c // GROUP * (4 + 4 * bits)
        scale = load(F16, block).to(F32).splat()
        minimum = load(F16, block, 2).to(F32).splat()
        for half in range(n_halves):
            value = _codes(bits, block, half).fma(scale, minimum)
            store(value.to(vec(F16)), out + c * 2, 2 * LANES * half)

    rest = d_v % GROUP
    ends_early = rest <= LANES
    whole = d_v - select(ends_early, rest, 0)
    llvm.loop(0, whole, GROUP, [], lambda c, _: read_group(c, 2))
    llvm.loop(whole, d_v, GROUP, [], lambda c, _: read_group(c, 1))
