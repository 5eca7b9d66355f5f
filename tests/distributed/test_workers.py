"""Shards and actors: order, losses, nodes that cannot work; what is sent along; bad addresses."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import calibrated_method
import numpy as np
import pytest
from fake_ray import FakeRay
from tiny_models import make_model

from sparsekv_cli.distributed import cluster as connection
from sparsekv_cli.distributed.cluster import RayCluster, check_address
from sparsekv_cli.distributed.settings import Room, room_of, settings_of
from sparsekv_cli.distributed.workers import Workers
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.methods import build_method
from sparsekv_cli.model import load_model
from sparsekv_cli.settings.config import SessionConfig


def open_squares(settings: Any) -> Callable[[int], int]:
    if settings == "no model":
        raise SparseKVError("m.gguf is missing")

    def work(n: int) -> int:
        if n == 13:
            raise ZeroDivisionError("of 13")
        return n * n

    return work


def squares(ray: FakeRay, numbers: Any, settings: str = "") -> tuple[list[int], Workers, list[str]]:
    told: list[str] = []
    workers = Workers(RayCluster(ray, ""), Room(2, 0, 8), open_squares, settings, told.append)
    return list(workers.map(numbers)), workers, told


def test_results_come_in_order_from_all_the_room_there_is():
    ray = FakeRay([4, 1, 3], lambda arguments: False)
    found, workers, told = squares(ray, range(20, 29))
    assert found == [n * n for n in range(20, 29)]
    assert ray.n_made == workers.n_actors == 3 and not told
    workers.close()
    assert ray.n_killed == 3
    assert squares(ray, [])[0] == []


def test_a_lost_shard_goes_to_another_actor():
    """Whose place is taken as long as a node has room for it."""
    ray = FakeRay([2, 2], lambda arguments: False)
    lost: list[int] = []

    def lose(arguments: tuple[Any, ...]) -> bool:
        if arguments == (23,) and len(lost) < 2:
            lost.append(23)
            ray.cpus = [2, 0]
            return True
        return False

    ray.lose = lose
    found, workers, told = squares(ray, range(20, 26))
    assert found == [n * n for n in range(20, 26)] and workers.n_lost == 2 == len(told)
    assert "node died" in told[0] and workers.n_actors == 1


@pytest.mark.parametrize(
    ("lost", "cpus", "settings", "words"),
    [
        (lambda arguments: arguments == (5,), [2], "", "shard 1 was given to 3 workers"),
        (lambda arguments: len(arguments) == 2, [2], "", "3 workers were lost while they opened"),
        (lambda arguments: False, [1, 1], "", "no node of the Ray cluster has room"),
        (lambda arguments: False, [2], "no model", "m.gguf is missing"),
    ],
)
def test_what_ends_the_work(lost, cpus, settings, words):
    with pytest.raises(SparseKVError, match=words):
        squares(FakeRay(cpus, lost), [5, 6], settings)


def test_a_fault_of_the_work_is_no_loss():
    with pytest.raises(SparseKVError, match="unexpected ZeroDivisionError: of 13"):
        squares(FakeRay([2], lambda arguments: False), [13])


def test_a_lost_cluster(monkeypatch):
    from sparsekv_cli.distributed import workers

    monkeypatch.setattr(workers, "SECONDS_BETWEEN_CHECKS", 0.01)
    monkeypatch.setattr(connection, "_answers", lambda address: False)
    ray = FakeRay([2], lambda arguments: False)
    ray.wait = lambda *_, **__: __import__("time").sleep(5)  # type: ignore[method-assign]
    with pytest.raises(SparseKVError, match="is lost: its head does not answer"):
        squares(ray, [1])


@pytest.mark.parametrize(
    ("address", "words"),
    [("here", "expected auto or HOST:PORT"), ("a:0", "expected auto"),
     ("127.0.0.1:1", "nobody answers there")],
)  # fmt: skip
def test_addresses(address, words, monkeypatch):
    with pytest.raises(SparseKVError, match=words):
        check_address(address)
    monkeypatch.setattr(connection, "find_spec", lambda name: None)
    with pytest.raises(SparseKVError, match=r"sparsekv-cli\[ray\]"):
        check_address(address)


def test_a_model_is_opened_as_it_was_here(tmp_path, monkeypatch):
    """Nothing is left to a machine; a calibration is sent, and not made again."""
    path = make_model(tmp_path / "model.gguf", n_layer=3, n_ctx=400, wtype="Q8_0")
    fake = calibrated_method.install(monkeypatch)
    method = build_method("fake", {})
    model = load_model(path, method, SessionConfig(sparse_from=-1))
    settings = pickle.loads(pickle.dumps(settings_of(model, method)))
    config = settings.config
    assert config.threads >= 1 and config.sparse_from >= 0 and config.device == "cpu"
    assert "auto" not in (config.prefill_dtype, config.repack)
    path.with_name("model.calibration.npz").unlink()
    other = settings.open()
    assert len(fake.runs) == 1 and other.sparse_from == model.sparse_from
    ids = list(range(3, 60))
    here, there = model.sequence(), other.sequence()
    np.testing.assert_array_equal(here.prefill(ids), there.prefill(ids))
    np.testing.assert_array_equal(here.decode(5), there.decode(5))
    one, two = room_of(model, 1), room_of(model, 3)
    assert one.n_cpus == model.n_threads and one.n_gpus == 0
    assert two.n_bytes - one.n_bytes == 2 * 400 * 3 * 2 * 2 * (64 + 64)  # rows, layers, heads
    for wrong, words in (
        (replace(settings, path=tmp_path / "none.gguf"), "every node needs the model at that path"),
        (replace(settings, version="0"), "not 0"),
        (replace(settings, sidecar=b"", method=build_method("full", {}), model_hash=""), "another"),
    ):
        with pytest.raises(SparseKVError, match=words):
            wrong.open()


def test_a_draft_model_is_counted_and_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = make_model(tmp_path / "model.gguf", n_layer=3, n_ctx=400, wtype="Q8_0")
    small = make_model(tmp_path / "small.gguf", n_layer=1, n_ctx=300, wtype="Q8_0")
    method, config = build_method("full", {}), SessionConfig(threads=1, repack="off")
    alone = load_model(path, method, config)
    model = load_model(path, method, replace(config, draft_model=small.name))
    more = [room_of(model, n).n_bytes - room_of(alone, n).n_bytes for n in (1, 3)]
    assert more == [small.stat().st_size + n * 300 * 2 * 2 * (64 + 64) for n in (1, 3)]
    settings = pickle.loads(pickle.dumps(settings_of(model, method)))
    assert settings.config.draft_model == str(small)
    monkeypatch.chdir("/")
    assert settings.open().draft is not None
