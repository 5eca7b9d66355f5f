"""``compare`` on a tiny model: the JSON of the contract, the table, and what is refused."""

import json
import os
import re
import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any

import calibrated_method
import numpy as np
import pytest
from tiny_models import make_model

from sparsekv_cli import warmup
from sparsekv_cli.evaluation import compare as comparison
from sparsekv_cli.evaluation import needles, prefill
from sparsekv_cli.evaluation.report import figures

Invoke = Callable[..., Any]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TEXT = "the quick brown fox jumps over the lazy dog and runs away " * 8
CONTRACT = {
    "name", "options", "kld_mean", "top1_agreement", "attn_mass_recall", "topk_overlap",
    "rows_attended_mean", "rows_scored_mean", "bytes_host", "bytes_device", "decode_tps", "ttft_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    make_model(path, n_layer=3, n_embd=128, n_ff=128, chat_template=TEMPLATE, n_ctx=700)
    return str(path)


def compare(invoke: Invoke, model: str, *arguments: str, stdin: bytes = b"") -> dict[str, Any]:
    base = ["-m", model, "-t", "1", "--prefill-dtype", "f32", "--json"]
    result = invoke("compare", *base, *arguments, stdin=stdin)
    assert result.code == 0, result.err
    return json.loads(result.out)


def refused(invoke: Invoke, code: int, *arguments: str) -> str:
    result = invoke("compare", *arguments)
    assert (result.code, result.out) == (code, ""), result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    return result.err


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """The load that the command sees: none, or what a test puts in."""
    found: list[tuple[float, int]] = []
    module = import_module("sparsekv_cli.commands.compare.compare")
    monkeypatch.setattr(module, "load_beyond_cores", lambda: found[0] if found else None)
    return found


def test_a_busy_machine_gives_no_ranking_by_speed(model, invoke, load):
    load.append((9.0, 2))
    given = ["-p", TEXT, "--methods", "full,streaming", "--steps", "4", "--budget", "20%"]
    found = compare(invoke, model, *given)
    assert found["is_busy"] and found["front"] == [] and found["methods"][1]["decode_tps"] > 0
    result = invoke("compare", "-m", model, *given)
    _title, head, *_ = result.out.splitlines()
    assert result.code == 0 and "KLD" in head and "tokens/s" not in head
    assert "no ranking by speed: the machine was busy" in result.out
    assert "tokens/s, equal within noise" not in result.out


def test_json(model, invoke):
    methods = "full,topk:budget=10%,lfps:preset=paper;budget=10%,streaming"
    found = compare(
        invoke, model, "-p", TEXT, "--methods", methods, "--steps", "8", "--budget", "20%"
    )
    assert found["context"] > 200 and found["steps"] == 8 and found["model"]
    full, topk, lfps, streaming = found["methods"]
    for row in found["methods"]:
        assert set(row) >= CONTRACT and row["decode_tps"] > 0 and row["ttft_s"] > 0
        assert all(low <= row[each] <= high for each, (low, high) in row["intervals"].items())
    assert [row["name"] for row in found["methods"]] == ["full", "topk", "lfps", "streaming"]
    assert (full["kld_mean"], full["top1_agreement"], full["topk_overlap"]) == (0, 1, None)
    assert topk["options"]["budget"] == "10%" and streaming["options"]["budget"] == "20%"
    assert (lfps["options"]["expand"], lfps["spec"]) == ("filtered", "lfps:preset=paper;budget=10%")
    assert topk["kld_mean"] > 0 and 0 < topk["attn_mass_recall"] < 1
    assert topk["recall"]["layers"] == [2] and len(topk["recall"]["heads"][0]) == 4
    assert np.mean(topk["recall"]["heads"]) == pytest.approx(topk["attn_mass_recall"])
    assert topk["attn_mass_recall"] <= topk["oracle_mass_recall"] + 1e-6 and not found["needles"]
    assert full["recall"] == {"layers": [], "heads": []} and found["front"][-1] == max(
        found["methods"], key=lambda row: row["decode_tps"]
    )["spec"]  # fmt: skip
    assert topk["rows_attended_mean"] < streaming["rows_attended_mean"]
    assert streaming["rows_attended_mean"] < full["rows_attended_mean"]
    assert topk["rows_scored_mean"] == full["rows_scored_mean"]


def test_prompts(model, invoke, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT + "\n")
    common = ["--methods", "topk", "--steps", "4"]
    contexts = [
        compare(invoke, model, *common, "-f", str(file))["context"],
        compare(invoke, model, *common, "-f", "-", stdin=file.read_bytes())["context"],
        compare(invoke, model, *common, stdin=file.read_bytes())["context"],
        compare(invoke, model, *common, "-p", TEXT)["context"],
        compare(invoke, model, *common, "-p", TEXT, "--raw")["context"],
    ]
    # The template adds <|im_start|> and <|im_end|>; BOS is <|im_start|> as well.
    assert contexts[:4] == [contexts[4] + 1] * 4


def test_continuation(model, invoke, tmp_path):
    file = tmp_path / "next.txt"
    file.write_text("and then it sleeps in the inn")
    common = ["-p", TEXT, "--methods", "streaming"]
    given = compare(invoke, model, *common, "--continuation", str(file))
    n_steps = given["methods"][0]["rows_attended_mean"] - given["context"]
    assert 5 < 2 * n_steps - 1 < 40  # as many steps as the text has tokens
    fewer = compare(invoke, model, *common, "--continuation", str(file), "--steps", "4")
    assert fewer["methods"][0]["rows_attended_mean"] == fewer["context"] + 2.5
    own = compare(invoke, model, *common, "--steps", "4")
    assert own["methods"][1]["kld_mean"] != fewer["methods"][1]["kld_mean"]
    arguments = ["-m", model, *common, "--continuation", str(file), "--prefill-dtype", "f32"]
    assert "too few for 400 steps" in refused(invoke, 1, *arguments, "--steps", "400")
    file.write_text("a")
    assert "too few for 4 steps" in refused(invoke, 1, *arguments)


def test_table(model, invoke, tmp_path, monkeypatch):
    result = invoke("compare", "-m", model, "-p", TEXT, "--methods", "lfps", "--steps", "6")
    assert result.code == 0
    lines = result.out.splitlines()
    assert "6 steps" in lines[0] and max(len(line) for line in lines) <= 170
    assert "KLD, equal within noise: " in result.out
    (head,) = [line.split() for line in lines if " KLD " in line]
    assert head[:3] == ["method", "KLD", "top-1"]
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1] > ["a"]}
    assert rows["full"][1:5] == ["0.0000", "100%", "-", "-"] and rows["lfps"][3].endswith("%")
    full = OSError(28, "No space left on device")
    page = "sparsekv_cli.evaluation.report.page.page"
    monkeypatch.setattr(page, lambda _: (_ for _ in ()).throw(full))
    given = ("--methods", "lfps", "--steps", "6", "--html", str(tmp_path / "r.html"))
    result = invoke("compare", "-m", model, "-p", TEXT, *given)
    assert result.code == 1 and "r.html: No space" in result.err and " KLD " in result.out


