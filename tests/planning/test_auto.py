"""``--method auto``: what is chosen, what it is chosen by, and how commands show it."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from command_line import call
from tiny_models import make_model

from sparsekv_cli.calibration.calibrations import Calibrations, CalibrationText
from sparsekv_cli.methods import build_method
from sparsekv_cli.planning import auto, kept, measure
from sparsekv_cli.planning.auto import Losses, choose, kept_losses, loss_task
from sparsekv_cli.planning.kept import method_key

NAMES = ("full", "lfps", "quest", "snapkv")
FULL, LFPS, QUEST, SNAPKV = METHODS = [build_method(name, {}) for name in NAMES]
FEW, MANY = (build_method("quest", {"budget": text}) for text in auto.BUDGETS)
KLD = {"lfps": 0.08, "quest": 0.25, "snapkv": 0.3}


class FakeForecast:
    """Full takes a millisecond a 1000 tokens, the others constant times."""

    def __init__(self):
        self.speeds = replace_methods = type("Speeds", (), {})()
        replace_methods.methods = {method_key(each): None for each in METHODS}
        replace_methods.is_busy = False
        self.fixed = {"lfps": 0.004, "quest": 0.003, "snapkv": 0.002}

    def seconds(self, method, n):
        return self.fixed.get(method_key(method), self.fixed.get(method.name, n / 1e6))

    def pays_from(self, method):
        return round(self.seconds(method, 0) * 1e6)


def losses(**kld):
    by_key = {method_key(each): kld[each.name] for each in METHODS if each.name in kld}
    return Losses("a CPU", "2026-01-01", by_key)


@pytest.mark.parametrize(
    ("n", "max_loss", "name", "repeat"),
    [
        (8000, 0.1, "lfps", "--method lfps --sparse-from 3999"),
        (8000, 0.27, "quest", "--method quest --sparse-from 2999"),
        (8000, 0.5, "snapkv", "--method snapkv"),
        (8000, 0.01, "full", "--method full"),
        (3990, 0.1, "full", "--method full"),
        (4050, 0.1, "full", "--method full"),  # less than 2% faster
    ],
)
def test_the_fastest_of_those_within_the_loss(n, max_loss, name, repeat):
    choice = choose(FakeForecast(), METHODS[1:], losses(**KLD), n, max_loss)
    assert (choice.chosen.method.name, choice.repeat) == (name, repeat)
    assert choice.why.startswith(f"auto: {name}, because at {n} tokens")
    assert "2026-01-01" in choice.why
    found = choice.as_dict()
    assert [each["name"] for each in found["considered"]] == ["snapkv", "quest", "lfps"]
    if (n, max_loss) == (8000, 0.1):
        assert "faster ones lose more: snapkv 0.300, quest 0.250" in choice.why


def test_a_busy_machine_gives_no_choice_by_speed():
    forecast = FakeForecast()
    forecast.speeds.is_busy = True
    choice = choose(forecast, METHODS[1:], losses(**KLD), 8000, 0.5)
    assert (choice.chosen.method.name, choice.repeat) == ("full", "--method full")
    assert "not to be believed" in choice.why and not choice.as_dict()["is_believable"]


@pytest.mark.parametrize(("quest", "says_so"), [(0.25, True), (0.05, False)])
def test_a_model_on_which_no_choice_of_rows_holds(quest, says_so):
    """The oracle is the variant of top-k with most rows. Another method within the loss refutes."""
    topk = {text: build_method("topk", {"budget": text}) for text in ("2%", "10%")}
    of_topk = {method_key(topk["2%"]): 0.4, method_key(topk["10%"]): 0.2}
    found = Losses("a CPU", "2026-01-01", of_topk | {method_key(QUEST): quest})
    choice = choose(FakeForecast(), [], found, 8000, 0.1)
    assert choice.chosen.method.name == "full"
    words = "even exact top-k (topk:budget=10%) loses 0.200, and 0.1 is allowed"
    assert (words in choice.why) == says_so


def test_methods_that_were_not_measured_are_not_chosen():
    choice = choose(FakeForecast(), METHODS[1:], losses(quest=0.25), 8000, 0.3)
    assert [each.method.name for each in choice.rated] == ["quest"]
    assert losses(quest=0.2).lacks([LFPS, QUEST]) == [LFPS]
    other = replace(QUEST, dense_layers=())
    assert losses(quest=0.2).lacks([LFPS, other]) == [LFPS, other]


def test_losses_of_another_calibration_are_left_out():
    fasa, text = build_method("fasa", {}), CalibrationText("a", "text")
    kld = {"": 0.0, **{method_key(each): 0.1 for each in (fasa, QUEST)}}
    kept = Losses("a CPU", "2026-01-01", kld, {"fasa": "1"})

    class Found:
        hashes: ClassVar = {"fasa": "1"}

        def find(self, name):
            return kept.as_entry(1100, text)

        def digests(self, methods):
            assert "fasa" in [each.name for each in methods]
            return self.hashes

    model = SimpleNamespace(calibrations=Found())
    assert kept_losses(model) == kept
    for hashes in ({"fasa": "2"}, {}):  # made again, or removed
        Found.hashes = hashes
        assert kept_losses(model).lacks([fasa, QUEST]) == [fasa]


@pytest.mark.parametrize(
    ("max_loss", "spec", "n_worth"),
    [
        (0.05, "full", 3),
        (0.1, "quest:budget=10%", 4),
        (0.27, "quest", 4),
        (0.4, "quest:budget=2%", 5),
    ],
)
def test_budgets_are_chosen_among(max_loss, spec, n_worth):
    """Of a method the fastest that loses little enough; others but the default need no speed."""
    forecast = FakeForecast()
    forecast.fixed |= {
        method_key(FEW): 0.002,
        method_key(MANY): 0.0035,
        "lfps": 0.01,
        "snapkv": 0.01,
    }
    forecast.speeds.methods |= {method_key(each): None for each in (FEW, MANY)}
    known = losses(lfps=1, quest=0.25, snapkv=1)
    known = replace(known, kld={**known.kld, method_key(FEW): 0.4, method_key(MANY): 0.1})
    worth = auto.worth_forecasting([*METHODS[1:], FEW, MANY], known, max_loss)
    assert len(worth) == n_worth
    choice = choose(forecast, worth, known, 8000, max_loss)
    assert choice.chosen.spec == spec
    assert choice.repeat.startswith(f"--method {spec.replace(':', ' -o ')}")


def test_a_passage_is_repeated_and_the_text_goes_on():
    ids = list(range(4096))
    prompt, following = loss_task(ids)
    assert len(prompt) + len(following) == 4096
    assert prompt[:-32] == ids[: 4096 - 128]
    assert [*prompt[-32:], *following[:48]] == ids[2048:2128]
    assert following[48:] == ids[4096 - 128 : 4096 - 80]


def test_losses_are_kept_in_a_sidecar_as_they_are():
    entry = losses(**KLD).as_entry(4096, CalibrationText("t", "text"))
    assert Losses.of_entry(entry) == losses(**KLD)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A tiny model, of which little is measured, with two methods to choose from."""
    monkeypatch.setattr(measure, "DEPTHS", (512, 1024))
    monkeypatch.setattr(measure, "QUICK_DEPTHS", (512, 1024))
    monkeypatch.setattr(measure, "N_STEPS", 2)
    monkeypatch.setattr(measure, "measure_bandwidth", lambda n_threads: 1e10)
    monkeypatch.setattr(kept, "user_cache", tmp_path.joinpath)
    monkeypatch.setattr(kept, "load_beyond_cores", lambda: None)
    monkeypatch.setattr(auto, "N_TEXT", 1100)
    monkeypatch.setattr(auto, "candidates", lambda sequence: [FEW, SNAPKV])
    monkeypatch.setattr(auto, "GAIN", 0.0)  # a tiny model's speeds say nothing
    return make_model(tmp_path / "model.gguf", n_layer=3)


