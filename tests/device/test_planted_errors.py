"""The checks of test_streams_and_captures.py find errors of each kind that are planted here.

They are planted in one of two sequences that decode together.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checked_device import LENGTHS, N_PROMPT, check, checked, steps, write_model
from fake_cuda import Block, FakeCuda
from fake_cuda_graphs import CaptureError, Event, Stream

from sparsekv_cli.device import engine as device_engine
from sparsekv_cli.device import host
from sparsekv_cli.device.cache import CachePlan, DeviceInput, StepNumbers
from sparsekv_cli.device.methods.freekv import DeviceFreeKV
from sparsekv_cli.device.methods.full import DeviceDense
from sparsekv_cli.device.streams import SideStream
from sparsekv_cli.kernels.layer.rows import gate_rows

N_LAYER = 1

pytestmark = pytest.mark.usefixtures("one_thread")


def in_each_step(act: Callable[[Any, Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Dense layers also call act(cache, input of the last sequence).

    What it returns is added to that sequence's attention.
    """

    def plant(patch: pytest.MonkeyPatch) -> None:
        decode = DeviceDense.decode

        def planted(self: Any, x: Any, *out: torch.Tensor) -> torch.Tensor:
            last = slice(-1, None)
            numbers = StepNumbers(*(each[last] for each in x.step))
            more = act(self, DeviceInput(*(each[last] for each in x[:5]), numbers))
            result = decode(self, x, *out)
            if more is not None:
                (out or [result])[0][last].add_(more)
            return result

        patch.setattr(DeviceDense, "decode", planted)

    return plant


