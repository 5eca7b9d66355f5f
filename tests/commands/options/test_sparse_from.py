"""``--sparse-from``: who has it, who shows it, and who runs the method itself."""

import json
from pathlib import Path

import pytest
from tiny_models import make_model

# The tiny model has groups of two heads.
LFPS, QUEST = 2 * 1280, 2 * 512
PROMPT = ["--raw", "-p", "to and fro " * 30]
STEPS = ["--temp", "0", "--ignore-eos", "-n", "3", "--device", "cpu", "--budget", "12"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(make_model(path, wtype="Q8_0", n_layer=3, n_head=4, n_head_kv=2))


@pytest.mark.parametrize(
    ("arguments", "depth"), [([], LFPS), (["--sparse-from", "0"], 0), (["--sparse-from", "9"], 9)]
)
def test_run(arguments, depth, model, invoke):
    """Rows are left out where the context is longer than the depth, which --json and -v tell."""
    own = ["-m", model, "--method", "lfps", *STEPS, *arguments]
    result = invoke("run", *PROMPT, *own, "--json")
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["method"]["sparse_from"] == depth
    ledger = told["ledger"]
    assert (ledger["rows_attended"] < ledger["rows_total"]) == (told["prompt_tokens"] > depth)
    for error in (
        invoke("run", *PROMPT, *own, "-v").err,
        invoke("chat", *own, "-v", stdin=b"to and fro\n").err,
    ):
        assert (f"sparse from {depth} tokens on" in error) == (depth > 0)


@pytest.mark.slow
def test_bench(model, invoke):
    own = ["bench", "-m", model, "-p", "0", "-n", "2", "-r", "1", "--device", "cpu"]
    own += ["--method", "full,lfps,quest,h2o"]
    rows = json.loads(invoke(*own, "-O", "json").out)
    assert [row["sparse_from"] for row in rows] == [0, LFPS, QUEST, 0]
    rows = json.loads(invoke(*own, "-O", "json", "--sparse-from", "7").out)
    assert [row["sparse_from"] for row in rows] == [0, 7, 7, 0]
    table = invoke(*own).out
    assert f"\nlfps: dense below {LFPS:,} tokens" in table
    assert f"\nquest: dense below {QUEST:,} tokens" in table and "\nh2o: dense" not in table
    assert "dense below" not in invoke(*own, "--sparse-from", "0").out


def test_compare_runs_the_methods_themselves(model, invoke):
    own = ["compare", "-m", model, *PROMPT, "--methods", "full,lfps", "--budget", "12"]
    result = invoke(*own, "--steps", "4", "--json")
    assert result.code == 0, result.err
    full, lfps = json.loads(result.out)["methods"]
    assert lfps["rows_attended_mean"] < full["rows_attended_mean"]
    assert invoke(*own, "--sparse-from", "9").code == 2


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "sals", "faedkv"])
def test_a_method_without_such_a_depth(name, invoke):
    """Refused before a model is looked for."""
    for command in (["run", *PROMPT], ["chat"], ["bench"]):
        result = invoke(*command, "-m", "none.gguf", "--method", name, "--sparse-from", "9")
        assert result.code == 2
        assert f"--sparse-from is for methods that choose among rows, not {name}" in result.err
