"""The methods: one paper, one file. To add one, write the file and a line of METHODS."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any

from sparsekv_cli.cache.spec import Budget, parse_layers
from sparsekv_cli.methods.base import Method

METHODS = {
    "full": "full:Full",
    "topk": "topk:TopK",
    "streaming": "streaming:Streaming",
    "quest": "quest:Quest",
    "snapkv": "snapkv:SnapKV",
    "h2o": "h2o:H2O",
    "lfps": "lfps:LFPS",
    "fasa": "fasa:FASA",
    "sals": "sals:SALS",
    "faedkv": "faedkv:FAEDKV",
    "freekv": "freekv:FreeKV",
}


def method_class(name: str) -> type[Method]:
    """The class behind a name; ValueError lists the names."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: choose from {', '.join(METHODS)}")
    module, _, cls = METHODS[name].partition(":")
    return getattr(import_module(f"sparsekv_cli.methods.{module}"), cls)


def build_method(
    name: str,
    options: Mapping[str, str],
    *,
    budget: str | None = None,
    dense_layers: str | None = None,
    cache_type_k: str | None = None,
    cache_type_v: str | None = None,
) -> Method:
    """A method from command-line text; ValueError names what is wrong and lists the options.

    ``preset`` is applied first, so that other options change it.
    """
    cls = method_class(name)
    given = dict(options)
    named = {
        "budget": budget,
        "dense_layers": dense_layers,
        "cache_type_k": cache_type_k,
        "cache_type_v": cache_type_v,
    }
    for key, value in named.items():
        if value is not None:
            if key in given:
                raise ValueError(f"{key} is given twice, as an option and with -o")
            given[key] = value
    kinds = typing.get_type_hints(cls)
    known = [field.name for field in fields(cls)]
    presets = getattr(cls, "presets", {})
    values: dict[str, Any] = {}
    if presets and "preset" in given:
        preset = given.pop("preset")
        if preset not in presets:
            raise ValueError(
                f"preset = {preset!r}: method {name} has the presets {', '.join(presets)}"
            )
        values.update(presets[preset], preset=preset)
    for key, text in given.items():
        if key not in known:
            listed = ", ".join(known) if known else "none"
            raise ValueError(f"method {name} has no option {key!r}; its options: {listed}")
        values[key] = _parse(key, text, kinds[key])
    method = cls(**values)
    method.check_cache_types(name)
    return method


def _parse(key: str, text: str, kind: Any) -> Any:
    """``text`` as an option of type ``kind``; ValueError names the option and what it takes."""
    if kind is Budget:
        return Budget.parse(text)
    if typing.get_origin(kind) is tuple:
        return parse_layers(text)
    if typing.get_origin(kind) is types.UnionType:
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise ValueError(f"{key} = {text!r}: must be true or false")
        return words[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{key} = {text!r}: must be {wanted}") from None
    return text


def describe_methods() -> list[dict[str, Any]]:
    """Name, paper, summary, needs and options of every method, for people and for JSON."""
    described = []
    for name in METHODS:
        cls = method_class(name)
        kinds = typing.get_type_hints(cls)
        options = []
        for field in fields(cls):
            default = field.default
            if default is MISSING and field.default_factory is not MISSING:
                default = field.default_factory()
            if isinstance(default, Budget):
                default = str(default)
            kind = kinds[field.name]
            options.append(
                {
                    "name": field.name,
                    "type": getattr(kind, "__name__", str(kind)),
                    "default": list(default) if isinstance(default, tuple) else default,
                    "help": field.metadata.get("help", ""),
                }
            )
        described.append(
            {
                "name": name,
                "paper": cls.paper,
                "summary": cls.description,
                "needs": cls.needs,
                "cache_types": list(cls.cache_types),
                "options": options,
            }
        )
    return described
