"""The sidecar: what is written and read, and what is refused."""

import json
import os
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from sidecars import (
    N_LAYER,
    SIZES,
    KnownContent,
    assert_same,
    entry,
    identity_of,
    refused,
)
from tiny_models import make_model

from sparsekv_cli.calibration import sidecar
from sparsekv_cli.calibration.sidecar import read_entry, write_entry
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.gguf.file import open_gguf


def test_what_is_written_is_read(model, tmp_path):
    rng = np.random.default_rng(0)
    dtypes = "f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"
    arrays = {
        f"of_{dtype}": (1000 * rng.standard_normal((N_LAYER, 2, 7))).astype(dtype)
        for dtype in dtypes
    }
    arrays["flat"] = np.array([200, 255, 7], np.uint8)
    arrays["deep"] = np.asfortranarray(rng.standard_normal((N_LAYER, 2, 3, 4)).astype(np.float32))
    path, identity = tmp_path / "new" / "sidecar.npz", identity_of(model)
    assert read_entry(path, "fasa", identity) is None
    written = entry(**arrays)
    sidecar.check_tensors("fasa", arrays, N_LAYER)
    write_entry(path, "fasa", identity, written)
    assert_same(read_entry(path, "fasa", identity), written)
    assert read_entry(path, "sals", identity) is None
    assert [p.name for p in path.parent.iterdir()] == ["sidecar.npz"]
    name = f"fasa@{identity.digest()}"
    with np.load(path, allow_pickle=False) as file:  # numpy alone can look into it
        assert file.files == ["about", *(f"{name}.{each}" for each in arrays)]
        about = json.loads(str(file["about"]))
    assert about["entries"][name]["text_name"] == "a text"
    assert "GGUF" in refused(lambda: open_gguf(path))  # it is not mistaken for a model


def test_methods_share_a_file(model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    first, second, third = entry(1), entry(2), entry(3)
    write_entry(path, "fasa", identity, first)
    write_entry(path, "sals", identity, second)
    assert_same(read_entry(path, "fasa", identity), first)
    write_entry(path, "fasa", identity, third)
    assert_same(read_entry(path, "fasa", identity), third)
    assert_same(read_entry(path, "sals", identity), second)


def test_writing_is_all_or_nothing(model, tmp_path, monkeypatch):
    path, identity, old = tmp_path / "s.npz", identity_of(model), entry(1)
    write_entry(path, "fasa", identity, old)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sidecar.os, "replace", fail)
    with pytest.raises(SparseKVError, match="No space left on device"):
        write_entry(path, "fasa", identity, entry(2))
    assert_same(read_entry(path, "fasa", identity), old)
    assert [p.name for p in tmp_path.glob(".*")] == []


OTHER_MODELS = {
    "base": {"freq_base": 5e5},
    "yarn": {"rope_scaling": ("yarn", 4.0)},
    "factor": {"rope_scaling": ("linear", 4.0)},
    "weights": {"seed": 1},
}


