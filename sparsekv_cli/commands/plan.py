"""``sparsekv-cli plan``: predicts memory and speed of a model with each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sparsekv_cli.cache.spec import FULL
from sparsekv_cli.commands.bench.bench import build_for_bench
from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.long_context import warn_beyond_training
from sparsekv_cli.commands.options.model import (
    CONTEXT_OPTION,
    ModelOptions,
    check_calibration,
    check_sparse_from,
    find_model,
    model_options,
    session_option,
)
from sparsekv_cli.commands.shared.garbage import collecting_no_garbage
from sparsekv_cli.commands.shared.progress import CompileProgress, MeasureProgress
from sparsekv_cli.commands.shared.tables import print_pairs, print_table, size
from sparsekv_cli.commands.shared.terminal import say, write_json
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.settings.config import dense_below

if TYPE_CHECKING:
    from sparsekv_cli.planning.plan import Plan, PlannedMethod

ALL = "all"


@click.command(cls=GroupedCommand)
@click.option(
    "--methods", metavar="LIST", shell_complete=completers.methods, default=ALL,
    help="Methods, separated by commas, or all. [default: all]",
)  # fmt: skip
@click.option(
    "--measure", is_flag=True, help="Measure this machine again: more exactly, for some minutes.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@CONTEXT_OPTION
@session_option("prefill_attention")
@session_option("prefill_budget")
@model_options(bench=True, seed=False, auto=False)
def command(options: ModelOptions, methods: str, measure: bool, as_json: bool) -> None:
    """Forecast the memory and the speed of a model with each method.

    The header of a model file is enough: the file may end after the table of its tensors. The time
    of a step is measured once for a model's shape, with zeros for its weights. It is kept in the
    user's cache. The measurement takes some seconds. --measure takes minutes, and is more exact.
    Methods that need a calibration are measured if the model has one. The time to read a prompt is
    that of the whole context. The forecast is for the CPU.
    """
    from sparsekv_cli.methods import METHODS

    config = options.config
    if config.device == "cuda":
        raise click.UsageError("plan measures the CPU: for a GPU use bench")
    check_calibration(options, "plan")
    names = list(METHODS) if methods == ALL else [name.strip() for name in methods.split(",")]
    chosen = [build_for_bench(name, names, options) for name in names]
    check_sparse_from(config, chosen)
    path = find_model(options.model)
    from sparsekv_cli.models.gguf.file import open_gguf
    from sparsekv_cli.models.hparams import read_hparams

    with open_gguf(path, header_only=True) as file:
        file.change(config)
        hparams = read_hparams(file)
        if all(layer.kind != FULL for layer in hparams.layers):
            raise SparseKVError(
                f"{path}: no layer of this model attends to all rows, so a method changes "
                "nothing: use bench for its speed"
            )
        n_ctx = config.ctx_size or hparams.n_ctx_train
        warn_beyond_training(hparams, config, "context", n_ctx)
        with collecting_no_garbage(), CompileProgress() as compiling, MeasureProgress() as progress:
            from sparsekv_cli.models.reading.sparse_prefill import shortest_prompt
            from sparsekv_cli.planning.kept import speeds_of
            from sparsekv_cli.planning.plan import make_plan

            speeds = speeds_of(
                file, config, chosen, again=measure, is_quick=not measure,
                on_measure=progress, on_compile=compiling,
            )  # fmt: skip
        is_long = n_ctx >= shortest_prompt(config.prefill_attention)
        budget = config.sparse_budget if is_long else None
        plan = make_plan(file, speeds, chosen, n_ctx, config.sparse_from, budget)
    if as_json:
        write_json(plan.as_dict())
    else:
        show(plan)


def show(plan: Plan) -> None:
    """Prints the plan for people, on stdout."""
    free = "" if plan.memory_available is None else size(plan.memory_available)
    budget = plan.prefill_budget
    how = "densely" if budget is None else f"sparsely (--prefill-budget {budget})"
    print_pairs(
        "",
        [
            ("model", plan.model),
            ("context", f"{plan.context} tokens"),
            ("machine", f"{plan.machine}, {plan.threads} threads, measured {plan.date}"),
            ("memory", f"{plan.bandwidth / 1e9:.1f} GB/s, {free} available"),
            ("weights", f"read at {plan.weights_bandwidth / 1e9:.1f} GB/s in a step"),
            ("reading", f"{plan.reading_s:.1f} s for the whole context, {how}"),
        ],
    )
    columns = ["method", "weights", "KV", "index", "scratch", "fits", "up to", "t/s", "pays from"]
    # columns with figures that rank methods are left out
    n_shown = len(columns) - 2 * bool(plan.doubt)
    rows = [row(each)[:n_shown] for each in plan.methods]
    print_table("methods", columns[:n_shown], rows)
    if plan.doubt:
        speeds = ", ".join(
            f"{each.name} {each.decode_tps:.1f}" for each in plan.methods if each.decode_tps
        )
        say(
            f"no method is ranked, because the speeds are not to be believed: {plan.doubt}; "
            f"measured t/s: {speeds}; repeat it on a quiet machine"
        )
        return
    say(plan.verdict())
    if plan.is_quick:
        say("the speeds are of a short measurement; --measure is more exact and takes minutes")


def row(method: PlannedMethod) -> list[str]:
    """Returns a line of the table."""
    if method.decode_tps is None:
        return [method.name, size(method.weights_bytes), method.note, *[""] * 6]
    fits = {None: "", True: "yes", False: "no"}[method.fits]
    sizes = method.weights_bytes, method.kv_bytes, method.index_bytes, method.scratch_bytes
    pays = "" if method.name == "full" else str(method.pays_from or "nowhere")
    dense = f", {dense_below(method.sparse_from)}" if method.is_dense else ""
    return [
        method.name,
        *(size(n or 0) for n in sizes),
        fits,
        str(method.fitting_context or ""),
        f"{method.decode_tps:.1f}{dense}",
        pays,
    ]
