"""The cache of a window layer on the device against the CPU's, step by step and back."""

import numpy as np
import pytest
import torch

from sparsekv_cli.cache import window as host_windows
from sparsekv_cli.cache.attend import attend_causal as attend_on_host
from sparsekv_cli.cache.spec import WINDOW, AttnInput, LayerSpec
from sparsekv_cli.cache.window import WindowCache
from sparsekv_cli.device import window as windows
from sparsekv_cli.device.batching import prepare_runs
from sparsekv_cli.device.cache import DeviceInput, StepNumbers, grid_bound
from sparsekv_cli.device.layers.prefill import attend_causal
from sparsekv_cli.device.layers.store import UNLIMITED
from sparsekv_cli.device.window import DeviceWindow
from sparsekv_cli.kernels.attention.arrivals import none_arrived

SIZE, N_SPARE = 40, 8  # tokens of the window, and rows before it; the interpreter is slow
SLOTS = SIZE + N_SPARE


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    for module in (host_windows, windows):
        monkeypatch.setattr(module, "N_SPARE", N_SPARE)
    monkeypatch.setattr(host_windows, "window_rows", lambda window: window + N_SPARE + 4)


class Pair:
    """One sequence in both caches."""

    def __init__(self, device, seed=0, softcap=0.0, sinks=False):
        rng = np.random.default_rng(9)
        spec = LayerSpec(
            layer=0, n_layer=1, n_head=4, n_head_kv=2, head_dim=32, value_dim=32, n_threads=1,
            kind=WINDOW, window=SIZE, softcap=np.float32(softcap),
            sinks=rng.standard_normal(4).astype(np.float32) if sinks else np.empty(0, np.float32),
        )  # fmt: skip
        self.host = WindowCache(spec)
        self.device = DeviceWindow(spec, torch.device(device))
        self.rng, self.until = np.random.default_rng(seed), 0
        self.begun = 0

    def rows(self, n):
        draw = self.rng.standard_normal
        q, k, v = (draw((heads, n, 32)).astype(np.float32) for heads in (4, 2, 2))
        k, v = (x.astype(np.float16).astype(np.float32) for x in (k, v))
        return AttnInput(q, k, v, q, k, self.host.n)

    def prefill(self, *lengths):
        for n in lengths:
            x = self.rows(n)
            expected = attend_on_host(x.q, self.host.extend(x), self.host.spec)
            given = AttnInput(*(torch.from_numpy(t).to(self.device.device) for t in x[:5]), x.pos)
            seen = self.device.extend(given)
            found = attend_causal(given.q, seen.keys(), seen.values(), self.device.spec)
            np.testing.assert_allclose(found.cpu(), expected, atol=1e-3)
        self.host.finish_prefill()
        self.device.finish_prefill()
        self.until = 0

    def begin(self, n, n_max):
        """Plans a step if the last plan does not hold."""
        if n > self.until:
            self.plan = self.device.begin_step(n, n_max)
            self.until, self.begun = self.plan.until, self.begun + 1
        return self.plan

    def agree(self, found, expected, n):
        np.testing.assert_allclose(found.cpu(), expected[:, :32], atol=1e-3)
        self.device.end_step(n)
        assert self.device.n == self.host.n == n
        assert self.device.ledger.counts == self.host.ledger.counts


def step(pairs):
    """A row for each sequence, in one launch."""
    rows = [pair.rows(1) for pair in pairs]
    ns = [pair.host.n + 1 for pair in pairs]
    plans = [pair.begin(n, grid_bound(max(ns))) for pair, n in zip(pairs, ns, strict=True)]
    runs, _ = prepare_runs([pair.device for pair in pairs], plans, len(pairs))
    place = pairs[0].device.device
    numbers = torch.tensor([[n - 1 for n in ns], ns, ns], dtype=torch.int32, device=place)
    heads = [torch.from_numpy(np.stack([x[i][:, 0] for x in rows])).to(place) for i in range(5)]
    (run,) = runs
    assert (run.first, run.last) == (0, len(pairs))
    arrived = none_arrived(len(pairs), heads[0].shape[1], place)
    found = run.cache.decode(DeviceInput(*heads, StepNumbers(*numbers, arrived)))
    for pair, x, out, n in zip(pairs, rows, found, ns, strict=True):
        pair.agree(out, pair.host.decode(x), n)


