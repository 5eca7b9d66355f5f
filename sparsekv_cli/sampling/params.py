"""What may be set about sampling: llama.cpp's names and defaults, and a file's overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sparsekv_cli.errors import SparseKVError

# llama.cpp's default order (common.h, common_params_sampling::samplers); logit_bias comes before.
SAMPLER_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
# Other spellings that llama.cpp accepts in a sequence (common/sampling.cpp).
SAMPLER_ALIASES = {
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ-p": "typ_p",
    "typ": "typ_p",
    "min-p": "min_p",
    "temp": "temperature",
    "top-n-sigma": "top_n_sigma",
}
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingParams:
    """The sampler chain's parameters; a value that switches its sampler off is named "off".

    temp: <= 0 takes the most likely token that the other samplers leave.
    top_k: most likely tokens kept; <= 0 off. top_p, typ_p: mass kept; 1 off.
    min_p: least probability, as a fraction of the highest; 0 off.
    top_n_sigma: standard deviations of the logits below the maximum that are kept; <= 0 off.
    xtc_probability: chance that all but the least likely token of those with probability of at
        least xtc_threshold are removed; probability 0 or threshold above 0.5 off.
    repeat_last_n: tokens of the context that the penalties look at; 0 off, -1 all.
    repeat_penalty: 1 off. frequency_penalty, presence_penalty: 0 off.
    dry_multiplier: 0 off; the penalty of a repetition of n tokens is
        dry_multiplier * dry_base ** (n - dry_allowed_length).
    dry_penalty_last_n: tokens of the context that DRY looks at; 0 off, -1 all.
    dry_sequence_breakers: texts that end a repetition.
    logit_bias: token id -> number added to its logit; -inf bans the token.
    samplers: the order of the chain, names from SAMPLER_ORDER; one left out is not applied.
    seed: of the draws; -1 takes one from the system.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: tuple[str, ...] = SAMPLER_ORDER
    seed: int = -1

    def __post_init__(self) -> None:
        """Raises ValueError with the field, its value and what it must be."""
        for name in ("temp", "top_n_sigma", "frequency_penalty", "presence_penalty"):
            self._check_number(name)
        for name in ("top_p", "min_p", "typ_p", "xtc_probability", "xtc_threshold"):
            self._check_number(name, low=0.0, high=1.0)
        self._check_number("repeat_penalty")
        if self.repeat_penalty <= 0:
            raise ValueError(f"repeat_penalty = {self.repeat_penalty}: must be above 0")
        self._check_number("dry_multiplier", low=0.0)
        self._check_number("dry_base", low=1.0)
        self._check_integer("top_k", low=-1)
        self._check_integer("repeat_last_n", low=-1)
        self._check_integer("dry_penalty_last_n", low=-1)
        self._check_integer("dry_allowed_length", low=0)
        self._check_integer("seed", low=-1, high=MAX_SEED)
        self._check_breakers()
        self._check_logit_bias()
        self._check_samplers()

    def _check_number(self, name: str, low: float = -math.inf, high: float = math.inf) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"{name} = {value!r}: must be {describe('a number', low, high)}")

    def _check_integer(self, name: str, low: int, high: float = math.inf) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{name} = {value!r}: must be {describe('an integer', low, high)}")

    def _check_breakers(self) -> None:
        breakers = self.dry_sequence_breakers
        if isinstance(breakers, str) or not all(
            isinstance(text, str) and text for text in breakers
        ):
            raise ValueError(f"dry_sequence_breakers = {breakers!r}: must be non-empty texts")
        object.__setattr__(self, "dry_sequence_breakers", tuple(breakers))

    def _check_logit_bias(self) -> None:
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ValueError(f"logit_bias = {{{token!r}: ...}}: a token id must be 0 or more")
            if not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
                raise ValueError(f"logit_bias = {{{token}: {bias!r}}}: must be a number or -inf")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_samplers(self) -> None:
        names = tuple(SAMPLER_ALIASES.get(name, name) for name in self.samplers)
        for name in names:
            if name not in SAMPLER_ORDER or names.count(name) > 1:
                known = ", ".join(SAMPLER_ORDER)
                raise ValueError(f"samplers = {name!r}: must be names from {known}, each once")
        object.__setattr__(self, "samplers", names)


def describe(kind: str, low: float, high: float) -> str:
    """A range in words, for messages."""
    if math.isinf(low) and math.isinf(high):
        return kind
    if math.isinf(high):
        return f"{kind}, {low:g} or more"
    return f"{kind} from {low:g} to {high:g}"


# Field and type of each key under general.sampling (llama.cpp, llama_model_meta_key_str).
METADATA_PREFIX = "general.sampling."
METADATA_FIELDS: dict[str, tuple[str, type]] = {
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temp": ("temp", float),
    "penalty_last_n": ("repeat_last_n", int),
    "penalty_repeat": ("repeat_penalty", float),
}


def params_from_metadata(
    metadata: Mapping[str, Any], explicit: Mapping[str, Any]
) -> SamplingParams:
    """The parameters of a run: what the user set, else what the file sets, else the defaults.

    metadata: a model's key-value pairs. explicit: field -> value as the user gave it; None counts
    as not given. Raises ValueError for a value of the user's, SparseKVError for one of the file's.
    """
    given = {name: value for name, value in explicit.items() if value is not None}
    unknown = given.keys() - {known.name for known in fields(SamplingParams)}
    if unknown:
        raise ValueError(f"{min(unknown)}: no such sampling parameter")

    from_file = SamplingParams()
    for suffix, (name, kind) in METADATA_FIELDS.items():
        key = METADATA_PREFIX + suffix
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
    """params with one value of the file's; SparseKVError names the key when it is invalid."""
    try:
        return replace(params, **{name: value})
    except ValueError as error:
        raise SparseKVError(f"{key} in the model file: {error}") from error


def number(key: str, value: Any, kind: type) -> int | float:
    """A metadata value as a number; texts that hold one count, as in llama.cpp."""
    try:
        converted = float(value)
        if kind is int and not converted.is_integer():
            raise ValueError
        return int(converted) if kind is int else converted
    except (TypeError, ValueError, OverflowError) as error:
        expected = "an integer" if kind is int else "a number"
        raise SparseKVError(f"{key} = {value!r} in the model file: expected {expected}") from error
