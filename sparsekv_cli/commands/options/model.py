"""Options that several commands share, and the frozen classes for their values."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.long_context import warn_of_long_context
from sparsekv_cli.commands.options.numbers import FiniteRange, WholeRange
from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.garbage import collecting_no_garbage
from sparsekv_cli.commands.shared.terminal import explain_faults, say
from sparsekv_cli.errors import OptionError, SparseKVError
from sparsekv_cli.settings.changes import CHANGES
from sparsekv_cli.settings.config import SessionConfig
from sparsekv_cli.settings.option import MAX_WHOLE, allowed_values, options_of

if TYPE_CHECKING:
    from pathlib import Path

    from sparsekv_cli.commands.shared.progress import CompileProgress
    from sparsekv_cli.methods.base import Method
    from sparsekv_cli.model import Model

Function = TypeVar("Function", bound=Callable[..., Any])


MAX_LOSS = 0.1  # mean KLD, default of ``auto`` and ``advise``
# Options of methods with a flag of their own.
NAMED = ("budget", "dense_layers", "cache_type_k", "cache_type_v")


@dataclass(frozen=True)
class ModelOptions:
    """The model, the method and the machine that the user has chosen."""

    model: str | None
    config: SessionConfig
    seed: int | None
    method: str = "full"
    method_options: Mapping[str, str] = field(default_factory=dict)
    named: Mapping[str, str | None] = field(default_factory=dict)  # name in NAMED -> its text
    max_loss: float | None = None
    # of ``auto`` or --max-loss, with its reasons (planning/auto.py, planning/budgets.py)
    choice: Mapping[str, Any] | None = None

    @property
    def is_auto(self) -> bool:
        return self.method == "auto"

    @property
    def allowed_loss(self) -> float:
        """The most that ``auto`` and ``advise`` allow."""
        return MAX_LOSS if self.max_loss is None else self.max_loss


def _key_values(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            hint = " (bench's format is -O)" if value in ("md", "csv", "json", "jsonl") else ""
            raise click.BadParameter(f"{value!r}: expected KEY=VALUE{hint}")
        if key in pairs:
            raise click.BadParameter(f"{key} is given twice")
        pairs[key] = text
    return pairs


def apply_options(function: Function, options: list[Callable[[Any], Any]]) -> Function:
    """Returns ``function`` with click options, in the order of the help page."""
    for option in reversed(options):
        function = option(function)
    return function


def gathered(
    name: str, gather: Callable[[dict[str, Any]], Any], options: list[Callable[[Any], Any]]
) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that adds ``options``. The command gets gather(values) as ``name``."""

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def call(**values: Any) -> Any:
            found = gather(values)
            return function(**{name: found}, **values)

        return apply_options(call, options)

    return decorate


def session_option(name: str, default: Any = None, **given: Any) -> Callable[[Any], Any]:
    """Returns the click option for an option of SessionConfig. given: more arguments for click.

    default: of a command whose default differs.
    """
    declared = options_of(SessionConfig)[name]
    allowed, default = allowed_values(declared), declared.default if default is None else default
    least = allowed.at_least
    kind: Any = FiniteRange(min=least)
    if allowed.choices:
        kind = click.Choice(allowed.choices)
    elif isinstance(default, str):
        kind = str
    elif isinstance(default, int):
        kind = WholeRange(None if least is None else int(least), MAX_WHOLE)
    shown = default if isinstance(default, str) else f"{default:g}"
    return click.option(
        *(declared.metadata["flags"] or ("--" + name.replace("_", "-"),)), name, type=kind,
        default=() if given.get("multiple") else default, metavar=declared.metadata["metavar"],
        help=declared.metadata["help"] + (f" [default: {shown}]" if shown else ""), **given,
    )  # fmt: skip


SESSION = set(options_of(SessionConfig)) - {"calibration", "chunk", "sparse_from"}

MODEL_OPTION = click.option(
    "-m", "--model", metavar="FILE|NAME", shell_complete=completers.models,
    help="GGUF file (any part of a split one), a name that 'sparsekv-cli models' lists, or "
    "OWNER/REPO[:QUANT] of the Hugging Face hub. [env: SPARSEKV_MODEL]",
)  # fmt: skip

MACHINE_OPTIONS = [session_option(name) for name in ("threads", "device", "prefill_dtype")]
# Options of commands that write answers.
READING = ("prefill_attention", "prefill_budget")
ANSWERING = ("chat_template", "speculate", "draft_model", "draft_method", "checkpoints", *READING)
CPU_AND_GPU_OPTIONS = ("repack", "activations", "kv", "gpu_weights", "vram_limit")


