"""sparsekv-cli: run GGUF models on long contexts with sparse KV-cache methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsekv_cli.library import LanguageModel, Reply, Stream, load

__version__ = "0.1.0"
__all__ = ["LanguageModel", "Reply", "Stream", "load"]


def __getattr__(name: str) -> Any:
    """Imports the library when it is used: commands that need no model start without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sparsekv_cli import library

    return getattr(library, name)
