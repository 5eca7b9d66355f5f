"""A naive form of every method, in numpy and f64. Read it next to its paper. Only tests use it."""

from importlib import import_module

from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods.base import Method
from sparsekv_cli.methods.naive.base import Naive


def naive_form(method: Method, spec: LayerSpec) -> Naive:
    """Returns the naive form of ``method`` for one sparse layer of one sequence."""
    module = import_module(f"{__name__}.{method.name}")
    return getattr(module, f"Naive{type(method).__name__}")(method, spec)
