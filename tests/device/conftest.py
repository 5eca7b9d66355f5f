"""Where the kernels of these tests run: a GPU if there is one, else Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def few_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program of one matrix row as for one of four."""
    if device == "cpu":
        from sparsekv_cli.kernels import matvec

        monkeypatch.setattr(matvec, "PROGRAMS", 1)
