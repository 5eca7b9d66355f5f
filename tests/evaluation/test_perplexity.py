"""Perplexity and KLD on a tiny model, against plain computations of what llama-perplexity does."""

import math
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from opened import open_sequence
from reference_decoder import log_softmax, reference_logits
from tiny_models import make_model
from tiny_tokenizer import BOS_ID

from sparsekv_cli.cache import row_sizes
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation import prefill
from sparsekv_cli.evaluation.compare import parse_methods
from sparsekv_cli.evaluation.perplexity import chunks as chunked
from sparsekv_cli.evaluation.perplexity import scores
from sparsekv_cli.evaluation.perplexity.kld import (
    Divergence,
    Perplexity,
    log_probs_of,
    token_scores,
)
from sparsekv_cli.evaluation.perplexity.kld_file import KLDFile, decode, encode, write_kld_file
from sparsekv_cli.evaluation.perplexity.records import DivergenceRecords, PerplexityRecords
from sparsekv_cli.methods import build_method
from sparsekv_cli.settings.config import SessionConfig

N_CTX = 41  # the second half begins at 20
DATA = Path(__file__).parents[1] / "data"
TOPK = "topk:budget=4;dense_layers=none"
TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 4
CONFIG = SessionConfig(threads=1, prefill_dtype="f32", chunk=16, ctx_size=N_CTX)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny") / "model.gguf", n_vocab=511)


@pytest.fixture(scope="module")
def sequence(model):
    return open_sequence(model, build_method("full", {}), CONFIG)


@pytest.fixture(scope="module")
def chunks(sequence):
    return chunked.split_chunks(sequence.model.tokenizer, TEXT, N_CTX, 2)


def scored(sequence, ways, chunks, records, base=""):
    for i in range(len(chunks.tokens)):
        records.add_all(scores.score_chunk(sequence.model, ways, chunks.chunk(i), base))
    return records


def score(sequence, ways, chunks):
    """By way: perplexities, and the mean rows attended to."""
    records, n = scored(sequence, ways, chunks, PerplexityRecords(None, {})), len(chunks.tokens)
    found = {way: Perplexity(**records.scores(method, n)) for way, method in ways.items()}
    return found, {way: records.rows(method, n).mean for way, method in ways.items()}


def test_perplexity_against_the_reference_decoder(sequence, model, chunks, monkeypatch):
    monkeypatch.setattr(scores, "PIECE", 7)
    expected = []
    for ids in chunks.tokens.tolist():
        log_probs = log_softmax(reference_logits(model, [BOS_ID, *ids[1:]]))
        expected += [-log_probs[j, ids[j + 1]] for j in range(20, 40)]
    ways = {scores.PREFILL: None, **parse_methods("full,streaming:budget=100%")}
    found, attended = score(sequence, ways, chunks)
    for each in found.values():
        assert each.nll == pytest.approx(expected, abs=0.02)
        assert each.value == pytest.approx(np.exp(np.mean(expected)), rel=2e-3)
    n, square = len(expected), np.mean(np.square(expected)) - np.mean(expected) ** 2
    ppl = found["full"]
    assert ppl.stderr == pytest.approx(ppl.value * (square / (n - 1)) ** 0.5, rel=1e-2)
    assert found["streaming:budget=100%"].nll.tolist() == ppl.nll.tolist()
    assert attended["full"] == np.mean(range(21, 41)) and attended["prefill"] is None


def test_a_method_decodes_the_second_half(sequence, chunks):
    ways = parse_methods(f"full,{TOPK}")
    found, attended = score(sequence, ways, chunks)
    full, topk = found.values()
    assert abs(full.value - topk.value) > 1e-3 * full.value
    assert attended[TOPK] < 12


def test_chunks(sequence, chunks):
    ids = sequence.model.tokenizer.encode(TEXT, add_eos=False)
    assert chunks.tokens.ravel().tolist() == ids[: 2 * N_CTX] and ids[0] == BOS_ID
    assert chunks.chunk(1).ids == [BOS_ID, *ids[N_CTX + 1 : 2 * N_CTX - 1]]
    assert chunks.chunk(1).targets.tolist() == ids[N_CTX + 21 : 2 * N_CTX]
    with pytest.raises(SparseKVError, match=f"{len(ids)} tokens, and a context of 200 needs 400"):
        chunked.split_chunks(sequence.model.tokenizer, TEXT, 200)


