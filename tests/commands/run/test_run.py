"""``run``: prompts in, text or JSON out, stop strings, interrupts."""

import json
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from sparsekv_cli.commands.shared.answer import ledger_line
from sparsekv_cli.generation.answer import StopStrings

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def prompt_of(fake: Any) -> str:
    (ids,) = fake.prompts
    return bytes(ids).decode()


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["-p", "Hi"], b"", "Hi"),
        ([], b"piped\n", "piped"),
        ([], b"two\nlines\n\n", "two\nlines\n"),
        (["-p", "Why?"], b"A text.\n", "A text.\n\nWhy?"),
        (["-f", "-", "-p", "Why?"], b"A text.", "A text.\n\nWhy?"),
        (["-p", "a\\nb"], b"", "a\\nb"),
        ([], b"a\\nb\r\n", "a\\nb\r"),
        ([], "ünïcode ✓\n".encode(), "ünïcode ✓"),
    ],
)
def test_prompt_assembly(arguments, stdin, expected, fake, invoke):
    fake.script = ["ok<eos>"]
    result = invoke("run", *arguments, stdin=stdin)
    assert (result.code, result.out) == (0, "ok")
    assert prompt_of(fake) == expected


def test_file_prompt_does_not_read_stdin(fake, invoke, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b" text \n\n")
    fake.script = ["ok<eos>"]
    invoke("run", "-f", str(file), "-p", "more", stdin=b"not this")
    assert prompt_of(fake) == " text \n\n\nmore"


def test_several_files_are_read_in_order_with_their_names(fake, invoke, tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"text of {name}\n")
    first, second = (str(tmp_path / name) for name in "ab")
    fake.script = ["ok<eos>"]
    invoke("run", "-f", second, "-f", "-", "-f", first, "-p", "Why?", stdin=b"piped\n")
    assert prompt_of(fake) == (
        f"{second}:\n\ntext of b\n\nstdin:\n\npiped\n\n{first}:\n\ntext of a\n\nWhy?"
    )
    assert "stdin can be read once" in invoke("run", "-f", "-", "-f", "-").err
    missing = invoke("run", "-f", first, "-f", str(tmp_path / "c"))
    assert missing.code == 1 and "No such file" in missing.err


@pytest.mark.parametrize(
    "line",
    ["run -p a -p b", "compare -f a -f b", "eval kld -f a -f b", "advise -f a -f b",
     "calibrate -f a -f b", "tokenize -f a -f b", "compare -p a -p b"],
)  # fmt: skip
def test_a_text_is_not_dropped_without_a_word(line, invoke):
    result = invoke(*line.split())
    assert result.code == 2 and "is given 2 times: give it once" in result.err


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_empty_prompt(stdin, fake, invoke):
    result = invoke("run", stdin=stdin)
    assert result.code == 1 and result.err.startswith("error: the prompt is empty")
    assert result.err.count("\n") == 1 and not fake.prompts


