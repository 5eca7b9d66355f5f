"""Hyper-parameters: defaults, per-layer values, scaling, and every value that must be refused."""

import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_bytes import (
    BOOL,
    FLOAT32,
    INT32,
    UINT32,
    UINT64,
    Builder,
    Tensor,
    array,
    float32,
    pair,
    string,
    strings,
    uint32,
)

from sparsekv_cli.errors import SparseKVError, UnsupportedModelError
from sparsekv_cli.generation.conversation import chat_template
from sparsekv_cli.models.architectures import architecture_of
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.gguf.keys import read_architecture
from sparsekv_cli.models.hparams import HParams, read_hparams
from sparsekv_cli.models.layers.layer_params import LayerParams
from sparsekv_cli.models.rope import RopeParams

BASE = {
    "general.architecture": string("general.architecture", "llama"),
    "context_length": uint32("llama.context_length", 4096),
    "embedding_length": uint32("llama.embedding_length", 64),
    "block_count": uint32("llama.block_count", 3),
    "feed_forward_length": uint32("llama.feed_forward_length", 128),
    "attention.head_count": uint32("llama.attention.head_count", 4),
    "attention.layer_norm_rms_epsilon": float32("llama.attention.layer_norm_rms_epsilon", 1e-5),
    "vocab_size": uint32("llama.vocab_size", 1000),
}


def read(folder: Path, without: str = "", /, **changes: bytes) -> HParams:
    """Hyper-parameters of BASE with pairs replaced or added; a key's dots are written ``__``."""
    pairs = dict(BASE)
    pairs.pop(without, None)
    pairs.update({name.replace("__", "."): value for name, value in changes.items()})
    return read_hparams(open_gguf(Builder(list(pairs.values())).write(folder)))


def failure(folder: Path, without: str = "", /, **changes: bytes) -> str:
    with pytest.raises(SparseKVError) as caught:
        read(folder, without, **changes)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def three(layer: LayerParams) -> tuple[LayerParams, ...]:
    return tuple(replace(layer, block=i, ffn_block=i) for i in range(3))


def test_defaults(tmp_path):
    hparams = read(tmp_path)
    assert hparams == HParams(
        architecture="llama",
        n_ctx_train=4096,
        n_embd=64,
        layers=three(LayerParams(4, 4, head_dim=16, value_dim=16, n_rot=16, n_ff=128)),
        norm_eps=struct.unpack("<f", struct.pack("<f", 1e-5))[0],
        rope=RopeParams(n_ctx_original=4096),
        n_vocab=1000,
    )
    assert hparams.rope.freq_scale == 1.0
    assert hparams.rope.magnitude == 1.0


def test_stated_values(tmp_path):
    hparams = read(
        tmp_path,
        kv=uint32("llama.attention.head_count_kv", 2),
        key=uint32("llama.attention.key_length", 32),
        value=uint32("llama.attention.value_length", 24),
        rot=uint32("llama.rope.dimension_count", 8),
        base=float32("llama.rope.freq_base", 500000.0),
        causal=pair("llama.attention.causal", BOOL, b"\1"),
        experts=uint32("llama.expert_count", 0),
    )
    layer = LayerParams(4, 2, head_dim=32, value_dim=24, n_rot=8, n_ff=128)
    assert hparams.layers == three(layer)
    assert hparams.rope.freq_base == 500000.0


def test_any_integer_type_is_taken(tmp_path):
    hparams = read(
        tmp_path,
        block_count=pair("llama.block_count", UINT64, struct.pack("<Q", 2)),
        context_length=pair("llama.context_length", INT32, struct.pack("<i", 77)),
    )
    assert (hparams.n_layer, hparams.n_ctx_train) == (2, 77)


def test_per_layer_arrays(tmp_path):
    hparams = read(
        tmp_path,
        heads=array("llama.attention.head_count_kv", INT32, 3, struct.pack("<3i", 4, 2, 1)),
        feed_forward_length=array(
            "llama.feed_forward_length", UINT32, 3, struct.pack("<3I", 32, 64, 96)
        ),
    )
    assert [layer.n_head_kv for layer in hparams.layers] == [4, 2, 1]
    assert [layer.n_ff for layer in hparams.layers] == [32, 64, 96]


