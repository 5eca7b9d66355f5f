"""``--method NAME --max-loss X``: the smallest budget that loses no more."""

import json

import pytest
from command_line import call
from tiny_models import make_model

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.planning import auto, budgets
from sparsekv_cli.planning.auto import Losses
from sparsekv_cli.planning.kept import method_key

QUEST = build_method("quest", {"page": "16"})
KLD = (0.5, 0.3, 0.1, 0.12, 0.01, 0.02)  # by SHARES: not all fall


def losses():
    tried = budgets.with_budgets(QUEST)
    return tried, Losses(
        "a machine", "2026-01-02", dict(zip(map(method_key, tried), KLD, strict=True))
    )


@pytest.mark.parametrize(
    ("max_loss", "budget"), [(1, "1%"), (0.3, "2%"), (0.11, "5%"), (0.015, "20%")]
)
def test_the_smallest_budget_within_the_loss(max_loss, budget):
    choice = budgets.smallest(*losses(), max_loss)
    assert choice.method.options()["budget"] == budget
    assert choice.method.page == 16
    assert f"-o budget={budget}" in choice.repeat and "-o page=16" in choice.repeat
    said = choice.as_dict()
    assert said["options"] == {"budget": budget, "page": "16"}
    assert [each["kld"] for each in said["considered"]] == [*KLD]
    assert all(text in said["why"] for text in (f"budget={budget}", "2026-01-02", "a machine"))


def test_no_budget_loses_so_little():
    with pytest.raises(
        SparseKVError, match=r"quest loses 0.01 even with a budget of 20%; allow more"
    ):
        budgets.smallest(*losses(), 0.001)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A command line with a tiny model and a prompt of 1,600 tokens."""
    monkeypatch.setattr(auto, "N_TEXT", 1100)
    text = tmp_path / "prompt.txt"
    text.write_text("a b c d " * 400)
    model = make_model(tmp_path / "model.gguf", n_layer=3)
    return ("run", "-m", model, "-t", 1, "-f", text, "-n", 2, "--no-cache", "--temp", 0, "--json")


def test_a_run_takes_it_and_says_so(run, capsys):
    given = (*run, "--method", "quest", "-o", "page=16", "--cache-type-k", "q8_0")
    code, out, err = call(capsys, *given, "--max-loss", 100, "-v")
    assert code == 0, err
    said = json.loads(out)["method"]
    assert "measuring what quest loses with this model and 6 budgets" in err
    assert said["options"]["budget"] == "1%" and said["options"]["page"] == 16
    assert said["options"]["cache_type_k"] == "q8_0"
    assert len(said["auto"]["considered"]) == 6 and said["auto"]["why"] in err
    code, again, _ = call(capsys, *run, *said["auto"]["repeat"].split())
    assert json.loads(again)["tokens"] == json.loads(out)["tokens"]

    kept = [each["kld"] for each in said["auto"]["considered"]]
    middle = sorted(kept)[2]
    code, out, err = call(capsys, *given, "--max-loss", middle)
    chosen = json.loads(out)["method"]["auto"]
    assert "measuring" not in err
    assert [each["kld"] for each in chosen["considered"]] == kept
    first = next(i for i, kld in enumerate(kept) if kld <= middle)
    assert chosen["options"]["budget"] == budgets.SHARES[first]

    code, out, err = call(capsys, *run, "--method", "snapkv", "--max-loss", 100)
    assert code == 0 and "measuring what snapkv loses" in err, err
    code, out, err = call(capsys, *given, "--max-loss", 0)
    assert code == 1 and "--max-loss 0: quest loses" in err and "measuring" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "full"), "needs --method auto or a sparse method"),
        (("--method", "quest", "--budget", "5%"), "leave out the one that is given"),
        (("--method", "quest", "-o", "budget=64"), "leave out the one that is given"),
    ],
)
def test_there_must_be_a_budget_to_choose(run, capsys, arguments, said):
    code, _, err = call(capsys, *run, "--max-loss", 0.1, *arguments)
    assert code == 2 and said in err, err
