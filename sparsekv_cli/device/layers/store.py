"""The rows of one layer in device memory, of the types that kernels/attention/rows.py has."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from sparsekv_cli.cache.row_sizes import CACHE_TYPES, padded
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cpu.attention.rows import row_bytes
from sparsekv_cli.kernels.attention.rows import pack_rows, row_elements, row_items, unpack_rows

ROW_TYPES = {"f16": torch.float16, "q8_0": torch.uint8}  # cache types on a device
UNLIMITED = 1 << 62  # rows, of a cache that does not know how many there will be at most


def rows_like(x: torch.Tensor) -> np.ndarray:
    """Returns memory of the host for rows (G, T, items), with zeros, as a KVStore has them."""
    if x.dtype == torch.float16:
        return np.zeros((*x.shape[:2], padded(x.shape[2])), np.float16)
    return np.zeros((*x.shape[:2], row_bytes(CACHE_TYPES["q8_0"], row_elements(x))), np.uint8)


def copy_items(to: Any, rows: Any) -> None:
    """Copies the items (G, T, items) that rows of a KVStore and of a device have in common."""
    n = min(to.shape[2], rows.shape[2])
    to[..., :n] = rows[..., :n]


class DeviceStore:
    """K and V of one layer in device memory, (1, G, capacity, items): kernels/attention/rows.py."""

    spared_bytes = 0  # rows whose memory sequences share: none
    can_share_rows = False
    most = UNLIMITED  # rows for which there is room at most

    def __init__(self, spec: LayerSpec, device: torch.device) -> None:
        self.n = 0
        # Bytes that a step reads of one token's K and V in a kv head.
        self.k_bytes = row_bytes(CACHE_TYPES[spec.cache_type_k], spec.head_dim)
        self.row_bytes = self.k_bytes + row_bytes(CACHE_TYPES[spec.cache_type_v], spec.value_dim)
        sizes = (spec.cache_type_k, spec.head_dim), (spec.cache_type_v, spec.value_dim)
        types = [(row_items(d, ROW_TYPES[name]), ROW_TYPES[name]) for name, d in sizes]
        self.k, self.v = (
            torch.zeros((1, spec.n_head_kv, 0, items), dtype=dtype, device=device)
            for items, dtype in types
        )

    @property
    def capacity(self) -> int:
        return self.k.shape[2]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def reserve(self, n: int) -> None:
        """Makes room for ``n`` rows: exactly n at first; later it grows by an eighth at least."""
        n, had = min(n, self.most), self.capacity
        if n <= had:
            return
        capacity = n if self.n == 0 else min(self.most, max(n, had + had // 8 + 256))
        grown, n_old = [], min(self.n, had)
        for old in (self.k, self.v):
            new = old.new_zeros((1, old.shape[1], capacity, old.shape[3]))
            new[:, :, :n_old] = old[:, :, :n_old]
            grown.append(new)
        self.k, self.v = grown

    def append(self, k: torch.Tensor, v: torch.Tensor) -> DeviceStore:
        """Adds T rows: k (G, T, d), v (G, T, d_v). Returns the rows to which they attend."""
        n_new = k.shape[1]
        self.reserve(self.n + n_new)
        new = slice(self.n, self.n + n_new)
        self.k[0, :, new], self.v[0, :, new] = self.packed(k, v)
        self.n += n_new
        return self

    def packed(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns elements (G, T, d) and (G, T, d_v) as rows of the types of K and V."""
        return pack_rows(k, self.k.dtype), pack_rows(v, self.v.dtype)

    def keys(self) -> torch.Tensor:
        """Returns the keys f16 (G, n, d)."""
        return unpack_rows(self.k[0, :, : self.n])

    def values(self) -> torch.Tensor:
        """Returns the values f16 (G, n, d_v)."""
        return unpack_rows(self.v[0, :, : self.n])

    def truncate(self, n: int) -> None:
        self.n = min(self.n, n)

    def copy(self, n: int) -> DeviceStore:
        """Returns a store with the first n rows."""
        new = copy.copy(self)
        new.n, new.k, new.v = n, self.k[:, :, :n].clone(), self.v[:, :, :n].clone()
        return new
