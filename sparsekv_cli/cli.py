"""The command group: finds sub-commands lazily, turns failures into a line and an exit code.

Nothing heavy is imported here: ``--help`` and ``--version`` read the table below and load no
command module.
"""

import errno
import io
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from sparsekv_cli import __version__
from sparsekv_cli.commands.completion import answer_shell
from sparsekv_cli.commands.options.elsewhere import unknown_option
from sparsekv_cli.commands.options.habits import translated
from sparsekv_cli.commands.options.verbose import Invocation, verbose_option
from sparsekv_cli.commands.shared.terminal import one_line, say
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.settings.option import did_you_mean

PROGRAM = "sparsekv-cli"

# Name -> (module with `command`, short help), in the order that --help shows.
COMMANDS = {
    "run": ("sparsekv_cli.commands.run.run", "Complete one prompt; made for pipelines."),
    "chat": (
        "sparsekv_cli.commands.chat.chat",
        "Talk to a model; the KV cache is kept across turns.",
    ),
    "serve": (
        "sparsekv_cli.commands.serve",
        "Serve OpenAI's and Anthropic's protocols, and a page.",
    ),
    "bench": (
        "sparsekv_cli.commands.bench.bench",
        "Measure prefill and decode speed at any depth.",
    ),
    "compare": ("sparsekv_cli.commands.compare.compare", "Compare methods on one prompt."),
    "eval": (
        "sparsekv_cli.commands.eval.group",
        "Measure what methods lose: perplexity, KLD, RULER.",
    ),
    "advise": (
        "sparsekv_cli.commands.advise.advise",
        "Say which method to take for a document, and what it loses.",
    ),
    "plan": ("sparsekv_cli.commands.plan", "Forecast memory and speed of every method."),
    "calibrate": (
        "sparsekv_cli.commands.calibrate",
        "Measure what some methods must know about a model.",
    ),
    "inspect": ("sparsekv_cli.commands.inspect.inspect", "Show what a GGUF file holds."),
    "tokenize": ("sparsekv_cli.commands.tokenize", "Turn text into token ids."),
    "methods": ("sparsekv_cli.commands.methods", "List the KV-cache methods and their options."),
    "models": (
        "sparsekv_cli.commands.models",
        "List, get or remove the models that -m takes by name.",
    ),
    "cache": ("sparsekv_cli.commands.cache", "List or clear the prompts that are kept on disk."),
    "warmup": (
        "sparsekv_cli.commands.warmup",
        "Compile all kernels now, so that later runs start at once.",
    ),
    "doctor": ("sparsekv_cli.commands.doctor", "Show what a bug report needs."),
    "completion": ("sparsekv_cli.commands.completion", "Print the completion script of a shell."),
}

OWN_OPTIONS = ("-h", "--help", "-V", "--version", "-v", "--verbose")

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class LazyGroup(click.Group):
    """A group whose sub-commands are imported only when they run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = list(args)
        at = next((i for i, each in enumerate(args) if each not in ("-v", "--verbose")), len(args))
        words = args[at:]
        if words and words[0].startswith("-") and words[0] not in OWN_OPTIONS:
            ctx.fail(
                f"No such option {words[0]!r} ahead of a command: begin with one, such as "
                f"'{PROGRAM} chat -m MODEL' or '{PROGRAM} run -m MODEL -p TEXT'."
            )
        words = translated(words, COMMANDS)
        return super().parse_args(ctx, [*args[:at], *words])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return import_module(COMMANDS[cmd_name][0]).command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [(name, short) for name, (_, short) in COMMANDS.items()]
        items = [CompletionItem(n, help=short) for n, short in found if n.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, short) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = did_you_mean(name, COMMANDS)
            ctx.fail(f"No such command {name!r}{close}; the commands are {', '.join(COMMANDS)}.")
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=f"'{PROGRAM} COMMAND --help' shows the options of a command.",
)
@click.version_option(__version__, "-V", "--version", prog_name=PROGRAM)
@verbose_option
def cli() -> None:
    """Run GGUF models on long contexts with sparse KV-cache methods."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point: runs one command line and exits with its code."""
    _repair_standard_streams()
    if sys.platform == "win32":
        say("error: Windows is not supported: run sparsekv-cli in WSL, Windows' own Linux")
        sys.exit(EXIT_FAILED)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    answered = answer_shell(cli, PROGRAM)
    if answered is not None:
        sys.exit(answered)
    with warnings.catch_warnings():
        warnings.showwarning = _say_warning
        try:
            if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # __main__ has set that
                signal.signal(signal.SIGINT, signal.default_int_handler)
            code = _invoke(sys.argv[1:] if arguments is None else list(arguments))
        except BrokenPipeError:
            code = 0  # the reader of stdout has gone (``| head``)
            _discard_unwritten_output()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process as the signal does, but temporary files and changes of a terminal go.

    An exception within LLVM would be lost, so there the signal itself ends the process.
    """
    if any("llvmlite" in each.f_code.co_filename for each, _ in traceback.walk_stack(frame)):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Says the first line of a library's warning. Later lines are for developers."""
    first, *_rest = str(message).strip().splitlines() or [""]
    say(f"warning: {one_line(first)}")


def _invoke(arguments: list[str]) -> int:
    """Runs the group; returns the exit code, raises BrokenPipeError and KeyboardInterrupt."""
    invocation = Invocation()
    try:
        with cli.make_context(PROGRAM, arguments, obj=invocation) as context:
            cli.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as error:
        sys.stdout.flush()
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # a group without a command shows its help
        return EXIT_USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else PROGRAM
        text = error.format_message()
        if isinstance(error, click.NoSuchOption) and error.ctx is not None:
            known = [name for each in error.ctx.command.get_params(error.ctx) for name in each.opts]
            text = unknown_option(error.option_name, known)
        say(f"error: {one_line(text)} ('{command} --help' shows the usage)")
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        raise
    except Exception as error:
        if invocation.verbose:
            say(traceback.format_exc().rstrip())
        say(f"error: {describe(error)}")
        _discard_unwritten_output()
        return EXIT_FAILED


def describe(error: Exception) -> str:
    """Returns a line for an exception: expected failures as they are, others by their type."""
    causes = list(_causes(error))
    if any(os.strerror(errno.EMFILE) in str(each) for each in causes):
        text = "too many open files: allow more with 'ulimit -n 1024'"
    elif isinstance(error, SparseKVError):
        text = str(error)
    elif any(map(_is_out_of_memory, causes)):
        text = "out of memory: use a smaller context (-c) or a smaller model"
    elif isinstance(error, click.ClickException):
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = f"unexpected {type(error).__name__}: {error} (-v shows where)"
    return one_line(text)


# Messages for a lack of memory: torch's on the host, the library loader's, the system's, and the
# interpreter's if C code reported none (SystemError).
MEMORY_WORDS = (
    "can't allocate memory",
    "failed to map segment",
    os.strerror(errno.ENOMEM),
    "error return without exception set",
    "returned NULL without setting an exception",
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_out_of_memory(error: BaseException) -> bool:
    # torch has another class for a GPU's memory.
    is_lack = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_lack or any(words in str(error) for words in MEMORY_WORDS)


def _repair_standard_streams() -> None:
    """Gives a closed standard stream (``>&-``) a null device; all are UTF-8 in every locale."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "replace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):  # a test may have replaced it
            stream.reconfigure(encoding="utf-8", errors=errors)


def _discard_unwritten_output() -> None:
    """Points stdout at the null device if it cannot be flushed, so that exiting prints nothing."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null_device, sys.stdout.fileno())
        except (OSError, ValueError):
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        finally:
            os.close(null_device)
