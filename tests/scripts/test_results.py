"""scripts/results: what is measured again, what a failure costs, and the pages of some figures."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

results = load_script("docs/results.py")
pages, parts = (sys.modules[f"results_{name}"] for name in ("pages", "parts"))


class FakePart(parts.Part):
    """A part whose rows need no run. make: makes them."""

    def __init__(self, make, needs=""):
        super().__init__("fake", quick=True, needs=needs)
        object.__setattr__(self, "measure", make)


def rows_of_speed(run, sizes):
    run.commands.append("sparsekv-cli bench")
    rows = []
    for model, factor in (("small", 2), ("large", 1)):
        for method, speed in (("full", 50.0), ("lfps", 130.0)):
            rows += [{
                "model": model, "method": method, "depth": depth, "tokens_per_s": factor * speed,
                "least": speed - 1, "most": speed + 1, "of_full": speed / 50, "cache_mb": 195.25,
            } for depth in (0, 2048, 8192)]  # fmt: skip
    return rows


def rows_of_accuracy(run, sizes):
    run.commands.append("scripts/accuracy/real")
    row = {"model": "large", "length": 8192, "vt": 80.0, "vt_n": 4, "rows": 1}
    full = row | {"spec": "full", "kld_code": 0.0}
    return [full, row | {"spec": "lfps", "kld_code": 0.0721}, row | {"spec": "x", "length": 16384}]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with a README, and two parts that are measured at once."""
    fakes = {"real_speed": rows_of_speed, "real_accuracy": rows_of_accuracy}
    monkeypatch.setattr(results, "PARTS", {name: FakePart(make) for name, make in fakes.items()})
    monkeypatch.setattr(results, "commit", lambda: "a" * 40)
    monkeypatch.setattr(results, "busy_cores", partial(results.busy_cores, 0.01))
    (tmp_path / "README.md").write_text("# x\n\n<!-- results -->\nold\n<!-- /results -->\nend\n")
    return tmp_path


def measure(root: Path, *arguments: str) -> int:
    return results.main([*arguments, "--tiny", "--into", str(root)])


def test_pages_of_what_was_measured(root):
    assert measure(root, "--quick") == 0
    told = json.loads((root / "docs" / "data" / "real_speed.json").read_text("utf-8"))
    assert told["commit"] == "a" * 40 and told["commands"] == ["sparsekv-cli bench"]
    assert told["machine"]["cores"] >= 1 and told["sizes"] == {**parts.TINY}
    readme = (root / "README.md").read_text("utf-8")
    assert "| `lfps` | 130 (2.6) | 130 (2.6) | 195 | 0.072 | 80 |  |  |" in readme
    assert "| `full` | 50 | 50 | 195 | 0.000 | 80 |  |  |" in readme
    assert "`large` on" in readme and "(4 samples of each)" in readme
    assert readme.startswith("# x\n") and readme.endswith("end\n") and "old" not in readme
    page = (root / "docs" / "benchmarks.md").read_text("utf-8")
    assert "| `large` | `lfps` | 8192 | 130 | 129 to 131 | 2.60 |  | 195 |" in page
    assert "commit aaaaaaaaaaaa" in page and "```sh\nsparsekv-cli bench\n```" in page
    assert {path.name for path in (root / "docs").glob("*.svg")} == {"speed.svg", "accuracy.svg"}
    assert ">lfps<" in (root / "docs" / "accuracy.svg").read_text("utf-8")


def test_figures_of_another_machine_stand_below_the_first(root):
    assert measure(root, "--only", "real_speed") == 0
    first = (root / "docs" / "benchmarks.md").read_text("utf-8")
    assert measure(root, "--only", "real_speed", "--machine", "amd") == 0
    page = (root / "docs" / "benchmarks.md").read_text("utf-8")
    assert page.startswith(first.rstrip()) and page.count("## Decode by depth") == 1
    assert page.count("| `large` | `lfps` | 8192 |") == 2


def test_a_part_of_this_commit_is_not_measured_again(root, monkeypatch, capsys):
    assert measure(root, "--quick") == 0
    capsys.readouterr()
    assert measure(root, "--all") == 0
    assert "real_speed: there for this commit" in capsys.readouterr().err
    file = root / "docs" / "data" / "real_speed.json"
    for again in ("--only=real_speed", None):
        file.write_text(file.read_text("utf-8").replace("130.0", "99.0"))
        if again is None:
            monkeypatch.setattr(results, "commit", lambda: "b" * 40)
        assert measure(root, again or "--quick") == 0
        assert '"tokens_per_s": 130.0' in file.read_text("utf-8")