def test_a_byte_order_mark_is_no_text(fake, invoke, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbftext\n")
    fake.script = ["ok<eos>"] * 2
    invoke("run", "-f", str(file))
    invoke("run", stdin=file.read_bytes())
    assert [bytes(ids) for ids in fake.prompts] == [b"text", b"textoktext"]


def test_prompt_that_is_not_utf8(fake, invoke, tmp_path):
    result = invoke("run", stdin=b"abc\xff")
    assert result.code == 1 and "0xff at offset 3" in result.err
    file = tmp_path / "latin.txt"
    file.write_bytes("naïve".encode("latin-1"))
    result = invoke("run", "-f", str(file))
    assert result.code == 1 and "0xef at offset 2" in result.err and str(file) in result.err
    result = invoke("run", "-p", os.fsdecode(b"\xff"))
    assert result.code == 1 and "not UTF-8" in result.err
    result = invoke("run", "-f", str(tmp_path / "none.txt"))
    assert result.code == 1 and "none.txt: No such file" in result.err


def test_chat_template_and_raw(fake, invoke):
    fake.metadata["tokenizer.chat_template"] = TEMPLATE
    fake.script = ["a<eos>", "b<eos>"]
    invoke("run", "-p", "Hi", "-sys", "Be brief")
    assert prompt_of(fake) == "[system]Be brief[user]Hi[assistant]"
    fake.prompts.clear()
    fake.tokens.clear()
    invoke("run", "-p", "Hi", "--raw")
    assert prompt_of(fake) == "Hi"


def test_bos_is_not_doubled(fake, invoke):
    fake.tokenizer.bos_id = 257
    fake.metadata["tokenizer.chat_template"] = "{{ bos_token }}" + TEMPLATE
    fake.script = ["a<eos>", "a<eos>"]
    invoke("run", "-p", "Hi")
    fake.tokens.clear()
    fake.metadata["tokenizer.chat_template"] = TEMPLATE
    invoke("run", "-p", "Hi")
    assert fake.prompts[0] == fake.prompts[1]
    assert fake.prompts[0].count(257) == 1


def test_system_message_needs_a_template(fake, invoke):
    result = invoke("run", "-p", "Hi", "-sys", "Be brief")
    assert result.code == 1 and "no chat template" in result.err


def test_json(fake, invoke):
    fake.script = ["né<eos>"]
    result = invoke("run", "-p", "Hi", "--json", "--method", "full")
    assert result.code == 0 and result.err == "" and result.out.count("\n") == 1
    assert json.loads(result.out) == {
        "text": "né",
        "thinking": "",
        "prompt_tokens": 2,
        "cached_tokens": 0,
        "generated_tokens": 3,
        "tokens": list("né".encode()),
        "stop_reason": "eos",
        "timings": {
            "load_s": 0.5,
            "prefill_s": 0.5,
            "prefill_tps": 4.0,
            "ttft_s": pytest.approx(0, abs=1),  # the fake sequence takes no time
            "decode_s": pytest.approx(0.3),
            "decode_tps": pytest.approx(10.0),
        },
        "method": {"name": "full", "options": {"budget": "5%"}, "sparse_from": 0},
        "ledger": {
            "rows_total": 12, "rows_scored": 0, "rows_attended": 3, "bytes_host": 10,
            "bytes_device": 0, "bytes_moved": 0, "index_bytes": 1,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "text", "reason", "n_tokens"),
    [
        (["-n", "3"], "abc", "length", 3), (["-n", "0"], "", "length", 0),
        ([], "abcdefgh", "eos", 8), (["-r", "def"], "abc", "stop", 6),
        (["-r", "hx", "-r", "cd"], "ab", "stop", 4), (["-r", "efx"], "abcdefgh", "eos", 8),
        (["-r", "ghi"], "abcdefgh", "eos", 8), (["-r", "bcdx", "-r", "cde"], "ab", "stop", 5),
    ],
)  # fmt: skip
def test_how_an_answer_ends(arguments, text, reason, n_tokens, fake, invoke):
    fake.script = ["abcdefgh<eos>"] * 2
    result = json.loads(invoke("run", "-p", "x", "--json", *arguments).out)
    assert (result["text"], result["stop_reason"]) == (text, reason)
    assert result["generated_tokens"] == len(result["tokens"]) == n_tokens
    fake.tokens.clear()
    assert invoke("run", "-p", "x", *arguments).out == text


def test_full_context_ends_with_length(fake, invoke):
    fake.n_ctx = 5
    fake.script = ["abcdefgh<eos>"]
    printed = invoke("run", "-p", "xyz", "--json")
    result = json.loads(printed.out)
    assert result["stop_reason"] == "length" and result["text"] == "abc"
    assert "context of 5 tokens is full: 3 of the prompt and 3 of the answer" in printed.err


THINKING = TEMPLATE + "{# </think> #}"
THOUGHT = "<think>\nhm\n</think>\n\nYes<eos>"


def test_thinking_goes_to_stderr(fake, invoke):
    fake.metadata["tokenizer.chat_template"] = THINKING
    fake.script = [THOUGHT] * 4
    result = invoke("run", "-p", "Hi")
    assert result.out == "Yes" and result.err.startswith("<think>\nhm\n</think>\n\n")
    printed = json.loads(invoke("run", "-p", "Hi", "--json").out)
    assert (printed["text"], printed["thinking"]) == ("Yes", "hm")
    for option in ("--inline-thinking", "--raw"):
        assert invoke("run", "-p", "Hi", option).out == THOUGHT.removesuffix("<eos>")


def test_thinking_that_the_prompt_opens(fake, invoke):
    fake.metadata["tokenizer.chat_template"] = TEMPLATE + "<think>\n"
    fake.script = ["hm</think>Yes<eos>", "hm"]
    printed = json.loads(invoke("run", "-p", "Hi", "--json").out)
    assert (printed["text"], printed["thinking"]) == ("Yes", "hm")
    fake.tokens.clear()
    printed = json.loads(invoke("run", "-p", "Hi", "--json", "-n", "2").out)
    assert (printed["text"], printed["thinking"]) == ("", "hm")


def test_thinking_is_switched_off(fake, invoke):
    fake.metadata["tokenizer.chat_template"] = TEMPLATE + "{{ enable_thinking }}"
    fake.script = ["a<eos>", "b<eos>"]
    invoke("run", "-p", "Hi", "--think", "off")
    assert prompt_of(fake).endswith("False")
    fake.metadata["tokenizer.chat_template"] = TEMPLATE
    assert invoke("run", "-p", "Hi", "--think", "off").out.strip() == "b"  # it cannot think
    result = invoke("run", "-p", "Hi", "--think", "on")
    assert result.code == 1 and "enable_thinking" in result.err
    assert invoke("run", "-p", "Hi", "--think", "on", "--raw").code == 2


def test_text_that_is_cut_inside_a_character(fake, invoke):
    fake.script = ["é<eos>"]
    assert invoke("run", "-p", "x", "-n", "1").out == "\ufffd"


def test_timing_line_goes_to_stderr(fake, invoke):
    fake.script = ["abc<eos>"] * 2
    result = invoke("run", "-p", "x")
    assert result.out == "abc"
    assert result.err == "prefill 1 token, 2.0 t/s | decode 3 tokens, 10.0 t/s\n"
    fake.tokens.clear()
    assert "attended" in invoke("run", "-p", "x", "-v").err


def test_interrupt_prints_what_there_is(fake, invoke):
    def interrupt(n: int) -> None:
        if n == 2:
            os.kill(os.getpid(), signal.SIGINT)

    fake.on_token = interrupt
    fake.script = ["abcdefgh<eos>"] * 2
    before = signal.getsignal(signal.SIGINT)
    result = invoke("run", "-p", "x", "-r", "cx")
    assert (result.code, result.out) == (130, "abc")
    fake.tokens.clear()
    result = invoke("run", "-p", "x", "--json")
    assert result.code == 130
    assert json.loads(result.out)["stop_reason"] == "interrupt"
    assert json.loads(result.out)["text"] == "abc"
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_during_prefill(fake, invoke):
    fake.on_prefill = lambda: os.kill(os.getpid(), signal.SIGINT)
    fake.script = ["abc<eos>"]
    result = invoke("run", "-p", "xyz", "--json")
    assert result.code == 130
    assert json.loads(result.out)["stop_reason"] == "interrupt"


def test_second_interrupt_leaves_at_once(fake, invoke):
    def interrupt(n: int) -> None:
        if n == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    fake.on_token = interrupt
    fake.script = ["abcdefgh<eos>"]
    result = invoke("run", "-p", "x")
    assert (result.code, result.out) == (130, "a")


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("aab aaab rest", ["aaab"], "aab "),
        ("one two three", ["three", "two"], "one "),
        ("ababac!", ["abac"], "ab"),
        ("nothing here", ["herein", "x"], "nothing here"),
        ("xyz", ["xyz"], ""),
        ("abc", [], "abc"),
    ],
)
def test_stop_strings_across_pieces(text, stops, shown, size):
    matcher = StopStrings(stops)
    out = ""
    for start in range(0, len(text), size):
        out += matcher.push(text[start : start + size])
        if matcher.found:
            break
    assert out + matcher.flush() == shown
    assert bool(matcher.found) == (shown != text)


def test_held_back_text_is_as_short_as_possible():
    matcher = StopStrings(["</s>", "User:"])
    assert matcher.push("Hello </") == "Hello "
    assert matcher.push("b> Us") == "</b> "
    assert matcher.push("ed") == "Used"


def test_verbose_tells_how_long_recalls_were_waited_for():
    ledger = {"rows_total": 10, "rows_scored": 5, "rows_attended": 2, "bytes_host": 0,
              "bytes_device": 0, "pages_recalled": 7, "us_waited": 1500, "heads_corrected": 1,
              "heads_stepped": 4}  # fmt: skip
    sequence = SimpleNamespace(ledger=lambda: ledger, tokens=[1], n_ctx=8, sparse_from=6144)
    line = ledger_line(sequence, "freekv")
    assert ", sparse from 6144 tokens on, " in line
    assert line.endswith("7 pages recalled (1.5 ms waited), 1 of 4 heads corrected")