def test_vocabulary_size(tmp_path):
    tokens = strings("tokenizer.ggml.tokens", ["a", "b"])
    assert read(tmp_path, tokens=tokens).n_vocab == 2
    assert "llama.vocab_size is missing" in failure(tmp_path, "vocab_size")
    pairs = [value for name, value in BASE.items() if name != "vocab_size"]
    embedding = Tensor("token_embd.weight", (8, 5), data=bytes(160))
    file = open_gguf(Builder(pairs, [embedding]).write(tmp_path))
    assert read_hparams(file).n_vocab == 5


def test_linear_scaling(tmp_path):
    rope = read(tmp_path, factor=float32("llama.rope.scaling.factor", 4.0)).rope
    assert (rope.scaling, rope.factor, rope.freq_scale, rope.ext_factor) == ("linear", 4.0, 0.25, 0)
    assert rope.magnitude == 1.0
    old = read(tmp_path, factor=float32("llama.rope.scale_linear", 2.0)).rope
    assert old.freq_scale == 0.5
    assert read(tmp_path, factor=float32("llama.rope.scaling.factor", 0.0)).rope.factor == 1.0
    none = read(
        tmp_path,
        scaling=string("llama.rope.scaling.type", "none"),
        factor=float32("llama.rope.scaling.factor", 4.0),
    ).rope
    assert none.freq_scale == 1.0


def test_the_context_that_a_model_is_made_for(tmp_path):
    """Trained on 4096 tokens, or stretched by its scaling."""
    assert read(tmp_path).n_ctx_fit == 4096
    factor = float32("llama.rope.scaling.factor", 4.0)
    assert read(tmp_path, factor=factor).n_ctx_fit == 16384
    original = uint32("llama.rope.scaling.original_context_length", 1024)
    assert read(tmp_path, factor=factor, original=original).n_ctx_fit == 4096
    none = string("llama.rope.scaling.type", "none")
    assert read(tmp_path, factor=factor, scaling=none).n_ctx_fit == 4096


def test_yarn(tmp_path):
    yarn = {
        "scaling": string("llama.rope.scaling.type", "yarn"),
        "factor": float32("llama.rope.scaling.factor", 4.0),
        "original": uint32("llama.rope.scaling.original_context_length", 1024),
    }
    rope = read(tmp_path, **yarn).rope
    assert rope == RopeParams(
        scaling="yarn", factor=4.0, n_ctx_original=1024, ext_factor=1.0, beta_fast=32, beta_slow=1
    )
    assert rope.magnitude == pytest.approx(1 + 0.1 * math.log(4))
    rope = read(
        tmp_path,
        **yarn,
        attn=float32("llama.rope.scaling.attn_factor", 0.5),
        ext=float32("llama.rope.scaling.yarn_ext_factor", -1.0),
        ignored=float32("llama.rope.scaling.yarn_attn_factor", 7.0),
        fast=float32("llama.rope.scaling.yarn_beta_fast", 16.0),
        slow=float32("llama.rope.scaling.yarn_beta_slow", 2.0),
    ).rope
    assert (rope.ext_factor, rope.beta_fast, rope.beta_slow) == (1.0, 16.0, 2.0)
    assert rope.magnitude == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    rope = read(
        tmp_path,
        **yarn,
        ext=float32("llama.rope.scaling.yarn_ext_factor", 0.0),
        attn=float32("llama.rope.scaling.yarn_attn_factor", 1.5),
    ).rope
    assert (rope.ext_factor, rope.magnitude) == (0.0, 1.5)


def test_architecture(tmp_path):
    for read, value, says in (
        (read_architecture, string("general.name", "x"), r"has no general\.architecture"),
        (read_architecture, uint32("general.architecture", 1), "is of type uint32, not string"),
        (read_architecture, string("general.architecture", ""), "is empty"),
        (chat_template, strings("tokenizer.chat_template", ["x"]), "is of type array, not string"),
    ):
        with pytest.raises(SparseKVError, match=f"{tmp_path}.*{says}"):
            read(open_gguf(Builder([value]).write(tmp_path)))
    file = open_gguf(Builder([string("general.architecture", "mamba")]).write(tmp_path))
    assert read_architecture(file) == "mamba"
    assert architecture_of("qwen2").name == "qwen2"
    with pytest.raises(SparseKVError, match=r"'mamba' is not supported; supported are .*, llama,"):
        architecture_of("mamba")


