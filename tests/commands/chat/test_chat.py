"""``chat``: turns, commands, what is kept in the cache, interrupts, a full context."""

import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_chat import TEMPLATE, lines, prompts_of
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from sparsekv_cli.cli import main


@pytest.fixture(autouse=True)
def template(fake: Any) -> None:
    fake.metadata["tokenizer.chat_template"] = TEMPLATE


def test_turns_keep_the_cache(fake, invoke):
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A", "", "B"))
    assert (result.code, result.out, result.err) == (0, "one\ntwo\n", "")
    first = "[user]A\n[assistant]"
    second = first + "one\n[user]B\n[assistant]"
    assert prompts_of(fake) == [first, second]
    assert fake.prefilled == [len(first), len(second) - len(first + "one")]
    assert fake.rewinds == []


@pytest.mark.parametrize("word", ["/exit", "/quit", "/bye"])
def test_first_message_system_and_exit(word, fake, invoke):
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", "-p", "A", "-sys", "Be brief", stdin=lines("B", word, "C"))
    assert result.code == 0 and result.out == "one\ntwo\n"
    assert prompts_of(fake)[0] == "[system]Be brief\n[user]A\n[assistant]"


def test_last_line_needs_no_line_break(fake, invoke):
    fake.script = ["one<eos>"]
    assert invoke("chat", stdin=b"\xef\xbb\xbfA").out == "one\n"  # a byte order mark is no text
    assert prompts_of(fake)[0] == "[user]A\n[assistant]"


def test_regenerate(fake, invoke):
    fake.script = ["one<eos>", "two<eos>", "three<eos>", "x<eos>"]
    result = invoke("chat", stdin=lines("/regen", "A" * 100, "/regen", "/regen", "B"))
    assert result.out == "one\ntwo\nthree\nx\n"
    assert "no answer to generate again" in result.err
    prompts = prompts_of(fake)
    assert prompts[0] == prompts[1] == prompts[2]
    assert prompts[3] == prompts[0] + "three\n[user]B\n[assistant]"
    # Back to where the prompt ended, of which nothing is computed again.
    assert fake.rewinds == [len(prompts[0])] * 2
    assert fake.prefilled == [len(prompts[0]), len(prompts[3]) - len(prompts[0] + "three")]


def test_regenerate_behind_an_interrupted_prompt(fake, invoke):
    """The end of the first prompt is no checkpoint any more: its last 64 tokens are read again."""

    def interrupt() -> None:
        if fake.n_begun == 2:
            os.kill(os.getpid(), signal.SIGINT)
            fake.checkpoint = None

    fake.on_prefill = interrupt
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A" * 100, "B", "/regen"))
    assert result.out == "one\ntwo\n" and "taken back" in result.err
    n_prompt = len(prompts_of(fake)[0])
    assert fake.rewinds == [n_prompt - 64] and fake.prefilled == [n_prompt, 64]


def test_regenerate_after_an_empty_answer(fake, invoke):
    fake.script = ["<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A", "/regen"))
    assert (result.code, result.out) == (0, "\ntwo\n")


def test_a_method_that_cannot_go_back(fake, invoke):
    fake.can_rewind_within = False
    fake.script = ["one<eos>", "two<eos>"]
    assert invoke("chat", stdin=lines("A" * 100, "/regen")).out == "one\ntwo\n"
    prompts = prompts_of(fake)
    assert prompts[0] == prompts[1]
    assert fake.prefilled == [len(prompts[0])] * 2


def test_clear(fake, invoke):
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", "-sys", "S", stdin=lines("A", "/clear", "B"))
    assert result.out == "one\ntwo\n" and "forgotten" in result.err
    assert prompts_of(fake)[1] == "[system]S\n[user]B\n[assistant]"


@pytest.mark.parametrize("word", ["/help", "/?"])
def test_unknown_commands_and_paths(word, fake, invoke):
    fake.script = ["a file<eos>"]
    result = invoke("chat", stdin=lines("/foo", "/clear now", "/etc/hosts is what?", word))
    assert result.out == "a file\n"
    assert "/foo: no such command" in result.err and "found 'now'" in result.err
    assert "/regen" in result.err


