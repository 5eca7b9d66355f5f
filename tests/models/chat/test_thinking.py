"""Thinking: which markers a template has, how a text is split at them, who opened it."""

from pathlib import Path
from typing import Any

import pytest

from sparsekv_cli.models.chat.template import render
from sparsekv_cli.models.chat.thinking import (
    Thinking,
    ThinkingSplitter,
    switch_of,
    thinking_of,
    without_thinking,
)
from sparsekv_cli.models.tokenizer.marks import Marks

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
THINK = Thinking("<think>", "</think>")


class Characters:
    """A token a character; the markers in brackets are control tokens of their own."""

    controls = ("[THINK]", "[/THINK]")

    def encode(self, text: str, **_: Any) -> list[int]:
        return [2000 + self.controls.index(text)] if text in self.controls else list(map(ord, text))

    def is_shown(self, token: int) -> bool:
        return token < 2000

    def token_bytes(self, token: int) -> bytes:
        return (chr(token) if token < 2000 else self.controls[token - 2000]).encode()


def split(text: str, *, n: int, is_open: bool = False) -> tuple[str, str]:
    """What n characters at a time give."""
    splitter = ThinkingSplitter(THINK, is_open=is_open)
    parts = [splitter.push(text[i : i + n]) for i in range(0, len(text), n)] + [splitter.flush()]
    thought, answer = zip(*parts, strict=True)
    return "".join(thought), "".join(answer)


@pytest.mark.parametrize("n", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        ("<think>\nhm, a < b\n</think>\n\nSo it is.\n", False, "hm, a < b", "So it is.\n"),
        (" \n<think></think>Yes", False, "", "Yes"),
        ("first\n\nthen</think>  then", True, "first\n\nthen", "then"),
        ("never ends </thi\n", False, "", "never ends </thi\n"),
        ("cut \n off </thi\n", True, "cut \n off </thi", ""),
        ("<b>No</b> <think>x</think>", False, "", "<b>No</b> <think>x</think>"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("\n <thin", False, "", "\n <thin"),
        ("", False, "", ""),
    ],
)
def test_split(text, is_open, thought, answer, n):
    assert split(text, n=n, is_open=is_open) == (thought, answer)


def test_without_thinking():
    assert without_thinking(THINK, "<think>\na</think>\n\nb") == "b"
    assert without_thinking(THINK, "a </think>") == "a </think>"
    assert without_thinking(None, "<think>a</think>b") == "<think>a</think>b"


@pytest.mark.parametrize(
    ("name", "start", "switch"),
    [
        ("Qwen-Qwen3-0.6B", "<think>", "enable_thinking"),
        ("HuggingFaceTB-SmolLM3-3B", "<think>", "enable_thinking"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<think>", None),
        ("google-gemma-4-31B-it", "<|channel>thought", "enable_thinking"),
        ("ibm-granite-granite-3.3-2B-Instruct", "<think>", "thinking"),
        ("meta-llama-Llama-3.1-8B-Instruct", None, None),
    ],
)
def test_real_templates(name, start, switch):
    template = (TEMPLATES / f"{name}.jinja").read_text("utf-8")
    thinking = thinking_of(template, Characters())  # type: ignore[arg-type]
    assert (thinking and thinking.start, switch_of(template)) == (start, switch)


def test_control_tokens_and_who_opened_it():
    tokenizer: Any = Characters()
    template = "{{ '[THINK]' }}{% if thinking %}x{% endif %}{{ messages[0].thinking }}"
    thinking = thinking_of(template, tokenizer)
    assert thinking == Thinking("[THINK]", "[/THINK]", Marks({"[THINK]": 2000, "[/THINK]": 2001}))
    assert switch_of(template) == "thinking"
    assert switch_of("{{ messages[0].thinking }} {% set enable_thinking = 1 %}") is None
    assert thinking.opened_by(tokenizer, [65, 2000, 10]) == "[THINK]\n"
    assert thinking.opened_by(tokenizer, [2000, 65, 10]) == ""
    assert thinking.opened_by(tokenizer, []) == ""


def test_the_switch_of_a_real_template_closes_the_thinking():
    messages = [{"role": "user", "content": "Hi"}]
    template = (TEMPLATES / "Qwen-Qwen3-0.6B.jinja").read_text("utf-8")
    off = render(template, messages, **{"enable_thinking": False})
    assert off.endswith("<think>\n\n</think>\n\n") and "<think>" not in render(template, messages)
    assert THINK.opened_by(Characters(), list(map(ord, off))) == ""  # type: ignore[arg-type]


CHANNELS = (
    "<|channel|>analysis<|message|>hm, a < b<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Wait. <|end|><|start|>assistant<|channel|>final<|message|>So it is.<|return|>"
)


@pytest.mark.parametrize("n", [1, 3, 1000])
def test_the_channel_of_analysis_is_thinking(n):
    template = (TEMPLATES / "openai-gpt-oss-120b.jinja").read_text()
    thinking = thinking_of(template, Characters())  # type: ignore[arg-type]
    assert thinking is not None and thinking.is_channel
    splitter = thinking.splitter(is_open=False)
    pieces = [CHANNELS[i : i + n] for i in range(0, len(CHANNELS), n)]
    parts = [splitter.push(piece) for piece in pieces] + [splitter.flush()]
    assert tuple(map("".join, zip(*parts, strict=True))) == ("hm, a < b", "Wait. So it is.")
    assert without_thinking(thinking, CHANNELS) == "Wait. So it is."
    asked, answered = ({"role": role, "content": CHANNELS} for role in ("user", "assistant"))
    plain = {**answered, "content": without_thinking(thinking, CHANNELS)}
    assert "final<|message|>Wait. So it is.<|end|>" in render(template, [asked, plain, asked])
