"""Fields of JSON objects that ``run --jsonl`` and both protocols of ``serve`` share.

They are the sampling parameters of sampling/params.py, the seed, and the format that an answer must
match.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field, create_model

from sparsekv_cli.errors import BusyError, SparseKVError
from sparsekv_cli.generation.fields import FieldError, Fields, Many, Number, Text, Whole
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.sampling.params import MAX_BREAKERS, MAX_SEED, SamplingParams
from sparsekv_cli.settings.option import MAX_FLOAT, MAX_WHOLE, allowed_values, options_of

# a name in other protocols -> the field
ALIASES = {"temp": "temperature", "repeat_penalty": "repetition_penalty"}
GRAMMARS = {"json_schema": "json-schema", "grammar": "grammar", "regex": "regex"}
BAN = -100  # in OpenAI's protocol, a bias that bans a token
TOKEN_ID = re.compile(r"^(0|[1-9][0-9]{0,8})$")
TokenId = Annotated[str, Field(pattern=TOKEN_ID.pattern)]
Breakers = Annotated[Many[Text], Field(max_length=MAX_BREAKERS)]
Seed = Annotated[int, Field(ge=-1, le=MAX_SEED)]


def _first_wrong(values: Any) -> Any:
    """Returns the biases, or only the first wrong one, so that the error names this one."""
    if isinstance(values, dict):
        for token, bias in values.items():
            is_right = type(bias) in (int, float) and abs(bias) <= MAX_FLOAT
            if not is_right or not TOKEN_ID.match(token):
                return {token: bias}
    return values


Biases = Annotated[dict[TokenId, Number], BeforeValidator(_first_wrong)]


def _declared() -> dict[str, Any]:
    """Returns the fields of SamplingParams, without the seed, as pydantic fields with bounds."""
    found: dict[str, Any] = {}
    for name, declared in options_of(SamplingParams).items():
        if name == "seed":
            continue
        allowed = allowed_values(declared)
        bounds: dict[str, Any] = {
            "ge": allowed.at_least, "gt": allowed.above, "le": allowed.at_most, "lt": allowed.below,
        }  # fmt: skip
        names = [ALIASES[name], name] if name in ALIASES else [name]
        kind = Whole if isinstance(declared.default, int) else Number
        field = Field(None, validation_alias=AliasChoices(*names))
        found[name] = (Annotated[kind, Field(**bounds)] | None, field)
    return found


if TYPE_CHECKING:
    from sparsekv_cli.sampling.grammar import Grammar

    SamplingFields = Fields
else:
    SamplingFields = create_model("SamplingFields", __base__=Fields, **_declared())


class AnswerFields(SamplingFields):
    """The user's settings of an answer. A missing field has its value from the command line.

    seed: -1 means a random seed. logit_bias: token id -> number added to the token's logit; -100 or
    less bans the token. think_budget: most tokens of thinking before the answer. At most one of
    json_schema, grammar and regex may be given.
    """

    seed: Seed | None = None
    dry_sequence_breakers: Breakers | None = None
    logit_bias: Biases | None = None
    samplers: Many[str] | None = None
    ignore_eos: bool | None = None
    think_budget: Annotated[int, Field(ge=0, le=MAX_WHOLE)] | None = None
    json_schema: dict[str, Any] | bool | None = None
    grammar: str | None = None
    regex: str | None = None

    def sampling(
        self,
        defaults: SamplingOptions,
        required: Mapping[str, Any] | None = None,
        read: Callable[[str, str], Grammar] | None = None,
    ) -> SamplingOptions:
        """Returns the sampling options. Raises FieldError for a bad value.

        defaults: the values of missing fields. required: a JSON schema by the name of the request's
        field that asks for it. read: a function that reads a grammar; None: ``read_grammar``.
        """
        explicit = {key: value for key in SAMPLING if (value := getattr(self, key)) is not None}
        for key in ("samplers", "dry_sequence_breakers"):
            if key in explicit:
                explicit[key] = tuple(explicit[key])
        if "logit_bias" in explicit:
            explicit["logit_bias"] = {
                int(token): -math.inf if bias <= BAN else bias
                for token, bias in explicit["logit_bias"].items()
            }
        try:
            SamplingParams(**explicit)
        except ValueError as error:
            name = str(error).partition(" = ")[0].partition(":")[0]
            raise FieldError(name, str(error).removeprefix(name)) from None
        grammar = self._grammar(required or {}, read) or defaults.grammar
        ignore_eos = defaults.ignore_eos if self.ignore_eos is None else self.ignore_eos
        if ignore_eos and grammar is not None:
            raise FieldError("ignore_eos", f" and {grammar.kind} exclude each other")
        budget = defaults.think_budget if self.think_budget is None else self.think_budget
        return SamplingOptions({**defaults.explicit, **explicit}, ignore_eos, grammar, budget)

    def _grammar(
        self, required: Mapping[str, Any], read: Callable[[str, str], Grammar] | None
    ) -> Grammar | None:
        texts = {key: value for key in GRAMMARS if (value := getattr(self, key)) is not None}
        given = {**required, **texts}
        if len(given) > 1:
            first, second, *_ = given
            raise FieldError(first, f" and {second} exclude each other")
        for key, value in given.items():
            from sparsekv_cli.sampling.grammar import read_grammar

            kind = GRAMMARS.get(key, "json-schema")
            text = json.dumps(value) if kind == "json-schema" else value
            try:
                return (read or read_grammar)(kind, text)
            except BusyError:
                raise
            except SparseKVError as error:
                raise FieldError(key, f": {str(error).removeprefix(f'--{kind}: ')}") from None
        return None


SAMPLING = set(_declared()) | {"dry_sequence_breakers", "logit_bias", "samplers"}
