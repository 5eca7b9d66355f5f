"""``sparsekv-cli run``: one completion, made for pipelines: text (or one JSON object) on stdout."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.method_choice import settle
from sparsekv_cli.commands.options.model import (
    Invocation,
    ModelOptions,
    build_method,
    model_options,
    open_session,
)
from sparsekv_cli.commands.options.prefix import PrefixOptions, prefix_options, use_prefixes
from sparsekv_cli.commands.options.sampling import check_think_budget, sampling_options, stop_option
from sparsekv_cli.commands.shared.answer import (
    PrefillInterrupted,
    full_context_line,
    ledger_line,
    speed,
    stream_answer,
    timing_line,
)
from sparsekv_cli.commands.shared.prompt import (
    check_utf8,
    parse_special_option,
    read_prompt,
    think_option,
)
from sparsekv_cli.commands.shared.terminal import ShownAnswer, say, write_text
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.files import AppendedFile
from sparsekv_cli.generation.answer import STOP_INTERRUPT, Answer
from sparsekv_cli.generation.conversation import model_thinking, prompt_ids
from sparsekv_cli.generation.logprobs import LogProbs
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler

if TYPE_CHECKING:
    from sparsekv_cli.commands.run.tasks import Task
    from sparsekv_cli.session import Session

MAX_PARALLEL = 256


@click.command(cls=GroupedCommand, short_help="Complete one prompt; made for pipelines.")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; after a piped text, if any.")
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    shell_complete=files,
    help="Read the prompt from FILE; - is stdin.",
)
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="System message.")
@click.option(
    "--raw",
    is_flag=True,
    help="Give the prompt as it is: no chat template, and control tokens in it such as <|im_end|> "
    "are parsed, as llama.cpp does it. So it is with a model that has no template.",
)
@parse_special_option
@click.option(
    "-n",
    "--n-predict",
    metavar="N",
    type=click.IntRange(min=-1),
    default=-1,
    help="Most tokens to generate; -1: until the answer ends or the context is full. [default: -1]",
)
@stop_option
@think_option
@click.option(
    "--inline-thinking",
    is_flag=True,
    help="What the model thinks stays in the text, as it is with --raw and --special. By default "
    "it goes to stderr, and with --json and --jsonl to a field of its own.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--logprobs",
    metavar="N",
    type=click.IntRange(min=0),
    help="With --json and --jsonl: the logarithm of each token's probability, and of the N most "
    "likely ones.",
)
@click.option("--special", is_flag=True, help="Write control tokens such as <|im_end|>, too.")
@click.option(
    "--jsonl",
    is_flag=True,
    help="Read a JSON object a line, with 'prompt' or 'messages', and print an object for each.",
)
@click.option(
    "--parallel",
    metavar="N",
    type=click.IntRange(1, MAX_PARALLEL),
    help="With --jsonl: lines that are answered together. [default: 1]",
)
@click.option(
    "--output",
    metavar="FILE",
    shell_complete=files,
    help="With --jsonl: write to FILE, and go on where it ends.",
)
@click.option(
    "--ray",
    metavar="ADDRESS|auto",
    help="With --jsonl: answer the lines on the nodes of a Ray cluster (docs/distributed.md).",
)
@model_options()
@prefix_options
@sampling_options
@click.pass_context
def command(
    context: click.Context,
    options: ModelOptions,
    prefix: PrefixOptions,
    sampling: SamplingOptions,
    prompt: str | None,
    file: str | None,
    system: str | None,
    raw: bool,
    parse_special: bool,
    n_predict: int,
    stop: tuple[str, ...],
    think: bool | None,
    inline_thinking: bool,
    as_json: bool,
    logprobs: int | None,
    special: bool,
    jsonl: bool,
    parallel: int | None,
    output: str | None,
    ray: str | None,
) -> None:
    """Complete one prompt and print the text.

    The prompt is -p TEXT, -f FILE or what is piped to stdin; a piped text and -p give the text, a
    blank line, then TEXT. The model's chat template is applied unless --raw is given. The text goes
    to stdout, everything else to stderr. Many prompts at once: --jsonl.
    """
    if jsonl and (as_json or prompt is not None):
        raise click.UsageError("--jsonl excludes --json and -p", context)
    if not jsonl and any(each is not None for each in (parallel, output, ray)):
        raise click.UsageError("--parallel, --output and --ray need --jsonl", context)
    if ray is not None and prefix.session is not None:
        raise click.UsageError("--session is a file of one machine: leave it out", context)
    if logprobs is not None and not (as_json or jsonl):
        raise click.UsageError("--logprobs needs --json or --jsonl", context)
    if raw and system is not None:
        raise click.UsageError("-sys needs the chat template, which --raw switches off", context)
    if raw and think is not None:
        raise click.UsageError("--think needs the chat template, which --raw switches off", context)
    check_think_budget(context, sampling, think, raw=raw)
    if system is not None:
        system = check_utf8(system, "the system message given with -sys")
    if jsonl:
        from sparsekv_cli.commands.run.tasks import Task  # which imports pydantic

        task = Task(
            system=system,
            raw=raw,
            parse_special=parse_special,
            special=special,
            think=think,
            inline_thinking=inline_thinking,
            n_predict=n_predict,
            stop=stop,
            seed=options.seed,
            logprobs=logprobs,
            sampling=sampling,
        )
        _answer_lines(options, prefix, file, task, parallel or 1, output, ray)
        return
    text = read_prompt(prompt, file)
    session = open_session(options)
    ids = prompt_ids(session, text, system, raw=raw, parse_special=parse_special, think=think)
    options = settle(session, options, len(ids) + max(n_predict, 0))
    use_prefixes(session, prefix)
    marked = None if raw else model_thinking(session)
    thinking = None if special or inline_thinking else marked
    constraint = new_constraint(session, sampling, marked, think)
    sampler = new_sampler(session, sampling, options.seed, constraint)
    if logprobs is not None:
        sampler = remembered = LogProbs(sampler, logprobs, session.tokenizer)
    shown = ShownAnswer(sys.stderr, thinking[:2] if thinking is not None else ("", ""))
    write, write_thinking = (_ignore, _ignore) if as_json else (shown.write, shown.think)
    try:
        answer = stream_answer(
            session,
            ids,
            sampler,
            n_predict,
            stop,
            write,
            constraint,
            special=special,
            thinking=thinking,
            write_thinking=write_thinking,
        )
    except PrefillInterrupted:
        answer = Answer("", [], STOP_INTERRUPT)
    shown.end_thinking()
    if (line := full_context_line(session, answer, n_predict)) is not None:
        say(line)
    if as_json:
        printed = result(session, ids, answer, options.method)
        if options.choice is not None:
            printed["method"]["auto"] = options.choice
        if logprobs is not None:
            printed["logprobs"] = remembered.of(answer)
        click.echo(json.dumps(printed))
    else:
        if sys.stdout.isatty() and not answer.text.endswith("\n"):
            write_text("\n")
        say(timing_line(session))
        if context.ensure_object(Invocation).verbose:
            say(ledger_line(session, options.method))
    if answer.stop_reason == STOP_INTERRUPT:
        raise KeyboardInterrupt


def _ignore(_text: str) -> None:
    """The writer of ``--json``: the text is part of the object."""


def _answer_lines(
    options: ModelOptions,
    prefix: PrefixOptions,
    file: str | None,
    task: Task,
    n_parallel: int,
    path: str | None,
    ray: str | None,
) -> None:
    """``--jsonl``: what is in a file or on stdin, to a file or to stdout; on a Ray cluster."""
    from sparsekv_cli.commands.run.jsonl import Answering, Output, resume
    from sparsekv_cli.commands.run.ray import answer_lines
    from sparsekv_cli.distributed.cluster import check_address as check_ray

    n_done = resume(Path(path)) if path is not None else 0
    with contextlib.ExitStack() as stack:
        if file is None or file == "-":
            source: Iterable[bytes] = sys.stdin.buffer
        else:
            source = stack.enter_context(Path(file).open("rb"))
        lines = itertools.islice(enumerate(source, start=1), n_done, None)
        write: Callable[[str], object] = partial(write_text, stream=sys.stdout)
        if path is not None:
            write = stack.enter_context(AppendedFile(path)).write
        if n_done:
            say(f"{path} has answers up to line {n_done}: going on behind it")
        if ray is not None:
            check_ray(ray)
        session = open_session(options)
        options = settle(session, options)
        if ray is not None:
            method = build_method(options.method, options.method_options, options.named)
            n_answered, n_failed = answer_lines(
                ray, session, method, prefix, task, n_parallel, lines, write
            )
        else:
            use_prefixes(session, prefix)
            output = Output(write)
            Answering(session, n_parallel, output).run(lines, task)
            n_answered, n_failed = output.n_answered, output.n_failed
            say(timing_line(session))
    if n_failed:
        raise SparseKVError(f"{n_failed} of {n_failed + n_answered} lines have no answer")


def result(session: Session, ids: list[int], answer: Answer, method: str) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    timings = session.timings
    return {
        "text": answer.text,
        "thinking": answer.thinking,
        "prompt_tokens": len(ids),
        "cached_tokens": timings.cached_tokens,
        "generated_tokens": len(answer.tokens),
        "tokens": [int(token) for token in answer.tokens],
        "stop_reason": answer.stop_reason,
        "timings": {
            "load_s": timings.load_s,
            "prefill_s": timings.prefill_s,
            "prefill_tps": speed(timings.prefill_tokens, timings.prefill_s),
            "ttft_s": timings.ttft_s,
            "decode_s": timings.decode_s,
            "decode_tps": speed(timings.decode_tokens, timings.decode_s),
        },
        "method": {
            "name": method,
            "options": session.method_options(),
            "sparse_from": session.sparse_from,
        },
        "ledger": session.ledger.as_dict(),
    }
