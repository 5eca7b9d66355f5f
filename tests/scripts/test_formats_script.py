"""scripts/accuracy/formats: the wider model has the same logits, and what figures say of programs.

llama.cpp is a plain decoder and gguf's quantiser here.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize
from reference_decoder import ReferenceModel, log_softmax, model_logits, reference_logits
from scripts_as_modules import load_script
from tiny_models import copy_metadata, make_model, write_all

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

formats = load_script("accuracy/formats")
wider = sys.modules["formats_wider"]

SHAPE = {"n_embd": 192, "n_head": 6, "n_head_kv": 3, "n_ff": 256}  # to 256: 8 heads and 4
EPSILON = "llama.attention.layer_norm_rms_epsilon"
IDS = list(range(3, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One whose epsilon is felt: hidden states are about as small."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return make_model(
        tmp_path_factory.mktemp("tiny") / "model.gguf", chat_template=template, rope_freqs=True,
        metadata={EPSILON: 0.01}, **SHAPE,
    )  # fmt: skip


def test_a_wider_model_has_the_same_logits(model, tmp_path):
    path = tmp_path / "wide.gguf"
    wider.widen(model, path, 256, np.float32)
    largest, spread = wider.largest_difference(model, path, IDS)
    assert largest < 2e-5 * spread
    old, new = ReferenceModel.open(model), ReferenceModel.open(path)
    assert (new.n_head, new.n_head_kv, new.head_dim) == (8, 4, old.head_dim)
    assert new.epsilon == pytest.approx(0.75 * old.epsilon)
    assert new.tensor("blk.0.attn_q.weight").shape == (256, 256)
    assert new.tensor("blk.1.ffn_down.weight").shape == (256, 256)
    assert new.reader.fields["tokenizer.ggml.merges"].contents()
    for name, field in old.reader.fields.items():
        if name.startswith("tokenizer."):
            assert field.contents() == new.reader.fields[name].contents()


def test_an_output_matrix_of_its_own_is_widened(tmp_path):
    source, path = tmp_path / "untied.gguf", tmp_path / "wide.gguf"
    make_model(source, tied=False, **SHAPE)
    wider.widen(source, path, 256, np.float32)
    largest, spread = wider.largest_difference(source, path, IDS)
    assert largest < 2e-5 * spread
    assert GGUFReader(path).tensors[0].tensor_type == GGMLQuantizationType.F32


def test_this_program_opens_it_in_f16(model, tmp_path):
    path = tmp_path / "wide.gguf"
    wider.widen(model, path, 256)
    config = SessionConfig(threads=1, prefill_dtype="f32")
    sequence = load_model(path, build_method("full", {}), config).sequence()
    expected = reference_logits(model, IDS)
    assert np.abs(sequence.prefill(IDS) - expected[-1]).max() < formats.LARGEST * expected.std()
    formats.check_same(model, path, IDS)


def test_another_model_is_noticed(model, tmp_path):
    other = make_model(tmp_path / "other.gguf", seed=1, **SHAPE)
    with pytest.raises(SparseKVError, match="it is another model"):
        formats.check_same(model, other, IDS)


@pytest.mark.parametrize(("options", "width", "message"), [
    ({"arch": "qwen2"}, 256, "architecture qwen2 cannot be widened"),
    ({}, 208, "width 208: 6 and 3 heads of 192 columns"),
    ({}, 128, "width 128"),
    ({"biases": True}, 256, "no rule to widen the tensor blk.0.attn_q.bias"),
])  # fmt: skip
def test_what_cannot_be_widened(options, width, message, tmp_path):
    source = make_model(tmp_path / "model.gguf", **SHAPE, **options)
    with pytest.raises(SparseKVError, match=message):
        wider.widen(source, tmp_path / "wide.gguf", width)


def test_figures_of_known_distributions():
    even, sure = np.log([[0.5, 0.5]] * 4), np.log([[0.75, 0.25]] * 4)
    scores = formats.Scores()
    scores.log_probs = {"exact": sure, "llama": even, "decode": sure}
    scores.found = {"llama": 3}
    row = scores.figures(sure, np.array([0, 0, 0, 0]))
    apart = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert row["kld_llama"] == row["cost_llama"] == pytest.approx(apart)
    assert row["kld_decode"] == 0 and "kld_exact" not in row and row["needles_llama"] == 3
    assert row["ppl_llama"] == pytest.approx(2) and row["ppl_decode"] == pytest.approx(4 / 3)
    assert row["top1_decode"] == 1
    assert formats.perplexity(sure, np.array([1, 1, 1, 1])) == pytest.approx(4)


def test_verdicts():
    row = {"format": "Q4_K_M", "kld_llama": 0.001, "kld_prefill": 0.0029, "kld_decode": 0.002}
    assert formats.broken([row]) == []
    (line,) = formats.broken([row | {"kld_decode": 0.0031}])
    assert line.startswith("FAIL Q4_K_M: KLD of decode to exact 0.00310, at most 0.00300")
    assert formats.broken([row | {"kld_decode": 0.01, "kld_llama": 0.02}]) == []
    assert len(formats.broken([row | {"kld_prefill": float("nan")}])) == 1


def test_questions_are_answered_one_by_one(model):
    """A program that answers with the value; and how few tokens it has to read."""
    opened = load_model(model, build_method("full", {}), SessionConfig(threads=1))
    questions, tokenizer = formats.make_questions(opened, 3), opened.tokenizer
    assert len({q.value for q in questions}) == 3
    for question in questions:
        text = tokenizer.decode(question.ids, skip_special=True)
        assert question.value in text and text.endswith("in one sentence.")
    read, answers = [], []

    def evaluate(ids, n_past, n_last):
        read.append((len(ids), n_past))
        if len(ids) > 1:
            value = next(q.value for q in questions if q.ids[-len(ids) :] == list(ids))
            answers[:] = tokenizer.encode(value, add_bos=False, add_eos=False)
            answers.append(min(tokenizer.eog_ids))
        logits = np.zeros((1, 512), np.float32)
        logits[0, answers.pop(0)] = 1
        return logits

    assert formats.count_found(evaluate, questions, tokenizer) == 3
    long = [n for n in read if n[0] > 1]
    shared = formats.n_common(questions[0].ids, questions[1].ids[:-1])
    assert long[0] == (len(questions[0].ids), 0) and long[1][1] == shared
    wrong = [q._replace(value="no") for q in questions]
    assert formats.count_found(evaluate, wrong, tokenizer) == 0


def test_ours_answers_alike_with_what_is_there(model):
    """A question behind another one's text: the logits of reading it whole."""
    config = SessionConfig(threads=1, prefill_dtype="f32")
    opened = load_model(model, build_method("full", {}), config)
    sequence = opened.sequence()
    evaluate = formats.ours(sequence)
    whole = evaluate(IDS, 0, 1)
    evaluate([1, 2, 3], 20, 1)
    assert np.allclose(evaluate(IDS[20:], 20, 1), whole, atol=1e-2)
    sequence.rewind(len(IDS) - 1)
    assert np.allclose(evaluate(IDS[-1:], len(IDS) - 1, 1), whole, atol=1e-2)
    last = formats.decode_last(opened, IDS, 5)
    assert np.allclose(last, formats.prefill_last(opened, IDS, 5), atol=1e-2)
    assert last.shape == (5, 512)