@pytest.mark.parametrize(
    "name",
    [
        "context_length", "embedding_length", "block_count", "feed_forward_length",
        "attention.head_count", "attention.layer_norm_rms_epsilon",
    ],
)  # fmt: skip
def test_missing_and_mistyped(tmp_path, name):
    assert f"llama.{name} is missing" in failure(tmp_path, name)
    changes = {name: string(f"llama.{name}", "3")}
    assert f"llama.{name} is of type string; it must be" in failure(tmp_path, **changes)
    changes = {name: pair(f"llama.{name}", BOOL, b"\1")}
    assert f"llama.{name} is of type bool; it must be" in failure(tmp_path, **changes)
    changes = {name: strings(f"llama.{name}", ["3", "4", "5"])}
    assert f"llama.{name} is of type array; it must be" in failure(tmp_path, **changes)
    wrong = uint32 if name.endswith("epsilon") else float32
    changes = {name: wrong(f"llama.{name}", 3)}
    assert f"llama.{name} is of type {wrong.__name__}" in failure(tmp_path, **changes)


@pytest.mark.parametrize("count", [0, 513, 2**32 - 1])
def test_number_of_layers(tmp_path, count):
    message = failure(tmp_path, block_count=uint32("llama.block_count", count))
    assert f"llama.block_count is {count}; it must be 1 to 512" in message


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("context_length", 0, "is 0; it must be 1 to"),
        ("embedding_length", 0, "is 0; it must be 1 to"),
        ("embedding_length", 2**31, "it must be 1 to 16777216"),
        ("feed_forward_length", 0, "is 0; it must be 1 to"),
        ("attention.head_count", 0, "is 0; it must be 1 to"),
        ("attention.head_count", 2**31, "it must be 1 to 4096"),
        ("attention.head_count_kv", 0, "is 0; it must be 1 to"),
        ("attention.key_length", 0, "is 0; it must be 1 to"),
        ("attention.value_length", 0, "is 0; it must be 1 to"),
        ("vocab_size", 0, "is 0; it must be 1 to"),
        ("rope.dimension_count", 0, "is 0; it must be 1 to"),
        ("rope.dimension_count", 7, "is 7; it must be even and at most 16"),
        ("rope.dimension_count", 18, "is 18; it must be even and at most 16"),
        ("rope.scaling.original_context_length", 0, "is 0; it must be 1 to"),
        ("expert_count", 513, "is 513; it must be 0 to 512"),
    ],
)
def test_out_of_range(tmp_path, name, value, says):
    message = failure(tmp_path, **{name: uint32(f"llama.{name}", value)})
    assert f"llama.{name}" in message
    assert says in message


def test_head_counts_that_do_not_divide(tmp_path):
    message = failure(tmp_path, kv=uint32("llama.attention.head_count_kv", 3))
    assert "head_count is 4 in layer 0, not a multiple of head_count_kv = 3" in message
    kv = array("llama.attention.head_count_kv", INT32, 3, struct.pack("<3i", 4, 2, 8))
    assert "is 4 in layer 2, not a multiple of head_count_kv = 8" in failure(tmp_path, kv=kv)
    message = failure(tmp_path, embedding_length=uint32("llama.embedding_length", 66))
    assert "is 66, not a multiple of head_count = 4" in message
    odd = failure(tmp_path, key=uint32("llama.attention.key_length", 15))
    assert "rope.dimension_count is 15; it must be even" in odd


@pytest.mark.parametrize("count", [0, 2, 4])
def test_per_layer_array_of_the_wrong_length(tmp_path, count):
    name = "llama.attention.head_count"
    heads = array(name, INT32, count, struct.pack(f"<{count}i", *[4] * count))
    message = failure(tmp_path, **{"attention.head_count": heads})
    assert f"has {count} values for 3 layers" in message


@pytest.mark.parametrize("value", [0, -1])
def test_per_layer_value_out_of_range(tmp_path, value):
    heads = array("llama.attention.head_count_kv", INT32, 3, struct.pack("<3i", 4, value, 4))
    assert f"is {value} in layer 1; it must be" in failure(tmp_path, kv=heads)


def test_per_layer_array_of_floats(tmp_path):
    heads = array("llama.attention.head_count_kv", FLOAT32, 3, struct.pack("<3f", 4, 4, 4))
    assert "is of type array; it must be an integer or" in failure(tmp_path, kv=heads)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