def test_commands_choose_and_say_so(model, tmp_path, capsys, monkeypatch):
    text = tmp_path / "prompt.txt"
    text.write_text("a b c d " * 400)
    run = ("run", "-m", model, "-t", 1, "-f", text, "-n", 2, "--no-cache", "--temp", 0)
    given = (*run, "--method", "auto", "--max-loss", 100, "--json")
    code, out, err = call(capsys, *given, "-v")
    assert code == 0, err
    assert "measuring what methods lose" in err
    said = json.loads(out)
    chosen = said["method"]["auto"]
    assert said["method"]["name"] == chosen["name"] in ("quest", "snapkv")
    assert {each["name"] for each in chosen["considered"]} == {"quest", "snapkv"}
    assert all(each["kld"] > 0 for each in chosen["considered"])
    assert {each["name"]: each["options"] for each in chosen["considered"]} == {
        "quest": {"budget": "2%"},
        "snapkv": {},
    }
    assert chosen["why"] in err
    assert said["timings"]["decode_s"] < 5  # of the answer alone
    code, again, err = call(capsys, *run, "--json", *chosen["repeat"].split())
    assert json.loads(again)["method"]["options"] == said["method"]["options"]
    assert json.loads(again)["tokens"] == said["tokens"]
    code, out, err = call(capsys, *given)
    assert json.loads(out)["method"] == said["method"]
    assert "measuring" not in err
    monkeypatch.setattr(auto, "candidates", lambda sequence: [FEW, SNAPKV, QUEST])
    strict = (*run, "--method", "auto", "--max-loss", 0, "--json")
    code, out, err = call(capsys, *strict)
    assert "1 of 3 methods and budgets are left out" in err
    assert json.loads(out)["method"]["name"] == "full"
    bench = ("bench", "-m", model, "-t", 1, "-p", 0, "-n", 2, "-d", 1200, "-r", 1, "-O", "json")
    code, out, err = call(capsys, *bench, "--method", "auto", "--max-loss", 100)
    assert code == 0, err
    assert json.loads(out)[0]["method"] in ("quest", "snapkv")


