"""K and V of one layer in memory, and the types of their rows: f16, q8_0, q5_1, q4_0.

32 elements of a quantised row share a scale. So q8_0, q5_1 and q4_0 take 8.5, 6 and 4.5 bits an
element. Their names and rounding are llama.cpp's. Rows are padded with zeros to whole vectors.
cpu/attention/rows.py describes the rows as kernels see them.
"""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any, ClassVar

import numpy as np

from sparsekv_cli.cache.row_sizes import CACHE_TYPES, check_memory, padded
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cpu.attention import decode, rows
from sparsekv_cli.cpu.attention.tile import prepare
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.jit.pointers import LINE, on_lines
from sparsekv_cli.cpu.layer.hadamard import block_of, rotate_rows
from sparsekv_cli.system.memory_file import PAGE, MemoryFile, Part

LARGE = 16 << 20  # bytes; for larger memory, ``reserve`` checks that it is available


class RowType:
    """A type of rows of d elements. Rows are arrays (..., n_items) of ``dtype``.

    kind: the number of the type in cpu/attention/rows.py. width: d padded to whole vectors. Rows of
    q4_0 are stored rotated (cpu/layer/hadamard.py). Kernels that read them need rotated queries and
    return rotated sums of values.
    """

    def __init__(self, kind: int, d: int) -> None:
        self.kind, self.d, self.width = kind, d, padded(d)
        self.rotates = kind in ROTATED
        self.dtype: Any = np.float16 if kind == rows.F16 else np.uint8
        self.n_items = rows.row_bytes(kind, self.width) // np.dtype(self.dtype).itemsize

    def write(self, target: np.ndarray, x: np.ndarray, n_threads: int = 1) -> None:
        """Stores x (heads, T, d), f32 or bf16, as rows in ``target`` (heads, T, n_items).

        bf16 is an array as in cpu/jit/floats.py. Raises ValueError if the shapes do not fit.
        """
        from sparsekv_cli.cpu.layer.prefill import store_rows

        if x.shape != (*target.shape[:2], self.d):
            raise ValueError(f"rows {tuple(x.shape)} for {target.shape[:2]} of {self.d} elements")
        given, at = np.ascontiguousarray(self.rotated(x)), target.__array_interface__["data"][0]
        store_rows(given, self.kind, at, *target.strides[:2], self.width, n_threads)

    def read(self, stored: np.ndarray) -> np.ndarray:
        """Returns the elements of ``stored`` (..., n_items) as f16 or f32 (..., width).

        f16 rows are returned as they are, without a copy.
        """
        if self.kind == rows.F16:
            return stored
        return self.rotated(rows.dequantize_rows_ref(stored, self.width, self.kind))

    def elements(self, stored: np.ndarray) -> np.ndarray:
        """Returns the elements of ``stored`` without padding, f32 (..., d)."""
        return self.read(stored)[..., : self.d].astype(np.float32)

    def rotated(self, x: np.ndarray, n_threads: int = 1) -> np.ndarray:
        """Returns x (..., >= d) rotated, in x's type; x itself if this type is not rotated."""
        if not self.rotates:
            return x
        turned = as_f32(x).copy()
        rotate_rows(turned.reshape(-1, x.shape[-1]), self.d, block_of(self.d), n_threads)
        return as_type_of(x, turned)


ROTATED = (rows.Q4_0,)  # types whose error is smaller with rotated rows: docs/methods.md


class Prefix:
    """The first n rows of a layer, in memory that several stores read.

    The rows fill whole pages: n is a result of ``KVStore.n_whole``.
    """

    def __init__(self, store: KVStore, n: int, file: MemoryFile, start: int) -> None:
        """Copies the first n rows of ``store`` into ``file``, from byte ``start`` on."""
        self.n, self.file = n, file
        self.starts = list[tuple[int, ...]]()  # for K and for V: first byte of each kv head
        self.users: weakref.WeakSet[KVStore] = weakref.WeakSet()
        for of_heads in store.arrays:
            n_bytes = n * row_bytes_of(of_heads)
            self.starts.append(tuple(start + h * n_bytes for h in range(len(of_heads))))
            for at, head in zip(self.starts[-1], of_heads, strict=True):
                file.write(at, head[:n])
            start += len(of_heads) * n_bytes


