"""How scripts/gpu measures, where there is no GPU: the order of a sample, launches, the model."""

import re
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from scripts_as_modules import load_script
from source_tree import root

from sparsekv_cli.evaluation.compare import build_spec
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
    # Read, not written: written lines would be written back during the sample.
    flushed = SimpleNamespace(amax=lambda: done.append("flush"))
    monkeypatch.setattr(gpu_timing.torch, "cuda", fake)
    monkeypatch.setattr(gpu_timing.torch, "ones", lambda *_, **__: flushed)
    timed = gpu_timing.time_calls(
        [lambda: done.append("call")], torch.device("cuda"), 2, lambda: done.append("restore")
    )
    assert timed == 1
    warm = ["call", "restore", "synchronize", "call"]
    sample = ["restore", "flush", "sleep", "record", "replay", "record", "synchronize"]
    assert done == [*warm, *5 * sample, "restore"]


def test_the_model_for_logits_is_the_default_one(monkeypatch):
    monkeypatch.delenv("SPARSEKV_MODEL", raising=False)
    load_script("gpu/bench")
    from gpu_parts import Bench

    task = next(iter(Bench(torch.device("cpu"), False, None).logits()))
    assert task.rows.args[0] == resolve_model("smollm2")


def launches_of_a_layer(spec: str, n: int) -> tuple[Counter[str], Counter[str]]:
    """Of two steps: the kernels in a row and beside them that a layer of Llama-3.1-8B's heads adds.

    Kernels are noted and left undone, so they need not be interpreted.
    """
    from gpu_decoding import Decoding
    from gpu_launches import recorded
    from gpu_models import open_engine, random_model

    method = build_spec(spec)
    if spec != "full":
        method = replace(method, dense_layers=())
    found = []
    for n_layer in (1, 2):
        model = random_model("heads of llama-3.1-8b", n_layer)
        engine = open_engine(model, torch.device("cpu"), 1, "device")
        with recorded() as launches:
            steps = Decoding(engine, method, n, 4, 1)
            for i in range(4):
                if i == 2:
                    begin = len(launches)
                steps.step()
        captured = [launch for launch in launches[begin:] if launch.captured]
        found.append([Counter(x.kernel for x in captured if x.beside == b) for b in (False, True)])
    (one, one_beside), (two, two_beside) = found
    return two - one, two_beside - one_beside


def told_launches() -> dict[str, tuple[int, int]]:
    """The table of docs/gpu.md: launches of a layer, and those on a second stream."""
    text = (root() / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| \|(.*)\|\n.*\n\| launches a layer(.*)\|\n.*stream(.*)\|$", text, re.M)
    assert rows is not None
    names, in_row, beside = (row.strip(" |").split(" | ") for row in rows.groups())
    counts = zip(map(int, in_row), map(int, beside), strict=True)
    return dict(zip((name.strip("`") for name in names), counts, strict=True))


@pytest.mark.parametrize("spec", ["full", "quest", "fasa", "topk", "freekv", "sals"])
def test_launches_of_a_layer_are_those_of_the_page(spec, monkeypatch):
    load_script("gpu/bench")
    import gpu_rows

    monkeypatch.setattr(gpu_rows, "FILL", lambda *shape, **_: torch.zeros(*shape))
    in_row, beside = launches_of_a_layer(spec, 16384)
    assert (in_row.total() / 2, beside.total() / 2) == told_launches()[spec]
    if spec == "full":
        assert in_row["matvec"] == 8 and in_row["rms_norm"] == 4
    if spec == "freekv":
        assert {"offload_pages", "fetch_pages"} <= set(beside) and "offload_pages" not in in_row


def test_every_method_of_the_page_is_counted():
    marks = test_launches_of_a_layer_are_those_of_the_page.pytestmark
    assert list(told_launches()) == marks[0].args[1]
