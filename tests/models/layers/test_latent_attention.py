"""Latent attention: keys and tensors that are refused, one row a token, and the expanded form."""

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from opened import open_sequence
from reference_decoder import nmse, reference_logits
from reference_records import LONG_CASES, long_prompt
from tiny_models import copy_metadata, make_model, write_all
from tiny_recurrent import Latent

from sparsekv_cli.cache.row_sizes import token_bytes
from sparsekv_cli.errors import SparseKVError, UnsupportedModelError
from sparsekv_cli.methods import METHODS, build_method, method_class
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.layers import latent_expanded
from sparsekv_cli.models.layers.latent_expanded import ExpandedRows
from sparsekv_cli.prefix.pieces import block_layers
from sparsekv_cli.settings.config import SessionConfig

IDS = long_prompt()
V3 = LONG_CASES["deepseek2_with_groups"]
ATTENTION = "deepseek2.attention."


def opened(path, method="full", prefill_dtype="f32", **options):
    config = SessionConfig(prefill_dtype=prefill_dtype, threads=2, chunk=64, activations="16")
    return open_sequence(path, build_method(method, {}, **options), config)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.kv_lora_rank", 32, "key_length is 64; with kv_lora_rank = 32 and 16 rotated"),
        ("attention.kv_lora_rank", 0, "kv_lora_rank is 0; it must be 1 to"),
        ("attention.key_length_mla", 16, "dimension_count is 16; it must be below key_length_mla"),
        ("attention.value_length", 47, "value_length is 47; with kv_lora_rank = 48"),
        ("attention.head_count_kv", 2, "head_count_kv is 2 in layer 0; it must be 1"),
        ("attention.temperature_scale", 0.1, "temperature_scale is not 0"),
        ("rope.scaling.yarn_log_multiplier", 1e30, "gives scores the factor 2.77"),
        ("expert_group_count", 3, "expert_group_count is 3; it must divide 16 experts"),
        ("expert_group_used_count", 5, "expert_group_used_count is 5; it must be 1 to 4"),
        ("expert_used_count", 9, "is 2; its groups have fewer than expert_used_count = 9"),
    ],
)
def test_keys_that_contradict_each_other(key, value, message, tmp_path):
    value = np.uint32(value) if isinstance(value, int) else value
    path = make_model(tmp_path / "model.gguf", **{**V3, "metadata": {f"deepseek2.{key}": value}})
    with pytest.raises(SparseKVError) as refused:
        opened(path)
    assert message in str(refused.value)


def test_heads_of_another_number_in_a_layer(tmp_path):
    heads = {f"{ATTENTION}head_count": [2, 1]}
    path = make_model(tmp_path / "model.gguf", **{**V3, "metadata": heads})
    with pytest.raises(SparseKVError, match="head_count is 1 in layer 1; it must be 2"):
        opened(path)


@pytest.mark.parametrize("name", ["k_b", "v_b", "kv_a_mqa", "kv_a_norm", "q_a", "q_b", "q_a_norm"])
def test_a_missing_tensor(name, tmp_path):
    tensor = f"blk.1.attn_{name}.weight"
    path = make_model(tmp_path / "model.gguf", **V3, omit=[tensor])
    with pytest.raises(SparseKVError, match=f"tensor {tensor} is missing"):
        opened(path)


@pytest.mark.parametrize("has_keys", [False, True])
def test_files_of_the_old_form(has_keys, tmp_path):
    """Their keys and values are made by one tensor, and the heads' sizes have other keys."""
    reader = GGUFReader(make_model(tmp_path / "new.gguf", **V3))
    writer = GGUFWriter(tmp_path / "old.gguf", "deepseek2")
    if not has_keys:
        for key in ("key_length_mla", "value_length_mla"):
            reader.fields.pop(f"{ATTENTION}{key}")
    copy_metadata(reader, writer, {})
    for tensor in reader.tensors:
        if "attn_k_b" in tensor.name:
            at = tensor.name.replace("attn_k_b", "attn_kv_b")
            writer.add_tensor(at, np.zeros((2 * (32 + 24), 48), np.float32))
        elif "attn_v_b" not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
    write_all(writer)
    with pytest.raises(SparseKVError, match="convert or download the model again"):
        opened(tmp_path / "old.gguf")


def test_a_token_has_one_row(tmp_path):
    path = make_model(tmp_path / "model.gguf", **LONG_CASES["deepseek2_full_size"])
    sequence = opened(path)
    sequence.prefill(IDS[:64])
    (cache,), hparams, n_bytes = sequence.caches, sequence.model.hparams, 2 * (512 + 64)
    assert cache.store.v is cache.store.k and cache.store.row_bytes == n_bytes
    assert cache.store.nbytes == cache.store.capacity * n_bytes == cache.memory().host
    assert hparams.kv_bytes(1) == token_bytes(hparams.layers, "f16", "f16") == n_bytes
    assert block_layers(sequence.caches, ("f16", "f16")) == ((1, n_bytes, 0),)
    assert cache.store.copy(64).nbytes == 64 * n_bytes
    before = sequence.ledger()
    sequence.decode(7)
    assert sequence.ledger()["bytes_read"] - before.get("bytes_read", 0) == 65 * n_bytes
    sequence.model.gguf.close()


