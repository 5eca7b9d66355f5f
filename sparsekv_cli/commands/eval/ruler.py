"""``eval ruler``: methods on RULER's tasks, made offline to any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.eval.options import (
    JSON_OPTION,
    chosen_methods,
    configuration_of,
    described,
    encoder,
    methods_option,
    open_eval,
    ray_option,
    records_option,
)
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.model import (
    ModelOptions,
    find_model,
    model_options,
    with_context,
)
from sparsekv_cli.commands.options.numbers import WholeRange, number_list
from sparsekv_cli.commands.shared.header import model_header
from sparsekv_cli.commands.shared.progress import PrefillProgress
from sparsekv_cli.commands.shared.tables import print_table
from sparsekv_cli.commands.shared.terminal import one_line, say, write_json

if TYPE_CHECKING:
    from sparsekv_cli.evaluation.ruler.records import RulerRecords
    from sparsekv_cli.evaluation.ruler.samples import RulerPlan
    from sparsekv_cli.methods.base import Method

SEED = 42


def task_list(_: click.Context, _parameter: click.Parameter, value: str) -> list[str]:
    """Callback of --tasks: returns the names. ``niah`` means all that begin so, ``all`` all."""
    from sparsekv_cli.evaluation.ruler.tasks import TASKS

    chosen: dict[str, None] = {}
    for part in (part.strip() for part in value.split(",")):
        found = [name for name in TASKS if part in ("all", name) or name.startswith(f"{part}_")]
        if not found:
            raise click.BadParameter(f"{part!r}: choose from {', '.join(TASKS)}, niah or all")
        chosen |= dict.fromkeys(found)
    return list(chosen)


@click.command(cls=GroupedCommand, short_help="RULER's tasks at any length.")
@methods_option("A method, in the syntax of 'compare --methods'; repeatable. [default: full]")
@click.option(
    "--tasks", metavar="LIST", default="all", callback=task_list,
    help="RULER's tasks, separated by commas; niah: those with needles. [default: all]",
)  # fmt: skip
@click.option(
    "--lengths", metavar="LIST", default="1024,2048,4096", callback=number_list,
    help="Tokens of a sample, prompt and answer together. [default: 1024,2048,4096]",
)  # fmt: skip
@click.option(
    "--samples", "n_samples", metavar="N", type=WholeRange(min=1), default=5,
    help="Samples of each task and length. [default: 5]",
)  # fmt: skip
@click.option(
    "-n", "--n-predict", metavar="N", type=WholeRange(min=1),
    help="Tokens of an answer at most. [default: the task's, 30 to 128]",
)  # fmt: skip
@click.option(
    "--question-by", type=click.Choice(("prefill", "decode")), default="prefill",
    help="Whether the question is prefilled with the text, or decoded token by token with the "
    "method. [default: prefill]",
)  # fmt: skip
@click.option("--raw", is_flag=True, help="No chat template.")
@records_option("Keep a line for each sample and method in FILE, and skip those it has.")
@click.option(
    "-s", "--seed", "sample_seed", metavar="N", type=WholeRange(min=0), default=SEED,
    help=f"Seed of the samples. [default: {SEED}]",
)  # fmt: skip
@ray_option("Answer the samples")
@JSON_OPTION
@model_options(bench=True, sparse_from=False, seed=False)
def ruler(
    options: ModelOptions,
    methods: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int],
    n_samples: int,
    n_predict: int | None,
    question_by: str,
    raw: bool,
    path: Path | None,
    sample_seed: int,
    ray: str | None,
    as_json: bool,
) -> None:
    """Methods on RULER's tasks: needles in haystacks, chains of variables, frequent words.

    Samples are made offline from the seed. Each is as long as its length in the model's tokens
    allows. It is prefilled once for all methods, and each answers greedily. The score is the share
    of the expected words in the answer, in per cent. The interval is Wilson's, of 95%.
    """
    from sparsekv_cli.commands.eval.ray import answer_on_cluster
    from sparsekv_cli.distributed.cluster import check_address
    from sparsekv_cli.evaluation.ruler.answers import answer_all
    from sparsekv_cli.evaluation.ruler.records import RulerRecords
    from sparsekv_cli.evaluation.ruler.samples import RulerPlan

    settings = chosen_methods(methods or ["full"], options)
    if ray is not None:
        check_address(ray)
    by_decode = question_by == "decode"
    lengths = list(dict.fromkeys(lengths))
    plan = RulerPlan(tasks, lengths, n_samples, sample_seed, by_decode, n_predict)
    # raises an error for lengths that no sample can have
    with_context(options.config, max(lengths))
    with model_header(find_model(options.model), options.config) as header:
        plan.check(encoder(header, raw))
    model = open_eval(options, list(settings.values()), max(lengths))
    configuration = configuration_of(
        model, seed=sample_seed, n_predict=n_predict, question_by=question_by, raw=raw
    )
    encode = encoder(model, raw)
    records = RulerRecords(path, configuration, model.calibrations.digests(settings.values()))
    n_all, n_done = len(list(plan.samples())), 0
    with records, PrefillProgress() as prefilling, PrefillProgress("samples") as sampling:
        done = frozenset(records.by_key)
        if ray is not None:
            answered = answer_on_cluster(ray, model, settings, plan, raw, done)
        else:
            answered = answer_all(model, settings, plan, encode, done, prefilling)
        for (length, task, number), new in zip(plan.samples(), answered, strict=True):
            records.add_all(new)
            n_done += 1
            sampling(n_done, n_all)
            if new and number == n_samples - 1:
                say(progress_line(records, settings, plan, length, task))
    found = results(records, settings, plan)
    if as_json:
        write_json({"configuration": configuration, "results": found}, ensure_ascii=False)
    else:
        print_scores(found, plan)


def progress_line(
    records: RulerRecords, settings: Mapping[str, Method], plan: RulerPlan, length: int, task: str
) -> str:
    """Returns a line such as ``vt at 1024: full 60, lfps 40``."""
    scores = [
        f"{spec} {records.score(method, plan, length, [task]).score:.0f}"
        for spec, method in settings.items()
    ]
    return one_line(f"{task} at {length}: {', '.join(scores)}")


def results(
    records: RulerRecords, settings: Mapping[str, Method], plan: RulerPlan
) -> list[dict[str, Any]]:
    """Returns a row for each length and method."""
    return [
        {
            **described(spec, method),
            "length": length,
            "average": records.score(method, plan, length, plan.tasks)._asdict(),
            "tasks": {
                task: records.score(method, plan, length, [task])._asdict() for task in plan.tasks
            },
            "rows_attended_mean": records.rows(method, plan, length),
        }
        for length in plan.lengths
        for spec, method in settings.items()
    ]


def print_scores(found: Sequence[Mapping[str, Any]], plan: RulerPlan) -> None:
    """Prints a table for people, on stdout."""
    columns = ("method", "length", "average", "95%", "attended", *plan.tasks)
    rows = []
    for row in found:
        average, attended = row["average"], row["rows_attended_mean"]
        rows.append((
            row["spec"], row["length"], f"{average['score']:.1f}",
            f"{average['low']:.0f} to {average['high']:.0f}",
            "-" if attended is None else f"{attended:.0f}",
            *(f"{row['tasks'][task]['score']:.0f}" for task in plan.tasks),
        ))  # fmt: skip
    heads = [name.removeprefix("niah_") for name in columns]
    print_table(f"{plan.n_samples} samples of each task", heads, rows)