def test_a_part_that_fails_costs_the_others_nothing(root, monkeypatch, capsys):
    def broken(run, sizes):
        run.cli("run", "-m", str(root / "none.gguf"), "-p", "x")

    failing = {"broken": FakePart(broken), **results.PARTS}
    failing["absent"] = FakePart(rows_of_speed, needs="no_such_library")
    monkeypatch.setattr(results, "PARTS", failing)
    assert measure(root, "--quick") == 1
    said = capsys.readouterr().err
    assert "error: broken: 'sparsekv-cli run" in said and "none.gguf" in said
    assert "absent: left out, no_such_library is not installed" in said
    assert {path.stem for path in (root / "docs" / "data").iterdir()} == {
        "real_speed",
        "real_accuracy",
    }


def test_usage(root, capsys):
    with pytest.raises(SystemExit) as stopped:
        measure(root, "--only", "real_speed,nonsense")
    assert stopped.value.code == 2 and "nonsense" in capsys.readouterr().err
    (root / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="has no <!-- results -->"):
        pages.between("no markers", "results", "")
    assert results.size_of("steps=3") == ("steps", 3)
    assert results.size_of("methods=full,topk") == ("methods", "full,topk")
    with pytest.raises(argparse.ArgumentTypeError, match="choose from model, "):
        results.size_of("shoe=42")
    with pytest.raises(ValueError):
        results.size_of("steps=few")


def test_every_part_has_a_place():
    for name, part in parts.PARTS.items():
        assert bool(part.title) != bool(part.page) and (part.run or name in parts.MEASUREMENTS)
        assert bool(part.columns) != (name in ("advise", "terminal")), name
        if part.page:
            text = (parts.ROOT / "docs" / part.page).read_text("utf-8")
            assert part.page.endswith(".svg") or f"<!-- {name} -->" in text
    assert parts.PARTS.keys() >= parts.MEASUREMENTS.keys()


@pytest.mark.parametrize("name", parts.PARTS)
def test_every_run_names_sizes_that_exist(name):
    if run := parts.PARTS[name].run:
        program, *words = parts.expand_arguments(run, {**parts.SIZES, "model": "a file.gguf"})
        assert (parts.ROOT / "scripts" / program).is_file()
        assert "" not in words and not any("{" in word for word in words)


def test_cells():
    row = {"a": 0.5, "b": 3, "versions": 1, "llama.cpp version": "x", "least": 1.0, "most": 2.0}
    row |= {"c_s": 1.5, "c_least_s": 1.0, "c_most_s": 2.0, "c_n": 3}
    columns = "a = a:2 | b, `s` = b:code | c = c:seconds | d = a:range | e = none:1 | f = b:of a"
    assert pages.table([row], columns + " | g = x:versions").splitlines()[0::2] == [
        "| a | b, `s` | c | d | e | f | g |",
        "| 0.50 | `3` | 1.50 (1.00 to 2.00) | 1 to 2 |  | 3 of 0.5 | `x` |",
    ]


@pytest.mark.nightly
def test_bench_as_rows(tmp_path):
    """The real commands on a tiny model."""
    model = make_model(tmp_path / "model.gguf", n_layer=3)
    run, sizes = parts.Runner(), {**parts.TINY, "model": str(model)}
    run.unfinished = tmp_path / "kept"
    rows = parts.PARTS["real_speed"].measure(run, sizes)
    assert [(row["method"], row["depth"]) for row in rows] == [
        (method, depth) for method in ("full", "streaming", "lfps") for depth in (0, 64)
    ]
    assert all(row["tokens_per_s"] > 0 and row["cache_mb"] > 0 for row in rows)
    assert [row["of_full"] for row in rows[:2]] == [1, 1]
    assert run.commands[0].startswith("sparsekv-cli bench -m model.gguf -p 0 -n 2 -d 0,64 ")
    rows = parts.PARTS["cache_types"].measure(run, sizes)
    (near,) = (row for row in rows if (row["k"] + row["v"], row["tokens"]) == ("q5_1q5_1", 100))
    assert near["method"] == "full"
    assert 0 < near["kld_least"] <= near["kld"] <= near["kld_most"]
    done = run.cli("inspect", str(model), "--json")
    assert done.peak_bytes > 10 << 20 and json.loads(done.stdout)
