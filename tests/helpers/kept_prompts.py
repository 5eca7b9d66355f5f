"""Sequences that keep prompts in a folder of a test, and what they say about it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from opened import OpenSequence

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.prefix.folder import PrefixFolder
from sparsekv_cli.prefix.prefixes import Prefixes

LIMIT = 1 << 30  # bytes
Run = Callable[[OpenSequence, list[int]], Any]
N_SMALL_LAYERS = 2


@dataclass
class KnownRoot:
    """In the place of a RowsIdentity, without a model."""

    name: str | None
    grid = 0

    def known(self) -> str | None:
        return self.name

    def sources(self) -> list["KnownRoot"]:
        return [self]


def prefixes_of(
    folder: Path,
    root: KnownRoot,
    warn: Callable[[str], None],
    tell: Callable[[str], None],
    n_queried: int = 1,
) -> Prefixes:
    """A prefix cache of no model, for ``small_layers``."""
    return Prefixes(PrefixFolder(folder, LIMIT, warn), "m", root, ("f16", "f16"), n_queried, tell)


def small_layers(n: int = 0) -> list[DenseCache]:
    """The caches of two small layers; n rows that tell their place."""
    caches = []
    for i in range(N_SMALL_LAYERS):
        cache = DenseCache(LayerSpec(i, N_SMALL_LAYERS, 2, 2, 16, 16, 1))
        cache.store.reserve(n)
        rows = np.arange(n, dtype=np.float16)[:, None] + np.float16(i)
        cache.store.k[:, :n], cache.store.v[:, :n], cache.store.n = rows, -rows, n
        caches.append(cache)
    return caches


def keeping(sequence: OpenSequence, folder: Path, limit: int = LIMIT) -> list[str]:
    """Lets ``sequence`` keep its prompts in ``folder``; returns the lines that it will say."""
    said: list[str] = []
    method = sequence.method
    types = method.cache_type_k, method.cache_type_v
    assert method.n_queried is not None
    sequence.rows = Prefixes(
        PrefixFolder(folder, limit, said.append),
        "tiny.gguf",
        sequence.model.decoder.identity_of(types),
        types,
        method.n_queried,
        lambda text: said.append(f"-v {text}"),
        bool(sequence.model.hparams.other_layers),
    )
    return said


def keep(sequence: OpenSequence, ids: list[int]) -> np.ndarray:
    """Prefills ``ids`` and keeps their rows; the logits after them."""
    assert sequence.rows is not None
    logits = sequence.prefill(ids)
    sequence.rows.finish()
    return logits


def n_cached(sequence: OpenSequence, ids: list[int], run: Run = OpenSequence.prefill) -> int:
    """Forgets all, then runs ``prefill`` or ``keep``; how many tokens' rows are not computed."""
    sequence.reset()
    sequence.timings.reset()
    run(sequence, ids)
    return sequence.timings.cached_tokens
