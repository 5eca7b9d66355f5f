"""The group: help without heavy imports, and failures as a line and an exit code."""

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sparsekv_cli import __version__, cli
from sparsekv_cli.commands.run import run as run_module
from sparsekv_cli.commands.shared.terminal import one_line
from sparsekv_cli.errors import SparseKVError

PROGRAM = [sys.executable, "-m", "sparsekv_cli"]
HEAVY = ("torch", "numba", "gguf", "rich", "numpy", "jinja2", "tokenizers", "sentencepiece")
MOST_MODULES = 200  # Python's own and click are 130, which take a tenth of a second


def test_help_lists_every_command_and_imports_none(invoke):
    result = invoke("--help")
    assert result.code == 0
    for name, (_, short) in cli.COMMANDS.items():
        assert name in result.out and short in result.out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_listed_command_has_help(name, invoke):
    result = invoke(name, "--help")
    assert result.code == 0 and f"sparsekv-cli {name}" in result.out
    assert "--verbose" in result.out


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_are_light(argument):
    code = (
        "import sys\nfrom sparsekv_cli.cli import main\n"
        f"try:\n    main([{argument!r}])\nexcept SystemExit as error:\n    assert not error.code\n"
        f"print([m for m in {HEAVY} if m in sys.modules], len(sys.modules) < {MOST_MODULES})\n"
        "print([m for m in sys.modules if m.startswith('sparsekv_cli.commands.run')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[] True", "[]"]
    assert argument == "--help" or __version__ in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "run, chat"),
        (["cht"], "did you mean chat?"),
        (["run", "--nonsense"], "--nonsense"),
        (["run", "-n", "-5"], "-5"),
        (["run", "-o", "budget"], "KEY=VALUE"),
        (["run", "-o", "a=1", "-o", "a=2"], "twice"),
        (["run", "--device", "tpu"], "tpu"),
        (["run", "-p", "x", "--top-p", "7"], "top_p"),
        (["run", "-p", "x", "--temp", "nan"], "temp"),
        (["run", "-p", "x", "-l", "12"], "ID+BIAS"),
        (["run", "-p", "x", "--samplers", "top_k;magic"], "magic"),
        (["run", "-p", "x", "--samplers", "top_k;tempreature"], "did you mean temperature?"),
        (["run", "-p", "x", "--method", "lpfs"], "did you mean lfps?"),
        (["run", "-p", "x", "--method", "lfps", "-o", "canddates=5"], "did you mean candidates?"),
        (["compare", "-p", "x", "--methods", "ful,lfps"], "did you mean full?"),
        (["run", "-p", "x", "-r", ""], "empty"),
        (["run", "-p", "x", "--raw", "-sys", "y"], "--raw"),
        (["run", "-p", "x", "--method", "nonsense"], "streaming"),
        (["run", "-p", "x", "--method", "topk", "-o", "nonsense=1"], "budget"),
        (["run", "-p", "x", "--method", "topk", "--budget", "200%"], "200%"),
        (["run", "-p", "x", "--cache-type-k", "q6_K"], "q8_0"),
        (["run", "-p", "x", "-m", "missing.gguf", "-ctk", "q8_0", "--method", "sals"], "sals"),
        (["run", "-p", "x", "-ctv", "f16", "-o", "cache_type_v=f16"], "twice"),
        (["bench", "--method", "full,freekv", "-ctv", "q8_0"], "freekv"),
        (["bench", "-p", "0", "-n", "0"], "nothing to measure"),
        (["bench", "-d", "1,x"], "1,x"),
        (["bench", "-pg", "5"], "PROMPT,GEN"),
        (["plan", "-m", "none", "--methods", "fulll"], "did you mean full"),
        (["plan", "-m", "none", "--methods", "full", "-o", "window=3"], "window"),
        (["plan", "-m", "none", "--device", "cuda"], "plan measures the CPU"),
        (["plan", "-m", "none", "--calibration", "a.npz"], "uses the model's calibrations"),
        (["advise", "-m", "none", "--device", "cuda"], "advise measures the CPU"),
        (["advise", "-m", "none", "-o", "window=3"], "leave -o out"),
        (["advise", "-m", "none", "--budget", "much"], "budget = 'much'"),
        (["advise", "-m", "none", "-ctk", "q9"], "cache_type_k = 'q9'"),
        (["advise", "-m", "none", "--calibration", "a.npz"], "uses the model's calibrations"),
        (["tokenize", "a", "-p", "b"], "given more than once"),
        (["tokenize", "-p", "a", "-f", "b"], "given more than once"),
        (["tokenize", "--ids", "--json", "a"], "exclude each other"),
        (["warmup", "--method", "full, no-such-method"], "unknown method 'no-such-method': "),
    ],
)
def test_usage_errors_exit_with_2(arguments, words, invoke):
    result = invoke(*arguments)
    assert result.code == 2, result.err
    assert words in result.err and result.err.startswith("error: ")
    assert result.err.count("\n") == 1 and "--help" in result.err
    assert result.out == ""