def test_reports(model, invoke, tmp_path, monkeypatch):
    """A sweep with needles, as JSON, page and picture. The page loads nothing."""
    monkeypatch.setattr(needles, "DEPTHS", (0.0, 1.0))
    monkeypatch.setattr("sys.argv", ["", "compare", "\udcff"])  # a name that is not UTF-8
    monkeypatch.setattr(needles, "FACT", "fox {}. ")
    page, picture = tmp_path / "r.html", tmp_path / "r.png"
    found = compare(
        invoke, model, "-p", TEXT.replace(" and ", ". ") * 2, "--methods", "topk",
        "--sweep", "budget=10%,50%", "--steps", "6", "--needles", "128,200",
        "--html", str(page), "--png", str(picture),
    )  # fmt: skip
    specs = [row["spec"] for row in found["methods"]]
    assert specs == ["full", "topk:budget=10%", "topk:budget=50%"]
    assert [(n["length"], n["depth"]) for n in found["needles"]] == [
        (128, 0.0), (128, 1.0), (200, 0.0), (200, 1.0)
    ]  # fmt: skip
    for needle in found["needles"]:
        assert needle["length"] - 40 < needle["tokens"] <= needle["length"]
        assert list(needle["found"]) == specs
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = page.read_text("utf-8")
    assert text.count("<svg") == 3 and "budget=50%" in text and "prefers-color-scheme" in text
    assert "fill: var(--ink)" in text and "<script" not in text and text.count("<title>") == 4
    loaded = re.findall(r"""(?:src|href)=["']([^"']*)|url\(([^)]*)\)|@import""", text)
    assert all(link.startswith(("#", "data:")) for pair in loaded for link in pair if link)


@pytest.mark.parametrize(("during", "n_done"), [("topk", 1), ("full", 0)])
def test_ctrl_c_costs_no_finished_method(during, n_done, model, invoke, monkeypatch):
    real = comparison.method_result

    def result(spec: str, *arguments: Any) -> Any:
        if spec == during:
            signal.raise_signal(signal.SIGINT)
        return real(spec, *arguments)

    monkeypatch.setattr(comparison, "method_result", result)
    given = ["-p", TEXT, "--methods", "topk,lfps", "--steps", "4", "--json"]
    found = invoke("compare", "-m", model, *given)
    is_told = "stopped: 1 of 3 methods have finished" in found.err
    assert (found.code, is_told) == (130, n_done > 0)
    assert len(json.loads(found.out or '{"methods": []}')["methods"]) == n_done


