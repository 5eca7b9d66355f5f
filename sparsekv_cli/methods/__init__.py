"""The methods: one paper, one file. docs/extending.md says how to add one."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from importlib import import_module
from typing import Any

from sparsekv_cli.cache.row_sizes import Sizes
from sparsekv_cli.cache.spec import Budget, parse_layers
from sparsekv_cli.calibration.run import CALIBRATION
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import (
    allowed_values,
    did_you_mean,
    options_of,
    parse_number_or_word,
)

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
    """Returns the class of a method. Raises ValueError for an unknown name and lists the names."""
    if name not in METHODS:
        close = did_you_mean(name, METHODS)
        raise ValueError(f"unknown method {name!r}{close}: choose from {', '.join(METHODS)}")
    module, _, cls = METHODS[name].partition(":")
    return getattr(import_module(f"sparsekv_cli.methods.{module}"), cls)


def calibrated_methods() -> list[str]:
    """Returns the names of all methods that need a calibration."""
    return [name for name in METHODS if method_class(name).needs == CALIBRATION]


def usable_methods(
    layers: Sequence[Sizes], default: str, is_calibrated: Callable[[Method], bool]
) -> list[str]:
    """Returns the methods that the layers allow and that need no further measurement."""

    def is_usable(name: str) -> bool:
        try:
            method = build_method(name, {})
            method.check_layers(layers)
            return name == default or is_calibrated(method)
        except (ValueError, SparseKVError):
            return False

    return [name for name in METHODS if is_usable(name)]


def build_method(name: str, options: Mapping[str, str], **named: str | None) -> Method:
    """Returns the method ``name`` with options of a command line, whose values are texts.

    options: the options given with ``-o``, such as {"page": "16"}. named: the options with a flag
    of their own, such as budget="512"; None: the flag is not given. ``preset`` is applied first,
    and other options override its values. If an option has an old name, a FutureWarning tells the
    new name.

    Raises ValueError for a wrong option or value. The error lists the options.
    """
    cls = method_class(name)
    given = dict(options)
    for key, value in named.items():
        if value is not None:
            if key in given:
                raise ValueError(f"{key} is given twice, as an option and with -o")
            given[key] = value
    for old in given.keys() & cls.renamed.keys():
        new = cls.renamed[old]
        if new in given:
            raise ValueError(f"{new} is given twice, once by its old name {old}")
        given[new] = given.pop(old)
        warnings.warn(f"option {old} of {name} is now called {new}", FutureWarning, stacklevel=2)
    known = options_of(cls)
    for key in given:
        if key not in known:
            close, listed = did_you_mean(key, known), ", ".join(known)
            if name == "full" and not close:
                close = " (it attends to all rows): choose another, such as --method lfps"
            raise ValueError(f"method {name} has no option {key!r}{close}; its options: {listed}")
    values = {key: _parse(known[key], text) for key, text in given.items()}
    preset = cls.presets[values["preset"]] if "preset" in values else {}
    return cls(**{**preset, **values})


def _parse(declared: Field[Any], text: str) -> Any:
    """Returns ``text`` as an option's value. Raises ValueError, which names the allowed values."""
    if isinstance(declared.default, Budget):
        return Budget.parse(text)
    if isinstance(declared.default, tuple):
        return parse_layers(text)
    return parse_number_or_word(declared, text)


def stated_options(method: Method) -> dict[str, str]:
    """Returns the options whose values are not the defaults, as texts for ``build_method``."""
    stated = {}
    for name, declared in options_of(method).items():
        value = getattr(method, name)
        if value != declared.default:
            is_list = isinstance(value, tuple)
            stated[name] = ",".join(map(str, value)) or "none" if is_list else str(value)
    return stated


def spec_of(method: Method) -> str:
    """Returns the method with its stated options as on a command line: ``quest:budget=2%``."""
    options = ";".join(f"{key}={text}" for key, text in stated_options(method).items())
    return f"{method.name}:{options}" if options else method.name


def describe_methods() -> list[dict[str, Any]]:
    """Returns all methods for JSON: name, paper, summary, use, needs, cache types and options."""
    described = []
    for name in METHODS:
        cls = method_class(name)
        described.append(
            {
                "name": name,
                "paper": cls.paper,
                "summary": cls.description,
                "use": cls.use,
                "needs": cls.needs,
                "cache_types": list(cls.cache_types),
                "options": [_describe(declared) for declared in options_of(cls).values()],
            }
        )
    return described


def _describe(declared: Field[Any]) -> dict[str, Any]:
    """Returns an option's name, type, default, help and allowed values."""
    default = declared.default
    if isinstance(default, (Budget, tuple)):
        default = str(default) if isinstance(default, Budget) else list(default)
    return {
        "name": declared.name,
        "type": type(declared.default).__name__,
        "default": default,
        "help": declared.metadata["help"],
        "allowed": str(allowed_values(declared)),
        **allowed_values(declared).as_dict(),
    }
