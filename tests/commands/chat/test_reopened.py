"""``/set`` of what a model is read with: its rows stay, or the next message reads them again."""

import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli.commands.chat.conversation import ChatSettings, Conversation
from sparsekv_cli.commands.chat.settings import change_setting
from sparsekv_cli.commands.options.prefix import PrefixOptions, open_prompt_rows
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig


@pytest.fixture
def talk(tmp_path, request):
    arch = getattr(request, "param", "llama")
    path = make_model(tmp_path / "m.gguf", arch=arch, n_layer=2, n_embd=64, n_ff=64, n_ctx=900)
    config = SessionConfig(threads=1, prefill_dtype="f32")
    model = load_model(path, build_method("quest", {}, budget="64"), config)
    prefix = PrefixOptions(tmp_path / "rows", 1.0, False, None)
    settings = ChatSettings(SamplingOptions({"temp": 0.0}, ignore_eos=True), 0, n_predict=3)
    model.gguf.content.wait()
    yield Conversation(
        model, settings, "x " * 300, lambda *of: open_prompt_rows(of[0], prefix, of[1])
    )


def said(talk: Conversation, text: str) -> int:
    """The tokens of the prompt that the answer to ``text`` has computed."""
    talk.send(text)
    return talk.sequence.timings.prefill_tokens


def test_rows_are_kept_or_read_again_by_their_identity(talk):
    whole, after = said(talk, "a"), said(talk, "a")
    assert whole > 600 > 100 > after
    for text in ("rope_scale 1", "override_kv llama.context_length=int:950"):
        old = talk.model
        change_setting(talk, text)
        assert talk.model is not old and len(talk.sequence.tokens) > 600
        assert said(talk, "a") < 100
    assert talk.sequence.n_ctx == 950
    change_setting(talk, "rope_scale 4")
    assert not talk.sequence.tokens and talk.sequence.n_ctx == 3800
    assert said(talk, "a") > 600
    assert talk.sequence.method.name == "quest" and talk.model.hparams.rope.freq_scale == 0.25
    assert change_setting(talk, "rope_scale") == "rope_scale 4"
    change_setting(talk, "rope_scale default")
    assert talk.model.hparams.rope.freq_scale == 1 and said(talk, "a") < 600  # from the disk


@pytest.mark.parametrize("talk", ["granite"], indirect=True)
def test_another_answer_has_the_new_logits(talk):
    """The rows stay, but not the logits at the prompt's end."""
    said(talk, "a")
    before = talk.sequence.checkpoint.logits
    change_setting(talk, "override_kv granite.logit_scale=float:3")
    assert len(talk.sequence.tokens) > 600
    talk.regenerate()
    after = talk.sequence.checkpoint.logits
    assert talk.sequence.timings.prefill_tokens < 100
    np.testing.assert_allclose(after / after.max(), before / before.max(), atol=0.05)
    assert abs(after.max() / before.max() - 1) > 0.5


def test_a_change_that_fails_changes_nothing(talk):
    said(talk, "a")
    for text, reason in (
        ("rope_scaling none", "does not scale"), ("rope_scale -1", "0 or more"),
        ("override_kv llama.context_length=int:20", "/clear it first"),
        ("override_kv qwen2.context_length=int:20", "has no effect"),
    ):  # fmt: skip
        if text == "rope_scaling none":
            change_setting(talk, "rope_scale 1")
        model, tokens = talk.model, list(talk.sequence.tokens)
        with pytest.raises(SparseKVError, match=reason):
            change_setting(talk, text)
        assert talk.model is model and talk.sequence.tokens == tokens
    assert said(talk, "a") < 100


def test_a_text_that_is_read_again_costs_a_part(tmp_path):
    """The new version of a text follows the old one; most of its rows are moved."""
    path = make_model(tmp_path / "m.gguf", n_layer=2, n_embd=64, n_ff=64, n_ctx=4096)
    model = load_model(path, build_method("full", {}), SessionConfig(threads=1))
    model.gguf.content.wait()
    prefix = PrefixOptions(tmp_path / "rows", 1.0, False, None, repair=0.2)
    settings = ChatSettings(SamplingOptions({"temp": 0.0}, ignore_eos=True), 0, n_predict=3)
    talk = Conversation(model, settings, "x", lambda *of: open_prompt_rows(of[0], prefix, of[1]))
    text = "".join(f"{i} word " for i in range(100))
    n_first = said(talk, text)
    n_again = said(talk, f"The new one: {text}")
    assert talk.sequence.moved.reused > 500
    assert n_again < 0.6 * n_first
    assert talk.sequence.timings.cached_tokens > 500