def test_a_method_does_not_depend_on_the_others(sequence, chunks, monkeypatch):
    """Nor on how many share a prefill: here memory holds one at a time; ``full`` is not lost."""
    q8 = "full:cache_type_k=q8_0;cache_type_v=q8_0"
    ways = parse_methods(f"{TOPK},{q8},streaming:budget=8")
    together, _ = score(sequence, ways, chunks)
    monkeypatch.setattr(prefill, "available_memory", lambda: 1)
    apart, _ = score(sequence, ways, chunks)
    alone, _ = score(sequence, {q8: ways[q8]}, chunks)
    assert list(together) == list(apart) == list(ways)
    assert all((together[way].nll == apart[way].nll).all() for way in ways)
    assert (alone[q8].nll == together[q8].nll).all()
    assert (alone[q8].nll != together["full"].nll).any()


def test_a_model_without_full_layers(tmp_path):
    """Its windows have no rows that methods choose among."""
    path = make_model(tmp_path / "m.gguf", arch="gemma3", n_embd=128, n_ff=128)
    sequence = open_sequence(path, build_method("full", {}), CONFIG)
    chunks = chunked.split_chunks(sequence.model.tokenizer, TEXT, N_CTX, 1)
    found, attended = score(sequence, parse_methods("full,topk:budget=8"), chunks)
    full, topk = found.values()
    assert (full.nll == topk.nll).all() and attended["full"] is None


# --- files of log-probabilities -------------------------------------------------------------------


def llama_row(logits):
    """log_softmax of perplexity.cpp, number by number."""
    f32 = np.float32
    best = max(logits)
    least = max(min(logits), f32(best - f32(16)))
    log_total = f32(math.log(sum(float(np.exp(f32(x - best))) for x in logits)))
    scale = f32(f32(best - least) / f32(65535))
    row = [f32(f32(1 / scale) * f32(x - least)) if x > least else 0 for x in logits]
    row = [round(float(x)) for x in row] + [0] * (len(logits) % 2)
    return struct.pack(f"<ff{len(row)}H", scale, f32(f32(least - best) - log_total), *row)


def test_rows_of_the_file():
    logits = np.random.RandomState(0).normal(0, 6, (3, 33)).astype(np.float32)
    rows = encode(logits)
    assert rows.tobytes() == b"".join(llama_row(row) for row in logits)
    near = logits > logits.max(axis=-1, keepdims=True) - 16
    assert not near.all()
    error = np.abs(decode(rows, 33) - log_softmax(logits))
    assert error[near].max() < 2e-4 and error[~near].max() > 1
    assert (encode(np.zeros((1, 2), np.float32))[0, 4:] == 0).all()


@pytest.fixture(scope="module")
def base(sequence, chunks, tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base"
    with write_kld_file(path, chunks.tokens, 511) as write:
        for chunk in map(chunks.chunk, range(2)):
            ways = {"prefill": None}
            scores.score_chunk(sequence.model, ways, chunk, see=lambda x: write(encode(x)))
    return path


def test_a_file_and_full_are_the_same_base(sequence, chunks, base, monkeypatch):
    data = base.read_bytes()
    assert data[:20] == b"_logits_" + struct.pack("<3i", N_CTX, 511, 2)
    assert len(data) == 20 + 4 * 2 * N_CTX + 2 * 2 * 20 * 516
    opened = KLDFile(base)
    of_file = chunked.chunks_of(sequence.model, opened)
    assert (of_file.tokens == chunks.tokens).all() and of_file.bos == BOS_ID
    ways = parse_methods(TOPK)
    by_file, by_full = (
        {way: records.divergence(method, 2) for way, method in ways.items()}
        for records in (
            scored(sequence, ways, of_file, DivergenceRecords(None, {})),
            scored(sequence, ways, chunks, DivergenceRecords(None, {}), "full"),
        )
    )
    assert by_full["full"].kld.max() < 1e-6 and abs(by_file["full"].kld).max() < 1e-4
    assert by_file[TOPK].kld == pytest.approx(by_full[TOPK].kld, abs=2e-4)
    assert by_full[TOPK].kld.mean() > 1e-3
    other = open_sequence(make_model(base.parent / "other.gguf"), build_method("full", {}), CONFIG)
    with pytest.raises(SparseKVError, match="vocabulary of 511, the model has one of 512"):
        chunked.chunks_of(other.model, opened)
    monkeypatch.setattr(row_sizes, "available_memory", lambda: 4 * 20 * 511 - 1)
    with pytest.raises(SparseKVError, match="log-probabilities of 20 tokens take"):
        scored(sequence, ways, chunks, DivergenceRecords(None, {}), "full")


def test_a_file_of_llama_perplexity(tmp_path):
    """Of llama.cpp's program: a model of fixtures/models, chunks of 8 tokens, as the data says."""
    opened = KLDFile(DATA / "llama_perplexity.base")
    path = make_model(tmp_path / "m.gguf", n_vocab=270)
    sequence = open_sequence(path, build_method("full", {}), CONFIG)
    chunks = chunked.chunks_of(sequence.model, opened)
    text = "a quick brown fox jumps over the lazy dog"
    of_text = chunked.split_chunks(sequence.model.tokenizer, text, 8, 2)
    assert (chunks.tokens == of_text.tokens).all() and chunks.n_scored == 3
    ways = {"prefill": None}
    records = scored(sequence, ways, chunks, DivergenceRecords(None, {}))
    told = records.divergence(None, 2).statistics()
    assert told["Mean PPL(base)"].value == pytest.approx(412.8978, rel=1e-4)  # which it printed
    assert told["Mean PPL(Q)"].value == pytest.approx(412.8978, rel=1e-2)
    assert abs(told["Mean KLD"].value) < 1e-3 and told["Same top p"].value == 1
    rows: list = []
    scores.score_chunk(
        sequence.model, ways, chunks.chunk(1), see=lambda logits: rows.append(encode(logits))
    )
    ours, theirs = (decode(each, 270) for each in (np.concatenate(rows), opened.rows(1)))
    assert ours == pytest.approx(theirs, abs=0.05)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data[:10], "10 bytes are too few"),
        (lambda data: b"GGUF" + data[4:], "begins with b'GGUFits_'"),
        (lambda data: data[:-1], "it was cut off"),
        (lambda data: data[:8] + struct.pack("<i", 2) + data[12:], "are no file of log-prob"),
        (lambda data: data[:20] + struct.pack("<i", 511) + data[24:], "outside its vocabulary"),
        (lambda data: data[:20] + struct.pack("<i", -1) + data[24:], "outside its vocabulary"),
    ],
)
def test_a_bad_file(base, tmp_path, change, said):
    path = tmp_path / "bad"
    path.write_bytes(change(base.read_bytes()))
    with pytest.raises(SparseKVError, match=said):
        KLDFile(path)