def test_the_depth_is_that_of_the_chosen_method_alone(model, capsys, monkeypatch):
    """Another method of the same chat is dense up to its own."""
    monkeypatch.setattr("sys.stdin", io.StringIO("/method quest\na\n/stats\n"))
    given = ("-m", model, "-t", 1, "-c", 600, "-n", 1, "--no-cache", "--method", "auto")
    code, _, err = call(capsys, "chat", *given)
    assert code == 0 and f"sparse from {2 * QUEST.work_of_a_head} tokens on" in err, err


def test_a_busy_machine_is_told(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kept, "load_beyond_cores", lambda: (9.0, 2))
    text = tmp_path / "prompt.txt"
    text.write_text("a b c d " * 400)
    given = ("run", "-m", model, "-t", 1, "-f", text, "-n", 1, "--no-cache", "--method", "auto")
    code, out, err = call(capsys, *given, "--max-loss", 100, "--json")
    assert code == 0 and "warning: auto: full, because the speeds of a busy machine" in err
    assert json.loads(out)["method"]["name"] == "full"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budget", "10%"), "leave budget out"),
        (("-o", "page=8"), "leave page out"),
        (("--calibration", "a.npz"), "leave calibration out"),
        (("--max-loss", "-1"), "--max-loss"),
    ],
)
def test_auto_takes_no_options_of_methods(model, tmp_path, capsys, arguments, said):
    text = tmp_path / "prompt.txt"
    text.write_text("a")
    code, _, err = call(capsys, "run", "-m", model, "-f", text, "--method", "auto", *arguments)
    assert code == 2
    assert said in err


def test_a_short_context_does_not_limit_losses_that_are_kept(model, tmp_path, capsys, monkeypatch):
    given = ("bench", "-m", model, "-t", 1, "-p", 0, "-n", 2, "-d", 1040, "-r", 1)
    given = (*given, "--method", "auto")
    with monkeypatch.context() as patch:
        patch.setattr(Calibrations, "place_to_write", lambda self: model / "no folder")
        code, _, err = call(capsys, *given)
    assert code == 0 and "what methods lose: could not be stored" in err, err
    code, _, err = call(capsys, *given)
    assert code == 0 and "measuring what methods lose" in err, err
    with np.load(tmp_path / "model.calibration.npz") as sidecar:
        about = json.loads(str(sidecar["about"]))
    (own,) = about["entries"].values()
    assert own["n_tokens"] == 1100


def test_short_contexts_are_dense(model, tmp_path, capsys):
    text = tmp_path / "prompt.txt"
    text.write_text("a")
    given = ("run", "-m", model, "-t", 1, "-f", text, "-n", 1, "--method", "auto", "--json")
    code, out, err = call(capsys, *given)
    assert code == 0, err
    assert json.loads(out)["method"]["name"] == "full"
    assert "too short" in json.loads(out)["method"]["auto"]["why"]
