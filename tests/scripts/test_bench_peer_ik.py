"""scripts/bench/peer with ik_llama.cpp, whose llama-bench is a program here that prints alike."""

from __future__ import annotations

import json
import os
import resource
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_as_modules import load_script
from tiny_models import make_model

script = load_script("bench/peer")
pages = load_script("docs/results_pages.py")
parts = sys.modules["results_parts"]
table, ik = sys.modules["peer_table"], sys.modules["peer_ik"]

# What the real one prints around its figures; SPEED is (n_prompt, n_gen, depth, repack) -> t/s.
FAKE = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if arguments == ["--help"]:
    print("  -fa, --flash-attn <0|1>   (default: 1)\\n{options}")
    sys.exit()
given = dict(zip(arguments[::2], arguments[1::2]))
if not os.path.isfile(given["-m"]):
    print("[")
    print("main: error: failed to load model", file=sys.stderr)
    sys.exit(1)
n_prompt, n_gen, repack = (int(given[name]) for name in ("-p", "-n", "-rtr"))
test = f"tg{{n_gen}}" if n_gen else f"pp{{n_prompt}}"
depth = 0
if "-gp" in given:
    depth, n_gen = (int(n) for n in given["-gp"].split(","))
    n_prompt, test = depth, f"tg{{n_gen}}@pp{{depth}}"
speed = {speed!r}[min(depth, 1), min(n_gen, 1), repack]
last = int(given["-r"])
print("[")
print("llama_model_loader: using THP with page size 2 MiB .... done")
print("  {{")
fields = dict(build_commit="abc123", build_number=4100, cuda=False, cpu_info="A CPU",
              model_filename=given["-m"], n_threads=int(given["-t"]), type_k="f16", ser="-1,0",
              repack=bool(repack), n_prompt=n_prompt, n_gen=n_gen, avg_ts=speed, test=test)
for name, value in fields.items():
    print(f'    "{{name}}": {{json.dumps(value)}},')
print('    "samples_ns": [ ' + ", ".join(["5000"] * last) + ' ],')
print('    "samples_ts": [ ' + ", ".join(["1.5"] * (last - 1) + [str(speed)]) + ' ]')
print("  }}")
print("]")
"""
SPEEDS = {(0, 0, 0): 900.0, (0, 0, 1): 2000.0, (0, 1, 0): 300.0, (0, 1, 1): 200.0}
SPEEDS |= {(1, 1, 0): 50.0, (1, 1, 1): 25.0}
REPACK = "  -gp <pp,tg> (default: )\\n  -rtr, --run-time-repack <0|1> (default: 0)"


class FakeWorker:
    """Ours: 1000 tokens a second, and little memory."""

    def __init__(self, name: str, setup: dict[str, Any]) -> None:
        self.name, self.about = name, {"version": "0"}

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None: ...
    def warm_up(self, case: Any) -> None: ...
    def fill(self, depth: int) -> None: ...

    def rate(self, case: Any) -> float:
        return 1000.0

    def peak_memory(self) -> int:
        return 1 << 20


class Fake:
    """The program and what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.path, self._log = folder / "llama-bench", folder / "log"

    def write(self, options: str = REPACK) -> Fake:
        values = {"python": sys.executable, "log": str(self._log), "speed": SPEEDS}
        self.path.write_text(FAKE.format(options=options, **values))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)
        return self

    def calls(self) -> list[dict[str, str]]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [dict(zip(each[::2], each[1::2], strict=True)) for each in lines if len(each) > 1]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path).write()


@pytest.fixture
def only_ik(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "Worker", FakeWorker)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", n_embd=128, n_ff=128)


def opened(fake: Fake, model: Path) -> Any:
    return ik.IkBench("ik_llama.cpp", str(fake.path), model, 2, dict(os.environ))


