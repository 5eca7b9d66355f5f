"""Conversations with pictures, documents and blocks of other services, in the three protocols."""

import base64
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation import parts
from sparsekv_cli.generation.fields import FieldError
from sparsekv_cli.generation.messages import read_messages
from sparsekv_cli.serve.anthropic import _conversation
from sparsekv_cli.serve.forms.items import read_items
from sparsekv_cli.serve.forms.schema import CountFields
from sparsekv_cli.serve.forms.volatile import HEADERS, VolatileHeaders

Read = Callable[[list[Any]], list[dict[str, Any]]]
PNG = base64.b64encode(bytes(12_000)).decode()
TEXT = base64.b64encode("Grüße.\n".encode()).decode()
ANSWER = {"role": "assistant", "content": "Yes."}
ASKED = {"role": "user", "content": "And now?"}


def claude(messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    volatile = VolatileHeaders(HEADERS, Counter())
    return _conversation(CountFields(messages=messages, **fields), volatile)


def source(kind: str, media: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "source": {"type": "base64", "media_type": media, **more}}


PICTURES: list[tuple[Read, dict[str, Any], str]] = [
    (read_messages, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
     "[image left out: image/png, 12 KB]"),
    (read_messages, {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}},
     "[image left out: https://x.org/a.png]"),
    (read_messages, {"type": "input_audio", "input_audio": {"data": PNG, "format": "wav"}},
     "[audio left out: wav, 12 KB]"),
    (read_messages, {"type": "video_url", "video_url": {"url": "https://x.org/a.mp4"}},
     "[video left out: https://x.org/a.mp4]"),
    (read_items, {"type": "input_image", "image_url": f"data:image/jpeg;base64,{PNG}"},
     "[image left out: image/jpeg, 12 KB]"),
    (read_items, {"type": "input_image", "file_id": "file-1"}, "[image left out: file-1]"),
    (claude, source("image", "image/png", data=PNG), "[image left out: image/png, 12 KB]"),
    (claude, {"type": "image", "source": {"type": "url", "url": "https://x.org/a"}},
     "[image left out: https://x.org/a]"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "part", "line"), PICTURES, ids=[str(i) for i in range(8)])
def test_a_picture_of_an_earlier_turn_is_a_line(read: Read, part: Any, line: str) -> None:
    """A new one is refused, and the next question is not."""
    kind = "input_text" if read is read_items else "text"
    asked = {"role": "user", "content": [{"type": kind, "text": "See:"}, part]}
    told = read([asked, ANSWER, ASKED])
    assert [each["content"] for each in told] == [f"See:\n{line}", "Yes.", "And now?"]
    assert read([asked, ASKED])[0]["content"] == f"See:\n{line}"
    with pytest.raises(FieldError, match="pictures, sounds and videos are not read"):
        read([ASKED, asked])


def test_results_of_tools_hold_anything() -> None:
    shown = [
        {"type": "text", "text": "Read:"},
        source("image", "image/png", data=PNG),
        {"type": "document", "title": "A", "source": {"type": "text", "data": "One."}},
        {"type": "search_result", "source": "https://x", "title": "B",
         "content": [{"type": "text", "text": "Two."}], "citations": {"enabled": True}},
        {"type": "tool_reference", "tool_name": "f"},
    ]  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": "a", "content": shown}
    picture = source("image", "image/png", data=PNG)
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    turns = [ASKED, {"role": "assistant", "content": [called]}]
    told = claude([*turns, {"role": "user", "content": [result, picture]}])[2:]
    lines = told[0]["content"].split("\n")
    assert lines[:4] == ["Read:", "[image left out: image/png, 12 KB]", "[document: A]", "One."]
    assert lines[4].startswith("[search_result: https://x, B, ") and lines[5] == "Two."
    assert lines[6:] == ["tool: f"]
    assert told[1]["content"] == "[image left out: image/png, 12 KB]"
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    output = [{"type": "input_text", "text": "x"}, {"type": "input_image", "file_id": "i"}]
    output.append({"type": "input_file", "filename": "a.txt", "file_data": TEXT})
    told = read_items([call, {"type": "function_call_output", "call_id": "a", "output": output}])
    assert told[1]["content"] == "x\n[image left out: i]\n[document: a.txt]\nGrüße.\n"
    seen = [{"type": "image_url", "image_url": {"url": "https://x"}}]
    told = read_messages([ASKED, {"role": "tool", "tool_call_id": "a", "content": seen}])
    assert told[1]["content"] == "[image left out: https://x]"


