"""The work of a prefill in multiplications, to which its time is proportional."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekv_cli.cache.spec import FULL
from sparsekv_cli.calibration.calibrations import layer_products
from sparsekv_cli.models.reading.sparse_prefill import N_DENSE, rows_attended

if TYPE_CHECKING:
    from sparsekv_cli.models.gguf.file import GGUFFile
    from sparsekv_cli.models.hparams import HParams


def attention_work(hparams: HParams, n: int, budget: int | None = None) -> float:
    """Returns the multiplications of attention in a prefill of n tokens.

    budget: the rows that sparse reading attends to; None: the prompt is read densely.
    """
    full = [layer for layer in hparams.layers if layer.kind == FULL]
    rows = [layer.n_head * (layer.head_dim + layer.value_dim) for layer in full]
    n_dense = len(full) if budget is None else N_DENSE
    attended = n * n / 2 * sum(rows[:n_dense])
    if budget is not None:
        attended += rows_attended(n, budget) * sum(rows[n_dense:])
    return attended


def prefill_work(file: GGUFFile, hparams: HParams, n: int, budget: int | None = None) -> float:
    """Returns the multiplications of a prefill: by weights, and in attention.

    budget: see ``attention_work``.
    """
    return n * layer_products(file, hparams) + attention_work(hparams, n, budget)