def row_bytes_of(x: np.ndarray) -> int:
    """Returns the bytes of one row of x, which is the K or V (G, capacity, n_items) of a store."""
    return x.shape[2] * x.itemsize


class KVStore:
    """K and V of one layer in host memory: arrays (G, capacity, n_items) that grow in steps.

    k, v: the rows, of the types that ``spec`` names. They are one array if ``spec.v_is_k``. n: the
    number of rows in use. layout: int64 (8,), the places of the rows for kernels
    (cpu/attention/rows.py). is_shared: whether the rows are in another layer's store.
    can_share_rows: whether other stores may read the rows in this store's memory. prefix: memory
    with the first ``n_prefix`` rows, which other stores also read, or None.
    """

    is_shared = False
    can_share_rows: ClassVar[bool] = True
    prefix: Prefix | None = None
    n_prefix = 0

    def __init__(self, spec: LayerSpec) -> None:
        self.k_type = RowType(CACHE_TYPES[spec.cache_type_k], spec.head_dim)
        self.v_type = RowType(CACHE_TYPES[spec.cache_type_v], spec.value_dim)
        for each in (self.k_type, self.v_type):  # only rows that steps read need their kernels
            prepare(each.kind)
        self.n = 0
        self._n_threads = spec.n_threads
        types = (self.k_type,) if spec.v_is_k else (self.k_type, self.v_type)
        self._use(*(np.zeros((spec.n_head_kv, 0, each.n_items), each.dtype) for each in types))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays of the rows: K and V, or K alone if V is K."""
        return (self.k,) if self.v is self.k else (self.k, self.v)

    @property
    def own_v(self) -> np.ndarray:
        """V, or rows without items (G, capacity, 0) if V is K."""
        return self.v[..., :0] if self.v is self.k else self.v

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the store's memory. Stores that read one prefix count equal shares of it."""
        return sum(each.nbytes for each in self.arrays) - self.spared_bytes

    @property
    def spared_bytes(self) -> int:
        """Bytes of the prefix that other stores count."""
        if self.prefix is None:
            return 0
        n_bytes = self.prefix_bytes(self.n_prefix)
        return n_bytes - n_bytes // len(self.prefix.users)

    def prefix_bytes(self, n: int) -> int:
        """Returns the bytes of n rows of K and V in all kv heads."""
        return n * self.row_bytes * len(self.k)

    @property
    def owner(self) -> int:
        """A number that is equal for two stores if they read the same prefix."""
        return id(self if self.prefix is None else self.prefix)

    def n_whole(self, n: int) -> int:
        """Returns the largest number of rows, at most n, that fills whole pages of K and of V.

        With rows of 256 bytes and pages of 4096 bytes, n_whole(100) is 96.
        """
        least = math.lcm(*(PAGE // math.gcd(PAGE, row_bytes_of(x)) for x in self.arrays))
        return n // least * least

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V in one kv head."""
        return sum(map(row_bytes_of, self.arrays))

    def reserve(self, n: int) -> None:
        """Makes room for ``n`` rows: exactly n if the store is empty, else at least an eighth more.

        Raises LacksMemoryError if a large store cannot grow.
        """
        if n <= self.capacity:
            return
        capacity = n if self.n == 0 else max(n, self.capacity + self.capacity // 8 + 256)
        n_bytes = capacity * self.row_bytes * len(self.k)
        if self.n and n_bytes >= LARGE:  # old and new memory exist together until the copy ends
            what = f"K and V of {capacity} tokens in a layer"
            check_memory(what, n_bytes, "begin again with fewer tokens")
        self._move(capacity)

    def read_prefix(self, prefix: Prefix, n: int, capacity: int) -> None:
        """Reads the first n rows in the memory of ``prefix`` from now on.

        n is a result of ``n_whole``. The store must have these rows already or be empty. capacity:
        the number of rows to make room for.
        """
        self.prefix, self.n_prefix, self.n = prefix, n, max(n, self.n)
        prefix.users.add(self)
        self._move(max(capacity, self.n))

    def _move(self, capacity: int) -> None:
        """Moves the rows to memory for ``capacity`` rows. The prefix is not copied."""
        old, n_kv_head, first = self.arrays, len(self.k), self.n_prefix
        n_bytes = [capacity * row_bytes_of(x) for x in old]  # bytes of one kv head's K and V
        if self.prefix is None:
            # In one piece: numpy asks for huge pages from 4 MB on. With small pages, gathering rows
            # costs lfps 5% of a token at 8192 rows.
            starts = (0, -(-n_kv_head * n_bytes[0] // LINE) * LINE)[: len(old)]
            block = on_lines(starts[-1] + n_kv_head * n_bytes[-1], np.uint8)
        else:
            n_bytes = [-(-n // PAGE) * PAGE for n in n_bytes]
            starts = (0, n_kv_head * n_bytes[0])[: len(old)]
            parts = [
                Part(to + h * n_head, of_heads[h], first * row_bytes_of(x))
                for to, n_head, of_heads, x in zip(
                    starts, n_bytes, self.prefix.starts, old, strict=True
                )
                for h in range(n_kv_head)
            ]
            block = self.prefix.file.block(n_kv_head * sum(n_bytes), parts)
        moved = [
            np.ndarray(
                (n_kv_head, capacity, x.shape[2]), x.dtype, block, start,
                (n_head, row_bytes_of(x), x.itemsize),
            )
            for x, start, n_head in zip(old, starts, n_bytes, strict=True)
        ]  # fmt: skip
        for new, x in zip(moved, old, strict=True):
            new[:, first : self.n] = x[:, first : self.n]
        self._use(*moved)

    def _use(self, k: np.ndarray, *own_v: np.ndarray) -> None:
        """Replaces the arrays in one statement: another thread may be writing rows to disk.

        own_v: V, unless it is K.
        """
        v = own_v[0] if own_v else k
        layout = rows.layout_of(k, v, self.k_type.kind, self.v_type.kind)
        self.k, self.v, self.layout = k, v, layout

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        """Adds T rows: k (G, T, d) and v (G, T, d_v), f32 or bf16 as in ``RowType.write``."""
        n_new = k.shape[1]
        self.reserve(self.n + n_new)
        self.write(slice(self.n, self.n + n_new), k, v)
        self.n += n_new

    def write(self, at: np.ndarray | slice, k: np.ndarray, v: np.ndarray) -> None:
        """Writes T rows to the places ``at``, all below ``capacity``. ``n`` stays as it is.

        at: a slice, or int (T,). k (G, T, d) and v (G, T, d_v) are as in ``append``. v is not read
        if V is K.
        """
        types = self.k_type, self.v_type
        for held, of_type, x in zip(self.arrays, types, (k, v), strict=False):
            if isinstance(at, slice):
                of_type.write(held[:, at], x, self._n_threads)
            else:
                new = np.empty((len(held), x.shape[1], held.shape[2]), held.dtype)
                of_type.write(new, x, self._n_threads)
                held[:, at] = new

    def append_row(self, k: np.ndarray, v: np.ndarray) -> None:
        """Adds one row of a decode step: f32 k (G, 1, padded d), v (G, 1, padded d_v)."""
        self.append_rows(k[None, :, 0], v[None, :, 0])

    def append_rows(self, k: np.ndarray, v: np.ndarray) -> None:
        """Adds T rows of a decode step: f32 k (T, G, padded d), v (T, G, padded d_v)."""
        self.reserve(self.n + len(k))
        k, v = self.k_type.rotated(k), self.v_type.rotated(v)
        decode.append_rows(k, v, self.layout, self.n)
        self.n += len(k)

    def keys(self) -> np.ndarray:
        """Returns the elements of all n rows of K, f16 or f32 (G, n, padded d)."""
        return self.k_type.read(self.k[:, : self.n])

    def values(self) -> np.ndarray:
        """Returns the elements of all n rows of V, f16 or f32 (G, n, padded d_v)."""
        return self.v_type.read(self.v[:, : self.n])

    def truncate(self, n: int) -> None:
        self.n = min(self.n, n)
        if self.n < self.n_prefix:  # later rows go to pages that only this store has
            self.n_prefix = self.n_whole(self.n)

    def copy(self, n: int, n_room: int = 0) -> KVStore:
        """Returns a store with copies of the first n rows, and room for ``n_room`` more."""
        new = copy.copy(self)
        new.prefix, new.n_prefix = None, 0
        new._use(*(each[:, :0] for each in self.arrays))
        new.n = 0
        new.reserve(n + n_room)
        for to, of in zip(new.arrays, self.arrays, strict=True):
            to[:, :n] = of[:, :n]
        new.n = n
        return new
