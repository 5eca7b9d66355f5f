"""Sessions that keep prompts in a folder of a test, and what they say about it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.prefixes import Prefixes, Root
from sparsekv_cli.session import Session

LIMIT = 1 << 30  # bytes


class KnownRoot(NamedTuple):
    """In the place of a Root (prefixes.py), without a model."""

    name: str | None

    def known(self) -> str | None:
        return self.name


def keeping(session: Session, folder: Path, limit: int = LIMIT) -> list[str]:
    """Lets ``session`` keep its prompts in ``folder``; returns the lines that it will say."""
    said: list[str] = []
    method = session.method
    types = method.cache_type_k, method.cache_type_v
    assert method.n_queried is not None
    session.prefixes = Prefixes(
        PrefixFolder(folder, limit, said.append),
        "tiny.gguf",
        Root(session.gguf, session.decoder, types=types),
        types,
        method.n_queried,
        lambda text: said.append(f"-v {text}"),
        bool(session.hparams.other_layers),
    )
    return said


def keep(session: Session, ids: list[int]) -> np.ndarray:
    """Prefills ``ids`` and keeps their rows; the logits after them."""
    assert session.prefixes is not None
    logits = session.prefill(ids)
    session.prefixes.finish()
    return logits
