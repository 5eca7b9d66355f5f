"""scripts/accuracy/real on a tiny model: its halves, its rows, its deadline, and its parts."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

from sparsekv_cli.evaluation.prefill import new_sequence
from sparsekv_cli.model import load_model
from sparsekv_cli.models.sources.locate import resolve_model
from sparsekv_cli.settings.config import SessionConfig

real = load_script("accuracy/real")
load_script("docs/results.py")
parts, pages = sys.modules["results_parts"], sys.modules["results_pages"]
minutes, reader = sys.modules["minutes"], sys.modules["reader"]
METHODS = ["full", "streaming:budget=8;dense_layers=none"]
LENGTH = 4500
SIZES = ["--lengths", str(LENGTH), "--questions", "1", "--threads", "1", "--steps", "16"]
ONE = ["--tasks", "updates"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model(
        tmp_path_factory.mktemp("tiny") / "m.gguf", n_embd=128, n_ff=128, n_ctx=9000, n_layer=4
    )  # its last two layers read sparsely


@pytest.fixture(autouse=True)
def many_tokens(monkeypatch):
    """A word takes the tiny model twice as many tokens as others."""
    monkeypatch.setattr(minutes, "TOKENS_A_QUESTION", 2200)


def run(path, file, *arguments, half="choose", methods=METHODS):
    given = ["-m", str(path), "--half", half, "--methods", ",".join(methods), "--jsonl", str(file)]
    return real.main([*given, *SIZES, *arguments])


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


@pytest.fixture
def computed(monkeypatch):
    """The numbers of tokens that prefills have computed."""
    found = []
    forward = real.Reader.__init__.__globals__["new_sequence"]

    def counted(model, method):
        sequence = forward(model, method)
        steps = model.decoder.forward_steps
        if not hasattr(steps, "counted"):

            def forward_steps(ids, *arguments, **named):
                found.append(len(ids))
                return steps(ids, *arguments, **named)

            forward_steps.counted = True
            model.decoder.forward_steps = forward_steps
        return sequence

    monkeypatch.setattr(reader, "new_sequence", counted)
    return found


def test_the_halves_have_nothing_in_common():
    choose, held = real.HELD_OUT.values()
    assert list(real.HELD_OUT) == ["choose", "held"] and choose["seed"] != held["seed"]
    files = []
    for half in (choose, held):
        paths = [real.ROOT / name for kind in ("code", "prose") for name in half[kind]]
        files.append({each for path in paths for each in [path, *path.rglob("*")]})
        assert all(path.exists() for path in paths) and len(files[-1]) >= len(paths)
    assert not files[0] & files[1]
    texts = sys.modules["accuracy_texts"]
    library = texts.library_files()
    assert len(set(library)) == len(library) > 200
    assert not any("site-packages" in path.parts or "test" in path.parts for path in library)
    for kind in ("code", "prose"):
        for n in (32_768, 131_072):  # a token has more than 4 characters
            one, other = (real.text_of(half, kind, n) for half in real.HELD_OUT)
            assert min(len(one), len(other)) > 4.3 * n
            assert one[:500] not in other and other[:500] not in one
    assert real.library(32_768) == {} and "Python 3." in real.library(65_536)["library"]


def test_a_text_is_read_once_and_rows_are_not_made_again(path, tmp_path, capsys, computed):
    file, tasks = tmp_path / "rows.jsonl", ["--tasks", "updates,turns,kld_prose"]
    assert run(path, file, *tasks, methods=METHODS[:1]) == 0
    assert sum(n > 512 for n in computed) == 2, computed  # the minutes and the prose
    before = file.read_text()
    del computed[:]
    told = tmp_path / "told.json"
    assert run(path, file, *tasks, "--json", str(told)) == 0
    assert file.read_text().startswith(before) and max(computed) <= 512
    rows = rows_of(file)
    assert [(row["name"], row["task"]) for row in rows] == [
        (name, task) for name in ("full", "streaming") for task in ("updates", "turns", "kld_prose")
    ]
    assert len(rows[1]["scores"]) == len(rows[1]["answers"]) == minutes.N_TURNS
    assert (rows[2]["kld"], rows[2]["top1"]) == (0, 1) and rows[5]["kld"] > 0
    n_asked = rows[1]["prompt_tokens"]
    assert LENGTH - minutes.ROOM - 500 < n_asked < LENGTH - 16 == rows[2]["prompt_tokens"]
    table = capsys.readouterr().out
    full, streaming = json.loads(told.read_text())
    assert (full["verdict"], full["texts"], full["read"]) == ("reference", 1, "dense")
    assert streaming["kld_prose"] == rows[5]["kld"] and streaming["rows"] == 3
    assert (
        f"| `{METHODS[0]}` | {LENGTH} | dense | (0 of 1) | (0 of 1) | 0.0000 / 1.00 | 3 |" in table
    )
    assert run(path, file, *tasks) == 0 and rows_of(file) == rows


@pytest.mark.nightly
def test_answers_are_those_of_a_new_sequence(tmp_path):
    """For every question, whatever was asked before; in turns, after the method's own answers."""
    config = SessionConfig(threads=1, ctx_size=2400, device="cpu")
    model = load_model(resolve_model("smollm2"), real.FULL, config)
    given = reader.Reader(model, tmp_path, 1.0, np.inf)
    asked = real.Yardstick(given, given, {}, "choose", real.RealRecords(None, {}), 8)
    context = asked.minutes(2400, 0).context
    spec = "quest:budget=64"
    method, sequence = real.parse_methods(spec)[spec], None
    for task in ("updates", "turns"):
        turns = asked.turns(real.Question(2400, 0, task, 0))[:2]
        answers, _, n, sequence = given.conversation(method, context, turns, 8, sequence)
        first = [{"role": "user", "content": f"{context}\n\n{turns[0].question}"}]
        ids = given.encode(first, turns[0].answer)
        alone = new_sequence(model, method)
        told = given.answer(alone, alone.prefill(ids), turns[0].references, 8)
        assert answers[0] == told[0] and len(ids) <= n < 2400, task
        assert len(answers) == len(turns)


