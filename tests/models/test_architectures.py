"""Every architecture beyond the first three against llama.cpp's recorded logits of a long prompt.

Prefill in one and in parts, decode, after a rewind, in batches, and with the other products.
"""

import numpy as np
import pytest
from opened import open_sequence
from reference_decoder import (
    PAIRING,
    ReferenceModel,
    kl_divergences,
    model_logits,
    nmse,
    reference_logits,
)
from reference_records import (
    ARCHITECTURES_FILE,
    LONG_CASES,
    LONG_POSITIONS,
    LONG_PROMPT,
    QUANTISED_CASES,
    kept_tokens,
    long_prompt,
    tiny_reference,
)
from tiny_models import fingerprint, make_model

from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.layer import tiles_int8
from sparsekv_cli.methods.full import Full
from sparsekv_cli.models import decoder
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

IDS = long_prompt()
N_DECODED = 40  # of the prompt's last tokens
RECURRENT = ("lfm2moe_Q8_0", "qwen35", "granitehybrid_with_experts", "nemotron_h_moe", "falcon-h1")


def open_model(path, *, prefill_dtype="f32", ctx_size=LONG_PROMPT + 8, chunk=64, repack="auto"):
    config = SessionConfig(
        prefill_dtype=prefill_dtype, threads=2, chunk=chunk, ctx_size=ctx_size, repack=repack,
        activations="16",  # whatever the CPU, steps are as exact as prefills
    )  # fmt: skip
    return open_sequence(path, Full(), config)


@pytest.fixture(scope="module", params=[*LONG_CASES, *QUANTISED_CASES])
def case(request, tmp_path_factory):
    """(name, path, sequence, logits of the prefill)."""
    name = request.param
    path = tmp_path_factory.mktemp("architectures") / f"{name}.gguf"
    make_model(path, **(LONG_CASES | QUANTISED_CASES)[name])
    sequence = open_model(path)
    yield name, path, sequence, sequence.prefill(IDS, all_logits=True)
    sequence.model.gguf.close()
    path.unlink()


def check(name: str, logits: np.ndarray, positions=LONG_POSITIONS) -> None:
    """Rows of logits at these positions against the record."""
    expected = tiny_reference(name, ARCHITECTURES_FILE).logits
    rows = [LONG_POSITIONS.index(position) for position in positions]
    if name in QUANTISED_CASES:
        assert np.mean(list(kl_divergences(expected[rows], logits))) < 1e-3
    else:
        assert nmse(expected[rows], kept_tokens(logits)) < 1e-6


def decoded(sequence: Sequence, first: int) -> np.ndarray:
    """Logits of the tokens from ``first`` on, decoded; those ahead of it are prefilled again.

    A model with recurrent layers goes back to its checkpoints only.
    """
    if len(sequence.tokens) < first:
        sequence.prefill(IDS[len(sequence.tokens) : first])
    return np.stack([sequence.decode(token) for token in IDS[first:]])


def test_logits_are_llama_cpps(case):
    name, path, sequence, prefilled = case
    expected = tiny_reference(name, ARCHITECTURES_FILE)
    assert fingerprint(path) == expected.fingerprint, "run scripts/references/logits again"
    check(name, prefilled[list(LONG_POSITIONS)])
    sequence.rewind(LONG_PROMPT - N_DECODED)
    after_rewind = decoded(sequence, LONG_PROMPT - N_DECODED)
    check(name, after_rewind[-2:], LONG_POSITIONS[1:])
    assert nmse(prefilled[-N_DECODED:], after_rewind) < 1e-6
    sequence.rewind(99)
    if len(sequence.tokens) < 99:  # window layers do not have those rows any more
        sequence.prefill(IDS[len(sequence.tokens) : 99])
    parts = [sequence.prefill(IDS[99:100])[None], sequence.prefill(IDS[100:], all_logits=True)[-2:]]
    check(name, np.concatenate(parts))


