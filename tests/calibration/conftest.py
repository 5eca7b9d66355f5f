"""A tiny model in a folder of its own, and a method that is calibrated on it."""

import shutil
from pathlib import Path

import calibrated_method
import pytest
from sidecars import SIZES


@pytest.fixture(scope="session")
def blueprint(tiny_model):
    return tiny_model(**SIZES)


@pytest.fixture
def model(blueprint, tmp_path, monkeypatch):
    """A model of its own, in a folder of its own; the user's cache directory is beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    folder.mkdir()
    return Path(shutil.copy(blueprint, folder / "model.gguf"))


@pytest.fixture
def fake(monkeypatch):
    return calibrated_method.install(monkeypatch)
