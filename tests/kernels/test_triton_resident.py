"""Rows of the host that stay on the device: which are fetched, and that they are whole."""

import pytest
import torch
from sweeps import sweep

from sparsekv_cli.kernels.attention import decode as attention
from sparsekv_cli.kernels.checks import check_on_host
from sparsekv_cli.kernels.fasa import chunks
from sparsekv_cli.kernels.fasa import row_cache as resident

GEOMETRIES = [(2, 2, 64, 16), (9, 3, 64, 20), (8, 1, 128, 64), (3, 1, 80, 80)]


class Layer:
    """Two sequences of some rows whose K is split, beside K and V whole."""

    def __init__(self, n_head, n_kv_head, d, n_dim, ns, m, device, capacity=128):
        torch.manual_seed(0)
        self.heads, self.m, self.ns, self.device = (n_head, n_kv_head), m, ns, device
        self.q = torch.randn(2, n_head, d, device=device)
        self.k, self.v = (
            torch.randn(2, n_kv_head, capacity, d, device=device).half() for _ in range(2)
        )
        for b, n in enumerate(ns):
            self.k[b, :, n:] = self.v[b, :, n:] = torch.nan
        self.order = torch.stack([torch.randperm(d) for _ in range(n_kv_head)]).int().to(device)
        self.dom = torch.zeros(2, n_kv_head, n_dim, capacity, device=device).half()
        chunks.build_chunks(self.k, 0, capacity, self.order[:, :n_dim], self.dom)
        shape = 2, n_kv_head, capacity
        self.rest = torch.full((*shape, d - n_dim), torch.nan).half()
        self.values = torch.full((*shape, d), torch.nan).half()
        if device != "cpu":
            self.rest, self.values = self.rest.pin_memory(), self.values.pin_memory()
        rest = self.order[None, :, None, n_dim:].long().expand(2, -1, max(ns), -1)
        self.rest[:, :, : max(ns)] = self.k[:, :, : max(ns)].gather(3, rest)
        self.values[:, :, : max(ns)] = self.v[:, :, : max(ns)]
        self.slots = resident.empty_resident(
            2,
            n_kv_head,
            min(capacity, n_head // n_kv_head * m),
            d,
            d,
            capacity,
            torch.device(device),
        )
        self.n = torch.tensor(ns, dtype=torch.int32, device=device)

    def choose(self):
        """Random lists, idx (B, H, m) and counts (B, H); and their rows, a set a kv head."""
        n_head, n_kv_head = self.heads
        lists = [torch.randperm(n_b)[: self.m] for n_b in self.ns for _ in range(n_head)]
        idx = torch.stack(lists).int().view(2, n_head, self.m)
        counts = torch.randint(self.m // 2, self.m + 1, (2, n_head)).int()
        chosen = [set() for _ in range(2 * n_kv_head)]
        for i, rows in enumerate(idx.flatten(0, 1).tolist()):
            chosen[i * n_kv_head // n_head].update(rows[: counts.flatten()[i]])
        return idx.to(self.device), counts.to(self.device), chosen

    def held(self):
        """Rows that have a slot, a set a kv head; each has one, and is whole in it."""
        sets = []
        units = zip(
            *(x.flatten(0, 1) for x in (self.slots.row_in, self.slots.slot_of)),
            *(x.flatten(0, 1) for x in (self.slots.k, self.slots.v, self.k, self.v)), strict=True,
        )  # fmt: skip
        for unit, (row_in, slot_of, k_slots, v_slots, k, v) in enumerate(units):
            order = self.order[unit % self.heads[1]].long()
            rows = {row: slot for slot, row in enumerate(row_in.tolist()) if row >= 0}
            assert {j: s for j, s in enumerate(slot_of.tolist()) if s >= 0} == rows
            for row, slot in rows.items():
                assert torch.equal(k_slots[slot], k[row, order])
                assert torch.equal(v_slots[slot], v[row])
            sets.append(set(rows))
        return sets

    def statistics(self):
        """HIT, RECALLED a kv head."""
        return [tuple(row) for row in self.slots.statistics.flatten(0, 1).tolist()]


@pytest.mark.parametrize(("n_head", "n_kv_head", "d", "n_dim"), sweep(GEOMETRIES, fast=1))
def test_only_new_rows_are_fetched(n_head, n_kv_head, d, n_dim, device):
    layer = Layer(n_head, n_kv_head, d, n_dim, [70, 33], 21, device)
    newest = [n - 1 for n in layer.ns for _ in range(n_kv_head)]
    turned = layer.q.gather(
        2, layer.order.long().repeat_interleave(n_head // n_kv_head, 0).expand(2, -1, -1)
    )
    for _ in range(4):
        before, counted = layer.held(), layer.statistics()
        idx, counts, chosen_rows = layer.choose()
        places = torch.full_like(idx, -1)
        resident.place_rows(layer.slots, idx, counts, layer.n, places)
        resident.fetch_rows(layer.slots, layer.dom, layer.rest, layer.values)
        after, now = layer.held(), layer.statistics()
        for unit, chosen in enumerate(chosen_rows):
            assert chosen <= after[unit]
            hit = chosen & (before[unit] - {newest[unit]})  # which is never taken as known
            more = len(hit), len(chosen) - len(hit)
            assert now[unit] == tuple(a + b for a, b in zip(counted[unit], more, strict=True))
        found = attention.attend_rows(turned, layer.slots.k, layer.slots.v, places, counts, d**-0.5)
        expected = attention.attend_rows(layer.q, layer.k, layer.v, idx, counts, d**-0.5)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert sum(row[0] for row in layer.statistics()) > 0


def test_wrong_arguments_are_refused(device):
    layer = Layer(4, 2, 64, 16, [30, 20], 5, device)
    idx, counts, _ = layer.choose()
    wide = torch.zeros(2, 4, 6, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="k has 10 slots: expected 12"):
        resident.place_rows(layer.slots, wide, counts, layer.n, wide)
    with pytest.raises(ValueError, match="places has shape"):
        resident.place_rows(layer.slots, idx, counts, layer.n, wide)
    with pytest.raises(ValueError, match="dom has shape"):
        resident.fetch_rows(layer.slots, layer.dom[:, :, :8], layer.rest, layer.values)


def test_memory_of_the_host_is_pinned_for_a_gpu_only(monkeypatch):
    """Interpreted kernels read any, and of none at all there is nothing to pin."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = torch.zeros(1, 2, 5, 8, dtype=torch.float16)
    shape, gpu = (1, 2, None, None), torch.device("cuda")
    check_on_host("v", rows, shape, torch.device("cpu"))
    check_on_host("v", rows[..., :0], shape, gpu)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    with pytest.raises(ValueError, match="v is pageable"):
        check_on_host("v", rows, shape, gpu)