def both_at(pair, n):
    """Goes back in both caches; the length that they have then."""
    assert pair.device.reach(n) == pair.host.reach(n)
    reached = pair.host.truncate(n)
    assert pair.device.truncate(n) == reached
    pair.until = 0
    return reached


@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (2.0, True)])
def test_steps_and_ways_back(softcap, sinks, device):
    """The slots are used again and again; two lengths of the last prefill stay."""
    pair = Pair(device, 0, softcap, sinks)
    pair.prefill(30)
    pair.prefill(100, 3)
    for _ in range(SLOTS + 20):
        step([pair])
    end = pair.host.n
    assert both_at(pair, end - N_SPARE) == end - N_SPARE
    step([pair])
    assert both_at(pair, 133) == 133  # the end of the prefill: its rows come back
    for _ in range(3):
        step([pair])
    assert pair.device.reach(70) == 30 and both_at(pair, 30) == 30
    step([pair])
    pair.prefill(5)
    step([pair])


def test_what_is_lost_is_not_taken_back(device):
    pair = Pair(device)
    pair.prefill(50)
    for _ in range(SLOTS + 5):
        step([pair])
    n = pair.device.n
    assert pair.device.truncate(n - SLOTS) == 0 and pair.device.n == n
    assert pair.device.reach(n - SLOTS) == 50
    step([pair])


def test_a_prompt_that_is_longer_than_the_slots(device):
    pair = Pair(device)
    pair.prefill(400, 7, 90)
    for _ in range(3):
        step([pair])
    assert both_at(pair, 497) == 497
    step([pair])
    assert pair.device.store.capacity == SLOTS


def test_a_prefill_is_broken_off(device):
    """It goes back to its beginning, also if it has overwritten all slots."""
    pair = Pair(device)
    pair.prefill(60)
    x = pair.rows(300)
    pair.host.extend(x)
    pair.device.extend(AttnInput(*(torch.from_numpy(t).to(device) for t in x[:5]), x.pos))
    assert both_at(pair, 60) == 60
    step([pair])


def test_a_plan_holds_until_rows_must_be_copied(device):
    """A captured step stays valid; only the rows of a mark end a plan."""
    pair = Pair(device)
    pair.prefill(300)
    for _ in range(SLOTS):
        step([pair])
    # The rows of the prefill's end are copied before a step overwrites the first of them.
    assert pair.begun == 2 and pair.until == UNLIMITED
    kept = pair.device.memory().device - pair.device.store.nbytes
    assert kept == 2 * 2 * 2 * 32 * (SIZE - 1)  # f16, K and V, two heads


def test_a_step_that_is_broken_off(device):
    """Its row may have overwritten the oldest one."""
    pair = Pair(device)
    pair.prefill(SLOTS)
    n = pair.device.n
    assert pair.device.store.first == 0
    pair.begin(n + 1, grid_bound(n + 1))
    pair.device.drop_step(n)
    assert pair.device.n == n and pair.device.store.first == 1
    pair.until = 0
    step([pair])


def test_sequences_of_different_lengths(device):
    """They share launches and common tensors, and each goes its own way."""
    pairs = [Pair(device, seed) for seed in range(3)]
    for pair, n in zip(pairs, (5, 150, 400), strict=True):
        pair.prefill(n)
    for _ in range(4):
        step(pairs)
    both_at(pairs[1], 151)
    pairs[0].until = pairs[2].until = 0
    step(pairs)
    step(pairs[1:])
    step(pairs[:1])
