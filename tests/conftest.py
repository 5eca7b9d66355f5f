"""Without a GPU, Triton kernels run in its interpreter, to be chosen before any is imported."""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> str:
    """Where Triton kernels run: a GPU if there is one, else Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    quicken_interpreter()
    return "cpu"


@pytest.fixture
def few_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes about as long for a program of one matrix row as for one of 64."""
    if device == "cpu":
        from sparsekv_cli.kernels.weights import dot

        monkeypatch.setattr(dot, "PROGRAMS", 1)
        monkeypatch.setattr(dot, "_rows_a_program", lambda n_rows: 64)


def quicken_interpreter() -> None:
    """Spares Triton's interpreter a quarter of its time: what it does over and over again.

    It exchanges the functions of triton.language for its own at every launch, and looks them all
    through again at every call within a kernel; now once a module, for as long as the tests run.
    And it makes a table of all types whenever it looks one up.
    """
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype")):
        return  # another version of Triton, which takes its time

    exchange, type_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)
    done: set[str] = set()

    def exchange_once(fn: Any) -> SimpleNamespace:
        if fn.__module__ not in done:
            exchange(fn)
            done.add(fn.__module__)
        return SimpleNamespace(restore=lambda: None)

    def numpy_type(type_: Any) -> np.dtype:
        element = type_.scalar
        return np.dtype(np.uint64) if element.is_ptr() else type_of(element)

    interpreter._patch_lang, interpreter._get_np_dtype = exchange_once, numpy_type
