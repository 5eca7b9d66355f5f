"""The length of a context from which a method is sparse. At shorter lengths dense steps are faster.

A dense step reads a row once for all query heads of its kv group. A sparse step has other work. It
searches an index, scores candidates and gathers the chosen rows from all over the cache. Most of
this work is done for every query head and hardly grows with the context. A sparse step is faster
where the context is longer than

    (heads of a group) x (rows that a dense step reads in the time of one head's own work).

The second factor is a constant of each method, ``Method.work_of_a_head``, for its default budget.
With 4 heads a group and 512 rows, attention is dense up to 2048 rows. For lfps the constant is a
count. For the others it was measured on a CPU and rounded up. It is not measured again, so that the
same command gives the same text. docs/methods.md has the figures.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sparsekv_cli.cache.kinds import full_layers
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods.base import Method


def sparse_from(method: Method, specs: Iterable[LayerSpec]) -> int:
    """Returns the longest context, in rows, that is dense by default; 0 if there is none."""
    groups = (each.n_head // each.n_head_kv for each in full_layers(specs))
    return method.work_of_a_head * max(groups, default=0)


def with_sparse_from(method: Any, n: int) -> Method:
    """Returns a copy of ``method`` whose budget is all rows up to a context of n rows.

    ``method`` must have an option ``budget``.
    """
    return replace(method, budget=replace(method.budget, sparse_from=n))
