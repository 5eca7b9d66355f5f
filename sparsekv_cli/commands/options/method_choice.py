"""``--method auto``: its own options, and the choice of a command's method."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from sparsekv_cli.commands.options.model import Invocation, ModelOptions, prepare_methods
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
    from sparsekv_cli.model import Model
    from sparsekv_cli.planning.auto import Losses, MethodChoice

DEFAULT_DEPTH = 8192  # tokens of a conversation that are assumed without -c


def choose_method(
    model: Model, options: ModelOptions, depth: int | None = None
) -> tuple[Model, ModelOptions]:
    """Chooses a method if the user's method is ``auto``. Returns the model with it, and options.

    depth: tokens of the context for which the method is chosen; None: -c, or DEFAULT_DEPTH.
    """
    if not options.is_auto:
        return model, options
    depth = min(model.n_ctx, depth or model.config.ctx_size or DEFAULT_DEPTH)
    choice = _choose(model, options.max_loss, depth)
    depth = choice.sparse_from if model.config.sparse_from < 0 else None
    with CompileProgress() as compiling, CalibrationProgress() as calibrating:
        attention = model.attention_of(choice.chosen.method, depth, compiling, calibrating)
    if click.get_current_context().ensure_object(Invocation).verbose:
        say(choice.why)
        say(f"the same choice: {choice.repeat}")
    chosen = choice.as_dict()
    return model.using(attention), replace(
        options, method=chosen["name"], method_options=chosen["options"], choice=chosen
    )


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
        from sparsekv_cli.calibration.calibrations import built_in_text

        say("measuring what methods lose with this model (once)")
        losses, entry = measure_losses(model, built_in_text(), auto.N_TEXT)
        say(f"what methods lose: {model.calibrations.store(auto.AUTO, entry)}")
    elif lacking:
        say(
            f"auto: {len(lacking)} of {len(methods)} methods and budgets are left out: they were "
            f"not measured on {losses.date}; 'sparsekv-cli calibrate --method auto' measures all"
        )
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


def measure_losses(model: Model, text: CalibrationText, n_tokens: int) -> tuple[Losses, Entry]:
    """Measures the losses of all methods that the model can run.

    Methods that need a calibration are left out if the model has none for them.
    """
    from sparsekv_cli.planning import auto

    methods = auto.candidates(model)
    prepare_methods(model, methods)
    with CalibrationProgress() as progress:
        return auto.measure_losses(
            model, methods, text, n_tokens,
            lambda done, total: progress(auto.AUTO, done / total, ""),
        )  # fmt: skip
