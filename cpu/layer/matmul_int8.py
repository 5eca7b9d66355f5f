"""Matrix products of a prefilled chunk in integers: weights in file layout, i8 inputs.

They need a CPU with AVX2 or sdot. Inputs are rounded to 8 bits in blocks of 32, as in llama.cpp.
The weights' integers are multiplied by them four columns at a time, and a block is scaled once. A
task decodes GROUP rows of weights once, some hundred columns at a time, into a panel in L1. It
multiplies all its inputs by the panel (layer/tiles_int8.py). Inputs and results are f32, or bf16 as
uint16.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import (
    I8,
    I32,
    I64,
    const,
    keep,
    load,
    next_task,
    prefetch_lines,
    vec,
)
from sparsekv_cli.cpu.jit.pointers import address, call_through, function_address
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.layer.prefill import rounded
from sparsekv_cli.cpu.layer.tiles_int8 import (
    GROUP,
    LARGEST_INPUT,
    TILE,
    WIDTH,
    Traits,
    call_product,
    product_address,
    round_input,
    tile_bytes,
)
from sparsekv_cli.cpu.weights import vnni
from sparsekv_cli.cpu.weights.dot import matvec_ref
from sparsekv_cli.cpu.weights.formats import FORMAT_OF_CODE

PANEL_COLUMNS = 768  # most columns of a panel: three blocks of the largest formats, 18 KiB
TASK_ROWS = 86 * TILE  # most inputs of a task
TASKS_A_THREAD = 6


def can_multiply(code: int) -> bool:
    """Returns whether this CPU can multiply integers of ggml type ``code``.

    Without VNNI the sum of two products must fit an i16. VNNI sums in i32, which any fit.
    """
    format_ = FORMAT_OF_CODE[code]
    fits = 2 * format_.largest * LARGEST_INPUT <= np.iinfo(np.int16).max
    return format_.decode is not None and (vnni.is_available() or bool(fits))


@cache
def _format_traits(code: int) -> Traits:
    """Returns the Traits of ggml type ``code``. A dry run of ``decode`` gives the span."""
    format_ = FORMAT_OF_CODE[code]
    assert format_.decode is not None
    function = ir.Function(ir.Module(), ir.FunctionType(ir.VoidType(), [I64]), "dry")
    block = format_.decode(ir.IRBuilder(function.append_basic_block()), function.args[0])
    span = format_.n_elements // block.scales.type.count
    room = span // 4
    if not vnni.is_available():
        while room * 2 * format_.largest * LARGEST_INPUT > np.iinfo(np.int16).max:
            room //= 2
    has_offsets = block.offsets is not None
    return Traits(span, room, 0 if vnni.takes_signed() else format_.zero, int(has_offsets))


# --- panels ---------------------------------------------------------------------------------------


@emitter(code=LITERAL)
def _decode_row(b, code, w, n_blocks, values, scales, offsets):
    """Decodes a row's blocks to bytes, f32 scales and f32 offsets; addresses. code: a literal."""
    format_ = FORMAT_OF_CODE[code]
    assert format_.decode is not None
    decode = format_.decode
    zero = 0 if vnni.takes_signed() else format_.zero

    def body(i, carried):
        block = decode(b, b.add(w, b.mul(i, I64(format_.n_bytes))))
        at = b.add(values, b.mul(i, I64(format_.n_elements)))
        n = block.q[0].type.count
        for j, q in enumerate(block.q):
            llvm.store(b, b.add(q, const(I8, zero, n)), at, n * j)
        step = b.mul(i, I64(4 * block.scales.type.count))
        llvm.store(b, block.scales, b.add(scales, step))
        if block.offsets is not None:
            llvm.store(b, block.offsets, b.add(offsets, step))

    llvm.loop(b, I64(0), n_blocks, 1, [], body)


@njit(cache=True, nogil=True)
def _decode_rows(code, w, row_bytes, n_rows, n_blocks, values, row, scales, small_row):
    """Decodes GROUP rows; repeats the last row if n_rows is less. See ``_decode_row``.

    row, small_row: bytes from a row of values, or of scales, to the next. Offsets follow scales.
    """
    for r in range(GROUP):
        at, to = w + min(r, n_rows - 1) * row_bytes, scales + r * small_row
        _decode_row(code, at, n_blocks, values + r * row, to, to + GROUP * small_row)


