"""The sampling options, with llama.cpp's names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsekv_cli.commands.options.completers import files
from sparsekv_cli.commands.options.model import gathered
from sparsekv_cli.commands.options.numbers import FiniteRange, WholeRange
from sparsekv_cli.commands.shared.prompt import check_utf8, decode_file
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.sampling.params import SAMPLER_ORDER, SamplingParams
from sparsekv_cli.settings.option import options_of

if TYPE_CHECKING:
    from sparsekv_cli.sampling.grammar import Grammar

LOGIT_BIAS = re.compile(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))")


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
    "-r", "--stop", metavar="TEXT", multiple=True, callback=_stops,
    help="End the answer before this text; repeatable.",
)  # fmt: skip


def _number(declared: Field[Any]) -> Callable[[Any], Any]:
    """Returns the click option for a number of SamplingParams."""
    flags = declared.metadata["flags"] or ("--" + declared.name.replace("_", "-"),)
    text = f"{declared.metadata['help']} [default: {declared.default:g}]"
    kind = WholeRange() if isinstance(declared.default, int) else FiniteRange()
    return click.option(*flags, declared.name, type=kind, metavar="N", help=text)


NUMBERS = {name: each for name, each in options_of(SamplingParams).items() if name != "seed"}
FIELDS = (*NUMBERS, "dry_sequence_breakers", "logit_bias", "samplers")
SAMPLING_OPTIONS: list[Callable[[Any], Any]] = [
    *map(_number, NUMBERS.values()),
    click.option(
        "--dry-sequence-breaker", "dry_sequence_breakers", metavar="TEXT", multiple=True,
        callback=_breakers,
        help="Text that ends a repetition, instead of the default ones; repeatable; none: no text "
        "ends one.",
    ),
    click.option(
        "-l", "--logit-bias", metavar="ID(+/-)BIAS", multiple=True, callback=_logit_bias,
        help="Add to the logit of a token, such as 15043+1 or 15043-inf; repeatable.",
    ),
    click.option(
        "--samplers", metavar="LIST", callback=_samplers,
        help=f"Samplers in order, with semicolons between. [default: {'; '.join(SAMPLER_ORDER)}]",
    ),
    click.option(
        "--ignore-eos", is_flag=True,
        help="Continue when the model would end the answer, up to the most tokens.",
    ),
    click.option(
        "--think-budget", metavar="N", type=WholeRange(min=0),
        help="Most tokens of thinking before the answer; then the thinking is closed. [default: "
        "half of the most tokens with a schema, a grammar or a regex; else no limit]",
    ),
]  # fmt: skip
GRAMMAR_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--json-schema", metavar="FILE|TEXT", shell_complete=files,
        help="The answer is JSON that fits this JSON schema; {}: any JSON.",
    ),
    click.option(
        "--grammar", metavar="FILE", shell_complete=files,
        help="The answer matches this grammar, in llama.cpp's GBNF or in Lark.",
    ),
    click.option("--regex", metavar="TEXT", help="The answer matches this regular expression."),
]  # fmt: skip


def _gather_sampling(values: dict[str, Any]) -> SamplingOptions:
    """Returns the sampling options among ``values``, and removes them from it.

    Raises a usage error for a bad value.
    """
    given = {name: values.pop(name) for name in FIELDS}
    explicit = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**explicit)
    except ValueError as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    ignore_eos, grammar = values.pop("ignore_eos"), _gather_grammar(values)
    if ignore_eos and grammar is not None:
        raise click.UsageError(
            f"--ignore-eos and --{grammar.kind} exclude each other: the answer ends where it "
            "matches",
            click.get_current_context(),
        )
    return SamplingOptions(explicit, ignore_eos, grammar, values.pop("think_budget"))


sampling_options = gathered("sampling", _gather_sampling, [*SAMPLING_OPTIONS, *GRAMMAR_OPTIONS])
# The options of a server, without grammars: these come with requests only.
server_sampling_options = gathered("sampling", _gather_sampling, SAMPLING_OPTIONS)


def check_think_budget(
    context: click.Context, sampling: SamplingOptions, think: bool | None, *, raw: bool = False
) -> None:
    """Raises UsageError if ``--think-budget`` is given and the model does not think."""
    if sampling.think_budget is None:
        return
    if raw:
        raise click.UsageError(
            "--think-budget needs the chat template, which --raw switches off", context
        )
    if think is False:
        raise click.UsageError("--think-budget and --think off exclude each other", context)


def _gather_grammar(values: dict[str, Any]) -> Grammar | None:
    """Returns the grammar among ``values``, if any, and removes its options from it."""
    given = {
        option: text
        for option in ("json-schema", "grammar", "regex")
        if (text := values.pop(option.replace("-", "_"), None)) is not None
    }
    if len(given) > 1:
        first, second, *_ = given
        raise click.UsageError(
            f"--{first} and --{second} exclude each other", click.get_current_context()
        )
    for option, text in given.items():
        from sparsekv_cli.sampling.grammar import read_grammar

        text = check_utf8(text, f"the text given with --{option}")
        is_file = option == "grammar" or (option == "json-schema" and not _is_schema(text))
        if is_file:
            text = decode_file(_read(option, text), text)
        return read_grammar(option, text)
    return None


def _is_schema(text: str) -> bool:
    """Returns whether ``text`` is a JSON schema (an object or a boolean) and not a path."""
    return text.lstrip().startswith("{") or text.strip() in ("true", "false")


def _read(option: str, path: str) -> bytes:
    """Returns the bytes of the file ``path``. Raises SparseKVError if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        expected = "a file" if option == "grammar" else "a file, or a schema: a JSON object"
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SparseKVError(f"--{option} {path}: {reason}: expected {expected}") from None