@pytest.mark.parametrize(
    "name",
    [
        "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor",
        "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    ],
)  # fmt: skip
def test_non_finite_and_negative_numbers(tmp_path, name, value):
    message = failure(tmp_path, **{name: float32(f"llama.{name}", value)})
    assert f"llama.{name} is {value:g}; it must be" in message


def test_other_numbers(tmp_path):
    assert "freq_base is 0" in failure(tmp_path, base=float32("llama.rope.freq_base", 0.0))
    ext = float32("llama.rope.scaling.yarn_ext_factor", math.nan)
    assert "yarn_ext_factor is nan" in failure(tmp_path, ext=ext)
    tiny = float32("llama.rope.scaling.factor", 1e-42)
    assert "rope.scaling.factor is" in failure(tmp_path, factor=tiny)


def test_what_is_no_plain_decoder(tmp_path):
    for scaling in ("dynamic", ""):
        message = failure(tmp_path, scaling=string("llama.rope.scaling.type", scaling))
        assert f"is {scaling!r}; supported are none, linear, yarn, longrope" in message
    message = failure(tmp_path, scaling=uint32("llama.rope.scaling.type", 2))
    assert "is of type uint32; it must be string" in message
    message = failure(tmp_path, causal=pair("llama.attention.causal", BOOL, b"\0"))
    assert "embedding model" in message
    message = failure(tmp_path, causal=uint32("llama.attention.causal", 1))
    assert "is of type uint32; it must be bool" in message


def test_unsupported_is_told_from_broken(tmp_path):
    with pytest.raises(UnsupportedModelError):
        read(tmp_path, scaling=string("llama.rope.scaling.type", "dynamic"))
    with pytest.raises(UnsupportedModelError):
        architecture_of("mamba")
    with pytest.raises(SparseKVError) as caught:
        read(tmp_path, block_count=uint32("llama.block_count", 0))
    assert not isinstance(caught.value, UnsupportedModelError)


def windows(tmp_path: Path, arch: str, n_layer: int, *more: bytes) -> list[int]:
    """The layers' windows of a model of this architecture."""
    pairs = [
        string("general.architecture", arch),
        uint32(f"{arch}.block_count", n_layer),
        *(uint32(f"{arch}.{name}", 64) for name in ("context_length", "embedding_length")),
        uint32(f"{arch}.feed_forward_length", 64),
        uint32(f"{arch}.attention.head_count", 4),
        float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        uint32(f"{arch}.vocab_size", 8),
        *more,
    ]
    return [each.window for each in read_hparams(open_gguf(Builder(pairs).write(tmp_path))).layers]


def test_windows(tmp_path):
    size = uint32("gemma3.attention.sliding_window", 512)
    assert windows(tmp_path, "gemma3", 7, size) == [512] * 5 + [0, 512]
    name = "gemma3.attention.sliding_window_pattern"
    assert windows(tmp_path, "gemma3", 3, size, uint32(name, 2)) == [512, 0, 512]
    flags = array(name, BOOL, 3, b"\1\0\0")
    assert windows(tmp_path, "gemma3", 3, size, flags) == [512, 0, 0]
    assert windows(tmp_path, "gemma3", 2) == [0, 0]
    none = uint32("gemma3.attention.sliding_window", 0)
    assert windows(tmp_path, "gemma3", 2, none) == [0, 0]
    assert windows(tmp_path, "gemma2", 3) == [4096, 0, 4096]
    with pytest.raises(SparseKVError, match="sliding_window_pattern has 3 values for 4 layers"):
        windows(tmp_path, "gemma3", 4, size, flags)
    with pytest.raises(SparseKVError, match="must be a whole number, or a flag for each layer"):
        windows(tmp_path, "gemma3", 4, size, string(name, "all"))


def test_layers_that_read_the_rows_of_others(tmp_path):
    """The last ones read those of the last layer of their kind ahead of them."""
    name, flags = "gemma4.attention.shared_kv_layers", "gemma4.attention.sliding_window_pattern"
    size = uint32("gemma4.attention.sliding_window", 8)
    kinds = array(flags, BOOL, 6, b"\1\0" * 3)
    windows(tmp_path, "gemma4", 6, size, kinds, uint32(name, 2))
    layers = read_hparams(open_gguf(tmp_path / "m.gguf")).layers
    assert [layer.source for layer in layers] == [-1] * 4 + [2, 3]
    with pytest.raises(UnsupportedModelError, match="is 3 of 6 layers: the last two others must"):
        windows(tmp_path, "gemma4", 6, size, kinds, uint32(name, 3))