def test_halves_are_not_mixed(path, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    assert run(path, file, *ONE, methods=METHODS[:1]) == 0
    before = file.read_text()
    assert run(path, file, *ONE, half="held", methods=METHODS[:1]) == 1
    assert "of half 'choose', not 'held'" in capsys.readouterr().err
    assert file.read_text() == before
    with pytest.raises(SystemExit):
        run(path, file, *ONE, half="choose,held")


def test_a_deadline_stops_ahead_of_a_row_and_a_run_goes_on_there(path, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    for minutes_left, n_methods, n in ("9", 1, 1), ("0", 2, 1), ("9", 2, 2):
        assert run(path, file, *ONE, "--deadline", minutes_left, methods=METHODS[:n_methods]) == 0
        assert [row["name"] for row in rows_of(file)] == ["full", "streaming"][:n]
        assert ("the time is over" in capsys.readouterr().err) == (minutes_left == "0")


def test_a_killed_reading_goes_on(path, tmp_path, computed, monkeypatch):
    """What was read up to a stop is not read again."""
    file, size = tmp_path / "rows.jsonl", ["--lengths", "9000"]
    monkeypatch.setattr("sparsekv_cli.models.forward.ROWS_AT_ONCE", 2048)
    check = real.Reader.check

    def stop(self, done=0, of=0):
        if 4096 < done < of:
            raise KeyboardInterrupt

    monkeypatch.setattr(real.Reader, "check", stop)
    with pytest.raises(KeyboardInterrupt):
        run(path, file, *ONE, *size, methods=["full"])
    assert not rows_of(file)
    monkeypatch.setattr(real.Reader, "check", check)
    del computed[:]
    assert run(path, file, *ONE, *size, methods=["full"]) == 0
    assert 2048 < computed[0] <= 9000 - minutes.ROOM - 4096 and len(rows_of(file)) == 1


def test_changed_texts_are_other_samples(path, tmp_path, monkeypatch):
    """Rows of other tokens are not taken for those of these."""
    file, tasks = tmp_path / "rows.jsonl", ["--tasks", "kld_prose,updates"]
    run(path, file, *tasks, methods=["full"])
    text = real.text_of("choose", "prose", LENGTH)
    monkeypatch.setattr(real, "text_of", lambda *_: "Another. " + text)
    run(path, file, *tasks, methods=["full"])
    assert [row["task"] for row in rows_of(file)] == ["updates", "kld_prose", "kld_prose"]
    _, first, second = (row["made_of"] for row in rows_of(file))
    assert first != second


def test_rows_tell_how_a_text_was_read(path, tmp_path, capsys, computed):
    """Rows of a sparse reading have their own key and prompts; the reference stays dense."""
    file, tasks = tmp_path / "rows.jsonl", ["--tasks", "updates,kld_prose"]
    sparse = ["--prefill-attention", "sparse", "--prefill-budget", "2048"]
    told = tmp_path / "told.json"
    run(path, file, *tasks, methods=["full"])
    del computed[:]
    run(path, file, *tasks, *sparse, "--json", str(told), methods=["full"])
    assert sum(n > 512 for n in computed) == 2, computed  # dense rows do not serve
    dense, read = rows_of(file)[:2], rows_of(file)[2:]
    assert [row["reading"] for row in (*dense, *read)] == [[], [], [2048, 512, 2], [2048, 512, 2]]
    assert dense[1]["kld"] == 0 < read[1]["kld"]
    (row,) = json.loads(told.read_text())
    assert row["read"] == "sparse 2048" and row["verdict"] == "KLD alone" and "updates_mean" in row
    run(path, file, *ONE, "--rope-scaling", "linear", "--rope-scale", "2", methods=["full"])
    stretched = rows_of(file)[-1]
    assert stretched["changes"] == {"rope_scaling": "linear", "rope_scale": 2.0}
    assert stretched["identity"] != dense[0]["identity"] and len(rows_of(file)) == 5
    with pytest.raises(SystemExit):
        run(path, file, "--prefill-budget", "4096")
    assert "needs prefill_attention = 'sparse'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--questions", "9"], "a text of 4500 tokens answers 2, give no more"),
        (["--lengths", "1500"], "--lengths 1500: too short for the facts of all tasks"),
        (["--keep", "0.001"], "--keep 0.001: must be at least 0.0"),
        (["--keep", "nan"], "--keep nan: must be at least"),
        (["--keep", "inf"], "--keep inf: must be at least"),
        (["--tasks", "kld_code", "--steps", "4500"], "--steps 4500 do not fit"),
    ],
)
def test_what_does_not_fit(path, tmp_path, capsys, given, said):
    assert run(path, tmp_path / "rows.jsonl", *ONE, *given) == 1
    assert said in capsys.readouterr().err


