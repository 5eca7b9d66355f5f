"""Thinking ahead of a constrained answer: it is free, it is closed in time, the answer matches."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_vocabularies import CONTROL, NORMAL, USER_DEFINED, bpe_with

from sparsekv_cli.cache.counters import Timings
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer import Answer
from sparsekv_cli.generation.conversation import encode_messages
from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint
from sparsekv_cli.models.chat.thinking import MARKERS, thinking_of
from sparsekv_cli.models.tokenizer.marks import CHANNEL_MARKS
from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer
from sparsekv_cli.sampling.grammar import read_grammar
from sparsekv_cli.sequence import Checkpoint

FOLDER = Path(__file__).parents[1] / "data" / "templates"
TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
ASKED = [{"role": "user", "content": "Well?"}]
YES = read_grammar("regex", "(yes|no)!")
ANY = read_grammar("regex", r"(?s:.)*!")
LONG = "hm " * 200


MARKS = {*CHANNEL_MARKS, "<|return|>", "<|call|>", *(text for pair in MARKERS[1:] for text in pair)}
# The markers are tokens of a kind; 0: they are text like any other.
TOKENIZERS = {0: bpe_with({})} | {
    kind: bpe_with(dict.fromkeys(sorted(MARKS), kind)) for kind in (CONTROL, USER_DEFINED)
}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


@cache
def prompt_of(template: str, kind: int, think: bool | None) -> list[int]:
    return encode_messages(TOKENIZERS[kind], template, ASKED, think=think)


def answered(
    template: str,
    wanted: str,
    *,
    kind: int = CONTROL,
    grammar: Any = YES,
    n: int = 60,
    budget: int | None = None,
    think: bool | None = None,
) -> Answer:
    """What a model says that wants to say a text, and the first token that may follow elsewhere."""
    tokenizer = TOKENIZERS[kind]
    thinking = thinking_of(template, tokenizer)
    sampling = SamplingOptions({}, grammar=grammar, think_budget=budget)
    constraint = new_constraint(tokenizer, sampling, thinking, think)
    assert constraint is not None
    prompt = prompt_of(template, kind, think)
    generation = Generation(
        tokenizer, ended(prompt, n), unused, constraint=constraint, thinking=thinking
    )
    wants = tokenizer.encode(wanted, add_bos=False, add_eos=False)
    for token in chosen(constraint, wants, tokenizer, n):
        if generation.push(token):
            break
    return generation.finish()


def ended(prompt: Sequence[int], n: int) -> Any:
    """A sequence that ends with a prefill of ``prompt``, with room for n tokens."""
    at = Checkpoint(len(prompt), np.zeros(1, np.float32))
    n_ctx, timings = len(prompt) + n, Timings()
    return SimpleNamespace(
        tokens=list(prompt), n_ctx=n_ctx, checkpoint=at, timings=timings, drafts=None, is_full=False
    )


def unused(logits: np.ndarray, tokens: Sequence[int]) -> int:
    raise AssertionError("the tokens are given")


def chosen(constraint: Any, wants: Sequence[int], tokenizer: Tokenizer, n: int) -> Any:
    for i in range(n):
        allowed = constraint.allowed(tokenizer.n_vocab)
        token = wants[i] if i < len(wants) else next(iter(tokenizer.eog_ids))
        if allowed is not None and token not in allowed:
            token = int(allowed[0])
        constraint.accept(token)
        yield token


@pytest.mark.parametrize("kind", [0, CONTROL])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_answer_always_comes(name, kind):
    """Whatever a model wants to say, with every template: after half of its tokens."""
    for wanted in (LONG, f"<think>{LONG}", f"<|channel|>analysis<|message|>{LONG}", ""):
        answer = answered(TEMPLATES[name], wanted, kind=kind, n=200)
        assert answer.text in ("yes!", "no!") and answer.stop_reason == "eos", wanted[:20]


# Where a template opens the thinking, where the model does that, and what comes on channels.
THINKERS = {
    "Qwen3.5-4B": "so</think>",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "so</think>",
    "Qwen-Qwen3-0.6B": "<think>so</think>",
    "HuggingFaceTB-SmolLM3-3B": "<think>so</think>",
    "openai-gpt-oss-120b": "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    "<|channel|>final<|message|>",
}


@KINDS
@pytest.mark.parametrize("name", THINKERS)
def test_thinking_is_free_and_closed_in_time(name, kind):
    template, thought = TEMPLATES[name], THINKERS[name]
    assert (answer := answered(template, thought + "no!", kind=kind, n=200)).text == "no!"
    assert answer.thinking == "so"
    if "channel" in thought:
        typed = thought[:-11] + " <|constrain|>json<|message|>no!"
        assert answered(template, typed, kind=kind, n=200).text == "no!"
    endless = answered(template, thought.partition("so")[0] + LONG, kind=kind, n=400, budget=100)
    assert endless.thinking.startswith("hm hm") and endless.text == "no!"
    assert 60 <= len(endless.thinking) <= 100
    assert (
        answered(template, thought + LONG + "!", kind=kind, n=400, grammar=ANY).text[:5] == "hm hm"
    )
    for n in (12, 100):
        none = answered(template, LONG, kind=kind, n=4 * n, budget=0)
        assert (none.thinking, none.text) == ("", "no!")


@KINDS
@pytest.mark.parametrize("name", ["Qwen3.5-4B", "Qwen-Qwen3-0.6B", "google-gemma-4-31B-it"])
def test_thinking_that_is_switched_off(name, kind):
    off = answered(TEMPLATES[name], "<think>so</think>no!", kind=kind, think=False)
    assert (off.thinking, off.text, len(off.tokens)) == ("", "no!", 3)


@KINDS
@pytest.mark.parametrize("name", THINKERS)
def test_a_budget_without_a_grammar(name, kind):
    template, begun = TEMPLATES[name], THINKERS[name].partition("so")[0]
    free = answered(template, begun + LONG, kind=kind, grammar=None, n=300, budget=100)
    assert 60 <= len(free.thinking) <= 100 and free.text.strip("hm ") == "" and free.text
    ended = answered(template, begun + "so", kind=kind, grammar=None, budget=100)
    assert (ended.thinking, ended.text, ended.stop_reason) == ("so", "", "eos")
    assert answered(template, LONG, kind=kind, grammar=None, n=300, budget=0).thinking == ""


@KINDS
def test_a_header_that_is_half_written_is_closed(kind):
    """gpt-oss': wherever the budget ends, the answer is on the channel of answers."""
    written = THINKERS["openai-gpt-oss-120b"].replace("final", "analysis") + LONG
    n = len(TOKENIZERS[kind].encode(written.partition("hm")[0], add_bos=False, add_eos=False))
    for budget in range(n + 2):
        template = TEMPLATES["openai-gpt-oss-120b"]
        answer = answered(template, written, kind=kind, n=300, budget=budget)
        assert answer.text in ("yes!", "no!") and "channel" not in answer.thinking


def test_a_token_that_ends_the_marker_and_goes_on():
    """It would put text in front of the answer that no grammar has seen."""
    TOKENIZERS[9] = bpe_with({">x": NORMAL, ">Ċ": NORMAL}, ["> x", "> Ċ"])
    template = TEMPLATES["Qwen3.5-4B"]
    assert answered(template, "so</think>xno!", kind=9, n=99).text in ("yes!", "no!")
    spaced = answered(template, "so</think>\nno!", kind=9, n=99)
    assert (spaced.thinking, spaced.text) == ("so", "no!")


def test_a_budget_needs_markers():
    with pytest.raises(SparseKVError, match="has no markers of thinking"):
        answered(TEMPLATES["meta-llama-Llama-3.1-8B-Instruct"], "", budget=5)
