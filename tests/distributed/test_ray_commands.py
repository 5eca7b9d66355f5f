"""``run --jsonl --ray`` and ``eval ruler --ray`` give what one machine gives, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_ray import FakeRay

from sparsekv_cli.cli import main
from sparsekv_cli.distributed import cluster, workers


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Two nodes of one CPU; the first call of the second actor ends it."""
    fake, lost = FakeRay([1, 1], lambda arguments: False), []

    def lose(arguments: tuple[Any, ...]) -> bool:
        lost.append(len(arguments))
        return lost == [2, 1]

    @contextmanager
    def connect(address: str) -> Iterator[cluster.RayCluster]:
        yield cluster.RayCluster(fake, address)

    fake.lose = lose
    monkeypatch.setattr(workers, "connect", connect)
    return fake


def call(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    return left.value.code or 0


LINES = [{"prompt": "one two"}, {"prompt": "", "id": 3}, {"prompt": "b"}, *[{"prompt": "c"}] * 5]


def test_lines(ray: FakeRay, tiny_model: Callable[..., Path], tmp_path: Path, capsys: Any) -> None:
    prompts, one, many = (tmp_path / name for name in "pom")
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES), "utf-8")
    command = ["run", "--jsonl", "-m", str(tiny_model()), "-f", str(prompts), "-n", "4"]
    command += ["-t", "1", "-s", "1", "--prefill-dtype", "f32", "--method", "topk"]
    assert call(*command, "--output", str(one)) == 1
    capsys.readouterr()
    assert call(*command, "--output", str(many), "--ray", "auto") == 1
    said = capsys.readouterr().err
    assert many.read_bytes() == one.read_bytes() and one.read_bytes().count(b"\n") == len(LINES)
    assert "error: line 2: prompt: expected a text" in said and "2 nodes, 1 lost" in said
    assert "error: 1 of 8 lines have no answer" in said and ray.n_made == 3
    assert call(*command[:1], *command[2:], "--ray", "auto") == 2  # without --jsonl
    assert call(*command, "--ray", "auto", "--session", str(tmp_path / "s")) == 2


def test_samples_of_ruler(ray: FakeRay, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model(n_vocab=270, n_ctx=1100)
    command = ["eval", "ruler", "-m", str(model), "-t", "1", "--prefill-dtype", "f32", "--raw"]
    command += ["--tasks", "niah_single_1", "--lengths", "1000", "--samples", "3", "-n", "3"]
    command += ["--method", "full", "--method", "streaming:budget=64"]
    one, many = tmp_path / "one", tmp_path / "many"
    assert call(*command, "--jsonl", str(one)) == 0
    assert call(*command, "--jsonl", str(many), "--ray", "auto") == 0
    assert many.read_bytes() == one.read_bytes() and one.read_bytes().count(b"\n") == 7
    assert ray.n_made == 3
    assert call(*command, "--jsonl", str(many), "--ray", "auto") == 0  # nothing is left to do
    assert many.read_bytes() == one.read_bytes() and ray.n_made == 3
