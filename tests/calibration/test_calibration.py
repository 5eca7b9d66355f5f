"""Where a calibration lies, when it is made, and what a sequence makes of it."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from opened import open_sequence
from sidecars import CONFIG, N_CTX, N_LAYER, ROOT, SIZES, entry, identity_of, refused
from tiny_models import make_model

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.calibration import calibrations, sidecar
from sparsekv_cli.calibration.calibrations import CalibrationText
from sparsekv_cli.calibration.sidecar import read_entry, write_entry
from sparsekv_cli.methods import build_method, calibrated_methods
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.models.sources.locate import resolve_model
from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer


def load(model, method="fake", reports=None, **changes):
    sequence = open_sequence(
        model,
        build_method(method, {}),
        replace(CONFIG, **changes),
        None,
        None if reports is None else lambda *report: reports.append(report),
    )
    sequence.model.gguf.close()
    return sequence


def calibration_path(model):
    """Where it lies in the cache directory."""
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "sparsekv-cli" / "calibration"
    return folder / f"{identity_of(model).model_hash}.npz"


def test_first_use_calibrates_and_says_so(model, fake):
    reports = []
    sequence = load(model, reports=reports)
    beside = model.with_name("model.calibration.npz")
    assert reports[0] == ("fake", 0.0, "") and reports[-1] == ("fake", 1.0, f"stored in {beside}")
    assert [share for _, share, _ in reports] == sorted(share for _, share, _ in reports)
    assert beside.exists() and not list(model.parent.parent.glob("cache/*/calibration"))
    (ids,) = fake.runs
    text = calibrations.built_in_text().text
    assert ids == sequence.model.tokenizer.encode(text, add_eos=False, parse_special=False)[:N_CTX]
    del reports[:]
    again = load(model, reports=reports)
    assert reports == [] and len(fake.runs) == 1
    for before, after in zip(sequence.caches, again.caches, strict=True):
        left, right = before.spec.calibration, after.spec.calibration
        assert left.keys() == right.keys() == {"means", "stride"}
        np.testing.assert_array_equal(left["means"], right["means"])
        assert left["stride"] == right["stride"] == 2 + before.spec.layer


def test_every_layer_has_its_slice_also_after_a_reset(model, fake):
    sequence = open_sequence(model, build_method("fake", {}, dense_layers="none"), CONFIG)
    stored = read_entry(model.with_name("model.calibration.npz"), "fake", identity_of(model))
    assert stored.n_tokens == N_CTX and stored.text_name == "built-in"
    assert np.abs(stored.tensors["means"]).min(axis=(1, 2)).max() > 0
    for _ in range(2):
        for i, cache in enumerate(sequence.caches):
            np.testing.assert_array_equal(
                cache.spec.calibration["means"], stored.tensors["means"][i]
            )
            assert cache.stride == 2 + i
        sequence.prefill(list(range(3, 103)))
        sequence.decode(7)
        counts = sequence.ledger()
        rows = sum(4 + -(-(100 - 4) // (2 + i)) + 1 for i in range(N_LAYER))
        assert counts["sparse_rows_attended"] == 4 * rows
        sequence.reset()
    sequence.model.gguf.close()


def test_methods_without_need_get_nothing(model, fake):
    sequence = load(model, "topk")
    assert all(cache.spec.calibration == {} for cache in sequence.caches)
    assert fake.runs == [] and list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize("place", ["site-packages/package", "models--me--tiny/snapshots/0"])
def test_folders_of_packages_and_of_the_hub_are_not_written_to(place, model, fake):
    folder = model.parent / "lib" / place
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
    assert "of an older version" in reports[0][2] and reports[-1][2].startswith("stored in")
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


def test_what_was_calibrated_last_counts(model, fake, monkeypatch):
    """A shipped calibration in a folder that cannot be written does not hide the user's own."""
    found = load(model).model.calibrations
    monkeypatch.setattr(os, "access", lambda path, mode: path != model.parent)
    mine = replace(found.find("fake"), text_name="mine")
    assert found.store("fake", mine) == f"stored in {calibration_path(model)}"
    assert found.find("fake").text_name == "mine"
    calibration_path(model).unlink()
    assert found.find("fake").text_name == "built-in"


def test_nowhere_to_store_is_no_failure(model, fake, monkeypatch):
    def fail(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(calibrations, "write_entry", fail)
    reports = []
    sequence = load(model, reports=reports)
    assert "could not be stored" in reports[-1][2] and "Read-only" in reports[-1][2]
    assert sequence.caches[2].spec.calibration["stride"] == 4


def test_a_sidecar_of_another_model_gets_an_entry_of_this_one(model, fake, tmp_path):
    other = make_model(tmp_path / "other.gguf", **SIZES, seed=1)
    load(other)
    beside = model.parent / "model.calibration.npz"
    shutil.copy(other.with_name("other.calibration.npz"), beside)
    load(model)
    assert len(fake.runs) == 2
    assert read_entry(beside, "fake", identity_of(other)) is not None
    load(model)
    assert len(fake.runs) == 2


def test_a_sidecar_that_is_named(model, fake, tmp_path):
    place = tmp_path / "mine.npz"
    assert "is missing" in refused(lambda: load(model, calibration=str(place)))
    write_entry(place, "other", identity_of(model), entry())
    message = refused(lambda: load(model, calibration=str(place)))
    assert "holds none" in message and "--output" in message and fake.runs == []
    tensors = {"means": np.ones((N_LAYER, 2, 16), "f4"), "stride": np.full(N_LAYER, 9, np.uint8)}
    write_entry(place, "fake", identity_of(model), entry(**tensors))
    sequence = load(model, calibration=str(place))
    assert sequence.caches[2].stride == 9 and fake.runs == []


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
    sequence = open_sequence(model, build_method("full", {}), CONFIG)
    method, text = build_method("fake", {}), calibrations.built_in_text()
    made = sequence.model.calibrations.calibrate(method, text, 290)
    assert made.n_tokens == 290 == len(fake.runs[-1])
    assert sequence.model.calibrations.calibrate(method, text, 10**6).n_tokens == N_CTX
    short = CalibrationText("notes.txt", "too short")
    message = refused(lambda: sequence.model.calibrations.calibrate(method, short, 4096))
    assert "notes.txt" in message and "256" in message
    sequence.model.gguf.close()
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