def test_a_calibrated_method(model, invoke, monkeypatch):
    fake = calibrated_method.install(monkeypatch)
    arguments = ["-m", model, "-p", TEXT, "--methods", "fake", "--steps", "4"]
    first = invoke("compare", *arguments)
    assert first.code == 0 and "calibrating fake" in first.err and "stored in" in first.err
    assert "fake" in first.out
    again = invoke("compare", *arguments)
    assert again.code == 0 and "calibrat" not in again.err and len(fake.runs) == 1


def test_cache_types(model, invoke):
    """The reference keeps f16, whatever the others have."""
    methods = "full:cache_type_k=q8_0,topk:cache_type_v=f16"
    types = ["-ctk", "q8_0", "-ctv", "q8_0"]
    found = compare(invoke, model, "-p", TEXT, "--methods", methods, "--steps", "8", *types)
    rows = found["methods"]
    options = [(o["cache_type_k"], o["cache_type_v"]) for o in (row["options"] for row in rows)]
    assert options == [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")]
    exact, full, topk = rows
    assert 0 == exact["kld_mean"] < full["kld_mean"] < topk["kld_mean"]
    assert full["bytes_host"] < topk["bytes_host"] < exact["bytes_host"]
    assert "freekv" in refused(
        invoke, 2, "-m", model, "-p", TEXT, "--methods", "full,freekv", "-ctk", "q8_0"
    )


def test_what_cannot_be_done(model, invoke, tmp_path, monkeypatch):
    compare(invoke, model, "-p", TEXT, "--steps", "4")  # compiles, with a word about it
    base = ["-m", model, "-p", TEXT, "--prefill-dtype", "f32"]
    assert "choose from" in refused(invoke, 2, *base, "--methods", "fulll")
    assert "its options" in refused(invoke, 2, *base, "--methods", "topk:a=1")
    assert "'scored_by'" in refused(invoke, 2, *base, "--methods", "topk", "-o", "scored_by=group")
    twice = ["-o", "budget=3", "--budget", "4"]
    assert "given twice" in refused(invoke, 2, *base, *twice)
    assert "--steps" in refused(invoke, 2, *base, "--steps", "3")
    assert "OPTION=VALUE" in refused(invoke, 2, *base, "--sweep", "budget")
    assert "'bugdet' (did you mean budget?)" in refused(invoke, 2, *base, "--sweep", "bugdet=1")
    assert "128 or more" in refused(invoke, 2, *base, "--needles", "1024,100")
    assert "too short" in refused(invoke, 1, *base, "--steps", "4", "--needles", "600")
    assert "do not fit" in refused(invoke, 1, *base, "--steps", "4", "--needles", "690")
    assert "there is no folder" in refused(invoke, 1, *base, "--png", str(tmp_path / "no" / "a"))
    assert "cannot be written" in refused(invoke, 1, *base, "--html", str(tmp_path))
    assert "cannot be written" in refused(invoke, 1, *base, "--html", os.devnull)
    empty = ("--continuation", os.devnull)
    assert "the continuation is empty" in refused(invoke, 1, *base, *empty)
    with monkeypatch.context() as without:
        without.setattr(figures, "find_spec", lambda name: None)
        assert "sparsekv-cli[plot]" in refused(invoke, 1, *base, "--png", "a.png")
    assert "do not fit" in refused(invoke, 1, *base, "-c", "100")
    assert "do not fit" in refused(invoke, 1, *base, "--steps", "600")
    missing = str(tmp_path / "missing.txt")
    assert "missing.txt" in refused(invoke, 1, *base, "--continuation", missing)
    assert "missing.gguf" in refused(invoke, 1, "-m", "missing.gguf", "-p", TEXT)


def test_compiling_is_said_once(model, invoke, monkeypatch):
    """Though kernels are compiled for the model, and then for each method."""
    real = warmup._run

    def run(steps: Any, report: Any) -> int:
        if report is not None:
            report("something", 0, 1)
        return real(steps, report)

    monkeypatch.setattr(warmup, "_run", run)
    result = invoke("compare", "-m", model, "-p", TEXT, "--methods", "topk", "--steps", "4")
    assert result.code == 0 and result.err.count("compiling kernels") == 1


def test_on_a_gpu(tmp_path, invoke, monkeypatch, few_programs):
    monkeypatch.setattr(prefill, "N_TRIAL_STEPS", 1)
    path = tmp_path / "m.gguf"
    make_model(path, n_layer=1, n_embd=32, n_ff=32, n_vocab=270, head_dim=32, wtype="F32")
    arguments = ["-p", "a quick fox", "--raw", "--methods", "topk", "--steps", "4"]
    full, topk = compare(invoke, str(path), *arguments, "--device", "cuda")["methods"]
    assert full["bytes_device"] == topk["bytes_device"] > 0
    assert topk["kld_mean"] == 0 and topk["attn_mass_recall"] is None
