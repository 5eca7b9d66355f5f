"""Sampling options as the fields of a JSON object: of a line of ``run --jsonl``, of a request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.sampling.params import SamplingParams

GRAMMARS = {"json_schema": "json-schema", "grammar": "grammar", "regex": "regex"}
SAMPLING = {each.name for each in fields(SamplingParams)} - {"seed"}


def read_sampling(values: Mapping[str, Any], defaults: SamplingOptions) -> SamplingOptions:
    """The sampling options of an object; SparseKVError for a bad value."""
    explicit = {key: values[key] for key in SAMPLING & values.keys()}
    for key in ("samplers", "dry_sequence_breakers"):
        if key in explicit:
            if not isinstance(explicit[key], list):
                raise SparseKVError(f"{key}: expected a list of texts")
            explicit[key] = tuple(explicit[key])
    if "logit_bias" in explicit:
        bias = explicit["logit_bias"]
        if not isinstance(bias, dict) or not all(token.isdecimal() for token in bias):
            raise SparseKVError("logit_bias: expected an object of token ids and numbers")
        explicit["logit_bias"] = {int(token): number for token, number in bias.items()}
    try:
        SamplingParams(**explicit)
    except (ValueError, TypeError) as error:  # a name of a sampler may be no text
        raise SparseKVError(str(error)) from None
    ignore_eos = values.get("ignore_eos", defaults.ignore_eos)
    if not isinstance(ignore_eos, bool):
        raise SparseKVError("ignore_eos: expected true or false")
    grammar = defaults.grammar
    given = [key for key in GRAMMARS if key in values]
    if len(given) > 1:
        raise SparseKVError(f"{given[0]} and {given[1]} exclude each other")
    for key in given:
        from sparsekv_cli.sampling.grammar import read_grammar

        value = values[key]
        if key == "json_schema":
            value = json.dumps(value)
        elif not isinstance(value, str):
            raise SparseKVError(f"{key}: expected a text")
        grammar = read_grammar(GRAMMARS[key], value)
    if ignore_eos and grammar is not None:
        raise SparseKVError(f"ignore_eos and {grammar.kind} exclude each other")
    budget = values.get("think_budget", defaults.think_budget)
    if budget is not None and (
        isinstance(budget, bool) or not isinstance(budget, int) or budget < 0
    ):
        raise SparseKVError("think_budget: expected a whole number of 0 or more")
    return SamplingOptions({**defaults.explicit, **explicit}, ignore_eos, grammar, budget)
