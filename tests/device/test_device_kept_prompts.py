"""Rows of prompts on disk with a GPU: read to its memory or the host's, and kept from both."""

import json
from dataclasses import replace

import numpy as np
import pytest
from kept_prompts import keep, keeping, n_cached
from opened import open_sequence
from tiny_models import make_model
from tiny_sequences import decoded, tokens

from sparsekv_cli.commands.options.prefix import (
    PrefixOptions,
    open_prompt_rows,
    prefixes_maker,
)
from sparsekv_cli.commands.run.jsonl import LineAnswers, Output
from sparsekv_cli.commands.run.task import Task
from sparsekv_cli.device import engine as device_engine
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.methods import build_method
from sparsekv_cli.prefix import prefixes
from sparsekv_cli.prefix.blocks import BlockWriter, read_header
from sparsekv_cli.serve.jobs import Finished, Job, NewToken, Request
from sparsekv_cli.serve.scheduler import Scheduler
from sparsekv_cli.settings.config import SessionConfig

CHUNK = 256  # rows; a GPU's kernels are chosen by it
FIRST = tokens(700)
SECOND = FIRST[:560] + tokens(60, 1)
ANSWER = [5, 9]
SIZES = {"n_embd": 64, "n_ff": 64, "head_dim": 32, "n_layer": 2}  # the interpreter is slow
Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
CASES = {
    "full": ("full", {}, "device"),
    "topk": ("topk", {"budget": "24"}, "device"),
    "quest": ("quest", {"budget": "48"}, "device"),
    "streaming": ("streaming", {"budget": "24"}, "device"),
    "quest, q8_0": ("quest", {"budget": "48", **Q8}, "device"),
    "fasa": ("fasa", {"budget": "24"}, "device"),
    "fasa, m": ("fasa", {"budget": "24", "variant": "m"}, "device"),
    "sals": ("sals", {"budget": "24", "sinks": "4", "window": "12"}, "device"),
    "freekv": ("freekv", {"budget": "64", "page": "8", "sinks": "8", "window": "16"}, "device"),
    "full, host": ("full", {}, "host"),
    "fasa, host": ("fasa", {"budget": "24"}, "host"),
    "lfps": ("lfps", {"budget": "24"}, "auto"),
    "snapkv": ("snapkv", {"budget": "48"}, "auto"),
    "faedkv": ("faedkv", {}, "auto"),
}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens a sequence of a case; with ``folder`` one that keeps its prompts there."""
    monkeypatch.setattr(device_engine, "CHUNK", CHUNK)
    path = make_model(tmp_path / "m.gguf", wtype="F32", n_ctx=2048, **SIZES)

    def open_one(case, folder=None, types=None, device="cuda", **settings):
        name, options, kv = CASES[case]
        given = {"kv": kv} if device == "cuda" else {}
        config = SessionConfig(
            threads=1, device=device, prefill_dtype="f32", chunk=16, **given, **settings
        )
        layers = None if name == "full" else "none"
        k, v = types or (None, None)
        method = build_method(name, options, dense_layers=layers, cache_type_k=k, cache_type_v=v)
        sequence = open_sequence(path, method, config)
        sequence.model.gguf.content.wait()  # its hash is the name of the rows
        return sequence, [] if folder is None else keeping(sequence, folder)

    return open_one


@pytest.mark.parametrize("case", CASES)
def test_an_answer_has_the_bits_of_one_without_the_cache(case, opened, tmp_path):
    """Whole chunks are kept and found, because the libraries of a GPU choose kernels by them."""
    folder = tmp_path / "kept"
    alone, _ = opened(case)
    writer, _ = opened(case, folder)
    sequence, said = opened(case, folder)
    keep(writer, FIRST)
    expected = alone.prefill(SECOND)
    np.testing.assert_array_equal(sequence.prefill(SECOND), expected)
    assert sequence.timings.cached_tokens == 512 == 2 * CHUNK
    np.testing.assert_array_equal(decoded(sequence, ANSWER), decoded(alone, ANSWER))
    found, counts = sequence.ledger(), alone.ledger()
    assert found | {"us_waited": 0} == counts | {"us_waited": 0}
    assert said == ["-v prefix cache: 512 of 620 tokens are reused"]


def test_rows_on_the_device_and_on_the_host_are_the_same(opened, tmp_path):
    folder = tmp_path / "kept"
    on_device, _ = opened("full", folder)
    keep(on_device, FIRST)
    (block,) = folder.iterdir()
    kept = block.read_bytes()
    block.unlink()
    on_host, _ = opened("full, host", folder)
    keep(on_host, FIRST)
    assert block.read_bytes() == kept
    assert n_cached(on_device, SECOND) == n_cached(on_host, SECOND) == 512


def test_rows_of_a_gpu_and_of_a_cpu_never_serve_each_other(opened, tmp_path):
    """Nor those of another GPU, of other libraries, weights or chunks."""
    folder = tmp_path / "kept"
    gpu, _ = opened("full", folder)
    cpu, _ = opened("full", folder, device="cpu")
    keep(gpu, FIRST)
    assert n_cached(cpu, SECOND, keep) == 0
    assert n_cached(cpu, SECOND) == 608 and n_cached(gpu, SECOND) == 512
    identity = gpu.rows.identity
    assert identity.gpu[0] == "cpu" and identity.gpu[2:] == ("quantized", CHUNK)
    for i, other in enumerate(("NVIDIA H200", "2.0", "bf16", 2 * CHUNK)):
        facts = (*identity.gpu[:i], other, *identity.gpu[i + 1 :])
        gpu.rows.identity = replace(identity, gpu=facts)
        assert n_cached(gpu, SECOND) == 0


@pytest.mark.parametrize("case", ["full, host", "lfps"])
def test_rows_of_another_type(case, opened, tmp_path):
    """Later tokens attend to the rounded rows, as the cache has them."""
    folder = tmp_path / "kept"
    alone, _ = opened(case, types=("q8_0", "q8_0"))
    sequence, _ = opened(case, folder, types=("q8_0", "q8_0"))
    keep(sequence, FIRST)
    assert n_cached(sequence, SECOND) == 512
    expected = alone.prefill(SECOND)
    found = sequence.checkpoint.logits
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("case", ["full", "full, host"])
def test_large_rows_are_kept_in_eight_bits(case, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(prefixes, "Q8_FROM", 0)
    folder = tmp_path / "kept"
    sequence, said = opened(case, folder)
    alone, _ = opened(case)
    keep(sequence, FIRST)
    (block,) = folder.iterdir()
    assert read_header(block.open("rb")).types == ("q8_0", "q8_0")
    assert n_cached(sequence, SECOND) == 512
    expected, found = alone.prefill(SECOND), sequence.checkpoint.logits
    assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    assert "from rows of another type" in said[-1]


def test_a_longer_prompt_keeps_whole_chunks_that_follow(opened, tmp_path):
    folder = tmp_path / "kept"
    sequence, _ = opened("full", folder)
    keep(sequence, FIRST)
    longer = FIRST + tokens(500, 2)  # 1200 tokens: four chunks and a part
    assert n_cached(sequence, longer, keep) == 512
    assert n_cached(sequence, longer) == 1024
    alone, _ = opened("full")
    expected = alone.prefill(longer)
    np.testing.assert_array_equal(sequence.checkpoint.logits, expected)
    assert n_cached(sequence, tokens(511, 3), keep) == 0 and len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("case", ["full", "lfps"])
def test_a_damaged_block_costs_whole_chunks(case, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(device_engine, "CHUNK", 768)
    folder = tmp_path / "kept"
    sequence, said = opened(case, folder)
    prompt = tokens(1600)
    keep(sequence, prompt)
    last = max(folder.iterdir(), key=lambda path: read_header(path.open("rb")).first)
    data = bytearray(last.read_bytes())
    data[-9] ^= 64
    last.write_bytes(data)
    alone, _ = opened(case)
    expected = alone.prefill(prompt)
    assert n_cached(sequence, prompt) == 768
    np.testing.assert_array_equal(sequence.checkpoint.logits, expected)
    assert any("is damaged" in line or "removed" in line for line in said)


def test_steps_do_not_change_what_is_kept(opened, tmp_path):
    """The rows are written when the answer is finished, and others have joined its tensors."""
    folder = tmp_path / "kept"
    sequence, _ = opened("full", folder)
    other = sequence.another()
    alone, _ = opened("full", tmp_path / "alone")
    keep(alone, FIRST)
    sequence.prefill(FIRST)
    other.prefill(SECOND)
    for token in (5, 6):
        sequence.engine.decode([sequence, other], [[token], [token]])
    sequence.rewind(100)
    sequence.prefill(tokens(300, 7), rows=None)
    sequence.rows.finish()
    kept, expected = (
        [path.read_bytes() for path in sorted(each.iterdir())]
        for each in (folder, tmp_path / "alone")
    )
    assert kept == expected


def test_a_prefill_that_is_interrupted_or_lacks_memory_keeps_nothing(opened, tmp_path, monkeypatch):
    folder = tmp_path / "kept"
    sequence, said = opened("full", folder)

    def stop(done: int, total: int) -> None:
        if done > 300:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sequence.prefill(FIRST, stop)
    assert not list(folder.iterdir())
    monkeypatch.setattr(prefixes, "available_memory", lambda: 1000)
    keep(sequence, FIRST)
    assert not list(folder.iterdir())
    assert said[-1].startswith("the prompt is not kept: its rows take")
    assert "of the host's memory" in said[-1]


def test_a_full_disk_is_said_and_the_answer_goes_on(opened, tmp_path, monkeypatch):
    sequence, said = opened("full", tmp_path / "kept")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockWriter, "write", full)
    alone, _ = opened("full")
    np.testing.assert_array_equal(keep(sequence, FIRST), alone.prefill(FIRST))
    assert "No space left on device" in said[-1] and not list((tmp_path / "kept").iterdir())


def test_a_session_file_goes_from_a_cpu_to_a_gpu_and_back(opened, tmp_path):
    """Its rows may be of another machine, so it needs no whole chunks."""
    options = PrefixOptions(None, None, False, tmp_path / "a.session")
    for device, n_known in (("cpu", 0), ("cuda", 688), ("cuda", 688), ("cpu", 688)):
        sequence, _ = opened("full", device=device)
        sequence.rows = open_prompt_rows(sequence.model, options, sequence.method)
        assert n_cached(sequence, FIRST, keep) == n_known
    path = options.session
    path.unlink()
    for device, n_known in (("cuda", 0), ("cpu", 688)):
        sequence, _ = opened("full, host", device=device)
        sequence.rows = open_prompt_rows(sequence.model, options, sequence.method)
        assert n_cached(sequence, FIRST, keep) == n_known


def test_passages_are_refused_by_name(opened, tmp_path):
    sequence, _ = opened("full")
    options = PrefixOptions(tmp_path, None, False, None, repair=0.15)
    with pytest.raises(SparseKVError, match=r"--reuse passages: rows on a GPU are not moved; use"):
        open_prompt_rows(sequence.model, options, sequence.method)


@pytest.mark.parametrize("case", ["quest", "lfps"])
def test_a_second_server_goes_on_from_the_disk(case, opened, tmp_path):
    """Two prompts at a time. The sequences that a server keeps give no rows to others."""
    requests = [FIRST, SECOND, FIRST[:640] + tokens(40, 8)]

    def served(folder):
        sequence, _ = opened(case)
        model, method = sequence.model, sequence.method
        disk_of = prefixes_maker(model, PrefixOptions(folder, None, folder is None, None))
        scheduler = Scheduler(model, n_parallel=2, n_queue=8, kv_bytes=1 << 30, disk_of=disk_of)
        events = [[] for _ in requests]
        scheduler.submit(
            [
                Job(Request(ids, method, 0, 3, SamplingOptions({"temp": 0})), each.append, 600.0)
                for ids, each in zip(requests, events, strict=True)
            ]
        )
        scheduler.start()
        scheduler.stop()
        assert all(isinstance(each[-1], Finished) for each in events), events
        pieces = [[e.text for e in of if isinstance(e, NewToken | Finished)] for of in events]
        return ["".join(each) for each in pieces], scheduler.stats.cached_tokens

    expected, _ = served(None)
    assert served(tmp_path / "kept") == (expected, 2 * 512)
    assert served(tmp_path / "kept") == (expected, 3 * 512)


@pytest.mark.parametrize("case", ["full", "snapkv"])
def test_lines_of_one_run(case, opened, tmp_path):
    lines = [
        json.dumps({"prompt": "word " * 175 + end, "raw": True, "temp": 0}) for end in ("a", "b b")
    ]
    answers, cached = [], []
    for folder in (None, tmp_path / "kept", tmp_path / "kept"):
        sequence, _ = opened(case)
        options = PrefixOptions(folder, None, folder is None, None)
        rows = open_prompt_rows(sequence.model, options, sequence.method)
        written: list[str] = []
        given = LineAnswers(sequence.model, 2, Output(written.append), rows)
        given.run(enumerate((line.encode() for line in lines), 1), Task(n_predict=3))
        answers.append(written)
        cached.append(given.timings.cached_tokens)
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 2
    assert cached[0] == 0 < cached[1] < cached[2] == 2 * cached[1] and cached[1] % CHUNK == 0
