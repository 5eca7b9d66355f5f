"""Launches of kernels/attention.py to compile; see test_compile.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from geometries import GEOMETRIES, ODD

from sparsekv_cli.kernels import attention


def launches() -> Iterator[Callable[[], object]]:
    for geometry in (*GEOMETRIES, ODD):
        n_kv, d = geometry.n_kv_head, geometry.d
        new = torch.empty(2, n_kv, d)
        cache = torch.empty(2, n_kv, 128, d, dtype=torch.float16)
        pos = torch.zeros(2, dtype=torch.int32)
        yield lambda: attention.append_rows(new, new, cache, cache, pos)  # noqa: B023
