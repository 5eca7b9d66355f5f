"""Budgets and presets of every method, literally: what people get who choose nothing.

Figures of accuracy and speed hold for these. Who changes one measures again (docs/methods.md says
why each is what it is), and changes it here, there and in tests/test_accuracy.py. test_registry.py
holds the defaults of all options against docs/methods.md.
"""

import pytest

from sparsekv_cli.methods import METHODS, build_method, method_class

SHARE = "5% (64 to 512 rows)"
BUDGETS = dict.fromkeys(("topk", "streaming", "snapkv", "h2o", "lfps"), SHARE) | {
    "quest": "1024", "fasa": "256", "sals": "432", "faedkv": "25%", "freekv": "512",
}  # fmt: skip
PRESETS = {
    "lfps": {
        "tuned": {},
        "paper": {
            "dense_layers": [], "pages_from": 0, "preset": "paper", "scored_by": "head",
            "expand": "filtered", "recent": 8, "candidates": 0, "a": 0.2, "horizon": 0,
            "sigma": "ratio", "epsilon": 0.85, "scout": 0,
        },
    },
    "fasa": {
        "tuned": {},
        "paper": {
            "dense_layers": [], "preset": "paper", "allocation": "uniform", "metric": "ca",
            "force": "none",
        },
    },
    "sals": {
        "tuned": {},
        "paper": {
            "preset": "paper", "allocation": "uniform", "basis": "pca", "score": "paper",
            "exact_sinks": False,
        },
    },
    "faedkv": {
        "tuned": {},
        "paper": {
            "preset": "paper", "importance": "ppl", "allocation": "uniform", "update": "additive",
        },
    },
    "freekv": {
        "tuned": {},
        "paper": {
            "preset": "paper", "page": 32, "summary": "minmax", "tau": 0.8, "sinks": 64,
            "groups": False,
        },
    },
}  # fmt: skip


def values(name: str, preset: str | None = None) -> dict[str, object]:
    """The options of a method as JSON has them."""
    options = build_method(name, {} if preset is None else {"preset": preset}).options()
    return {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}


def test_budgets():
    """With their limits, which docs/methods.md has not; it has all other defaults, literally."""
    found = {name: values(name).get("budget") for name in METHODS}
    assert found == {"full": None, **BUDGETS}


@pytest.mark.parametrize("name", METHODS)
def test_what_presets_change(name):
    found = {
        preset: {k: v for k, v in values(name, preset).items() if v != values(name)[k]}
        for preset in getattr(method_class(name), "presets", {})
    }
    assert found == PRESETS.get(name, {})
