"""Prefill on the device against the CPU's: logits, and what caches on the host were given."""

import gc
import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from memory_ranges import Ranges
from opened import decode_together, generated, open_sequence
from tiny_models import make_model

from sparsekv_cli import machine
from sparsekv_cli.cache.counters import ledger_of
from sparsekv_cli.cache.spec import AttnInput
from sparsekv_cli.device import cuda
from sparsekv_cli.device.engine import cache_bytes
from sparsekv_cli.device.host import N_BUFFERS, Buffer, HostCache, HostWorker
from sparsekv_cli.device.methods.full import DeviceDense
from sparsekv_cli.device.step import StepBuffers
from sparsekv_cli.engine import HostEngine
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.sampling.chain import make_sampler
from sparsekv_cli.sampling.params import SamplingParams
from sparsekv_cli.sampling.plain import PlainSampler
from sparsekv_cli.settings.config import SessionConfig

PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 400, 300)]
SIZES = {"n_embd": 64, "n_ff": 64, "n_vocab": 400, "head_dim": 32}  # the interpreter is slow
LIMIT = 6e-4  # of logits: f32 sums in another order, keys that round to the next f16


def on_host_and_device(path, method, **options):
    """One on the CPU, one on the device, both with f32 prefill."""
    both = []
    for device in ("cpu", "cuda"):
        config = SessionConfig(
            threads=1,
            device=device,
            prefill_dtype="f32",
            chunk=32,
            **(options if device == "cuda" else {}),
        )
        both.append(open_sequence(path, build_method(method, {}, budget=None), config))
    return both


@pytest.mark.parametrize("method", ["full", "lfps", "snapkv", "h2o"])
def test_host_caches_are_filled_as_on_the_cpu(tmp_path, method):
    path = make_model(tmp_path / "m.gguf", wtype="F32", **SIZES)
    expected, actual = on_host_and_device(path, method, kv="host")
    for part in (PROMPT[:50], PROMPT[50:60]):
        a, b = expected.prefill(part), actual.prefill(part)
        np.testing.assert_allclose(b, a, atol=2e-3)
    for ours, theirs in zip(actual.caches, expected.caches, strict=True):
        assert ours.n == theirs.n
        k = ours.cache.store.keys().astype(np.float32) - theirs.store.keys()
        assert np.abs(k).max() < 2e-3


def test_only_queries_that_are_read_are_copied():
    x = AttnInput(*(torch.randn(2, 40, 8) for _ in range(5)), 3)
    worker = HostWorker(torch.device("cpu"))
    for n_queries, n_copied in ((0, 0), (32, 32), (50, 40)):
        copied = worker.hand_over(x, lambda rows: rows, n_queries).result()
        assert np.array_equal(copied.q, x.q[:, 40 - n_copied :])
        assert np.array_equal(copied.k, x.k) and np.array_equal(copied.v, x.v)
        assert copied.q_nope.shape[1] == copied.k_nope.shape[1] == 0 and copied.pos == 3
    assert worker.hand_over(x, lambda rows: rows.k_nope.shape).result() == (2, 40, 8)


def test_a_copy_to_the_host_waits_for_the_reader_of_its_buffer(device, monkeypatch):
    """And for no copy: as many are under way as the ring has buffers."""
    if device == "cuda":
        pytest.skip("a GPU is there")
    order: list[Any] = []
    may_read, wait = threading.Event(), Buffer.wait

    def watched(buffer: Buffer) -> None:
        if buffer._reader is not None:
            order.append("waits")
            may_read.set()
        wait(buffer)

    monkeypatch.setattr(Buffer, "wait", watched)
    with FakeCuda() as cuda:
        worker = HostWorker(torch.device("cuda"))

        def take(rows: AttnInput) -> np.ndarray:
            assert may_read.wait(10)
            cuda.host_work("reading", Ranges.of_tensor(torch.from_numpy(rows.v)))
            return rows.v.copy()

        readers = []
        for i in range(N_BUFFERS + 1):
            rows = (torch.full((2, 3 + i, 8), float(i), device="cuda") for _ in range(5))
            readers.append(worker.hand_over(AttnInput(*rows, 0), take))
            order.append(i)
        found = [reader.result() for reader in readers]
        assert not cuda.found
    assert order == [*range(N_BUFFERS), "waits", N_BUFFERS]
    for i, v in enumerate(found):
        np.testing.assert_array_equal(v, np.full((2, 3 + i, 8), i))


