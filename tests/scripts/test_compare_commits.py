"""scripts/commits/compare: a difference that is planted, a piece that fails, a run that goes on."""

import subprocess

import pytest
from scripts_as_modules import load_script
from source_tree import root

PIECE = "layer/streaming/f16/0"
METHOD = "sparsekv_cli/methods/streaming.py"
FIRST = "first = n if self.method.reposition else 0"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The program in a copy of the repository, whose commit is tagged ``old``."""
    place = tmp_path / "copy"
    subprocess.run(["git", "clone", "-q", "--shared", root(), place], check=True)
    script = load_script("commits/compare")
    monkeypatch.setattr(script, "ROOT", place)
    monkeypatch.setattr(script, "FOLDER", tmp_path / "kept")
    for name in ("user.name", "user.email"):
        script.git("config", name, "nobody")
    script.git("tag", "old")
    return script


def edit(script, before: str, after: str) -> None:
    path = script.ROOT / METHOD
    text = path.read_text("utf-8")
    assert text.count(before) == 1
    path.write_text(text.replace(before, after), "utf-8")


@pytest.mark.nightly
def test_a_planted_difference_is_found_and_nothing_is_run_again(script, capsys):
    edit(script, FIRST, f"self.ledger.counts['planted'] += 1\n        {FIRST}")
    assert script.main(["old", "--only", PIECE]) == 1  # the work tree
    told = capsys.readouterr()
    assert f"{PIECE}: 8 threads, counters: planted None and 200" in told.out
    assert "steps to" not in told.out and told.err.count(PIECE) == 2
    script.git("commit", "-qam", "planted")
    edit(script, "np.arange(n - k, n)", "np.arange(n - k, n)[::-1]")
    script.git("commit", "-qam", "in another order")
    assert script.main(["HEAD~1", "HEAD", "--only", PIECE]) == 1
    told = capsys.readouterr()
    assert f"{PIECE}: 1 threads, steps to 50: " in told.out
    assert "1 pieces, 1 differ, 0 failed" in told.out and told.err.count(PIECE) == 1
    assert script.main(["HEAD~1", "HEAD~1", "--only", PIECE]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.nightly
def test_a_piece_that_fails_and_a_line_that_was_cut(script, capsys):
    edit(script, FIRST, f"raise OSError('planted')\n        {FIRST}")
    assert script.main(["old", "--only", PIECE]) == 2
    assert f"{PIECE}: failed in the work tree: OSError: planted" in capsys.readouterr().out
    results = script.tree_of("old").results
    text = results.read_text("utf-8")
    results.write_text(text[:-10], "utf-8")
    script.git("checkout", "-q", METHOD)
    assert script.main(["old", "--only", PIECE]) == 0
    assert capsys.readouterr().err.count(PIECE) == 1 and results.read_text("utf-8") == text


@pytest.mark.parametrize("arguments", [["nothing"], ["old", "--only", "layer/none"]])
def test_wrong_arguments(script, capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments)
    assert arguments[-1] in capsys.readouterr().err


def test_a_sample_has_all_methods_and_architectures(script):
    names = script.tree_of("old").run("--list").communicate()[0].split()
    assert len({name.rpartition("/")[0] for name in names if name.startswith("layer")}) == 32
    sample = script.sample(names)
    for kind in ("layer", "model"):
        of_kind = {name.split("/")[1] for name in names if name.startswith(kind)}
        assert of_kind == {name.split("/")[1] for name in sample if name.startswith(kind)}
    assert len(sample) < len(names) / 2
