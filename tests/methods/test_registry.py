"""The table of methods against the files, and what text on the command line becomes."""

import json
import re
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path

import pytest
from source_tree import root

import sparsekv_cli.methods as registry
from sparsekv_cli.cache.spec import FULL, WINDOW, Budget, LayerSpec, parse_layers
from sparsekv_cli.methods import (
    METHODS,
    build_method,
    describe_methods,
    method_class,
    stated_options,
)
from sparsekv_cli.methods.base import Method
from sparsekv_cli.settings.option import options_of

NO_METHODS = {"__init__", "base", "depth"}
FILES = {p.stem for p in Path(registry.__file__).parent.glob("*.py")} - NO_METHODS


def test_every_file_is_in_the_table_and_every_entry_has_its_file():
    assert {entry.partition(":")[0] for entry in METHODS.values()} == FILES
    assert len(set(METHODS.values())) == len(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_describes_itself(name):
    cls = method_class(name)
    assert issubclass(cls, Method) and is_dataclass(cls)
    assert cls.paper.strip() and cls.description.strip()
    method = build_method(name, {})
    with pytest.raises(FrozenInstanceError):
        method.dense_layers = (3,)
    assert list(options_of(cls)) == [field.name for field in fields(cls)]
    for declared in options_of(cls).values():
        assert declared.metadata["help"], f"{declared.name} needs a help text"
    documentation = __import__(cls.__module__, fromlist=["x"]).__doc__
    assert documentation and len(documentation) > 40


def test_descriptions_are_json():
    described = json.loads(json.dumps(describe_methods()))
    assert [entry["name"] for entry in described] == list(METHODS)
    for entry in described:
        assert {"name", "paper", "summary", "use", "needs", "options"} <= set(entry)
        assert {"name", "type", "default", "help"} <= set(entry["options"][0])
        json.dumps(build_method(entry["name"], {}).options())


def test_descriptions_hold_choices_and_bounds():
    (quest,) = (entry for entry in describe_methods() if entry["name"] == "quest")
    options = {option["name"]: option for option in quest["options"]}
    assert options["summary"]["choices"] == ("minmax", "meanstd")
    assert (options["page"]["at_least"], options["page"]["at_most"]) == (5, 4096)
    assert options["page"]["allowed"] == "5 to 4096"
    assert options["dense_layers"]["default"] == [0, 1] and options["page"]["type"] == "int"


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_option_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="no option 'bogus'") as error:
        build_method(name, {"bogus": "1"})
    for option in options_of(method_class(name)):
        assert option in str(error.value)


def test_the_closest_option_is_suggested():
    with pytest.raises(ValueError, match=r"no option 'cadidates' \(did you mean candidates\?\)"):
        build_method("lfps", {"cadidates": "1"})


def test_an_unknown_method_lists_the_names():
    with pytest.raises(ValueError, match=r"unknown method 'lfsp' \(did you mean lfps\?\)") as error:
        build_method("lfsp", {})
    assert all(name in str(error.value) for name in METHODS)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *[("topk", "budget", v) for v in ("0", "-3", "0%", "101%", "-1%", "nan%", "many", "", "%")],
        *[("topk", "budget", v) for v in ("1e3", "2.5", "inf%")],
        *[("topk", "recent", v) for v in ("0", "-1", "two", "1.5")],
        ("streaming", "sinks", "-1"),
        ("full", "dense_layers", "0;1"),
        ("topk", "dense_layers", "all"),
        *[("lfps", "decay", v) for v in ("0", "1", "-0.5", "1.5", "nan", "x")],
        *[("lfps", "a", v) for v in ("0", "-1", "nan", "inf")],
        *[("lfps", "epsilon", v) for v in ("0", "nan", "x")],
        *[("lfps", name, v) for name in ("recent", "window") for v in ("0", "-1", "x")],
        *[("lfps", name, "-1") for name in ("candidates", "horizon", "pages_from")],
        ("lfps", "scored_by", "all"),
        ("lfps", "expand", "yes"),
        ("lfps", "sigma", "pi"),
        ("lfps", "preset", "fast"),
        *[("quest", "page", v) for v in ("0", "4", "5000")],
        ("quest", "summary", "mean"),
        *[(name, "window", v) for name in ("h2o", "snapkv") for v in ("-1", "x")],
        *[("snapkv", "kernel", v) for v in ("0", "4", "-1")],
        *[("fasa", "metric", "cos"), ("fasa", "force", "all"), ("fasa", "variant", "x")],
        ("fasa", "n_tip", "-1"),
        *[("sals", "bits", v) for v in ("0", "3")],
        *[("sals", "basis", "svd"), ("sals", "score", "rope"), ("sals", "exact_sinks", "maybe")],
        *[("sals", name, "-1") for name in ("rank", "score_rank", "sinks", "window")],
        *[("freekv", name, "nan") for name in ("cache_pages", "tau")],
        *[("freekv", name, "-1") for name in ("page", "sinks", "window")],
        *[("freekv", "cache_pages", "0.9"), ("freekv", "overlap", "maybe")],
        *[("faedkv", "block", v) for v in ("0", "15", "257", "x")],
        *[("faedkv", "recent", "0"), ("faedkv", "sinks", "-1"), ("faedkv", "allocation", "head")],
        *[("faedkv", "importance", "entropy"), ("faedkv", "update", "multiplicative")],
    ],
)
def test_a_bad_value_names_the_option(name, option, value):
    with pytest.raises(ValueError, match=re.escape(option)) as error:
        build_method(name, {option: value})
    message = str(error.value)
    assert "\n" not in message and (value in message)


