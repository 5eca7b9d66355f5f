"""``compare``: measures methods on one prompt: change of the logits, memory and speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from sparsekv_cli.commands.compare.report import about, check_outputs, print_report, write_reports
from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.long_context import warn_of_long_context
from sparsekv_cli.commands.options.model import (
    CONTEXT_OPTION,
    ModelOptions,
    find_model,
    load_model,
    model_options,
    prepare_methods,
)
from sparsekv_cli.commands.options.numbers import WholeRange, number_list
from sparsekv_cli.commands.options.prompt import file_option, prompt_option
from sparsekv_cli.commands.shared.header import model_header
from sparsekv_cli.commands.shared.progress import CompileProgress, PrefillProgress
from sparsekv_cli.commands.shared.prompt import read_prompt
from sparsekv_cli.commands.shared.terminal import say, write_json
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import prompt_ids
from sparsekv_cli.system.work import load_beyond_cores

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.needles import Needle
    from sparsekv_cli.evaluation.result import MethodResult
    from sparsekv_cli.methods.base import Method

DEFAULT_STEPS = 64
LEAST_NEEDLE = 128  # tokens of a prompt with a fact, a question and a little of the document


def needle_lengths(context: click.Context, parameter: click.Parameter, value: str) -> Sequence[int]:
    """Callback of --needles: returns the lengths; [] without the option."""
    lengths = number_list(context, parameter, value) if value else []
    if lengths and min(lengths) < LEAST_NEEDLE:
        raise click.BadParameter(f"{min(lengths)} tokens are too few: {LEAST_NEEDLE} or more")
    return lengths


@click.command(cls=GroupedCommand)
@prompt_option
@file_option("Read the prompt from FILE; - is stdin.")
@click.option("--raw", is_flag=True, help="No chat template; control tokens are parsed.")
@click.option(
    "--methods", metavar="LIST", shell_complete=completers.methods, default="full,topk,lfps",
    help="Methods, separated by commas, each with its own options if any, as in "
    "lfps:preset=paper;budget=10%; 'all' is every method. [default: full,topk,lfps]",
)  # fmt: skip
@click.option(
    "--sweep", "sweeps", metavar="OPTION=LIST", multiple=True,
    help="Each method once with each value of an option, as in budget=1%,2%,5%,10%; repeatable.",
)  # fmt: skip
@click.option(
    "--steps", "n_steps", metavar="N", type=WholeRange(min=4),
    help=f"Tokens that every method decodes. [default: {DEFAULT_STEPS}]",
)  # fmt: skip
@click.option(
    "--continuation", metavar="FILE",
    help="Decode this text instead of the text that the full model would write.",
)  # fmt: skip
@click.option(
    "--needles", metavar="LIST", default="", callback=needle_lengths,
    help="Also plant a fact at five depths of a document of these lengths in tokens, as in "
    "1024,2048, and ask every method for it.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--html", metavar="FILE", shell_complete=files, help="Write a report, one page, to FILE."
)
@click.option("--png", metavar="FILE", shell_complete=files, help="Write its pictures to FILE.")
@CONTEXT_OPTION
@model_options(bench=True, sparse_from=False, seed=False)
def command(
    options: ModelOptions,
    prompt: str | None,
    file: str | None,
    raw: bool,
    methods: str,
    sweeps: Sequence[str],
    n_steps: int | None,
    continuation: str | None,
    needles: Sequence[int],
    as_json: bool,
    html: str | None,
    png: str | None,
) -> None:
    """Prefill a prompt once, then let every method decode the same tokens.

    KLD and top-1 compare a method's predictions with those of dense attention. Mass is the share of
    the exact softmax that falls on the rows a method attends to. 'of' is the mass of exact top-k
    with as many rows. Overlap is the share of these rows that exact top-k would choose. All are
    measured on the layers that choose rows, in the first half of the steps. Speed is measured in
    the second half. Attended and scored are rows a head, layer and step. Below each figure is its
    95% bootstrap interval over the tokens. Methods that differ only by noise are named below the
    table. A method's options, such as --budget, apply to every method that has them and does not
    state its own. The first row, full, is the reference and always has its cache in f16.
    full:cache_type_k=q8_0;cache_type_v=q8_0 shows the cost of a cache type alone. The prompt is
    read with f16 there, too, and then stored in the type.

    This runs on the CPU. With --device cuda each method has its own prefill there, after a short
    trial.
    """
    config = options.config
    if config.device == "auto":
        config = replace(config, device="cpu")
    chosen = parse(methods, options, sweeps)
    check_outputs(html, png)
    text = read_prompt(prompt, file)
    following = None
    if continuation is not None:
        following = read_prompt(None, continuation, "continuation", "--continuation FILE")
    path = find_model(options.model)
    with model_header(path, options.config) as header:
        ids = prompt_ids(header, text, system=None, raw=raw, parse_special=False)
        tokens = None
        if following is not None:
            tokens = header.tokenizer.encode(
                following, add_bos=False, add_eos=False, parse_special=False
            )
    steps = count_steps(n_steps, tokens)
    compiling = CompileProgress()
    model = load_model(path, chosen["full"], config, compiling)
    warn_of_long_context(model)
    from sparsekv_cli.evaluation.compare import compare
    from sparsekv_cli.evaluation.needles import find_needles, plant_needles
    from sparsekv_cli.evaluation.result import contents

    encode = partial(prompt_ids, model, system=None, raw=raw, parse_special=False)
    prompts = plant_needles(model, text, needles, encode)
    prepare_methods(model, chosen.values(), compiling)
    is_busy = load_beyond_cores() is not None
    rows: list[MethodResult] = []
    planted: list[Needle] = []
    stop = None
    try:
        with PrefillProgress() as prefilling, PrefillProgress("decode") as decoding:
            rows.extend(compare(model, chosen, ids, steps, tokens, prefilling, decoding))
        with PrefillProgress("needles", "prompts") as planting:
            planted.extend(find_needles(model, chosen, prompts, planting))
    except KeyboardInterrupt as error:
        if not rows:
            raise
        stop = error
        say(f"stopped: {len(rows)} of {len(chosen)} methods have finished")
    is_busy |= load_beyond_cores() is not None
    found = contents(len(ids), steps, rows, planted, {**about(model), "is_busy": is_busy})
    try:
        write_reports(found, html, png)
    finally:  # if the disk is full, the figures are printed all the same
        if as_json:
            write_json(found)
        else:
            print_report(found)
    if stop is not None:
        raise stop


def parse(text: str, options: ModelOptions, sweeps: Sequence[str] = ()) -> dict[str, Method]:
    """Returns the methods by their texts. Raises a usage error for a wrong text."""
    from sparsekv_cli.evaluation.compare import parse_methods
    from sparsekv_cli.evaluation.sweep import parse_sweep

    named = {key: value for key, value in options.named.items() if value is not None}
    for key in named.keys() & options.method_options.keys():
        raise click.UsageError(f"{key} is given twice, as an option and with -o")
    common = {**options.method_options, **named}
    try:
        return parse_methods(text, common, [parse_sweep(sweep) for sweep in sweeps])
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def count_steps(n_steps: int | None, continuation: Sequence[int] | None) -> int:
    """Returns the user's number of steps or the default.

    It is at most the number of the continuation's tokens. Raises SparseKVError if these are too
    few.
    """
    from sparsekv_cli.evaluation.compare import LEAST_STEPS

    if continuation is None:
        return n_steps or DEFAULT_STEPS
    wanted = n_steps or LEAST_STEPS
    if len(continuation) < wanted:
        raise SparseKVError(
            f"the continuation has {len(continuation)} tokens, too few for {wanted} steps"
        )
    return n_steps or min(DEFAULT_STEPS, len(continuation))
