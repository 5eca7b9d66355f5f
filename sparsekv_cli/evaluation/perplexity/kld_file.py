"""Reads and writes llama-perplexity's files of log-probabilities (``--kl-divergence-base``).

A file has a header with the tokens of all chunks, then one row for each scored token. A row is u16
(perplexity.cpp, log_softmax). Its first four numbers are two f32: a scale and the least
log-probability. Then each entry of the vocabulary has a number. Number i stands for the
log-probability scale * i + least. Log-probabilities of more than 16 below the best are cut there.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.system.files import naming, open_regular, replacing

MAGIC = b"_logits_"
HEADER = np.dtype([("magic", "S8"), ("n_ctx", "<i4"), ("n_vocab", "<i4"), ("n_chunk", "<i4")])
N_HEAD = 4  # u16 numbers at the start of a row: scale and least log-probability, both f32
DEPTH = np.float32(16)  # how far below the best log-probability values can lie
LEVELS = np.float32(65535)
WriteRows = Callable[[np.ndarray], None]


def row_length(n_vocab: int) -> int:
    """Returns how many u16 numbers the row of a scored token has."""
    return N_HEAD + 2 * ((n_vocab + 1) // 2)


def encode(logits: np.ndarray) -> np.ndarray:
    """Returns the rows of the file, u16 (T, row_length), of logits f32 (T, n_vocab)."""
    best = logits.max(axis=-1, keepdims=True)
    least = np.maximum(logits.min(axis=-1, keepdims=True), best - DEPTH)
    total = np.exp(logits - best).sum(axis=-1, keepdims=True, dtype=np.float64)
    scale = ((best - least) / LEVELS).astype(np.float32)
    rows = np.zeros((len(logits), row_length(logits.shape[1])), np.uint16)
    head = rows[:, :N_HEAD].view(np.float32)
    head[:, :1] = scale
    head[:, 1:] = least - best - np.log(total).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    steps = np.rint(inverse * np.maximum(logits - least, 0))
    rows[:, N_HEAD : N_HEAD + logits.shape[1]] = steps
    return rows


def decode(rows: np.ndarray, n_vocab: int) -> np.ndarray:
    """Returns log-probabilities f32 (T, n_vocab) of rows of the file, u16 (T, row_length)."""
    head = np.ascontiguousarray(rows[:, :N_HEAD]).view(np.float32)
    return head[:, :1] * rows[:, N_HEAD : N_HEAD + n_vocab].astype(np.float32) + head[:, 1:]


class KLDFile:
    """An open file: ``tokens`` i32 (n_chunk, n_ctx), and the rows of each chunk.

    Raises SparseKVError, which says what is wrong with the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, open_regular(path)
        size = os.fstat(self._file.fileno()).st_size
        if size < HEADER.itemsize:
            raise SparseKVError(f"{path}: {size} bytes are too few for a file of log-probabilities")
        header = self._read(HEADER, 0, 1)[0]
        if header["magic"] != MAGIC:
            raise SparseKVError(
                f"{path}: begins with {bytes(header['magic'])!r}, a file of log-probabilities with "
                f"{MAGIC!r}: make one with 'eval perplexity --kl-divergence-base FILE'"
            )
        self.n_ctx, self.n_vocab, n_chunk = (
            int(header[name]) for name in ("n_ctx", "n_vocab", "n_chunk")
        )
        if self.n_ctx < 4 or self.n_vocab < 1 or n_chunk < 1:
            raise SparseKVError(
                f"{path}: {n_chunk} chunks of {self.n_ctx} tokens of a vocabulary of "
                f"{self.n_vocab} are no file of log-probabilities"
            )
        self.n_scored = self.n_ctx - 1 - self.n_ctx // 2
        start = HEADER.itemsize + 4 * n_chunk * self.n_ctx
        expected = start + 2 * n_chunk * self.n_scored * row_length(self.n_vocab)
        if size != expected:
            raise SparseKVError(
                f"{path}: has {size} bytes, but {n_chunk} chunks of {self.n_ctx} tokens take "
                f"{expected}: it was cut off, or is of another kind; make it again"
            )
        self.tokens = self._read("<i4", HEADER.itemsize, n_chunk, self.n_ctx)
        if self.tokens.min() < 0 or self.tokens.max() >= self.n_vocab:
            raise SparseKVError(f"{path}: has tokens outside its vocabulary of {self.n_vocab}")
        self._start = start

    def rows(self, chunk: int) -> np.ndarray:
        """Returns the rows of a chunk's scored tokens, u16 (n_scored, row_length)."""
        n_row = row_length(self.n_vocab)
        start = self._start + 2 * chunk * self.n_scored * n_row
        return self._read("<u2", start, self.n_scored, n_row)

    def _read(self, dtype: Any, start: int, *shape: int) -> np.ndarray:
        """Returns an array of the file. Raises SparseKVError if the file has become too short."""
        self._file.seek(start)
        found = np.fromfile(self._file, dtype, math.prod(shape))
        if len(found) < math.prod(shape):
            raise SparseKVError(f"{self.path}: was cut while in use: make it again")
        return found.reshape(shape)

    @property
    def digest(self) -> str:
        """A hash of the tokens and of the first chunk's rows, 32 hex digits: one for each model."""
        found = hashlib.sha256(self.tokens.tobytes())
        found.update(self.rows(0).tobytes())
        return found.hexdigest()[:32]


@contextmanager
def write_kld_file(path: Path, tokens: np.ndarray, n_vocab: int) -> Iterator[WriteRows]:
    """Writes a file for the chunks ``tokens`` (n_chunk, n_ctx). It gets its name when it is whole.

    Yields a function that writes rows, results of ``encode``, of the next scored tokens. A
    SparseKVError names the file.
    """
    n_chunk, n_ctx = tokens.shape
    header = np.array([(MAGIC, n_ctx, n_vocab, n_chunk)], HEADER)
    with ExitStack() as stack:
        with naming(path):
            file = stack.enter_context(replacing(path, 0o666))

        def write(data: bytes) -> None:
            with naming(path):
                file.write(data)
                file.flush()

        write(header.tobytes() + tokens.astype("<i4").tobytes())
        yield lambda rows: write(rows.astype("<u2", copy=False).tobytes())
