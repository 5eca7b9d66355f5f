"""scripts/bench/memory on a tiny model: what is said is what is held, and what the formula says."""

import json

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

FASA, SALS = "fasa:variant=m;budget=64", "sals:budget=64;rank=24"
FREEKV = "freekv:budget=160;page=8;dense_layers=none"
METHODS = ("full", FASA, SALS, FREEKV)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The figures of all METHODS, a prompt of 1500 tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model(folder / "model.gguf", n_layer=4, n_ctx=2048)
    told = folder / "told.json"
    arguments = ["-m", str(model), "--depth", "1500", "--tokens", "4", "--threads", "1"]
    arguments += ["--methods", ",".join(METHODS), "--json", str(told)]
    assert load_script("bench/memory").main(arguments) == 0
    return json.loads(told.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", METHODS)
def test_caches_hold_what_they_say_and_what_the_formula_says(rows, name):
    row = rows[name]
    said, expected = row["said"], row["formula"]
    assert sum(said.values()) == pytest.approx(row["traced"], rel=0.03, abs=60_000)
    for place in ("host", "device"):
        assert said[place] == pytest.approx(expected[place], rel=0.05, abs=20_000)
    assert row["rows"] == 1504 * 4 * 2 * 2 * (64 + 64)


def test_what_lies_where(rows):
    assert rows["full"]["said"]["device"] == rows[SALS]["said"]["device"] == 0
    assert rows["full"]["formula"]["host"] == rows["full"]["rows"]
    # Two of four layers are sparse; 8 of a head's 32 chunks are 16 of its 128 dims of K and V.
    assert rows[FASA]["formula"]["device"] == rows["full"]["rows"] // 2 * 16 // 128
    # One of four layers is sparse: latents of 24 columns and a scale, 40 bytes a head of values; 80
    # rows are exact, and there is room for 64 + 16 that a step attends to.
    assert rows[SALS]["formula"]["host"] == 3 * 1504 * 512 + 160 * 512 + 1424 * 132
