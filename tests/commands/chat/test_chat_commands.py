"""The commands of ``chat``: what they do, and the line that says what cannot be."""

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from plain_chat import TEMPLATE, lines, prompts_of

from sparsekv_cli.commands.chat import chat
from sparsekv_cli.commands.chat.files import load_messages
from sparsekv_cli.errors import SparseKVError


@pytest.fixture(autouse=True)
def template(fake: Any) -> None:
    fake.metadata["tokenizer.chat_template"] = TEMPLATE


def test_undo_and_system(fake, invoke):
    fake.script = ["one<eos>", "two<eos>"]
    entered = lines("/undo", "A", "/system Be brief", "/system", "/undo", "B", '/system ""')
    result = invoke("chat", stdin=entered)
    assert prompts_of(fake)[1] == "[system]Be brief\n[user]B\n[assistant]"
    assert result.err.splitlines() == [
        "error: there is no message to take back",
        "the system message is set; the conversation is read again",
        "Be brief",
        "taken back: A",
        "the system message is gone; the conversation is read again",
    ]


def test_read_puts_texts_before_the_next_message(fake, invoke, tmp_path):
    fake.script = ["one<eos>", "two<eos>"]
    for name in ("a b.txt", "c.txt"):
        (tmp_path / name).write_text(f"text of {name}\n")
    read = [f"/read {tmp_path}/{name}" for name in ("a b.txt", "c.txt")]
    result = invoke("chat", stdin=lines(*read, "Why?", f"/read {tmp_path}/no", *read, "/undo", "B"))
    first = "[user]text of a b.txt\n\ntext of c.txt\n\nWhy?\n[assistant]"
    assert prompts_of(fake)[0] == first
    assert prompts_of(fake)[1] == f"{first}one\n[user]text of a b.txt\n\nB\n[assistant]"
    assert "15 characters, which come before" in result.err and "No such file" in result.err


def test_save_and_load(fake, invoke, tmp_path):
    fake.script = ["one<eos>", "two<eos>", "three<eos>"]
    file = tmp_path / "said.json"
    result = invoke("chat", "-sys", "S", stdin=lines(f"/save {tmp_path}/no", "A", f"/save {file}"))
    assert json.loads(file.read_text()) == {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "A"},
            {"role": "assistant", "content": "one"},
        ]
    }
    fake.tokens.clear()
    result = invoke("chat", stdin=lines(f"/load {file}", "B", f"/save {file}", "/undo", "/regen"))
    assert "3 messages" in result.err and "5 messages are saved" in result.err
    assert prompts_of(fake)[1] == "[system]S\n[user]A\n[assistant]one\n[user]B\n[assistant]"
    assert prompts_of(fake)[2] == "[system]S\n[user]A\n[assistant]"
    file.write_text("notes")
    fake.script = ["four<eos>"]
    assert "exists and is no conversation" in invoke("chat", stdin=lines("A", f"/save {file}")).err
    assert file.read_text() == "notes"


def test_a_file_that_ends_with_a_question(fake, invoke, tmp_path):
    """Another message may follow. What is saved then can be loaded, and saved again."""
    fake.script = ["one<eos>"]
    asked, said = tmp_path / "asked.json", tmp_path / "said.json"
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": "A"}]}))
    entered = (f"/load {asked}", "B", f"/save {said}", f"/load {said}", f"/save {said}")
    result = invoke("chat", stdin=lines(*entered))
    assert prompts_of(fake) == ["[user]A\n[user]B\n[assistant]"] and "error" not in result.err
    assert [each["role"] for each in load_messages(str(said))] == ["user", "user", "assistant"]
    assert "1 message, " in result.err and result.err.count("/regen") == 1
    entered = ("/system S", f"/save {said}", f"/load {said}")
    assert "/regen" not in invoke("chat", stdin=lines(*entered)).err


