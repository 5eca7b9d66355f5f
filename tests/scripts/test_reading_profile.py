"""scripts/reading/profile: what a prefill's time is spent on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scripts_as_modules import load_script

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "reading" / "profile"


def profile(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


# This CPU's own kind has kernels that other tests have compiled.
OWN = load_script("reading/profile").kinds_here()[:1]


@pytest.mark.slow
@pytest.mark.skipif(not OWN, reason="needs a CPU with AVX2")
def test_the_parts_of_a_row(tiny_model, tmp_path):
    path = tmp_path / "rows.json"
    done = profile("-m", tiny_model(n_ctx=512), "--lengths", "64,128", "--layers", 1,
                   "--rounds", 1, "--cpus", OWN[0], "-t", 1, "--json", path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text("utf-8"))
    assert [row["tokens"] for row in rows] == [64, 128]
    for row in rows:
        products = sum(row[name] for name in ("qkv", "o", "gate_up", "down"))
        assert row["products_ms"] == pytest.approx(products) and row["other_ms"] > 0
        assert (
            row["attention_ms"] > 0
            and 0 < row["products_of_plain"] < 1
            and 0 < row["attention_of_plain"] < 1
        )


@pytest.mark.parametrize(
    "wrong", [["--cpus", "abacus"], ["--lengths", "8,0"], ["--rounds", "-1"], ["--layers", "x"]]
)
def test_wrong_options_are_named(wrong):
    done = profile("-m", "none.gguf", *wrong)
    assert done.returncode == 2 and wrong[0] in done.stderr.splitlines()[-1]