def test_logits_are_the_reference_decoders(case):
    _, path, _, prefilled = case
    expected = reference_logits(path, IDS, kv_f16=True, n_ctx=LONG_PROMPT)
    # A hidden state's last bit may choose another expert, which is another answer.
    error = np.sort([nmse(a, b) for a, b in zip(expected, prefilled, strict=True)])
    assert error[: int(0.99 * len(error))].max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("prefill_dtype", ["bf16", "int8"])
def test_other_products_give_the_same_but_for_rounding(case, prefill_dtype, monkeypatch):
    if prefill_dtype == "bf16" and not bf16.is_available():
        pytest.skip("this CPU has no bf16 products")
    if prefill_dtype == "int8" and not tiles_int8.is_available():
        pytest.skip("needs byte products (AVX2)")
    _, path, _, prefilled = case
    monkeypatch.setattr(decoder, "FEW_ROWS", 0)
    sequence = open_model(path, prefill_dtype=prefill_dtype)
    logits = sequence.prefill(IDS[:100], all_logits=True)
    assert np.median([nmse(a, b) for a, b in zip(prefilled[:100], logits, strict=True)]) < 2e-3
    sequence.model.gguf.close()


@pytest.mark.parametrize(
    "name",
    [
        "granitemoe",
        "mistral3",
        "qwen2moe_Q8_0",
        "smollm3",
        "olmo2",
        "deepseek2_Q8_0",
        "qwen3next",
        *RECURRENT,
    ],
)
def test_a_batch_gives_the_bits_of_each_sequence(name, tmp_path):
    path = make_model(tmp_path / "model.gguf", **(LONG_CASES | QUANTISED_CASES)[name])
    sequence = open_model(path)
    lengths = (3, 190, 97)
    expected, caches = [], []
    for n in lengths:
        sequence.reset()
        sequence.prefill(IDS[:n])
        expected.append([sequence.decode(token) for token in IDS[n : n + 3]])
        sequence.reset()
        sequence.prefill(IDS[:n])
        caches.append(sequence.caches)
    for step in range(3):
        positions = [n + step for n in lengths]
        tokens = [IDS[position] for position in positions]
        logits = sequence.model.decoder.decode_batch(tokens, positions, caches)
        np.testing.assert_array_equal(logits, [rows[step] for rows in expected])
    sequence.model.gguf.close()


def test_a_short_context_takes_the_short_factors(tmp_path):
    """LongRoPE's factors depend on the context that is asked for, not on the prompt."""
    path = make_model(tmp_path / "model.gguf", **LONG_CASES["phi3"])
    ids = IDS[:60]
    short, long = (reference_logits(path, ids, kv_f16=True, n_ctx=n) for n in (96, 97))
    assert nmse(short, long) > 1e-3
    for n_ctx, expected in ((96, short), (97, long)):
        sequence = open_model(path, ctx_size=n_ctx)
        assert nmse(expected, sequence.prefill(ids, all_logits=True)) < 1e-6
        sequence.model.gguf.close()


