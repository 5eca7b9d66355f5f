"""FASA on a device (methods/fasa.py): scan of the dominant chunks, top N_fac, and attention.

Variant c keeps K and V whole in device memory, and a copy of the dominant dims
(kernels/fasa/chunks.py says why). Variant m keeps only the dominant dims there. V and the other
dims of K lie in pinned memory of the host. A step fetches the rows that it attends to, once a kv
head. A cache on the device keeps them (kernels/fasa/row_cache.py), so only new rows are fetched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparsekv_cli.cache.spec import AttnInput, LayerSpec, Memory
from sparsekv_cli.device.cache import CachePlan, DeviceInput, DeviceSelecting
from sparsekv_cli.kernels.attention import decode as attention
from sparsekv_cli.kernels.attention import select
from sparsekv_cli.kernels.attention.rows import NewRow
from sparsekv_cli.kernels.fasa import chunks, row_cache
from sparsekv_cli.kernels.pinned import zeros_on_host

ALIGNMENT = 16  # tokens: kernels/fasa/chunks.py needs multiples of it as capacity


def make_cache(spec: LayerSpec, device: torch.device, method: Any) -> DeviceFASA:
    """Returns the cache of the method's variant."""
    return (DeviceFASAM if method.variant == "m" else DeviceFASA)(spec, device, method)


