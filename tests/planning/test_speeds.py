"""Forecasts from measured speeds, and what is measured of a model's shape."""

import json
from pathlib import Path

import numpy as np
import pytest
from opened import open_sequence
from sidecars import entry
from tiny_models import make_model

from sparsekv_cli import machine
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.models.gguf.file import open_gguf
from sparsekv_cli.planning import kept, measure
from sparsekv_cli.planning.kept import method_key, read_speeds, speeds_of
from sparsekv_cli.planning.plan import Forecast, make_plan
from sparsekv_cli.planning.speeds import (
    DepthPoint,
    LayerPoint,
    MethodCurve,
    Speeds,
    interpolate,
    middle,
)
from sparsekv_cli.settings.config import SessionConfig

NAMES = ("full", "quest", "lfps", "freekv")
FULL, QUEST, LFPS, FREEKV = (build_method(name, {}) for name in NAMES)
CONFIG = SessionConfig(device="cpu", threads=1)


def into(seen):
    return lambda what, *_: seen.append(what)


def curve(method, dense, sparse, each, index=0):
    """Layers whose attention takes ``each`` seconds at 0 and 1000 rows; a byte 2e-8 seconds."""
    points = [
        DepthPoint(n, 2e-8, LayerPoint(s, 100 * n, index * n), LayerPoint(2 * s, 100 * n, 0))
        for n, s in zip((0, 1000), each, strict=True)
    ]
    return MethodCurve(method.options(), dense, sparse, points)


def some_speeds(weight_bytes: int) -> Speeds:
    methods = {
        method_key(FULL): curve(FULL, 0, 4, (0.0, 0.001)),
        method_key(QUEST): curve(QUEST, 2, 2, (0.0005, 0.0005), index=7),
        method_key(LFPS): curve(LFPS, 0, 4, (0.0005, 0.0005)),
    }
    return Speeds("a CPU", 2, "2026-01-01", 1e10, 0.009, 0.004, weight_bytes, 5000, 10_000, methods)


@pytest.fixture
def header(tmp_path: Path) -> Path:
    """A model file that ends behind the table of its tensors."""
    path = make_model(tmp_path / "whole.gguf", wtype="Q4_0", n_layer=4, n_head=4, n_head_kv=2)
    with open_gguf(path) as file:
        end = file.parts[0].data_offset
    cut = tmp_path / "header.gguf"
    cut.write_bytes(path.read_bytes()[:end])
    return cut


def test_the_cpu_is_measured_where_there_is_a_gpu(header, monkeypatch):
    devices = []

    def open_engine(hparams, architecture, weights, method, config, *more):
        devices.append(config.device)
        return machine.open_engine(hparams, architecture, weights, method, config, *more)

    monkeypatch.setattr(measure, "open_engine", open_engine)
    with open_gguf(header, header_only=True) as file:
        measure.Measurement(file, SessionConfig(device="auto"), is_quick=True)
    assert devices == ["cpu"]


@pytest.mark.parametrize(
    ("n", "expected"), [(0, 0.0), (150, 15.0), (200, 20.0), (300, 40.0), (500, 80.0), (50, 5.0)]
)
def test_between_points_there_is_a_line(n, expected):
    assert interpolate([(100, 10.0), (200, 20.0), (400, 60.0)], n) == pytest.approx(expected)
    assert interpolate([(100, 10.0)], n) == 10.0
    assert interpolate([(100, 10.0), (200, 5.0)], 400) == 5.0


def test_the_medians_of_several_measurements():
    times = (0.1, 0.4), (0.2, 0.9), (0.3, 0.2)
    found = [curve(QUEST, 2, 2, each, index=7) for each in times]
    assert middle(found) == curve(QUEST, 2, 2, (0.2, 0.4), index=7)
    assert middle(found[:1]) == found[0]


def test_a_slower_minute_and_the_dense_layers_of_full():
    quest = curve(QUEST, 2, 2, (0.2, 0.4), index=7)
    assert quest.times(2).seconds(1000) == pytest.approx(2 * quest.seconds(1000))
    assert quest.times(2).byte_seconds(500) == pytest.approx(4e-8)
    assert quest.times(2).index(1000) == quest.index(1000)
    assert quest.times(0.5).times(2) == quest
    mixed = quest.with_dense_layers_of(curve(FULL, 0, 4, (0.5, 0.7)))
    assert mixed.seconds(1000) == pytest.approx(2 * 0.7 + 2 * 0.4)


