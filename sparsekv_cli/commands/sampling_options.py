"""Sampling options with llama.cpp's names, and the sampler that they make."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options import apply_options
from sparsekv_cli.commands.prompt import check_utf8
from sparsekv_cli.sampling.params import SAMPLER_ORDER, SamplingParams, params_from_metadata

if TYPE_CHECKING:
    from sparsekv_cli.commands.answer import Sample
    from sparsekv_cli.session import Session

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
    for value in values:
        if not value:
            raise click.BadParameter("the text is empty")
        check_utf8(value, "the stop text")
    return values


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
    return () if values == ("none",) else values


stop_option = click.option(
    "-r",
    "--stop",
    metavar="TEXT",
    multiple=True,
    callback=_stops,
    help="End the answer before this text; repeatable.",
)


def _number(flags: str, name: str, kind: type, text: str) -> Callable[[Any], Any]:
    return click.option(*flags.split(), name, type=kind, metavar="N", help=text)


SAMPLING_OPTIONS: list[Callable[[Any], Any]] = [
    _number("--temp --temperature", "temp", float, "0: the most likely token. [default: 0.8]"),
    _number("--top-k", "top_k", int, "Most likely tokens kept; 0: all. [default: 40]"),
    _number("--top-p", "top_p", float, "Probability mass kept; 1: all. [default: 0.95]"),
    _number("--min-p", "min_p", float, "Least share of the best token's. [default: 0.05]"),
    _number("--typical --typical-p", "typ_p", float, "Locally typical mass; 1: off. [default: 1]"),
    _number("--top-nsigma --top-n-sigma", "top_n_sigma", float, "-1: off. [default: -1]"),
    _number("--xtc-probability", "xtc_probability", float, "0: off. [default: 0]"),
    _number("--xtc-threshold", "xtc_threshold", float, "Above 0.5: off. [default: 0.1]"),
    _number("--repeat-last-n", "repeat_last_n", int, "0: off, -1: all. [default: 64]"),
    _number("--repeat-penalty", "repeat_penalty", float, "1: off. [default: 1]"),
    _number("--presence-penalty", "presence_penalty", float, "0: off. [default: 0]"),
    _number("--frequency-penalty", "frequency_penalty", float, "0: off. [default: 0]"),
    _number("--dry-multiplier", "dry_multiplier", float, "0: off. [default: 0]"),
    _number("--dry-base", "dry_base", float, "[default: 1.75]"),
    _number("--dry-allowed-length", "dry_allowed_length", int, "[default: 2]"),
    _number("--dry-penalty-last-n", "dry_penalty_last_n", int, "0: off, -1: all. [default: -1]"),
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
FIELDS = (
    "temp",
    "top_k",
    "top_p",
    "min_p",
    "typ_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "logit_bias",
    "samplers",
)


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
