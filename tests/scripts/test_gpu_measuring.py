"""How scripts/gpu measures, where there is no GPU: the order of a sample, launches, the model."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from scripts_as_modules import load_script

from sparsekv_cli.models.sources.locate import resolve_model

pytestmark = pytest.mark.slow  # torch and Triton, and a model of one layer


def test_nothing_of_a_sample_waits_for_the_host(monkeypatch):
    """The state is put back and the cache emptied ahead of it, behind work that is queued."""
    load_script("gpu/bench")
    import gpu_timing

    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("record")

        def elapsed_time(self, other):
            return 1.0

    @contextmanager
    def graph(graph):
        yield

    fake = SimpleNamespace(
        synchronize=lambda: done.append("synchronize"),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: done.append("replay")),
        graph=graph, Event=Event, _sleep=lambda cycles: done.append("sleep"),
    )  # fmt: skip
    flushed = SimpleNamespace(zero_=lambda: done.append("flush"))
    monkeypatch.setattr(gpu_timing.torch, "cuda", fake)
    monkeypatch.setattr(gpu_timing.torch, "empty", lambda *_, **__: flushed)
    timed = gpu_timing.time_calls(
        [lambda: done.append("call")], torch.device("cuda"), 2, lambda: done.append("restore")
    )
    assert timed == (1, 1, 1)
    warm = ["call", "restore", "synchronize", "call"]
    sample = ["restore", "flush", "sleep", "record", "replay", "record", "synchronize"]
    assert done == [*warm, *5 * sample, "restore"]


def test_the_model_for_logits_is_the_default_one(monkeypatch):
    monkeypatch.delenv("SPARSEKV_MODEL", raising=False)
    load_script("gpu/bench")
    from gpu_parts import Bench

    task = next(iter(Bench(torch.device("cpu"), False, None).logits()))
    assert task.rows.args[0] == resolve_model("smollm2")


def test_launches_of_a_layer():
    """As many as docs/gpu.md says, some of them on a second stream."""
    script = load_script("gpu/launches")
    options = SimpleNamespace(rows=1000, batch=1, gb_s=3350, start_us=2.5)
    row, (in_row, beside, planned) = script.row_of("full", options)
    assert row["in a row"] == in_row.total() / 2 == 10 and not beside and not planned
    assert in_row["matvec"] == 8 and in_row["rms_norm"] == 4  # of two steps
    assert row["floor, us"] == pytest.approx(25 + 1e3 * (row["MB"] + 122.7) / 3350)
    row, (in_row, beside, _) = script.row_of("freekv", options)
    assert {"offload_pages", "fetch_pages"} <= set(beside) and "offload_pages" not in in_row
