"""``--method auto`` and ``--max-loss``: the choice of a command's method or of its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from sparsekv_cli.commands.options.model import (
    ModelOptions,
    method_of,
    prepare_methods,
)
from sparsekv_cli.commands.options.verbose import Invocation
from sparsekv_cli.commands.shared.progress import (
    CalibrationProgress,
    CompileProgress,
    MeasureProgress,
)
from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.errors import SparseKVError

if TYPE_CHECKING:
    from sparsekv_cli.calibration.calibrations import CalibrationText
    from sparsekv_cli.calibration.sidecar import Entry
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model
    from sparsekv_cli.planning.auto import Losses, MethodChoice
    from sparsekv_cli.planning.budgets import BudgetChoice

DEFAULT_DEPTH = 8192  # tokens of a conversation that are assumed without -c


def choose_method(
    model: Model, options: ModelOptions, depth: int | None = None
) -> tuple[Model, ModelOptions]:
    """Chooses what the user left open. Returns the model with it, and options.

    It chooses a method if the user's is ``auto``, and the method's budget with ``--max-loss``.
    depth: tokens of the context for which a method is chosen; None: -c, or DEFAULT_DEPTH.
    """
    choice: MethodChoice | BudgetChoice
    if options.is_auto:
        depth = min(model.n_ctx, depth or model.config.ctx_size or DEFAULT_DEPTH)
        choice = _choose(model, options.allowed_loss, depth)
        method, found_depth = choice.chosen.method, choice.sparse_from
        sparse_from = found_depth if model.config.sparse_from < 0 else None
    elif options.max_loss is not None:
        choice = _choose_budget(model, method_of(options), options.max_loss)
        method, sparse_from = choice.method, None
    else:
        return model, options
    with CompileProgress() as compiling, CalibrationProgress() as calibrating:
        attention = model.attention_of(method, sparse_from, compiling, calibrating)
    if click.get_current_context().ensure_object(Invocation).verbose:
        say(choice.why)
        say(f"the same choice: {choice.repeat}")
    chosen = choice.as_dict()
    named = dict.fromkeys(options.named)  # the method's options have their values
    return model.using(attention), replace(
        options, method=chosen["name"], method_options=chosen["options"], named=named, choice=chosen
    )


def _choose_budget(model: Model, method: Method, max_loss: float) -> BudgetChoice:
    from sparsekv_cli.planning import auto, budgets

    if not model.engine.shares_prefill:
        raise SparseKVError(
            "--max-loss measures losses on the CPU: use --device cpu, or name a --budget"
        )
    methods, losses = budgets.with_budgets(method), auto.kept_losses(model)
    lacking = methods if losses is None else losses.lacks(methods)
    if losses is None or lacking:
        say(f"measuring what {method.name} loses with this model and {len(lacking)} budgets (once)")
        losses = _measured_on_built_in(model, lacking, losses)
    return budgets.smallest(methods, losses, max_loss)


def _choose(model: Model, max_loss: float, depth: int) -> MethodChoice:
    from sparsekv_cli.planning import auto
    from sparsekv_cli.planning.kept import speeds_of
    from sparsekv_cli.planning.plan import Forecast

    if not model.engine.shares_prefill:
        raise SparseKVError(
            "--method auto chooses by speeds of the CPU: use --device cpu, or name a method"
        )
    if depth < auto.LEAST_TEXT:
        return auto.too_short(depth, max_loss)
    methods, losses = auto.candidates(model), auto.kept_losses(model)
    lacking = methods if losses is None else losses.lacks(methods)
    if losses is None or len(lacking) == len(methods):
        say("measuring what methods lose with this model (once)")
        losses = _measured_on_built_in(model, methods)
    elif lacking:
        say(
            f"auto: {len(lacking)} of {len(methods)} methods and budgets are left out: they were "
            f"not measured on {losses.date}; 'sparsekv-cli calibrate --method auto' measures all"
        )
    losses = losses.only(methods)  # and not of budgets that --max-loss has tried
    methods = auto.worth_forecasting(methods, losses, max_loss)
    with CompileProgress() as compiling, MeasureProgress() as progress:
        speeds = speeds_of(
            model.gguf, model.config, methods,
            is_quick=True, on_measure=progress, on_compile=compiling,
        )  # fmt: skip
    forecast = Forecast(model.gguf, speeds, sparse_from=0)
    choice = auto.choose(forecast, methods, losses, depth, max_loss)
    if choice.is_busy:
        say(f"warning: {choice.why}: name a method, or repeat it when the machine is quiet")
    return choice


def _measured_on_built_in(
    model: Model, methods: Sequence[Method], known: Losses | None = None
) -> Losses:
    """Measures the losses of methods, and stores them together with those that are known."""
    from sparsekv_cli.calibration.calibrations import built_in_text
    from sparsekv_cli.planning import auto

    losses, entry = measure_losses(model, built_in_text(), auto.N_TEXT, methods, known)
    say(f"what methods lose: {model.calibrations.store(auto.AUTO, entry)}")
    return losses


def measure_losses(
    model: Model,
    text: CalibrationText,
    n_tokens: int,
    methods: Sequence[Method] | None = None,
    known: Losses | None = None,
) -> tuple[Losses, Entry]:
    """Measures the losses of methods. None: of all that the model can run.

    Methods that need a calibration are left out of all if the model has none for them. known:
    losses that the result has too.
    """
    from sparsekv_cli.planning import auto

    methods = auto.candidates(model) if methods is None else methods
    prepare_methods(model, methods)
    with CalibrationProgress() as progress:
        return auto.measure_losses(
            model, methods, text, n_tokens,
            lambda done, total: progress(auto.AUTO, done / total, ""), known,
        )  # fmt: skip