class FakeLibrary:
    """llama.cpp's quantiser, of types that gguf can quantise."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        reader, to = GGUFReader(source), GGMLQuantizationType[kind]
        writer = GGUFWriter(target, "llama")
        copy_metadata(reader, writer, {})
        for tensor in reader.tensors:
            data = np.array(tensor.data)
            if data.ndim == 2:
                writer.add_tensor(tensor.name, quantize(data.astype(np.float32), to), raw_dtype=to)
            else:
                writer.add_tensor(tensor.name, data)
        write_all(writer)


class FakeModel:
    """llama.cpp's logits: a plain decoder's."""

    def __init__(self, library: FakeLibrary, path: Path, n_ctx: int) -> None:
        self.model, self.ids = ReferenceModel.open(path), []

    def evaluate(self, ids, n_past, n_last):
        self.ids = [*self.ids[:n_past], *ids]
        return model_logits(self.model, self.ids, n_last=n_last)

    def close(self) -> None: ...


@pytest.fixture
def fake_llama(monkeypatch):
    monkeypatch.setattr(formats, "LlamaLibrary", FakeLibrary)
    monkeypatch.setattr(formats, "LlamaModel", FakeModel)
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: object())


@pytest.mark.slow
def test_command(model, tmp_path, fake_llama, capsys, monkeypatch):
    monkeypatch.setattr(formats, "N_QUESTION", 200)
    file = tmp_path / "result.json"
    arguments = ["-m", str(model), "--width", "256", "--formats", "Q8_0,Q4_0", "--length", "32"]
    arguments += ["--texts", "2", "--needles", "1", "--threads", "1", "--prefill-dtype", "f32"]
    assert formats.main([*arguments, "--json", str(file)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[1] for line in out[2:]] == ["F16", "Q8_0", "Q4_0"]
    f16, q8, q4 = json.loads(file.read_text())
    assert f16["cost_exact"] == 0 and f16["mb"] > q8["mb"] > q4["mb"]
    assert 0 < q8["cost_exact"] < q4["cost_exact"]
    for row in (f16, q8, q4):
        assert row["kld_llama"] == pytest.approx(0, abs=1e-6)
        assert abs(row["kld_prefill"]) < 1e-3 and abs(row["kld_decode"]) < 1e-3
        assert row["ppl_decode"] == pytest.approx(row["ppl_exact"], rel=1e-2)
        assert row["needles_of"] == 1 and row["needles_ours"] <= 1


def test_scores_are_of_the_next_tokens(model):
    """Perplexity by hand: the tokens behind those that were given."""
    ids = IDS[:17]
    exact = ReferenceModel.open(model)
    log_probs = formats.score(lambda given: model_logits(exact, given, n_last=8), [ids])
    whole = log_softmax(reference_logits(model, ids))
    chosen = [whole[t, ids[t + 1]] for t in range(8, 16)]
    found = formats.perplexity(log_probs, np.array(ids[-8:]))
    assert found == pytest.approx(np.exp(-np.mean(chosen)), rel=1e-5)


def test_without_llama_cpp_and_with_bad_options(model, monkeypatch, capsys, fake_llama):
    with pytest.raises(SystemExit):
        formats.main(["--formats", "Q9"])
    assert "'Q9': choose from Q8_0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        formats.main(["--texts", "9"])
    assert formats.main(["-m", "no/such.gguf"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert formats.main(["-m", str(model), "--width", "100"]) == 1
    assert "width 100" in capsys.readouterr().err
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    assert formats.main(["-m", str(model)]) == 1
    said = capsys.readouterr().err
    assert said == "error: llama.cpp is not installed: pip install 'sparsekv-cli[peer]'\n"
