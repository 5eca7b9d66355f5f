"""The decoder against a plain f32 decoder and llama.cpp's recorded logits; its two paths together.

Tiny random models of every architecture and weight type, then the default model where installed.
"""

from pathlib import Path

import numpy as np
import pytest
from opened import OpenSequence, open_sequence
from reference_decoder import kl_divergences, log_softmax, nmse, reference_logits
from reference_records import (
    REFERENCE_CASES,
    REFERENCE_IDS,
    REFERENCE_ROWS,
    compact_kl,
    smollm2_record,
    smollm2_tokens,
    tiny_reference,
    top1_agreement,
)
from sweeps import sweep
from tiny_models import WEIGHT_TYPES, fingerprint, make_model

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cpu.jit import bf16
from sparsekv_cli.cpu.layer import matmul_int8, tiles_int8
from sparsekv_cli.generation.conversation import chat_template, encode_messages
from sparsekv_cli.methods.full import Full
from sparsekv_cli.models import decoder, forward
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

# Formats whose kernels for repacked weights take longest to compile.
LONG = ("IQ4_XS", "Q1_0", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "TQ2_0")
N_DECODED = 64  # positions of the default model that go through the fused path


def open_model(
    path, *, prefill_dtype="f32", threads=1, chunk=512, activations="16", repack="auto"
) -> OpenSequence:
    config = SessionConfig(
        prefill_dtype=prefill_dtype, threads=threads, chunk=chunk, activations=activations,
        repack=repack,
    )  # fmt: skip
    return open_sequence(path, Full(), config)


def decode_all(sequence: Sequence, ids) -> np.ndarray:
    """Logits (T, V), every token but the first through the fused path."""
    sequence.reset()
    rows = [sequence.prefill(ids[:1])]
    rows += [sequence.decode(token) for token in ids[1:]]
    return np.stack(rows)


def repacking(config: pytest.Config) -> str:
    return "auto" if config.getoption("--all") else "off"


# --- tiny models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sweep(list(REFERENCE_CASES)))
def tiny(request, tmp_path_factory):
    """(case, path, logits of forward, logits of decode); prompts in chunks of 7.

    Weights are repacked with ``--all`` only. The kernels of repacked weights take long to compile.
    """
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    make_model(path, **REFERENCE_CASES[request.param])
    sequence = open_model(path, chunk=7, repack=repacking(request.config))
    forward = sequence.prefill(REFERENCE_IDS, all_logits=True)
    yield request.param, path, forward, decode_all(sequence, REFERENCE_IDS)
    sequence.model.gguf.close()
    path.unlink()


def skip_without(dtype: str) -> None:
    if dtype == "bf16" and not bf16.is_available():
        pytest.skip("this CPU has no bf16 products")
    if dtype == "int8" and not tiles_int8.is_available():
        pytest.skip("needs byte products (AVX2)")


@pytest.mark.slow
@pytest.mark.skipif(not tiles_int8.is_available(), reason="needs byte products (AVX2)")
def test_int8_products_give_the_same_but_for_rounding(tiny, monkeypatch, pytestconfig):
    """Products of every format, of plain floats as the rows are, in chunks of 7.

    The rows are bf16 in half of the cases, where this CPU has products of them.
    """
    is_odd = list(REFERENCE_CASES).index(tiny[0]) % 2
    rows = "bf16" if is_odd and bf16.is_available() else "f32"
    monkeypatch.setattr(decoder, "FEW_ROWS", 0)
    monkeypatch.setattr(decoder, "rows_dtype", lambda *_: rows)
    _, path, forward, _ = tiny
    repack = repacking(pytestconfig)
    sequence = open_model(path, prefill_dtype="int8", threads=2, chunk=7, repack=repack)
    assert nmse(forward, sequence.prefill(REFERENCE_IDS, all_logits=True)) < 1e-3
    sequence.reset()
    assert nmse(forward[-1:], sequence.prefill(REFERENCE_IDS)[None]) < 1e-3
    sequence.model.gguf.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_few_rows_are_exact(tiny, dtype, monkeypatch, pytestconfig):
    """And so are further ones behind more rows. These are not, if the CPU has int8 products."""
    skip_without(dtype)
    _, path, forward, _ = tiny
    n = len(REFERENCE_IDS)
    monkeypatch.setattr(decoder, "FEW_ROWS", n)
    config = {"prefill_dtype": dtype, "activations": "8", "threads": 2, "chunk": 7}
    sequence = open_model(path, **config, repack=repacking(pytestconfig))
    assert nmse(forward, sequence.prefill(REFERENCE_IDS, all_logits=True)) < 2e-7
    sequence.reset()
    sequence.prefill(REFERENCE_IDS[:3])
    assert nmse(forward[-1:], sequence.prefill(REFERENCE_IDS[3:])[None]) < 2e-7
    monkeypatch.setattr(decoder, "FEW_ROWS", n - 1)
    sequence.reset()
    codes = {info.type.value for info in sequence.model.gguf.tensors.values()}
    is_rounded = dtype == "bf16" or any(map(matmul_int8.can_multiply, codes))
    least, most = (1e-6, 1e-2) if is_rounded else (-1, 2e-7)
    assert least < nmse(forward, sequence.prefill(REFERENCE_IDS, all_logits=True)) < most
    sequence.model.gguf.close()


