"""FASA on a device (methods/fasa.py): the scan of dominant chunks, top N_fac, and attention there.

Variant c keeps K and V whole in device memory beside a copy of the dominant dims (kernels/chunks.py
says why). Variant m keeps the dominant dims only; V and the other dims of K lie in pinned memory of
the host, and the rows that a step attends to are fetched from there, once a kv head.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from sparsekv_cli.cache import AttnInput, LayerSpec, Memory
from sparsekv_cli.device.cache import DeviceInput, DeviceSelecting
from sparsekv_cli.kernels import attention, chunks, select

ALIGNMENT = 16  # tokens: what kernels/chunks.py asks of a capacity


def make_cache(spec: LayerSpec, ops: Any, method: Any) -> DeviceFASA:
    """The cache of the method's variant."""
    return (DeviceFASAM if method.variant == "m" else DeviceFASA)(spec, ops, method)


class DeviceFASA(DeviceSelecting):
    """K, V and the copy of K's dominant dims of one layer. method: methods/fasa.py FASA."""

    def __init__(self, spec: LayerSpec, ops: Any, method: Any) -> None:
        super().__init__(spec, ops)
        self.method = method
        dims, n_dom = method.dominant_dims(spec)
        self._device = ops.device
        self._dims = torch.from_numpy(dims).to(self._device)  # int32 (G, d)
        self._dom_dims = self._dims[:, :n_dom].contiguous()  # (G, C)
        self._forget_copy()

    def _forget_copy(self) -> None:
        self._dom = self._columns(0)
        self._n_dom = 0  # rows that the copy has

    def _columns(self, capacity: int) -> torch.Tensor:
        """Room for the dominant dims of ``capacity`` tokens, f16 (1, G, C, capacity)."""
        return torch.zeros(1, *self._dom_dims.shape, capacity, dtype=torch.float16,
                           device=self._device)  # fmt: skip

    def _reserve_copy(self, n: int) -> None:
        """Room for ``n`` tokens, as much as the rows have if they have more."""
        if n > self._dom.shape[3]:
            grown = self._columns(-(-max(n, self.store.capacity) // ALIGNMENT) * ALIGNMENT)
            grown[..., : self._n_dom] = self._dom[..., : self._n_dom]
            self._dom = grown

    def _build_copy(self) -> None:
        """Dominant dims of the rows that the copy lacks."""
        n = self.store.n
        if n > self._n_dom:
            chunks.build_chunks(self.store.k, self._n_dom, n, self._dom_dims, self._dom)
            self._n_dom = n

    def finish_prefill(self) -> None:
        if not self.method.covers(self.store.n + 1):
            self._reserve_copy(self.store.n)
            self._build_copy()

    def budget_rows(self, n: int) -> int:
        return self.method.budget.rows(n)

    def selects_all(self, n: int) -> bool:
        return self.method.covers(n)

    def plan_selection(self, n: int, n_max: int) -> Hashable:
        self._reserve_copy(n_max)
        self._build_copy()
        return self._dom.shape[3], *self._plan_budget(n, n_max)

    def _plan_budget(self, n: int, n_max: int) -> tuple[int, int, int]:
        """Rows that are always attended, first and last; and how many more than the first ones."""
        rows = self.method.budget.rows
        self._n_sinks, self._n_recent = self.method.forced(rows(n))
        self._k_max = rows(n_max) - self._n_sinks
        return self._n_sinks, self._n_recent, self._k_max

    def select(self, x: DeviceInput) -> tuple[torch.Tensor, torch.Tensor]:
        step, n_max = x.step, self._n_max
        chunks.append_chunks(x.k, self._dom_dims, self._dom, step.pos)
        scores = chunks.score_chunks(x.q, self._dom_dims, self._dom, step.n, n_max)
        k = step.budget - self._n_sinks
        return select.select_largest(
            scores, step.n, n_max, k, self._k_max, self._n_sinks, self._n_recent
        )

    def settle(self, n: int) -> None:
        super().settle(n)
        if not self._dense:
            self._n_dom = n

    def count(self, n: int) -> tuple[int, int, int]:
        spec = self.spec
        attended = spec.n_head * self.method.budget.rows(n)
        scan = 2 * self._dom_dims.shape[1] * spec.n_head_kv * n
        return spec.n_head * n, attended, scan + attended * self.store.row_bytes

    def truncate(self, n: int) -> int:
        kept = super().truncate(n)
        self._n_dom = min(self._n_dom, kept)
        return kept

    def memory(self) -> Memory:
        """``index`` is the copy of the dominant dims."""
        return Memory(device=self.store.nbytes, index=self._dom.nbytes)


class HostRows:
    """V and the other dims of K in pinned memory of the host, f16 (1, G, capacity, size) each."""

    def __init__(self, n_head_kv: int, sizes: tuple[int, int], device: torch.device) -> None:
        self._n_head_kv, self._sizes, self._device = n_head_kv, sizes, device
        self.rest, self.v = (self._rows(0, size) for size in sizes)

    def _rows(self, capacity: int, size: int) -> torch.Tensor:
        shape = (1, self._n_head_kv, capacity, size)
        return torch.zeros(shape, dtype=torch.float16, pin_memory=self._device.type == "cuda")

    @property
    def capacity(self) -> int:
        return self.v.shape[2]

    @property
    def nbytes(self) -> int:
        return self.rest.nbytes + self.v.nbytes

    def reserve(self, n: int, used: int) -> None:
        """Room for ``n`` rows, an eighth more than before when growing; the first ``used`` stay."""
        if n <= self.capacity:
            return
        if self._device.type == "cuda":  # the device may still be writing a row
            torch.cuda.current_stream(self._device).synchronize()
        capacity = max(n, self.capacity + self.capacity // 8) if self.capacity else n
        grown = [self._rows(capacity, size) for size in self._sizes]
        for new, old in zip(grown, (self.rest, self.v), strict=True):
            new[:, :, :used] = old[:, :, :used]
        self.rest, self.v = grown


class DeviceFASAM(DeviceFASA):
    """Variant m. While all rows may be attended, and during a prefill, K and V lie in ``store``.

    Otherwise ``store`` has no room and knows how many rows there are: the dominant dims in the
    copy, the others and V in ``_host``.
    """

    keeps_rows = False

    def __init__(self, spec: LayerSpec, ops: Any, method: Any) -> None:
        super().__init__(spec, ops, method)
        n_dom = self._dom_dims.shape[1]
        self._rest_dims = self._dims[:, n_dom:].contiguous()  # (G, d_rest)
        sizes = (spec.head_dim - n_dom, spec.value_dim)
        self._host = HostRows(spec.n_head_kv, sizes, self._device)
        self._row_bytes = 2 * sum(sizes)  # of the host's part
        # The order of q's dims that fits K as it is put together: (1, H, d).
        self._order = self._dims.long().repeat_interleave(spec.group, 0)[None]
        self._announced = 0  # rows that are coming in all
        self._is_split = False
        self._n_split = 0  # how often rows were split: buffers are other ones each time
        self._seen = torch.empty(0, dtype=torch.int32)
        self._moved = torch.zeros(1, dtype=torch.int64, device=self._device)  # rows fetched

    def reserve(self, n: int) -> None:
        self._announced = n
        if not self._is_split:
            super().reserve(n)

    def prefill(self, x: AttnInput) -> Any:
        self._join()
        return super().prefill(x)

    def finish_prefill(self) -> None:
        if not self.method.covers(self.store.n + 1):
            self._split()

    def plan(self, n: int, n_max: int) -> Hashable:
        self._n_max = n_max
        self._dense = self.selects_all(n)
        if self._dense:
            self._join()
            return super().plan(n, n_max)
        self._split()
        self._reserve_copy(n_max)
        self._host.reserve(n_max, self.store.n)
        shape = (1, self.spec.n_head_kv, self._dom.shape[3])
        if self._seen.shape != shape:
            self._seen = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        key = self._dom.shape[3], self._host.capacity, self._n_split
        return "split", n_max, *key, *self._plan_budget(n, n_max)

    def _split(self) -> None:
        """K and V to their two places, if they are not there."""
        if self._is_split:
            return
        store, n = self.store, self.store.n
        self._reserve_copy(n)
        self._build_copy()
        self._host.reserve(n, 0)
        wide = self._rest_dims.long()[:, None].expand(-1, n, -1)
        self._host.rest[0, :, :n] = store.keys().gather(2, wide).cpu()
        self._host.v[0, :, :n] = store.values().cpu()
        store.k, store.v = store.k[:, :, :0].clone(), store.v[:, :, :0].clone()
        self._is_split = True
        self._n_split += 1

    def _join(self) -> None:
        """K and V whole on the device, if they are not, bit for bit as they were."""
        if not self._is_split:
            return
        store, n = self.store, self.store.n
        if self._device.type == "cuda":  # it may still be writing a row to the host
            torch.cuda.current_stream(self._device).synchronize()
        rest, v = (x[0, :, :n].to(self._device) for x in (self._host.rest, self._host.v))
        parts = torch.cat([self._dom[0, :, :, :n].transpose(1, 2), rest], dim=2)  # (G, n, d)
        places = self._dims.long()[:, None].expand(-1, n, -1)
        store.n = 0
        store.reserve(max(n, self._announced))
        store.append(torch.empty_like(parts).scatter_(2, places, parts), v)
        self._is_split = False
        self._forget_copy()
        self._host = HostRows(self.spec.n_head_kv, (rest.shape[2], v.shape[2]), self._device)
        self._n_split += 1

    def decode(self, x: Any) -> Any:
        if self._dense:
            return super().decode(x)
        host, pos = self._host, x.step.pos
        chunks.append_rest(x.k, x.v, self._rest_dims, host.rest, host.v, pos)
        idx, counts = self.select(x)
        union = chunks.unite_rows(idx, counts, self._seen)
        self._moved += union.counts.sum()
        shape = union.rows.shape
        k, v = (
            torch.empty(*shape, size, dtype=torch.float16, device=self._device)
            for size in (self.spec.head_dim, self.spec.value_dim)
        )
        chunks.gather_split_rows(union, self._dom, host.rest, host.v, k, v)
        q = x.q.gather(2, self._order)
        return attention.attend_rows(q, k, v, union.places, counts, float(self.spec.scale))

    def count(self, n: int) -> tuple[int, int, int]:
        spec = self.spec
        attended = spec.n_head * self.method.budget.rows(n)
        row_bytes = 2 * (spec.head_dim + spec.value_dim)
        scan = 2 * self._dom_dims.shape[1] * spec.n_head_kv * n
        return spec.n_head * n, attended, scan + attended * row_bytes

    def counters(self) -> Mapping[str, int]:
        """The ledger's counts; bytes_moved are of rows that came from the host, once a kv head."""
        moved = int(self._moved) * self._row_bytes
        if moved:
            self.ledger.counts["bytes_moved"] = moved
        return self.ledger.counts

    def memory(self) -> Memory:
        if not self._is_split:
            return Memory(device=self.store.nbytes)
        return Memory(self._host.nbytes, self._dom.nbytes, index=self._seen.nbytes)
