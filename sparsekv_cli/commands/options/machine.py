"""Options of where a model runs, and of what it keeps to go back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sparsekv_cli.commands.options.numbers import FiniteRange
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.option import MAX_WHOLE, allowed_values, options_of


def choice_of(name: str) -> click.Choice:
    """The choices that SessionConfig declares for one of its options."""
    return click.Choice(allowed_values(options_of(SessionConfig)[name]).choices)


GPU_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--kv",
        type=choice_of("kv"),
        default="auto",
        help="Where a GPU's run keeps the KV cache; auto: on the GPU, if the method can and it "
        "fits, otherwise on the host. [default: auto]",
    ),
    click.option(
        "--gpu-weights",
        type=choice_of("gpu_weights"),
        default="auto",
        help="Weights in the GPU's memory; auto is quantized, as in the file. [default: auto]",
    ),
    click.option(
        "--vram-limit",
        metavar="GIB",
        type=FiniteRange(min=0),
        default=0.0,
        help="Most of the GPU's memory to use; 0 takes what is free. [default: 0]",
    ),
]

CHECKPOINTS_OPTION = click.option(
    "--checkpoints",
    metavar="N",
    type=click.IntRange(0, MAX_WHOLE),
    default=SessionConfig.checkpoints,
    help="States of recurrent layers that are kept at most: another answer, or one to a changed "
    "message, begins at one; and most snapshots of a prompt on disk. Other models need none. "
    "[default: 8]",
)
