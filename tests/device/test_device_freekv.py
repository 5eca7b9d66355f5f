"""FreeKV on a device against FreeKV on the host: the same pages and attention, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from layer_stream import Geometry, Stream, attended_rows
from layer_stream import decode as decode_on_host
from layer_stream import make_cache as make_on_host
from layer_stream import prefill as prefill_on_host

from sparsekv_cli.cache import AttnInput, Budget, LayerSpec
from sparsekv_cli.device.cache import DeviceInput, Step
from sparsekv_cli.device.freekv import DeviceFreeKV
from sparsekv_cli.device.ops import DeviceOps
from sparsekv_cli.kernels import page_cache
from sparsekv_cli.methods.freekv import FreeKV

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = {"budget": Budget(tokens=48), "page": 4, "sinks": 8, "window": 12}


class Traced(DeviceFreeKV):
    """Keeps the positions that the last step attended to, before pages are chosen ahead."""

    attended_pages: list[list[int]]

    def decode(self, x):
        out = super().decode(x)
        if self._pages is not None and not self._ahead:
            self._keep()
        return out

    def _recall_ahead(self, n, budget):
        if self.n:
            self._keep()
        super()._recall_ahead(n, budget)

    def _keep(self):
        arrays = self._pages.arrays
        n_chosen = arrays.state[0, :, page_cache.N_CHOSEN.value].tolist()
        chosen = zip(arrays.chosen[0].tolist(), n_chosen, strict=True)
        self.attended_pages = [pages[:count] for pages, count in chosen]


def make_on_device(method, geometry):
    g = geometry
    spec = LayerSpec(
        layer=2, n_layer=4, n_head=g.n_head, n_head_kv=g.n_head_kv, head_dim=g.d, value_dim=g.d,
        n_threads=1,
    )  # fmt: skip
    return Traced(spec, DeviceOps(DEVICE), method)


def prefill(cache, rows, chunk=64):
    for start in range(0, rows[0].shape[1], chunk):
        q, k, v = (torch.from_numpy(x[:, start : start + chunk].copy()).to(DEVICE) for x in rows)
        cache.prefill(AttnInput(q, k, v, q, k, cache.n))
    cache.finish_prefill()


def decode(cache, rows, n_max=None):
    n = cache.n + 1
    cache.plan(n, n_max or n + 7)
    numbers = torch.tensor([n - 1, n, cache.budget_rows(n)], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.from_numpy(x[None, :, 0].copy()).to(DEVICE) for x in rows)
    x = DeviceInput(q=q, k=k, v=v, q_nope=q, k_nope=k, step=Step(*numbers[:, None]))
    out = cache.decode(x)[0].cpu().numpy()
    cache.join()
    cache.settle(n)
    return out


def follow(on_host, on_device, stream, method, n_steps):
    """Decodes n_steps rows in both; how often kv heads chose other pages than all."""
    n_partial = 0
    for _ in range(n_steps):
        rows = stream.rows(1)
        wanted, actual = decode_on_host(on_host, rows), decode(on_device, rows)
        np.testing.assert_allclose(actual, wanted, atol=2e-3)
        if on_host.attended is None:
            continue
        plan = method.plan(on_host.n, on_host._cache.n_sink)
        p = method.page
        for rows_read, chosen in zip(attended_rows(on_host), on_device.attended_pages, strict=True):
            pages = sorted({row // p for row in rows_read})
            assert [j for j in pages if plan.n_sink <= j < plan.window] == chosen
            n_partial += len(chosen) < plan.window - plan.n_sink
    return n_partial


@pytest.mark.parametrize("geometry", [Geometry(9, 3, 64), Geometry(2, 2, 80)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"summary": "minmax", "page": 6, "cache_pages": 1},
        {"tau": 2.0},
        {"correct": False},
        {"speculate": False},
        {"budget": Budget(share=0.4)},
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_follows_the_host(geometry, options):
    method = FreeKV(**{**SMALL, "overlap": "true", **options})
    stream = Stream(geometry, seed=1)
    on_host, on_device = make_on_host(method, geometry), make_on_device(method, geometry)
    rows = stream.rows(130)
    prefill_on_host(on_host, rows)
    prefill(on_device, rows)
    assert follow(on_host, on_device, stream, method, 110) > 100
    theirs, ours = on_host.counters(), on_device.counters()
    for name in ("pages_offloaded", "heads_corrected", "heads_stepped", "rows_attended"):
        assert ours[name] == theirs[name] > 0 or name == "heads_corrected"