def test_tiny_model_equals_the_reference_decoder(tiny):
    _, path, forward, decoded = tiny
    rounded = reference_logits(path, REFERENCE_IDS, kv_f16=True)
    exact = reference_logits(path, REFERENCE_IDS)
    for logits in (forward, decoded):
        assert nmse(rounded, logits) < 2e-7  # a last bit of an f16 key may round the other way
        assert nmse(exact, logits) < 2e-6  # what f16 keys and values cost
    assert nmse(forward, decoded) < 2e-7


def test_tiny_model_agrees_with_llama_cpp(tiny):
    case, path, forward, decoded = tiny
    expected = tiny_reference(case)
    assert fingerprint(path) == expected.fingerprint, "run scripts/references/logits again"
    limit = 1e-6 if REFERENCE_CASES[case].get("wtype", "F32") == "F32" else 1e-3
    for logits in (forward, decoded):
        assert nmse(expected.logits, logits[-REFERENCE_ROWS:]) < limit


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1, 5, 22, 23, 512])
def test_chunks_and_threads_change_nothing(chunk, threads, tmp_path):
    path = make_model(tmp_path / "model.gguf", n_head=6, n_embd=192, n_head_kv=2)
    sequence = open_model(path, threads=threads, chunk=chunk)
    logits = sequence.prefill(REFERENCE_IDS, all_logits=True)
    assert nmse(reference_logits(path, REFERENCE_IDS, kv_f16=True), logits) < 2e-7
    sequence.reset()
    np.testing.assert_allclose(sequence.prefill(REFERENCE_IDS), logits[-1], atol=1e-4)


def test_output_of_many_rows_crosses_the_vocabulary_step(tmp_path):
    """Logits of more than four rows come from dequantised slices of 8192 tokens."""
    path = make_model(
        tmp_path / "model.gguf", n_layer=1, n_vocab=8192 + 77, n_embd=64, n_ff=64, wtype="Q8_0"
    )
    sequence = open_model(path)
    logits = sequence.prefill(REFERENCE_IDS, all_logits=True)
    assert nmse(reference_logits(path, REFERENCE_IDS, kv_f16=True), logits) < 2e-7
    sequence.reset()
    few = sequence.prefill(REFERENCE_IDS[:3], all_logits=True)
    np.testing.assert_allclose(few, logits[:3], atol=1e-4)


@pytest.mark.parametrize(
    ("one", "other"), [("Q8_0", "Q4_0"), pytest.param("Q6_K", "Q2_K", marks=pytest.mark.nightly)]
)
def test_mixed_weight_types_and_partial_rotation(one, other, tmp_path):
    kinds = {"blk.0.attn_v.weight": one, "blk.0.attn_q.weight": other, "output.weight": one}
    path = make_model(
        tmp_path / "model.gguf", wtype="Q4_1", tied=False, wtypes=kinds,
        metadata={"llama.rope.dimension_count": 32},
    )  # fmt: skip
    sequence = open_model(path, chunk=9)
    assert sequence.model.hparams.n_rot == 32 and sequence.model.hparams.head_dim == 64
    expected = reference_logits(path, REFERENCE_IDS, kv_f16=True)
    assert nmse(expected, sequence.prefill(REFERENCE_IDS, all_logits=True)) < 2e-7
    assert nmse(expected, decode_all(sequence, REFERENCE_IDS)) < 2e-7


