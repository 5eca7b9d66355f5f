"""scripts/bench/second_question on a tiny model: what is read again, and what it takes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("second")
    model = make_model(folder / "model.gguf", wtype="Q4_0", n_ctx=1024)
    told = folder / "told.json"
    arguments = ["-m", str(model), "--methods", "full,lfps,freekv", "--depths", "800"]
    arguments += ["--rows", "100", "--json", str(told), "--cache-dir", str(folder / "kept")]
    script = load_script("bench/second_question")
    assert script.main(arguments) == 0
    files = sorted(Path(folder / "kept" / "800").iterdir())
    assert script.main(arguments) == 0  # from the rows that the first run has kept
    assert sorted(Path(folder / "kept" / "800").iterdir()) == files and len(files) == 2
    yield json.loads(told.read_text("utf-8"))


def test_only_the_question_is_read(rows):
    """From memory a sequence always computes its last 64 tokens again."""
    for method in ("full", "lfps", "freekv"):
        of_method = [row for row in rows if row["method"] == method]
        assert [row["from"] for row in of_method] == ["disk", "memory", "memory"]
        assert [row["n_read"] for row in of_method] == [32, 64, 64]


def test_the_parts_are_the_whole(rows):
    for row in rows:
        parts = row["rows_s"] + row["question_s"] + row["index_s"]
        assert parts == pytest.approx(row["first_s"]) and min(row["step_s"], row["next_s"]) > 0
        assert row["of_f16"] > 1 and (row["index_mb"] > 0) == (row["method"] != "full")