def test_a_file_holds_an_entry_of_each_model(model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    others = [make_model(tmp_path / f"{n}.gguf", **SIZES, **of) for n, of in OTHER_MODELS.items()]
    identities = [identity, *map(identity_of, others)]
    changed = [
        replace(identity, content=KnownContent("other")), replace(identity, rope=(1, 2.0, 0, 0))
    ]  # fmt: skip
    identities += changed
    for seed, each in enumerate(identities):
        assert read_entry(path, "fasa", each) is None
        write_entry(path, "fasa", each, entry(seed))
    for seed, each in enumerate(identities):
        assert_same(read_entry(path, "fasa", each), entry(seed))


def test_another_format_is_refused(model, tmp_path, monkeypatch):
    path, identity = tmp_path / "s.npz", identity_of(model)
    monkeypatch.setattr(sidecar, "FORMAT_VERSION", 7)
    write_entry(path, "fasa", identity, entry())
    monkeypatch.setattr(sidecar, "FORMAT_VERSION", 8)
    message = refused(lambda: read_entry(path, "fasa", identity))
    assert "format 7" in message and "reads 8" in message and "sparsekv-cli calibrate" in message


def test_damage_is_one_line_or_harmless(model, tmp_path):
    """Cut at every 37th byte, and every 11th byte turned over."""
    path, identity = tmp_path / "s.npz", identity_of(model)
    good = entry(b=np.arange(N_LAYER * 9, dtype=np.uint8).reshape(N_LAYER, 9))
    write_entry(path, "fasa", identity, good)
    whole = path.read_bytes()
    damages = [whole[:n] for n in range(0, len(whole), 37)]
    for i in range(0, len(whole), 11):
        damages.append(whole[:i] + bytes([whole[i] ^ 0x41]) + whole[i + 1 :])
    n_refused = 0
    for damaged in damages:
        path.write_bytes(damaged)
        try:
            found = read_entry(path, "fasa", identity)
        except SparseKVError as error:
            n_refused += 1
            assert "\n" not in str(error) and str(path) in str(error)
            assert "sparsekv-cli calibrate" in str(error) and "download" not in str(error)
        else:  # the name of the method's keys, of the text, or padding
            assert found is None or found.tensors.keys() == good.tensors.keys()
            for name in found.tensors if found else ():
                np.testing.assert_array_equal(found.tensors[name], good.tensors[name])
    assert n_refused > len(damages) / 2


@pytest.mark.parametrize("what", ["compressed", "pickled", "no JSON", "nested", "another kind"])
def test_files_that_no_version_wrote(what, model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    about = {
        "no JSON": "not JSON",
        "nested": "[" * 10**5,
        "another kind": '{"kind": "other", "methods": {}}',
    }
    save = np.savez_compressed if what == "compressed" else np.savez
    save(path, about=np.array([{}] if what == "pickled" else about.get(what, "{}")))
    assert "cannot be read" in refused(lambda: read_entry(path, "fasa", identity))


def test_a_changed_array_is_noticed(model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    write_entry(path, "fasa", identity, entry())
    data = bytearray(path.read_bytes())
    data[data.index(entry().tensors["a"].tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert "CRC" in refused(lambda: read_entry(path, "fasa", identity))


@pytest.mark.parametrize("kind", ["empty", "cut", "directory"])
def test_what_lies_in_the_way_of_reading(kind, model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    write_entry(path, "fasa", identity, entry())
    data = path.read_bytes()
    path.unlink()
    if kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"" if kind == "empty" else data[: len(data) - 40])
    assert "cannot be read" in refused(lambda: read_entry(path, "fasa", identity))
    if kind == "directory":
        refused(lambda: write_entry(path, "fasa", identity, entry()))
    else:
        write_entry(path, "fasa", identity, entry())
        assert_same(read_entry(path, "fasa", identity), entry())


def test_other_files_are_left_as_they_are(model, tmp_path):
    identity = identity_of(model)
    before = model.read_bytes()
    message = refused(lambda: write_entry(model, "fasa", identity, entry()))
    assert "no calibration" in message and model.read_bytes() == before
    notes = tmp_path / "notes.txt"
    notes.write_text("do not lose me")
    assert "no calibration" in refused(lambda: write_entry(notes, "fasa", identity, entry()))
    assert notes.read_text() == "do not lose me"
    archive = tmp_path / "archive.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("notes.txt", "nor me")
    before = archive.read_bytes()
    assert "no calibration" in refused(lambda: write_entry(archive, "fasa", identity, entry()))
    assert archive.read_bytes() == before
    below = notes / "sidecar.npz"
    assert "cannot be written" in refused(lambda: write_entry(below, "f", identity, entry()))


def test_hash_of_a_model(model, blueprint, tmp_path):
    assert identity_of(model) == identity_of(blueprint)
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(model.read_bytes() + b"\0")
    other_key = make_model(tmp_path / "key.gguf", **SIZES, metadata={"general.author": "x"})
    changed = tmp_path / "changed.gguf"
    data = bytearray(model.read_bytes())
    with open_gguf(model) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
        data[info.offset + info.n_bytes // 3] ^= 1
    changed.write_bytes(data)
    hashes = {identity_of(p).model_hash for p in (model, longer, other_key, changed)}
    assert len(hashes) == 4 and {len(h) for h in hashes} == {32}


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((N_LAYER, 2), np.complex64), "complex64"),
        (np.zeros((N_LAYER + 1, 2), np.float32), "must be"),
        (np.float32(1).reshape(()), "must be"),
        (np.zeros((N_LAYER, 0), np.float32), "must be"),
        (np.full((N_LAYER, 2), np.nan, np.float32), "not finite"),
    ],
)
def test_arrays_that_cannot_be_stored(array, words):
    with pytest.raises(ValueError, match=words) as error:
        sidecar.check_tensors("fasa", {"dom": array}, N_LAYER)
    assert "dom" in str(error.value)


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    identity = identity_of(make_model(tmp_path / "m.gguf", **SIZES))
    path, names = tmp_path / "a.npz", [f"method{i}" for i in range(4)]
    children = []
    for name in names:
        child = os.fork()
        if not child:
            status = 1
            try:
                for seed in range(5):
                    write_entry(path, name, identity, entry(seed))
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(names)
    for name in names:
        assert_same(read_entry(path, name, identity), entry(4))
