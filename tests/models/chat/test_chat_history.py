"""Conversations as real templates take them: calls, system messages, answers that go on."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_vocabularies import bpe_metadata

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import continues_last, encode_messages
from sparsekv_cli.models.chat.fitting.call_forms import CallForm, call_form, new_call_id
from sparsekv_cli.models.chat.fitting.fitted import fitted
from sparsekv_cli.models.chat.fitting.probes import place_of_tools
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "templates"
TEMPLATES = {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
WITHOUT_CALLS = (
    "google-gemma-2-2b-it", "microsoft-Phi-3.5-mini-instruct", "HuggingFaceTB-SmolLM3-3B",
    "ibm-granite-granite-3.3-2B-Instruct", "LFM2-8B-A1B", "LFM2.5-Instruct",
)  # fmt: skip
WITH_CALLS = [name for name in TEMPLATES if name not in WITHOUT_CALLS]
TOKENIZER = load_tokenizer(bpe_metadata())
ASKED = {"role": "user", "content": "How is it?"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


def text_of(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    ids = encode_messages(TOKENIZER, TEMPLATES[name], messages, **options)
    return b"".join(map(TOKENIZER.token_bytes, ids)).decode()


def call(identity: str | None, city: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"city": city}}
    return {"type": "function", "function": function, **({"id": identity} if identity else {})}


def result(identity: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({"tool_call_id": identity} if identity else {})}


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_takes_calls_with_any_ids(name):
    """None of them is lost, nor a result; each result belongs to its call."""
    for ids in (("call_0123456789abcdef", "toolu_01A-b"), (new_call_id(), "a"), (None, None)):
        asked = {"role": "assistant", "content": "I look."}
        asked["tool_calls"] = [call(ids[0], "Bonn"), call(ids[1], "Köln")]  # type: ignore[assignment]
        turns = [ASKED, asked, result(ids[0], "result-1"), result(ids[1], "result-2")]
        text = text_of(name, turns, tools=TOOLS)
        words = [text.index(word) for word in ("Bonn", "Köln", "result-1", "result-2")]
        assert "I look." in text
        form = call_form(TEMPLATES[name])
        alone = form is not None and form.is_alone and bool(place_of_tools(TEMPLATES[name]))
        order = (0, 2, 1, 3) if alone else (0, 1, 2, 3)
        assert [words[i] for i in order] == sorted(words), ids


def test_forms_and_ids():
    forms = {
        name: form for name in WITH_CALLS if (form := call_form(TEMPLATES[name])) != CallForm()
    }
    short, alone = CallForm(has_short_ids=True, is_split=True), CallForm(is_alone=True)
    assert forms == {
        "Mistral-Small-3.2-24B-Instruct-2506": short,
        "mistralai-Mistral-Nemo-Instruct-2407": short,
        "meta-llama-Llama-3.1-8B-Instruct": alone._replace(is_split=True),
        "openai-gpt-oss-120b": alone,
        "google-gemma-4-31B-it": CallForm(is_split=True),
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": CallForm(
            are_texts=True, is_null=True, is_split=True
        ),
    }
    assert not any(map(call_form, map(TEMPLATES.get, WITHOUT_CALLS)))
    own = new_call_id()
    assert len(own) == 9 and own.isalnum() and own != new_call_id()
    template = TEMPLATES["Mistral-Small-3.2-24B-Instruct-2506"]
    turns = [ASKED, {"role": "assistant", "content": "", "tool_calls": [call(own, "Bonn")]}]
    turns += [result(own, "1"), {**turns[1], "tool_calls": [call("call_x", "Köln")]}]
    kept, answered, mapped = fitted(template, turns).messages[1:]
    assert kept["tool_calls"][0]["id"] == answered["tool_call_id"] == own
    assert mapped["tool_calls"][0]["id"] not in (own, "call_x")
    assert fitted(template, turns) == fitted(template, turns)


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_system_message_is_lost(name):
    first, second = ({"role": "system", "content": f"Rule {i}."} for i in "12")
    answer = {"role": "assistant", "content": "Yes."}
    for messages in ([first, second, ASKED], [ASKED, answer, first, ASKED]):
        text = text_of(name, messages)
        assert all(m["content"] in text for m in messages if m["role"] == "system")


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_goes_on(name):
    begun = {"role": "assistant", "content": "It is  <|im_end|> "}
    text, prompt = text_of(name, [ASKED, begun], continues=True), text_of(name, [ASKED])
    assert text.startswith(prompt.rstrip()) and text.endswith(begun["content"])
    between = text[len(prompt.rstrip()) : -len(begun["content"])].strip()
    assert between in ("", "</think>", "<|channel|>final<|message|>")
    assert bool(between) == name.startswith(("Qwen3.5", "deepseek", "openai"))
    if "<think>" in TEMPLATES[name] or "openai" in name:
        thought = text_of(name, [ASKED, {**begun, "reasoning_content": "Hm."}], continues=True)
        assert "Hm." in thought and thought.endswith(begun["content"])
    ended = text_of(name, [ASKED], add_generation_prompt=False)
    assert ended != prompt or name.lower().startswith("mistral")


def test_what_is_continued():
    said = {"role": "assistant", "content": "a"}
    called = {**said, "tool_calls": [call("x", "Bonn")]}
    assert continues_last([ASKED, said], None, None) and continues_last([said], True, False)
    for messages, flags in (
        ([ASKED], (None, None)), ([called], (None, None)), ([said], (None, True)),
        ([said], (None, False)), ([said], (False, None)), ([], (None, None)),
    ):  # fmt: skip
        assert not continues_last(messages, *flags)
    for messages, flags in (
        ([said], (True, True)),
        ([ASKED], (True, None)),
        ([called], (True, None)),
    ):
        with pytest.raises(SparseKVError, match="continue_final_message"):
            continues_last(messages, *flags)


def test_arguments_that_are_texts_are_json():
    text = text_of("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", [
        ASKED, {"role": "assistant", "content": "", "tool_calls": [call("a", 'Bonn "D"')]},
    ])  # fmt: skip
    assert json.dumps({"city": 'Bonn "D"'}) in text
