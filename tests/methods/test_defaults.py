"""The default of every option of every method, literally: what people get who choose nothing.

Figures of accuracy and speed hold for these. Who changes one measures again (docs/methods.md says
why each is what it is), and changes it here and in tests/test_accuracy.py.
"""

import pytest

from sparsekv_cli.methods import METHODS, build_method, method_class

SHARE = "5% (64 to 512 rows)"
DEFAULTS = {
    "full": {"dense_layers": [0, 1]},
    "topk": {"dense_layers": [0, 1], "budget": "5% (64 to 512 rows)", "recent": 16},
    "streaming": {
        "dense_layers": [0, 1],
        "budget": "5% (64 to 512 rows)",
        "sinks": 4,
        "reposition": False,
    },
    "quest": {
        "dense_layers": [0, 1],
        "budget": "5% (64 to 512 rows)",
        "page": 8,
        "summary": "minmax",
    },
    "snapkv": {"dense_layers": [0, 1], "budget": "5% (64 to 512 rows)", "window": 32, "kernel": 7},
    "h2o": {"dense_layers": [0, 1], "budget": "5% (64 to 512 rows)", "window": 0},
    "lfps": {
        "dense_layers": [0], "pages_from": 4096, "preset": "tuned", "budget": "5% (64 to 256 rows)",
        "scored_by": "auto", "expand": "plain", "recent": 32, "candidates": 2048, "a": 0.3,
        "horizon": 6144, "decay": 0.95, "window": 32, "epsilon": 0.95, "sigma": "cov",
        "scout": 8192,
    },
    "fasa": {
        "dense_layers": [0, 1], "preset": "tuned", "budget": "256", "n_tip": 0,
        "allocation": "layers", "metric": "var", "force": "default", "variant": "c",
    },
    "sals": {
        "dense_layers": [0, 1, -1], "preset": "tuned", "budget": "432", "rank": 0, "score_rank": 0,
        "allocation": "layers", "bits": 4, "basis": "diag", "score": "brope", "sinks": 16,
        "exact_sinks": True, "window": 64,
    },
    "faedkv": {
        "dense_layers": [], "preset": "tuned", "budget": "25%", "importance": "kld",
        "allocation": "layers", "update": "block", "block": 128, "sinks": 10, "recent": 50,
    },
    "freekv": {
        "dense_layers": [0], "preset": "tuned", "budget": "512", "page": 4, "summary": "meanstd",
        "tau": 0.9, "sinks": 16, "window": 64, "groups": True, "speculate": True, "correct": True,
        "cache_pages": 2.0, "overlap": "auto",
    },
}  # fmt: skip
PRESETS = {
    "lfps": {
        "tuned": {},
        "paper": {
            "dense_layers": [], "pages_from": 0, "preset": "paper", "budget": "5% (64 to 512 rows)",
            "scored_by": "head", "expand": "filtered", "recent": 8, "candidates": 0, "a": 0.2,
            "horizon": 0, "sigma": "ratio", "epsilon": 0.85, "scout": 0,
        },
    },
    "fasa": {
        "tuned": {},
        "paper": {
            "dense_layers": [],
            "preset": "paper",
            "allocation": "uniform",
            "metric": "ca",
            "force": "none",
        },
    },
    "sals": {
        "tuned": {},
        "paper": {
            "preset": "paper",
            "allocation": "uniform",
            "basis": "pca",
            "score": "paper",
            "exact_sinks": False,
        },
    },
    "faedkv": {
        "tuned": {},
        "paper": {
            "preset": "paper",
            "importance": "ppl",
            "allocation": "uniform",
            "update": "additive",
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


def test_every_method_is_in_the_table():
    assert list(DEFAULTS) == list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_defaults(name):
    assert values(name) == {**DEFAULTS[name], "cache_type_k": "f16", "cache_type_v": "f16"}


@pytest.mark.parametrize("name", METHODS)
def test_what_presets_change(name):
    found = {
        preset: {k: v for k, v in values(name, preset).items() if v != values(name)[k]}
        for preset in getattr(method_class(name), "presets", {})
    }
    assert found == PRESETS.get(name, {})
