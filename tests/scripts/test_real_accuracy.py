"""scripts/accuracy/real on a tiny model: its halves, its rows, its deadline, and its parts."""

import json
import sys
from types import SimpleNamespace

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.commands.eval.options import encoder
from sparsekv_cli.evaluation.ruler.answers import answer_all
from sparsekv_cli.evaluation.ruler.samples import RulerPlan
from sparsekv_cli.evaluation.ruler.tasks import TASKS
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig

real = load_script("accuracy/real")
load_script("docs/results.py")
parts = sys.modules["results_parts"]
METHODS = ["full", "streaming:budget=8;dense_layers=none"]
LENGTH = 1400
SIZES = ["--lengths", str(LENGTH), "--samples", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny") / "m.gguf", n_embd=128, n_ff=128)


def run(path, file, *arguments, half="choose", methods=METHODS):
    given = ["-m", str(path), "--half", half, "--methods", ",".join(methods), "--jsonl", str(file)]
    return real.main([*given, *SIZES, *arguments])


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def test_the_halves_have_nothing_in_common():
    choose, held = real.HELD_OUT.values()
    assert list(real.HELD_OUT) == ["choose", "held"] and choose["seed"] != held["seed"]
    files = []
    for half in (choose, held):
        paths = [real.ROOT / name for kind in ("code", "prose") for name in half[kind]]
        files.append({each for path in paths for each in [path, *path.rglob("*")]})
        assert all(path.exists() for path in paths) and len(files[-1]) >= len(paths)
    assert not files[0] & files[1]
    for half in real.HELD_OUT:
        for kind in real.TEXTS.values():
            text = real.text_of(half, kind, 30_064)
            assert len(text) > 4 * 30_064, f"{half} {kind}: too short for 30000 tokens"


def test_a_sample_is_prefilled_once_and_rows_are_not_made_again(
    path, tmp_path, capsys, monkeypatch
):
    """Answers are those of ``eval ruler``, whether a prompt was computed or came from disk."""
    monkeypatch.setattr(real, "PIECE", 512)
    file, tasks = tmp_path / "rows.jsonl", ["--tasks", "niah_single_1,kld_prose"]
    assert run(path, file, *tasks, methods=METHODS[:1]) == 0
    assert [row["computed_tokens"] > LENGTH / 2 for row in rows_of(file)] == [True, True]
    before = file.read_text()
    told = tmp_path / "told.json"
    assert run(path, file, *tasks, "--json", str(told)) == 0
    assert file.read_text().startswith(before)
    rows = rows_of(file)
    assert [(row["task"], row["name"]) for row in rows] == [
        (task, name) for name in ("full", "streaming") for task in ("niah_single_1", "kld_prose")
    ]
    assert all(row["computed_tokens"] < 64 for row in rows[2:])
    assert (rows[1]["kld"], rows[1]["top1"]) == (0, 1) and rows[3]["kld"] > 0
    table = capsys.readouterr().out
    full, streaming = json.loads(told.read_text())
    score = f"{full['niah_single_1']:.0f} of 1"
    assert f"| `{METHODS[0]}` | {LENGTH} | {score} | 0.0000 / 1.00 | 2 |" in table
    assert streaming["kld_prose"] == rows[3]["kld"] and streaming["rows"] == 2
    config = SessionConfig(threads=1, ctx_size=LENGTH + real.STEPS, device="cpu")
    model = load_model(path, real.FULL, config)
    plan = RulerPlan(["niah_single_1"], [LENGTH], 1, real.HELD_OUT["choose"]["seed"])
    methods = real.parse_methods(",".join(METHODS))
    (expected,) = answer_all(model, methods, plan, encoder(model, raw=False), ())
    for row, each in zip((rows[0], rows[2]), expected, strict=True):
        assert {name: row[name] for name in each} == json.loads(json.dumps(each))
    assert run(path, file, *tasks) == 0 and rows_of(file) == rows


def test_several_questions_have_one_text(path, tmp_path, capsys):
    file, many = tmp_path / "rows.jsonl", ["--tasks", "niah_multikey_2", "--questions", "2"]
    assert run(path, file, *many, "--samples", "3", methods=METHODS[:1]) == 0
    computed = [row["computed_tokens"] < LENGTH / 2 for row in rows_of(file)]
    assert computed == [False, True, False]
    assert run(path, file, *many[:3], "999", "--samples", "999", methods=METHODS[:1]) == 1
    assert "--questions: a text answers" in capsys.readouterr().err


@pytest.mark.parametrize("task", real.MANY)
def test_another_question_has_another_answer_in_the_same_text(task):
    encode = lambda text, answer: list(f"{text}{answer}".encode())  # noqa: E731
    first = real.make_prompt(task, 9000, 0, 1, 30, encode)
    others = [real.asked_again(first, which, encode).sample for which in range(1, 6)]
    assert len({each.references[0] for each in (first.sample, *others)}) == 6
    for context, question, answer, (told,), _ in others:
        fact = question.split("\n")[3] if task == "code" else f"for {answer.split()[5]} is: {told}."
        assert fact in context.partition(f"def {told}(")[task == "code" and 2]


def test_halves_are_not_mixed(path, tmp_path, capsys):
    file, tasks = tmp_path / "rows.jsonl", ["--tasks", "niah_single_1"]
    assert run(path, file, *tasks, methods=METHODS[:1]) == 0
    before = file.read_text()
    assert run(path, file, *tasks, half="held", methods=METHODS[:1]) == 1
    assert "of half 'choose', not 'held'" in capsys.readouterr().err
    assert file.read_text() == before
    with pytest.raises(SystemExit):
        run(path, file, *tasks, half="choose,held")


def test_a_deadline_stops_ahead_of_a_row_and_a_run_goes_on_there(path, tmp_path, capsys):
    file, tasks = tmp_path / "rows.jsonl", ["--tasks", "niah_single_1"]
    for minutes, n_methods, n in ("9", 1, 1), ("0", 2, 1), ("9", 2, 2):
        assert run(path, file, *tasks, "--deadline", minutes, methods=METHODS[:n_methods]) == 0
        assert [row["name"] for row in rows_of(file)] == ["full", "streaming"][:n]
        assert ("the time is over" in capsys.readouterr().err) == (minutes == "0")


def test_changed_texts_are_other_samples(path, tmp_path, monkeypatch):
    """Rows of other tokens are not taken for those of these."""
    file, tasks = tmp_path / "rows.jsonl", ["--tasks", "kld_prose,niah_single_1"]
    run(path, file, *tasks, methods=["full"])
    text = real.text_of("choose", "prose", LENGTH)
    monkeypatch.setattr(real, "text_of", lambda *_: "Another. " + text)
    run(path, file, *tasks, methods=["full"])
    assert [row["task"] for row in rows_of(file)] == ["kld_prose", "niah_single_1", "kld_prose"]
    first, _, second = (row["made_of"] for row in rows_of(file))
    assert first != second


def test_plan_and_names_of_tasks():
    plan = list(real.planned(["vt", "kld_code"], [8192, 30_000], 2))
    assert plan[:3] == [(8192, "vt", 0), (8192, "kld_code", 0), (8192, "vt", 1)]
    assert len(plan) == 6
    assert real.task_list("choice,vt,cwe") == [*real.CHOICE, "cwe"]
    assert set(real.task_list("all")) == {*TASKS, *real.TEXTS}
    with pytest.raises(real.argparse.ArgumentTypeError, match="'shoe': choose from choice, all"):
        real.task_list("vt,shoe")


# --- the parts of scripts/results -----------------------------------------------------------------


class FakeRunner:
    """Answers as the programs do."""

    def __init__(self, folder):
        self.unfinished, self.commands, self.models = folder, [], []

    def cli(self, *arguments):
        self.commands.append(" ".join(arguments))
        test = {"n_prompt": 0, "n_gen": 4, "n_depth": 64, "n_seqs": 1, "n_threads": 2}
        ledger = dict.fromkeys(parts.MEMORY_COUNTERS, 1)
        test |= {"samples_ts": [5.0], "ledger": ledger, "fraction": None}
        return SimpleNamespace(stdout=json.dumps([{"method": "full", **test}]))

    def script(self, path, *arguments, may_end_with=0):
        self.commands.append(" ".join((path, *arguments)))
        self.models.append(arguments[1])
        turn = len(self.models) % 3
        row = {"length": 8192, "spec": "full", "rows": 20 if turn == 1 else 4, "vt": 100}
        return [[{**row, "vt": 50, "cwe": 25}], [row], [{**row, "length": 16384}]][turn]


def test_parts_of_several_models(tmp_path):
    sizes = {**parts.TINY, "trained": "/some/a.gguf /some/b.gguf"}
    run = FakeRunner(tmp_path)
    rows = parts.PARTS["real_speed"].measure(run, sizes)
    assert [(row["model"], row["depth"]) for row in rows] == [("a", 64), ("b", 64)]
    assert ["--cache-dir prompts -r 1 " in line for line in run.commands] == [True] * 2
    run = FakeRunner(tmp_path)
    rows = parts.PARTS["real_accuracy"].measure(run, sizes)
    assert run.models == [f"/some/{x}.gguf" for x in "aaabbb"]
    assert [row["length"] for row in rows] == [8192, 16384, 8192] * 2
    assert [row["rows"] for row in rows] == [20, 4, 4] * 2
    assert [row["model"] for row in rows] == [*"aaabbb"]
    assert not any("/some" in line for line in run.commands) and "--half held" in run.commands[0]
    alone = parts.PARTS["real_accuracy"].measure(FakeRunner(tmp_path), parts.TINY)
    assert [row["model"] for row in alone] == ["smollm2"] * 3
