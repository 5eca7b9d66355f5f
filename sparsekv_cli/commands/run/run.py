"""``sparsekv-cli run``: one answer, for pipelines: text or one JSON object on stdout."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.method_choice import choose_method
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    build_method,
    gathered,
    model_options,
    open_model,
)
from sparsekv_cli.commands.options.numbers import WholeRange
from sparsekv_cli.commands.options.prefix import PrefixOptions, open_prompt_rows, prefix_options
from sparsekv_cli.commands.options.prompt import (
    files_option,
    parse_special_option,
    prompt_option,
    think_option,
)
from sparsekv_cli.commands.options.sampling import check_think_budget, sampling_options, stop_option
from sparsekv_cli.commands.options.verbose import Invocation
from sparsekv_cli.commands.run.task import Task, gather_task
from sparsekv_cli.commands.shared.answer import (
    PrefillInterrupted,
    answer_fields,
    depth_note,
    full_context_line,
    ledger_line,
    moved_note,
    speculation_line,
    stream_answer,
    timing_line,
)
from sparsekv_cli.commands.shared.prompt import check_utf8, read_prompt
from sparsekv_cli.commands.shared.terminal import ShownAnswer, say, write_text
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer import STOP_INTERRUPT, Answer
from sparsekv_cli.prefix.difference import explain
from sparsekv_cli.settings.config import dense_below
from sparsekv_cli.system.files import AppendedFile

if TYPE_CHECKING:
    from sparsekv_cli.sequence import Sequence

MAX_PARALLEL = 256


@click.command(cls=GroupedCommand)
@prompt_option
@files_option(
    "Read the prompt from FILE; - is stdin. Several files are read in order, each after its name."
)
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="System message.")
@click.option(
    "--raw", is_flag=True,
    help="Give the model the prompt as it is, without chat template. Control tokens such as "
    "<|im_end|> are parsed, as in llama.cpp. Always so for a model without a template.",
)  # fmt: skip
@parse_special_option
@click.option(
    "-n", "--n-predict", metavar="N", type=WholeRange(min=-1), default=-1,
    help="Most tokens to generate; -1: until the answer ends or the context is full. [default: -1]",
)  # fmt: skip
@stop_option
@think_option
@click.option(
    "--inline-thinking", is_flag=True,
    help="Leave the thinking in the text, as --raw and --special do. By default it goes to stderr, "
    "or with --json and --jsonl to a field of its own.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--logprobs", metavar="N", type=WholeRange(min=0),
    help="With --json and --jsonl: the logarithm of each token's probability, and of the N most "
    "likely ones.",
)  # fmt: skip
@click.option("--special", is_flag=True, help="Also write control tokens such as <|im_end|>.")
@click.option(
    "--jsonl", is_flag=True,
    help="Read lines of JSON objects with 'prompt' or 'messages', and print an object for each.",
)  # fmt: skip
@click.option(
    "--parallel", metavar="N", type=WholeRange(1, MAX_PARALLEL),
    help="With --jsonl: lines that are decoded together. [default: 1]",
)  # fmt: skip
@click.option(
    "--output", metavar="FILE", shell_complete=files,
    help="With --jsonl: write to FILE. If it has answers, continue after them.",
)  # fmt: skip
@click.option(
    "--ray", metavar="ADDRESS|auto",
    help="With --jsonl: answer the lines on the nodes of a Ray cluster (docs/distributed.md).",
)  # fmt: skip
@model_options()
@prefix_options
@sampling_options
@gathered("task", gather_task, [])
@click.pass_context
def command(
    context: click.Context,
    options: ModelOptions,
    prefix: PrefixOptions,
    task: Task,
    prompt: str | None,
    file: tuple[str, ...],
    as_json: bool,
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
        raise click.UsageError("--jsonl excludes --json and -p: give one of them", context)
    if not jsonl and any(each is not None for each in (parallel, output, ray)):
        raise click.UsageError("--parallel, --output and --ray need --jsonl", context)
    if ray is not None and prefix.session is not None:
        raise click.UsageError("--session is for one machine: leave it or --ray out", context)
    if task.logprobs is not None and not (as_json or jsonl):
        raise click.UsageError("--logprobs needs --json or --jsonl", context)
    if task.raw and task.system is not None:
        raise click.UsageError("-sys needs the chat template, which --raw switches off", context)
    if task.raw and options.config.chat_template:
        raise click.UsageError("--chat-template and --raw exclude each other", context)
    if task.raw and task.think is not None:
        raise click.UsageError("--think needs the chat template, which --raw switches off", context)
    check_think_budget(context, task.sampling, task.think, raw=task.raw)
    if task.system is not None:
        task = replace(task, system=check_utf8(task.system, "the system message given with -sys"))
    if jsonl:
        _answer_lines(options, prefix, file, task, parallel or 1, output, ray)
        return
    task = replace(task, prompt=read_prompt(prompt, file))
    model = open_model(options)
    ids = task.ids(model)
    model, options = choose_method(model, options, len(ids) + max(task.n_predict, 0))
    rows = open_prompt_rows(model, prefix, model.method)
    prepared = task.prepared(model)
    thinking = prepared.keywords["thinking"]  # None: the thinking is part of the answer's text
    shown = ShownAnswer(sys.stderr, thinking[:2] if thinking is not None else ("", ""))
    writers: dict[str, Any] = {"write": shown.write, "write_thinking": shown.think}
    sequence = model.sequence()
    begin = partial(prepared, sequence, **({} if as_json else writers))
    try:
        answer = stream_answer(sequence, ids, begin, rows=rows)
    except PrefillInterrupted:
        answer = Answer("", [], STOP_INTERRUPT)
    finally:
        shown.end_line()
    if line := full_context_line(model, sequence, answer):
        say(line)
    left = sequence.difference
    why = None if left is None else explain(left, ids, model.tokenizer)
    is_verbose = context.ensure_object(Invocation).verbose
    if why is not None and is_verbose:
        say(why.line())
    if as_json:
        printed = result(sequence, ids, answer, options.method)
        if why is not None:
            printed["difference"] = why._asdict()
        if options.choice is not None:
            printed["method"]["auto"] = options.choice
        if task.logprobs is not None:
            printed["logprobs"] = answer.logprobs
        write_text(json.dumps(printed) + "\n")
    else:
        say(timing_line(sequence.timings) + moved_note(sequence) + depth_note(sequence, len(ids)))
        if is_verbose:
            say(ledger_line(sequence, options.method))
            if line := speculation_line(sequence.timings):
                say(line)
    if answer.stop_reason == STOP_INTERRUPT:
        raise KeyboardInterrupt


def _answer_lines(
    options: ModelOptions,
    prefix: PrefixOptions,
    files: tuple[str, ...],
    task: Task,
    n_parallel: int,
    path: str | None,
    ray: str | None,
) -> None:
    """Runs ``--jsonl``: answers lines of files or stdin, and writes to ``path`` or stdout.

    ray: the address of a cluster that answers; None: this machine answers.
    """
    from sparsekv_cli.commands.run.jsonl import LineAnswers, Output, resume
    from sparsekv_cli.commands.run.ray import answer_lines
    from sparsekv_cli.distributed.cluster import check_address as check_ray

    n_done = n_old = n_old_failed = 0
    with contextlib.ExitStack() as stack:
        source: Iterable[bytes] = itertools.chain.from_iterable(
            sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
            for file in files or ("-",)
        )
        write: Callable[[str], object] = partial(write_text, stream=sys.stdout)
        if path is not None:
            write = stack.enter_context(AppendedFile(path, is_alone=True)).write
            n_done, n_old, n_old_failed = resume(Path(path))
        lines = itertools.islice(enumerate(source, start=1), n_done, None)
        if n_done:
            say(f"{path} has answers up to line {n_done}: continuing after it")
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
            depth = f" | {options.method}: {dense_below(n)}" if (n := model.sparse_from) else ""
            say(timing_line(answers.timings) + depth)
            if line := speculation_line(answers.timings):
                say(line)
    n_failed += n_old_failed
    if n_failed:
        n_lines = n_failed + n_answered + n_old
        raise SparseKVError(f"{n_failed} of {n_lines} lines have no answer")


def result(sequence: Sequence, ids: list[int], answer: Answer, method: str) -> dict[str, Any]:
    """Returns the object of ``--json``."""
    return {
        **answer_fields(answer, len(ids)),
        "cached_tokens": sequence.timings.cached_tokens,
        **sequence.moved.usage(),
        "timings": sequence.timings.as_dict(),
        "method": {
            "name": method,
            "options": sequence.method.options(),
            "sparse_from": sequence.sparse_from,
        },
        "ledger": sequence.ledger(),
    }