@cache
def kernel_addresses(code: int) -> tuple[int, int]:
    """Returns the addresses of ``_decode_rows`` and of a product, compiled for a format."""
    decoder = function_address(_decode_rows, (types.literal(code),) + (types.int64,) * 8)
    return decoder, product_address(_format_traits(code))


@emitter
def _pack(b, n_columns, values, row, panel):
    """Packs values u8 (GROUP, n_columns), rows ``row`` bytes apart, to a panel; addresses.

    Both have room for columns up to a multiple of 4 WIDTH.
    """
    starts = [b.add(values, b.mul(row, I64(r))) for r in range(GROUP)]

    def body(column, carried):
        place = b.add(panel, b.mul(column, I64(GROUP)))
        for first in range(0, GROUP, WIDTH):
            rows = [
                load(b, vec(I32, WIDTH), b.add(start, column))
                for start in starts[first : first + WIDTH]
            ]
            for i, lanes in enumerate(llvm.transposed(b, rows)):
                llvm.store(b, lanes, place, 4 * GROUP * i + 4 * first)

    llvm.loop(b, I64(0), n_columns, 4 * WIDTH, [], body)


# --- matrices -------------------------------------------------------------------------------------

# Columns of a table, one row a matrix.
DECODER, PRODUCT, WEIGHTS, ROW_BYTES, ROWS, SPAN, BLOCK_COLUMNS, BLOCK_BYTES = range(8)


