"""Declared options: what is refused, how it is said, and what a description holds."""

import math
from dataclasses import dataclass

import pytest

from sparsekv_cli.settings.option import (
    Allowed,
    allowed_values,
    check_options,
    did_you_mean,
    option,
    options_of,
    parse_number_or_word,
)


@dataclass(frozen=True)
class Settings:
    steps: int = option(4, "how many", at_least=1, at_most=9)
    share: float = option(0.5, "how much", above=0, below=1)
    offset: float = option(0.0, "any")
    mode: str = option("slow", "how", choices=("slow", "fast"))
    on: bool = option(True, "whether")
    inner: str = "no option"

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("steps", 0, "steps = 0: must be 1 to 9"),
        ("steps", 10, "steps = 10: must be 1 to 9"),
        ("steps", 2.0, "steps = 2.0: must be a whole number"),
        ("steps", True, "steps = True: must be a whole number"),
        ("share", 0, "share = 0: must be above 0 and below 1"),
        ("share", 1.0, "share = 1.0: must be above 0 and below 1"),
        ("share", math.nan, "share = nan: must be finite"),
        ("offset", math.inf, "offset = inf: must be finite"),
        ("offset", 1e300, "offset = 1e+300: must be 0, or from 1.2e-38 to 3.4e+38 in size"),
        (
            "offset",
            10**400,
            "offset = a very large number: must be 0, or from 1.2e-38 to 3.4e+38 in size",
        ),
        ("offset", "x", "offset = 'x': must be a number"),
        ("mode", "best", "mode = 'best': must be slow or fast"),
        ("on", "yes", "on = 'yes': must be of type bool"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(name, value, wanted):
    with pytest.raises(ValueError) as error:
        Settings(**{name: value})
    assert str(error.value) == wanted


def test_values_at_the_bounds_are_allowed():
    for values in ({"steps": 1}, {"steps": 9}, {"share": 1e-30}, {"offset": -3}, {"on": False}):
        Settings(**values)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("steps", "7", 7), ("share", ".25", 0.25), ("mode", "fast", "fast"), ("on", "No", False)],
)
def test_text_becomes_a_value_of_the_options_type(name, text, value):
    parsed = parse_number_or_word(options_of(Settings)[name], text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("steps", "two", "must be a whole number"),
        ("steps", "0", "must be 1 to 9"),
        ("share", "much", "must be a number"),
        ("mode", "", "must be slow or fast"),
        ("on", "maybe", "must be true or false"),
    ],
)
def test_text_that_is_no_value_is_named(name, text, wanted):
    with pytest.raises(ValueError, match=f"{name} = .*: {wanted}"):
        parse_number_or_word(options_of(Settings)[name], text)


def test_options_are_the_fields_that_are_declared_so():
    assert list(options_of(Settings)) == ["steps", "share", "offset", "mode", "on"]
    assert list(options_of(Settings())) == list(options_of(Settings))


@pytest.mark.parametrize(
    ("allowed", "words", "held"),
    [
        (Allowed(), "", {}),
        (Allowed(at_least=0), "0 or more", {"at_least": 0}),
        (Allowed(above=0, at_most=5), "above 0 and at most 5", {"above": 0, "at_most": 5}),
        (
            Allowed(at_least=4, at_most=8, multiple_of=2),
            "4 to 8, a multiple of 2",
            {"at_least": 4, "at_most": 8, "multiple_of": 2},
        ),
        (Allowed(("a", "b", "c")), "a, b or c", {"choices": ("a", "b", "c")}),
        (Allowed(("a",)), "a", {"choices": ("a",)}),
    ],
)
def test_what_is_allowed_in_words_and_as_data(allowed, words, held):
    assert str(allowed) == words and allowed.as_dict() == held


def test_every_default_is_allowed():
    for declared in options_of(Settings).values():
        assert allowed_values(declared).permits(declared.default)


def test_the_closest_name_is_suggested():
    assert did_you_mean("stps", options_of(Settings)) == " (did you mean steps?)"
    assert did_you_mean("zzz", options_of(Settings)) == ""