def test_a_forecast_from_a_header_alone(header):
    with pytest.raises(SparseKVError, match="bytes are missing"):
        open_gguf(header)
    with open_gguf(header, header_only=True) as file:
        assert not file.has_data
        whole = read_weights_of(header.with_name("whole.gguf"))
        n_bytes = whole.bytes_a_step(1)
        speeds, step = some_speeds(n_bytes), 2e-8 * n_bytes
        plan = make_plan(file, speeds, [FULL, QUEST, LFPS, build_method("sals", {})], 2000)
        forecast = Forecast(file, speeds)
    full, quest, lfps, sals = plan.methods
    assert full.decode_tps == pytest.approx(1 / (step + 4 * 0.002))
    assert quest.decode_tps == pytest.approx(1 / (step + 2 * 2 * 0.0005 + 2 * 0.0005))
    assert quest.pays_from == 768  # 4 n / 1e6 > 0.003 s
    assert (quest.kv_bytes, quest.index_bytes) == (4 * 100 * 2000 + 5000, 2 * 7 * 2000)
    assert full.weights_bytes == whole.n_bytes_held
    assert plan.ceiling == pytest.approx((step + 4 * 0.002) / 0.004)
    assert f"{plan.ceiling:.2f} times" in plan.verdict()
    assert lfps.sparse_from == 2 * 1280  # so at 2000 rows it is dense
    assert lfps.decode_tps == full.decode_tps
    assert forecast.seconds(LFPS, 2561) == pytest.approx(step + 4 * 0.0005)
    assert sals.decode_tps is None
    assert "calibrate" in sals.note
    room = forecast.total(FULL, 1024)
    assert forecast.fitting_context(FULL, room) == 1024


def read_weights_of(path):
    from sparsekv_cli.planning.stand_in import read_stand_in

    with open_gguf(path) as file:
        return read_stand_in(file).weights


@pytest.fixture
def briefly(monkeypatch, tmp_path):
    """Two small depths, and speeds that are kept in a folder of the test's own."""
    monkeypatch.setattr(measure, "DEPTHS", (300, 600))
    monkeypatch.setattr(measure, "QUICK_DEPTHS", (300, 600))
    monkeypatch.setattr(measure, "N_STEPS", 2)
    monkeypatch.setattr(measure, "measure_bandwidth", lambda n_threads: 1e10)
    monkeypatch.setattr(kept, "user_cache", tmp_path.joinpath)
    monkeypatch.setattr(kept, "load_beyond_cores", lambda: None)
    return tmp_path / "speeds"


def test_speeds_are_measured_once(header, briefly):
    seen = []
    with open_gguf(header, header_only=True) as file:
        first = speeds_of(file, CONFIG, [QUEST], on_measure=into(seen))
        assert seen == ["weights", *["full", "quest"] * 3, "done"]
        again = speeds_of(file, CONFIG, [QUEST, build_method("sals", {})], on_measure=into(seen))
        assert len(seen) == 8
        more = speeds_of(file, CONFIG, [LFPS], on_measure=into(seen))
    assert json.dumps(again.as_dict()) == json.dumps(first.as_dict())
    assert seen[8:] == ["weights", *["lfps"] * 3, "done"]
    assert more.methods.keys() > first.methods.keys() and more.step_seconds == first.step_seconds
    (path,) = briefly.glob("*.json")
    assert json.dumps(read_speeds(path).as_dict()) == json.dumps(more.as_dict())
    path.write_text("{}")
    assert read_speeds(path) is None


def test_memory_grows_with_the_context_on_a_full_machine(header, briefly, monkeypatch):
    """A depth that has no room is not measured, but two are."""
    monkeypatch.setattr(measure, "DEPTHS", (300, 600, 900))
    monkeypatch.setattr(measure, "available_memory", lambda: 1)
    with open_gguf(header, header_only=True) as file:
        speeds = speeds_of(file, CONFIG, [])
    full = speeds.methods[method_key(FULL)]
    assert [point.n for point in full.points] == [300, 600]
    assert full.host(60_000) > 50 * full.host(600)


def test_a_quick_measurement_is_kept_apart(header, briefly):
    """It measures each method once; what --measure finds goes first."""
    seen = []
    with open_gguf(header, header_only=True) as file:
        for methods in ([QUEST], [QUEST], [QUEST, LFPS]):
            quick = speeds_of(file, CONFIG, methods, is_quick=True, on_measure=into(seen))
        assert seen == ["weights", "full", "quest", "done", "weights", "lfps", "done"]
        assert quick.is_quick and not speeds_of(file, CONFIG, [QUEST]).is_quick
        assert not speeds_of(file, CONFIG, [QUEST], is_quick=True).is_quick
        assert speeds_of(file, CONFIG, [QUEST, LFPS], is_quick=True).is_quick
    assert len(list(briefly.iterdir())) == 2