def test_blocks_of_other_services() -> None:
    found = {
        "type": "web_search_result",
        "url": "https://x",
        "title": "T",
        "encrypted_content": "e",
    }
    said = [
        {"type": "text", "text": "I look."},
        {"type": "redacted_thinking", "data": "zzz"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "t",
         "content": {"type": "bash_code_execution_result", "stdout": "5\n", "return_code": 0}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False,
         "content": [{"type": "text", "text": "M."}]},
        {"type": "container_upload", "file_id": "file_1"},
        {"type": "of tomorrow", "data": "x" * 5000},
        {"type": "text", "text": "Done."},
    ]  # fmt: skip
    told = claude([ASKED, {"role": "assistant", "content": said}, ASKED])[1]["content"]
    assert told.split("\n") == [
        "I look.",
        '[server_tool_use: web_search, {"query": "q"}]',
        '[web_search_tool_result: [{"url": "https://x", "title": "T"}]]',
        '[bash_code_execution_tool_result: {"stdout": "5\\n", "return_code": 0}]',
        "[mcp_tool_result]", "M.",
        "[container_upload: file_1]",
        "[of tomorrow: [data left out: 5 KB]]",
        "Done.",
    ]  # fmt: skip
    items = [
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}},
        {"type": "mcp_list_tools", "server_label": "x", "tools": []},
        {"type": "computer_call_output", "call_id": "c",
         "output": {"type": "computer_screenshot", "file_id": "i"}},
        {"type": "function_call_output", "call_id": "unknown", "output": "1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    told = read_items(items)
    assert [(each["role"], each["content"]) for each in told] == [
        ("assistant", '[web_search_call: {"query": "q"}]'),
        ("assistant", "[mcp_list_tools: x]"),
        ("user", "[computer_call_output: [image left out: i]]"),
        ("tool", "1"),
        ("assistant", "No."),
    ]


def test_documents_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """New ones are read too, and one that cannot be read is refused then."""
    monkeypatch.setattr(parts, "read_apart", lambda data, name: f"{name}: {len(data)} bytes")
    pdf = base64.b64encode(b"%PDF-1.4 x").decode()
    asked = [{"type": "text", "text": "Sum it up."}]
    files = [
        (read_messages, {"type": "file", "file": {"filename": "a.pdf", "file_data": pdf}}),
        (read_items, {"type": "input_file", "filename": "a.pdf",
                      "file_data": f"data:application/pdf;base64,{pdf}"}),
        (claude, {**source("document", "application/pdf", data=pdf), "title": "a.pdf"}),
    ]  # fmt: skip
    for read, file in files:
        (told,) = read([{"role": "user", "content": [file, *asked]}])
        assert told["content"] == "[document: a.pdf]\na.pdf: 10 bytes\nSum it up."
    text = {**source("document", "text/plain", data=TEXT)}
    blocks = {"type": "content", "content": [{"type": "text", "text": "C."}]}
    told = claude([{"role": "user", "content": [text, {"type": "document", "source": blocks}]}])
    assert told[0]["content"] == "Grüße.\nC."
    for bad, words in (
        ({"type": "file", "file": {"file_id": "f"}}, "the document has no data"),
        ({"type": "file", "file": {"filename": "n", "file_data": "%"}}, "n: expected data in base"),
        (
            {"type": "file", "file": {"filename": "n", "file_data": PNG}},
            "n is no text, PDF or Word",
        ),
    ):
        new = {"role": "user", "content": [bad]}
        with pytest.raises(FieldError, match=words):
            read_messages([new])
        line = read_messages([new, ANSWER])[0]["content"]
        assert line.startswith("[file left out: ") and words in line
    monkeypatch.setattr(parts, "read_apart", lambda data, name: _fail(name))
    assert "[file left out: a.pdf, 1 KB: a.pdf: broken]" in read_messages(
        [{"role": "user", "content": [files[0][1]]}, ANSWER]
    )[0]["content"]  # fmt: skip


def _fail(name: str) -> str:
    raise SparseKVError(f"{name}: broken")


def test_the_older_form_of_calls() -> None:
    called = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }
    told = read_messages([ASKED, called, {"role": "function", "name": "f", "content": "1"}])
    assert [each["role"] for each in told] == ["user", "assistant", "tool"]
    assert told[1]["tool_calls"][0]["id"] == told[2]["tool_call_id"] != ""
    assert read_messages([{"role": "function", "name": "f", "content": "1"}])[0]["role"] == "tool"
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert read_messages([ASKED, refused])[1]["content"] == "No."


def test_the_line_of_claude_codes_accounts_is_left_out() -> None:
    """Of the system's texts only, in any place and in all protocols; other headers by choice."""
    header = "x-anthropic-billing-header: cc_version=2.1.200.x; cc_entrypoint=cli; cch=%s;"
    messages = [{"role": "user", "content": header % "user"}]
    blocks = [{"type": "text", "text": text} for text in (header % "a", "You code.", header % "b")]
    same = claude(messages, system=[{"type": "text", "text": "You code."}])
    assert same == claude(messages, system=blocks) == claude(messages, system=blocks[1:])
    assert claude(messages, system=f"{header % 'c'}\nYou code.") == same
    assert claude(messages, system="You code.\n" + header)[0]["content"] == "You code.\n"
    assert [each["role"] for each in claude(messages, system=header % "d")] == ["user"]
    assert same[1]["content"] == header % "user"
    volatile = VolatileHeaders(["", "Now:", "x-anthropic-billing-header:"], counts := Counter())
    told = [
        {"role": role, "content": f"{header % 1}\n now: 12:01\nGo."}
        for role in ("user", "developer")
    ]
    assert volatile.of_messages(told) == [told[0], {"role": "developer", "content": "Go."}]
    assert volatile.of_messages([{"role": "system", "content": blocks[:1]}]) == []
    assert counts == {"x-anthropic-billing-header:": 2, "Now:": 1}
    assert VolatileHeaders([""], counts).of_system(blocks) == blocks
    assert volatile.of_messages([1, {"role": "system"}]) == [1, {"role": "system"}]