def test_methods_and_types_that_need_values_are_refused(tmp_path):
    path = make_model(tmp_path / "model.gguf", **V3)
    for name in METHODS:
        if method_class(name).needs_values:
            with pytest.raises(SparseKVError, match=f"method {name} does not run with latent"):
                opened(path, name)
    with pytest.raises(SparseKVError, match="one row for both; give both the same type"):
        opened(path, cache_type_k="q8_0")


def test_early_files_of_glm_flash_have_sigmoids(tmp_path):
    """They state no gates, but they have 47 layers and 154880 tokens."""
    file = make_model(
        tmp_path / "model.gguf",
        **{**V3, "n_layer": 47, "n_embd": 32, "n_ff": 32, "latent": Latent(16, 8, 16, 16)},
        repeat=True,
        metadata={
            "deepseek2.expert_gating_func": np.uint32(0),
            "deepseek2.vocab_size": np.uint32(154880),
        },
    )
    with open_gguf(file) as gguf:
        assert read_hparams(gguf).layers[1].experts.gating == "sigmoid"


def test_it_is_refused_on_a_gpu(tmp_path):
    with open_gguf(make_model(tmp_path / "model.gguf", **V3)) as gguf:
        assert "latent attention" in read_hparams(gguf).host_only


def test_the_gates_that_a_file_states(tmp_path):
    """A softmax without the key, and sigmoids with 2."""
    stated = {}
    for gating in (0, 1, 2):
        meta = {"deepseek2.expert_gating_func": np.uint32(gating)}
        path = make_model(tmp_path / f"{gating}.gguf", **{**V3, "metadata": meta})
        sequence = opened(path)
        stated[gating] = sequence.model.hparams.layers[1].experts.gating
        sequence.model.gguf.close()
    assert stated == {0: "softmax", 1: "softmax", 2: "sigmoid"}
    meta = {"deepseek2.expert_gating_func": np.uint32(3)}
    path = make_model(tmp_path / "3.gguf", **{**V3, "metadata": meta})
    with pytest.raises(UnsupportedModelError, match="expert_gating_func is 3"):
        opened(path)


# --- the expanded form ----------------------------------------------------------------------------


@pytest.fixture
def expands(monkeypatch):
    """All prompts attend to expanded rows, few at a time; the rows of each call."""
    calls = []
    attend = ExpandedRows.attend

    def counted(self, cache, raw, *others):
        calls.append(len(raw))
        return attend(self, cache, raw, *others)

    monkeypatch.setattr(ExpandedRows, "attend", counted)
    monkeypatch.setattr(latent_expanded, "ROWS_AT_ONCE", 50)
    monkeypatch.setattr("sparsekv_cli.models.forward.ROWS_AT_ONCE", 128)
    monkeypatch.setattr("sparsekv_cli.models.decoder.LEAST_ROWS", 1)
    monkeypatch.setattr("sparsekv_cli.models.decoder.LATENT_DTYPES", ())
    return calls


def test_expanded_rows_give_the_reference_decoders_logits(expands, tmp_path):
    path = make_model(tmp_path / "model.gguf", **LONG_CASES["deepseek2_full_size"])
    sequence = opened(path)
    expands.clear()
    expected = reference_logits(path, IDS, kv_f16=True)
    assert nmse(expected[-1:], sequence.prefill(IDS)[None]) < 1e-6
    assert sum(expands) == len(IDS)
    sequence.rewind(100)  # a prompt goes on after rows that another call has stored
    assert nmse(expected[-1:], sequence.prefill(IDS[100:])[None]) < 1e-6
    sequence.model.gguf.close()


@pytest.mark.parametrize("name", ["snapkv", "lfps", "h2o", "quest"])
def test_methods_see_the_same_rows_and_queries(name, expands, tmp_path, monkeypatch):
    path = make_model(tmp_path / "model.gguf", **V3)
    logits = []
    for least in (1, 10**6):
        monkeypatch.setattr("sparsekv_cli.models.decoder.LEAST_ROWS", least)
        sequence = opened(path, name, budget="40", dense_layers="none")
        sequence.prefill(IDS[:300])
        logits.append(np.stack([sequence.decode(token) for token in IDS[300:310]]))
        sequence.model.gguf.close()
    assert expands
    assert nmse(*logits) < 1e-4


def test_rows_that_take_too_much_memory_stay_latent(expands, tmp_path, monkeypatch):
    path = make_model(tmp_path / "model.gguf", **V3)
    a_token = 2 * 2 * (16 + 32 + 24)
    monkeypatch.setattr(latent_expanded, "MOST_BYTES", 100 * a_token)
    sequence = opened(path)
    expands.clear()
    sequence.prefill(IDS[:190])
    assert expands == [64] * 2  # of each layer the first chunk of 64 rows
    sequence.model.gguf.close()
