"""``compare``: several methods on one prompt: distance to dense attention, memory and speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands import completers
from sparsekv_cli.commands.completers import files
from sparsekv_cli.commands.help import GroupedCommand
from sparsekv_cli.commands.options import (
    CONTEXT_OPTION,
    ModelOptions,
    find_model,
    load_session,
    model_options,
    warn_of_long_context,
)
from sparsekv_cli.commands.progress import CalibrationProgress, CompileProgress, PrefillProgress
from sparsekv_cli.commands.prompt import read_prompt
from sparsekv_cli.commands.terminal import write_text
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.conversation import chat_template, encode_messages, messages_of

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.compare import MethodResult
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.session import Session

DEFAULT_STEPS = 64
PIPE_WIDTH = 160  # columns of a table that no terminal limits


@click.command(cls=GroupedCommand, short_help="Compare methods on one prompt.")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; after a piped text, if any.")
@click.option(
    "-f",
    "--file",
    metavar="FILE",
    shell_complete=files,
    help="Read the prompt from FILE; - is stdin.",
)
@click.option("--raw", is_flag=True, help="No chat template; control tokens are parsed.")
@click.option(
    "--methods",
    metavar="LIST",
    shell_complete=completers.methods,
    default="full,topk,lfps",
    help="Methods with commas between, each with its own options if it has any, as in "
    "lfps:preset=paper;budget=10%; 'all' is every method. [default: full,topk,lfps]",
)
@click.option(
    "--steps",
    "n_steps",
    metavar="N",
    type=click.IntRange(min=4),
    help=f"Tokens that every method decodes. [default: {DEFAULT_STEPS}]",
)
@click.option(
    "--continuation",
    metavar="FILE",
    help="Decode this text, instead of what the full model would write.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@CONTEXT_OPTION
@model_options(bench=True, sparse_from=False)
def command(
    options: ModelOptions,
    prompt: str | None,
    file: str | None,
    raw: bool,
    methods: str,
    n_steps: int | None,
    continuation: str | None,
    as_json: bool,
) -> None:
    """Prefill a prompt once, then let every method decode the same tokens.

    KLD and top-1 compare a method's predictions with those of dense attention. Mass is the share of
    the exact softmax that falls on the rows a method attends to, overlap the share of these rows
    that exact top-k of the same size would take; both are measured on the layers that choose rows,
    in the first half of the steps. Speed is measured in the second half. Attended and scored are
    rows a head, layer and step. Options such as --budget hold for every method that has them and
    does not state its own. The first row, full, is the reference and always has its cache in f16;
    what a cache type costs by itself, full:cache_type_k=q8_0;cache_type_v=q8_0 tells. The prompt is
    read with f16, too, and only stored in the type.

    This runs on the CPU. With --device cuda each method has a prefill of its own there, after a
    short trial.
    """
    config = options.config
    if config.device == "auto":
        config = replace(config, device="cpu")
    chosen = parse(methods, options)
    text = read_prompt(prompt, file)
    following = None if continuation is None else read_prompt(None, continuation)
    path = find_model(options.model)
    compiling = CompileProgress()
    session = load_session(path, chosen["full"], config, compiling)
    warn_of_long_context(session)
    from sparsekv_cli.evaluation.compare import compare

    ids = prompt_ids(session, text, raw)
    tokens = None
    if following is not None:
        tokens = session.tokenizer.encode(
            following, add_bos=False, add_eos=False, parse_special=False
        )
    steps = count_steps(n_steps, tokens)
    with compiling, CalibrationProgress() as calibrating:
        for method in chosen.values():
            session.prepare(method, compiling, calibrating)
    with PrefillProgress() as prefilling, PrefillProgress("decode") as decoding:
        rows = compare(session, chosen, ids, steps, tokens, prefilling, decoding)
    if as_json:
        write_text(json.dumps(report(ids, rows), indent=2) + "\n")
    else:
        print_table(len(ids), steps, rows)


def parse(text: str, options: ModelOptions) -> dict[str, Method]:
    """The methods by their text; a usage error says what is wrong."""
    from sparsekv_cli.evaluation.compare import parse_methods

    common = dict(options.method_options)
    for key, value in options.named.items():
        if value is not None:
            if key in common:
                raise click.UsageError(f"{key} is given twice, as an option and with -o")
            common[key] = value
    try:
        return parse_methods(text, common)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def prompt_ids(session: Session, text: str, raw: bool) -> list[int]:
    """The ids of the prompt, in the model's chat template if it has one."""
    template = chat_template(session.gguf.metadata)
    if raw or template is None:
        return session.tokenizer.encode(text, add_eos=False, parse_special=True)
    return encode_messages(session.tokenizer, template, messages_of(None, text))


def count_steps(n_steps: int | None, continuation: Sequence[int] | None) -> int:
    """The steps asked for, or as many of the default as the continuation has tokens for."""
    from sparsekv_cli.evaluation.compare import LEAST_STEPS

    if continuation is None:
        return n_steps or DEFAULT_STEPS
    wanted = n_steps or LEAST_STEPS
    if len(continuation) < wanted:
        raise SparseKVError(
            f"the continuation has {len(continuation)} tokens, too few for {wanted} steps"
        )
    return n_steps or min(DEFAULT_STEPS, len(continuation))


def report(ids: Sequence[int], rows: Sequence[MethodResult]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {"context": len(ids), "methods": [asdict(row) for row in rows]}


def print_table(n_context: int, n_steps: int, rows: Sequence[MethodResult]) -> None:
    """A table for people, on stdout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    table = Table(
        box=SIMPLE_HEAD, title=f"{n_context} tokens, {n_steps} steps", title_justify="left"
    )
    table.add_column("method", overflow="fold")
    for title in (
        "KLD",
        "top-1",
        "mass",
        "overlap",
        "attended",
        "scored",
        "host MiB",
        "device MiB",
        "index MiB",
        "tokens/s",
        "first token",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row.spec,
            f"{row.kld_mean:.4f}",
            f"{row.top1_agreement:.0%}",
            share(row.attn_mass_recall),
            share(row.topk_overlap),
            f"{row.rows_attended_mean:.0f}",
            f"{row.rows_scored_mean:.0f}",
            *(f"{n / 2**20:.1f}" for n in (row.bytes_host, row.bytes_device, row.index_bytes)),
            f"{row.decode_tps:.1f}",
            f"{row.ttft_s:.2f} s",
        )
    Console(highlight=False, markup=False, width=width).print(table)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