def test_what_a_busy_machine_measured_is_measured_again_when_it_is_quiet(
    header, briefly, monkeypatch
):
    """Not while it is busy, and not if it took minutes."""
    seen = []

    def measured(is_busy, **given):
        monkeypatch.setattr(kept, "load_beyond_cores", lambda: (9.0, 2) if is_busy else None)
        seen.clear()
        with open_gguf(header, header_only=True) as file:
            found = speeds_of(file, CONFIG, [], on_measure=lambda *told: seen.append(told), **given)
        return bool(seen), found.is_busy

    busy = [True, True, False, False, True]
    expected = [(True, True), (False, True), (True, False), (False, False), (False, False)]
    assert [measured(each, is_quick=True) for each in busy] == expected
    assert [measured(each) for each in (True, False)] == [(True, True), (False, True)]


def test_curves_of_slow_and_fast_minutes_are_alike(header, briefly, monkeypatch):
    """All that is measured takes as long as the machine is slow, the yardstick too."""
    first, later = [1] * 6, [1, 4, 4, 4]  # by call of pace, of which two are beside the weights
    slowness = iter(first + later)
    now = [1.0]

    def pace(self):
        now[0] = next(slowness)
        return 0.01 * now[0]

    def measured(self, method, calibration):
        return curve(method, 0, 4, (0.1, 0.2)).times(now[0])

    monkeypatch.setattr(measure.Measurement, "pace", pace)
    monkeypatch.setattr(measure.Measurement, "curve", measured)
    with open_gguf(header, header_only=True) as file:
        speeds_of(file, CONFIG, [])
        slow = speeds_of(file, CONFIG, [LFPS])
    assert slow.pace == 0.01
    full, lfps = (slow.methods[method_key(each)] for each in (FULL, LFPS))
    assert lfps.seconds(1000) == pytest.approx(full.seconds(1000))


def test_a_curve_is_of_one_calibration(header, briefly, monkeypatch):
    """Models of one shape share speeds, but not those of a calibrated method."""
    entries, measured, sals = [entry(0), entry(1), None, entry(0)], [], build_method("sals", {})

    def measure_curve(self, method, calibration):
        measured.append(method.name)
        return curve(method, 0, 4, (0.1, 0.2))

    monkeypatch.setattr(measure.Measurement, "curve", measure_curve)
    for i, own in enumerate(entries):
        monkeypatch.setattr(kept, "calibration_of", lambda *of, own=own: own)
        for _ in range(2):
            with open_gguf(header, header_only=True) as file:
                found = speeds_of(file, CONFIG, [sals])
            assert (method_key(sals) in found.methods) == (own is not None), i
    assert measured == ["full", "sals"] * 3 + ["sals"] * 6


def test_what_is_measured_is_what_a_session_holds(header, briefly):
    """Bytes of rows and index after a prompt, and of weights in a step."""
    whole = header.with_name("whole.gguf")
    with open_gguf(whole) as file:
        speeds = speeds_of(file, CONFIG, [QUEST])
    assert speeds.methods[method_key(QUEST)].dense_layers == 2
    for method in (FULL, QUEST):
        sequence = open_sequence(whole, method, CONFIG)
        sequence.prefill(np.arange(600) % 500)
        memory = [cache.memory() for cache in sequence.caches]
        found = speeds.methods[method_key(method)]
        assert found.index(600) == pytest.approx(sum(m.index for m in memory), rel=0.05)
        assert found.host(600) == pytest.approx(sum(m.host for m in memory), rel=0.3)
    assert speeds.step_bytes == sequence.model.decoder.weights.bytes_a_step(1)
    assert all(point.sparse.seconds > 0 for point in found.points)


# gpt-oss has gemma3's windows, qwen35moe has lfm2's recurrent layers.
@pytest.mark.parametrize(
    "architecture",
    [
        *("gemma4", "gpt-oss", "qwen35moe"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3", "lfm2")),
    ],
)
def test_layers_of_all_kinds_and_experts(architecture, tmp_path, briefly):
    """Methods have a part in full layers only, which bounds what they can gain."""
    path = make_model(tmp_path / "model.gguf", arch=architecture, n_layer=6, n_ff=256)
    with open_gguf(path) as file:
        speeds = speeds_of(file, CONFIG, [QUEST, FREEKV])
        plan = make_plan(file, speeds, [FULL, QUEST, FREEKV], 4096)
    assert 0 < plan.full_layers < plan.layers == 6
    assert f"{plan.full_layers} of 6 layers attend to all rows" in plan.verdict()
    assert speeds.other_bytes and all(each.decode_tps and not each.note for each in plan.methods)
