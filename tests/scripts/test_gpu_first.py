"""scripts/gpu/first: limits of stages, what is left of one that is cut, carried kernels."""

import json
import os
import shutil
import subprocess
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


def move_carried(module, folder, monkeypatch):
    for name in ("ROOT", "CARRY", "KERNELS", "MANIFEST", "CACHE"):
        value = folder / Path(getattr(module, name)).name if name != "ROOT" else folder
        monkeypatch.setattr(module, name, value, raising=False)


def write_kernel(cache, name):
    kernel = cache / name / "_attend.cubin"
    kernel.parent.mkdir(parents=True, exist_ok=True)
    kernel.write_bytes(b"code of " + name.encode())
    (kernel.parent / "__grp___attend.json").write_text("{}")
    (kernel.parent / "_attend.ptx").write_text("not needed")
    return kernel


def test_kernels_travel_by_name_and_fit_one_library_only(first, tmp_path, monkeypatch):
    import gpu_carry

    move_carried(gpu_carry, tmp_path, monkeypatch)
    kernel = write_kernel(gpu_carry.CACHE, "ABC")
    assert not gpu_carry.kernels_fit()
    assert gpu_carry.pack_kernels(["ABC"]) == 1
    gpu_carry.MANIFEST.write_text(json.dumps({"libtriton.so": gpu_carry.library_hash()}))
    assert gpu_carry.kernels_fit()
    for path in kernel.parent.iterdir():
        path.unlink()
    gpu_carry.unpack_kernels()
    assert sorted(path.name for path in kernel.parent.iterdir()) == [
        "__grp___attend.json", "_attend.cubin"
    ]  # fmt: skip
    assert kernel.read_bytes() == b"code of ABC"
    gpu_carry.MANIFEST.write_text(json.dumps({"libtriton.so": "another"}))
    assert not gpu_carry.kernels_fit()


def test_a_pass_keeps_what_is_compiled_and_removes_what_nothing_launches(tmp_path, monkeypatch):
    import gpu_carry

    pack = load_script("gpu/pack")
    for module in (gpu_carry, pack):
        move_carried(module, tmp_path, monkeypatch)
    monkeypatch.setattr(pack, "library_of", lambda folder: "library")
    made: list[str] = []

    def compile_all(launched, end=None):
        """Stands for gpu_compile.py: makes what is absent, and may be interrupted."""

        def compile_kernels(folder, option, used):
            assert option == "--used"
            for name in launched[:end]:
                if not (gpu_carry.CACHE / name).exists():
                    write_kernel(gpu_carry.CACHE, name)
                    made.append(name)
            if end is not None:
                raise pack.PackError("interrupted")
            used.write_text(json.dumps(launched))

        monkeypatch.setattr(pack, "compile_kernels", compile_kernels)
        pack.pack_all(["kernels"], tmp_path, None)

    def carried():
        """What another machine finds: its cache is empty at first."""
        gpu_carry.CACHE.rename(tmp_path / "aside")
        gpu_carry.unpack_kernels()
        names = sorted(path.parent.name for path in gpu_carry.CACHE.rglob("*.cubin"))
        shutil.rmtree(gpu_carry.CACHE)
        (tmp_path / "aside").rename(gpu_carry.CACHE)
        return names

    with pytest.raises(pack.PackError):
        compile_all(["A", "B", "C"], 2)
    unfinished = gpu_carry.CACHE / "B" / "tmp.pid_1" / "_attend.cubin"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")
    compile_all(["A", "B", "C"])
    assert made == ["A", "B", "C"] and carried() == ["A", "B", "C"]
    compile_all(["B", "C", "D"])
    assert made == ["A", "B", "C", "D"] and carried() == ["B", "C", "D"]
    with pytest.raises(pack.PackError):
        compile_all(["D", "E"], 2)
    assert carried() == ["B", "C", "D"]  # nothing is removed before all is compiled
    shutil.rmtree(gpu_carry.CACHE)
    compile_all(["C", "D"])  # from the archive
    assert made == ["A", "B", "C", "D", "E"] and carried() == ["C", "D"]


@pytest.mark.nightly
def test_a_second_pass_finds_what_the_first_has_compiled(first, tmp_path):
    """Both tell the same folders of the cache. Without ``--forbid`` the launches may compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cache, used = tmp_path / "cache", tmp_path / "used.json"
    for n_compiled, n_found, options in ((2, 0, ()), (0, 2, ("--forbid",))):
        script = first.SCRIPTS / "gpu_compile.py"
        command = [sys.executable, "-P", script, cache, "--only", "clock", "--used", used, *options]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        told = json.loads(done.stdout)
        assert (told["compiled"], told["found"], told["error"]) == (n_compiled, n_found, "")
        assert json.loads(used.read_text()) == sorted(path.name for path in cache.iterdir())


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
