"""scripts/gpu/first: limits of stages, what is left of one that is cut, carried kernels."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from scripts_as_modules import load_script


@pytest.fixture(scope="module")
def first():
    return load_script("gpu/first")


def stage(first, name, code, limit=20.0, beside=False):
    return first.Stage(name, limit, [sys.executable, "-c", code], beside)


def test_a_stage_that_is_cut_or_fails_costs_the_others_nothing(first, tmp_path, capsys):
    """A cut stage ends with all that it has started, and what it has said is kept."""
    number = tmp_path / "number"
    sleeper = (
        "import subprocess, sys, time; print('begun', flush=True);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(number)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    chosen = [
        stage(first, "beside", "print('next to the others')", beside=True),
        stage(first, "slow", sleeper, 1.5),
        stage(first, "fails", "raise SystemExit(3)"),
        stage(first, "works", "print('done')"),
    ]
    out = tmp_path / "out"
    out.mkdir()
    begin = time.monotonic()
    assert first.run(chosen, os.environ, out, tmp_path, 30) == 2
    assert time.monotonic() - begin < 200
    child = Path("/proc", number.read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"
    log = (out / "first.log").read_text(encoding="utf-8")
    assert log == capsys.readouterr().out
    lines = [line.rpartition(",")[0] for line in log.splitlines() if line.startswith("===")]
    assert lines == ["=== slow: cut at its limit", "=== fails: status 3", "=== works: ok",
                     "=== beside: ok"]  # fmt: skip
    assert "begun" in log and "done" in log and "next to the others" in log


def test_no_stage_begins_behind_the_end(first, tmp_path, capsys):
    assert first.run([stage(first, "late", "print(1)")], os.environ, tmp_path, tmp_path, 0.5) == 1
    assert "=== late: no time left" in capsys.readouterr().out


def test_kernels_travel_by_name_and_fit_one_library_only(first, tmp_path, monkeypatch):
    import gpu_carry

    for name in ("CARRY", "KERNELS", "MANIFEST", "CACHE"):
        value = tmp_path / Path(getattr(gpu_carry, name)).name
        monkeypatch.setattr(gpu_carry, name, value)
    kernel = gpu_carry.CACHE / "ABC" / "_attend.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"code")
    (kernel.parent / "__grp___attend.json").write_text("{}")
    (kernel.parent / "_attend.ptx").write_text("not needed")
    assert not gpu_carry.kernels_fit()
    assert gpu_carry.pack_kernels() == 1
    gpu_carry.MANIFEST.write_text(json.dumps({"libtriton.so": gpu_carry.library_hash()}))
    assert gpu_carry.kernels_fit()
    for path in kernel.parent.iterdir():
        path.unlink()
    gpu_carry.unpack_kernels()
    assert sorted(path.name for path in kernel.parent.iterdir()) == [
        "__grp___attend.json", "_attend.cubin"
    ]  # fmt: skip
    assert kernel.read_bytes() == b"code"
    gpu_carry.MANIFEST.write_text(json.dumps({"libtriton.so": "another"}))
    assert not gpu_carry.kernels_fit()


def test_stages_are_those_of_the_bench(first, tmp_path):
    """Each part of the bench is a stage, and unknown ones are refused."""
    bench = load_script("gpu/bench")
    stages = first.stages(False, tmp_path, 2, {"freekv": 7.0}, "")
    assert set(bench.PARTS) - {"memory"} <= {each.name for each in stages}
    # Kernels that are carried are not compiled there.
    limits = {x.name: x.limit for x in stages if not x.asked and x.name != "compile"}
    assert sum(limits.values()) <= first.SECONDS and list(limits)[:3] == ["probe", "warmup", "host"]
    assert [(x.name, x.limit) for x in stages if x.asked] == [("device", 110), ("freekv", 7.0)]
    with pytest.raises(SystemExit):
        first.main(["--only", "nothing", "--out", str(tmp_path)])


def test_commands_beside_the_cpus(tmp_path, monkeypatch, capsys):
    """A check that fails makes the status 1, and the others run."""
    script = load_script("gpu/gpu_commands.py")
    result = tmp_path / "commands.json"
    arguments = ["gpu_commands", "-m", "no-such.gguf", "--json", str(result), "--tiny"]
    monkeypatch.setattr("sys.argv", [*arguments, "--match", "doctor,full", "--workers", "1"])
    assert script.main() == 1
    rows = {row["command"]: row for row in json.loads(result.read_text())["commands"]}
    assert rows["doctor"]["ok"] and not rows["run full"]["ok"]
    assert "no-such.gguf" in rows["run full"]["result"]
    assert "2 checks, 1 failed" in capsys.readouterr().out
    assert script.alike("abc", "abc") == "same"
    assert script.alike("abc", "abd") == "same for 2 of 3 characters"
    with pytest.raises(AssertionError, match="'xyz', not 'abc'"):
        script.alike("abc", "xyz")