def test_interrupt_keeps_the_partial_answer(fake, invoke):
    def interrupt(n: int) -> None:
        if n == 2 and len(fake.prompts) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    fake.on_token = interrupt
    fake.script = ["abcdef<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A", "B"))
    assert (result.code, result.out, result.err) == (0, "abc\ntwo\n", "stopped\n")
    assert prompts_of(fake)[1] == "[user]A\n[assistant]abc\n[user]B\n[assistant]"


@pytest.mark.parametrize("name", ["prefill", "keep_common"])
def test_interrupt_before_the_answer_takes_the_message_back(name, fake, invoke, monkeypatch):
    work = getattr(fake, name)

    def interrupted(*arguments, **options):
        monkeypatch.setattr(fake, name, work)
        os.kill(os.getpid(), signal.SIGINT)
        return work(*arguments, **options)

    monkeypatch.setattr(fake, name, interrupted)
    fake.script = ["two<eos>"]
    result = invoke("chat", stdin=lines("A", "B"))
    assert (result.code, result.out) == (0, "two\n")
    assert prompts_of(fake) == ["[user]B\n[assistant]"]


def test_full_context_before_and_during_an_answer(fake, invoke):
    fake.n_ctx = 60
    fake.script = ["one<eos>", "y" * 100, "two<eos>"]
    result = invoke("chat", stdin=lines("A" * 60, "A", "B", "/clear", "C"))
    assert result.code == 0
    assert result.out.splitlines()[0] == "one" and result.out.splitlines()[-1] == "two"
    too_long, full, *_ = result.err.splitlines()
    assert too_long.startswith("error: the conversation takes 78 tokens, the context holds 60")
    assert full.startswith("the answer is cut, the context is full (60 of 60 tokens)")
    assert all("/clear" in line and "-c" in line for line in (too_long, full))


def test_length_is_not_a_full_context(fake, invoke):
    fake.script = ["abcdef<eos>"]
    result = invoke("chat", "-n", "3", stdin=lines("A"))
    assert (result.out, result.err) == ("abc\n", "")


def test_stop_strings_and_chatml_without_a_template(fake, invoke):
    del fake.metadata["tokenizer.chat_template"]
    fake.script = ["one<|im_end|>more<eos>", "two. three<eos>"]
    assert invoke("chat", "-r", ".", stdin=lines("A", "B")).out == "one\ntwo\n"
    assert prompts_of(fake)[0] == "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"


def test_stats(fake, invoke):
    for option in ("--stats", "-v"):
        fake.script = ["one<eos>"]
        result = invoke("chat", option, "--method", "lfps", stdin=lines("/clear", "A"))
        assert result.out == "one\n"
        assert "decode 3 tokens" in result.err and "lfps: " in result.err
        fake.timings.decode_tokens = 0
        fake.tokens.clear()


def test_input_that_is_not_utf8(fake, invoke):
    fake.script = ["one<eos>"]
    result = invoke("chat", stdin=b"A\n\xff\n")
    assert (result.code, result.out) == (1, "one\n")
    assert result.err == "error: line 2 of stdin is not UTF-8\n"


