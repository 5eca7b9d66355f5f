"""``plan`` through the program's entry point."""

import json
from pathlib import Path

import command_line
import pytest
from tiny_models import make_model

from sparsekv_cli.commands.shared import progress
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.reading.sparse_prefill import summary_bytes
from sparsekv_cli.planning import kept, measure
from sparsekv_cli.settings.config import SessionConfig

KEYS = {"name", "weights_bytes", "kv_bytes", "index_bytes", "scratch_bytes", "fits"}
KEYS |= {"decode_tps", "pays_from"}


@pytest.fixture
def header(tmp_path, monkeypatch):
    """The header of a model, of which little is measured."""
    monkeypatch.setattr(measure, "DEPTHS", (256, 512))
    monkeypatch.setattr(measure, "QUICK_DEPTHS", (256, 512))
    monkeypatch.setattr(measure, "measure_bandwidth", lambda n_threads: 1e10)
    monkeypatch.setattr(kept, "user_cache", tmp_path.joinpath)
    monkeypatch.setattr(kept, "load_beyond_cores", lambda: None)
    path = make_model(tmp_path / "whole.gguf", n_layer=3)
    with open_gguf(path) as file:
        end = file.parts[0].data_offset
    path.write_bytes(path.read_bytes()[:end])
    return path


def call(capsys, *arguments):
    return command_line.call(capsys, "plan", *arguments)


def test_a_plan_as_json_and_as_a_table(header, capsys):
    given = ("-m", header, "-t", 1, "-c", 1000, "--methods", "full,streaming,fasa")
    code, out, err = call(capsys, *given, "--budget", 100, "--json")
    assert code == 0, err
    assert "measuring this machine" in err
    plan = json.loads(out)
    assert (plan["context"], plan["bandwidth"], plan["layers"]) == (1000, 1e10, 3)
    assert all(each.keys() >= KEYS for each in plan["methods"])
    full, streaming, fasa = plan["methods"]
    assert streaming["options"]["budget"] == "100"
    assert full["kv_bytes"] >= 1000 * 3 * 2 * 2 * 2 * 64
    assert full["fits"] and full["decode_tps"] > 0
    assert "calibrate" in fasa["note"]
    code, out, err = call(capsys, *given, "--budget", 100)
    assert code == 0 and "measuring" not in err and "times as fast as full" in err
    assert plan["is_believable"] and not any(each["is_dense"] for each in plan["methods"])
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["full", "streaming", "fasa"]


def test_the_time_to_read_is_that_of_the_way_of_reading(header, capsys, monkeypatch):
    """Both have the same speeds, which are measured once."""
    monkeypatch.setattr(measure.Measurement, "reading", lambda measurement: (1e-12, 1e-12))
    given = ("-m", header, "-t", 1, "-c", 60_000, "--methods", "full")
    plans = []
    for options in ([], ["--prefill-attention", "sparse", "--prefill-budget", 2048]):
        code, out, err = call(capsys, *given, *options, "--json")
        assert code == 0, err
        plans.append(json.loads(out))
        code, out, err = call(capsys, *given, *options)
        how = "sparsely (--prefill-budget 2048)" if options else "densely"
        assert f"{plans[-1]['reading_s']:.1f} s for the whole context, {how}" in out
    dense, sparse = plans
    assert (dense["prefill_budget"], sparse["prefill_budget"]) == (None, 2048)
    assert 0 < sparse["reading_s"] < 0.8 * dense["reading_s"]
    with open_gguf(header, header_only=True) as file:
        summaries = summary_bytes(read_hparams(file).layers, 60_000)
    of_dense, of_sparse = (plan["methods"][0]["scratch_bytes"] for plan in plans)
    assert of_sparse - of_dense == summaries > 60_000


def test_what_reading_takes_is_measured(header):
    with open_gguf(header, header_only=True) as file:
        config = SessionConfig(device="cpu", threads=1)
        products, attention = measure.Measurement(file, config, is_quick=True).reading()
    assert 0 < products < 1e-8 and 0 <= attention < 1e-8


def test_a_busy_machine_is_told(header, capsys, monkeypatch):
    for module in (kept, progress):
        monkeypatch.setattr(module, "load_beyond_cores", lambda: (9.0, 2))
    given = "-m", header, "-t", 1, "-c", 1000, "--methods", "full,streaming"
    code, out, err = call(capsys, *given)
    assert code == 0 and err.count("the machine is busy (load 9.0 on 2 cores)") == 1
    assert "no method is ranked, because the speeds are not to be believed" in err
    assert "measured t/s: full " in err and "times as fast" not in err and "t/s" not in out
    code, out, _ = call(capsys, *given, "--json")
    assert code == 0 and json.loads(out)["is_believable"] is False


def test_a_method_that_is_dense_there_says_so(header, capsys):
    given = "-m", header, "-t", 1, "-c", 1000, "--methods", "full,quest", "--sparse-from", 2000
    code, out, _ = call(capsys, *given)
    full, quest = out.splitlines()[-2:]
    assert code == 0 and "dense" not in full and ", dense below 2,000 tokens" in quest
    methods = json.loads(call(capsys, *given, "--json")[1])["methods"]
    assert [each["is_dense"] for each in methods] == [False, True]


def test_what_does_not_fit_is_told(header, capsys, monkeypatch):
    from sparsekv_cli.planning import plan

    monkeypatch.setattr(plan, "available_memory", lambda: 1 << 20)
    code, out, _ = call(capsys, "-m", header, "-t", 1, "-c", 4096, "--methods", "full")
    assert code == 0 and "1.00 MiB available" in out
    assert "no" in out.splitlines()[-1].split()


@pytest.mark.parametrize(
    ("in_cache", "reason"),
    [(Path("/dev/null").joinpath, "kept there"), (lambda name: None, "kept: there is no home")],
)
def test_speeds_that_cannot_be_kept_are_used(in_cache, reason, header, capsys, monkeypatch):
    monkeypatch.setattr(kept, "user_cache", in_cache)
    code, out, err = call(capsys, "-m", header, "-t", 1, "-c", 1000, "--methods", "full")
    assert code == 0 and "full" in out.splitlines()[-1]
    assert "warning: " in err and f"speeds cannot be {reason}" in err


def test_a_model_of_windows_alone_is_told(tmp_path, capsys):
    path = make_model(tmp_path / "windows.gguf", arch="gemma3", n_layer=3)
    code, _, err = call(capsys, "-m", path)
    assert code == 1 and "no layer of this model attends to all rows" in err
