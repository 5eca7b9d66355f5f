"""``calibrate``: measures what some methods need to know about a model, and writes the sidecar."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options import completers
from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.help_page import GroupedCommand
from sparsekv_cli.commands.options.method_choice import measure_losses
from sparsekv_cli.commands.options.model import (
    CHANGE_OPTIONS,
    MACHINE_OPTIONS,
    MODEL_OPTION,
    apply_options,
    build_method,
    find_model,
    load_model,
    session_config,
)
from sparsekv_cli.commands.options.numbers import WholeRange
from sparsekv_cli.commands.options.prompt import file_option
from sparsekv_cli.commands.options.verbose import verbose_option
from sparsekv_cli.commands.shared.header import model_header
from sparsekv_cli.commands.shared.progress import CalibrationProgress
from sparsekv_cli.commands.shared.prompt import read_prompt
from sparsekv_cli.commands.shared.terminal import say, write_json
from sparsekv_cli.settings.option import did_you_mean

if TYPE_CHECKING:
    from sparsekv_cli.calibration.sidecar import Entry

ALL, AUTO = "all", "auto"


@click.command(cls=GroupedCommand)
@MODEL_OPTION
@click.option(
    "--method", metavar="LIST", shell_complete=completers.methods, default=ALL,
    help="Methods with commas between, or all that need a calibration; auto: the losses by which "
    "--method auto chooses. [default: all]",
)  # fmt: skip
@file_option("Measure on this text instead of the built-in one; - is stdin.")
@click.option(
    "--tokens", "n_tokens", metavar="N", type=WholeRange(min=1),
    help="Use the first N tokens of the text. [default: 4096]",
)  # fmt: skip
@click.option(
    "--scored-rows", "n_scored", metavar="N", type=WholeRange(2, 48),
    help="Score each trial by N rows of a window, 2 to 48: fewer are faster and less exact. "
    "[default: as many as about a minute allows, and at least 24 for faedkv]",
)  # fmt: skip
@click.option(
    "--output", metavar="FILE", shell_complete=files,
    help="Write to FILE; runs read it with --calibration FILE. [default: next to the model, or in "
    "the user's cache directory if that folder cannot be written]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@partial(apply_options, options=[*MACHINE_OPTIONS, *CHANGE_OPTIONS])
@verbose_option
def command(
    model: str | None,
    method: str,
    file: str | None,
    n_tokens: int | None,
    n_scored: int | None,
    output: str | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Calibrate methods for a model and store the result in its sidecar, an npz file.

    A method that needs a calibration makes it by itself when it is first used. This command makes
    it again, beforehand, or on another text. Calibrations of other methods stay.
    """
    config = session_config(settings)
    names = choose_methods(method)
    if n_scored and AUTO in names:
        raise click.UsageError("--scored-rows: --method auto has no trials; leave one of them out")
    path = find_model(model)
    text = None if file is None else read_prompt(None, file, "text", "-f FILE")
    from sparsekv_cli.calibration.calibrations import (
        DEFAULT_TOKENS,
        CalibrationText,
        built_in_text,
        check_length,
    )
    from sparsekv_cli.calibration.sidecar import check_place, write_entry

    source = built_in_text() if text is None else CalibrationText(str(file), text)
    if text is not None:  # before kernels are compiled
        with model_header(path, config) as header:
            check_length(source, len(header.tokenizer.encode(text, parse_special=False)))
    opened = load_model(path, build_method("full", {}), config)
    if method == ALL:
        from sparsekv_cli.methods import usable_methods

        names = usable_methods(opened.hparams.layers, "", lambda each: each.name in names)
    for name in names:
        if name != AUTO:
            build_method(name, {}).check_layers(opened.hparams.layers)
    calibrations = opened.calibrations
    place = calibrations.place_to_write() if output is None else Path(output)
    check_place(place)
    rows = []
    with CalibrationProgress() as progress:
        for name in names:
            begin = time.perf_counter()
            n = n_tokens or DEFAULT_TOKENS
            if name == AUTO:
                _, entry = measure_losses(opened, source, n)
            else:
                built = build_method(name, {})
                entry = calibrations.calibrate(built, source, n, progress, n_scored or 0)
            write_entry(place, name, calibrations.identity, entry)
            seconds = time.perf_counter() - begin
            progress(name, 1.0, f"{entry.n_tokens} tokens, {seconds:.1f} s, stored in {place}")
            rows.append(describe(name, entry, seconds))
    size = place.stat().st_size
    if as_json:
        write_json({"model": str(path), "path": str(place), "bytes": size, "methods": rows})
    else:
        say(f"{place}: {size / 2**20:.1f} MiB")


def choose_methods(text: str) -> list[str]:
    """Returns the methods named in ``text``. Raises a usage error for one without calibration.

    AUTO is the measurement for ``--method auto``. ALL stands for all methods, without AUTO.
    """
    from sparsekv_cli.methods import calibrated_methods

    known = calibrated_methods()
    listed = ", ".join(known) or "none"
    if text == ALL:
        if not known:
            raise click.UsageError("no method needs a calibration")
        return known
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known and name != AUTO:
            close = did_you_mean(name, known)
            raise click.UsageError(
                f"method {name!r}{close} has no calibration: choose from {listed}, or {AUTO} to "
                "measure what all methods lose"
            )
    return names


def describe(name: str, entry: Entry, seconds: float) -> Mapping[str, Any]:
    """Returns the object of ``--json`` for one method."""
    return {
        "name": name,
        "tokens": entry.n_tokens,
        "text": entry.text_name,
        "text_sha256": entry.text_hash,
        "seconds": seconds,
        "tensors": [
            {"name": key, "type": array.dtype.name, "shape": list(array.shape)}
            for key, array in entry.tensors.items()
        ],
    }