def product_table(matrices: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """Returns a table int64 (matrices, 8) of (ggml type, uint8 (rows, row bytes)).

    The caller keeps the weights alive.
    """
    table = np.empty((len(matrices), 8), np.int64)
    for row, (code, w) in zip(table, matrices, strict=True):
        format_ = FORMAT_OF_CODE[code]
        row[:] = (
            *kernel_addresses(code), address(w), w.strides[0], len(w), _format_traits(code).span,
            format_.n_elements, format_.n_bytes,
        )  # fmt: skip
    return table


@intrinsic
def _call_decoder(
    typingctx, decoder, w, row_bytes, n_rows, n_blocks, values, row, scales, small_row
):
    return call_through(8, n_literals=1)


@njit(cache=True, nogil=True)
def new_scratch(n_tiles):
    """Returns a thread's scratch of ``multiply_group`` for up to n_tiles of inputs."""
    width = PANEL_COLUMNS
    return (
        np.empty((GROUP, width + 4 * WIDTH), np.uint8),
        np.empty(GROUP * (width + 4 * WIDTH), np.uint8),
        np.empty((2 * GROUP, width // 16), np.float32),
        np.empty((width // 16, 2 * GROUP), np.float32),
        np.empty((TILE * n_tiles, GROUP), np.float32),
    )


@njit(cache=True, nogil=True)
def _panel_blocks(matrix, n, part):
    """Returns the first block of part ``part`` of n columns, and the number of parts."""
    n_blocks, most = n // matrix[BLOCK_COLUMNS], PANEL_COLUMNS // matrix[BLOCK_COLUMNS]
    n_parts = (n_blocks + most - 1) // most
    return part * n_blocks // n_parts, n_parts


@njit(cache=True, nogil=True)
def multiply_group(matrix, first, following, tiles, n, scratch):
    """Returns rows first .. first + GROUP of a matrix times tiles of inputs: f32 (inputs, GROUP).

    The products of a panel prefetch the weights of the next panel. The pieces of weights are too
    short for the CPU's prefetcher. following: address of the weights to prefetch last.
    """
    span, size, row_bytes = matrix[SPAN], matrix[BLOCK_COLUMNS], matrix[ROW_BYTES]
    w, n_rows = matrix[WEIGHTS] + first * row_bytes, min(GROUP, matrix[ROWS] - first)
    values, panel, scales, panel_scales, sums = scratch
    n_tiles = len(tiles)
    sums[: TILE * n_tiles] = 0
    _, n_parts = _panel_blocks(matrix, n, 0)
    for part in range(n_parts):
        begin, _ = _panel_blocks(matrix, n, part)
        end, _ = _panel_blocks(matrix, n, part + 1)
        _call_decoder(
            matrix[DECODER], w + begin * matrix[BLOCK_BYTES], row_bytes, n_rows, end - begin,
            values.ctypes.data, values.strides[0], scales.ctypes.data, scales.strides[0],
        )  # fmt: skip
        n_columns = (end - begin) * size
        _pack(n_columns, values.ctypes.data, values.strides[0], panel.ctypes.data)
        n_spans = n_columns // span
        for s in range(n_spans):
            for r in range(2 * GROUP):
                panel_scales[s, r] = scales[r, s]
        ahead, n_bytes = w + end * matrix[BLOCK_BYTES], (end - begin) * matrix[BLOCK_BYTES]
        if part + 1 == n_parts:
            ahead = following
        for tile in range(n_tiles):
            for r in range(tile * GROUP // n_tiles, (tile + 1) * GROUP // n_tiles):
                prefetch_lines(ahead + r * row_bytes, n_bytes)
            call_product(
                matrix[PRODUCT], panel.ctypes.data, panel_scales.ctypes.data, n_spans,
                tiles[tile].ctypes.data, 0, n, begin * size, 1,
                sums[TILE * tile :].ctypes.data,
            )  # fmt: skip
    keep(values)
    keep(panel)
    return sums


@njit(cache=True, nogil=True)
def store_sums(sums, n_rows, out, first, last, column):
    """Writes out[first:last, column : column + n_rows] = sums[: last - first, :n_rows].

    sums f32 (last - first or more, GROUP): the products of each input with GROUP rows of weights.
    They are rounded to the type of ``out``, f32 or bf16.
    """
    for i in range(first, last):
        if n_rows == GROUP:
            for r in range(GROUP):
                out[i, column + r] = rounded(out, sums[i - first, r])
        else:
            for r in range(n_rows):
                out[i, column + r] = rounded(out, sums[i - first, r])


@njit(cache=True, nogil=True)
def place_of(table, n_experts, group):
    """Returns the matrix of a group of an expert's rows, its first row and its result column."""
    m, column = 0, 0
    while group * GROUP >= table[m, ROWS] // n_experts:
        group -= (table[m, ROWS] // n_experts + GROUP - 1) // GROUP
        column += table[m, ROWS] // n_experts
        m += 1
    return m, group * GROUP, column + group * GROUP


@njit(cache=True, nogil=True)
def _multiply_tasks(counter, table, tiles, n, n_groups, n_parts, out):
    """Runs tasks until none is left: a part of the inputs and GROUP rows of a matrix."""
    n_inputs, n_tiles = out.shape[0], len(tiles)
    scratch = new_scratch((n_tiles + n_parts - 1) // n_parts)
    task = next_task(counter)
    while task < n_groups * n_parts:
        part, group = task // n_groups, task % n_groups
        begin, end = part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts
        m, first, column = place_of(table, 1, group)
        following = table[m, WEIGHTS] + (first + GROUP) * table[m, ROW_BYTES]
        sums = multiply_group(table[m], first, following, tiles[begin:end], n, scratch)
        n_rows, last = min(GROUP, table[m, ROWS] - first), min(n_inputs, end * TILE)
        store_sums(sums, n_rows, out, begin * TILE, last, column)
        task = next_task(counter)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def multiply(table, x, out, n_threads):
    """Multiplies each input by all matrices: out[t] = (matrix 0 x[t], matrix 1 x[t], ...).

    table int64 (matrices, columns): a row describes a matrix of n columns. x (T, n) and out (T,
    rows of all matrices): f32, or bf16 as uint16. Matrices of 4096, 1024 and 1024 rows give rows of
    6144 results.
    """
    n_inputs, n = x.shape
    n_tiles = (n_inputs + TILE - 1) // TILE
    tiles = np.empty((n_tiles, tile_bytes(n)), np.uint8)
    tiles[n_inputs // TILE :] = 0  # rows of the last tile may be unused
    for part in prange(n_threads):
        for i in range(part * n_inputs // n_threads, (part + 1) * n_inputs // n_threads):
            place = tiles[i // TILE, 4 * (i % TILE) :].ctypes.data
            round_input(x, x[i].ctypes.data, place, n)
    n_groups = 0
    for m in range(table.shape[0]):
        n_groups += (table[m, ROWS] + GROUP - 1) // GROUP
    n_parts = max(n_inputs // TASK_ROWS, TASKS_A_THREAD * n_threads // n_groups, 1)
    n_parts = min(n_parts, n_tiles)
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _multiply_tasks(counter, table, tiles, n, n_groups, n_parts, out)


def multiply_ref(matrices: Sequence[tuple[int, np.ndarray]], x: np.ndarray) -> np.ndarray:
    """Reference: f32 (T, all rows) from gguf's own dequantisation, summed in f64."""
    return np.concatenate([matvec_ref(code, w, x.shape[1], x.T).T for code, w in matrices], 1)
