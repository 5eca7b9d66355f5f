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

from sparsekv_cli.cpu.jit import llvm
from sparsekv_cli.cpu.jit.emitter import LITERAL, emitter
from sparsekv_cli.cpu.jit.kernel import njit
from sparsekv_cli.cpu.jit.llvm import keep, prefetch_lines, tasks_of
from sparsekv_cli.cpu.jit.pointers import address, caller, function_address
from sparsekv_cli.cpu.jit.threads import PRANGE_ONLY
from sparsekv_cli.cpu.jit.value import I32, I64, load, store, vec, write
from sparsekv_cli.cpu.layer.products import KERNEL, ROW_BYTES, ROWS, WEIGHTS
from sparsekv_cli.cpu.layer.rows import rounded
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
MOST_TILES = 86  # of a task; a task of less than twice as many is not divided
TASKS_A_THREAD = 6  # fewest, if there are enough inputs


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
    block = write(ir.IRBuilder(function.append_basic_block()), format_.decode, function.args[0])
    span = format_.n_elements // block.scales.type.count
    room = span // 4
    if not vnni.is_available():
        while room * 2 * format_.largest * LARGEST_INPUT > np.iinfo(np.int16).max:
            room //= 2
    zero = 0 if vnni.takes_signed() else format_.zero
    return Traits(span, room, zero, int(block.offsets is not None))


# --- panels ---------------------------------------------------------------------------------------


@emitter(code=LITERAL)
def _decode_row(code, w, n_blocks, values, scales, offsets):
    """Decodes a row's blocks to bytes, f32 scales and f32 offsets; addresses. code: a literal."""
    format_ = FORMAT_OF_CODE[code]
    assert format_.decode is not None
    decode = format_.decode
    zero = 0 if vnni.takes_signed() else format_.zero

    @llvm.every(n_blocks)
    def body(i):
        block = decode(w + i * format_.n_bytes)
        at = values + i * format_.n_elements
        n = block.q[0].type.count
        for j, q in enumerate(block.q):
            store(q + zero, at, n * j)
        step = i * (4 * block.scales.type.count)
        store(block.scales, scales + step)
        if block.offsets is not None:
            store(block.offsets, offsets + step)


@njit(cache=True, nogil=True)
def _decode_rows(code, w, row_bytes, n_rows, n_blocks, values, row, scales, small_row):
    """Decodes GROUP rows; repeats the last row if n_rows is less. See ``_decode_row``.

    row, small_row: bytes from a row of values, or of scales, to the next. Offsets follow scales.
    """
    for r in range(GROUP):
        at, to = w + min(r, n_rows - 1) * row_bytes, scales + r * small_row
        _decode_row(code, at, n_blocks, values + r * row, to, to + GROUP * small_row)


_call_decoder = caller(_decode_rows, 1)


@cache
def kernel_addresses(code: int) -> tuple[int, int]:
    """Returns the addresses of ``_decode_rows`` and of a product, compiled for a format."""
    decoder = function_address(_decode_rows, (types.literal(code),) + (types.int64,) * 8)
    return decoder, product_address(_format_traits(code))


@emitter
def _pack(n_columns, values, row, panel):
    """Packs values u8 (GROUP, n_columns), rows ``row`` bytes apart, to a panel; addresses.

    Both have room for columns up to a multiple of 4 WIDTH.
    """
    starts = [values + row * r for r in range(GROUP)]

    @llvm.every(n_columns, 4 * WIDTH)
    def body(column):
        place = panel + column * GROUP
        for first in range(0, GROUP, WIDTH):
            rows = [
                load(vec(I32, WIDTH), start + column) for start in starts[first : first + WIDTH]
            ]
            for i, lanes in enumerate(llvm.transposed(rows)):
                store(lanes, place, 4 * GROUP * i + 4 * first)


# --- matrices -------------------------------------------------------------------------------------

# Columns of a table after those of all tables (layer/products.py). KERNEL: ``_decode_rows``.
PRODUCT, SPAN, BLOCK_COLUMNS, BLOCK_BYTES = range(4, 8)


def product_table(matrices: Sequence[tuple[int, np.ndarray]], n_experts: int = 1) -> np.ndarray:
    """Returns a table int64 (matrices, 8) of (ggml type, uint8 (rows, row bytes)).

    The caller keeps the weights alive. n_experts: the equal matrices that each consists of.
    """
    rows = []
    for code, w in matrices:
        format_, (decoder, product) = FORMAT_OF_CODE[code], kernel_addresses(code)
        shape = address(w), w.strides[0], len(w) // n_experts
        span = _format_traits(code).span
        rows.append((decoder, *shape, product, span, format_.n_elements, format_.n_bytes))
    return np.array(rows, np.int64)