def test_settings(fake, invoke):
    fake.script = ["abcdef<eos>", "ab.cd<eos>"]
    entered = ["/set temp 0.5", "/set n-predict 3", "/set stop .", "/set seed 7", "A", "/set temp"]
    entered += ["/set temp default", "/set n_predict -1", "B", "/set ctx 100", "/set"]
    result = invoke("chat", "--top-k", "5", stdin=lines(*entered))
    assert result.out == "abc\nab\n"
    assert (fake.sampling, fake.seed, fake.n_ctx) == ({"top_k": 5}, 7, 100)
    shown = result.err.splitlines()
    assert shown[:5] == ["temp 0.5", "n_predict 3", 'stop ["."]', "seed 7", "temp 0.5"]
    assert shown[5] == "temp 0.8" and any(line.split() == ["ctx", "100"] for line in shown)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("/set tmp 1", "no such setting (did you mean temp?)"),
        ("/set temp x", "temp = 'x': must be a number"),
        ("/set top_p 2", "top_p = 2.0: must be 0 to 1"),
        ("/set n_predict -2", "must be a whole number of at least -1"),
        ("/set seed 1e3", "must be a whole number from -1"),
        ("/set samplers temp;temp", "must be names from"),
        ("/set think maybe", "must be on or off"),
        ('/set stop ["a", 1]', "must be non-empty texts"),
        ("/set stop [", "must be valid JSON"),
        ("/set ctx 4097", "was trained for 4096 tokens"),
        ("/set ctx 5", "the conversation has"),
        ("/method", "]: NAME is missing"),
        ("/method lpfs", "unknown method 'lpfs' (did you mean lfps?)"),
        ("/method quest pge=1", "no option 'pge' (did you mean page?)"),
        ("/method quest page", "expected KEY=VALUE"),
        ("/sav x", "/sav: no such command (did you mean /save?)"),
        ("/load", "/load FILE: FILE is missing"),
        ("/load /", "/: Is a directory"),
    ],
)
def test_what_cannot_be(text, reason, fake, invoke):
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A", text, "B"))
    assert result.out == "one\ntwo\n" and result.code == 0
    (line,) = result.err.splitlines()
    assert line.startswith("error: ") and reason in line


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "not JSON in UTF-8"),
        ("{}", "expected"),
        ("[]", "with one message at least"),
        ([{"role": "user"}], "message 1: expected an object with the texts"),
        ([{"role": "tool", "content": "x"}], "role 'tool': expected system, user, assistant"),
        ([{"role": "assistant", "content": "x"}], "expected 'user' there"),
        (
            [{"role": "user", "content": "x"}] + [{"role": "system", "content": "x"}] * 2,
            "message 2: role 'system': expected 'user' or 'assistant' there",
        ),
        ([{"role": "system", "content": "x"}] * 2, "message 2: role 'system': expected 'user'"),
    ],
)
def test_a_file_that_is_no_conversation(value, reason, tmp_path):
    file = tmp_path / "said.json"
    file.write_text(value if isinstance(value, str) else json.dumps({"messages": value}))
    with pytest.raises(SparseKVError, match=re.escape(reason)):
        load_messages(str(file))


def test_another_method(fake, invoke):
    fake.script = ["one<eos>", "two<eos>", "three<eos>"]
    entered = lines("A", "/method quest page=32", "B", "/method h2o", "C", "/stats")
    result = invoke("chat", "--budget", "64", "--method", "lfps", stdin=entered)
    assert result.out == "one\ntwo\nthree\n"
    quest, h2o = fake.methods
    assert (quest.page, str(quest.budget), str(h2o.budget)) == (32, "64", "64")
    assert "its rows are kept" in result.err and "read again with your next" in result.err
    assert len(fake.prefilled) == 3 and fake.prefilled[2] == len(prompts_of(fake)[2])
    assert "h2o: " in result.err
    assert "the conversation" not in invoke("chat", stdin=lines("/method full")).err


def test_a_change_that_is_stopped_late_has_the_rows_of_its_method(fake, invoke, monkeypatch):
    """Ctrl-C came when the sequence had the new method and read tokens again."""

    used: list[str] = []

    def stop() -> None:
        raise KeyboardInterrupt

    def rows_of(_model: Any, _options: Any, method: Any) -> Any:
        return SimpleNamespace(
            repair=None, name=getattr(method, "name", "full"), finish=lambda: None
        )

    def prefill(self: Any, *arguments: Any, rows: Any) -> None:
        used.append(rows.name)
        plain(self, *arguments)

    plain = type(fake).prefill
    monkeypatch.setattr(type(fake), "prefill", prefill)
    monkeypatch.setattr(chat, "open_prompt_rows", rows_of)
    fake.script, fake.on_change = ["one<eos>", "two<eos>"], stop
    result = invoke("chat", stdin=lines("A", "/method snapkv", "B", "/stats"))
    assert "stopped" in result.err and "snapkv: " in result.err
    assert used == ["full", "snapkv"]