@pytest.mark.parametrize(("method", "kv"), [("full", "device"), ("full", "host"), ("lfps", "host")])
def test_decode(tmp_path, method, kv):
    path = make_model(tmp_path / "m.gguf", wtype="F32", **SIZES)
    expected, actual = on_host_and_device(path, method, kv=kv)
    a, b = (sequence.prefill(PROMPT[:90]) for sequence in (expected, actual))
    for _ in range(2):
        np.testing.assert_allclose(b, a, atol=4e-3)
        token = int(a.argmax())
        a, b = (sequence.decode(token) for sequence in (expected, actual))
    assert expected.ledger()["rows_attended"] == actual.ledger()["rows_attended"]


@pytest.mark.parametrize("kv", ["device", "host"])
@pytest.mark.parametrize("arch", ["granite", "mistral3", "phi3", "smollm3"])
def test_architectures(tmp_path, arch, kv):
    """Scales, scaled queries, partial rotation and layers without any."""
    sizes = {**SIZES, "n_head": 2, "n_head_kv": 1, "n_layer": 4 if arch == "smollm3" else 2}
    path = make_model(tmp_path / "m.gguf", arch=arch, wtype="F32", n_ctx=512, **sizes)
    expected, actual = on_host_and_device(path, "full", kv=kv)
    a, b = (sequence.prefill(PROMPT[:110]) for sequence in (expected, actual))
    for _ in range(2):
        np.testing.assert_allclose(b, a, atol=4e-3)
        token = int(a.argmax())
        a, b = (sequence.decode(token) for sequence in (expected, actual))


@pytest.mark.parametrize(
    ("arch", "what"),
    [
        ("granitemoe", "experts"),
        ("gpt-oss", "experts"),
        ("lfm2", "recurrent layers"),
        ("gemma4", "inputs of its layers and layers without own rows"),
        ("qwen3next", "experts and recurrent layers"),
        ("deepseek2", "experts and latent attention"),
    ],
)
def test_what_has_no_kernels_is_refused_or_runs_on_the_cpu(tmp_path, arch, what, monkeypatch):
    sizes = {"n_layer": 4} if arch == "gemma4" else SIZES
    path = make_model(tmp_path / "m.gguf", arch=arch, **sizes)
    config = SessionConfig(device="cuda")
    with pytest.raises(SparseKVError, match=f"{arch} with {what} does not run on a GPU; use --de"):
        open_sequence(path, build_method("full", {}), config)
    monkeypatch.setattr(machine, "may_have_device", lambda: True)
    sequence = open_sequence(path, build_method("full", {}), SessionConfig(device="auto"))
    assert isinstance(sequence.engine, HostEngine)
    assert sequence.engine.note == f"the GPU is not used: {what} run on the CPU"


def test_auto_goes_on_with_the_cpu_where_the_gpu_has_no_room(tmp_path, monkeypatch):
    path, full = make_model(tmp_path / "m.gguf", **SIZES), build_method("full", {})
    monkeypatch.setattr(machine, "may_have_device", lambda: True)
    monkeypatch.setattr(cuda, "find_cuda", lambda _: torch.device("cpu"))  # interpreted
    for device in ("auto", "cuda"):
        config = SessionConfig(device=device, vram_limit=1e-6)
        if device == "cuda":
            with pytest.raises(SparseKVError, match="use --device cpu"):
                open_sequence(path, full, config)
            continue
        engine = open_sequence(path, full, config).engine
        assert isinstance(engine, HostEngine) and engine.room is None
        assert engine.note.startswith("the GPU is not used: the GPU has 0.0 GiB")
        assert ";" not in engine.note
    room = open_sequence(path, full, SessionConfig(device="cuda", vram_limit=1.0)).engine.room
    assert room is not None and 0 < room < 1 << 30


