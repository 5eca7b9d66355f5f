"""Methods of FAEDKV whose layers all have the same share."""

from typing import Any

from sparsekv_cli.cache.spec import Budget
from sparsekv_cli.methods.faedkv import FAEDKV

EVERY_BIN = Budget(share=0.99999)  # rounds to all bins; 100% transforms nothing


def uniform(share: float, update: str = "block", **options: Any) -> FAEDKV:
    budget = Budget(share=share)
    return FAEDKV(budget=budget, allocation="uniform", update=update, **options)
