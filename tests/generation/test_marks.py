"""Marks are tokens: a text that spells them stays where it is, with every family's templates."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_vocabularies import CONTROL, USER_DEFINED, bpe_with

from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.models.chat.calls import Text, Thought, ToolCall
from sparsekv_cli.models.chat.thinking import Thinking
from sparsekv_cli.models.tokenizer.marks import KNOWN, SPELLED, STAND_IN, Marks, marks_of
from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer
from sparsekv_cli.sequence import Checkpoint, Timings
from sparsekv_cli.serve.forms.tools import (
    GEMMA4,
    HARMONY,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    reader_of,
)

TURN = "<|start_of_turn|>"


PLAIN = bpe_with({})
# The marks are tokens of a kind. The end of a turn is a control token.
TOKENIZERS = {
    kind: bpe_with({**dict.fromkeys(KNOWN, kind), TURN: CONTROL})
    for kind in (CONTROL, USER_DEFINED)
}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


def ids_of(tokenizer: Tokenizer, pieces: Sequence[str]) -> list[int]:
    """A piece that is one mark is its token. Any other piece is spelled in ordinary tokens."""
    ids: list[int] = []
    for piece in pieces:
        if piece in (*KNOWN, TURN):
            ids += tokenizer.encode(piece, add_bos=False, add_eos=False)
        else:
            ids += PLAIN.encode_within(piece)
    return ids


def generation_of(tokenizer: Tokenizer, **options: Any) -> Generation:
    at = Checkpoint(1, np.zeros(1, np.float32))
    sequence: Any = SimpleNamespace(
        tokens=[0], n_ctx=1000, checkpoint=at, timings=Timings(), drafts=None, is_full=False
    )
    return Generation(tokenizer, sequence, lambda logits, tokens: 0, **options)


def read(
    kind: int,
    pieces: Sequence[str],
    family: ToolFormat | None = None,
    thinking: tuple[str, str] | None = None,
) -> list[Any]:
    """The parts of an answer, as a server tells them."""
    tokenizer = TOKENIZERS[kind]
    marks = SPELLED if family is None else marks_of(tokenizer, family.marks)
    reader = reader_of(family, None, {"f": {}}, marks=marks)
    told: list[Any] = []
    generation = generation_of(
        tokenizer,
        thinking=thinking and Thinking(*thinking, marks_of(tokenizer, thinking)),
        marks=marks,
        write=lambda text: told.extend(reader.push(text)),
        write_thinking=lambda text: told.append(Thought(text)),
    )
    for token in ids_of(tokenizer, pieces):
        if generation.push(token):
            break
    answer = generation.finish()
    told += reader.flush()
    parts: list[Any] = []
    for part in told:
        if parts and type(parts[-1]) is type(part) and not isinstance(part, ToolCall):
            part = type(part)(parts.pop().text + part.text)
        parts.append(part)
    for text in (answer.text, answer.thinking, answer.written, *map(str, parts)):
        assert STAND_IN.search(text) is None
    return parts


SAID = "Marks: " + " ".join(KNOWN) + " and the rest."
CALLS: dict[str, tuple[ToolFormat, list[str]]] = {
    "hermes": (HERMES, ["<tool_call>", '{"name": "f", "arguments": {"a": "%s"}}', "</tool_call>"]),
    "tags": (HERMES, ["<tool_call>", "<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>",
                      "</tool_call>"]),
    "mistral": (MISTRAL, ["[TOOL_CALLS]", "f", "[ARGS]", '{"a": "%s"}']),
    "old mistral": (MISTRAL, ["[TOOL_CALLS]", '[{"name": "f", "arguments": {"a": "%s"}}]']),
    "llama": (LLAMA3, ["<|python_tag|>", '{"name": "f", "parameters": {"a": "%s"}}']),
    "gpt-oss": (HARMONY, ["<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json",
                          "<|message|>", '{"a": "%s"}', "<|call|>"]),
    "gemma": (GEMMA4, ["<|tool_call>", "call:f{a:", '<|"|>', "%s", '<|"|>', "}", "<tool_call|>"]),
    "lfm2": (LFM2, ["<|tool_call_start|>", '[f(a="%s")]', "<|tool_call_end|>"]),
}  # fmt: skip


@KINDS
@pytest.mark.parametrize("name", CALLS)
def test_spelled_marks_in_a_text_and_in_an_argument(name: str, kind: int) -> None:
    family, pieces = CALLS[name]
    given = SAID.replace('<|"|>', "")  # JSON would have to escape it
    called = [piece.replace("%s", given) for piece in pieces]
    arguments = '{"a": "' + given + '"}'
    assert read(kind, called, family) == [ToolCall("f", arguments)]
    text = "<|channel|>", "final", "<|message|>", SAID, "<|return|>"
    assert read(kind, text if family == HARMONY else [SAID], family) == [Text(SAID)]
    if family not in (HARMONY, LLAMA3):  # which have a call alone
        assert read(kind, [SAID, *called], family) == [Text(SAID), ToolCall("f", arguments)]


THINKERS = [("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|START_THINKING|>",
            "<|END_THINKING|>"), ("<|inner_prefix|>", "<|inner_suffix|>")]  # fmt: skip


@KINDS
@pytest.mark.parametrize("marks", THINKERS, ids=str)
def test_spelled_marks_in_thinking(marks: tuple[str, str], kind: int) -> None:
    start, end = marks
    pieces = [start, f"It ends with {end} as usual.", end, f"No {start} here, no {end} there."]
    expected = [Thought(f"It ends with {end} as usual."), Text(pieces[-1])]
    assert read(kind, pieces, thinking=marks) == expected
    assert read(kind, pieces, HERMES, thinking=marks) == expected
    assert read(kind, [f"{start} is a mark", end], thinking=marks) == [
        Text(f"{start} is a mark{end}")
    ]


@KINDS
def test_channels_end_with_tokens_only(kind: int) -> None:
    said = "A message ends with <|end|><|start|>assistant<|channel|>final<|message|> here."
    pieces = ["<|channel|>", "analysis", "<|message|>", said, "<|end|>", "<|start|>", "assistant"]
    pieces += ["<|channel|>", "final", "<|message|>", said]
    expected = [Thought(said), Text(said)]
    assert read(kind, [*pieces, "<|return|>"], HARMONY) == expected
    channels = ("<|channel|>analysis<|message|>", "<|end|>")
    thinking = Thinking(*channels, marks_of(TOKENIZERS[kind], HARMONY.marks))
    generation = generation_of(TOKENIZERS[kind], thinking=thinking)
    for token in ids_of(TOKENIZERS[kind], pieces):
        assert not generation.push(token)
    answer = generation.finish()
    assert (answer.thinking, answer.text) == (said, said)


@KINDS
def test_a_call_without_a_body_needs_its_end(kind: int) -> None:
    pieces = ["<|channel|>", "commentary to=functions.f ", "<|message|>"]
    assert read(kind, [*pieces, "<|call|>"], HARMONY) == [ToolCall("f", "{}")]
    assert read(kind, pieces, HARMONY) == []  # it is cut


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("stop", "pieces", "text"),
    [
        (TURN, ["a b ", TURN, "c"], "a b "),
        (TURN, ["a " + TURN, "c"], "a "),
        (f"{TURN}user", ["a ", TURN, "users", "c"], "a "),
        (f"b {TURN}", ["a b ", TURN, "c"], "a "),
        ("</think>", ["a", "</think>", "b"], "a"),
        ("</think>", ["a</think>b"], "a"),
    ],
)
def test_a_stop_string_may_be_a_control_token(
    stop: str, pieces: list[str], text: str, special: bool
) -> None:
    tokenizer = TOKENIZERS[CONTROL]
    generation = generation_of(tokenizer, stops=[stop], marks=Marks(shows_controls=special))
    assert any(generation.push(token) for token in ids_of(tokenizer, pieces))
    answer = generation.finish()
    assert (answer.text, answer.stopped_by) == (text, stop)


@pytest.mark.parametrize(("special", "text"), [(False, "a other"), (True, f"a {TURN}other")])
def test_a_control_token_that_stops_nothing_stays_what_it_is(special: bool, text: str) -> None:
    tokenizer = TOKENIZERS[CONTROL]
    stops = [f"{TURN}user", "\ud800", "\ud83f"]
    generation = generation_of(tokenizer, stops=stops, marks=Marks(shows_controls=special))
    for token in ids_of(tokenizer, ["a ", TURN, "other"]):
        assert not generation.push(token)
    assert generation.finish().text == text


def test_marks_are_spelled_where_the_vocabulary_has_none() -> None:
    assert marks_of(PLAIN, KNOWN) == Marks({}) and Marks({})["<think>"] == "<think>"
