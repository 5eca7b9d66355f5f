"""Sequences on a tiny model whose heads are like those of real ones, for tests of every method."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

import numpy as np
from opened import OpenSequence, open_sequence

from sparsekv_cli.methods import METHODS, build_method, method_class
from sparsekv_cli.sequence import Sequence
from sparsekv_cli.settings.config import SessionConfig

N_LAYER, N_HEAD, N_KV = 4, 6, 2
SHAPE = {
    "n_layer": N_LAYER, "n_head": N_HEAD, "n_head_kv": N_KV, "head_dim": 64, "n_embd": 128,
    "n_ff": 128, "attention_gain": 4.0,
}  # fmt: skip
# Every method, and what else of a method knows of the past: name and options.
CASES = {name: (name, {}) for name in METHODS} | {
    "lfps, paper": ("lfps", {"preset": "paper"}),
    "lfps, scout": ("lfps", {"scout": "128"}),
    "freekv, ahead": ("freekv", {"overlap": "true"}),
    "freekv, pages of 16": ("freekv", {"page": "16", "summary": "minmax"}),
    "streaming, repositioned": ("streaming", {"reposition": "true"}),
    "fasa, m": ("fasa", {"variant": "m"}),
    "sals, paper": ("sals", {"preset": "paper"}),
    "sals, a window of 8": ("sals", {"window": "8", "sinks": "4"}),
    "faedkv, additive": ("faedkv", {"update": "additive"}),
    "faedkv, blocks of 16": ("faedkv", {"block": "16", "recent": "10"}),
    "h2o, window": ("h2o", {"window": "16"}),
}  # fmt: skip
CHUNK = 16  # prompts that are split at multiples of it are computed alike to the last bit


def runs_on(name: str, shape: Mapping[str, Any]) -> bool:
    """Whether a method is not refused on a model of this shape: its attention may be latent."""
    return shape.get("arch") != "deepseek2" or not method_class(name).needs_values


def open_tiny(
    tiny_model: Callable[..., Path],
    name: str,
    options: Mapping[str, str] | None = None,
    *,
    budget: str | None = None,
    dense_layers: str | None = None,
    types: tuple[str, str] | None = None,
    chunk: int = CHUNK,
    ctx_size: int = 0,
    sparse_from: int = 0,
    shape: Mapping[str, Any] = SHAPE,
) -> OpenSequence:
    """A sequence with one thread and f32 prefill; a method's name and options as on the command
    line (``full`` has no budget), ``types`` of K and V, the model's ``shape``.
    """
    method = build_method(
        name,
        options or {},
        budget=None if name == "full" else budget,
        dense_layers=dense_layers,
        cache_type_k=types and types[0],
        cache_type_v=types and types[1],
    )
    config = SessionConfig(
        threads=1, prefill_dtype="f32", chunk=chunk, ctx_size=ctx_size, sparse_from=sparse_from
    )
    return open_sequence(tiny_model(**shape), method, config)


def tokens(n: int, seed: int = 0) -> list[int]:
    """Ids of a tiny vocabulary, none of them special."""
    return np.random.RandomState(seed).randint(3, 512, n).tolist()


def decoded(sequence: Sequence, ids: Ids[int]) -> np.ndarray:
    """Logits f32 (len(ids), n_vocab) of one decode step after another."""
    return np.stack([sequence.decode(token) for token in ids])


def greedy(logits: np.ndarray, _tokens: Ids[int]) -> int:
    return int(np.argmax(logits))


def counts_after(sequence: Sequence, n_prompt: int, n_steps: int) -> dict[str, int]:
    """The ledger after a prompt and decode steps, whose rows it has counted."""
    sequence.prefill(tokens(n_prompt))
    decoded(sequence, tokens(n_steps, 1))
    counts = sequence.ledger()
    lengths = range(n_prompt + 1, n_prompt + n_steps + 1)
    assert counts["rows_total"] == N_LAYER * N_HEAD * sum(lengths)
    return counts
