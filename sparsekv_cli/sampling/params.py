"""The parameters of sampling: llama.cpp's names and defaults, and values of a model file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.settings.option import MAX_FLOAT, MAX_WHOLE, check_options, did_you_mean, option

MAX_SEED = 2**64 - 1
MAX_BREAKERS, MAX_BREAKERS_BYTES = 64, 1024  # most sequence breakers, and most bytes of all of them


@dataclass(frozen=True)
class Sampler:
    """One sampler of the chain: its name, its parameters, and when it is on.

    chain.py has its function.
    """

    name: str
    is_on: Callable[[SamplingParams], bool]  # whether these parameters let it change anything
    # fields of SamplingParams that its function gets, in order; empty: the field with its name
    fields: tuple[str, ...] = ()
    # One more argument of its function: the last tokens of the ``history``, a ``chance`` in [0, 1),
    # or the texts of breakers, which need the ``vocabulary``. Empty: there is none.
    takes: str = ""
    aliases: tuple[str, ...] = ()  # other spellings that llama.cpp accepts (common/sampling.cpp)
    keeps_best: bool = False  # True: the most likely token always stays the most likely

    def values(self, params: SamplingParams) -> list[Any]:
        """Returns the values of ``fields`` in ``params``."""
        return [getattr(params, field) for field in self.fields or (self.name,)]


def _penalises(p: SamplingParams) -> bool:
    penalties = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
    return p.repeat_last_n != 0 and penalties != (1, 0, 0)


# In llama.cpp's default order (common.h, common_params_sampling::samplers), after the logit bias.
SAMPLERS = (
    Sampler(
        "penalties", _penalises,
        ("repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty"),
        takes="history",
    ),
    Sampler(
        "dry", lambda p: p.dry_multiplier > 0 and p.dry_penalty_last_n != 0,
        ("dry_penalty_last_n", "dry_multiplier", "dry_base", "dry_allowed_length"),
        takes="vocabulary",
    ),
    Sampler(
        "top_n_sigma", lambda p: p.top_n_sigma > 0, aliases=("top-n-sigma",), keeps_best=True,
    ),
    Sampler("top_k", lambda p: p.top_k > 0, aliases=("top-k",), keeps_best=True),
    Sampler("typ_p", lambda p: p.typ_p < 1, aliases=("typical-p", "typical", "typ-p", "typ")),
    Sampler("top_p", lambda p: p.top_p < 1, aliases=("top-p", "nucleus"), keeps_best=True),
    Sampler("min_p", lambda p: p.min_p > 0, aliases=("min-p",), keeps_best=True),
    Sampler(
        "xtc", lambda p: p.xtc_probability > 0 and p.xtc_threshold <= 0.5,
        ("xtc_probability", "xtc_threshold"), takes="chance",
    ),
    Sampler(
        "temperature", lambda p: p.temp != 1 or p.dynatemp_range > 0,
        ("temp", "dynatemp_range", "dynatemp_exponent"), aliases=("temp",), keeps_best=True,
    ),
)  # fmt: skip
SAMPLER_ORDER = tuple(sampler.name for sampler in SAMPLERS)


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of the sampler chain. The table SAMPLERS says which sampler reads them.

    repeat_last_n, dry_penalty_last_n: the number of last tokens of the context that count. dry_*: a
    repetition of n tokens has the penalty dry_multiplier * dry_base ** (n - dry_allowed_length).
    dry_sequence_breakers: texts that end a repetition. logit_bias: token id -> number added to its
    logit; -inf bans the token. samplers: the order of the chain, with names from SAMPLER_ORDER. A
    sampler that is not named is not applied.
    """

    temp: float = option(
        0.8, "0: take the most likely token.", at_least=0, flags=("--temp", "--temperature"),
    )  # fmt: skip
    top_k: int = option(40, "Most likely tokens to keep; 0: all.", at_least=-1)
    top_p: float = option(0.95, "Probability mass to keep; 1: all.", at_least=0, at_most=1)
    min_p: float = option(0.05, "Least probability, in shares of the best.", at_least=0, at_most=1)
    typ_p: float = option(
        1.0, "Mass of the locally typical tokens to keep; 1: off.", at_least=0, at_most=1,
        flags=("--typical", "--typical-p"),
    )  # fmt: skip
    top_n_sigma: float = option(
        -1.0, "Keep logits within N standard deviations of the best; -1: off.",
        at_least=-1, flags=("--top-nsigma", "--top-n-sigma"),
    )  # fmt: skip
    xtc_probability: float = option(
        0.0, "Chance to drop all top tokens but the least likely one; 0: off.",
        at_least=0, at_most=1,
    )  # fmt: skip
    xtc_threshold: float = option(
        0.1, "Least probability of a top token; above 0.5: off.", at_least=0, at_most=1
    )
    dynatemp_range: float = option(
        0.0, "The temperature falls by up to N if the model is sure, and rises if not; 0: off.",
        at_least=0,
    )  # fmt: skip
    dynatemp_exponent: float = option(
        1.0, "Power of the model's uncertainty in --dynatemp-range.", at_least=0,
        flags=("--dynatemp-exp",),
    )  # fmt: skip
    repeat_last_n: int = option(64, "Last tokens that are penalised; 0: off, -1: all.", at_least=-1)
    repeat_penalty: float = option(1.0, "Penalty for repeated tokens; 1: off.", above=0)
    presence_penalty: float = option(0.0, "Penalty for a token that occurs; 0: off.")
    frequency_penalty: float = option(0.0, "Penalty for each time it occurs; 0: off.")
    dry_multiplier: float = option(0.0, "Penalty for long repetitions; 0: off.", at_least=0)
    dry_base: float = option(1.75, "Factor of this penalty for each token.", at_least=1)
    dry_allowed_length: int = option(2, "Tokens of a repetition without penalty.", at_least=0)
    dry_penalty_last_n: int = option(64, "Last tokens that count; 0: off, -1: all.", at_least=-1)
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: tuple[str, ...] = SAMPLER_ORDER
    seed: int = option(
        -1, "Seed of the draws; -1 takes a random one.", at_least=-1, at_most=MAX_SEED
    )

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong value.

        The text has the field, the value and what is allowed.
        """
        check_options(self)
        self._check_breakers()
        self._check_logit_bias()
        self._check_samplers()

    def _check_breakers(self) -> None:
        breakers = self.dry_sequence_breakers
        if isinstance(breakers, str) or not all(
            isinstance(text, str) and text for text in breakers
        ):
            raise ValueError(f"dry_sequence_breakers = {breakers!r}: must be non-empty texts")
        n_bytes = sum(len(text.encode()) for text in breakers)
        if len(breakers) > MAX_BREAKERS or n_bytes > MAX_BREAKERS_BYTES:
            raise ValueError(
                f"dry_sequence_breakers: {len(breakers)} texts of {n_bytes} bytes in all: must be "
                f"at most {MAX_BREAKERS} texts of {MAX_BREAKERS_BYTES} bytes in all"
            )
        object.__setattr__(self, "dry_sequence_breakers", tuple(breakers))

    def _check_logit_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            is_id = isinstance(token, int) and not isinstance(token, bool)
            if not is_id or not 0 <= token <= MAX_WHOLE:
                raise ValueError(f"logit_bias = {{{token!r}: ...}}: a token id must be 0 or more")
            is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
            if not is_number or not (abs(bias) <= MAX_FLOAT or bias == -math.inf):
                raise ValueError(
                    f"logit_bias = {{{token}: {bias!r}}}: must be a number up to {MAX_FLOAT:.1e} "
                    "in size, or -inf"
                )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_samplers(self) -> None:
        spellings = {alias: each.name for each in SAMPLERS for alias in each.aliases}
        names = tuple(spellings.get(name, name) for name in self.samplers)
        for name in names:
            if name not in SAMPLER_ORDER or names.count(name) > 1:
                known = ", ".join(SAMPLER_ORDER)
                close = "" if name in SAMPLER_ORDER else did_you_mean(name, SAMPLER_ORDER)
                raise ValueError(
                    f"samplers = {name!r}{close}: must be names from {known}, each once"
                )
        object.__setattr__(self, "samplers", names)


# End of a key after general.sampling. -> field (llama.cpp, llama_model_meta_key_str).
METADATA_PREFIX = "general.sampling."
METADATA_FIELDS = {
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    **{"temp": "temp", "penalty_last_n": "repeat_last_n", "penalty_repeat": "repeat_penalty"},
}


def params_from_metadata(
    metadata: Mapping[str, Any], explicit: Mapping[str, Any]
) -> SamplingParams:
    """Returns the parameters: the user's values first, then the model file's, then the defaults.

    metadata: the model file's key-value pairs. explicit: field -> the user's value; None counts as
    missing. Raises ValueError for a wrong value of the user, SparseKVError for one of the file.
    """
    given = {name: value for name, value in explicit.items() if value is not None}
    unknown = given.keys() - {known.name for known in fields(SamplingParams)}
    if unknown:
        raise ValueError(f"{min(unknown)}: no such sampling parameter")

    from_file = SamplingParams()
    for suffix, name in METADATA_FIELDS.items():
        key, kind = METADATA_PREFIX + suffix, type(getattr(from_file, name))
        if key in metadata and name not in given:
            from_file = override(from_file, key, name, number(key, metadata[key], kind))
    sequence = METADATA_PREFIX + "sequence"
    if sequence in metadata and "samplers" not in given:
        names = tuple(name.strip() for name in str(metadata[sequence]).split(";") if name.strip())
        if names:
            from_file = override(from_file, sequence, "samplers", names)

    params = replace(from_file, **given)
    mirostat = METADATA_PREFIX + "mirostat"
    if number(mirostat, metadata.get(mirostat, 0), int) and params.temp > 0 and "temp" not in given:
        raise SparseKVError(
            f"{mirostat} = {metadata[mirostat]}: mirostat sampling is not supported;"
            " set a temperature (0 for the most likely token) to sample without it"
        )
    return params


def override(params: SamplingParams, key: str, name: str, value: Any) -> SamplingParams:
    """Returns params with field ``name`` set to the model file's value.

    Raises SparseKVError, which names ``key``, if the value is wrong.
    """
    try:
        return replace(params, **{name: value})
    except ValueError as error:
        raise SparseKVError(f"{key} in the model file: {error}") from error


def number(key: str, value: Any, kind: type) -> int | float:
    """Returns a metadata value as a number. Texts such as "0.5" count as numbers, as in llama.cpp.

    Raises SparseKVError for other values. kind: int or float.
    """
    try:
        converted = float(value)
        if kind is int and not converted.is_integer():
            raise ValueError
        return int(converted) if kind is int else converted
    except (TypeError, ValueError, OverflowError) as error:
        expected = "an integer" if kind is int else "a number"
        raise SparseKVError(f"{key} = {value!r} in the model file: expected {expected}") from error
