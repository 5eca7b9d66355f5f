"""The wheel, installed into an environment of its own outside the source tree, runs there."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tiny_models import make_model

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FOLDERS = {"sparsekv_cli": "sparsekv_cli"} | {
    folder: f"sparsekv_cli/{folder}" for folder in ("cpu", "kernels", "models")
}
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that nothing of an earlier build is in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*FOLDERS, "setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        source, copy = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    command = [sys.executable, "-c", BUILD, folder]
    subprocess.run(command, cwd=folder / "source", capture_output=True, check=True)
    (found,) = folder.glob("*.whl")
    return found


def needed(requirements: Collection[str], extra: str, done: dict[str, Distribution]) -> None:
    """Adds to ``done`` the installed distributions that pip would install for ``requirements``."""
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if requirement.name in done or (marker and not marker.evaluate({"extra": extra})):
            continue
        found = done[requirement.name] = distribution(requirement.name)
        for inner in ("", *requirement.extras):
            needed(found.requires or (), inner, done)


def link(requirements: Collection[str], extra: str, folder: Path) -> Path:
    """A folder of links to what is installed of ``requirements``, in place of a download."""
    folder.mkdir()
    done: dict[str, Distribution] = {}
    needed(requirements, extra, done)
    for found in done.values():
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))).resolve())
    return folder


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and what it requires, and no more."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    subprocess.run([*pip, "--quiet", "--no-index", "--no-deps", wheel], check=True)
    libraries = link(requirements_of(wheel), "", folder / "libraries")
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{libraries}\n")
    return folder


def requirements_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist: " in line]


@pytest.fixture(scope="module")
def run(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of the environment in a folder of its own."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def run(
        program: str, *arguments: object, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
        return subprocess.run(
            [environment / "bin" / program, *map(str, arguments)], input=stdin, text=True,
            capture_output=True, cwd=elsewhere, env=kept | variables, timeout=600,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small enough for Triton's interpreter."""
    sizes = {
        "n_layer": 1,
        "n_embd": 64,
        "n_head": 2,
        "n_head_kv": 1,
        "n_ff": 64,
        "n_vocab": 320,
        "n_ctx": 512,
    }
    return make_model(tmp_path_factory.mktemp("model") / "tiny.gguf", wtype="Q8_0", **sizes)


def sources() -> Iterator[tuple[Path, str]]:
    """The files of every package, and what they are called in the wheel."""
    for folder, name in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".pyi", ".typed", ".txt", ".html", ".css", ".js", ".svg"):
                yield path, f"{name}/{path.relative_to(ROOT / folder).as_posix()}"


def test_every_package_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {name for _, name in sources()} == held
    assert all(f"{Path(name).parent}/__init__.py" in held for name in held if name.endswith(".py"))


def test_the_wheel_does_not_ask_for_torch(wheel, run):
    asked = [Requirement(text) for text in requirements_of(wheel)]
    plain = {r.name for r in asked if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert "numba" in plain and not plain & {"torch", "triton"}
    for name in ("torch", "triton"):
        assert f"No module named '{name}'" in run("python", "-c", f"import {name}").stderr


@pytest.mark.parametrize(
    "arguments",
    [["--method", "lfps", "--budget", "16", "--sparse-from", "0"], ["--prefill-dtype", "f32"]],
)
def test_run(run, model, arguments):
    done = run("sparsekv-cli", "run", "-m", model, "-p", "abc " * 50, "-n", 4, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    assert 1 <= json.loads(done.stdout)["generated_tokens"] <= 4


def test_chat(run, model):
    done = run("sparsekv-cli", "chat", "-m", model, "-n", 4, stdin="hello\n")
    assert done.returncode == 0 and done.stdout, done.stderr


def test_bench(run, model):
    options = ("-p", 64, "-n", 4, "-r", 1, "--method", "full,topk", "-O", "json")
    done = run("sparsekv-cli", "bench", "-m", model, *options)
    assert done.returncode == 0, done.stderr
    assert {row["method"] for row in json.loads(done.stdout)} == {"full", "topk"}


def test_calibrate(run, model, tmp_path):
    sidecar = tmp_path / "sidecar.gguf"
    options = ("--method", "sals", "--tokens", 300, "--output", sidecar)
    done = run("sparsekv-cli", "calibrate", "-m", model, *options)
    assert done.returncode == 0 and sidecar.exists(), done.stderr


# Dense weights, since products of quantised ones take a minute in the interpreter.
ON_DEVICE = ("-p", "abc", "-n", 2, "--json", "--device", "cuda", "--gpu-weights", "bf16")


def test_a_gpu_wants_the_extra(run, model):
    done = run("sparsekv-cli", "run", "-m", model, *ON_DEVICE)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install 'sparsekv-cli[gpu]'" in done.stderr


@pytest.mark.nightly
def test_a_gpu_is_used_with_the_extra(run, model, wheel, tmp_path):
    extra = link(requirements_of(wheel), "gpu", tmp_path / "gpu")
    variables = {"PYTHONPATH": str(extra), "TRITON_INTERPRET": "1"}
    done = run("sparsekv-cli", "run", "-m", model, *ON_DEVICE, **variables)
    assert done.returncode == 0, done.stderr
    assert 1 <= json.loads(done.stdout)["generated_tokens"] <= 2
