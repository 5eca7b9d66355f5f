"""Steps are padded to 1, 2, 4 or 8 rows, so that a sequence that joins takes no capture."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from checked_device import N_PROMPT, Checked, checked, write_model
from fake_cuda import FakeCuda
from test_device_batching import LENGTHS, METHODS, make, prefill, rows_of

from sparsekv_cli.device.batching import prepare_runs, rows_of_step
from sparsekv_cli.device.cache import DeviceCache, DeviceInput, StepNumbers, grid_bound
from sparsekv_cli.device.graphs import Steps
from sparsekv_cli.device.streams import join_all
from sparsekv_cli.kernels.attention.arrivals import none_arrived

pytestmark = pytest.mark.usefixtures("one_thread")
N_ROWS = 4  # of a step of three sequences


def test_rows_of_a_step():
    assert [rows_of_step(n) for n in (1, 2, 3, 4, 5, 8, 9, 17)] == [1, 2, 4, 4, 8, 8, 16, 24]


def padded(caches: Sequence[DeviceCache], rows: list[torch.Tensor], n_rows: int) -> torch.Tensor:
    """A step of the caches in n_rows rows: the attention of theirs. rows: f32 (n_rows, ...)."""
    ns = [cache.n + 1 for cache in caches]
    n_max = grid_bound(max(ns))
    plans = [cache.begin_step(n, n_max) for cache, n in zip(caches, ns, strict=True)]
    (run,), _ = prepare_runs(caches, plans, n_rows)
    assert (run.first, run.last) == (0, n_rows)
    n_padded, n_more = run.cache.rows_of_padding(), n_rows - len(caches)
    assert n_padded <= min(ns)
    budgets = [cache.budget_rows(n) for cache, n in zip(caches, ns, strict=True)]
    pos = [n - 1 for n in [*ns, *[n_padded] * n_more]]
    numbers = [pos, [at + 1 for at in pos], budgets + [1] * n_more]
    arrived = none_arrived(n_rows, rows[0].shape[1], run.cache.device)
    step = StepNumbers(*torch.tensor(numbers, dtype=torch.int32, device=run.cache.device), arrived)
    out = run.cache.decode(DeviceInput(*(x[:n_rows] for x in rows), step))
    join_all([run.cache.side] if run.cache.side else [])
    for cache, n in zip(caches, ns, strict=True):
        cache.end_step(n)
    return out[: len(caches)]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fasa-m"])
def test_padding_changes_nothing_of_a_sequence(name, device):
    """Neither what it attends to, nor a byte of its rows and tables, nor a count."""
    generator = torch.Generator().manual_seed(0)
    with_padding, without = ([make(name, device) for _ in LENGTHS] for _ in range(2))
    for n, a, b in zip((90, 120, 80), with_padding, without, strict=True):
        rows = rows_of(a, generator, n)
        prefill(a, rows)
        prefill(b, rows)
    for _ in range(2):
        heads = zip(*(rows_of(with_padding[0], generator, 1) for _ in range(N_ROWS)), strict=True)
        rows = [torch.stack([x[:, 0] for x in of_all]) for of_all in heads]
        expected = padded(without, rows, len(LENGTHS))
        assert torch.equal(padded(with_padding, rows, N_ROWS), expected)
    for a, b in zip(with_padding, without, strict=True):
        for ours, theirs in zip(a.tensors(), b.tensors(), strict=True):
            assert torch.equal(ours, theirs)
        ours, theirs = dict(a.counters()), dict(b.counters())
        assert ours.pop("us_waited", 0) >= 0 <= theirs.pop("us_waited", 0)
        assert ours == theirs


def come(engine: Checked, method: str) -> Iterator[np.ndarray]:
    """Logits of steps of two sequences, three and four; then one leaves, and another comes."""
    batch = [engine.caches(method) for _ in range(4)]
    for i, caches in enumerate(batch):
        engine.prefill(caches, N_PROMPT - 3 * i)
    for n in (2, 2, 3, 3, 4):  # as it is, captured
        yield engine.step(batch[:n])
    del batch[1]
    yield engine.step(batch)
    batch.insert(0, engine.caches(method))
    engine.prefill(batch[0], N_PROMPT - 5)
    yield engine.step(batch)


@pytest.mark.parametrize("method", ["topk", "freekv", "snapkv"])
def test_a_sequence_that_joins_takes_no_capture(method, tmp_path, monkeypatch, device):
    if device == "cuda":
        pytest.skip("a GPU is there")
    path = write_model(tmp_path, n_layer=1)
    with checked(path, None) as engine:
        expected = list(come(engine, method))
    captures, capture = [], Steps._captured

    def counted(steps, piece):
        captures.append(piece)
        return capture(steps, piece)

    monkeypatch.setattr(Steps, "_captured", counted)
    with checked(path, FakeCuda()) as engine:
        n_captured = []
        for found, logits in zip(come(engine, method), expected, strict=True):
            np.testing.assert_array_equal(found, logits)
            n_captured.append(len(captures))
            captures.clear()
        assert engine.cuda is not None and not engine.cuda.found
    if method == "freekv":  # a first step after a prefill has a program of its own
        assert n_captured == [0] * len(n_captured)
        return
    n = n_captured[1]
    assert n >= 1 and n_captured == [0, n, 0, n, 0, 0, 0]


def test_tokens_of_three_sequences_are_those_of_each_alone(tmp_path):
    """Of caches on the device and on the host, and of lfps, whose sinks the device attends to."""
    with checked(write_model(tmp_path), None) as engine:
        for method in ("quest", "lfps", "snapkv"):
            batch = [engine.caches(method) for _ in LENGTHS]
            for i, caches in enumerate(batch):
                engine.prefill(caches, N_PROMPT - 7 * i)
            together = np.stack([engine.step(batch) for _ in range(2)], axis=1)
            assert together.shape[:2] == (3, 2)
            for i, logits in enumerate(together):
                caches, n = engine.caches(method), N_PROMPT - 7 * i
                engine.prefill(caches, n)
                alone = engine.decode(caches, n, 2)
                np.testing.assert_allclose(logits, alone, atol=4e-3)
                assert logits.argmax(1).tolist() == alone.argmax(1).tolist()
