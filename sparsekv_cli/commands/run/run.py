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
from sparsekv_cli.commands.options.method_choice import choose_method
from sparsekv_cli.commands.options.model import (
    Invocation,
    ModelOptions,
    build_method,
    model_options,
    open_model,
)
from sparsekv_cli.commands.options.prefix import PrefixOptions, open_prompt_rows, prefix_options
from sparsekv_cli.commands.options.sampling import check_think_budget, sampling_options, stop_option
from sparsekv_cli.commands.shared.answer import (
    PrefillInterrupted,
    full_context_line,
    ledger_line,
    speculation_line,
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
from sparsekv_cli.generation.generation import Generation
from sparsekv_cli.generation.logprobs import LogProbs
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler

if TYPE_CHECKING:
    from sparsekv_cli.commands.run.tasks import Task
    from sparsekv_cli.sequence import Sequence

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

    The prompt is -p TEXT, -f FILE or the text that is piped to stdin. A piped text and -p give the
    text, a blank line, then TEXT. Without --raw the model's chat template is applied. The text
    goes to stdout, everything else to stderr. Many prompts at once: --jsonl.
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
    model = open_model(options)
    ids = prompt_ids(model, text, system, raw=raw, parse_special=parse_special, think=think)
    model, options = choose_method(model, options, len(ids) + max(n_predict, 0))
    rows = open_prompt_rows(model, prefix, model.method)
    marked = None if raw else model_thinking(model)
    thinking = None if special or inline_thinking else marked
    constraint = new_constraint(model, sampling, marked, think)
    sampler = new_sampler(model, sampling, options.seed, constraint)
    if logprobs is not None:
        sampler = remembered = LogProbs(sampler, logprobs, model.tokenizer)
    shown = ShownAnswer(sys.stderr, thinking[:2] if thinking is not None else ("", ""))
    write, write_thinking = (_ignore, _ignore) if as_json else (shown.write, shown.think)
    sequence = model.sequence()
    begin = partial(
        Generation,
        model.tokenizer,
        sequence,
        sampler,
        n_predict=n_predict,
        stops=stop,
        constraint=constraint,
        special=special,
        thinking=thinking,
        write=write,
        write_thinking=write_thinking,
    )
    try:
        answer = stream_answer(sequence, ids, begin, rows=rows)
    except PrefillInterrupted:
        answer = Answer("", [], STOP_INTERRUPT)
    shown.end_thinking()
    if (line := full_context_line(model, sequence, answer, n_predict)) is not None:
        say(line)
    if as_json:
        printed = result(sequence, ids, answer, options.method)
        if options.choice is not None:
            printed["method"]["auto"] = options.choice
        if logprobs is not None:
            printed["logprobs"] = remembered.of(answer)
        click.echo(json.dumps(printed))
    else:
        if sys.stdout.isatty() and not answer.text.endswith("\n"):
            write_text("\n")
        say(timing_line(sequence.timings))
        if context.ensure_object(Invocation).verbose:
            say(ledger_line(sequence, options.method))
            if line := speculation_line(sequence.timings):
                say(line)
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
    from sparsekv_cli.commands.run.jsonl import LineAnswers, Output, resume
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
        model, options = choose_method(open_model(options), options)
        if ray is not None:
            method = build_method(options.method, options.method_options, options.named)
            n_answered, n_failed = answer_lines(
                ray, model, method, prefix, task, n_parallel, lines, write
            )
        else:
            output = Output(write)
            rows = open_prompt_rows(model, prefix, model.method)
            answers = LineAnswers(model, n_parallel, output, rows)
            answers.run(lines, task)
            n_answered, n_failed = output.n_answered, output.n_failed
            say(timing_line(answers.timings))
            if told := speculation_line(answers.timings):
                say(told)
    if n_failed:
        raise SparseKVError(f"{n_failed} of {n_failed + n_answered} lines have no answer")


def result(sequence: Sequence, ids: list[int], answer: Answer, method: str) -> dict[str, Any]:
    """Returns the object that ``--json`` prints."""
    return {
        "text": answer.text,
        "thinking": answer.thinking,
        "prompt_tokens": len(ids),
        "cached_tokens": sequence.timings.cached_tokens,
        "generated_tokens": len(answer.tokens),
        "tokens": [int(token) for token in answer.tokens],
        "stop_reason": answer.stop_reason,
        "timings": sequence.timings.as_dict(),
        "method": {
            "name": method,
            "options": sequence.method.options(),
            "sparse_from": sequence.sparse_from,
        },
        "ledger": sequence.ledger(),
    }
