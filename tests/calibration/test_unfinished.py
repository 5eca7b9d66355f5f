"""A calibration that was interrupted goes on from the trials that it measured."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from opened import open_sequence
from sidecars import CONFIG

from sparsekv_cli.calibration import trials
from sparsekv_cli.calibration.unfinished import KEPT_DAYS, UnfinishedScores
from sparsekv_cli.methods import build_method
from sparsekv_cli.system.files import DAY, WrittenFile

N_BEFORE = 3  # passes of trials before the interrupt


def two(n, start=0.0):
    return np.arange(start, start + 2 * n).reshape(2, n) / 7


def kept_in(folder, parts=(3, 5)):
    with UnfinishedScores(folder, "one") as scores:
        for n in parts:
            scores.next(n, lambda n=n: two(n))
    return folder / "one.unfinished"


def must_not_run():
    raise AssertionError("this was measured already")


def calibrated(path, reports, n_scored=0):
    sequence = open_sequence(
        path, build_method("full", {}), CONFIG, None, lambda *report: reports.append(report)
    )
    try:
        calibrations = sequence.model.calibrations
        from sparsekv_cli.calibration.calibrations import built_in_text

        return calibrations.calibrate(
            build_method("faedkv", {}), built_in_text(), 4096,
            lambda *each: reports.append(each), n_scored,
        ).tensors  # fmt: skip
    finally:
        sequence.model.gguf.close()


def test_an_interrupted_calibration_goes_on(model, monkeypatch):
    monkeypatch.setattr(trials, "ROWS_AT_ONCE", 96)
    reports, passes = [], []
    measure = trials.Window._measured

    def counted(self, together):
        if len(passes) == interrupt_at:
            raise KeyboardInterrupt
        passes.append(len(together))
        return measure(self, together)

    monkeypatch.setattr(trials.Window, "_measured", counted)
    interrupt_at = None
    expected = calibrated(model, reports)
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "sparsekv-cli" / "calibration"
    n_passes = len(passes)
    assert n_passes > 2 * N_BEFORE and not list(folder.iterdir())

    passes.clear()
    interrupt_at = N_BEFORE
    with pytest.raises(KeyboardInterrupt):
        calibrated(model, reports)
    n_known = sum(passes)
    assert len(list(folder.glob("*.unfinished"))) == 1
    assert not any("known" in note for _, _, note in reports)

    interrupt_at = None
    calibrated(model, reports, n_scored=4)  # other trials
    assert len(list(folder.glob("*.unfinished"))) == 1

    passes.clear()
    found = calibrated(model, reports)
    assert len(passes) == n_passes - N_BEFORE and not list(folder.iterdir())
    line = f"{n_known} trials are known from a run that was interrupted"
    assert [note for _, _, note in reports if note] == [line]
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_parts_come_back_in_order_with_all_bits(tmp_path):
    kept_in(tmp_path)
    with UnfinishedScores(tmp_path, "one") as scores:
        assert scores.n_trials == 8
        for n in (3, 5):
            np.testing.assert_array_equal(scores.next(n, must_not_run), two(n))
        np.testing.assert_array_equal(scores.next(4, lambda: two(4)), two(4))
    with UnfinishedScores(tmp_path, "one") as scores:
        assert scores.n_trials == 12
        scores.remove()
    assert not list(tmp_path.iterdir())


def test_another_calibration_measures_for_itself(tmp_path):
    kept_in(tmp_path)
    with UnfinishedScores(tmp_path, "two") as scores:
        assert scores.n_trials == 0


@pytest.mark.parametrize(
    "damage",
    [b"[[1,2],[3", b"[[1,2],[3,NaN]]\n", b"[[1],[2],[3]]\n", b"\xff\n", b"[" * 9999 + b"\n",
     b'{"a":1}\n', b"[[1,2],[3]]\n", b"7\n", b"\n"],
)  # fmt: skip
def test_a_damaged_line_ends_what_is_known(damage, tmp_path):
    path = kept_in(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + damage + b"[[1],[2]]\n")
    with UnfinishedScores(tmp_path, "one") as scores:
        assert scores.n_trials == 8
        assert path.read_bytes() == whole
        for n in (3, 5):
            scores.next(n, must_not_run)
        np.testing.assert_array_equal(scores.next(1, lambda: two(1)), two(1))
    assert len(path.read_text().splitlines()) == 3


def test_parts_of_another_size_are_measured_again(tmp_path):
    kept_in(tmp_path)
    with UnfinishedScores(tmp_path, "one") as scores:
        np.testing.assert_array_equal(scores.next(4, lambda: two(4)), two(4))
        assert scores.n_trials == 0


def test_a_second_process_keeps_nothing(tmp_path):
    path = kept_in(tmp_path)
    whole = path.read_bytes()
    with UnfinishedScores(tmp_path, "one"), UnfinishedScores(tmp_path, "one") as second:
        assert second.n_trials == 0
        np.testing.assert_array_equal(second.next(3, lambda: two(3)), two(3))
        second.remove()
    assert path.read_bytes() == whole


def test_parts_of_a_run_that_ended_meanwhile_are_not_taken(tmp_path):
    with UnfinishedScores(tmp_path, "one") as scores:
        path = kept_in(tmp_path, (3, 3))
        whole = path.read_bytes()
        for start in (1.0, 2.0):
            part = two(3, start)
            np.testing.assert_array_equal(scores.next(3, lambda part=part: part), part)
        scores.remove()
    assert path.read_bytes() == whole


def test_a_full_disk_does_not_end_a_calibration(tmp_path, monkeypatch):
    def fail(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WrittenFile, "write", fail)
    path = kept_in(tmp_path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_no_file_is_left_alone(is_folder, tmp_path):
    path = tmp_path / "one.unfinished"
    path.mkdir() if is_folder else os.mkfifo(path)
    with UnfinishedScores(tmp_path, "one") as scores:
        np.testing.assert_array_equal(scores.next(3, lambda: two(3)), two(3))
        scores.remove()
    assert path.exists()


def test_without_a_folder_nothing_is_kept():
    with UnfinishedScores(None, "one") as scores:
        np.testing.assert_array_equal(scores.next(3, lambda: two(3)), two(3))
        scores.remove()


def test_old_files_are_removed(tmp_path):
    path = kept_in(tmp_path)
    before = path.stat().st_mtime - (KEPT_DAYS + 1) * DAY
    os.utime(path, (before, before))
    with UnfinishedScores(tmp_path, "two") as scores:
        scores.next(1, lambda: two(1))
    assert [each.name for each in tmp_path.iterdir()] == ["two.unfinished"]
    assert json.loads((tmp_path / "two.unfinished").read_text()) == two(1).tolist()
