"""Cuts a text into chunks as llama-perplexity does. The second half of each chunk is scored.

A chunk has n_ctx tokens. If the model adds BOS, BOS replaces the chunk's first token. The logits
after tokens n_ctx/2 to n_ctx - 2 are scored by the tokens that follow them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.evaluation.perplexity.kld_file import KLDFile

if TYPE_CHECKING:
    from sparsekv_cli.model import Model


@dataclass(frozen=True)
class Chunk:
    """The inputs to score one chunk."""

    number: int
    ids: list[int]  # tokens that the model reads
    # int (n_scored,): the tokens to predict, the last of which the model does not read
    targets: np.ndarray
    base: np.ndarray | None = None  # u16 (n_scored, row_length): the chunk's rows in a KLDFile

    @property
    def first(self) -> int:
        """The position of the first token after which the logits are scored."""
        return len(self.ids) - len(self.targets)


@dataclass(frozen=True)
class Chunks:
    """All chunks of a text."""

    tokens: np.ndarray  # i32 (n_chunk, n_ctx)
    bos: int | None  # replaces the first token of each chunk; None: it stays
    base: KLDFile | None = None  # log-probabilities of a base for the same tokens

    @property
    def n_scored(self) -> int:
        """The number of scored tokens of a chunk. With n_ctx = 512 it is 255."""
        n_ctx = self.tokens.shape[1]
        return n_ctx - 1 - n_ctx // 2

    def chunk(self, i: int) -> Chunk:
        ids = self.tokens[i, :-1].tolist()
        if self.bos is not None:
            ids[0] = self.bos
        base = None if self.base is None else self.base.rows(i)
        return Chunk(i, ids, np.asarray(self.tokens[i, -self.n_scored :]), base)


def split_chunks(
    tokenizer: Any, text: str, n_ctx: int, n_chunks: int | None = None, least: int = 0
) -> Chunks:
    """Returns at most ``n_chunks`` chunks of a text.

    Raises SparseKVError if it gives fewer than two. least: a short text may halve n_ctx down to
    this many tokens; 0: n_ctx stays as it is.
    """
    ids = tokenizer.encode(text, add_eos=False, parse_special=False)
    while least and n_ctx > least and len(ids) < 2 * n_ctx:
        n_ctx //= 2
    if len(ids) < 2 * n_ctx:
        raise SparseKVError(
            f"the text has {len(ids)} tokens, and a context of {n_ctx} needs {2 * n_ctx} of them: "
            "give a longer text, or a smaller --ctx-size"
        )
    n = min(len(ids) // n_ctx, n_chunks or len(ids))
    tokens = np.array(ids[: n * n_ctx], np.int32).reshape(n, n_ctx)
    return Chunks(tokens, tokenizer.bos_id if tokenizer.add_bos else None)


def chunks_of(model: Model, file: KLDFile, n_chunks: int | None = None) -> Chunks:
    """Returns the chunks that a file of log-probabilities was made of.

    Raises SparseKVError if the model's vocabulary has another size.
    """
    n_vocab = model.hparams.n_vocab
    if file.n_vocab != n_vocab:
        raise SparseKVError(
            f"{file.path}: is of a vocabulary of {file.n_vocab}, the model has one of {n_vocab}: "
            "give the model that it was made with, or one with the same vocabulary"
        )
    tokenizer = model.tokenizer
    return Chunks(file.tokens[:n_chunks], tokenizer.bos_id if tokenizer.add_bos else None, file)