def test_table_with_ik_alone(fake, only_ik, model, tmp_path, capsys):
    file = tmp_path / "result.json"
    arguments = ["-m", str(model), "--ik", str(fake.path), "-t", "2", "--pp", "512"]
    arguments += ["--depths", "0,64", "--methods", "full", "--tokens", "4", "--pairs", "3"]
    assert script.main([*arguments, "--memory", "64", "--json", str(file)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "| test | sparsekv-cli | ik_llama.cpp | ratio |"
    assert out[2] == "| pp512 | 1000 (1000 to 1000) | 2000 (2000 to 2000) | 0.50 |"
    assert out[3].startswith("| tg4 @ d0, full | 1000 ") and "| 300 (300 to 300) | 3.33" in out[3]
    assert "| 50 (50 to 50) | 20.00 |" in out[4] and out[5].startswith("| peak memory @ d64, full")
    told = json.loads(file.read_text())
    about = told["programs"]["ik_llama.cpp"]
    assert about["version"] == "abc123"
    assert about["rtr"] == {"pp512": 1, "tg4 @ d0": 0, "tg4 @ d64": 0}
    assert told["rows"][0]["best"] == "ik_llama.cpp"
    assert told["rows"][3]["peers"]["ik_llama.cpp"]["median"] > 1  # MiB of a Python


def test_both_kinds_of_weights_in_the_first_round_only(fake, model):
    prompt, near, deep = (table.Case(*shape, None) for shape in
                          ((512, 0, 0), (0, 4, 0), (0, 4, 64)))  # fmt: skip
    with opened(fake, model) as bench:
        assert [bench.rate(prompt) for _ in range(3)] == [2000.0] * 3
        assert bench.rate(near) == 300.0 and bench.rate(deep) == 50.0
        own = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert 1 << 20 < bench.peak_memory() < own + (1 << 30)
    warm, *calls = fake.calls()
    assert (warm["-p"], warm["-n"], warm["-m"]) == ("1", "0", str(model))
    assert [(c["-p"], c["-n"], c["-rtr"]) for c in calls[:4]] == [
        ("512", "0", "0"), ("512", "0", "1"), ("512", "0", "1"), ("512", "0", "1"),
    ]  # fmt: skip
    assert [(c["-n"], c.get("-gp")) for c in calls[4:]] == [("4", None)] * 2 + [("0", "64,4")] * 2
    assert {c["-r"] for c in calls[:6]} == {"2"} and calls[6]["-r"] == "1"
    assert all((c["-t"], c["-fa"], c["-o"]) == ("2", "1", "json") for c in calls)


def test_ratio_is_to_the_best_peer():
    theirs = {"llama.cpp": [250.0], "ik_llama.cpp": [500.0, 400.0, 600.0]}
    row = table.PeerRow("pp512", "t/s", [1000.0], theirs)
    assert row.best == "ik_llama.cpp" and row.ratio == 2
    cells = row.cells(["llama.cpp", "ik_llama.cpp"])
    assert cells == ["pp512", "1000", "250", "500 (400 to 600)", "2.00"]
    memory = table.PeerRow("peak memory", "MiB", [1000.0], theirs)
    assert memory.best == "llama.cpp" and memory.ratio == 4


def test_what_cannot_be_used_is_said_in_a_line(fake, only_ik, model, tmp_path, capsys):
    def error_of(*arguments: str) -> str:
        assert script.main(["-m", str(model), "--pp", "8", "--depths", "", *arguments]) == 1
        said = capsys.readouterr().err.splitlines()
        assert not any("Traceback" in line for line in said)
        return said[-1]

    assert "no such program" in error_of("--ik", str(tmp_path / "none"))
    fake.write(options="  -d, --n-depth <n>")
    assert "has no option -rtr: --ik wants the llama-bench of ik_llama.cpp" in error_of(
        "--ik", str(fake.path)
    )
    fake.path.write_text(f"#!{sys.executable}\nimport os; os.kill(os.getpid(), 4)\n")
    assert "ik_llama.cpp ended by SIGILL: it said nothing" in error_of("--ik", str(fake.path))
    fake.path.write_text("neither a script nor a program")
    assert "Exec format error" in error_of("--ik", str(fake.path))


def test_a_model_that_it_cannot_load(fake, tmp_path):
    said = "ik_llama.cpp ended with exit code 1: main: error: failed to load model"
    with pytest.raises(ik.SparseKVError, match=said), opened(fake, tmp_path / "none.gguf"):
        pass


def test_output_without_a_result(fake, model):
    fake.path.write_text(fake.path.read_text().replace('print("  {")', 'print("  (")'))
    with pytest.raises(ik.SparseKVError, match="gave 0 results"), opened(fake, model):
        pass


def test_rows_of_the_pages(monkeypatch):
    """scripts/results names the program, not where it lies; peers have columns of their own."""
    spread = {"median": 2.0, "min": 1.0, "max": 3.0}
    row = {"test": "pp512", "unit": "t/s", "ratio": 1.0, "sparsekv_cli": spread}
    row["peers"] = {"ik_llama.cpp": spread}
    flat = {**row, "test": "lfps", "peers": {"d2048": spread}}
    told = {"programs": {"ik_llama.cpp": {"version": "abc"}}, "rows": [row, flat]}

    def script_(run: Any, path: str, *arguments: str) -> Any:
        run.commands.append(f"scripts/{path} {' '.join(arguments)}")
        return told

    monkeypatch.setattr(parts.Runner, "script", script_)
    run = parts.Runner(ik="/some/where/llama-bench")
    rows = parts.PARTS["peer"].measure(run, parts.TINY)
    assert rows[0]["ik_llama.cpp median"] == 2.0 and rows[0]["ik_llama.cpp version"] == "abc"
    assert "llama.cpp median" not in rows[0] and rows[1]["sparsekv-cli max"] == 3.0
    assert run.commands[0].endswith("--memory 64 --ik llama-bench")
    shown = pages.body(parts.PARTS["peer"], rows).splitlines()[2]
    assert shown == "| `smollm2` | pp512 | 2 | 1 | 3 |  |  |  | 2 | 1 | 3 | t/s | 1.00 | `abc` |"