def test_values_become_what_the_fields_want():
    method = build_method(
        "lfps",
        {"recent": "8", "a": "0.4", "scored_by": "group"},
        budget="2.5%",
        dense_layers="0,-1",
    )
    values = {f.name: getattr(method, f.name) for f in fields(method)}
    assert values["recent"] == 8 and values["a"] == 0.4 and values["scored_by"] == "group"
    assert values["budget"] == Budget(share=0.025) and values["dense_layers"] == (0, -1)
    assert build_method("topk", {"budget": "77"}).options()["budget"] == "77"


def test_an_option_may_have_its_old_name():
    with pytest.warns(FutureWarning, match="^option dense_rows of lfps is now called pages_from$"):
        method = build_method("lfps", {"dense_rows": "70"})
    assert method == build_method("lfps", {"pages_from": "70"})
    assert stated_options(method) == {"pages_from": "70"}
    with pytest.raises(ValueError, match="pages_from is given twice, once by its old name dense"):
        build_method("lfps", {"pages_from": "70", "dense_rows": "70"})
    with pytest.raises(ValueError, match="quest has no option 'dense_rows'"):
        build_method("quest", {"dense_rows": "70"})


@pytest.mark.parametrize("name", METHODS)
def test_old_names_lead_to_options_and_are_none(name):
    cls = method_class(name)
    assert set(cls.renamed.values()) <= options_of(cls).keys()
    assert not cls.renamed.keys() & options_of(cls).keys()


def test_budget_and_dense_layers_may_be_given_once():
    for option, value in (("budget", "5%"), ("dense_layers", "0")):
        with pytest.raises(ValueError, match=f"{option} is given twice"):
            build_method("topk", {option: value}, **{option: value})


def test_presets_come_before_other_options():
    paper = build_method("lfps", {"recent": "9", "preset": "paper"}).options()
    assert (paper["recent"], paper["expand"], paper["sigma"]) == (9, "filtered", "ratio")
    assert tuple(paper["dense_layers"]) == () and paper["preset"] == "paper"
    tuned = build_method("lfps", {}).options()
    assert tuned["scored_by"] == "auto" and tuned["expand"] == "plain" and tuned["sigma"] == "cov"


@pytest.mark.parametrize(
    ("text", "n", "rows"),
    [("5%", 1000, 50), ("5%", 3, 1), ("100%", 77, 77), ("64", 10, 64), ("0.1%", 100, 1)],
)
def test_budget_rows(text, n, rows):
    assert Budget.parse(text).rows(n) == rows


@pytest.mark.parametrize("text", ["5%", "12.5%", "512"])
def test_budget_text_survives(text):
    assert str(Budget.parse(text)) == text


def test_layer_lists():
    assert parse_layers("none") == parse_layers(" ") == ()
    assert parse_layers("0, 1,-1") == (0, 1, -1)


@pytest.mark.parametrize("name", METHODS)
def test_docs_methods_has_the_options_and_their_defaults(name):
    (method,) = (each for each in describe_methods() if each["name"] == name)
    text = (root() / "docs" / "methods.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    listed = re.search(r"^Options: (.*?)\.$", section, re.DOTALL | re.MULTILINE)
    assert listed, f"docs/methods.md has no line `Options: ...` in a section `## {name}`"
    found = dict(re.findall(r"`(\w+)=([^`]+)`", listed[1]))
    options = {o["name"]: o["default"] for o in method["options"]}
    assert found == {
        key: as_text(default)
        for key, default in options.items()
        if not key.startswith("cache_type")
    }


def as_text(default: object) -> str:
    """An option's default as ``-o`` takes it, without the limits of a budget."""
    if isinstance(default, list):
        return ",".join(map(str, default)) or "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default).partition(" ")[0]


@pytest.mark.parametrize(
    ("options", "dense"),
    [({}, [1, 3]), ({"dense_layers": "3"}, [3]), ({"dense_layers": "none"}, [])],
)
def test_the_default_dense_layers_are_full_ones(options, dense):
    """Of a model whose layers 0, 2, 4 have windows; the user's numbers are the model's."""
    kinds = [WINDOW, FULL, WINDOW, FULL, WINDOW, FULL]
    specs = [
        LayerSpec(i, 6, 2, 1, 8, 8, 1, kind=kind, n_full=3, full_place=kinds[:i].count(FULL))
        for i, kind in enumerate(kinds)
    ]
    method = build_method("topk", options)
    assert [spec.layer for spec in specs if spec.kind == FULL and method.is_dense(spec)] == dense
