"""Tensors by name: shapes checked, fused q/k/v split, tied output, and what is refused."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from opened import open_sequence
from reference_decoder import nmse
from tiny_models import copy_metadata, make_model, write_all

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.full import Full
from sparsekv_cli.models.architectures import architecture_of
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.gguf.keys import read_architecture
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.weights import read_weights
from sparsekv_cli.settings.config import SessionConfig

IDS = list(range(3, 20))


def read(path):
    file = open_gguf(path)
    try:
        return read_weights(file, read_hparams(file), architecture_of(read_architecture(file)))
    finally:
        file.close()


def copy_with(source, target, edit):
    """Copies a model; ``edit`` changes the dict of name -> (data, type)."""
    reader = GGUFReader(source)
    tensors = {t.name: (np.asarray(t.data), t.tensor_type) for t in reader.tensors}
    edit(tensors)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, arch)
    copy_metadata(reader, writer, {})
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    write_all(writer)
    return target


def logits_of(path) -> np.ndarray:
    sequence = open_sequence(path, Full(), SessionConfig(threads=1, prefill_dtype="f32"))
    rows = [sequence.prefill(IDS[:9]), *(sequence.decode(token) for token in IDS[9:])]
    sequence.model.gguf.close()
    return np.stack(rows)


def test_tied_output_is_the_embedding(tmp_path):
    tied = read(make_model(tmp_path / "tied.gguf"))
    assert tied.output is tied.token_embd
    untied = read(make_model(tmp_path / "untied.gguf", tied=False))
    assert untied.output is not untied.token_embd
    assert untied.bytes_a_step(1) == tied.bytes_a_step(1)


def test_bytes_a_token(tmp_path):
    weights = read(make_model(tmp_path / "model.gguf", n_layer=1, wtype="Q8_0"))
    rows = {"q": 256, "k": 128, "v": 128, "o": 256, "gate": 512, "up": 512}
    expected = sum(rows.values()) * 256 + 256 * 512 + 512 * 256
    assert weights.bytes_a_step(1) == expected * 34 // 32


def test_weights_stay_as_the_file_has_them(tmp_path):
    path = make_model(tmp_path / "model.gguf", wtype="Q4_K")
    weights = read(path)
    tensors = {t.name: t for t in GGUFReader(path).tensors}
    gate = weights.layers[1].ffn.gate_up[0]
    assert gate.code == GGMLQuantizationType.Q4_K and gate.data.dtype == np.uint8
    np.testing.assert_array_equal(gate.data, tensors["blk.1.ffn_gate.weight"].data)
    assert not gate.data.flags.writeable


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_fused_qkv_equals_separate_ones(arch, tmp_path):
    source = make_model(tmp_path / "separate.gguf", arch=arch, wtype="Q8_0")

    def fuse(tensors):
        for layer in range(2):
            for kind in ("weight", "bias") if arch == "qwen2" else ("weight",):
                parts = [tensors.pop(f"blk.{layer}.attn_{letter}.{kind}") for letter in "qkv"]
                data = np.concatenate([part for part, _ in parts])
                tensors[f"blk.{layer}.attn_qkv.{kind}"] = (data, parts[0][1])

    fused = copy_with(source, tmp_path / "fused.gguf", fuse)
    assert nmse(logits_of(source), logits_of(fused)) < 1e-12


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_norms_may_be_of_half_precision(kind, tmp_path):
    source = make_model(tmp_path / "model.gguf", arch="qwen2")

    def round_vectors(tensors):
        for name, (data, _) in tensors.items():
            if data.ndim > 1:
                continue
            half = data.astype(np.float16)
            if kind == "BF16":
                half = (data.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
            tensors[name] = (half, GGMLQuantizationType[kind])

    rounded = copy_with(source, tmp_path / "rounded.gguf", round_vectors)
    assert 0 < nmse(logits_of(source), logits_of(rounded)) < 1e-3


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight is missing"),
        (lambda t: t.pop("output_norm.weight"), "output_norm.weight is missing"),
        (lambda t: t.pop("blk.0.attn_k.bias"), "blk.0.attn_k.bias is missing"),
        (
            lambda t: t.update({"blk.0.attn_extra.weight": t["blk.0.attn_norm.weight"]}),
            "attn_extra",
        ),
        (
            lambda t: t.update({"blk.0.attn_output.bias": t["blk.0.attn_norm.weight"]}),
            "blk.0.attn_output.bias is no part of architecture",
        ),
        (
            lambda t: t.update({"rope_freqs.weight": (np.zeros(32, np.float32), None)}),
            "rope_freqs.weight holds values that are not above 0",
        ),
        (lambda t: t.update({"blk.2.attn_norm.weight": t["blk.0.attn_norm.weight"]}), "blk.2."),
        (
            lambda t: t.update({"blk.0.attn_q.weight": t["blk.0.attn_k.weight"]}),
            "blk.0.attn_q.weight is 128 x 256, but the hyper-parameters say 256 x 256",
        ),
        (lambda t: t.update({"rope_freqs.weight": t["blk.0.attn_norm.weight"]}), "rope_freqs"),
        (
            lambda t: t.update(
                {"output_norm.weight": (np.zeros(272, np.uint8), GGMLQuantizationType.Q8_0)}
            ),
            "output_norm.weight has type Q8_0",
        ),
    ],
    ids=[
        "ffn", "norm", "bias", "unknown", "output bias", "zero freqs", "extra layer", "shape",
        "rope_freqs", "type",
    ],
)  # fmt: skip
def test_what_is_refused(edit, found, tmp_path):
    path = copy_with(
        make_model(tmp_path / "model.gguf", arch="qwen2"), tmp_path / "edited.gguf", edit
    )
    with pytest.raises(SparseKVError) as error:
        read(path)
    assert found in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_missing_qk_norm_is_refused(tmp_path):
    path = make_model(
        tmp_path / "model.gguf", arch="qwen3", head_dim=64, omit=["blk.1.attn_q_norm.weight"]
    )
    with pytest.raises(SparseKVError, match=r"blk\.1\.attn_q_norm\.weight is missing"):
        read(path)
