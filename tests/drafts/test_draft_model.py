"""Drafts of a smaller model: what it would write, in its own sequence."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli import load, machine
from sparsekv_cli.cache import row_sizes
from sparsekv_cli.drafts.draft_model import LONG, LONGEST_DRAFT, PIECE, ModelDrafts
from sparsekv_cli.errors import OptionError, SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.models.tokenizer import tokenizer
from sparsekv_cli.settings.config import SessionConfig

TOKENS = [3 + i * i % 400 for i in range(150)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    return make_model(folder / "tiny.gguf", n_layer=2, wtype="Q8_0", attention_gain=4.0)


@pytest.fixture(scope="module")
def other(path: Path) -> Path:
    """A smaller model of the same vocabulary."""
    return make_model(path.with_name("small.gguf"), n_layer=1, wtype="Q8_0", seed=5)


def opened(path: Path, n_ctx: int = 900, name: str = "full") -> Model:
    config = SessionConfig(ctx_size=n_ctx, threads=1, prefill_dtype="f32")
    return load_model(path, build_method(name, {}), config)


def draft_of(drafts: ModelDrafts, text: list[int], most: int) -> list[int]:
    """The draft after ``text``, once that is read."""
    found = drafts.draft(text[:-1], text[-1], most, least_chance=0.0)
    while drafts.is_reading:
        assert found == []
        found = drafts.draft(text[:-1], text[-1], most, least_chance=0.0)
    return found


def assert_likely(model: Model, text: list[int], draft: list[int]) -> None:
    """Each token is the likeliest one, but for what the rounding of decode steps changes."""
    sequence = model.sequence()
    logits = sequence.prefill(text)
    for token in draft:
        assert logits.max() - logits[token] < 0.25 * logits.std()
        logits = sequence.decode(token)


@pytest.mark.parametrize("method", ["full", "quest", "lfps"])
def test_a_draft_is_what_the_model_would_write(method, path):
    """Also when tokens of the last draft were refused, and when many tokens are new."""
    model = opened(path, name=method)
    drafts, text = ModelDrafts(model.sequence(), model.hparams.n_vocab), list(TOKENS)
    drafts.begin(text)
    for new in ([], [7], [9, 8, 7], [], [5] * (LONG + 5), [1]):
        for n_kept in (LONGEST_DRAFT, 2, 0):
            text += new
            found = draft_of(drafts, text, LONGEST_DRAFT)
            assert len(found) == LONGEST_DRAFT
            if method == "full":
                assert_likely(model, text, found)
            text += found[:n_kept]
    text[100:] = [11] * 30
    drafts.begin(text)
    found = draft_of(drafts, text, 5)
    assert len(found) == 5
    if method == "full":
        assert_likely(model, text, found)
    model.close()


def test_a_draft_ends_with_doubt_and_with_the_context(path):
    model = opened(path, n_ctx=len(TOKENS) + 6)
    drafts = ModelDrafts(model.sequence(), model.hparams.n_vocab)
    drafts.begin(TOKENS)
    assert len(draft_of(drafts, TOKENS, 20)) == 6
    assert drafts.draft(TOKENS[:-1], TOKENS[-1], 20, least_chance=1.0) == []
    assert drafts.draft(TOKENS[:-1], TOKENS[-1], 0) == []
    text = [*TOKENS, *range(20, 26)]
    assert drafts.draft(text[:-1], text[-1], 20, least_chance=0.0) == []
    model.close()


@pytest.mark.parametrize("source", ["draft-model", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_answers_are_the_same(source, temperature, path, other, monkeypatch):
    monkeypatch.setattr(ModelDrafts, "least_chance", 0.0)  # these models are never certain
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    told = []
    given: list[dict[str, Any]] = [{"speculate": "off"}]
    given += [{"speculate": source, "draft_model": str(each)} for each in (path, other)]
    for settings in given:
        with load(path, n_ctx=400, threads=1, **settings) as model:
            told.append([model.generate(text, **asked) for text in ("a b c a b c", "a b c d")])
    texts = [[reply.tokens for reply in replies] for replies in told]
    assert texts[0] == texts[1] == texts[2]
    if source == "draft-model":
        own, others = (each[0].timings["speculation"] for each in told[1:])
        ledgers = [replies[0].ledger["bytes_host"] for replies in told]
        assert ledgers[0] < min(ledgers[1:])  # the draft model has rows, too
        assert own["drafted"] > 0 and others["drafted"] > 0
        if temperature == 0:
            assert own["accepted"] > 30 > others["accepted"]


def test_a_long_text_is_read_piece_by_piece(path):
    model = opened(path, n_ctx=3 * PIECE)
    drafts, text = ModelDrafts(model.sequence(), model.hparams.n_vocab), [5, 6, 7] * (PIECE - 20)
    sequence = drafts.sequence
    drafts.begin(text)
    for n_read in (PIECE, 2 * PIECE, 3 * PIECE):
        text += [8]  # the answer goes on in the meantime
        assert drafts.draft(text[:-1], text[-1], 3, least_chance=0.0) == []
        assert drafts.is_reading and len(sequence.tokens) == min(n_read, len(text))
    assert sequence.timings.decode_tokens == 0
    found = drafts.draft(text, 9, 3, least_chance=0.0)
    assert len(found) == sequence.timings.decode_tokens == 3 and not drafts.is_reading
    model.close()


def test_tokens_that_the_draft_model_lacks(path):
    """A text that has one has no draft. The next text has drafts again."""
    model = opened(path)
    drafts = ModelDrafts(model.sequence(), 450)
    drafts.begin(TOKENS)
    assert max(draft_of(drafts, TOKENS, LONGEST_DRAFT)) < 450
    for text in ([*TOKENS, 450], [*TOKENS, 450, 7], [*TOKENS, 10**6]):
        assert draft_of(drafts, text, LONGEST_DRAFT) == []
        drafts.begin(TOKENS)
    assert len(draft_of(drafts, [*TOKENS, 7], LONGEST_DRAFT)) == LONGEST_DRAFT
    model.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error")
def test_logits_that_are_no_numbers(bad, path, monkeypatch):
    model = opened(path)
    drafts = ModelDrafts(model.sequence(), model.hparams.n_vocab)
    assert len(draft_of(drafts, TOKENS, 3)) == 3
    decode_batch, n_good = model.decoder.decode_batch, iter([1, 1])

    def spoilt(*args: Any) -> np.ndarray:
        logits = decode_batch(*args)
        if not next(n_good, 0):
            logits[:, None if bad == -np.inf else 77] = bad
            np.multiply(bad, np.zeros(1))  # numpy warns of infinity times 0
        return logits

    monkeypatch.setattr(model.decoder, "decode_batch", spoilt)
    assert len(draft_of(drafts, [*TOKENS, 7], LONGEST_DRAFT)) == 2  # those ahead of the bad logits
    assert draft_of(drafts, [*TOKENS, 7, 8], LONGEST_DRAFT) == []
    model.close()


def test_the_draft_models_tokenizer_is_not_read(path, other, monkeypatch):
    read, tokenizer_of = [], tokenizer.load_tokenizer
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda of: read.append(of) or tokenizer_of(of))
    with load(path, n_ctx=400, speculate="draft-model", draft_model=str(other)) as model:
        assert model.generate("a b c a b c", max_tokens=8).tokens
    assert len(read) == 1


def test_another_vocabulary_is_refused(path, default_model):
    with pytest.raises(SparseKVError, match=r"another vocabulary than .*: a draft model needs the"):
        load(path, speculate="auto", draft_model=str(default_model))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"speculate": "draft-model"}, ValueError, "needs draft_model"),
        ({"speculate": "ngram", "draft_model": "x"}, ValueError, "does not use draft_model"),
        ({"draft_method": "quest"}, ValueError, "draft_method .* needs draft_model"),
        ({"speculate": "auto", "draft_model": "no.gguf"}, SparseKVError, "no.gguf"),
        ({"speculate": "guess"}, ValueError, "must be auto, ngram, mtp, draft-model or off"),
    ],
)
def test_settings_that_do_not_fit(settings, error, words, path):
    with pytest.raises(error, match=words):
        load(path, **settings)


@pytest.mark.parametrize("n_vocab", [600, 500, 450])
def test_a_vocabulary_may_have_more_tokens_at_its_end(n_vocab, path, tmp_path, monkeypatch):
    """Of the draft model or of the other one, whose text may have them."""
    monkeypatch.setattr(ModelDrafts, "least_chance", 0.0)
    small = make_model(tmp_path / "small.gguf", n_layer=1, n_vocab=n_vocab)
    asked = {"max_tokens": 60, "temperature": 1.5, "seed": 4}
    with load(path, n_ctx=200, threads=1, speculate="off") as model:
        expected = model.generate("a b c", **asked).tokens
    assert max(expected) >= 450
    drafting = {"speculate": "draft-model", "draft_model": str(small)}
    with load(path, n_ctx=200, threads=1, **drafting) as model:
        reply = model.generate("a b c", **asked)
    assert reply.tokens == expected and reply.timings["speculation"]["drafted"] > 0


def test_the_context_of_a_draft_model(tmp_path, monkeypatch):
    """That of the other model, as far as the draft model was trained; its rows need memory."""
    shorter = make_model(tmp_path / "shorter.gguf", n_layer=1, n_ctx=300)
    longer = make_model(tmp_path / "longer.gguf", n_layer=1, n_ctx=900)
    pairs = (longer, shorter, 0, 300), (shorter, longer, 0, 300), (longer, shorter, 200, 200)
    for large, small, stated, n in pairs:
        with load(large, n_ctx=stated, threads=1, draft_model=str(small)) as model:
            sequence: Any = model._model.sequence()
            assert sequence.drafts.sequence.n_ctx == n
    row = opened(longer).row_bytes(1)
    for module in (row_sizes, machine):
        monkeypatch.setattr(module, "available_memory", lambda: 1200 * row)
    load(longer, n_ctx=500, threads=1, draft_model=str(longer)).close()
    with pytest.raises(SparseKVError, match=r"K and V of 700 tokens take .* most 512 tokens"):
        load(longer, n_ctx=700, threads=1, draft_model=str(longer))
    load(longer, n_ctx=700, threads=1).close()
    with load(longer, threads=1, draft_model=str(longer)) as model:  # no context is stated
        monkeypatch.setattr(row_sizes, "available_memory", lambda: 1400 * row)
        text = model.detokenize([20] * 150)
        with pytest.raises(SparseKVError, match=r"K and V of 8.. tokens .* shorten the prompt"):
            model.generate(f"{text} {text}", max_tokens=1)
        assert model.generate(text, max_tokens=1).tokens


def test_a_model_that_is_closed_holds_no_draft_model(path, other):
    model = load(path, n_ctx=300, threads=1, speculate="draft-model", draft_model=str(other))
    stream = model.generate("a b c", max_tokens=9, seed=3, stream=True)
    next(stream)
    assert model._model.draft is not None and model._sequence.draft_caches
    file, held = model._model.draft.gguf, weakref.ref(model._model.draft.decoder)
    model.close()
    gc.collect()
    assert held() is None and not model._sequence.draft_caches and list(stream) == []
    with pytest.raises(ValueError, match=r"small.gguf is closed"):
        file.check_intact()
    with pytest.raises(SparseKVError, match="the model is closed: load it again"):
        model.generate("a")


def test_a_method_that_does_not_exist_is_an_option_error(path):
    with pytest.raises(OptionError, match=r"--draft-method: .*nothing"):
        load(path, speculate="auto", draft_model=str(path), draft_method="nothing")
