"""Sampling options with llama.cpp's names, and the sampler that they make."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options import apply_options
from sparsekv_cli.commands.prompt import check_utf8
from sparsekv_cli.option import options_of
from sparsekv_cli.sampling.params import SAMPLER_ORDER, SamplingParams, params_from_metadata

if TYPE_CHECKING:
    from sparsekv_cli.session import Sample, Session

LOGIT_BIAS = re.compile(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))")


@dataclass(frozen=True)
class SamplingOptions:
    """What the user set; what is missing comes from the model file or from llama.cpp's defaults.

    explicit: field of SamplingParams -> value. ignore_eos: never choose a token that ends the text.
    """

    explicit: Mapping[str, Any]
    ignore_eos: bool = False


def _stops(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    if not all(values):
        raise click.BadParameter("the text is empty")
    return tuple(check_utf8(value, "the stop text") for value in values)


def _logit_bias(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float] | None:
    biases = {}
    for value in values:
        match = LOGIT_BIAS.fullmatch(value)
        if match is None or match[2] == "+inf":
            raise click.BadParameter(f"{value!r} is not ID+BIAS or ID-BIAS, such as 15043-1.5")
        biases[int(match[1])] = float(match[2])
    return biases or None


def _samplers(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> tuple[str, ...] | None:
    if value is None:
        return None
    return tuple(name.strip() for name in value.split(";") if name.strip())


def _breakers(
    _context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...] | None:
    if "none" in values and len(values) > 1:
        raise click.BadParameter("'none' and other texts exclude each other")
    if not values:
        return None
    texts = tuple(check_utf8(value, "the sequence breaker") for value in values)
    return () if texts == ("none",) else texts


stop_option = click.option(
    "-r",
    "--stop",
    metavar="TEXT",
    multiple=True,
    callback=_stops,
    help="End the answer before this text; repeatable.",
)


def _number(declared: Field[Any]) -> Callable[[Any], Any]:
    """The click option of a number that SamplingParams declares."""
    flags = declared.metadata["flags"] or ("--" + declared.name.replace("_", "-"),)
    text = f"{declared.metadata['help']} [default: {declared.default:g}]"
    return click.option(*flags, declared.name, type=type(declared.default), metavar="N", help=text)


NUMBERS = {name: each for name, each in options_of(SamplingParams).items() if name != "seed"}
FIELDS = (*NUMBERS, "dry_sequence_breakers", "logit_bias", "samplers")
SAMPLING_OPTIONS: list[Callable[[Any], Any]] = [
    *map(_number, NUMBERS.values()),
    click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        metavar="TEXT",
        multiple=True,
        callback=_breakers,
        help="Text that ends a repetition, in place of the default ones; repeatable; none: no such "
        "text.",
    ),
    click.option(
        "-l",
        "--logit-bias",
        metavar="ID(+/-)BIAS",
        multiple=True,
        callback=_logit_bias,
        help="Add to the logit of a token, such as 15043+1 or 15043-inf; repeatable.",
    ),
    click.option(
        "--samplers",
        metavar="LIST",
        callback=_samplers,
        help=f"The chain, with semicolons between. [default: {';'.join(SAMPLER_ORDER)}]",
    ),
    click.option("--ignore-eos", is_flag=True, help="Do not end before -n tokens."),
]


def sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the sampling options; passes them as ``sampling``. A bad value is a usage error."""

    @functools.wraps(function)
    def gather(**values: Any) -> Any:
        given = {name: values.pop(name) for name in FIELDS}
        explicit = {name: value for name, value in given.items() if value is not None}
        try:
            SamplingParams(**explicit)
        except ValueError as error:
            raise click.UsageError(str(error), click.get_current_context()) from None
        sampling = SamplingOptions(explicit, ignore_eos=values.pop("ignore_eos"))
        return function(sampling=sampling, **values)

    return apply_options(gather, SAMPLING_OPTIONS)


def new_sampler(session: Session, sampling: SamplingOptions, seed: int | None) -> Sample:
    """The sampler for a model: the user's values, the file's, then the defaults.

    seed: None takes a random one.
    """
    from sparsekv_cli.sampling.chain import make_sampler

    tokenizer = session.tokenizer
    explicit = dict(sampling.explicit)
    if seed is not None:
        explicit["seed"] = seed
    if sampling.ignore_eos:
        bans = {int(token): -math.inf for token in tokenizer.eog_ids}
        explicit["logit_bias"] = {**explicit.get("logit_bias", {}), **bans}
    return make_sampler(
        params_from_metadata(session.gguf.metadata, explicit),
        piece=tokenizer.token_bytes,
        tokenize=lambda text: tokenizer.encode(text, add_bos=False, parse_special=False),
    )