class DeviceFASA(DeviceSelecting):
    """K, V and the copy of K's dominant dims of one layer. method: methods/fasa.py FASA."""

    def __init__(self, spec: LayerSpec, device: torch.device, method: Any) -> None:
        super().__init__(spec, device, method)
        dims, n_dom = method.dominant_dims(spec)
        self._dims = torch.from_numpy(dims).to(self.device)  # int32 (G, d)
        self._dom_dims = self._dims[:, :n_dom].contiguous()  # (G, C)
        self._k_dims: torch.Tensor | None = None  # the stored dims next to the copy; None: all
        self._forget_copy()

    def _forget_copy(self) -> None:
        self._dom = self._columns(0)
        self._n_dom = 0  # rows in the copy

    def _columns(self, capacity: int) -> torch.Tensor:
        """Returns room for the dominant dims of ``capacity`` tokens, f16 (1, G, C, capacity)."""
        return torch.zeros(1, *self._dom_dims.shape, capacity, dtype=torch.float16,
                           device=self.device)  # fmt: skip

    def _reserve_copy(self, n: int) -> None:
        """Makes room for ``n`` tokens, or for as many as the rows have room for."""
        if n > self._dom.shape[3]:
            grown = self._columns(-(-max(n, self.store.capacity) // ALIGNMENT) * ALIGNMENT)
            grown[..., : self._n_dom] = self._dom[..., : self._n_dom]
            self._dom = grown

    def _build_copy(self) -> None:
        """Copies the dominant dims of the rows that the copy lacks."""
        n = self.store.n
        if n > self._n_dom:
            chunks.build_chunks(self.store.k, self._n_dom, n, self._dom_dims, self._dom)
            self._n_dom = n

    def finish_prefill(self) -> None:
        if not self.method.is_dense_at(self.store.n + 1):
            self._reserve_copy(self.store.n)
            self._build_copy()

    def is_dense_at(self, n: int) -> bool:
        return self.method.is_dense_at(n)

    def plan_selection(self, n: int, n_max: int) -> CachePlan:
        self._reserve_copy(n_max)
        self._build_copy()
        return self._plan_budget(n, n_max)

    def _plan_budget(self, n: int, n_max: int) -> CachePlan:
        """Plans the numbers of first and last rows always attended, and of rows after the first."""
        rows, forced = self.method.budget.rows, self.method.forced
        self._n_sinks, self._n_recent = forced(rows(n))
        self._k_max = rows(n_max) - self._n_sinks
        until = n_max if forced(rows(n_max)) == forced(rows(n)) else n
        return CachePlan((self._n_sinks, self._n_recent, self._k_max), until)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self._dom]

    def replace_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        super().replace_tensors(tensors[:2])
        (self._dom,) = tensors[2:]

    def select(
        self, x: DeviceInput, k: torch.Tensor, v: torch.Tensor, *index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the best of the rows by their dominant dims: idx (B, H, m), counts (B, H)."""
        (dom,) = index
        n = x.step.n
        tops = select.empty_tops(len(x.q), self.spec.n_head, self._n_max, self._k_max, self.device)
        scores = chunks.score_chunks(
            x.q, self._dom_dims, dom, n, self._n_max, new=NewRow(x.k, x.v), into=(k, v),
            k_dims=self._k_dims, tops=tops,
        )  # fmt: skip
        return select.select_largest(
            scores, n, self._n_max, x.step.budget, self._k_max, self._n_sinks, self._n_recent,
            k_less=self._n_sinks, tops=tops,
        )  # fmt: skip

    def end_step(self, n: int) -> None:
        super().end_step(n)
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
        """See LayerCache. ``index`` is the copy of the dominant dims."""
        return Memory(device=self.store.nbytes, index=self._dom.nbytes)


class HostRows:
    """V and the other dims of K in pinned memory of the host, f16 (1, G, capacity, size) each."""

    def __init__(self, n_head_kv: int, sizes: tuple[int, int], device: torch.device) -> None:
        self._n_head_kv, self._sizes, self.device = n_head_kv, sizes, device
        self.rest, self.v = (self._rows(0, size) for size in sizes)

    def _rows(self, capacity: int, size: int) -> torch.Tensor:
        return zeros_on_host((1, self._n_head_kv, capacity, size), self.device)

    @property
    def capacity(self) -> int:
        return self.v.shape[2]

    @property
    def nbytes(self) -> int:
        return self.rest.nbytes + self.v.nbytes

    def reserve(self, n: int, used: int) -> None:
        """Makes room for ``n`` rows. The first ``used`` rows stay."""
        if n <= self.capacity:
            return
        if self.device.type == "cuda":  # the device may still be writing a row
            torch.cuda.current_stream(self.device).synchronize()
        grown = [self._rows(n, size) for size in self._sizes]
        for new, old in zip(grown, (self.rest, self.v), strict=True):
            new[:, :, :used] = old[:, :, :used]
        self.rest, self.v = grown


class DeviceFASAM(DeviceFASA):
    """Variant m. While the budget covers the context, and in a prefill, K and V lie in ``store``.

    Otherwise ``store`` knows only the number of rows. The dominant dims are in the copy, the other
    dims and V in ``_host``.
    """

    can_prefill_in_parts = False

    def __init__(self, spec: LayerSpec, device: torch.device, method: Any) -> None:
        super().__init__(spec, device, method)
        n_dom = self._dom_dims.shape[1]
        self._k_dims = self._rest_dims = self._dims[:, n_dom:].contiguous()  # (G, d_rest)
        sizes = (spec.head_dim - n_dom, spec.value_dim)
        self._host = HostRows(spec.n_head_kv, sizes, self.device)
        self._row_bytes = 2 * sum(sizes)  # of the host's part
        # The order of q's dims that fits the order of K's stored parts: (1, H, d).
        self._order = self._dims.long().repeat_interleave(spec.group, 0)[None]
        self._announced = 0  # the number of rows that ``reserve`` announced
        self._is_split = False
        self._n_made = 0  # how often buffers were made; each time they have other addresses
        self._slots: row_cache.Resident | None = None
        # Counts of all steps (kernels/fasa/row_cache.py). They survive new slots.
        self._statistics = torch.zeros(
            1, spec.n_head_kv, row_cache.N_STATISTICS.value, dtype=torch.int64, device=self.device
        )

    def reserve(self, n: int) -> None:
        self._announced = n
        if not self._is_split:
            super().reserve(n)

    def extend(self, x: AttnInput) -> Any:
        self._join()
        return super().extend(x)

    def finish_prefill(self) -> None:
        n = self.store.n + 1
        if not self.method.is_dense_at(n):
            self._split(self.bound(n))  # what the first step needs

    def begin_step(self, n: int, n_max: int) -> CachePlan:
        self._n_max = n_max
        self._dense = self.is_dense_at(n)
        if self._dense:
            self._join()
            return super().begin_step(n, n_max)
        self._split(n_max)
        self._reserve_copy(n_max)
        self._host.reserve(self.room_on_host(n_max), self.store.n)
        budget = self._plan_budget(n, n_max)
        self._reserve_slots(self._n_sinks + max(self._k_max, self._n_recent))
        key = n_max, budget.key, self._dom.shape[3], self._host.capacity, self._n_made
        # Each sequence has slots of its own choices.
        return CachePlan(("split", *key), budget.until, is_alone=True)

    def drop_step(self, n: int) -> None:
        super().drop_step(n)
        self._slots = None  # they may lack the rows that they should hold

    def _reserve_slots(self, width: int) -> None:
        """Makes a slot for each row that a group's heads can choose, ``width`` rows each."""
        spec, capacity = self.spec, self._dom.shape[3]
        n_slot = min(capacity, spec.group * width)
        slots = self._slots
        if slots and (slots.slot_of.shape[2], slots.k.shape[2]) == (capacity, n_slot):
            return
        self._slots = row_cache.empty_resident(
            1, spec.n_head_kv, n_slot, spec.head_dim, spec.value_dim, capacity, self.device
        )._replace(statistics=self._statistics)
        self._n_made += 1

    def _split(self, n_max: int) -> None:
        """Moves K and V to their two places, with room for n_max rows, if they are not there."""
        if self._is_split:
            return
        store, n = self.store, self.store.n
        self._reserve_copy(n_max)
        self._build_copy()
        self._host.reserve(self.room_on_host(n_max), 0)
        wide = self._rest_dims.long()[:, None].expand(-1, n, -1)
        for g in range(self.spec.n_head_kv):  # whole pieces, which go straight to locked memory
            self._host.rest[0, g, :n].copy_(store.keys()[g].gather(1, wide[g]))
            self._host.v[0, g, :n].copy_(store.values()[g])
        store.k, store.v = store.k[:, :, :0].clone(), store.v[:, :, :0].clone()
        self._is_split = True
        self._n_made += 1

    def _join(self) -> None:
        """Moves K and V back to the device, bit for bit, if they are not there."""
        if not self._is_split:
            return
        store, n = self.store, self.store.n
        if self.device.type == "cuda":  # the device may still write a row to the host
            torch.cuda.current_stream(self.device).synchronize()
        rest, v = (x[0, :, :n].to(self.device) for x in (self._host.rest, self._host.v))
        parts = torch.cat([self._dom[0, :, :, :n].transpose(1, 2), rest], dim=2)  # (G, n, d)
        places = self._dims.long()[:, None].expand(-1, n, -1)
        store.n = 0
        store.reserve(max(n, self._announced))
        store.append(torch.empty_like(parts).scatter_(2, places, parts), v)
        self._is_split = False
        self._forget_copy()
        self._host = HostRows(self.spec.n_head_kv, (rest.shape[2], v.shape[2]), self.device)
        self._slots = None
        self._n_made += 1

    def decode(self, x: Any, out: torch.Tensor | None = None) -> Any:
        if self._dense:
            return super().decode(x, out)
        host, slots = self._host, self._slots
        assert slots is not None
        idx, counts = self.select(x, host.rest, host.v, self._dom)
        self.keep_attended(idx, counts)
        places = torch.empty_like(idx)
        row_cache.place_rows(slots, idx, counts, x.step.n, places)
        row_cache.fetch_rows(slots, self._dom, host.rest, host.v)
        q = x.q.gather(2, self._order)
        return attention.attend_rows(
            q, slots.k, slots.v, places, counts, self.softmax, out, arrived=x.step.arrived
        )

    def truncate(self, n: int) -> int:
        if n < self.n:
            self._slots = None
        return super().truncate(n)

    def count(self, n: int) -> tuple[int, int, int]:
        spec = self.spec
        attended = spec.n_head * self.method.budget.rows(n)
        row_bytes = 2 * (spec.head_dim + spec.value_dim)
        scan = 2 * self._dom_dims.shape[1] * spec.n_head_kv * n
        return spec.n_head * n, attended, scan + attended * row_bytes

    def counters(self) -> Mapping[str, int]:
        """Returns the ledger's counts, and rows_hit and rows_recalled.

        They count attended rows, once a kv head: hit on the device, or recalled from the host.
        """
        counts = self.ledger.counts.copy()
        hit, recalled = self._statistics[0].sum(0).tolist()
        counts["bytes_moved"] += recalled * self._row_bytes
        counts.update(rows_hit=hit, rows_recalled=recalled)
        return counts

    def memory(self) -> Memory:
        """See LayerCache. ``index`` says which rows have which slots."""
        if not self._is_split:
            return Memory(device=self.store.nbytes)
        device, index = self._dom.nbytes, 0
        if self._slots is not None:
            rows = self._slots.k.nbytes + self._slots.v.nbytes
            device += rows
            index = sum(part.nbytes for part in self._slots) - rows
        return Memory(self._host.nbytes, device, index)