def replaced(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def not_waiting(patch: pytest.MonkeyPatch) -> None:
    """The copies of the second prompt's rows are not waited for."""
    wait, n_waits = Event.synchronize, count()
    patch.setattr(Event, "synchronize", lambda event: next(n_waits) > 0 or wait(event))


def too_short(patch: pytest.MonkeyPatch) -> None:
    """The copies of two chunks go through one buffer, which does not wait for its reader."""
    patch.setattr(device_engine, "CHUNK", 1)
    patch.setattr(host, "N_BUFFERS", 1)
    patch.setattr(host.Buffer, "wait", lambda self: None)


def on_its_own_stream(_: Any, x: Any) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        x.q.mul_(1)


def read_beside(captured: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """A second stream reads what the first one lets go of, in steps as they are or in captures."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        recall = DeviceFreeKV._recall_ahead

        def planted(self: Any, arrays: Any, query: torch.Tensor, *numbers: Any) -> None:
            if torch.cuda.is_current_stream_capturing() == captured:
                query = query.clone()
            recall(self, arrays, query, *numbers)

        patch.setattr(DeviceFreeKV, "_recall_ahead", planted)

    return plant


def launch_if_captured(_: Any, x: Any) -> None:
    if torch.cuda.is_current_stream_capturing():
        gate_rows(x.q.flatten(1), "silu")


def rows_move(patch: pytest.MonkeyPatch) -> None:
    """Each plan of the first sequence moves its rows, and the step's key does not tell."""

    def begin_step(self: DeviceDense, n: int, n_max: int) -> CachePlan:
        self._n_max = n_max
        self.store.reserve(n_max)
        if n > N_PROMPT:  # of the first
            self.store = self.store.copy(self.store.capacity)
            self.store.n = n - 1
        return CachePlan("the same", n)  # so that each step is planned

    patch.setattr(DeviceDense, "begin_step", begin_step)
    patch.setattr(DeviceDense, "begin_batch", lambda *_: "the same")


PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "fork without a wait": (
        "freekv", replaced(SideStream, "fork", lambda self: torch.cuda.stream(self._stream)),
        "nothing orders them|not captured",
    ),
    "no join": (
        "freekv", replaced(SideStream, "join", lambda self: None), "nothing orders them"
    ),
    "a stream of its own": ("full", in_each_step(on_its_own_stream), "nothing orders them"),
    "the host does not wait for a step": (
        "lfps", replaced(Stream, "synchronize", lambda self: None), "nothing orders them"
    ),
    "rows taken in ahead of their copy": (
        "lfps", not_waiting, "nothing orders them"
    ),
    "a ring that is too short": ("lfps", too_short, "nothing orders them"),
    "the allocator is not told": (
        "lfps", replaced(Block, "used_by", lambda *_: None), "giving back"
    ),
    "memory that a second stream reads": (
        "freekv-ahead", read_beside(captured=False), "giving back"
    ),
    "memory that a second stream of a capture reads": (
        "freekv-ahead", read_beside(captured=True), "giving back"
    ),
    "item": ("full", in_each_step(lambda _, x: int(x.step.n[0]) * 0), "_local_scalar_dense"),
    "nonzero": ("full", in_each_step(lambda _, x: len(x.q.nonzero()) * 0), "nonzero"),
    "mask": ("full", in_each_step(lambda _, x: len(x.q[x.q > 0]) * 0), "index"),
    "blocking copy": ("full", in_each_step(lambda _, x: len(x.q.cpu()) * 0), "a copy for which"),
    "constant from the host": (
        "full", in_each_step(lambda _, x: 0 * torch.tensor([1.0], device=x.q.device)), "a copy for"
    ),
    "pinned allocation": (
        "full", in_each_step(lambda _, x: len(torch.zeros(4, pin_memory=True)) * 0), "pinning"
    ),
    "synchronize": ("full", in_each_step(lambda _, x: torch.cuda.synchronize()), "waits for the"),
    "another launch in a capture": (
        "full", in_each_step(launch_if_captured), "launches something else"
    ),
    "a number of the host": (
        "full", in_each_step(lambda cache, x: float(cache.store.n)), "Arrays are not equal"
    ),
    "memory that nobody wrote": (
        "full", in_each_step(lambda _, x: 0 * torch.empty_like(x.q)), "Arrays are not equal"
    ),
    "rows that move": ("full", rows_move, "was given back"),
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, device: str) -> Path:
    if device == "cuda":
        pytest.skip("a GPU is there")
    return write_model(tmp_path_factory.mktemp("checked"), n_layer=N_LAYER)


@pytest.fixture(scope="module")
def dense(path: Path) -> list[np.ndarray]:
    with checked(path, None) as engine:
        return list(steps(engine, "full", LENGTHS))


@pytest.mark.parametrize("error", PLANTED)
def test_errors_planted_in_one_sequence_of_two_are_found(error, path, dense, monkeypatch):
    method, plant, found = PLANTED[error]
    plant(monkeypatch)
    with checked(path, FakeCuda()) as engine, pytest.raises(AssertionError, match=found):
        check(engine, steps(engine, method, LENGTHS), dense)


@pytest.mark.parametrize("lives", [False, True])
def test_a_pool_whose_graphs_are_gone(lives):
    """It may be used again, unless a tensor in it lives."""
    with FakeCuda() as cuda:
        pool = torch.cuda.graph_pool_handle()

        def capture() -> tuple[Any, torch.Tensor]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                made = torch.zeros(4, device="cuda")
            return graph, made

        graph, made = capture()
        assert cuda.place(made) == "device"
        del graph
        if not lives:
            del made
            capture()
            return
        with pytest.raises(CaptureError, match="use_count > 0"):
            capture()


def test_memory_of_the_host_that_goes_under_a_copy():
    """torch waits for the copies of what it has pinned, not of what it does not know."""
    with FakeCuda() as cuda:
        x = torch.zeros(4, dtype=torch.float16, device="cuda")
        known = partial(torch.zeros, 4, dtype=torch.float16, pin_memory=True)
        for make, n_found in ((known, 0), (partial(cuda.locked, (4,)), 1)):
            make().copy_(x, non_blocking=True)
            assert len(cuda.found) == n_found
