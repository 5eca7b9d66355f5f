"""``eval perplexity`` and ``eval kld`` on a tiny model: what they print and what is refused."""

import json
import os
import shutil
from importlib import import_module
from pathlib import Path

import calibrated_method
import pytest
from tiny_models import make_model

TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 8
LFPS = "lfps:budget=4;dense_layers=none"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model and a text."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "text").write_text(TEXT)
    return str(make_model(folder / "m.gguf", n_embd=128, n_ff=128)), str(folder / "text")


def evaluated(invoke, what, model, *arguments):
    result = invoke("eval", what, "-m", model, "-t", "1", "--json", *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_perplexity(files, invoke):
    model, text = files
    size = ["-f", text, "-c", "40", "--chunks", "2"]
    plain = evaluated(invoke, "perplexity", model, *size)
    assert set(plain) >= {"ppl", "ppl_stderr", "n_tokens"} and plain["n_tokens"] == 38
    found = evaluated(invoke, "perplexity", model, *size, "--method", "full", "--method", LFPS)
    full, lfps = found["methods"]
    assert found["ppl"] == full["ppl"] == pytest.approx(plain["ppl"], rel=0.02)
    assert full["rows_attended_mean"] == 30 > 2 * lfps["rows_attended_mean"]
    assert lfps["ppl"] != full["ppl"] and lfps["options"]["budget"] == "4"
    assert evaluated(invoke, "perplexity", model, *size, "--method", LFPS)["ppl"] == lfps["ppl"]
    shown = invoke("eval", "perplexity", "-m", model, *size, "--method", "full", "-t", "1")
    title, head, row = shown.out.splitlines()
    assert title == "2 chunks of 40 tokens, 19 scored in each:"
    assert head.split() == ["method", "PPL", "+/-", "tokens", "attended"]
    assert row.split() == ["full", f"{full['ppl']:.4f}", f"{full['ppl_stderr']:.5f}", "38", "30"]
    one = invoke("eval", "perplexity", "-m", model, *size[:-1], "1")
    assert one.out.startswith("1 chunk of 40 tokens, ")


def test_records_of_another_calibration_do_not_count(files, invoke, tmp_path, monkeypatch):
    """Whether it was named or made again where the model has it."""
    model, text = shutil.copy(files[0], tmp_path), files[1]
    calibrated_method.install(monkeypatch)
    for name in ("one", "other", "third"):
        (tmp_path / name).write_text(20 * f"{name} {TEXT}")

    def calibrated(name, *output):
        given = ["-m", model, "--method", "fake", "-f", str(tmp_path / name)]
        assert invoke("calibrate", *given, *output).code == 0

    rows, given = tmp_path / "r.jsonl", ["-f", text, "-c", "40", "--chunks", "1"]
    given += ["--method", "full", "--method", "fake", "--jsonl", str(rows)]
    calibrated("one")
    for _ in range(2):
        evaluated(invoke, "perplexity", model, *given)
    calibrated("other")
    evaluated(invoke, "perplexity", model, *given)
    named = str(tmp_path / "named.npz")
    calibrated("third", "--output", named)
    evaluated(invoke, "perplexity", model, *given, "--calibration", named)
    records = [json.loads(line) for line in rows.read_text().splitlines()[1:]]
    assert [record["name"] for record in records] == ["full", "fake", "fake", "fake"]
    assert len({record.get("calibration") for record in records}) == 4
    result = invoke("eval", "ruler", "-m", model, "--lengths", "3000000000")
    assert result.code == 2 and "a context of 3000000000 tokens" in result.err


def test_kld_to_a_file_and_to_full(files, invoke, tmp_path):
    (model, text), base = files, str(tmp_path / "base")
    size = ["-f", text, "-c", "40", "--chunks", "2"]
    evaluated(invoke, "perplexity", model, *size, "--method", "full", "--kl-divergence-base", base)
    by_file = evaluated(invoke, "kld", model, "--kl-divergence-base", base, "--method", LFPS)
    by_full = evaluated(invoke, "kld", model, *size, "--method", LFPS)
    (one,), (full, other) = by_file["methods"], by_full["methods"]
    assert (by_file["base"], by_full["base"]) == (base, "full") and full["kld_mean"] < 1e-6
    assert one["kld_mean"] == pytest.approx(other["kld_mean"], rel=0.02) != 0
    assert one["statistics"]["Mean KLD"]["value"] == one["kld_mean"] and one["n_tokens"] == 38
    plain = evaluated(invoke, "kld", model, "--kl-divergence-base", base, "--chunks", "1")
    assert plain["methods"][0]["spec"] == "prefill" and plain["n_chunks"] == 1
    shown = invoke("eval", "kld", "-m", model, *size, "--method", LFPS, "-t", "1").out
    lines = {line[:32].strip(): line[32:] for line in shown.splitlines()}
    mean = other["statistics"]["Mean KLD"]
    assert f"{mean['value']:.6f} ± {mean['stderr']:.6f}" in lines["Mean KLD"]
    assert lines["Same top p"].rstrip().endswith("%")
    assert not lines["Mean ln(PPL(Q)/PPL(base))"].rstrip().endswith("%")


@pytest.mark.parametrize(
    ("what", "arguments", "code", "said"),
    [
        ("perplexity", ["--method", "fulll"], 2, "choose from"),
        ("perplexity", ["--method", "full,lfps", "--kl-divergence-base", "x"], 2, "one method"),
        ("perplexity", ["-f", os.devnull], 1, "the text is empty: give -f FILE, or pipe"),
        ("perplexity", ["-c", "3"], 2, "ctx-size"),
        ("perplexity", ["-c", "1000"], 1, "needs 2000"),
        ("perplexity", ["--budget", "5%"], 2, "none of the methods has an option 'budget'"),
        ("perplexity", ["-ctk", "q8_0"], 2, "name another method"),
        ("kld", [], 2, "nothing to compare"),
        ("kld", ["--kl-divergence-base", "x"], 2, "leave -f and -c out"),
        ("perplex", [], 2, "No such command"),
    ],
)
def test_what_cannot_be_done(files, invoke, what, arguments, code, said):
    model, text = files
    base = ["-m", model, *([] if "-f" in arguments else ["-f", text])]
    result = invoke("eval", what, *base, *arguments)
    assert (result.code, result.out) == (code, "") and said in result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1


def test_a_method_that_selects_rows_gets_longer_chunks(files, invoke, tmp_path):
    model, long = files[0], tmp_path / "long"
    long.write_text(TEXT * 20)
    given = ["-f", str(long), "--chunks", "1"]
    plain = evaluated(invoke, "perplexity", model, *given)
    result = invoke("eval", "kld", "-m", model, "-t", "1", "--json", *given, "--method", LFPS)
    found = json.loads(result.out)
    assert (
        plain["n_ctx"] == 512 < found["n_ctx"]
        and f"chunks of {found['n_ctx']} tokens" in result.err
    )
    named = evaluated(invoke, "kld", model, *given, "-c", "64", "--method", LFPS)
    assert named["n_ctx"] == 64


def test_a_short_text_is_refused_before_the_model_is_loaded(files, invoke, tmp_path, monkeypatch):
    """Kernels may take a minute to compile."""
    (tmp_path / "one").write_text("one")
    one = ["-f", str(tmp_path / "one")]

    def never(*_arguments, **_options):
        raise AssertionError("the model is loaded")

    for module in ("eval.options", "compare.compare", "calibrate"):
        monkeypatch.setattr(import_module(f"sparsekv_cli.commands.{module}"), "load_model", never)
    for line in (
        ["eval", "perplexity", *one],
        ["eval", "kld", "--method", "lfps", *one],
        ["eval", "ruler", "--lengths", "5"],
        ["calibrate", *one],
        ["compare", "-p", "a", "--continuation", one[1]],
    ):
        result = invoke(*line, "-m", files[0])
        assert result.code == 1 and result.err.count("\n") == 1, result.err
        assert "unexpected" not in result.err


def test_a_file_that_is_no_base(files, invoke):
    model, text = files
    result = invoke("eval", "kld", "-m", model, "--kl-divergence-base", text)
    assert result.code == 1 and result.err.count("\n") == 1
    assert Path(text).name in result.err and "eval perplexity" in result.err


RULER = ["--lengths", "500", "--samples", "2", "--tasks", "niah_single_1,fwe", "-n", "6"]


def test_ruler(files, invoke, tmp_path):
    model, path = files[0], str(tmp_path / "r.jsonl")
    found = evaluated(invoke, "ruler", model, *RULER, "--raw")
    (full,) = found["results"]
    assert (full["name"], full["length"], full["average"]["n"]) == ("full", 500, 4)
    assert set(full["tasks"]) == {"niah_single_1", "fwe"} and found["configuration"]["seed"] == 42
    kept = [*RULER, "--raw", "--jsonl", path]
    assert evaluated(invoke, "ruler", model, *kept) == found
    lines = Path(path).read_text().splitlines()
    assert len(lines) == 5
    more = evaluated(invoke, "ruler", model, *kept, "--method", "full", "--method", LFPS)
    assert more["results"][0] == full and more["results"][1]["spec"] == LFPS
    assert more["results"][1]["rows_attended_mean"] < full["rows_attended_mean"]
    assert Path(path).read_text().splitlines()[:5] == lines
    assert Path(path).read_text().count("\n") == 9
    shown = invoke("eval", "ruler", "-m", model, "-t", "1", *kept, "--method", LFPS)
    title, head, row = shown.out.splitlines()
    assert title == "2 samples of each task:" and head.split()[:3] == [
        "method",
        "length",
        "average",
    ]
    assert row.split()[:2] == [LFPS, "500"] and Path(path).read_text().count("\n") == 9
    other = invoke("eval", "ruler", "-m", model, *kept, "--question-by", "decode")
    assert (other.code, other.err.count("\n")) == (1, 1)
    assert "question_by 'prefill', not 'decode'" in other.err


def test_ruler_says_how_far_it_is(files, invoke):
    result = invoke("eval", "ruler", "-m", files[0], "-t", "1", *RULER)
    assert [line for line in result.err.splitlines() if " at 500: full" in line] != []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tasks", "niah_double"], 2, "choose from niah_single_1"),
        (["--lengths", "1024,x"], 2, "list of whole numbers"),
        (["--lengths", "64"], 1, "give a greater one"),
        (["--lengths", "512", "--tasks", "niah_single_1,vt"], 1, "vt takes at least"),
        (["--method", "full,a=1"], 2, "options"),
    ],
)
def test_ruler_refuses(files, invoke, arguments, code, said):
    result = invoke("eval", "ruler", "-m", files[0], *arguments)
    assert (result.code, result.out) == (code, "") and said in result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1


def test_on_a_gpu(tmp_path, invoke, few_programs):
    """Each method has a prefill of its own there; what is scored is the same."""
    model = make_model(
        tmp_path / "m.gguf", n_layer=1, n_embd=32, n_ff=32, n_vocab=270, head_dim=32, wtype="F32"
    )
    text = tmp_path / "text"
    text.write_text("a quick brown fox")
    arguments = [
        "-f", str(text), "-c", "6", "--chunks", "1", "--method", "full", "--method", "topk",
    ]  # fmt: skip
    found = [
        evaluated(invoke, "perplexity", str(model), *arguments, "--device", device)
        for device in ("cuda", "cpu")
    ]
    assert found[0]["n_tokens"] == 2
    for cuda, cpu in zip(*(each["methods"] for each in found), strict=True):
        assert cuda["ppl"] == pytest.approx(cpu["ppl"], rel=0.01)
        assert cuda["rows_attended_mean"] == cpu["rows_attended_mean"]
