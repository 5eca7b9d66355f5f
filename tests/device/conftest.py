"""Where the kernels of these tests run: a GPU if there is one, else Triton's interpreter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    pytest.importorskip("triton")
    return "cuda" if torch.cuda.is_available() else "cpu"
