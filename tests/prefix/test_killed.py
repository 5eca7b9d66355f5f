"""A process that is killed while it keeps a prompt: what it leaves is whole, or is not read."""

from __future__ import annotations

import builtins
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kept_prompts import N_SMALL_LAYERS, KnownRoot, prefixes_of
from kept_prompts import small_layers as layers
from tiny_sequences import tokens

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.prefix import blocks
from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.prefixes import Prefixes

IDS = tokens(1100)
LONG_AGO = 10**9  # seconds


def prefixes_in(folder: Path, said: list[str]) -> Prefixes:
    return prefixes_of(folder, KnownRoot("f" * 32), said.append, lambda text: None)


def keep(folder: Path, caches: list[DenseCache], said: list[str]) -> None:
    prefixes = prefixes_in(folder, said)
    prefixes.begin(IDS, prefixes.find(IDS), 0, caches)
    for i, cache in enumerate(caches):
        prefixes.take(i, cache)
    prefixes.finish()


class KillingFile:
    """A file whose writes are steps; half of what a deadly one writes has been written."""

    def __init__(self, file: Any, step: Any) -> None:
        self.file, self.step = file, step

    def __enter__(self) -> KillingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, at: int) -> None:
        self.file.seek(at)

    def write(self, data: Any) -> None:
        data = bytes(data)
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        self.step()
        self.file.write(data[len(data) // 2 :])


def keep_and_die(folder: Path, caches: list[DenseCache], deadly: int) -> bool:
    """Keeps the prompt in a process that is killed at step ``deadly``; whether there is one."""
    child = os.fork()
    if not child:
        try:
            n = 0

            def step() -> None:
                nonlocal n
                n += 1
                if n == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)

            def around(function: Any) -> Any:
                def call(*arguments: Any, **named: Any) -> Any:
                    step()
                    result = function(*arguments, **named)
                    step()
                    return result

                return call

            blocks.open = lambda *a: KillingFile(builtins.open(*a), step)  # noqa: SIM115
            blocks.tempfile = SimpleNamespace(mkstemp=around(blocks.tempfile.mkstemp))
            os.replace, os.utime, Path.mkdir = map(around, (os.replace, os.utime, Path.mkdir))
            keep(folder, caches, [])
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_every_write(tmp_path):
    caches = layers(len(IDS))
    n_steps, found = 0, set()
    while keep_and_die(tmp_path / str(n_steps), caches, n_steps + 1):
        folder, said = tmp_path / str(n_steps), []
        for again in (False, True):
            into, prefixes = layers(), prefixes_in(folder, said)
            n = prefixes.load(prefixes.find(IDS), into, len(IDS))
            found.add((again, n))
            for cache, expected in zip(into, caches, strict=True):
                for rows, right in (
                    (cache.store.k, expected.store.k),
                    (cache.store.v, expected.store.v),
                ):
                    np.testing.assert_array_equal(rows[:, :n], right[:, :n])
            keep(folder, caches, said)  # what is missing
        assert not [line for line in said if "are kept in" not in line]
        for path in folder.glob("*.tmp"):
            os.utime(path, (LONG_AGO, LONG_AGO))
        PrefixFolder(folder, 1 << 30, said.append).trim()
        assert sorted(path.suffix for path in folder.iterdir()) == [".rows"] * 3
        n_steps += 1
    assert n_steps > 3 * (2 * N_SMALL_LAYERS * 2 * 2 + 2) / 2
    assert found == {(False, 0), (False, 1088), (True, 1088)}
