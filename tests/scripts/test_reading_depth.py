"""scripts/reading/depth on a tiny model: what it times, and the sum over a prompt."""

from __future__ import annotations

import json

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

depth = load_script("reading/depth")
Times = depth.Times


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth")
    model = make_model(folder / "model.gguf", wtype="Q4_0", n_ctx=1024)
    told = folder / "told.json"
    arguments = ["-m", str(model), "--depths", "8192,4608", "--layers", "1", "--budget", "2048"]
    assert depth.main([*arguments, "-t", "1", "--json", str(told)]) == 0
    return json.loads(told.read_text("utf-8"))


def test_the_rows_of_both_ways(rows):
    assert [(row["tokens"], row["way"]) for row in rows] == [
        (4608, "dense"), (4608, "sparse"), (8192, "dense"), (8192, "sparse")
    ]  # fmt: skip
    for row in rows:
        assert row["read_layers"] == 1 and row["layers"] > 1
        is_sparse = row["way"] == "sparse"
        assert (row["choice_ms"] > 0) == (row["copying_ms"] > 0) == is_sparse
        assert row["inside_ms"] > row["choice_ms"] + row["copying_ms"] and row["other_ms"] > 0
        assert row["choice_percent"] == pytest.approx(100 * row["choice_ms"] / row["inside_ms"])
    assert rows[0]["faster"] == 1 and rows[3]["seconds"] > rows[1]["seconds"]


def test_seconds_of_a_prompt():
    """Dense attention grows in a line from 0, sparse attention is level from the budget on."""
    at = {
        "dense": {8192: Times(160.0, 0.0, 0.0, 10.0)},
        "sparse": {8192: Times(38.0, 1.0, 1.0, 10.0)},
    }
    dense, sparse = depth.seconds_of(8192, 6, 2048, at)
    starts = range(0, 8192, 512)
    of_chunks = [10 + 160 * start / 8192 for start in starts]
    mixed = [
        50 if 2048 < start < 8192 - 512 else dense_ms
        for start, dense_ms in zip(starts, of_chunks, strict=True)
    ]
    assert dense == pytest.approx(6 * sum(of_chunks) / 1000)
    assert sparse == pytest.approx((2 * sum(of_chunks) + 4 * sum(mixed)) / 1000)


@pytest.mark.parametrize("wrong", [["--depths", "5000"], ["--depths", "4096"], ["--layers", "0"]])
def test_wrong_options_are_named(wrong, capsys):
    with pytest.raises(SystemExit):
        depth.main(["-m", "none.gguf", *wrong])
    assert wrong[0] in capsys.readouterr().err
