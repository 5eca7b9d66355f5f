"""What the models of each family write when their calls are a little off."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparsekv_cli.models.chat.calls import ToolCall
from sparsekv_cli.models.tokenizer.marks import SPELLED, Marks
from sparsekv_cli.serve.forms.tools import (
    DEEPSEEK,
    GEMMA4,
    GRANITE,
    HARMONY,
    HERMES,
    LFM2,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    reader_of,
)

FUNCTIONS: dict[str, Any] = {
    "save": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "n": {"type": "integer"},
            "on": {"type": "boolean"},
            "lines": {"type": "array", "items": {"type": "integer"}},
        },
    },
    "now": {"type": "object", "properties": {}},
    "patch": {"type": "object", "properties": {"input": {"type": "string"}}},
    "read-file": {},
    "mcp.read": {},
}
SAVE, NOW = ("save", {"path": "a"}), ("now", {})
BODY = '{"name": "save", "arguments": {"path": "a"}}'
TAGS = "<function=save>\n<parameter=path>\na\n</parameter>\n</function>"
BEGIN, END = "<tool_call>", "</tool_call>"
CHANNEL = "<|channel|>commentary to=functions."
SEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
SEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

# The format, what the model writes, the texts and calls in it.
CASES: list[tuple[ToolFormat, str, list[Any]]] = [
    # Hermes, Qwen: JSON between marks.
    (HERMES, f"{BEGIN}\n{BODY}", [SAVE]),
    (HERMES, f"{BEGIN}{BODY} Done.", [SAVE, " Done."]),
    (HERMES, f"{BODY}\n{END}", [SAVE]),
    (HERMES, f"I save it.\n{BODY}", ["I save it.\n", SAVE]),
    (HERMES, f"{BODY}\nDone.", [SAVE, "\nDone."]),
    (HERMES, f"I save it.\n```json\n{BODY}\n```", ["I save it.\n", SAVE]),
    (HERMES, f"```json\n{BEGIN}\n{BODY}\n{END}\n```", ["```json\n", SAVE, "\n```"]),
    (HERMES, f"{BEGIN}\n```json\n{BODY}\n```\n{END}", [SAVE]),
    (HERMES, f"<tools>\n{BODY}\n</tools>", [SAVE]),
    (HERMES, f"Yes.\n<tools>\n{BODY}\n</tools>", ["Yes.\n", SAVE]),
    (HERMES, f"{BEGIN}{BODY}}}{END}", [SAVE]),
    (HERMES, f"{BEGIN}{{{BODY}}}{END}", [SAVE]),
    (HERMES, f"{BEGIN}{BODY[:-1]}{END} b", [SAVE, " b"]),
    (HERMES, f"{BEGIN}{BODY[:-2]}{END}", [SAVE]),
    (HERMES, f"{BEGIN}{BODY}\n{BODY}{END}", [SAVE, SAVE]),
    (HERMES, f"{BEGIN}[{BODY}, {BODY}]{END}", [SAVE, SAVE]),
    (HERMES, f"{BEGIN}{BODY}\n{BEGIN}{BODY}{END}", [SAVE, SAVE]),
    (HERMES, f"{BEGIN}{BODY}{END}{END}", [SAVE]),
    (HERMES, f"a {BEGIN}{BODY}{END} b {BEGIN}{BODY}{END} c", ["a ", SAVE, " b ", SAVE, " c"]),
    (HERMES, f'{BEGIN}{{"name": "now"}}{END}', [NOW]),
    (HERMES, f'{BEGIN}{{"name": "now", "arguments": null}}{END}', [NOW]),
    (HERMES, f'{BEGIN}{{"name": "now", "arguments": ""}}{END}', [NOW]),
    (HERMES, f'{BEGIN}{{"name": "now", "arguments": []}}{END}', [NOW]),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": "{{\\"path\\": \\"a\\"}}"}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"name": "save", "parameters": {{"path": "a"}}}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"Name": "save", "Arguments": {{"path": "a"}}}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"arguments": {{"path": "a"}}, "name": "save"}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"name": "save", "path": "a"}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"type": "function", "function": {BODY}}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"function": "save", "arguments": {{"path": "a"}}}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"tool_calls": [{BODY}]}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": {{"path": "a\n\tb"}}}}{END}',
     [("save", {"path": "a\n\tb"})]),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": {{"path": "a",}},}}{END}', [SAVE]),
    (HERMES, f"{BEGIN}{{'name': 'save', 'arguments': {{'path': 'it\\'s', 'on': True}}}}{END}",
     [("save", {"path": "it's", "on": True})]),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": {{"path": """a "b" c"""}}}}{END}',
     [("save", {"path": 'a "b" c'})]),
    (HERMES, f'{BEGIN}{{"name": "read-file", "arguments": {{"x": None}}}}{END}',
     [("read-file", {"x": None})]),
    (HERMES, f'{BEGIN}{{"name": "read_file", "arguments": {{}}}}{END}', [("read-file", {})]),
    (HERMES, f'{BEGIN}{{"name": "functions.save", "arguments": {{"path": "a"}}}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"name": "Save ", "arguments": {{"path": "a"}}}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}{{"name": "other", "arguments": {{}}}}{END}', [("other", {})]),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": {{"n": "5", "on": "true", "path": 7, '
     f'"lines": ["1", 2]}}}}{END}',
     [("save", {"n": 5, "on": True, "path": "7", "lines": [1, 2]})]),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": {{"n": "5 x", "path": {{"a": 1}}}}}}{END}',
     [("save", {"n": "5 x", "path": '{"a": 1}'})]),
    (HERMES, f'{BEGIN}save\n{{"path": "a"}}{END}', [SAVE]),
    (HERMES, f'{BEGIN}save(path="a"){END}', [SAVE]),
    # The only argument of a function is a text: it is written alone.
    (HERMES, f'{BEGIN}{{"name": "patch", "arguments": "*** Begin\\n+ a"}}{END}',
     [("patch", {"input": "*** Begin\n+ a"})]),
    (HERMES, f'{BEGIN}{{"name": "patch", "input": "*** Begin"}}{END}',
     [("patch", {"input": "*** Begin"})]),
    (HERMES, f'{BEGIN}{{"name": "patch", "arguments": "[1, 2]"}}{END}',
     [("patch", {"input": "[1, 2]"})]),
    (HERMES, f'{BEGIN}{{"name": "now", "arguments": "a"}}{END}',
     [f'{BEGIN}{{"name": "now", "arguments": "a"}}{END}']),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": "a"}}{END}',
     [f'{BEGIN}{{"name": "save", "arguments": "a"}}{END}']),
    (HERMES, f'{BEGIN}{{"name": "patch", "arguments": 5}}{END}',
     [f'{BEGIN}{{"name": "patch", "arguments": 5}}{END}']),
    # No calls: texts, and the calls after them.
    (HERMES, f"The mark {BEGIN} begins one. {BEGIN}{BODY}{END}",
     [f"The mark {BEGIN} begins one. ", SAVE]),
    (HERMES, f"{BEGIN}{END}", [f"{BEGIN}{END}"]),
    (HERMES, f"A call:\n{BODY}\nThat is how.", [f"A call:\n{BODY}\nThat is how."]),
    (HERMES, '```json\n{"a": 1}\n```', ['```json\n{"a": 1}\n```']),
    (HERMES, '{"name": "Ann", "age": 3}', ['{"name": "Ann", "age": 3}']),
    (HERMES, f'{BEGIN}{{"name": "save", "x": 1}}{END}',
     [f'{BEGIN}{{"name": "save", "x": 1}}{END}']),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": {{"path": "a',
     [f'{BEGIN}{{"name": "save", "arguments": {{"path": "a']),
    (HERMES, f'{BEGIN}{{"name": "save", "arguments": {{"n": 1',
     [f'{BEGIN}{{"name": "save", "arguments": {{"n": 1']),
    # Qwen3-Coder, Qwen3.5: tags.
    (HERMES, TAGS, [SAVE]),
    (HERMES, f"I save it.\n\n{TAGS}\n{END}", ["I save it.\n\n", SAVE]),
    (HERMES, f"I save it: {TAGS} Done.", ["I save it: ", SAVE, " Done."]),
    (HERMES, f"{TAGS}\n{TAGS}", [SAVE, SAVE]),
    (HERMES, f"{BEGIN}\n{TAGS}\n{TAGS}\n{END}", [SAVE, SAVE]),
    (HERMES, f"{BEGIN}\n{TAGS}", [SAVE]),
    (HERMES, "<function=now></function>", [NOW]),
    (HERMES, "<function=save><parameter=path>a</parameter><parameter=n>5</parameter></function>",
     [("save", {"path": "a", "n": 5})]),
    (HERMES, '<function name="save"><parameter name="path">a</parameter></function>', [SAVE]),
    (HERMES, '<function=save>{"path": "a"}</function>', [SAVE]),
    (HERMES, f"<function=read-file>\n<parameter=x>\n{END}\n</parameter>\n</function>",
     [("read-file", {"x": END})]),
    (HERMES, "Write `<function=save>` first.", ["Write `<function=save>` first."]),
    (HERMES, "<function=save> begins it.", ["<function=save> begins it."]),
    (HERMES, "<function=other>\n</function>", ["<function=other>\n</function>"]),
    # Llama 3: an object alone.
    (LLAMA3, '{"name": "save", "parameters": {"path": "a"}}', [SAVE]),
    (LLAMA3, '<|python_tag|>{"name": "save", "arguments": {"path": "a"}}', [SAVE]),
    (LLAMA3, '{"type": "function", "name": "save", "parameters": {"path": "a"}}', [SAVE]),
    (LLAMA3, '{"name": "save", "parameters": {"path": "a"}}\nDone.', [SAVE, "\nDone."]),
    (LLAMA3, 'Well:\n{"name": "save", "parameters": {"path": "a"}}', ["Well:\n", SAVE]),
    (LLAMA3, '{"name": "now", "parameters": null}; {"name": "now"}', [NOW, NOW]),
    (LLAMA3, '{"name": "save", "parameters": {"path": "a"}}}', [SAVE]),
    (LLAMA3, '{"name": "patch", "parameters": "a"}', [("patch", {"input": "a"})]),
    (LLAMA3, '{"name": "save", "parameters": {"n": "5"}}', [("save", {"n": 5})]),
    (LLAMA3, '<function=save>{"path": "a"}</function>', [SAVE]),
    (LLAMA3, '<|python_tag|>save(path="a")', [SAVE]),
    (LLAMA3, '[save(path="a"), now()]', [SAVE, NOW]),
    (LLAMA3, '{"name": "other", "parameters": {}}', [("other", {})]),
    (LLAMA3, '{"name": "Ann", "age": 3}', ['{"name": "Ann", "age": 3}']),
    (LLAMA3, '{"name": "Ann"}', ['{"name": "Ann"}']),
    (LLAMA3, "It ends with <|eot_id|> here.<|eot_id|>", ["It ends with <|eot_id|> here."]),
    (LLAMA3, "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    # Mistral, in both forms.
    (MISTRAL, f"[TOOL_CALLS][{BODY}]", [SAVE]),
    (MISTRAL, f"[TOOL_CALLS]{BODY}", [SAVE]),
    (MISTRAL, f"[TOOL_CALLS] [{BODY}] Done.", [SAVE, " Done."]),
    (MISTRAL, f"[TOOL_CALLS][{BODY}", [f"[TOOL_CALLS][{BODY}"]),
    (MISTRAL, f"[TOOL_CALLS][{BODY}][TOOL_CALLS][{BODY}]", [SAVE, SAVE]),
    (MISTRAL, '[TOOL_CALLS]save[ARGS]{"path": "a"}', [SAVE]),
    (MISTRAL, '[TOOL_CALLS]save{"path": "a"}', [SAVE]),
    (MISTRAL, '[TOOL_CALLS]save[CALL_ID]abc123def[ARGS]{"path": "a"}', [SAVE]),
    (MISTRAL, '[TOOL_CALLS]read-file[ARGS]{}[TOOL_CALLS]mcp.read[ARGS]{"x": "a\n"}',
     [("read-file", {}), ("mcp.read", {"x": "a\n"})]),
    (MISTRAL, 'save[ARGS]{"path": "a"}', [SAVE]),
    (MISTRAL, f"Yes.\n[{BODY}]", ["Yes.\n", SAVE]),
    (MISTRAL, f"The mark [TOOL_CALLS] begins calls. [TOOL_CALLS][{BODY}]",
     ["The mark [TOOL_CALLS] begins calls. ", SAVE]),
    (MISTRAL, "It ends with </s> here.</s>", ["It ends with </s> here."]),
    # gpt-oss: a message to a function.
    (HARMONY, f"{CHANNEL}now <|constrain|>json<|message|><|call|>", [NOW]),
    (HARMONY, f"{CHANNEL}now<|message|>null<|call|>", [NOW]),
    (HARMONY, f"{CHANNEL}now<|message|>{{}}", [NOW]),
    (HARMONY, f'{CHANNEL}save <|constrain|>json<|message|>{{"path": "a\n"}}<|call|>',
     [("save", {"path": "a\n"})]),
    (HARMONY, f"{CHANNEL}save json<|message|>{{'path': 'a',}}<|call|>", [SAVE]),
    (HARMONY, f'{CHANNEL}save<|message|>```json\n{{"path": "a"}}\n```<|call|>', [SAVE]),
    (HARMONY, f'{CHANNEL}save<|message|>{{"path": "a"}}}}<|call|>', [SAVE]),
    (HARMONY, f'{CHANNEL}read-file<|message|>{{}}<|call|>', [("read-file", {})]),
    (HARMONY, f'{CHANNEL}mcp.read<|message|>{{}}<|call|>', [("mcp.read", {})]),
    (HARMONY, ' to=functions.save<|channel|>commentary json<|message|>{"path": "a"}<|call|>',
     [SAVE]),
    (HARMONY, '<|channel|>analysis to=functions.save<|message|>{"path": "a"}<|call|>', [SAVE]),
    (HARMONY, f'{CHANNEL}save<|message|>{{"n": "5"}}<|call|>', [("save", {"n": 5})]),
    (HARMONY, f'{CHANNEL}save<|message|>{{"path": "a"}}<|call|><|start|>assistant{CHANNEL}now'
     '<|message|>{}<|call|>', [SAVE, NOW]),
    (HARMONY, f'{CHANNEL}save<|message|>{{"path": "<|call|>"}}<|call|>',
     [("save", {"path": "<|call|>"})]),
    (HARMONY, f"{CHANNEL}save<|message|>nonsense<|call|>", ["nonsense"]),
    (HARMONY, "Just a text.", ["Just a text."]),
    (HARMONY, "<|channel|>final<|message|>A message ends with <|end|> and a turn with <|return|>.",
     ["A message ends with <|end|> and a turn with <|return|>."]),
    # Gemma 4.
    (GEMMA4, '<|tool_call>call:save{path:<|"|>a<|"|>}<tool_call|>', [SAVE]),
    (GEMMA4, '<|tool_call>:save{path:<|"|>a<|"|>}<tool_call|>', [SAVE]),
    (GEMMA4, '<|tool_call>call:save{"path": "a"}<tool_call|>', [SAVE]),
    (GEMMA4, '<|tool_call>call:save{path:<|"|>a<|"|>}', [SAVE]),
    (GEMMA4, '<|tool_call>call:save{path:<|"|>a<|"|>}<tool_call|>Done.<turn|>', [SAVE, "Done."]),
    (GEMMA4, 'Yes.\ncall:save{path:<|"|>a<|"|>}<tool_call|>', ["Yes.\n", SAVE]),
    (GEMMA4, '<|tool_call>call:save{path:<|"|>a\n<tool_call|><|"|>,on:true,}<tool_call|>',
     [("save", {"path": "a\n<tool_call|>", "on": True})]),
    (GEMMA4, "<|tool_call>call:now{}<tool_call|><|tool_call>call:read-file{}<tool_call|>",
     [NOW, ("read-file", {})]),
    (GEMMA4, f"<|tool_call>{BODY}<tool_call|>", [SAVE]),
    (GEMMA4, "I call: him.", ["I call: him."]),
    # LFM2.
    (LFM2, '<|tool_call_start|>[save(path="a")]<|tool_call_end|>', [SAVE]),
    (LFM2, '<|tool_call_start|>save(path="a")<|tool_call_end|>', [SAVE]),
    (LFM2, '<|tool_call_start|>[save(path="a")]', [SAVE]),
    (LFM2, '[save(path="a")]<|tool_call_end|>', [SAVE]),
    (LFM2, '[save(path="a"), now()]', [SAVE, NOW]),
    (LFM2, '<|tool_call_start|>[read-file(x="a"), mcp.read()]<|tool_call_end|>',
     [("read-file", {"x": "a"}), ("mcp.read", {})]),
    (LFM2, '<|tool_call_start|>[save(path="a\n", on=true, n="5",)]<|tool_call_end|>',
     [("save", {"path": "a\n", "on": True, "n": 5})]),
    (LFM2, f"<|tool_call_start|>[{BODY}]<|tool_call_end|> Done.", [SAVE, " Done."]),
    (LFM2, "[save] is a link.", ["[save] is a link."]),
    # Granite 3.3 and Phi-4-mini.
    (GRANITE, f"<|tool_call|>[{BODY}]", [SAVE]),
    (GRANITE, f"<|tool_call|>{BODY}", [SAVE]),
    (GRANITE, f"<|tool_call|>[{BODY}, {BODY}]<|end_of_text|>", [SAVE, SAVE]),
    (GRANITE, f"<|tool_call|>[{BODY}]<|/tool_call|>", [SAVE]),
    (GRANITE, f"functools[{BODY}]", [SAVE]),
    (GRANITE, f"[{BODY}]", [SAVE]),
    (GRANITE, f"Yes. <|tool_call|>[{BODY}]", ["Yes. ", SAVE]),
    (GRANITE, "<tool_call>[" + BODY + "]", [SAVE]),
    (GRANITE, "The mark <|tool_call|> begins calls.", ["The mark <|tool_call|> begins calls."]),
    # DeepSeek R1's distills.
    (DEEPSEEK, f'{SEEK}save\n```json\n{{"path": "a"}}\n```{SEEK_END}', [SAVE]),
    (DEEPSEEK, f'{SEEK}save\n{{"path": "a"}}{SEEK_END}', [SAVE]),
    (DEEPSEEK, '<｜tool▁call▁begin｜>save<｜tool▁sep｜>{"path": "a"}<｜tool▁call▁end｜>', [SAVE]),
    (DEEPSEEK, f'{SEEK}save\n```json\n{{"path": "a"}}\n```<｜tool▁call▁end｜>\n'
     "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```" + SEEK_END, [SAVE, NOW]),
]  # fmt: skip


def told_of(kind: ToolFormat, written: str, size: int, marks: Marks = SPELLED) -> list[Any]:
    """What a reader tells of an answer that comes in pieces of a size."""
    reader = reader_of(kind, None, FUNCTIONS, marks=marks)
    pieces = [written[i : i + size] for i in range(0, len(written), size)]
    parts = [part for piece in pieces for part in reader.push(piece)] + [*reader.flush()]
    found: list[Any] = []
    for part in parts:
        if isinstance(part, ToolCall):
            found.append((part.name, json.loads(part.arguments)))
        elif found and isinstance(found[-1], str):
            found[-1] += part.text
        else:
            found.append(part.text)
    return found


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("kind", "written", "told"), CASES)
def test_calls_that_are_off(kind: ToolFormat, written: str, told: list[Any], size: int) -> None:
    assert told_of(kind, written, size) == told
    marks = Marks({mark: i for i, mark in enumerate(kind.marks)})
    is_spelled = any(mark in written for mark in SPELLED_ONLY)
    if not is_spelled:  # as tokens
        assert told_of(kind, marks[written], size, marks) == told


# In the text of an answer they are spellings, and at its end they are never tokens of a text.
SPELLED_ONLY = ("<|eot_id|>", "</s>", "<|return|>", "<turn|>", "<|end_of_text|>")


def test_spelled_calls_are_texts_if_their_marks_are_tokens() -> None:
    for kind, written in (
        (HERMES, f"A call is {BEGIN}{BODY}{END} there."),
        (HERMES, f"A call:\n{BEGIN}\n{BODY}\n{END}\nThat is it."),
        (HERMES, f"A call:\n{BEGIN}\n{TAGS}\n{END}\nThat is it."),
        (MISTRAL, f"A call is [TOOL_CALLS][{BODY}] there."),
        (LFM2, 'A call is <|tool_call_start|>[save(path="a")]<|tool_call_end|> there.'),
        (GRANITE, f"A call is <|tool_call|>[{BODY}] there."),
        (GEMMA4, 'Such: <|tool_call>call:save{path:<|"|>a<|"|>}<tool_call|> there.'),
    ):
        marks = Marks({mark: i for i, mark in enumerate(kind.marks)})
        for size in (1, 3, 1000):
            assert told_of(kind, written, size, marks) == [written]