class Terminal(io.StringIO):
    """A stdin or stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs ``chat`` at a terminal where the user presses keys."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run(keys: str, *arguments: str) -> tuple[int, str]:
        out = Terminal()
        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr(sys, "stdout", out)
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            pipe.send_text(keys)
            with pytest.raises(SystemExit) as exit_info:
                main(["chat", *arguments])
        return int(exit_info.value.code or 0), out.getvalue()

    return run


def test_at_a_terminal(fake, terminal):
    fake.script = ["one<eos>", "two<eos>"]
    assert terminal("A\r/undo\r!\r\x04") == (0, "one\ntwo\n")
    assert prompts_of(fake)[1] == "[user]A!\n[assistant]"


def test_ctrl_c_at_the_prompt_leaves(fake, terminal):
    assert terminal("no\x03\x03")[0] == 130 and fake.prompts == []


# --- thinking -------------------------------------------------------------------------------------

THOUGHT = "<think>\nhm\n</think>\n\nYes<eos>"


def test_thinking_is_dim_at_a_terminal(fake, terminal, monkeypatch):
    fake.metadata["tokenizer.chat_template"] = TEMPLATE + "{# </think> #}"
    fake.script = [THOUGHT] * 2
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = terminal("A\r\x04")[1]
    assert shown.replace("\x1b[0m\x1b[2m", "") == "\x1b[2mhm\x1b[0m\n\nYes\n"
    fake.tokens.clear()
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal("A\r\x04")[1] == "<think>\nhm\n</think>\n\nYes\n"


@pytest.mark.parametrize("drops", [False, True])
def test_thinking_is_kept_or_dropped(drops, fake, invoke):
    fake.metadata["tokenizer.chat_template"] = TEMPLATE + "{# </think> #}"
    fake.script = [THOUGHT, "two<eos>"]
    result = invoke("chat", *["--drop-thinking"] * drops, stdin=lines("A", "B"))
    assert result.out == "Yes\ntwo\n" and result.err == "<think>\nhm\n</think>\n\n"
    answer = "Yes" if drops else THOUGHT.removesuffix("<eos>")
    assert prompts_of(fake)[1] == f"[user]A\n[assistant]{answer}\n[user]B\n[assistant]"


def test_thinking_is_switched(fake, invoke):
    fake.metadata["tokenizer.chat_template"] = TEMPLATE + "{{ enable_thinking }}"
    fake.script = ["one<eos>", "two<eos>"]
    invoke("chat", "--think", "on", stdin=lines("A", "/set think off", "B"))
    assert [prompt.rpartition("]")[2] for prompt in prompts_of(fake)] == ["True", "False"]
    fake.metadata["tokenizer.chat_template"] = TEMPLATE
    assert "enable_thinking" in invoke("chat", stdin=lines("/set think on")).err
    assert invoke("chat", "--think", "on").code == 1
    assert invoke("chat", "--think", "off").code == 0  # it cannot think


# --- a full context -------------------------------------------------------------------------------


def test_context_shift_drops_the_oldest_turns(fake, invoke):
    fake.n_ctx = 120
    fake.script = ["one<eos>", "two<eos>", "three<eos>", "four<eos>"]
    said = [letter * 20 for letter in "ABCD"]
    result = invoke("chat", "-sys", "S", "--context-shift", stdin=lines(*said))
    assert result.out == "one\ntwo\nthree\nfour\n"
    assert result.err.startswith("context shift: the oldest 2 turns are dropped, 48 tokens")
    assert prompts_of(fake)[2] == f"[system]S\n[user]{said[2]}\n[assistant]"


def test_kept_turns_stay(fake, invoke):
    fake.n_ctx = 120
    fake.script = ["one<eos>", "two<eos>", "three<eos>"]
    said = [letter * 20 for letter in "ABC"]
    result = invoke("chat", "--context-shift", "--keep", "1", stdin=lines(*said))
    assert "the oldest 1 turn is dropped" in result.err
    first = f"[user]{said[0]}\n[assistant]one\n"
    assert prompts_of(fake)[2] == f"{first}[user]{said[2]}\n[assistant]"
    assert invoke("chat", "--keep", "1").code == 2


def test_context_shift_in_the_middle_of_an_answer(fake, invoke):
    fake.n_ctx = 80
    fake.script = ["one<eos>", "y" * 60 + "<eos>", "z" * 10 + "<eos>", *["q" * 200] * 2]
    result = invoke("chat", "--context-shift", stdin=lines("A" * 20, "B", "C"))
    first, second, third = result.out.splitlines()
    n_ahead = len("[user]B\n[assistant]")
    assert first == "one" and prompts_of(fake)[2].startswith("[user]B\n[assistant]yyy")
    n_before = 80 - len("[user]" + "A" * 20 + "\n[assistant]one\n[user]B\n[assistant]") + 1
    assert second == "y" * n_before + "z" * 10
    assert len(prompts_of(fake)[2]) == n_ahead + n_before
    assert result.err.count("context shift") == 2 and "the answer is cut" in result.err
    assert set(third) == {"q"}


def test_a_message_that_cannot_fit(fake, invoke):
    fake.n_ctx = 60
    result = invoke("chat", "--context-shift", stdin=lines("A" * 100))
    assert "takes 118 tokens, the context holds 60; the last message alone takes 118" in result.err