@pytest.mark.parametrize("repack", ["off", "on"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_short_prompts_take_decodes_products_for_experts(dtype, repack, tmp_path):
    """They differ from a long one's products in 8 bits of the activations only."""
    if dtype == "bf16" and not bf16.is_available():
        pytest.skip("this CPU has no bf16 products")
    if dtype == "int8" and not tiles_int8.is_available():
        pytest.skip("needs byte products (AVX2)")
    path = make_model(tmp_path / "model.gguf", **QUANTISED_CASES["qwen2moe_Q8_0"])
    sequence, exact = open_model(path, prefill_dtype=dtype, repack=repack), open_model(path)
    least = sequence.model.decoder.least_many
    assert exact.model.decoder.least_many == 1 and 17 < least <= len(IDS)
    for n in (least - 1, least):
        sequence.reset(), exact.reset()
        found, expected = (each.prefill(IDS[:n], all_logits=True) for each in (sequence, exact))
        errors = [nmse(a, b) for a, b in zip(expected, found, strict=True)]
        assert np.median(errors) < 2e-3
        assert sequence.model.decoder._has_few_an_expert == (n < least)
    sequence.model.gguf.close(), exact.model.gguf.close()


@pytest.mark.parametrize("name", ["qwen2moe_Q8_0", "qwen3moe_Q8_0"])
def test_repacked_experts_give_the_same_logits(name, tmp_path):
    path = make_model(tmp_path / "model.gguf", **QUANTISED_CASES[name])
    logits = []
    for repack in ("off", "on"):
        sequence = open_model(path, repack=repack)
        sequence.prefill(IDS[:50])
        logits.append(np.stack([sequence.decode(token) for token in IDS[50:60]]))
        sequence.model.gguf.close()
    assert nmse(*logits) < 1e-9


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("granite", "attention.scale", 64**-0.5),
        ("granite", "embedding_scale", 1.0),
        ("granite", "residual_scale", 1.0),
        ("granite", "logit_scale", 1.0),
        ("granite_without_rope", "rope.scaling.finetuned", True),
        ("mistral3", "attention.temperature_scale", 0.0),
        ("mistral3", "rope.scaling.yarn_log_multiplier", 0.0),
        ("qwen3moe", "expert_used_count", 2),
        ("gemma2", "attention.sliding_window", 400),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "final_logit_softcapping", 0.0),
        ("gemma3", "attention.sliding_window", 400),
        ("gemma3", "rope.freq_base_swa", 50000.0),
        ("gemma4", "attention.sliding_window", 400),
        ("gemma4", "rope.freq_base_swa", 50000.0),
        ("gpt-oss", "attention.sliding_window", 400),
        ("lfm2moe", "expert_gating_func", 1),
        ("qwen35", "rope.freq_base", 300.0),
        ("minicpm", "embedding_scale", 1.0),
        ("minicpm", "residual_scale", 1.0),
        ("minicpm", "logit_scale", 1.0),
        ("glm4moe", "expert_weights_scale", 1.0),
        ("glm4moe", "expert_weights_norm", False),
        ("glm4moe", "expert_gating_func", 1),
        ("bailingmoe2", "expert_group_count", 1),
        ("bailingmoe2", "expert_weights_norm", False),
        ("bailingmoe2", "expert_weights_scale", 1.0),
        ("deepseek", "expert_weights_scale", 1.0),
        ("minimax-m2", "expert_gating_func", 1),
        ("olmo2_with_windows", "attention.sliding_window", 400),
        ("olmo2_with_windows", "rope.scaling.attn_factor", 1.0),
        ("exaone4_with_windows", "attention.sliding_window", 400),
    ],
)
def test_the_cases_show_what_they_are_for(name, key, value, tmp_path, monkeypatch):
    """With one of its keys as another model would have it, a case gives other logits."""
    path = make_model(tmp_path / "model.gguf", **LONG_CASES[name])
    read = ReferenceModel.key
    monkeypatch.setattr(
        ReferenceModel,
        "key",
        lambda self, asked, default: value if asked == key else read(self, asked, default),
    )
    logits = model_logits(ReferenceModel.open(path, LONG_PROMPT), IDS)[list(LONG_POSITIONS)]
    assert nmse(tiny_reference(name, ARCHITECTURES_FILE).logits, kept_tokens(logits)) > 1e-5


@pytest.mark.parametrize("arch", sorted(a for a in LONG_CASES if PAIRING.get(a, "none") != "none"))
def test_the_other_pairing_of_rope_gives_other_logits(arch, tmp_path, monkeypatch):
    path = make_model(tmp_path / "model.gguf", **LONG_CASES[arch])
    model = ReferenceModel.open(path, LONG_PROMPT)
    monkeypatch.setitem(PAIRING, arch, {"norm": "neox", "neox": "norm"}[PAIRING[arch]])
    logits = model_logits(model, IDS)[list(LONG_POSITIONS)]
    assert nmse(tiny_reference(arch, ARCHITECTURES_FILE).logits, kept_tokens(logits)) > 1e-5
