"""Why known tokens of a prompt are computed again: the place, the characters, the cause."""

import json

import pytest
from kept_prompts import keep, keeping
from tiny_sequences import open_tiny, tokens

from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer
from sparsekv_cli.prefix import difference
from sparsekv_cli.prefix.blocks import BLOCK
from sparsekv_cli.prefix.difference import CAUSES, Difference, explain

RULES = " ".join(f"Rule {i} of the house is that nobody shouts in room {7 * i}." for i in range(40))
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"a": 1}}}])
ASKED = "<|im_end|>\n<|im_start|>user\n"


@pytest.fixture(scope="module")
def tokenizer(default_model):
    with open_gguf(default_model) as file:
        yield load_tokenizer(file.metadata)


def explained(tokenizer, kept: str, now: str):
    ids = tokenizer.encode(now)
    found = difference.difference(tokenizer.encode(kept), ids)
    return None if found is None else explain(found, ids, tokenizer)


@pytest.mark.parametrize(
    ("kept", "now", "cause", "place"),
    [
        ("The time is 12:01:07.", "The time is 12:01:38.", "a clock", ("12:01:", "07", "38")),
        ("Today: 2026-11-30", "Today: 2026-12-01", "a clock", ("2026-1", "1-30", "2-01")),
        ("It is Monday, 30 Nov", "It is Friday, 27 Nov", "a clock", ("It is ", "Mon", "Fri")),
        ("now=1795867200", "now=1795867231", "a clock", ("17958672", "00", "31")),
        ("id 7f3a-99", "id 0c1b-42", "a number that changes", ("id ", "7f3a", "0c1b")),
        ("Be brief.", "Be polite.", "the system prompt", ("Be ", "brief", "polite")),
    ],
)
def test_a_changed_line_at_the_top(kept, now, cause, place, tokenizer):
    texts = [f"<|im_start|>system\n{line}\n{RULES}{ASKED}Why?" for line in (kept, now)]
    found = explained(tokenizer, *texts)
    assert found.cause == cause and cause in CAUSES
    before, old, new = place
    assert found.before.endswith(before) and len(found.before) <= 20
    assert found.kept.startswith(old) and found.now.startswith(new)
    assert found.n_again > 300 and found.token < 30
    assert found.line().count("\n") == 0 and "kept" not in found.fields()


@pytest.mark.parametrize(
    ("head", "kept", "now", "cause"),
    [
        (f"<|im_start|>system\n<tools>{TOOLS}", "look", "see", "the tools"),
        (f"<|im_start|>system\nBe brief.{ASKED}", "Say why", "Tell me how", "an earlier message"),
        ("<|im_start|>", "system", "user", "the template"),
        ("", "One", "Two", "the text"),
    ],
)
def test_a_place_in_a_conversation(head, kept, now, cause, tokenizer):
    found = explained(tokenizer, *(f"{head}{word}\n{RULES}" for word in (kept, now)))
    assert found is not None and found.cause == cause


def test_what_costs_nothing_is_not_told(tokenizer):
    """A prompt that goes on, another prompt, and one of which little is known."""
    prompt = f"<|im_start|>system\n{RULES}{ASKED}Why?"
    assert explained(tokenizer, prompt, f"{prompt} And who?") is None
    assert explained(tokenizer, f"{prompt} And who?", prompt) is None
    assert explained(tokenizer, prompt, f"{prompt[:200]}{'Another text of words. ' * 90}") is None
    assert explained(tokenizer, f"1 {RULES[:100]}", f"2 {RULES[:100]}") is None


def test_a_character_of_several_tokens_is_cut_to_a_mark(tokenizer):
    """Bytes that are no character do not stop it."""
    found = explained(tokenizer, f"\N{SNOWMAN}\n{RULES}", f"\N{UMBRELLA}\n{RULES}")
    assert found is not None and found.line()


@pytest.mark.parametrize("at", [20, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_prompt_on_disk(at, tiny_model, tmp_path):
    """Also where a block ends, and the kept prompt goes on in its next one."""
    kept = tokens(3 * BLOCK)
    now = [*kept[:at], kept[at] ^ 1, *kept[at + 1 :]]
    writer = open_tiny(tiny_model, "full", ctx_size=4096)
    keeping(writer, tmp_path)
    keep(writer, kept)
    writer.model.gguf.close()
    reader = open_tiny(tiny_model, "full", ctx_size=4096)
    keeping(reader, tmp_path)
    reader.prefill(now)
    found = reader.difference
    assert isinstance(found, Difference) and found.at == at and found.n_again >= BLOCK
    assert found.kept[0] == kept[at] and found.now[0] == now[at]
    reader.model.gguf.close()
