"""Calibration: the sidecar, where it lies, what is refused, and what a session makes of it."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import calibrated_method
import numpy as np
import pytest
from tiny_models import make_model

import sparsekv_cli.cpu  # noqa: F401 - chooses the kernel cache before tests move the user's cache
from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.calibration import calibrations, sidecar
from sparsekv_cli.calibration.calibrations import CalibrationText
from sparsekv_cli.calibration.sidecar import Entry, identify, read_entry, write_entry
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method, calibrated_methods
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.hparams import read_hparams
from sparsekv_cli.models.locate import resolve_model
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer
from sparsekv_cli.session import load_session

N_LAYER, N_CTX = 3, 320
CONFIG = SessionConfig(threads=1, prefill_dtype="f32", chunk=64)
SIZES = {"n_layer": N_LAYER, "n_embd": 64, "n_ff": 64, "n_ctx": N_CTX}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def blueprint(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("tiny") / "model.gguf", **SIZES)


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


def identity_of(path):
    with open_gguf(path) as file:
        return identify(file, read_hparams(file))


def entry(seed=0, **tensors):
    rng = np.random.default_rng(seed)
    tensors = tensors or {"a": rng.standard_normal((N_LAYER, 2, 5)).astype(np.float32)}
    return Entry(tensors, 300, "a text", "0" * 64)


def refused(call) -> str:
    with pytest.raises(SparseKVError) as error:
        call()
    message = str(error.value)
    assert message and "\n" not in message
    return message


def assert_same(left, right):
    assert list(left.tensors) == list(right.tensors)
    for name, array in left.tensors.items():
        assert array.dtype == right.tensors[name].dtype
        np.testing.assert_array_equal(array, right.tensors[name])
    assert replace(left, tensors={}) == replace(right, tensors={})


# --- the file -------------------------------------------------------------------------------------


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
    with np.load(path, allow_pickle=False) as file:  # numpy alone can look into it
        assert file.files == ["about", *(f"fasa.{name}" for name in arrays)]
        about = json.loads(str(file["about"]))
    assert about["methods"]["fasa"]["text_name"] == "a text"
    assert about["methods"]["fasa"]["model"]["model_hash"] == identity.model_hash
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
    with pytest.raises(OSError):
        write_entry(path, "fasa", identity, entry(2))
    assert_same(read_entry(path, "fasa", identity), old)
    assert [p.name for p in tmp_path.glob(".*")] == []


OTHER_MODELS = {
    "layers": {"n_layer": 2},
    "query heads": {"n_head": 2},
    "kv heads": {"n_head_kv": 1},
    "key size": {"head_dim": 32},
    "RoPE base": {"freq_base": 5e5},
    "RoPE scaling yarn": {"rope_scaling": ("yarn", 4.0)},
    "RoPE scaling factor 4": {"rope_scaling": ("linear", 4.0)},
    "model hash": {"seed": 1},
}


@pytest.mark.parametrize("words", OTHER_MODELS)
def test_another_model_is_refused_by_name(words, model, tmp_path):
    other = make_model(tmp_path / "other.gguf", **{**SIZES, **OTHER_MODELS[words]})
    path, found = tmp_path / "s.npz", identity_of(other)
    write_entry(path, "fasa", found, entry())
    message = refused(lambda: read_entry(path, "fasa", identity_of(model)))
    assert words in message and "another model" in message and str(path) in message
    assert "sparsekv-cli calibrate -m MODEL --method fasa" in message


def test_every_part_of_the_identity_is_checked(model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    write_entry(path, "fasa", identity, entry())
    changed = {
        "n_layer": 99, "n_head": (9,) * N_LAYER, "n_head_kv": (9,) * N_LAYER, "head_dim": 99,
        "value_dim": 99, "n_rot": 98, "freq_base": 9.5, "rope_scaling": "other",
        "rope_factor": 9.5, "pairing": "interleaved", "model_hash": "other",
    }  # fmt: skip
    assert set(changed) == set(vars(identity))
    for name, value in changed.items():
        other = replace(identity, **{name: value})
        message = refused(lambda other=other: read_entry(path, "fasa", other))
        shown = "9 x 3" if isinstance(value, tuple) else str(value)
        assert shown in message  # what was expected


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


def test_entries_of_another_model_are_dropped(model, tmp_path):
    path, identity = tmp_path / "s.npz", identity_of(model)
    write_entry(path, "sals", replace(identity, model_hash="other"), entry(1))
    write_entry(path, "fasa", identity, entry(2))
    assert read_entry(path, "sals", identity) is None
    assert_same(read_entry(path, "fasa", identity), entry(2))


def test_hash_of_a_model(model, blueprint, tmp_path):
    assert identity_of(model) == identity_of(blueprint)
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(model.read_bytes() + b"\0")
    other_key = make_model(tmp_path / "key.gguf", **SIZES, metadata={"general.author": "x"})
    changed = tmp_path / "changed.gguf"
    data = bytearray(model.read_bytes())
    with open_gguf(model) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
        data[info.offset + info.n_bytes - 3] ^= 1
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


# --- where it lies --------------------------------------------------------------------------------


def load(model, method="fake", reports=None, **changes):
    session = load_session(
        model,
        build_method(method, {}),
        replace(CONFIG, **changes),
        None,
        None if reports is None else lambda *report: reports.append(report),
    )
    session.gguf.close()
    return session


def calibration_path(model):
    """Where it lies in the cache directory."""
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "sparsekv-cli" / "calibration"
    return folder / f"{identity_of(model).model_hash}.npz"


def test_first_use_calibrates_and_says_so(model, fake):
    reports = []
    session = load(model, reports=reports)
    beside = model.with_name("model.calibration.npz")
    assert reports[0] == ("fake", 0.0, "") and reports[-1] == ("fake", 1.0, f"stored in {beside}")
    assert [share for _, share, _ in reports] == sorted(share for _, share, _ in reports)
    assert beside.exists() and not list(model.parent.parent.glob("cache/*/calibration"))
    (ids,) = fake.runs
    text = calibrations.built_in_text().text
    assert ids == session.tokenizer.encode(text, add_eos=False, parse_special=False)[:N_CTX]
    del reports[:]
    again = load(model, reports=reports)
    assert reports == [] and len(fake.runs) == 1
    for before, after in zip(session.caches, again.caches, strict=True):
        left, right = before.spec.calibration, after.spec.calibration
        assert left.keys() == right.keys() == {"means", "stride"}
        np.testing.assert_array_equal(left["means"], right["means"])
        assert left["stride"] == right["stride"] == 2 + before.spec.layer


def test_every_layer_has_its_slice_also_after_a_reset(model, fake):
    session = load_session(model, build_method("fake", {}, dense_layers="none"), CONFIG)
    stored = read_entry(model.with_name("model.calibration.npz"), "fake", identity_of(model))
    assert stored.n_tokens == N_CTX and stored.text_name == "built-in"
    assert np.abs(stored.tensors["means"]).min(axis=(1, 2)).max() > 0
    for _ in range(2):
        for i, cache in enumerate(session.caches):
            np.testing.assert_array_equal(
                cache.spec.calibration["means"], stored.tensors["means"][i]
            )
            assert cache.stride == 2 + i
        session.prefill(list(range(3, 103)))
        session.decode(7)
        counts = session.ledger.as_dict()
        rows = sum(4 + -(-(100 - 4) // (2 + i)) + 1 for i in range(N_LAYER))
        assert counts["sparse_rows_attended"] == 4 * rows
        session.reset()
    session.gguf.close()


def test_methods_without_need_get_nothing(model, fake):
    session = load(model, "topk")
    assert all(cache.spec.calibration == {} for cache in session.caches)
    assert fake.runs == [] and list(model.parent.iterdir()) == [model]


def test_the_folder_of_a_package_is_not_written_to(model, fake):
    folder = model.parent / "lib" / "site-packages" / "package"
    folder.mkdir(parents=True)
    installed = Path(shutil.copy(model, folder))
    reports = []
    load(installed, reports=reports)
    cached = Path(os.environ["XDG_CACHE_HOME"]) / "sparsekv-cli" / "calibration"
    path = cached / f"{identity_of(installed).model_hash}.npz"
    assert path == calibration_path(installed)
    assert reports[-1][2] == f"stored in {path}" and list(folder.iterdir()) == [installed]
    load(installed)
    load(model)  # the same model elsewhere
    assert len(fake.runs) == 1


def test_an_older_one_in_the_cache_is_made_anew(model, fake, monkeypatch):
    """With a word about it; not so one beside the model, or of a text that somebody chose."""
    folder = model.parent / "site-packages"
    folder.mkdir()
    installed = Path(shutil.copy(model, folder))
    load(installed)
    load(model)  # finds that one
    monkeypatch.setattr(sidecar, "FORMAT_VERSION", sidecar.FORMAT_VERSION + 1)
    reports = []
    load(installed, reports=reports)
    assert "older version's" in reports[0][2] and reports[-1][2].startswith("stored in")
    load(installed)
    assert len(fake.runs) == 2
    cached = calibration_path(installed)
    entry = read_entry(cached, "fake", identity_of(installed))
    write_entry(cached, "fake", identity_of(installed), replace(entry, text_name="mine"))
    monkeypatch.setattr(sidecar, "FORMAT_VERSION", sidecar.FORMAT_VERSION + 1)
    assert "has format" in refused(lambda: load(installed))
    shutil.move(cached, model.with_name("model.calibration.npz"))
    assert "has format" in refused(lambda: load(model))
    assert len(fake.runs) == 2


def test_a_folder_that_cannot_be_written(model, fake, monkeypatch):
    access = os.access
    monkeypatch.setattr(
        calibrations.os, "access", lambda path, mode: path != model.parent and access(path, mode)
    )
    load(model)
    assert list(model.parent.iterdir()) == [model]
    load(model)
    assert len(fake.runs) == 1


def test_nowhere_to_store_is_no_failure(model, fake, monkeypatch):
    def fail(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(calibrations, "write_entry", fail)
    reports = []
    session = load(model, reports=reports)
    assert "could not be stored" in reports[-1][2] and "Read-only" in reports[-1][2]
    assert session.caches[2].spec.calibration["stride"] == 4


def test_a_sidecar_of_another_model_stops_the_session(model, fake, tmp_path):
    other = make_model(tmp_path / "other.gguf", **SIZES, seed=1)
    load(other)
    shutil.copy(other.with_name("other.calibration.npz"), model.parent / "model.calibration.npz")
    message = refused(lambda: load(model))
    assert "model hash" in message and "sparsekv-cli calibrate" in message
    assert len(fake.runs) == 1
    load(model, "topk")  # which needs none


def test_a_sidecar_that_is_named(model, fake, tmp_path):
    place = tmp_path / "mine.npz"
    assert "is missing" in refused(lambda: load(model, calibration=str(place)))
    write_entry(place, "other", identity_of(model), entry())
    message = refused(lambda: load(model, calibration=str(place)))
    assert "holds none" in message and "--output" in message and fake.runs == []
    tensors = {"means": np.ones((N_LAYER, 2, 16), "f4"), "stride": np.full(N_LAYER, 9, np.uint8)}
    write_entry(place, "fake", identity_of(model), entry(**tensors))
    session = load(model, calibration=str(place))
    assert session.caches[2].stride == 9 and fake.runs == []


def test_an_interrupted_calibration_stores_nothing(model, fake, monkeypatch):
    def interrupt(self, run):
        run.progress(0.3)
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "calibrate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(model)
    assert list(model.parent.iterdir()) == [model]


# --- the text -------------------------------------------------------------------------------------


def test_text_and_context_must_be_long_enough(model, fake, tmp_path):
    session = load_session(model, build_method("full", {}), CONFIG)
    method, text = build_method("fake", {}), calibrations.built_in_text()
    made = session.calibrations.calibrate(method, text, 290)
    assert made.n_tokens == 290 == len(fake.runs[-1])
    assert session.calibrations.calibrate(method, text, 10**6).n_tokens == N_CTX
    short = CalibrationText("notes.txt", "too short")
    message = refused(lambda: session.calibrations.calibrate(method, short, 4096))
    assert "notes.txt" in message and "256" in message
    session.gguf.close()
    narrow = make_model(tmp_path / "narrow.gguf", **{**SIZES, "n_ctx": 128})
    assert "128" in refused(lambda: load(narrow))


def test_the_built_in_text():
    text = calibrations.built_in_text()
    assert text.name == "built-in"
    for words in ("def ", "return ", '"Is this the carriage', "User:", "SELECT "):
        assert words in text.text
    with open_gguf(resolve_model("smollm2")) as file:
        n_tokens = len(load_tokenizer(file.metadata).encode(text.text, parse_special=False))
    assert n_tokens >= calibrations.DEFAULT_TOKENS + 100
    # What methods are judged by must not be what they were calibrated on.
    ours = {text.text[i : i + 40] for i in range(0, len(text.text) - 40)}
    others = [*ROOT.glob("scripts/**/*.txt"), *ROOT.glob("tests/data/**/*.txt")]
    assert len(others) >= 4
    for path in others:
        other = path.read_text(encoding="utf-8")
        shared = [other[i : i + 40] for i in range(len(other) - 40) if other[i : i + 40] in ours]
        assert [s for s in shared if s.strip(" -=_\n#")] == [], path.name


def test_names_of_methods(fake):
    assert build_method("lfps", {}).name == "lfps"
    assert fake(budget=Budget(tokens=3)).name == "fake"
    assert "fake" in calibrated_methods()
    assert not {"full", "topk", "lfps"} & set(calibrated_methods())
