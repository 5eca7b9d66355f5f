"""llama.cpp's flags for longer contexts: they do what the same metadata do, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
from opened import open_sequence
from reference_records import LONG_CASES
from tiny_models import make_model

from sparsekv_cli import load
from sparsekv_cli.commands.eval.options import configuration_of
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import changes_of_draft
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import N_ANSWER, read_hparams, room_for, stretching
from sparsekv_cli.models.identity import identity_in
from sparsekv_cli.settings.changes import ModelChanges
from sparsekv_cli.settings.config import SessionConfig

SIZES = {"n_layer": 2, "n_embd": 64, "n_ff": 64, "n_ctx": 128, "head_dim": 32}
IDS = [int(token) for token in np.random.default_rng(0).integers(3, 400, 160)]
# By name: the options, and the file that says the same.
ALIKE = {
    "linear": ({"rope_scaling": "linear", "rope_scale": 4}, {"rope_scaling": ("linear", 4.0)}),
    "no word": ({"rope_scale": 1.7}, {"rope_scaling": ("linear", 1.7)}),
    "yarn": ({"rope_scaling": "yarn", "rope_scale": 4}, {"rope_scaling": ("yarn", 4.0)}),
    "freq_scale": (
        {"rope_scaling": "yarn", "rope_freq_scale": 0.25}, {"rope_scaling": ("yarn", 4.0)},
    ),
    "original": (
        {"rope_scaling": "yarn", "rope_scale": 4, "yarn_orig_ctx": 32},
        {"rope_scaling": ("yarn", 4.0, 32)},
    ),
    "base": ({"rope_freq_base": 5e5}, {"freq_base": 5e5}),
    "key": ({"override_kv": "llama.rope.freq_base=float:500000"}, {"freq_base": 5e5}),
    "keys": (
        {"override_kv": "llama.rope.scaling.type=str:yarn,llama.rope.scaling.factor=float:1.7"},
        {"rope_scaling": ("yarn", 1.7)},
    ),
}  # fmt: skip
YARN = ("ext_factor", 0.5), ("attn_factor", 1.5), ("beta_fast", 8.0), ("beta_slow", 2.0)
for _name, _value in YARN:
    key = f"llama.rope.scaling.yarn_{_name}"
    ext = {} if _name != "attn_factor" else {"yarn_ext_factor": 0.0}
    ALIKE[_name] = (
        {"rope_scaling": "yarn", "rope_scale": 4, f"yarn_{_name}": _value, **ext},
        {
            "rope_scaling": ("yarn", 4.0),
            "metadata": {key: _value}
            | {f"llama.rope.scaling.{k}": v for k, v in ext.items()},
        },
    )  # fmt: skip


def logits(path, device="cpu", ids=IDS, **changes):
    config = SessionConfig(
        threads=1, prefill_dtype="f32", chunk=64, device=device, ctx_size=200, **changes
    )
    sequence = open_sequence(path, build_method("full", {}), config)
    found = [*sequence.prefill(ids[:-2], all_logits=True), *map(sequence.decode, ids[-2:])]
    sequence.model.gguf.close()
    return np.array(found)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("plain") / "plain.gguf", **SIZES)


@pytest.mark.parametrize("name", ALIKE)
def test_options_do_what_metadata_do(name, plain, tmp_path):
    options, file = ALIKE[name]
    same = make_model(tmp_path / "same.gguf", **SIZES, **file)
    expected = logits(same)
    np.testing.assert_array_equal(logits(plain, **options), expected)
    assert np.abs(logits(plain) - expected).max() > 1e-3


def test_options_replace_what_the_file_says(plain, tmp_path):
    path = make_model(tmp_path / "yarn.gguf", **SIZES, rope_scaling=("yarn", 4.0, 32))
    np.testing.assert_array_equal(logits(path, rope_scaling="none"), logits(plain))
    options = {"rope_scaling": "linear", "rope_scale": 2}
    np.testing.assert_array_equal(logits(path, **options), logits(plain, **options))


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_a_device_scales_in_the_same_way(plain):
    options = {"rope_scaling": "yarn", "rope_scale": 4, "yarn_orig_ctx": 32, "ids": IDS[:50]}
    expected, others = logits(plain, **options), logits(plain, ids=IDS[:50])
    found = logits(plain, "cuda", **options)
    assert np.abs(found - expected).max() < 1e-3 < np.abs(found - others).max() / 10


# --- what is read ---------------------------------------------------------------------------------


def read(path, **changes):
    with open_gguf(path) as file:
        file.change(ModelChanges(**changes))
        return read_hparams(file)


def test_the_context_is_as_long_as_it_is_stretched(plain, tmp_path):
    assert read(plain).n_ctx_train == read(plain, rope_freq_base=5e5).n_ctx_train == 128
    assert read(plain, rope_scale=4).n_ctx_train == 512
    assert read(plain, rope_scaling="yarn", rope_scale=4, yarn_orig_ctx=100).n_ctx_train == 400
    assert read(plain, rope_scale=1e38).n_ctx_fit == 1 << 31
    yarn = make_model(tmp_path / "yarn.gguf", **SIZES, rope_scaling=("yarn", 4.0, 32))
    assert read(yarn).n_ctx_train == 128 and read(yarn, rope_scaling="none").n_ctx_train == 32
    assert read(yarn, rope_scale=8).n_ctx_train == 256
    for file, n, scale in ((plain, 513, 5), (yarn, 513, 17), (plain, 512, 4)):
        hparams = read(file)
        assert stretching(hparams, n) == f"--rope-scaling yarn --rope-scale {scale}"
        n += N_ANSWER
        assert room_for(hparams, n - N_ANSWER).endswith(f": -c {n} {stretching(hparams, n)}")
    assert "yarn" not in room_for(read(plain, rope_scale=8), 513)


def test_windows_keep_the_base_and_the_factor_of_the_file(tmp_path):
    """As in llama.cpp. Gemma's windows have their own base; those of gpt-oss have the file's."""
    yarn = {"rope_scaling": "yarn", "rope_scale": 8, "rope_freq_base": 5e5}
    for arch, base in (("gemma3", 1e4), ("gemma2", 2e4)):
        sizes = {"n_layer": 6, "n_embd": 64, "n_ff": 64, "head_dim": 32, "freq_base": 2e4}
        path = make_model(tmp_path / f"{arch}.gguf", arch=arch, **sizes)
        before, after = read(path), read(path, **yarn)
        assert (after.rope.freq_base, after.rope.freq_scale) == (5e5, 1 / 8)
        window = after.window_rope
        assert (window.freq_base, window.freq_scale, window.magnitude) == (base, 1, 1)
        own = before.window_rope or before.rope
        assert (own.freq_base, own.freq_scale) == (base, 1)


def test_an_identity_has_what_rows_depend_on(plain):
    def digest(**changes):
        with open_gguf(plain) as file:
            file.change(ModelChanges(**changes))
            return identity_in(file, read_hparams(file)).digest()

    alike = [
        {}, {"rope_scale": 1.0}, {"override_kv": "llama.context_length=int:500"},
        {"override_kv": "tokenizer.ggml.add_bos_token=bool:true"}, {"chat_template": "x"},
    ]  # fmt: skip
    others = [
        {"rope_scale": 2}, {"rope_freq_base": 5e5}, {"rope_scaling": "yarn", "rope_scale": 2},
        {"yarn_ext_factor": 0.0, "yarn_attn_factor": 1.5},
        {"override_kv": "llama.attention.layer_norm_rms_epsilon=float:0.1"},
    ]  # fmt: skip
    assert len({digest(**each) for each in alike}) == 1
    assert len({digest(**each) for each in (*others, {})}) == len(others) + 1


def test_a_key_of_the_tokenizer(plain):
    given = {"threads": 1, "override_kv": "tokenizer.ggml.add_bos_token=bool:false"}
    with load(plain, threads=1) as model, load(plain, **given) as changed:
        texts = [each.generate("a b", max_tokens=1).usage for each in (model, changed)]
    assert texts[1]["prompt_tokens"] == texts[0]["prompt_tokens"] - 1


# --- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [
        ({}, set()), ({"n_ctx": 64}, {"yarn_orig_ctx"}), ({"freq_base": 5e5}, {"rope_freq_base"}),
    ],
)  # fmt: skip
def test_what_a_draft_model_takes(sizes, left_out, plain, tmp_path):
    small = make_model(tmp_path / "small.gguf", **{**SIZES, "n_layer": 1, **sizes})
    with open_gguf(plain) as file, open_gguf(small) as draft:
        assert set(changes_of_draft(file, draft)) - {"override_kv"} == left_out


def test_a_draft_model_is_read_as_far_as_it_is_stretched(plain, tmp_path):
    small = make_model(tmp_path / "small.gguf", **{**SIZES, "n_layer": 1, "n_ctx": 64})
    options = {"rope_scaling": "yarn", "rope_scale": 3, "yarn_orig_ctx": 100, "n_ctx": 300}
    keys = "llama.context_length=int:90,llama.rope.freq_base=float:20000"
    with load(plain, threads=1, draft_model=str(small), override_kv=keys, **options) as model:
        draft = model._model.draft
        assert (draft.n_ctx, draft.hparams.rope.n_ctx_native) == (192, 64)
        assert draft.hparams.rope.freq_scale == pytest.approx(1 / 3)
        assert draft.hparams.rope.freq_base == 1e4


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scale": 0.0, "rope_freq_base": 0.5}, "rope_freq_base = 0.5: must be 0, or 1"),
        ({"rope_scale": 0.5}, "rope_scale = 0.5: must be 0, or 1 or more"),
        ({"rope_freq_scale": 2.0}, "rope_freq_scale = 2.0: must be 0 to 1"),
        ({"rope_scale": -1.0}, "rope_scale = -1.0: must be 0 or more"),
        ({"rope_scale": float("nan")}, "rope_scale = nan: must be finite"),
        ({"rope_scale": float("inf")}, "rope_scale = inf: must be finite"),
        ({"rope_scaling": "longrope"}, "must be auto, none, linear or yarn"),
        ({"rope_scaling": "none", "rope_scale": 2.0}, "does not scale"),
        ({"rope_freq_scale": 0.5, "rope_scale": 2.0}, "give one of them"),
        ({"yarn_ext_factor": 1.5}, "must be -1 to 1"),
        ({"yarn_orig_ctx": -5}, "must be 0 or more"),
        ({"override_kv": "llama.context_length"}, "must be KEY=TYPE:VALUE"),
        ({"override_kv": "llama.context_length=7"}, "must be KEY=TYPE:VALUE"),
        ({"override_kv": "llama.block_count=int:7"}, "cannot be changed"),
        ({"override_kv": "llama.attention.head_count=int:7"}, "keys that can: ARCHITECTURE.cont"),
        ({"override_kv": "llama.contxt_length=int:7"}, "did you mean llama.context_length?"),
        ({"override_kv": "tokenizer.ggml.tokens=int:7"}, "cannot be changed"),
        ({"override_kv": "llama.context_length=float:7"}, "is of type int, found float:7"),
        ({"override_kv": "llama.context_length=int:x"}, "'x' is no whole number"),
        ({"override_kv": "llama.context_length=int:99999999999"}, "is no whole number up to"),
        ({"override_kv": "llama.rope.freq_base=float:nan"}, "'nan' is no finite number"),
        ({"override_kv": "llama.rope.freq_base=float:1e99"}, "'1e99' is no finite number"),
        ({"override_kv": "tokenizer.ggml.add_bos_token=bool:yes"}, "'yes' is no true or false"),
        ({"override_kv": ",".join(["llama.context_length=int:7"] * 2)}, "is given twice"),
    ],
)
def test_changes_that_no_model_can_have(changes, reason):
    with pytest.raises(ValueError) as error:
        SessionConfig(**changes)
    assert reason in str(error.value) and "\n" not in str(error.value)


UNUSED_ALONE = (
    {"rope_scaling": "yarn"}, {"yarn_orig_ctx": 99}, {"yarn_ext_factor": 0.5},
    {"yarn_beta_slow": 2.0},
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"override_kv": "qwen2.context_length=int:7"}, "has no effect: this llama model"),
        ({"override_kv": "llama.final_logit_softcapping=float:7"}, "has no effect"),
        ({"override_kv": "llama.attention.sliding_window=int:7"}, "has no effect"),
        ({"override_kv": "llama.context_length=int:0"}, "is 0; it must be 1 to"),
        ({"override_kv": "llama.rope.freq_base=float:0.5"}, "it must be at least 1"),
        ({"override_kv": "llama.rope.scaling.type=str:x"}, "supported are none, linear"),
        ({"rope_scaling": "yarn", "yarn_beta_fast": 0.0}, "betas above 0"),
        ({"rope_scale": 2.0, "yarn_beta_fast": 8.0}, "has no effect, because YaRN is off"),
        ({"rope_scaling": "yarn", "yarn_attn_factor": 2.0}, "has no effect, because YaRN sets"),
        ({"rope_scaling": "yarn", "rope_freq_base": 1.0}, "a base above 1"),
        *((alone, "nothing is stretched: use --rope-scale") for alone in UNUSED_ALONE),
    ],
)
def test_changes_that_this_model_cannot_have(changes, reason, plain):
    with pytest.raises(SparseKVError) as error:
        read(plain, **changes)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_model_without_rope_cannot_be_stretched(tmp_path):
    path = make_model(tmp_path / "m.gguf", **LONG_CASES["granite_without_rope"])
    with pytest.raises(SparseKVError, match="no layer is rotated"):
        read(path, rope_scale=2.0)
    assert stretching(read(path), 10**6) == ""


def test_several_architectures(plain):
    keys = "llama.context_length=int:7,qwen2.context_length=int:8,tokenizer.ggml.add_bos_token="
    changes = ModelChanges(override_kv=f"{keys}bool:true")
    assert list(replace(changes, override_kv=changes.of_architecture("llama")).overrides()) == [
        "llama.context_length", "tokenizer.ggml.add_bos_token"
    ]  # fmt: skip
    assert changes.stated() == {"override_kv": changes.override_kv}


def test_records_of_an_evaluation_say_what_is_changed(plain):
    with load(plain, threads=1, rope_scale=2) as changed, load(plain, threads=1) as model:
        assert configuration_of(changed._model)["changes"] == {"rope_scale": 2}
        assert "changes" not in configuration_of(model._model)