@pytest.mark.parametrize(
    ("capability", "problem"),
    [((7, 5), "it has compute capability 7.5, and at least 8.0 is needed"),
     (RuntimeError("busy\nmore"), r"it cannot be started \(busy\)"), ((8, 0), "")],
)  # fmt: skip
def test_a_gpu_that_cannot_be_used(capability, problem, monkeypatch):
    def found(_: Any) -> tuple[int, int]:
        if isinstance(capability, RuntimeError):
            raise capability
        return capability

    gpu = torch.device("cuda")
    monkeypatch.setattr(machine, "may_have_device", lambda: True)
    monkeypatch.setattr(cuda, "find_cuda", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", found)
    if not problem:
        assert machine.find_device("auto") == machine.find_device("cuda") == (gpu, "")
        return
    device, note = machine.find_device("auto")
    assert device is None and re.match(f"the GPU is not used: {problem}$", note)
    with pytest.raises(SparseKVError, match=f"--device cuda: {problem}; use --device cpu"):
        machine.find_device("cuda")


@pytest.mark.parametrize("method", ["full", "lfps"])
def test_a_sequence_that_is_forgotten_leaves_no_cache_behind(tmp_path, method):
    path = make_model(tmp_path / "m.gguf", wtype="F32", **SIZES)
    _, sequence = on_host_and_device(path, method)
    sequence.prefill(PROMPT[:90])
    sequence.decode(5)
    caches = [weakref.ref(cache) for cache in sequence.caches]
    sequence.reset()
    gc.collect()
    assert [cache() for cache in caches] == [None] * len(caches)


def test_calibration_and_two_sequences_on_the_device(tmp_path, monkeypatch):
    """A method that is calibrated through the device's prefill, and two sequences at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_model(tmp_path / "m.gguf", n_ctx=512, **SIZES)
    config = SessionConfig(threads=1, device="cuda", prefill_dtype="f32")
    method = build_method("fasa", {"budget": "24", "dense_layers": "0"})
    sequence = open_sequence(path, method, config)
    both = [sequence, sequence.another()]
    for each, n in zip(both, (40, 60), strict=True):
        each.prefill(PROMPT[:n])
    together = decode_together(both, [5, 6])
    ledger = ledger_of([cache for each in both for cache in each.caches])
    assert ledger["bytes_device"] > 0 and ledger["sparse_rows_attended"] == 2 * 4 * 24
    sequence = open_sequence(path, method, config)
    sequence.prefill(PROMPT[:60])
    np.testing.assert_allclose(sequence.decode(6), together[1], atol=1e-4)


def test_sequences_are_decoded_in_common_launches(tmp_path, monkeypatch):
    """Once a layer, for sequences of any lengths; one that comes to them later joins them."""
    path = make_model(tmp_path / "m.gguf", n_ctx=512, wtype="F32", **SIZES)
    sequence = open_sequence(
        path, build_method("full", {}), SessionConfig(device="cuda", prefill_dtype="f32")
    )
    expected, lengths = [], (30, 70, 50)
    for i, n in enumerate(lengths):
        sequence.reset()
        sequence.prefill(PROMPT[i : i + n])
        expected.append([sequence.decode(5), sequence.decode(7)])
    launched, decode = [], DeviceDense.decode

    def watched(cache, x, out):
        launched.append(len(x.q))
        return decode(cache, x, out)

    monkeypatch.setattr(DeviceDense, "decode", watched)
    sequences = [sequence.another() for _ in lengths]
    for i, (each, n) in enumerate(zip(sequences, lengths, strict=True)):
        each.prefill(PROMPT[i : i + n])
    two = decode_together(sequences[:2], [5, 5])
    sequences[2].decode(5)
    three = decode_together(sequences, [7, 7, 7])
    n_layer = sequence.model.hparams.n_layer
    assert launched == [2] * n_layer + [1] * n_layer + [4] * n_layer  # the last with padding
    np.testing.assert_allclose(two, [rows[0] for rows in expected[:2]], atol=1e-4)
    # From three rows on, products with weights round both to 11 bits.
    np.testing.assert_allclose(three, [rows[1] for rows in expected], atol=4e-3)


def test_a_step_is_planned_where_the_last_plan_does_not_hold(tiny_model, monkeypatch):
    """Once for steps that follow each other; again behind a rewind, and behind a prompt."""
    path = tiny_model(wtype="F32", n_layer=1, **SIZES)
    config = SessionConfig(device="cuda", prefill_dtype="f32")
    sequence = open_sequence(path, build_method("full", {}), config)
    planned, begin = [], DeviceDense.begin_step

    def watched(cache, n, n_max):
        planned.append(n)
        return begin(cache, n, n_max)

    monkeypatch.setattr(DeviceDense, "begin_step", watched)
    sequence.prefill(PROMPT[:60])
    first = [sequence.decode(token) for token in (5, 6, 7)]
    sequence.rewind(61)
    again = [sequence.decode(token) for token in (6, 7)]
    assert np.array_equal(first[1:], again)
    sequence.prefill(PROMPT[:3])
    sequence.decode(5)
    assert planned == [61, 62, 67]


def test_a_sequence_draws_on_the_device_what_the_host_draws(tmp_path, monkeypatch):
    path = make_model(tmp_path / "m.gguf", wtype="F32", n_layer=1, **SIZES)
    _, sequence = on_host_and_device(path, "full")
    answers = []
    for on_device in (False, True):
        sampler = make_sampler(SamplingParams(seed=7, temp=1.5))
        assert isinstance(sampler, PlainSampler)
        sample = sampler if on_device else sampler.sample
        if on_device:
            monkeypatch.setattr(StepBuffers, "logits", None)  # they stay there
        sequence.reset()
        answers.append(list(generated(sequence, PROMPT[:20], sample, 4)))
    assert answers[0] == answers[1] and len(answers[0]) == 4
    assert list(generated(sequence, PROMPT[:3], sample, 0)) == []


def test_what_does_not_fit_goes_to_the_host_or_is_refused(tmp_path):
    path = make_model(tmp_path / "m.gguf", **SIZES)

    def opened(method="full", **options):
        config = SessionConfig(threads=1, device="cuda", ctx_size=1_000_000, **options)
        return open_sequence(path, build_method(method, {}), config)

    sequence = opened(vram_limit=0.1)
    assert "KV cache stays on the host" in sequence.engine.note
    assert all(isinstance(cache, HostCache) for cache in sequence.caches)
    sequence = opened(vram_limit=2.0)
    assert sequence.engine.note == ""
    assert not any(isinstance(cache, HostCache) for cache in sequence.caches)
    with pytest.raises(SparseKVError, match=r"0\.1 GiB to use.*KV cache of 1000000.*--kv host"):
        opened(vram_limit=0.1, kv="device")
    with pytest.raises(SparseKVError, match=r"0\.0 GiB to use.*--device cpu"):
        opened(vram_limit=0.001)
    with pytest.raises(SparseKVError, match="caches on a GPU are f16 or q8_0; use --kv host"):
        open_sequence(
            path, build_method("topk", {}, cache_type_k="q4_0"), SessionConfig(device="cuda")
        )
    # With head size 32, a q8_0 row has 48 bytes of 64, and a layer's f16 rows come to all.
    hparams = opened().model.hparams
    n_layer, whole = len(hparams.layers), hparams.kv_bytes(1000)
    assert cache_bytes(hparams, ("f16", "f16"), 1000) == whole
    assert cache_bytes(hparams, ("q8_0", "q8_0"), 1000) == whole * 3 // 4 + whole // n_layer


@pytest.mark.parametrize("method", ["topk", "streaming"])
def test_a_share_of_the_context_counts_the_new_row(method, tiny_model):
    """Attention is even, so that a row more or less is seen; each fourth step takes one more."""
    path = tiny_model(wtype="F32", n_layer=1, attention_gain=0.3, **SIZES)
    prepared = build_method(method, {}, budget="25%", dense_layers="none")
    expected, actual = (
        open_sequence(path, prepared, SessionConfig(threads=1, device=device, prefill_dtype="f32"))
        for device in ("cpu", "cuda")
    )
    for sequence in (expected, actual):
        sequence.prefill(PROMPT[:59])
    for token in PROMPT[59:64]:
        a, b = (sequence.decode(token) for sequence in (expected, actual))
        np.testing.assert_allclose(b, a, atol=LIMIT)
    counts = [sequence.ledger()["sparse_rows_attended"] for sequence in (expected, actual)]
    assert counts[0] == counts[1] == 4 * sum(4 + round(n / 4) for n in range(60, 65))
