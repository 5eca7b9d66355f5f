"""Sequences: limits, growth of the KV store, timings, and what is refused."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from opened import generated, open_sequence
from sidecars import refused
from tiny_models import make_model

from sparsekv_cli import machine
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.cache.store import KVStore
from sparsekv_cli.cpu.attention.decode import append_row
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.jit.floats import as_f32, as_type_of
from sparsekv_cli.cpu.layer import tiles_int8
from sparsekv_cli.engine import HostEngine
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.models.decoder import cpu_prefill_dtype, rows_dtype
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.system import gpu
from sparsekv_cli.system.work import usable_cores

N_VOCAB = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("model") / "model.gguf", n_embd=128, n_ff=128, n_ctx=300
    )


@pytest.fixture
def sequence(model):
    sequence = open_sequence(
        model, build_method("full", {}), SessionConfig(ctx_size=40, threads=1, prefill_dtype="f32")
    )
    yield sequence
    sequence.model.gguf.close()


def ids(n: int) -> list[int]:
    return [3 + i % 200 for i in range(n)]


def greedy(logits, _tokens) -> int:
    return int(np.argmax(logits))


# --- what is refused ------------------------------------------------------------------------------


def test_empty_prompt(sequence):
    assert "empty" in refused(lambda: sequence.prefill([]))
    assert sequence.tokens == []


def test_prompt_longer_than_the_context(sequence):
    message = refused(lambda: sequence.prefill(ids(41)))
    assert "41" in message and "40" in message and "--ctx-size" in message and "300" in message
    assert sequence.tokens == [] and all(cache.store.n == 0 for cache in sequence.caches)
    assert sequence.prefill(ids(40)).shape == (N_VOCAB,)


def test_a_later_prompt_that_does_not_fit(sequence):
    sequence.prefill(ids(30))
    message = refused(lambda: sequence.prefill(ids(11)))
    assert "30" in message and "11" in message and "40" in message
    assert len(sequence.tokens) == 30
    sequence.prefill(ids(10))


@pytest.mark.parametrize("token", [-1, N_VOCAB, 10**6])
def test_token_out_of_range(sequence, token):
    assert str(token) in refused(lambda: sequence.prefill([5, token, 6]))
    assert sequence.tokens == []
    sequence.prefill([5])
    assert str(token) in refused(lambda: sequence.decode(token))
    assert sequence.tokens == [5] and all(cache.store.n == 1 for cache in sequence.caches)
    sequence.decode(N_VOCAB - 1)


def test_decode_beyond_the_context(sequence):
    sequence.prefill(ids(39))
    sequence.decode(5)
    assert "40" in refused(lambda: sequence.decode(5))
    assert len(sequence.tokens) == 40


@pytest.mark.parametrize("missing", [["torch", "triton"], ["triton"]])
def test_a_gpu_without_its_packages(model, missing, monkeypatch):
    """auto goes on with the CPU and says so; cuda names the command."""
    monkeypatch.setattr(machine, "may_have_device", lambda: True)
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in missing else name)
    method, words = build_method("full", {}), f"{' and '.join(missing)} not installed: pip install"
    opened = open_sequence(model, method, SessionConfig(device="auto"))
    assert isinstance(opened.engine, HostEngine) and words in opened.engine.note
    opened.model.gguf.close()
    assert words in refused(lambda: open_sequence(model, method, SessionConfig(device="cuda")))
    opened = open_sequence(model, method, SessionConfig(device="cpu"))
    assert opened.engine.note == ""
    opened.model.gguf.close()


def test_a_draft_model_runs_on_the_cpu(model, monkeypatch):
    devices = []

    def load(path, method, config, *more, **options):
        devices.append(config.device)
        return load_model(path, method, config, *more, **options)

    monkeypatch.setattr("sparsekv_cli.model.load_model", load)
    config = SessionConfig(device="auto", draft_model=str(model))
    load_model(model, build_method("full", {}), config).close()
    assert devices == ["cpu"]


def test_bf16_is_refused_where_it_cannot_be_multiplied(monkeypatch):
    monkeypatch.setattr(bf16, "is_available", lambda: True)
    assert cpu_prefill_dtype("bf16", 64) == "bf16"
    for has_tiles, expected in ((True, "bf16"), (False, "int8")):
        monkeypatch.setattr(bf16, "HAS_TILES", has_tiles)
        monkeypatch.setattr(tiles_int8, "is_available", lambda: True)
        assert cpu_prefill_dtype("auto", 64) == expected
        assert cpu_prefill_dtype("auto", 63) == "int8"
    assert [rows_dtype("int8", d) for d in (64, 63)] == ["bf16", "f32"]
    assert "heads of 63" in refused(lambda: cpu_prefill_dtype("bf16", 63))
    monkeypatch.setattr(bf16, "is_available", lambda: False)
    assert rows_dtype("int8", 64) == "f32"
    assert "this CPU" in refused(lambda: cpu_prefill_dtype("bf16", 64))
    assert cpu_prefill_dtype("f32", 63) == "f32"
    for has_bytes, expected in ((True, "int8"), (False, "f32")):
        monkeypatch.setattr(tiles_int8, "is_available", lambda has_bytes=has_bytes: has_bytes)
        assert cpu_prefill_dtype("auto", 64) == expected


def test_missing_file_and_wrong_device(model, tmp_path, monkeypatch):
    method = build_method("full", {})
    absent = tmp_path / "absent.gguf"
    assert "absent.gguf" in refused(lambda: open_sequence(absent, method, SessionConfig()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "cuda" in refused(lambda: open_sequence(model, method, SessionConfig(device="cuda")))
    open_sequence(model, method, SessionConfig(device="auto"))


def test_file_that_is_cut_while_in_use(tmp_path):
    path = make_model(tmp_path / "model.gguf", n_layer=1, n_embd=64, n_ff=64)
    sequence = open_sequence(path, build_method("full", {}), SessionConfig(threads=1))
    sequence.prefill(ids(3))
    os.truncate(path, path.stat().st_size - 64)
    assert "model.gguf" in refused(lambda: sequence.decode(5))
    assert "model.gguf" in refused(lambda: sequence.prefill(ids(2)))
    assert len(sequence.tokens) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ctx_size", -1), ("threads", -2), ("chunk", 0), ("device", "gpu"),
        ("prefill_dtype", "f16"), ("kv", "disk"), ("gpu_weights", "q4"), ("vram_limit", -1.0),
        ("vram_limit", float("nan")),
    ],
)  # fmt: skip
def test_configuration_names_the_field(field, value):
    with pytest.raises(ValueError, match=field) as error:
        SessionConfig(**{field: value})
    assert str(value) in str(error.value)


# --- generation -----------------------------------------------------------------------------------


def test_generate_stops_at_the_context(sequence):
    produced = list(generated(sequence, ids(30), greedy, -1))
    assert len(sequence.tokens) == 40
    assert len(produced) == 11  # the last needs no row
    assert sequence.tokens == ids(30) + produced[:-1]


@pytest.mark.parametrize("n_predict", [0, 1, 5])
def test_generate_counts(sequence, n_predict):
    produced = list(generated(sequence, ids(10), greedy, n_predict))
    assert len(produced) == n_predict
    assert len(sequence.tokens) == 10 + max(0, n_predict - 1)


def test_generate_is_what_decode_says(sequence):
    produced = list(generated(sequence, ids(10), greedy, 6))
    sequence.reset()
    expected = [greedy(sequence.prefill(ids(10)), [])]
    while len(expected) < 6:
        expected.append(greedy(sequence.decode(expected[-1]), []))
    assert produced == expected


def test_closing_the_iterator_leaves_the_last_token_out(sequence):
    stream = generated(sequence, ids(10), greedy, 20)
    first, second = next(stream), next(stream)
    stream.close()
    assert sequence.tokens == [*ids(10), first] and isinstance(second, int)


def test_the_sampler_sees_the_tokens_so_far(sequence):
    seen = []

    def sample(logits, tokens):
        seen.append(list(tokens))
        return 7

    list(generated(sequence, ids(3), sample, 3))
    assert seen == [ids(3), [*ids(3), 7], [*ids(3), 7, 7]]


# --- state ----------------------------------------------------------------------------------------


def test_rewind(sequence):
    sequence.prefill(ids(20))
    sequence.rewind(25)
    assert len(sequence.tokens) == 20
    sequence.rewind(12)
    assert sequence.tokens == ids(12) and all(cache.store.n == 12 for cache in sequence.caches)
    sequence.rewind(0)
    assert sequence.tokens == [] and all(cache.store.n == 0 for cache in sequence.caches)
    logits = sequence.prefill(ids(5))
    sequence.reset()
    np.testing.assert_array_equal(logits, sequence.prefill(ids(5)))


def test_timings(sequence):
    assert sequence.timings.load_s > 0 and sequence.timings.prefill_tokens == 0
    sequence.prefill(ids(20))
    sequence.decode(5)
    sequence.decode(6)
    timings = sequence.timings
    assert (timings.prefill_tokens, timings.decode_tokens) == (20, 2)
    assert timings.prefill_s > 0 and timings.decode_s > 0
    loaded = timings.load_s
    timings.reset()
    assert timings.prefill_s == timings.decode_s == 0.0 and timings.load_s == loaded
    assert timings.prefill_tokens == timings.decode_tokens == 0


def test_ledger_speaks_the_contract(sequence):
    sequence.prefill(ids(20))
    sequence.decode(5)
    counts = sequence.ledger()
    contract = ["rows_total", "rows_scored", "rows_attended", "bytes_host", "bytes_device"]
    assert list(counts)[:7] == [*contract, "bytes_moved", "index_bytes"]
    assert counts["rows_total"] == 2 * 4 * 21 and all(isinstance(v, int) for v in counts.values())


def test_defaults_come_from_the_model_and_the_machine(model):
    sequence = open_sequence(model, build_method("full", {}), SessionConfig(threads=10**6))
    assert sequence.n_ctx == 300
    assert 1 <= sequence.model.n_threads <= (os.cpu_count() or 1)
    assert sequence.model.tokenizer is sequence.model.tokenizer
    sequence.model.gguf.close()
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


# --- the KV store ---------------------------------------------------------------------------------

SPEC = LayerSpec(
    layer=0, n_layer=1, n_head=4, n_head_kv=2, head_dim=40, value_dim=24, n_threads=1
)  # fmt: skip


def rows(n: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((2, n, d)).astype(np.float32) for d in (40, 24)]


def test_store_takes_what_is_announced_and_grows_in_steps():
    store = KVStore(SPEC)
    store.reserve(1000)
    assert store.capacity == 1000
    k, v = rows(1000)
    store.append(k, v)
    assert store.capacity == 1000
    capacities = {store.capacity}
    for _ in range(2000):
        store.reserve(store.n + 1)
        store.n += 1
        capacities.add(store.capacity)
    assert len(capacities) <= 7, "decoding must not reallocate for every token"
    assert max(capacities) < 1.2 * 3000 + 300, "growth must not double what is held"


def test_store_keeps_its_rows_and_pads_with_zeros():
    store = KVStore(SPEC)
    (k, v), (k2, v2) = rows(5), rows(300, 1)
    store.append(k, v)
    before = store.layout.tolist()
    store.append(k2, v2)
    assert store.layout.tolist() != before and store.n == 305
    assert store.k.shape[2] == 48 and store.v.shape[2] == 32
    for array, parts, d in ((store.k, (k, k2), 40), (store.v, (v, v2), 24)):
        expected = np.concatenate(parts, 1).astype(np.float16)
        np.testing.assert_array_equal(array[:, :305, :d], expected)
        assert not array[:, :305, d:].any()
    assert store.layout.tolist() == [
        store.k.ctypes.data, store.v.ctypes.data, store.k.strides[0], store.v.strides[0],
        store.k.strides[1], store.v.strides[1], 0, 0,
    ]  # fmt: skip
    assert store.nbytes == store.capacity * 2 * (48 + 32) * 2


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_store_takes_bf16_and_f32_as_a_decode_step_its_row(kind):
    spec = replace(SPEC, cache_type_k=kind, cache_type_v=kind, n_threads=2)
    halves = [as_type_of(np.empty(0, np.uint16), x) for x in rows(37)]
    k, v = map(as_f32, halves)
    in_bf16, in_f32, one_by_one = KVStore(spec), KVStore(spec), KVStore(spec)
    in_bf16.append(*halves)
    in_f32.append(k, v)
    one_by_one.reserve(37)
    for t in range(37):
        row = np.zeros((2, 48), np.float32), np.zeros((2, 32), np.float32)
        row[0][:, :40], row[1][:, :24] = k[:, t], v[:, t]
        append_row(*row, one_by_one.layout, t)
    for store in (in_bf16, in_f32):
        np.testing.assert_array_equal(store.k[:, :37], one_by_one.k[:, :37])
        np.testing.assert_array_equal(store.v[:, :37], one_by_one.v[:, :37])


def test_a_store_takes_what_is_no_vector_and_refuses_other_shapes():
    k, v = rows(6)
    store, other = KVStore(SPEC), KVStore(SPEC)
    store.append(k, v)
    other.append(np.ascontiguousarray(k.swapaxes(0, 1)).swapaxes(0, 1), v[:, ::-1])
    np.testing.assert_array_equal(other.k[:, :6], store.k[:, :6])
    np.testing.assert_array_equal(other.v[:, :6], store.v[:, 5::-1])
    for wrong_k, wrong_v in ((k[:1], v), (k[..., :39], v), (k, v[:, :5]), (v, k)):
        with pytest.raises(ValueError, match="elements"):
            store.append(wrong_k, wrong_v)
    assert store.n == 6


def test_store_of_q8_0_rows():
    store = KVStore(replace(SPEC, cache_type_k="q8_0", cache_type_v="q8_0"))
    (k, v), (k2, v2) = rows(5), rows(300, 1)
    store.append(k, v)
    store.append(k2, v2)
    assert store.k.dtype == store.v.dtype == np.uint8
    assert store.k.shape[2] == 48 + 2 * 2 and store.v.shape[2] == 32 + 2
    assert store.nbytes == store.capacity * 2 * store.row_bytes == store.capacity * 2 * 86
    assert store.layout.tolist()[6:] == [2, 2]
    for read, parts, d in ((store.keys, (k, k2), 40), (store.values, (v, v2), 24)):
        got = read()
        np.testing.assert_allclose(got[..., :d], np.concatenate(parts, 1), atol=0.02, rtol=0)
        assert not got[..., d:].any()


def test_truncate_forgets_the_last_rows():
    store = KVStore(SPEC)
    store.append(*rows(10))
    store.truncate(20)
    assert store.n == 10
    store.truncate(4)
    k, v = rows(3, 2)
    store.append(k, v)
    assert store.n == 7
    np.testing.assert_array_equal(store.k[:, 4:7, :40], k.astype(np.float16))


def test_kv_store_stays_whole_when_memory_runs_out(monkeypatch):
    spec = LayerSpec(
        layer=0, n_layer=1, n_head=1, n_head_kv=1, head_dim=16, value_dim=16, n_threads=1
    )
    store = KVStore(spec)
    store.reserve(10)
    before = store.layout.tolist()

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(np, "empty", fail)
    with pytest.raises(MemoryError):
        store.reserve(1000)
    assert store.capacity == 10 == store.v.shape[1]
    assert store.layout.tolist() == before
