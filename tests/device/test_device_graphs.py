"""A graph is replayed while the key of ``begin_step`` is the same: no tensor may have moved."""

import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import side_by_side
import test_device_batching as sequences
import torch
from scripts_as_modules import load_script
from side_by_side import GEOMETRIES, SideBySide

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.calibration import fasa, sals
from sparsekv_cli.calibration.allocation import even_budgets
from sparsekv_cli.device import graphs
from sparsekv_cli.device.batching import Planner, prepare_runs
from sparsekv_cli.device.cache import CachePlan, DeviceCache
from sparsekv_cli.device.graphs import Piece, Steps
from sparsekv_cli.device.streams import SideStream
from sparsekv_cli.methods.fasa import FASA
from sparsekv_cli.methods.freekv import FreeKV
from sparsekv_cli.methods.quest import Quest
from sparsekv_cli.methods.sals import SALS
from sparsekv_cli.methods.streaming import Streaming
from sparsekv_cli.methods.topk import TopK

BUDGET = {"budget": Budget(tokens=40)}
METHODS = {
    "topk": TopK(**BUDGET),
    "streaming": Streaming(**BUDGET),
    "quest": Quest(**BUDGET, page=8),
    "fasa": FASA(**BUDGET),
    "fasa-m": FASA(**BUDGET, variant="m"),
    "sals": SALS(sinks=4, window=20, budget=Budget(tokens=24)),
    "freekv": FreeKV(budget=Budget(tokens=64), page=8, sinks=8, window=16),
}


