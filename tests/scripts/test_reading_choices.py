"""scripts/reading/choices: the ways to choose rows, and the rules that end a choice."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "reading"))

import naive_choices
from naive_choices import BLOCK, MASS, PEAK, RANK, STRIDE, WAYS, Way

RNG = np.random.default_rng(5)


def test_antidiagonals_are_sums_of_products() -> None:
    """Query r of a group of STRIDE is multiplied with key STRIDE - 1 - r of another group."""
    q, k = RNG.standard_normal((2, BLOCK, 16)), RNG.standard_normal((1, 3 * BLOCK, 16))
    found = naive_choices.by_antidiagonals(q, k)
    products = q @ k[0].T
    each = BLOCK // STRIDE
    for head in range(2):
        sums = np.zeros((each, 3 * each))
        for r in range(STRIDE):
            sums += products[head, r::STRIDE, STRIDE - 1 - r :: STRIDE]
        weights = naive_choices.softmax(sums * 16**-0.5 / STRIDE)
        wanted = weights.reshape(each, 3, each).sum(2).mean(0)
        np.testing.assert_allclose(found[head, 0], wanted, rtol=1e-6)


@pytest.mark.parametrize(("rule", "setting", "wanted"), [
    (RANK, 0.25, [0, 1, 3, 7]), (MASS, 0.62, [0, 3, 7]), (MASS, 0.85, [0, 1, 3, 7]),
    (PEAK, 0.3, [0, 1, 3, 7]), (PEAK, 0.6, [0, 3, 7]), (PEAK, 1.0, [0, 7]),
])  # fmt: skip
def test_rules(rule: str, setting: float, wanted: list[int]) -> None:
    """The first and the last block count in a mass or a peak, and are always attended to."""
    weights = np.array([0.2, 0.15, 0.05, 0.3, 0.05, 0.05, 0.0, 0.2])
    way = Way(naive_choices.by_means, BLOCK, rule)
    found = naive_choices.chosen(weights, way, setting, BLOCK)
    assert np.flatnonzero(found).tolist() == wanted


@pytest.mark.parametrize("name", WAYS)
def test_settings_give_the_number_of_rows(name: str) -> None:
    q, k = RNG.standard_normal((4, 512, 32)), RNG.standard_normal((2, 4096, 32))
    way = WAYS[name]
    weights = way.weigh(q, k)
    assert weights.shape[0] == 4 and weights.shape[2] == 4096 // way.block
    setting = naive_choices.setting_for(2048, [weights], way, 1024)
    blocks = naive_choices.chosen(weights, way, setting, 1024)
    assert abs(way.block * blocks.sum(-1).mean() - 2048) <= BLOCK
    assert blocks[..., 0].all() and blocks[..., -1024 // way.block :].all()


@pytest.mark.slow
def test_the_rows_of_a_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model.gguf", wtype="Q4_0", n_ctx=8192, n_layer=4)
    told = tmp_path / "told.json"
    arguments = ["-m", str(model), "--lengths", "4096", "--layers", "1", "--budget", "2048"]
    assert load_script("reading/choices").main([*arguments, "--json", str(told)]) == 0
    for row in json.loads(told.read_text("utf-8")):
        assert row["way"] in WAYS and row["rows"] == pytest.approx(2048, abs=BLOCK)
        assert 0.5 < row["least_mass"] <= row["mass"] < 1 and 0 < row["error"] < 1