def test_rows_of_earlier_versions_stay(path, tmp_path):
    """They have no identity, and no question of these texts has their key."""
    file = tmp_path / "rows.jsonl"
    assert run(path, file, *ONE, methods=["full"]) == 0
    old = {"task": "vt", "length": LENGTH, "sample": 3, "made_of": "0", "name": "full"}
    old |= {"options": {}, "score": 1.0, "seconds": 1.0}
    with file.open("a") as more:
        more.write(json.dumps(old) + "\n")
    before = file.read_text()
    assert run(path, file, *ONE, methods=["full"]) == 0 and file.read_text() == before


def test_plan_and_names_of_tasks():
    plan = list(real.planned(["kld_code", "vt", "code"], [8192, 30_000], 2, 2))
    assert plan[:3] == [(8192, 0, "vt", 0), (8192, 0, "code", 0), (8192, 0, "vt", 1)]
    assert plan[8] == (8192, 0, "kld_code", 0) and len(plan) == 18
    assert real.task_list("vt,all") == ["vt", *(task for task in real.TASKS if task != "vt")]
    with pytest.raises(real.argparse.ArgumentTypeError, match="'shoe': choose from all, niah_"):
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
        row = {"length": 8192, "spec": "full", "rows": 20, "vt": 100}
        return [{**row, "length": 16384} if len(self.models) % 2 == 0 else row]


def test_parts_of_several_models(tmp_path):
    sizes = {**parts.TINY, "trained": "/some/a.gguf /some/b.gguf"}
    run = FakeRunner(tmp_path)
    rows = parts.PARTS["real_speed"].measure(run, sizes)
    assert [(row["model"], row["depth"]) for row in rows] == [("a", 64), ("b", 64)]
    assert ["--cache-dir prompts -r 1 " in line for line in run.commands] == [True] * 2
    run = FakeRunner(tmp_path)
    rows = parts.PARTS["real_accuracy"].measure(run, sizes)
    assert run.models == [f"/some/{x}.gguf" for x in "aabb"]
    assert [row["length"] for row in rows] == [8192, 16384] * 2
    assert [row["model"] for row in rows] == [*"aabb"]
    assert not any("/some" in line for line in run.commands) and "--half held" in run.commands[0]
    run = FakeRunner(tmp_path)
    rows = parts.PARTS["real_at_depth"].measure(run, sizes)
    assert [row["model"] for row in rows] == ["a", "b"]
    assert "--half held" in run.commands[0] and "--tasks turns" in run.commands[0]
    alone = parts.PARTS["real_accuracy"].measure(FakeRunner(tmp_path), parts.TINY)
    assert [row["model"] for row in alone] == ["smollm2"] * 2


def test_the_table_at_depth():
    """A dropped task says so, a difference stands beside its score, and full has none."""
    row = {"model": "m", "spec": "full", "read": "dense", "length": 9, "texts": 2, "vt": 40.0}
    row |= {"vt_n": 3, "updates": 80.0, "updates_n": 3, "first_turn": 75.4}
    full = row | {"dropped": ["vt"], "verdict": "reference"}
    lfps = full | {"spec": "lfps", "verdict": "equal", "updates_mean": -4.2, "vt_mean": 9.0}
    lfps |= {"all_mean": -1.26, "all_low": -3.4, "all_high": 1.7}
    found = pages.body(parts.PARTS["real_at_depth"], [full, lfps])
    shown = "| `m` | `{}` | dense | 2 | 3 |  |  |  | 40, dropped |  |  | 75 |  |  |  | 80{} | {} |"
    assert found.startswith("### 9 tokens") and shown.format("full", "", " | reference") in found
    assert shown.format("lfps", " (-4)", "-1.3 (-3 to 2) | equal") in found