@pytest.mark.parametrize("arguments", [[], ["eval"], ["cache"]])
def test_no_command_shows_the_help(arguments, invoke):
    result = invoke(*arguments)
    assert result.code == 2 and "\nCommands:\n" in result.err and result.out == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SparseKVError("found this,\n  expected that"), "error: found this, expected that"),
        (MemoryError(), "error: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "error: out of mem"),
        (FileNotFoundError(2, "No such file or directory", "x.gguf"), "error: x.gguf: No such"),
        (TypeError("odd"), "error: unexpected TypeError: odd"),
    ],
)
@pytest.mark.parametrize("verbose", [(), ("-v",)])
def test_failures_are_one_line_with_exit_code_1(error, line, verbose, invoke, monkeypatch):
    def fail(options: object) -> None:
        raise error

    monkeypatch.setattr(run_module, "open_model", fail)
    for arguments in ((*verbose, "run", "-p", "x"), ("run", "-p", "x", *verbose)):
        result = invoke(*arguments)
        assert result.code == 1 and result.out == ""
        *trace, last = result.err.splitlines()
        assert last.startswith(line)
        assert any("Traceback" in part for part in trace) == bool(verbose)
        assert verbose or not trace


def test_ctrl_c_exits_with_130(invoke, monkeypatch):
    def interrupt(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "open_model", interrupt)
    result = invoke("run", "-p", "x")
    assert (result.code, result.out, result.err) == (130, "", "")


@pytest.mark.parametrize(
    "hook",
    [
        "sys.addaudithook(lambda event, told: (event, told[0]) == ('import', 'click') and stop())",
        "atexit.register(stop)",
    ],
)
def test_ctrl_c_is_quiet_before_and_after_the_command(hook):
    program = textwrap.dedent(f"""
        import atexit, os, signal, sys
        stop = lambda: os.kill(os.getpid(), signal.SIGINT)
        {hook}
        from sparsekv_cli.__main__ import main
        sys.argv[1:] = ["--version"]
        main()
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize(
    ("name", "place", "code"),
    [("TERM", "a.py", 143), ("TERM", "llvmlite/a.py", -signal.SIGTERM), ("HUP", "a.py", 129)],
)
def test_a_signal_to_end_leaves_no_half_file(name, place, code, tmp_path):
    """Unless LLVM runs, in whose callbacks an exception would be lost."""
    program = textwrap.dedent(f"""
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIG{name}, signal.SIG_DFL)  # under nohup it would be ignored
        from sparsekv_cli import cli
        from sparsekv_cli.system.files import replacing
        stop = compile("os.kill(os.getpid(), signal.SIG{name}); time.sleep(9)", sys.argv[1], "exec")
        def write(_):
            with replacing(pathlib.Path(sys.argv[2])):
                exec(stop)
        cli._invoke = write
        cli.main()
    """)
    command = [sys.executable, "-c", program, place, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert code < 0 or not [*tmp_path.iterdir()]


def test_control_characters_of_a_file_do_not_reach_the_terminal():
    assert one_line("bad \x1b[31mname\x07\nnext") == "bad \\x1b[31mname\\x07 next"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("{ sleep 0.5; PROGRAM run --help; echo $? >&2; } | true", 0, "0\n"),
        ("PROGRAM --version >&-", 0, ""),
        ("PROGRAM run --help >/dev/full", 1, "error: No space left on device\n"),
        ("PROGRAM run --nonsense 2>/dev/full", 2, ""),
    ],
)
def test_a_closed_or_full_output_is_quiet_or_a_line(line, code, said):
    if "/dev/full" in line and not Path("/dev/full").exists():
        pytest.skip("needs a device that is always full")
    command = ["bash", "-c", line.replace("PROGRAM", " ".join(PROGRAM))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, said)
