"""A prompt that only grew keeps its beginning: with every template, for four kinds of agents."""

import itertools
import random
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from conversations import AGENTS, PLAIN, TOOL_LOOP, TOOLS, called, requests, result, said
from tiny_vocabularies import bpe_metadata

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import encode_messages
from sparsekv_cli.models.chat.fitting import lasting
from sparsekv_cli.models.chat.fitting.fitted import fitted
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "templates"
TOKENIZER = load_tokenizer(bpe_metadata())
# Turns must alternate, and the system's text stands before the first user's (Gemma 3).
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Tools are a JSON text in a field of the system message (Phi-4-mini).
IN_SYSTEM = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'system' and m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES: dict[str, str | None] = {
    **{path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.jinja"))},
    "none": None, "alternating": ALTERNATING, "in system": IN_SYSTEM,
}  # fmt: skip
# The templates that change an earlier turn, and the first text that is another one then.
OWN_REASONS = {
    "mistralai-Mistral-Nemo": r"\[?AVAILABLE_TOOLS\]",  # tools are before the last user's text
    "Mistral-Small": r"\[?AVAILABLE_TOOLS\]",
    "Qwen-Qwen3-0.6B": r"<?t?hink>\n|<think>\n",  # only the last turn keeps its thinking
    "Qwen3.5": r"<?t?hink>\n|<think>\n",
    "deepseek": r"<?t?hink>\n\Z|<think>\n\Z|think>\n\Z",  # the prompt opens the thinking
    "google-gemma-4": r"<?\|?channel\|?>",  # the prompt closes the thinking; one turn's stays
    "openai": r"<\|channel\|>analysis",  # a final answer removes the thinking before calls
}


def ids_of(name: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return encode_messages(TOKENIZER, TEMPLATES[name], messages, **options)


def text_of(ids: list[int]) -> str:
    return b"".join(map(TOKENIZER.token_bytes, ids)).decode(errors="replace")


def lost(before: list[int], after: list[int]) -> str:
    """The end of a prompt that the next one does not begin with."""
    pairs = enumerate(zip(before, after, strict=False))
    n_same = next((i for i, (x, y) in pairs if x != y), min(len(before), len(after)))
    return text_of(before[n_same:])


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_that_grew_keeps_its_beginning(name: str, agent: str) -> None:
    """What is lost begins with the template's own reason."""
    tools = None if agent == "plain" else TOOLS
    prompts = [ids_of(name, each, tools=tools) for each in requests(AGENTS[agent])]
    reason = next((r for start, r in OWN_REASONS.items() if name.startswith(start)), "(?!)")
    ends = [lost(before, after) for before, after in itertools.pairwise(prompts)]
    assert [each for each in ends if each and not re.match(reason, each)] == []
    if agent == "plain" and not name.startswith(("Qwen3.5", "deepseek", "google-gemma-4")):
        assert not any(ends)


@pytest.mark.parametrize("name", [n for n in TEMPLATES if "gpt-oss" not in n])
def test_roles_in_any_order(name: str) -> None:
    """Nothing is refused, and no text is lost. gpt-oss drops thoughts before a final answer."""
    chance = random.Random(name)
    for trial in range(12):
        messages = _any_order(chance, trial)
        tools = chance.choice([None, TOOLS])
        text = text_of(ids_of(name, messages, tools=tools))
        for message in messages:
            assert message["content"] in text, messages
            for call in message.get("tool_calls", ()):
                assert call["function"]["arguments"]["path"] in text, messages
        assert not tools or "write_file" in text


def _any_order(chance: random.Random, trial: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i in range(chance.randint(1, 7)):
        word, turn = f"w{trial}x{i}.", 10 * trial + i
        kind = chance.choice(("system", "user", "assistant", "call", "result"))
        if kind == "call":
            messages.append(called(f"p{turn}", turn=turn, content=chance.choice(("", word))))
        elif kind == "result":
            messages.append(result(10 * trial + chance.randrange(i + 1), word))
        else:
            messages.append(said(kind, word))
    return messages


SYSTEM = [
    [
        said("system", "One."),
        said("user", "Two."),
        said("assistant", "Three."),
        said("user", "Four."),
    ],
    [
        said("user", "One."),
        said("assistant", "Two."),
        said("system", "Three."),
        said("user", "Four."),
    ],
    [said("user", "One."), said("system", "Two."), said("system", "Three.")],
    [said("system", "One."), said("system", "Two."), said("assistant", "Three.")],
    [said("system", "One.")],
    [said("assistant", "One."), said("user", "Two.")],
    [said("user", "One."), said("user", ""), said("user", "Three.")],
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_messages_stay_in_their_places(name: str) -> None:
    for messages in SYSTEM:
        text = text_of(ids_of(name, messages))
        places = [text.find(each["content"]) for each in messages if each["content"]]
        assert -1 not in places and places == sorted(places), messages


def test_what_a_template_refuses_is_told() -> None:
    refusing = "{{ raise_exception('Never.') }}"
    with pytest.raises(SparseKVError, match="does not take this conversation: Never"):
        encode_messages(TOKENIZER, refusing, [said("user", "Hi.")])
    picky = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No.') }}{% endif %}"
    )
    picky += "{{ m.role }}: {{ m.content }} {{ m.tool_calls }}\n{% endfor %}"
    text = text_of(encode_messages(TOKENIZER, picky, TOOL_LOOP))
    assert all(each["content"] in text for each in TOOL_LOOP)


def test_a_call_that_a_template_does_not_write() -> None:
    """It is a text in the family's own format; marks that the user writes are no tokens."""
    turns = [
        said("user", "<tool_call>"),
        called("a", "b", turn=1),
        result(1, "yy", 1),
        result(1, "xx"),
    ]
    written = {
        "none": '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>\n',
        "ibm-granite-granite-3.3-2B-Instruct": '<|tool_call|>[{"name": "read_file", "argu',
        "in system": '{"path": "b"}}]<|/tool_call|>',
        "LFM2-8B-A1B": '<|tool_call_start|>[read_file(path="a"), read_file(path="b")]<|tool_call_',
    }
    for name, words in written.items():
        text = text_of(ids_of(name, turns, tools=TOOLS))
        assert words in text, name
        assert text.index("xx") < text.index("yy"), "results are in the order of their calls"
    assert "<tool_response>\nxx\n</tool_response>\n<tool_response>\nyy\n" in text_of(
        ids_of("none", turns, tools=TOOLS)
    )


def test_the_date_stays_while_a_conversation_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that begins anew has the new date."""
    template = "{{ strftime_now('%d %H') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    now = datetime(2026, 2, 27, 23)

    class Clock:
        @staticmethod
        def now() -> datetime:
            return now

    monkeypatch.setattr(lasting, "datetime", Clock)
    first, *later = requests(PLAIN)
    started = encode_messages(TOKENIZER, template, first)
    assert text_of(started).startswith("27 23")
    now += timedelta(hours=2)
    for each in later:
        assert lost(started, encode_messages(TOKENIZER, template, each)) == ""
    assert text_of(encode_messages(TOKENIZER, template, first)).startswith("28 01")
    unknown = [said("user", "Never said."), said("assistant", "No."), said("user", "No?")]
    assert text_of(encode_messages(TOKENIZER, template, unknown)).startswith("28 01")


def test_tools_in_any_order_are_one_prompt() -> None:
    function = TOOLS[0]["function"]
    turned = {"function": dict(reversed(function.items())), "type": "function"}
    for name in ("Qwen-Qwen3-0.6B", "none"):
        ids = ids_of(name, TOOL_LOOP, tools=TOOLS)
        assert ids == ids_of(name, TOOL_LOOP, tools=[TOOLS[1], turned])
        another = {**TOOLS[0], "function": {**function, "description": "Other."}}
        assert ids != ids_of(name, TOOL_LOOP, tools=[another, TOOLS[1]])
    assert [each["function"]["name"] for each in lasting.in_one_order(TOOLS[::-1])] == [
        "read_file", "write_file",
    ]  # fmt: skip


def test_an_answer_that_goes_on_is_last() -> None:
    for name in TEMPLATES:
        for before in ([], [said("assistant", "One.")], [said("system", "One.")]):
            messages = [*before, said("assistant", "Two and")]
            text = text_of(ids_of(name, messages, continues=True))
            assert text.endswith("Two and"), name
            assert all(each["content"] in text for each in before)
    form = fitted(ALTERNATING, [said("assistant", "x")])
    assert [each["role"] for each in form.messages] == ["user", "assistant"]