def test_a_file_that_is_cut_while_in_use(base, tmp_path):
    file = KLDFile(Path(shutil.copy(base, tmp_path)))
    os.truncate(file.path, 200)
    with pytest.raises(SparseKVError, match="was cut while in use"):
        file.rows(0)


def test_an_interrupted_file_does_not_appear(tmp_path):
    path = tmp_path / "base"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), write_kld_file(path, np.zeros((1, 4)), 3):
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# --- statistics -----------------------------------------------------------------------------------


def test_statistics_against_sums():
    """The sums of perplexity.cpp, which go token by token."""
    rng = np.random.RandomState(1)
    base, logits = rng.normal(0, 4, (2, 40, 50)).astype(np.float32)
    logits = (base + 0.3 * logits).astype(np.float32)
    targets = rng.randint(0, 50, 40)
    p, q = np.exp(log_softmax(base.astype(np.float64))), log_softmax(logits.astype(np.float64))
    kld = (p * (np.log(p) - q)).sum(axis=-1)
    nll, nll_base = (-x[range(40), targets] for x in (q, np.log(p)))
    found = Divergence(**token_scores(logits, targets, log_probs_of(base)))
    told = found.statistics()

    def error(values):
        return ((np.square(values).mean() - values.mean() ** 2) / 39) ** 0.5

    cov = ((nll * nll_base).mean() - nll.mean() * nll_base.mean()) / 39
    ratio_error = (error(nll) ** 2 + error(nll_base) ** 2 - 2 * cov) ** 0.5
    diff = np.exp(-nll) - np.exp(-nll_base)
    rms = np.square(diff).mean() ** 0.5
    same = (p.argmax(-1) == q.argmax(-1)).mean()
    expected = {
        "Mean PPL(Q)": (np.exp(nll.mean()), np.exp(nll.mean()) * error(nll)),
        "Mean ln(PPL(Q)/PPL(base))": (nll.mean() - nll_base.mean(), ratio_error),
        "Mean KLD": (kld.mean(), error(kld)),
        "RMS Δp": (rms, 0.5 / rms * error(np.square(diff))),
        "Same top p": (same, (same * (1 - same) / 39) ** 0.5),
    }
    for name, figures in expected.items():
        assert told[name] == pytest.approx(figures, rel=1e-4), name
    assert told["Cor(ln(PPL(Q)), ln(PPL(base)))"].value == pytest.approx(
        cov / error(nll) / error(nll_base), rel=1e-4
    )
    ordered = np.sort(kld)
    at = 0.9 * 39
    between = ordered[35] + (at - 35) * (ordered[36] - ordered[35])
    assert told["90.0% KLD"].value == pytest.approx(between, rel=1e-4)
    assert told["Maximum KLD"] == (pytest.approx(ordered[-1], rel=1e-4), None)
    assert 0 < same < 1