def test_decode_returns_logits_of_its_own(tmp_path):
    sequence = open_model(make_model(tmp_path / "model.gguf"))
    sequence.prefill(REFERENCE_IDS[:4])
    first = sequence.decode(5)
    kept = first.copy()
    sequence.decode(6)
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("n_rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("wtype", "sizes"),
    [
        ("Q4_1", {"n_head": 6, "n_embd": 192, "n_head_kv": 2}),
        ("F16", {"arch": "qwen2"}),
        ("Q4_K", {"n_embd": 256}),
    ],
)
def test_a_batch_gives_the_bits_of_each_sequence(wtype, sizes, n_rows, tmp_path):
    path = make_model(tmp_path / "model.gguf", wtype=wtype, **sizes)
    sequence = open_model(path, prefill_dtype="f32", threads=2)
    prompts = [REFERENCE_IDS[b : 2 * b + 3] for b in range(n_rows)]  # of different lengths
    following = [REFERENCE_IDS[b : b + 4] for b in range(n_rows)]
    expected, caches = [], []
    for prompt, tokens in zip(prompts, following, strict=True):
        sequence.reset()
        sequence.prefill(prompt)
        expected.append([sequence.decode(token) for token in tokens])
        sequence.reset()
        sequence.prefill(prompt)
        caches.append(sequence.caches)
    for step, tokens in enumerate(zip(*following, strict=True)):
        positions = [len(prompt) + step for prompt in prompts]
        logits = sequence.model.decoder.decode_batch(tokens, positions, caches)
        np.testing.assert_array_equal(logits, [rows[step] for rows in expected])
    assert [cache[0].n for cache in caches] == [len(prompt) + 4 for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("repack", "activations"), [("on", "8"), ("on", "16"), ("off", "16"), ("off", "8")]
)
@pytest.mark.parametrize(
    "wtype",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in LONG else ())
        for name in WEIGHT_TYPES
    ],
)
def test_rows_of_a_draft_give_the_bits_of_single_steps(wtype, repack, activations, tmp_path):
    """As many rows as a step can have, and numbers that do not fill the kernels' tiles."""
    path = make_model(tmp_path / "model.gguf", wtype=wtype, n_embd=256, n_layer=1, n_vocab=300)
    config = {"threads": 2, "repack": repack, "activations": activations}
    sequence = open_model(path, **config)
    ids = [3 + i * i % 290 for i in range(70)]
    sequence.prefill(ids[:2])
    expected = [sequence.decode(token) for token in ids[2:67]]
    for n_rows in (2, 3, 7, 12, 33, 65):
        sequence.rewind(2)
        ((*logits,),) = sequence.engine.decode([sequence], [ids[2 : 2 + n_rows]])
        np.testing.assert_array_equal(logits, expected[:n_rows])
        sequence.keep(3)
        np.testing.assert_array_equal(sequence.decode(ids[3]), expected[1])
    sequence.model.gguf.close()


@pytest.mark.parametrize("can_prefill_in_parts", [True, False])
def test_a_long_prompt_takes_the_layers_in_parts(can_prefill_in_parts, tmp_path, monkeypatch):
    """But not where a cache waits for the end; and it changes no bit."""
    sequence = open_model(make_model(tmp_path / "model.gguf", n_layer=3), chunk=5)
    ids = [token % sequence.model.hparams.n_vocab for token in range(33)]
    whole = sequence.prefill(ids)
    calls, progress = [], []

    class Recording(DenseCache):
        def extend(self, x):
            calls.append((self.spec.layer, x.pos))
            return super().extend(x)

        def finish_prefill(self):
            calls.append((self.spec.layer, "end"))

    class Waiting(Recording):
        can_prefill_in_parts = False

    monkeypatch.setattr(forward, "ROWS_AT_ONCE", 12)  # two chunks
    specs = sequence.model.decoder.layer_specs()
    caches = [Recording(spec) for spec in specs]
    if not can_prefill_in_parts:
        caches[1] = Waiting(specs[1])
    logits = sequence.model.decoder.forward(
        ids, 0, caches, progress=lambda *at: progress.append(at)
    )
    np.testing.assert_array_equal(logits, whole)
    assert progress == sorted(progress) and progress[-1] == (33, 33)
    parts = [range(0, 10, 5), range(10, 20, 5), range(20, 30, 5), range(30, 33, 5)]
    if not can_prefill_in_parts:
        parts = [range(0, 33, 5)]
    expected = []
    for part in parts:
        for layer in range(3):
            expected += [(layer, pos) for pos in part]
            expected += [(layer, "end")] if part is parts[-1] else []
    assert calls == expected
    sequence.model.gguf.close()


def test_progress_ends_at_the_prompt_length(tmp_path):
    sequence = open_model(make_model(tmp_path / "model.gguf", n_layer=3), chunk=5)
    seen: list[tuple[int, int]] = []
    sequence.prefill(REFERENCE_IDS, progress=lambda done, total: seen.append((done, total)))
    done = [step for step, _ in seen]
    assert done == sorted(done) and done[-1] == len(REFERENCE_IDS)
    assert {total for _, total in seen} == {len(REFERENCE_IDS)}


