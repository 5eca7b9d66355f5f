"""``chat``: turns, commands, what is kept in the cache, interrupts, a full context."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from sparsekv_cli.cli import main

Invoke = Callable[..., Any]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(autouse=True)
def template(fake: Any) -> None:
    fake.metadata["tokenizer.chat_template"] = TEMPLATE


def prompts_of(fake: Any) -> list[str]:
    return [bytes(ids).decode() for ids in fake.prompts]


def lines(*messages: str) -> bytes:
    return "".join(message + "\n" for message in messages).encode()


def test_turns_keep_the_cache(fake: Any, invoke: Invoke) -> None:
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A", "", "B"))
    assert (result.code, result.out, result.err) == (0, "one\ntwo\n", "")
    first = "[user]A\n[assistant]"
    second = first + "one\n[user]B\n[assistant]"
    assert prompts_of(fake) == [first, second]
    assert fake.prefilled == [len(first), len(second) - len(first + "one")]
    assert fake.rewinds == []


def test_first_message_system_and_exit(fake: Any, invoke: Invoke) -> None:
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", "-p", "A", "-sys", "Be brief", stdin=lines("B", "/exit", "C"))
    assert result.code == 0 and result.out == "one\ntwo\n"
    assert prompts_of(fake)[0] == "[system]Be brief\n[user]A\n[assistant]"


def test_last_line_needs_no_line_break(fake: Any, invoke: Invoke) -> None:
    fake.script = ["one<eos>"]
    assert invoke("chat", stdin=b"A").out == "one\n"


def test_regenerate(fake: Any, invoke: Invoke) -> None:
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


def test_regenerate_behind_an_interrupted_prompt(fake: Any, invoke: Invoke) -> None:
    """The end of the first prompt is no checkpoint any more: its last 64 tokens are read again."""

    def interrupt() -> None:
        if len(fake.prompts) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            fake.checkpoint = None

    fake.on_prefill = interrupt
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A" * 100, "B", "/regen"))
    assert result.out == "one\ntwo\n" and "taken back" in result.err
    n_prompt = len(prompts_of(fake)[0])
    assert fake.rewinds == [n_prompt - 64] and fake.prefilled == [n_prompt, 64]


def test_regenerate_after_an_empty_answer(fake: Any, invoke: Invoke) -> None:
    fake.script = ["<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A", "/regen"))
    assert (result.code, result.out) == (0, "\ntwo\n")


def test_a_method_that_cannot_go_back(fake: Any, invoke: Invoke) -> None:
    fake.can_rewind_within = False
    fake.script = ["one<eos>", "two<eos>"]
    assert invoke("chat", stdin=lines("A" * 100, "/regen")).out == "one\ntwo\n"
    prompts = prompts_of(fake)
    assert prompts[0] == prompts[1]
    assert fake.prefilled == [len(prompts[0])] * 2


def test_clear(fake: Any, invoke: Invoke) -> None:
    fake.script = ["one<eos>", "two<eos>"]
    result = invoke("chat", "-sys", "S", stdin=lines("A", "/clear", "B"))
    assert result.out == "one\ntwo\n" and "forgotten" in result.err
    assert prompts_of(fake)[1] == "[system]S\n[user]B\n[assistant]"


def test_unknown_commands_and_paths(fake: Any, invoke: Invoke) -> None:
    fake.script = ["a file<eos>"]
    result = invoke("chat", stdin=lines("/foo", "/clear now", "/etc/hosts is what?", "/help"))
    assert result.out == "a file\n"
    assert "/foo: no such command" in result.err and "/clear now: no such" in result.err
    assert "/regen" in result.err


def test_interrupt_keeps_the_partial_answer(fake: Any, invoke: Invoke) -> None:
    def interrupt(n: int) -> None:
        if n == 2 and len(fake.prompts) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    fake.on_token = interrupt
    fake.script = ["abcdef<eos>", "two<eos>"]
    result = invoke("chat", stdin=lines("A", "B"))
    assert (result.code, result.out, result.err) == (0, "abc\ntwo\n", "stopped\n")
    assert prompts_of(fake)[1] == "[user]A\n[assistant]abc\n[user]B\n[assistant]"


def test_interrupt_during_prefill_takes_the_message_back(fake: Any, invoke: Invoke) -> None:
    def interrupt() -> None:
        if len(fake.prompts) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    fake.on_prefill = interrupt
    fake.script = ["two<eos>"]
    result = invoke("chat", stdin=lines("A", "B"))
    assert (result.code, result.out) == (0, "two\n")
    assert prompts_of(fake)[1] == "[user]B\n[assistant]"


def test_full_context_before_and_during_an_answer(fake: Any, invoke: Invoke) -> None:
    fake.n_ctx = 60
    fake.script = ["one<eos>", "y" * 100, "two<eos>"]
    result = invoke("chat", stdin=lines("A" * 60, "A", "B", "/clear", "C"))
    assert result.code == 0
    assert result.out.splitlines()[0] == "one" and result.out.splitlines()[-1] == "two"
    too_long, full, *_ = result.err.splitlines()
    assert too_long.startswith("error: the conversation takes 78 tokens")
    assert full.startswith("the context is full")
    assert all("/clear" in line and "-c" in line for line in (too_long, full))


def test_length_is_not_a_full_context(fake: Any, invoke: Invoke) -> None:
    fake.script = ["abcdef<eos>"]
    result = invoke("chat", "-n", "3", stdin=lines("A"))
    assert (result.out, result.err) == ("abc\n", "")


def test_stop_strings_and_chatml_without_a_template(fake: Any, invoke: Invoke) -> None:
    del fake.metadata["tokenizer.chat_template"]
    fake.script = ["one<|im_end|>more<eos>", "two. three<eos>"]
    assert invoke("chat", "-r", ".", stdin=lines("A", "B")).out == "one\ntwo\n"
    assert prompts_of(fake)[0] == "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"


def test_stats(fake: Any, invoke: Invoke) -> None:
    for option in ("--stats", "-v"):
        fake.script = ["one<eos>"]
        result = invoke("chat", option, "--method", "lfps", stdin=lines("/clear", "A"))
        assert result.out == "one\n"
        assert "decode 3 tokens" in result.err and "lfps: " in result.err
        fake.timings.decode_tokens = 0
        fake.tokens.clear()


def test_input_that_is_not_utf8(fake: Any, invoke: Invoke) -> None:
    fake.script = ["one<eos>"]
    result = invoke("chat", stdin=b"A\n\xff\n")
    assert (result.code, result.out) == (1, "one\n")
    assert result.err == "error: line 2 of stdin is not UTF-8\n"


class Terminal(io.StringIO):
    """A stdin or stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs ``chat`` at a terminal where the user does what ``actions`` say."""

    def run(*actions: str | type[BaseException]) -> tuple[int, str]:
        remaining = list(actions)
        out = Terminal()

        def read(prompt: str) -> str:
            out.write(prompt)
            action = remaining.pop(0)
            if isinstance(action, str):
                return action
            raise action

        monkeypatch.setattr(sys, "stdin", Terminal())
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr("builtins.input", read)
        with pytest.raises(SystemExit) as exit_info:
            main(["chat"])
        return int(exit_info.value.code or 0), out.getvalue()

    return run


def test_at_a_terminal(fake: Any, terminal: Callable[..., tuple[int, str]]) -> None:
    fake.script = ["one<eos>"]
    assert terminal("A", EOFError) == (0, "> one\n> ")


def test_ctrl_c_at_the_prompt_leaves(terminal: Callable[..., tuple[int, str]]) -> None:
    assert terminal(KeyboardInterrupt)[0] == 130