def _joined(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> str:
    return ",".join(values)


# The user's changes of the model's metadata. Every command that opens a model has them.
CHANGE_OPTIONS = [
    *(session_option(name) for name in CHANGES if name != "override_kv"),
    session_option("override_kv", multiple=True, callback=_joined),
]

MODEL_OPTIONS: list[Callable[[Any], Any]] = [
    MODEL_OPTION,
    *CHANGE_OPTIONS,
    *MACHINE_OPTIONS,
    *map(session_option, CPU_AND_GPU_OPTIONS),
    click.option(
        "-o", "--method-opt", "method_options", metavar="KEY=VALUE", multiple=True,
        callback=_key_values, shell_complete=completers.method_options,
        help="An option of the method; repeatable. See 'sparsekv-cli methods'.",
    ),
    click.option(
        "--budget", metavar="N|P%",
        help="Rows that a head attends to in a step: a number, or a share of the context.",
    ),
    click.option(
        "--dense-layers", metavar="LIST",
        help="Layers that attend to all rows, such as 0,1 or none; lfps: see its pages_from.",
    ),
    click.option(
        "-ctk", "--cache-type-k", metavar="TYPE",
        help="Type of K in the cache: f16, q8_0, q5_1 or q4_0. [default: f16]",
    ),
    click.option(
        "-ctv", "--cache-type-v", metavar="TYPE",
        help="Type of V in the cache; few bits harm V less than K. [default: f16]",
    ),
    click.option(
        "--calibration", metavar="FILE", shell_complete=completers.files,
        help="Calibration of the method to use, written by 'calibrate --output FILE'.",
    ),
]  # fmt: skip

SEED_OPTION = click.option(
    "-s", "--seed", metavar="N", type=WholeRange(-1, 2**64 - 1), default=-1,
    help="Seed of every random choice; -1: a random one. [default: -1]",
)  # fmt: skip

CONTEXT_OPTION = session_option("ctx_size")

SPARSE_FROM_OPTION = click.option(
    "--sparse-from", metavar="N", type=WholeRange(0, MAX_WHOLE),
    help="Tokens up to which a method that keeps all rows attends to all of them; 0: none. "
    "[default: as many as pay, by the model's shape]",
)  # fmt: skip

METHOD_OPTION = click.option(
    "--method", metavar="NAME", default="full", shell_complete=completers.methods,
    help="KV-cache method (see 'sparsekv-cli methods'), or auto: the fastest that loses at most "
    "--max-loss. [default: full]",
)  # fmt: skip

MAX_LOSS_OPTION = click.option(
    "--max-loss", metavar="KLD", type=FiniteRange(min=0),
    help="Most that --method auto may lose: mean KLD to dense attention. With another sparse "
    f"method: the smallest budget that loses no more. [default: {MAX_LOSS} for auto]",
)  # fmt: skip


def model_options(
    *,
    bench: bool = False,
    sparse_from: bool = True,
    seed: bool = True,
    auto: bool = True,
    models: Callable[[Any], Any] = MODEL_OPTION,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator with the options of all commands that run a model, as ``options``.

    bench: leaves out ``-c`` and ``--method``, because the command has its own. sparse_from: whether
    methods are dense in short contexts; False: never. seed: whether there is ``--seed``. auto:
    whether ``--method auto`` is possible. models: the option that names one or several models.
    """
    own = [] if bench else [CONTEXT_OPTION, METHOD_OPTION, *map(session_option, ANSWERING)]
    own += [SPARSE_FROM_OPTION] if sparse_from else []
    own += [MAX_LOSS_OPTION] if sparse_from and auto else []
    own += MODEL_OPTIONS[1:] + ([SEED_OPTION] if seed else [])
    return gathered("options", _gather_model_options, [models, *own, verbose_option])


def session_config(settings: Mapping[str, Any]) -> SessionConfig:
    """Returns a SessionConfig. Raises click.UsageError for impossible settings."""
    try:
        return SessionConfig(**settings)
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context(silent=True)) from None


def _gather_model_options(values: dict[str, Any]) -> ModelOptions:
    """Returns the options of the model among ``values``, and removes them from it."""
    seed, sparse_from = values.pop("seed", -1), values.pop("sparse_from", 0)
    settings = {name: values.pop(name) for name in set(values) & SESSION}
    max_loss, context = values.pop("max_loss", None), click.get_current_context(silent=True)
    if max_loss is not None and (
        "auto" not in values["methods"] if "methods" in values else values.get("method") == "full"
    ):
        method = "--method auto" + " or a sparse method" * ("methods" not in values)
        raise click.UsageError(f"--max-loss {max_loss:g} needs {method}", context)
    if settings.get("chat_template"):
        from sparsekv_cli.models.chat.named import named_template  # which imports jinja2

        settings["chat_template"] = named_template(settings["chat_template"])
    settings["calibration"] = values.pop("calibration") or ""
    config = session_config({**settings, "sparse_from": -1 if sparse_from is None else sparse_from})
    return ModelOptions(
        model=values.pop("model", None),
        config=config,
        seed=None if seed == -1 else seed,
        method=values.pop("method", "full"),
        method_options=values.pop("method_options"),
        named={name: values.pop(name) for name in NAMED},
        max_loss=max_loss,
    )


def build_method(
    name: str, options: Mapping[str, str], named: Mapping[str, str | None] | None = None
) -> Method:
    """Returns the method. Raises a usage error for a wrong name. named: see ModelOptions."""
    explain_faults()
    from sparsekv_cli import methods

    try:
        return methods.build_method(name, options, **(named or {}))
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context(silent=True)) from None


def find_model(name: str | None) -> Path:
    """Returns the path of the model ``name``; None: of the environment variable.

    Raises click.UsageError if there is neither.
    """
    from sparsekv_cli.models.sources.locate import ENVIRONMENT_VARIABLE, resolve_model

    try:
        path = resolve_model(name, say)
    except SparseKVError as error:
        if name is None and not os.environ.get(ENVIRONMENT_VARIABLE):
            raise click.UsageError(str(error), click.get_current_context(silent=True)) from None
        raise
    explain_faults(path)
    return path


def open_model(options: ModelOptions) -> Model:
    """Checks the method, then returns the loaded model; with ``full`` if the method is ``auto``.

    Raises click.UsageError for a wrong method or option, SparseKVError for a bad model.
    """
    method = method_of(options)
    model = load_model(find_model(options.model), method, options.config)
    warn_of_long_context(model)
    return model


def check_calibration(options: ModelOptions, command: str) -> None:
    """Raises click.UsageError for ``--calibration``. command: a command that tries many methods."""
    if options.config.calibration:
        raise click.UsageError(f"{command} uses the model's calibrations: leave --calibration out")


def with_context(config: SessionConfig, n: int) -> SessionConfig:
    """Returns ``config`` with a context of n tokens. Raises click.UsageError for too many."""
    if n > MAX_WHOLE:
        raise click.UsageError(
            f"a context of {n} tokens: at most {MAX_WHOLE} are possible",
            click.get_current_context(silent=True),
        )
    return replace(config, ctx_size=n)


def method_of(options: ModelOptions) -> Method:
    """Returns the method with which the model is loaded: ``full`` for ``auto``.

    Raises click.UsageError for a wrong method or option.
    """
    name = options.method
    if options.is_auto:
        name, given = "full", [*options.method_options, *filter(options.named.get, options.named)]
        given += ["calibration"] * bool(options.config.calibration)
        if given:
            raise click.UsageError(
                f"--method auto chooses a method with its options: leave {given[0]} out, or name "
                "a method"
            )
    with collecting_no_garbage():
        method = build_method(name, options.method_options, options.named)
    if not options.is_auto:
        check_sparse_from(options.config, [method])
        _check_max_loss(options, method)
    return method


def _check_max_loss(options: ModelOptions, method: Method) -> None:
    """Raises click.UsageError for ``--max-loss`` if there is no budget to choose."""
    if options.max_loss is None or options.choice is not None:
        return
    if "budget" in options.method_options or options.named.get("budget"):
        raise click.UsageError(
            f"--max-loss {options.max_loss:g} chooses the budget: leave out the one that is given"
        )


def prepare_methods(
    model: Model, methods: Iterable[Method], compiling: CompileProgress | None = None
) -> None:
    """Calibrates and compiles methods, and shows the progress. compiling: see ``load_model``."""
    from sparsekv_cli.commands.shared import progress

    with (
        compiling or progress.CompileProgress() as compiling,
        progress.CalibrationProgress() as calibrating,
    ):
        for method in methods:
            model.prepare(method, compiling, calibrating)


def check_sparse_from(config: SessionConfig, methods: Sequence[Method]) -> None:
    """Raises click.UsageError for ``--sparse-from`` if none of ``methods`` chooses among rows."""
    if config.sparse_from > 0 and not any(method.work_of_a_head for method in methods):
        names = " and ".join(dict.fromkeys(method.name for method in methods))
        raise click.UsageError(f"--sparse-from is for methods that choose among rows, not {names}")


def load_model(
    path: Path, method: Method, config: SessionConfig, compiling: CompileProgress | None = None
) -> Model:
    """Returns a loaded model. It imports numba, so call it after all checks of options.

    compiling: shows the progress of compiling. Give it if the command compiles more afterwards.
    """
    from sparsekv_cli.commands.shared import progress

    with (
        collecting_no_garbage(),
        compiling or progress.CompileProgress() as compiling,
        progress.CalibrationProgress() as calibrating,
        progress.LoadProgress() as loading,
    ):
        from sparsekv_cli import model

        try:
            loaded = model.load_model(path, method, config, compiling, calibrating, on_load=loading)
        except OptionError as error:
            raise click.UsageError(str(error), click.get_current_context(silent=True)) from None
    if loaded.engine.note:
        say(loaded.engine.note)
    return loaded
