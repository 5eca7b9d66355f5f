"""Drafts of a smaller model: what it would write, in its own sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_model

from sparsekv_cli import load
from sparsekv_cli.drafts.draft_model import LONG, MOST, ModelDrafts
from sparsekv_cli.errors import OptionError, SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import Model, load_model
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


def assert_likely(model: Model, text: list[int], draft: list[int]) -> None:
    """Each token is the likeliest one, but for what the rounding of decode steps changes."""
    sequence = model.sequence()
    logits = sequence.prefill(text)
    for token in draft:
        assert logits.max() - logits[token] < 0.25 * logits.std()
        logits = sequence.decode(token)


@pytest.mark.parametrize("method", ["full", "quest", "lfps"])
def test_a_draft_is_what_the_model_would_write(method: str, path: Path) -> None:
    """Also when tokens of the last draft were refused, and when many tokens are new."""
    model = opened(path, name=method)
    drafts, text = ModelDrafts(model.sequence(), model.hparams.n_vocab), list(TOKENS)
    drafts.begin(text)
    for new in ([], [7], [9, 8, 7], [], [5] * (LONG + 5), [1]):
        for n_kept in (MOST, 2, 0):
            text += new
            found = drafts.draft(text[:-1], text[-1], MOST, least_chance=0.0)
            assert len(found) == MOST
            if method == "full":
                assert_likely(model, text, found)
            text += found[:n_kept]
    text[100:] = [11] * 30
    drafts.begin(text)
    found = drafts.draft(text[:-1], text[-1], 5, least_chance=0.0)
    assert len(found) == 5
    if method == "full":
        assert_likely(model, text, found)
    model.close()


def test_a_draft_ends_with_doubt_and_with_the_context(path: Path) -> None:
    model = opened(path, n_ctx=len(TOKENS) + 6)
    drafts = ModelDrafts(model.sequence(), model.hparams.n_vocab)
    drafts.begin(TOKENS)
    assert drafts.draft(TOKENS[:-1], TOKENS[-1], 20, least_chance=1.0) == []
    assert len(drafts.draft(TOKENS[:-1], TOKENS[-1], 20, least_chance=0.0)) == 6
    assert drafts.draft(TOKENS[:-1], TOKENS[-1], 0) == []
    text = [*TOKENS, *range(20, 26)]
    assert drafts.draft(text[:-1], text[-1], 20, least_chance=0.0) == []
    model.close()


@pytest.mark.parametrize("source", ["draft-model", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_answers_are_the_same(
    source: str,
    temperature: float,
    path: Path,
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_another_vocabulary_is_refused(path: Path, default_model: Path) -> None:
    with pytest.raises(SparseKVError, match=r"another vocabulary than .*: a draft model needs the"):
        load(path, speculate="auto", draft_model=str(default_model))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"speculate": "draft-model"}, ValueError, "needs draft_model"),
        (
            {"speculate": "ngram", "draft_model": "x"},
            ValueError,
            "no use for draft_model",
        ),
        ({"speculate": "auto", "draft_model": "no.gguf"}, SparseKVError, "no.gguf"),
        ({"speculate": "guess"}, ValueError, "must be auto, ngram, mtp, draft-model or off"),
    ],
)
def test_settings_that_do_not_fit(
    settings: dict[str, str], error: type[Exception], words: str, path: Path
) -> None:
    with pytest.raises(error, match=words):
        load(path, **settings)


def test_a_vocabulary_may_have_more_tokens_at_its_end(path: Path, tmp_path: Path) -> None:
    small = make_model(tmp_path / "small.gguf", n_layer=1, n_vocab=600)
    asked = {"max_tokens": 20, "temperature": 0.0}
    with load(path, n_ctx=200, threads=1, speculate="off") as model:
        expected = model.generate("a b c", **asked).tokens
    drafting = {"speculate": "draft-model", "draft_model": str(small)}
    with load(path, n_ctx=200, threads=1, **drafting) as model:
        assert model.generate("a b c", **asked).tokens == expected


def test_a_method_that_does_not_exist_is_an_option_error(path: Path) -> None:
    with pytest.raises(OptionError, match=r"--draft-method: .*nothing"):
        load(path, speculate="auto", draft_model=str(path), draft_method="nothing")