# --- the default model ----------------------------------------------------------------------------


class DefaultModel:
    """Logits of the 512 recorded tokens: forward in f32, and the last ones decoded."""

    def __init__(self, path: Path) -> None:
        self.ids = smollm2_tokens().tolist()
        self.sequence = open_model(path)
        self.forward = self.sequence.prefill(self.ids, all_logits=True)
        self.sequence.rewind(len(self.ids) - N_DECODED)
        self.decoded = np.stack([self.sequence.decode(t) for t in self.ids[-N_DECODED:]])


@pytest.fixture(scope="module")
def smollm2(default_model):
    model = DefaultModel(default_model)
    yield model
    model.sequence.model.gguf.close()


def test_default_model_agrees_with_llama_cpp(smollm2):
    record = smollm2_record("llama")
    assert compact_kl(record, smollm2.forward).mean() < 5e-3
    assert top1_agreement(record, smollm2.forward) >= 0.96


def test_default_model_equals_the_reference_decoder(smollm2):
    record = smollm2_record("reference")
    divergence = compact_kl(record, smollm2.forward)
    assert divergence.mean() < 1e-4 and divergence.max() < 2e-3
    assert top1_agreement(record, smollm2.forward) >= 0.995


def test_default_model_decodes_what_it_prefills(smollm2):
    tail = slice(-N_DECODED, None)
    divergence = np.array(list(kl_divergences(smollm2.forward[tail], smollm2.decoded)))
    assert divergence.mean() < 1e-6 and divergence.max() < 1e-5
    for source, limit in (("llama", 5e-3), ("reference", 1e-4)):
        whole = smollm2_record(source)
        record = type(whole)(*(array[tail] for array in whole))
        assert compact_kl(record, smollm2.decoded).mean() < limit


def test_repeated_text_is_predicted(smollm2):
    """A wrong rotary pairing still writes fluent text, but cannot copy from far back."""
    text = smollm2.ids[1:181]
    sequence = smollm2.sequence
    sequence.reset()
    logits = sequence.prefill([smollm2.ids[0], *text, *text], all_logits=True)
    surprise = -np.take_along_axis(log_softmax(logits[:-1]), np.array([*text, *text])[:, None], 1)
    first, second = (float(np.exp(half.mean())) for half in np.split(surprise, 2))
    assert second < 1.5 and first > 4 * second


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_short_question_is_read_as_in_f32(smollm2, dtype):
    """Two first tokens of its answer are .08 apart. Inputs of 8 bits turned them around."""
    skip_without(dtype)
    path = smollm2.sequence.model.gguf.path
    said = [{"role": "user", "content": "What is the capital of France?"}]
    logits = []
    for config in ({"prefill_dtype": "f32"}, {"prefill_dtype": dtype, "activations": "8"}):
        sequence = open_model(path, threads=2, **config)
        model = sequence.model
        ids = encode_messages(model.tokenizer, chat_template(model.gguf), said)
        assert len(ids) <= decoder.FEW_ROWS
        logits.append(log_softmax(sequence.prefill(ids)[None])[0])
        model.gguf.close()
    best = np.argsort(logits[0])[-5:]
    assert np.abs(logits[1][best] - logits[0][best]).max() < 0.01
    assert logits[1].argmax() == logits[0].argmax()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_prefill_of_eight_bits_stays_close(smollm2, dtype):
    """KLD below 1e-2 and 95% of the f32 path's choices."""
    skip_without(dtype)
    ids = smollm2.ids[:256]
    sequence = open_model(smollm2.sequence.model.gguf.path, prefill_dtype=dtype, threads=2)
    logits = sequence.prefill(ids, all_logits=True)
    expected = smollm2.forward[: len(ids)]
    assert np.mean(list(kl_divergences(expected, logits))) < 1e-2
    assert np.mean(logits.argmax(-1) == expected.argmax(-1)) >= 0.95
    assert not np.array_equal(logits, expected)
    sequence.model.gguf.close()


def test_decode_of_eight_bits_stays_close(smollm2):
    """KLD of llama.cpp's own .003 (AVX2 alone: .0032), nine in ten of the f32 path's choices."""
    sequence = open_model(smollm2.sequence.model.gguf.path, activations="8", threads=2)
    decoded = decode_all(sequence, smollm2.ids[:129])[1:]
    expected = smollm2.forward[1:129]
    divergence = np.mean(list(kl_divergences(expected, decoded)))
    assert 1e-5 < divergence < 3.3e-3  # rounded, but not too much
    assert np.mean(decoded.argmax(-1) == expected.argmax(-1)) >= 0.9
    sequence.model.gguf.close()
