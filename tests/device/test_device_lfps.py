"""LFPS with its sinks on a device against LFPS on the host alone: outputs, tables, counters."""

import numpy as np
import pytest
import torch
from side_by_side import assert_devices_agree
from sweeps import sweep

from sparsekv_cli.cache.spec import AttnInput, Budget, LayerSpec
from sparsekv_cli.cache.store import padded
from sparsekv_cli.device.host import HostWorker
from sparsekv_cli.device.methods.lfps import HostLFPS
from sparsekv_cli.kernels.attention.decode import Attended
from sparsekv_cli.methods.lfps import LFPS
from sparsekv_cli.methods.quest import Quest

# (H, G, d, d_v), type of the host's rows
CASES = [
    ((2, 2, 64, 64), "f16"),
    ((9, 3, 64, 64), "q8_0"),
    ((4, 1, 80, 48), "f16"),
    ((8, 1, 128, 128), "q8_0"),
]
BUDGET = 40


class Pair:
    """One layer on the host alone (``whole``) and with its sinks on the device (``apart``).

    Keys have directions that queries follow for a while, and sinks one of their own that a head
    looks at now and then, so that it is bypassed.
    """

    def __init__(self, sizes: tuple[int, ...], kind: str, device: str) -> None:
        self.n_head, self.n_kv, self.d, self.d_v = sizes
        self.rng = np.random.default_rng(0)
        spec = LayerSpec(
            layer=2, n_layer=4, n_head=self.n_head, n_head_kv=self.n_kv, head_dim=self.d,
            value_dim=self.d_v, n_threads=1,
        )  # fmt: skip
        method = LFPS(
            budget=Budget(tokens=BUDGET), epsilon=0.7, cache_type_k=kind,
            cache_type_v=kind,
        )  # fmt: skip
        self.whole = method.layer(spec)
        cache = method.sparse_layer(method.layer_spec(spec))
        self.apart = HostLFPS(cache, HostWorker(torch.device(device)))
        self.directions = self.rng.standard_normal((3, self.d)) / self.d**0.25

    def rows(self, n: int) -> list[np.ndarray]:
        """q, k, v of the next n rows: f32 (heads, n, d)."""
        start, rng = self.whole.n, self.rng
        q = 0.3 * rng.standard_normal((self.n_head, n, self.d))
        k = 0.5 * rng.standard_normal((self.n_kv, n, self.d))
        k[:, rng.random(n) < 0.1] += 3 * self.directions[0]
        k[:, : max(0, 4 - start)] += 4 * self.directions[1]
        for h in range(self.n_head):
            looks = (1 + np.sin((start + np.arange(n)) / 3 + h)) / 2
            q[h] += 2 * self.directions[0] + 3 * looks[:, None] * self.directions[1]
        v = rng.standard_normal((self.n_kv, n, self.d_v))
        return [x.astype(np.float16).astype(np.float32) for x in (q, k, v)]

    def prefill(self, n: int) -> None:
        rows, pos = self.rows(n), self.whole.n
        for start in range(0, n, 32):
            q, k, v = (x[:, start : start + 32].copy() for x in rows)
            self.whole.extend(AttnInput(q, k, v, q, k, pos + start))
            q, k, v = (torch.from_numpy(x).to(self.apart._k.device) for x in (q, k, v))
            self.apart.extend(AttnInput(q, k, v, q, k, pos + start))
        for cache in (self.whole, self.apart):
            cache.finish_prefill()
        self.apart._worker.wait()

    def decode(self) -> tuple[np.ndarray, np.ndarray]:
        """A step of both: f32 (H, d_v)."""
        rows, pos = self.rows(1), self.whole.n
        q, k, v = (np.pad(x, ((0, 0), (0, 0), (0, padded(x.shape[2]) - x.shape[2]))) for x in rows)
        x = AttnInput(q, k, v, q, k, pos)
        expected = self.whole.decode(x)[:, : self.d_v]
        device = self.apart._k.device
        self.apart.begin_step(pos + 1, pos + 1)
        out = torch.from_numpy(self.apart.decode(x)[:, : self.d_v].copy())
        self.apart.end_step(pos + 1)
        seen = Attended(out[None].to(device), torch.from_numpy(self.apart.lse)[None].to(device))
        found = torch.full_like(seen.out, torch.nan)
        self.apart.attend_on_device(
            torch.from_numpy(rows[0][:, 0]).contiguous()[None].to(device), seen, found
        )
        return expected, found[0].cpu().numpy()


@pytest.mark.parametrize(("sizes", "kind"), sweep(CASES, fast=1))
def test_sinks_on_the_device(sizes, kind, device):
    """Dense at first, then sparse, another prompt, and rewinds, one to fewer rows than sinks."""
    pair = Pair(sizes, kind, device)

    def follow(n_steps: int) -> None:
        for _ in range(n_steps):
            expected, found = pair.decode()
            np.testing.assert_allclose(found, expected, atol=3e-3)

    pair.prefill(BUDGET)
    follow(10)
    pair.prefill(90)
    follow(12)
    for n in (100, 2):
        for cache in (pair.whole, pair.apart):
            assert cache.truncate(n) == n
        follow(4)
    pair.prefill(80)
    follow(4)
    for a, b in zip(pair.whole._tables, pair.apart.cache._tables, strict=True):
        np.testing.assert_array_equal(a, b)
    whole, apart = pair.whole.counters(), pair.apart.counters()
    assert whole["heads_bypassed"] > 10 and whole["heads_bypassed"] < 0.8 * whole["heads_stepped"]
    for name in ("rows_attended", "heads_bypassed", "rows_scored"):
        assert whole[name] == apart[name]
    # Beside the device all heads are searched, those too that the next step bypasses.
    assert whole["entries_read"] < apart["entries_read"]
    n_kv, d, d_v = sizes[1:]
    assert pair.apart.memory().device == 2 * n_kv * 4 * (d + d_v)


def test_sinks_are_not_attended_to_twice(device):
    """Values of the sinks that the host must not look at."""
    pair = Pair(CASES[0][0], "f16", device)
    pair.prefill(100)
    pair.decode()
    pair.apart.cache.store.v[:, :4] = np.nan
    for _ in range(5):
        expected, found = pair.decode()
        np.testing.assert_allclose(found, expected, atol=3e-3)


def test_sequences_whose_dense_layer_chooses_pages(tmp_path, monkeypatch):
    """It crosses over to pages in the steps, on the host behind a device as on the host alone."""
    pages = Quest(page=8, budget=Budget(tokens=24))
    monkeypatch.setattr("sparsekv_cli.methods.lfps.PAGES", pages)
    options = {"budget": "20", "dense_layers": "0", "pages_from": "63"}
    assert_devices_agree(tmp_path, "lfps", options, 60, 5, kv="host")


def test_sequences(tmp_path):
    options = {"budget": "24", "epsilon": "0.3", "dense_layers": "0"}
    assert_devices_agree(tmp_path, "lfps", options, 60, 2)
