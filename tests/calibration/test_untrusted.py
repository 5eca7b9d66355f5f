"""Calibration files that say what they must not: one line, ahead of any use or large memory."""

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sidecars import entry, identity_of, refused

from sparsekv_cli.calibration.calibrations import Calibrations
from sparsekv_cli.calibration.run import CalibrationArray
from sparsekv_cli.calibration.sidecar import read_entry, write_entry
from sparsekv_cli.methods import build_method
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import read_hparams


def some_values(expected: CalibrationArray) -> np.ndarray:
    """An array as it must be."""
    array = np.zeros(expected.shape, expected.dtype)
    return np.maximum(array, array.dtype.type(max(expected.least, 0)))


@pytest.mark.parametrize("name", ["fasa", "sals", "faedkv"])
def test_arrays_that_a_method_cannot_use_are_refused(name, model, tmp_path):
    method, path, identity = build_method(name, {}), tmp_path / "s.npz", identity_of(model)
    with open_gguf(model) as file:
        found = Calibrations(file, read_hparams(file), identity, None, None, path)
        expected = method.calibration_arrays(found._sizes())
        good = {key: some_values(each) for key, each in expected.items()}
        write_entry(path, name, identity, entry(**good))
        assert found.has(method)
        for key, array in good.items():
            is_float, budgets = array.dtype.kind == "f", expected[key].is_rising
            bad = [array[:, :-1], array[:-1], array[..., None], array.astype("f8"), array.T]
            bad += [np.full_like(array, np.nan), np.full_like(array, -np.inf)] if is_float else []
            bad += [np.full_like(array, 200)] if array.dtype == np.uint8 else []
            bad += [array - 1, array + 2] if budgets else []
            for other in bad:
                write_entry(path, name, identity, entry(**{**good, key: other}))
                message = refused(lambda: found.has(method))
                assert key in message and "make a new one" in message
            write_entry(path, name, identity, entry(**{k: v for k, v in good.items() if k != key}))
            assert "were expected" in refused(lambda: found.has(method))
        write_entry(path, name, identity, entry(**good, other=np.zeros(3)))
        assert "were expected" in refused(lambda: found.has(method))


def rewritten(path: Path, change) -> None:
    """The members of a file, changed by ``change(names to bytes)``."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def changed_about(**changes):
    def change(members: dict[str, bytes]) -> None:
        about = json.loads(str(np.load(io.BytesIO(members["about.npy"]))))
        (own,) = about["entries"].values()
        own.update(changes)
        members["about.npy"] = npy(np.array(json.dumps(about)))

    return change


def huge(members: dict[str, bytes]) -> None:
    """An array that says that it has 2^40 elements."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)}
    )
    (name,) = (each for each in members if each.startswith("fasa@"))
    members[name] = file.getvalue() + bytes(64)


def nested(members: dict[str, bytes]) -> None:
    members["about.npy"] = npy(np.array("[" * 100_000))


@pytest.mark.parametrize(
    "change",
    [
        huge, nested, changed_about(n_tokens=float("inf")), changed_about(text_name=["x"]),
        changed_about(tensors=7), changed_about(tensors=["../a"]),
    ],
)  # fmt: skip
def test_a_file_that_says_what_it_must_not(change, model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    write_entry(path, "fasa", identity, entry())
    rewritten(path, change)
    message = refused(lambda: read_entry(path, "fasa", identity))
    assert str(path) in message and "make a new one" in message
    write_entry(path, "fasa", identity, entry(1))
    assert read_entry(path, "fasa", identity) is not None


def test_members_that_overlap_are_refused(model, tmp_path):
    """One megabyte that is a hundred members would take a hundred megabytes."""
    path, identity = tmp_path / "s.npz", identity_of(model)
    names = [f"a{i}" for i in range(3)]
    write_entry(path, "fasa", identity, entry(**{n: np.zeros((3, 1000), "f4") for n in names}))
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        starts = [
            archive.getinfo(f"fasa@{identity.digest()}.{name}.npy").header_offset for name in names
        ]
        end = archive.start_dir
    cut = data[: starts[1]] + data[end:]  # the directory now speaks of members that are not there
    at = cut.rindex(b"PK\x05\x06") + 16
    cut = cut[:at] + starts[1].to_bytes(4, "little") + cut[at + 4 :]
    cut = cut.replace(starts[1].to_bytes(4, "little"), starts[0].to_bytes(4, "little"))
    cut = cut.replace(starts[2].to_bytes(4, "little"), starts[0].to_bytes(4, "little"))
    cut = cut[:at] + starts[1].to_bytes(4, "little") + cut[at + 4 :]
    path.write_bytes(cut)
    assert "its members overlap" in refused(lambda: read_entry(path, "fasa", identity))


def test_only_regular_files_are_read(model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    os.mkfifo(path)
    assert "no regular file" in refused(lambda: read_entry(path, "fasa", identity))
    assert "is no calibration" in refused(lambda: write_entry(path, "fasa", identity, entry()))
    assert path.is_fifo()