@njit(cache=True, nogil=True)
def _new_scratch(n_tiles):
    """Returns a thread's scratch of ``_multiply_rows`` for up to n_tiles of inputs."""
    return (
        np.empty((GROUP, PANEL_COLUMNS + 4 * WIDTH), np.uint8),
        np.empty(GROUP * (PANEL_COLUMNS + 4 * WIDTH), np.uint8),
        np.empty((2 * GROUP, PANEL_COLUMNS // 16), np.float32),
        np.empty((PANEL_COLUMNS // 16, 2 * GROUP), np.float32),
        np.empty((TILE * n_tiles, GROUP), np.float32),
    )


@njit(cache=True, nogil=True)
def _panel_blocks(matrix, n, part):
    """Returns the first block of part ``part`` of n columns, and the number of parts."""
    n_blocks, most = n // matrix[BLOCK_COLUMNS], PANEL_COLUMNS // matrix[BLOCK_COLUMNS]
    n_parts = (n_blocks + most - 1) // most
    return part * n_blocks // n_parts, n_parts


@njit(cache=True, nogil=True)
def _multiply_rows(matrix, w, n_rows, following, tiles, n, scratch):
    """Returns n_rows rows of a matrix from address w on times tiles of inputs: f32 (inputs, GROUP).

    The products of a panel prefetch the weights of the next panel. The pieces of weights are too
    short for the CPU's prefetcher. following: address of the weights to prefetch last.
    """
    span, size, row_bytes = matrix[SPAN], matrix[BLOCK_COLUMNS], matrix[ROW_BYTES]
    values, panel, scales, panel_scales, sums = scratch
    n_tiles = len(tiles)
    sums[: TILE * n_tiles] = 0
    _, n_parts = _panel_blocks(matrix, n, 0)
    for part in range(n_parts):
        begin, _ = _panel_blocks(matrix, n, part)
        end, _ = _panel_blocks(matrix, n, part + 1)
        _call_decoder(
            matrix[KERNEL], w + begin * matrix[BLOCK_BYTES], row_bytes, n_rows, end - begin,
            values.ctypes.data, values.strides[0], scales.ctypes.data, scales.strides[0],
        )  # fmt: skip
        n_columns = (end - begin) * size
        _pack(n_columns, values.ctypes.data, values.strides[0], panel.ctypes.data)
        n_spans = n_columns // span
        for s in range(n_spans):
            for r in range(2 * GROUP):
                panel_scales[s, r] = scales[r, s]
        n_bytes = (end - begin) * matrix[BLOCK_BYTES]
        ahead = w + end * matrix[BLOCK_BYTES] if part + 1 < n_parts else following
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
def _store_sums(sums, n_rows, out, first, last, column):
    """Writes out[first:last, column : column + n_rows] = sums[: last - first, :n_rows].

    sums f32 (last - first or more, GROUP): the products of each input with GROUP rows of weights.
    They are rounded to the type of ``out``, f32 or bf16.
    """
    for i in range(first, last):
        for r in range(n_rows):
            out[i, column + r] = rounded(out, sums[i - first, r])


@njit(cache=True, nogil=True)
def _find_task(table, spans, n_groups, task):
    """Returns a task's span, matrix, address of weights, number of rows and result column."""
    span, group, m, column = spans[task // n_groups], task % n_groups, 0, 0
    while group * GROUP >= table[m, ROWS]:
        group -= (table[m, ROWS] + GROUP - 1) // GROUP
        column += table[m, ROWS]
        m += 1
    first = group * GROUP
    w = table[m, WEIGHTS] + (span[0] * table[m, ROWS] + first) * table[m, ROW_BYTES]
    return span, m, w, min(GROUP, table[m, ROWS] - first), column + first


@njit(cache=True, nogil=True)
def _list_spans(offsets, least):
    """Returns spans int64 (n, 5) and the number of tiles.

    A span is: expert, first pair, end of the pairs, first tile, end of the tiles. It has pairs
    of one expert and starts with a new tile. An expert has ``least`` spans, or more if it has many
    tiles.
    """
    n_experts, tile, n = len(offsets) - 1, 0, 0
    spans = np.empty((n_experts + offsets[n_experts] // TILE, 5), np.int64)
    for e in range(n_experts):
        n_tiles = (offsets[e + 1] - offsets[e] + TILE - 1) // TILE
        n_parts = min(n_tiles, max(n_tiles // MOST_TILES, least))
        for part in range(n_parts):
            begin, end = part * n_tiles // n_parts, (part + 1) * n_tiles // n_parts
            spans[n, 0], spans[n, 1] = e, offsets[e] + begin * TILE
            spans[n, 2] = min(offsets[e] + end * TILE, offsets[e + 1])
            spans[n, 3], spans[n, 4] = tile + begin, tile + end
            n += 1
        tile += n_tiles
    return spans[:n], tile


@njit(cache=True, nogil=True)
def _round_pairs(span, begin, end, rows, x, tiles):
    """Rounds the inputs of a span's pairs p, begin <= p < end, into their tiles."""
    for p in range(max(span[1], begin), min(span[2], end)):
        i = p - span[1]
        place = tiles[span[3] + i // TILE, 4 * (i % TILE) :].ctypes.data
        round_input(x, x[rows[p]].ctypes.data, place, x.shape[1])


@njit(cache=True, nogil=True)
def _multiply_tasks(counter, table, spans, n_groups, tiles, n, out, n_threads):
    """Runs tasks until none is left: a span and GROUP rows of a matrix of its expert.

    A task prefetches the first weights of the one that its thread probably takes next.
    """
    n_tasks, n_tiles = n_groups * len(spans), 0
    for s in range(len(spans)):
        n_tiles = max(n_tiles, spans[s, 4] - spans[s, 3])
    scratch = _new_scratch(n_tiles)
    for task in tasks_of(counter, n_tasks):
        span, m, w, n_rows, column = _find_task(table, spans, n_groups, task)
        following = _find_task(table, spans, n_groups, min(task + n_threads, n_tasks - 1))[2]
        of_span = tiles[span[3] : span[4]]
        sums = _multiply_rows(table[m], w, n_rows, following, of_span, n, scratch)
        _store_sums(sums, n_rows, out, span[1], span[2], column)


@njit(cache=True, nogil=True, parallel=PRANGE_ONLY)
def multiply(table, offsets, rows, x, out, n_threads):
    """out[p] = (matrix 0 x[rows[p]], matrix 1 x[rows[p]], ...) for the pairs p of input and expert.

    table int64 (matrices, columns): a row describes a matrix of the first expert; the same matrices
    of the others follow it. Expert e has the pairs p, offsets[e] <= p < offsets[e + 1]. x (T, n)
    and out (pairs, rows of all matrices): f32, or bf16 as uint16. Matrices of 4096, 1024 and 1024
    rows give rows of 6144 results. Without experts there is one, and rows[p] = p.
    """
    n, n_pairs, n_groups, n_used = x.shape[1], offsets[-1], 0, 0
    for m in range(table.shape[0]):
        n_groups += (table[m, ROWS] + GROUP - 1) // GROUP
    for e in range(len(offsets) - 1):
        n_used += offsets[e] < offsets[e + 1]
    least = max(1, TASKS_A_THREAD * n_threads // (n_groups * max(1, n_used)))
    spans, n_tiles = _list_spans(offsets, least)
    tiles = np.empty((n_tiles, tile_bytes(n)), np.uint8)
    for s in range(len(spans)):
        tiles[spans[s, 4] - 1] = 0  # rows of the last tile may be unused
    for part in prange(n_threads):
        begin, end = part * n_pairs // n_threads, (part + 1) * n_pairs // n_threads
        for s in range(len(spans)):
            _round_pairs(spans[s], begin, end, rows, x, tiles)
    counter = np.zeros(1, np.int64)
    for _thread in prange(n_threads):
        _multiply_tasks(counter, table, spans, n_groups, tiles, n, out, n_threads)


def multiply_ref(
    matrices: Sequence[tuple[int, np.ndarray]], offsets: np.ndarray, rows: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """Reference: f32 (pairs, rows of an expert) from gguf's own dequantisation, summed in f64."""
    parts = []
    for e, own in enumerate(np.split(x[rows], offsets[1:-1])):
        weights = [(code, np.split(w, len(offsets) - 1)[e]) for code, w in matrices]
        parts.append(np.hstack([matvec_ref(code, w, x.shape[1], own.T).T for code, w in weights]))
    return np.concatenate(parts)
