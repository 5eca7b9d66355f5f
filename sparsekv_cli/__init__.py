"""sparsekv-cli: run GGUF models on long contexts with sparse KV-cache methods."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

LIBRARY = ("LanguageModel", "Reply", "Stream", "load")


def __getattr__(name: str) -> Any:
    """Imports the library when it is used; __init__.pyi has its types."""
    if name not in LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("sparsekv_cli.library"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *LIBRARY})
