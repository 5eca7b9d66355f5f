"""``--method auto``: the option's own ones, and how a command comes to its method."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from sparsekv_cli.commands.options.model import Invocation, ModelOptions
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
    from sparsekv_cli.planning.auto import Losses, MethodChoice
    from sparsekv_cli.session import Session

DEFAULT_DEPTH = 8192  # tokens that a conversation is taken to have where -c does not say


def settle(session: Session, options: ModelOptions, depth: int | None = None) -> ModelOptions:
    """With ``auto``: gives a session without tokens its method, and the options its name.

    depth: tokens of the context that it is chosen for; None: those of -c, or DEFAULT_DEPTH.
    """
    if not options.is_auto:
        return options
    depth = min(session.n_ctx, depth or session.config.ctx_size or DEFAULT_DEPTH)
    choice = _choose(session, options.max_loss, depth)
    if session.config.sparse_from < 0:
        session.config = replace(session.config, sparse_from=choice.dense_rows)
    with CompileProgress() as compiling, CalibrationProgress() as calibrating:
        session.change_method(choice.chosen.method, compiling, calibrating)
    session.timings.reset()
    if click.get_current_context().ensure_object(Invocation).verbose:
        say(choice.why)
        say(f"the same choice: {choice.repeat}")
    chosen = choice.as_dict()
    return replace(options, method=chosen["name"], method_options=chosen["options"], choice=chosen)


def _choose(session: Session, max_loss: float, depth: int) -> MethodChoice:
    from sparsekv_cli.planning import auto
    from sparsekv_cli.planning.kept import speeds_of
    from sparsekv_cli.planning.plan import Forecast

    if not session.engine.shares_prefill:
        raise SparseKVError(
            "--method auto chooses by speeds of the CPU: take --device cpu, or name a method"
        )
    if depth < auto.LEAST_TEXT:
        return auto.too_short(depth, max_loss)
    methods, losses = auto.candidates(session), auto.kept_losses(session)
    lacking = methods if losses is None else losses.lacks(methods)
    if losses is None or len(lacking) == len(methods):
        from sparsekv_cli.calibration.calibrations import built_in_text

        say("measuring what methods lose with this model (once)")
        losses, entry = measure_losses(session, built_in_text(), auto.N_TEXT)
        say(f"kept in {keep_losses(session, entry)}")
    elif lacking:
        say(
            f"auto: {len(lacking)} of {len(methods)} methods and budgets are left out, which were "
            f"not measured on {losses.date}: sparsekv-cli calibrate --method auto measures all"
        )
    methods = auto.worth_forecasting(methods, losses, max_loss)
    with CompileProgress() as compiling, MeasureProgress() as progress:
        speeds = speeds_of(
            session.gguf, session.config, methods,
            is_quick=True, on_measure=progress, on_compile=compiling,
        )  # fmt: skip
    forecast = Forecast(session.gguf, speeds, dense_rows=0)
    return auto.choose(forecast, methods, losses, depth, max_loss)


def measure_losses(session: Session, text: CalibrationText, n_tokens: int) -> tuple[Losses, Entry]:
    """What all methods lose that the model can run; those with a calibration if it has one."""
    from sparsekv_cli.planning import auto

    methods = auto.candidates(session)
    with CompileProgress() as compiling, CalibrationProgress() as calibrating:
        for method in methods:
            session.prepare(method, compiling, calibrating)
    with CalibrationProgress() as progress:
        return auto.measure_losses(
            session, methods, text, n_tokens,
            lambda done, total: progress(auto.AUTO, done / total, ""),
        )  # fmt: skip


def keep_losses(session: Session, entry: Entry) -> str:
    """Puts losses into the model's sidecar; where that is."""
    from sparsekv_cli.calibration.sidecar import write_entry
    from sparsekv_cli.planning.auto import AUTO

    place = session.calibrations.place_to_write()
    write_entry(place, AUTO, session.calibrations.identity, entry)
    return str(place)
