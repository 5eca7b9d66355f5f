"""``run --jsonl --ray`` and ``eval ruler --ray`` give what one machine gives, byte by byte."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
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


def test_lines(ray, tiny_model, tmp_path, capsys):
    prompts, one, many = (tmp_path / name for name in "pom")
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES), "utf-8")
    command = ["run", "--jsonl", "-m", str(tiny_model()), "-f", str(prompts), "-n", "4"]
    command += ["-t", "1", "-s", "1", "--prefill-dtype", "f32", "--method", "topk"]
    assert call(*command, "--output", str(one)) == 1
    capsys.readouterr()
    assert call(*command, "--output", str(many), "--ray", "auto") == 1
    said = capsys.readouterr().err
    assert many.read_bytes() == one.read_bytes() and one.read_bytes().count(b"\n") == len(LINES)
    assert 'error: line 2: prompt is "": expected one' in said and "2 nodes, 1 lost" in said
    assert "error: 1 of 8 lines have no answer" in said and ray.n_made == 3
    assert call(*command[:1], *command[2:], "--ray", "auto") == 2  # without --jsonl
    assert call(*command, "--ray", "auto", "--session", str(tmp_path / "s")) == 2


def test_samples_of_ruler(ray, tiny_model, tmp_path):
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


def test_chunks_of_a_text(ray, tiny_model, tmp_path, capsys):
    """Figures, records and log-probabilities; what is there is not scored again."""
    text, one, many = (tmp_path / name for name in ("text", "one", "many"))
    text.write_text("the quick brown fox jumps over the lazy dog and runs away " * 8)
    command = ["-m", str(tiny_model()), "-t", "1", "--prefill-dtype", "f32", "--json"]
    of_text = [*command, "-f", str(text), "-c", "40", "--chunks", "3"]
    two = ["--method", "full", "--method", "streaming:budget=8;dense_layers=none"]

    def same(what: str, *arguments: str, kept: str, n_lines: int = 0) -> None:
        ray.n_made = 0
        told = []
        for path, others in ((one, []), (many, ["--ray", "auto"])):
            assert call("eval", what, *arguments, kept, str(path), *others) == 0
            told.append(capsys.readouterr().out)
        assert many.read_bytes() == one.read_bytes() and told[0] == told[1]
        assert not n_lines or one.read_bytes().count(b"\n") == n_lines

    same("perplexity", *of_text, kept="--kl-divergence-base")
    base = one.rename(tmp_path / "base")
    many.unlink()
    same("kld", *command, *two, "--kl-divergence-base", str(base), kept="--jsonl", n_lines=7)
    one.unlink(), many.unlink()
    same("kld", *of_text, *two[2:], kept="--jsonl", n_lines=7)
    one.unlink(), many.unlink()
    same("perplexity", *of_text, *two[:2], kept="--jsonl", n_lines=4)
    same("perplexity", *of_text, *two, kept="--jsonl", n_lines=7)
    assert ray.n_made == 2
    same("perplexity", *of_text, *two, kept="--jsonl", n_lines=7)
    assert ray.n_made == 0
