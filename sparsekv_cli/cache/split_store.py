"""The store of FASA's rows: K is whole, or split into dominant dims and all other dims.

cpu/fasa/split.py describes the two parts, Kdom and Krest.
"""

import numpy as np

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore, padded
from sparsekv_cli.cpu.attention import rows
from sparsekv_cli.cpu.fasa import chunks, split
from sparsekv_cli.cpu.jit.pointers import on_lines


class SplitStore(KVStore):
    """K and V of one layer. While K is split, ``dom`` is Kdom and ``k`` is Krest.

    If V is K, then V is Krest, too: the values lack the dominant dims.
    """

    can_share_rows = False

    def __init__(self, spec: LayerSpec, dims: np.ndarray, n_dom: int) -> None:
        self.dims, self.n_dom = dims, n_dom  # int32 (G, d), dominant dims first
        self.dom: np.ndarray | None = None  # Kdom, u16 (G, blocks, n_dom, 16); None: K is whole
        super().__init__(spec)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.dom is None else self.dom.nbytes)

    @property
    def split_width(self) -> int:
        """The number of elements of a key in Kdom and in Krest, padding included."""
        return self.n_dom + padded(self.k_type.d - self.n_dom)

    def reserve(self, n: int) -> None:
        if self.dom is not None and self.dom.shape[1] * chunks.BLOCK < n:
            dom = self._blocks(n + n // 8 + 256)
            dom[:, : self.dom.shape[1]] = self.dom
            self.dom = dom
        super().reserve(n)

    def _blocks(self, capacity: int) -> np.ndarray:
        n_block = -(-capacity // chunks.BLOCK)
        shape = len(self.dims), n_block, self.n_dom, chunks.BLOCK
        return on_lines(shape, np.uint16, zeros=True)

    @property
    def halves(self) -> tuple[np.ndarray, np.ndarray]:
        """``k`` and ``v`` viewed as u16, for kernels. While K is split, ``k`` is Krest."""
        return self.k.view(np.uint16), self.v.view(np.uint16)

    def split(self) -> np.ndarray:
        """Splits K into Kdom and Krest unless it is split already. Returns Kdom."""
        if self.dom is not None:
            return self.dom
        n_rest = padded(self.k_type.d - self.n_dom)
        rest = on_lines((*self.k.shape[:2], n_rest), np.float16)
        dom = self._blocks(self.capacity)
        split.split_keys(self.halves[0], self.n, self.dims, dom, rest.view(np.uint16))
        self._replace_keys(dom, rest)
        return dom

    def join(self) -> None:
        """Makes K whole again, bit for bit, if it is split."""
        if self.dom is not None:
            k = self.whole_keys(self.capacity, padded(self.k_type.d))
            self._replace_keys(None, k)

    def _replace_keys(self, dom: np.ndarray | None, k: np.ndarray) -> None:
        v = k
        if self.v is not self.k:
            v = on_lines(self.v.shape, self.v.dtype)  # a copy, so that the old keys become free
            v[...] = self.v
        layout = rows.layout_of(k, v, self.k_type.kind, self.v_type.kind)
        self.dom, self.k, self.v, self.layout = dom, k, v, layout  # at once, as in KVStore

    def whole_keys(self, capacity: int, width: int) -> np.ndarray:
        """Returns a copy of whole K, f16 (G, capacity, width): zeros after n rows and d dims."""
        k = on_lines((len(self.dims), capacity, width), np.float16, zeros=True)
        if self.dom is None:
            k[:, : self.n, : self.k_type.d] = self.k[:, : self.n, : self.k_type.d]
        else:
            split.join_keys(self.dom, self.halves[0], self.n, self.dims, k.view(np.uint16))
        return k