def tensors(x: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a cache that its steps read, by where they are found."""
    if isinstance(x, torch.Tensor):
        yield path, x
    elif isinstance(x, tuple | list):
        for i, part in enumerate(x):
            yield from tensors(part, f"{path}[{i}]")
    elif type(x).__module__.startswith("sparsekv_cli.device"):
        for name, part in vars(x).items():
            if name != "_start":  # kept for a rewind
                yield from tensors(part, f"{path}.{name}")


@pytest.mark.parametrize("name", METHODS)
def test_nothing_moves_under_one_key(name, device, monkeypatch):
    """Through dense and sparse steps, growth, a prompt, and the same rewind twice."""
    geometry = GEOMETRIES[0]
    rng, size = np.random.default_rng(5), geometry.n_head_kv * geometry.d
    rank = np.stack([rng.permutation(32) for _ in range(geometry.n_head_kv)]).astype(np.uint8)
    vectors = np.linalg.qr(rng.standard_normal((size, size)))[0].astype(np.float32)
    calibration = {
        "dom_var": rank, "dom_ca": rank, "tip_budget": even_budgets(fasa.SHARES),
        "vectors_diag": vectors, "vectors_pca": vectors,
        "rank_budget": even_budgets(sals.SHARES), "weights": np.ones(size, np.float32),
    }  # fmt: skip
    pair = SideBySide(geometry, METHODS[name], calibration, device)
    places, kept = {}, []
    prepare = side_by_side.prepare

    def watched(cache: DeviceCache, n: int, n_max: int) -> Any:
        key = prepare(cache, n, n_max)
        found = dict(tensors(cache.store if n < 40 else cache))  # dense steps read no more
        kept.extend(found.values())  # so that no later tensor gets their memory
        now = {path: x.data_ptr() for path, x in found.items()}
        assert places.setdefault(key, now) == now
        return key

    monkeypatch.setattr(side_by_side, "prepare", watched)
    pair.prefill(30)
    for n_steps, n_prompt in ((2, 90), (1, 88)):  # to 124 rows both times
        for _ in range(n_steps):
            pair.decode()
        pair.prefill(n_prompt)
        end = pair.host.n
        for _ in range(2):
            pair.decode()
        back = 32 if METHODS[name].holds_all_rows else end  # to a prompt's end all go back
        for each in (pair.host, pair.device):
            assert each.truncate(back) == back
        pair.decode()
    assert len(places) < 12


class FakeCuda:
    """As much of torch.cuda as ``Steps`` asks for, with CUDA's rule for pools: what has had graphs
    and has none any more takes no other capture.
    """

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.alive: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.collects: list[bool] = []  # whether garbage was collected, in each capture
        self.n_captures = self.most = 0  # captures that are under way, and the most at once

    def graph_pool_handle(self) -> int:
        return len(self.used) + 1000

    def CUDAGraph(self) -> Any:
        return type("Graph", (), {"replay": lambda self: None})()

    @contextmanager
    def graph(self, graph: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.n_captures += 1
        self.most = max(self.most, self.n_captures)
        if pool in self.used and pool not in self.alive.values():
            raise RuntimeError("use_count > 0")
        self.used.add(pool)
        self.alive[graph] = pool
        self.collects.append(gc.isenabled())
        try:
            yield
        finally:
            self.n_captures -= 1

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


def test_a_pool_is_left_with_its_last_graph(monkeypatch):
    """New owners, a capture that fails, and one key too many."""
    fake, steps = FakeCuda(), Steps(torch.device("cuda"))
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    calls = []

    def program() -> list[Piece]:
        launches = Piece(lambda: calls.append("launch"), False)
        return [launches, Piece(lambda: calls.append("host"), True), launches]

    def failing() -> list[Piece]:
        def fail() -> None:
            raise ValueError("no")

        return [*program(), Piece(fail, False)]

    class Owner:
        pass

    for _ in range(2):
        owner = Owner()
        for key in range(2):
            for _ in range(3):
                steps.run([owner], key, program)
        assert len(set(fake.alive.values())) == 1
    for _ in range(2):  # the second time there are graphs of the first one's pieces no more
        owner = Owner()
        steps.run([owner], "a", program)
        with pytest.raises(ValueError, match="no"):
            steps.run([owner], "a", failing)
        steps.run([owner], "a", program)
    assert gc.isenabled() and not any(fake.collects)
    n_key = 2 * 2
    assert len(fake.collects) == 2 * n_key + 2 * 3 + 2 * 2
    assert calls.count("host") == 3 * n_key + 2 * 2


def test_one_capture_at_a_time(monkeypatch):
    """Each model of a server has a thread of its own."""
    fake, owner, pools = FakeCuda(), FakeCuda(), count()
    fake.graph_pool_handle = lambda: next(pools)
    monkeypatch.setattr(torch, "cuda", fake)

    def decode(_: int) -> None:
        steps = Steps(torch.device("cuda"))
        for _ in range(2):
            steps.run([owner], 0, lambda: [Piece(lambda: time.sleep(0.05), False)])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(decode, range(3)))
    assert len(fake.collects) == 3 and fake.most == 1


@pytest.mark.parametrize("name", sequences.METHODS)
def test_room_is_for_the_context_and_keys_are_not_of_a_step(name, device):
    """The first step after a prefill moves nothing, and the next ones have its key."""
    cache = sequences.make(name, device)
    cache.n_ctx, n = 300, 200
    cache.reserve(300)
    sequences.prefill(cache, sequences.rows_of(cache, torch.Generator().manual_seed(0), n))
    prepare_runs([cache], [CachePlan("none", n)], 1)
    before = [(x.data_ptr(), x.shape) for x in cache.tensors()]
    keys = set()
    for n_rows in range(n + 1, n + 7):
        keys.add(cache.begin_step(n_rows, cache.bound(n_rows)).key)
        assert [(x.data_ptr(), x.shape) for x in cache.tensors()] == before
        cache.end_step(n_rows)
    assert len(keys) == 1
    a_row = cache.spec.n_head_kv * 2 * (cache.spec.head_dim + cache.spec.value_dim)
    memory = cache.memory()
    assert memory.device + memory.host <= 1.5 * 300 * a_row  # some of it twice
    assert cache.bound(250) == 300 and cache.bound(301) == 301


@pytest.mark.parametrize("name", sequences.METHODS)
def test_a_plan_holds_as_long_as_it_says(name, device):
    """Until then ``begin_step`` launches nothing, moves nothing and returns the same."""
    load_script("gpu/bench")
    from gpu_launches import recorded

    cache = sequences.make(name, device)
    n_first, n_max = 120, 184
    sequences.prefill(cache, sequences.rows_of(cache, torch.Generator().manual_seed(0), n_first))
    n_planned, n = 0, n_first + 1
    while n < n_first + 40:
        plan = cache.begin_step(n, n_max)
        (_, kept), until = prepare_runs([cache], [plan], 1), plan.until
        assert n <= until <= n_max
        n_planned += 1
        cache.end_step(n)
        for later in range(n + 1, min(until, n_first + 40) + 1):
            with recorded() as launches:
                plan = cache.begin_step(later, n_max)
                assert prepare_runs([cache], [plan], 1)[1] == kept
            assert launches == []
            cache.end_step(later)
            n = later
        n += 1
    assert n_planned <= 2  # the first step of freekv chooses ahead


def test_a_fork_that_is_broken_off_is_joined(monkeypatch):
    """On a stream, where the device has some: the step's stream waits for it."""
    here = SideStream(torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt), here.fork():
        assert here.forked
        raise KeyboardInterrupt
    assert not here.forked
    waits = []
    step = SimpleNamespace(wait_stream=lambda other: waits.append(("step", other)))
    beside = SimpleNamespace(wait_stream=lambda other: waits.append(("beside", other)), device=None)
    fake = SimpleNamespace(current_stream=lambda device: step, stream=lambda stream: nullcontext())
    monkeypatch.setattr(torch, "cuda", fake)
    here._stream = beside
    with pytest.raises(KeyboardInterrupt), here.fork():
        raise KeyboardInterrupt
    assert waits == [("beside", step), ("step", beside)] and not here.forked


def test_a_step_that_was_broken_off_after_its_fork_is_joined(device):
    cache = sequences.make("freekv", device)
    sequences.prefill(cache, sequences.rows_of(cache, torch.Generator().manual_seed(0), 100))
    planner = Planner()
    planner.begin([100], [[cache]])
    assert cache.side is not None
    cache.side.forked = True  # Ctrl-C came ahead of the join
    cache.drop_step(100)
    assert not cache.side.forked
    planner.begin([100], [[cache]])
    assert cache._pages is not None and cache._current  # it chooses again
