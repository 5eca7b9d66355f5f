"""One sequence's rows of a next-token block: cached rows, and rows that wait."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.models.decoder import FEW_ROWS
from sparsekv_cli.models.next_token.decoder import NextTokenDecoder

NO_TOKEN = np.zeros(1, np.int64)  # the vocabulary of a pass without a use for logits


class NextTokenRows:
    """The rows of K and V of a block. Row p comes from the hidden row p and the token p + 1.

    The hidden row of the last token waits until the next token is known. Tokens whose rows were
    loaded or taken over have no rows here. The block works without them.
    """

    def __init__(self, decoder: NextTokenDecoder) -> None:
        self.cache = DenseCache(decoder.layer_specs()[0])
        self._decoder = decoder
        self._positions: list[int] = []  # of the cache's rows
        self._first = 0  # position of the first row that waits
        self._tokens: list[int] = []  # of the rows that wait
        self._hidden = np.empty((0, decoder.hparams.n_embd), np.float32)

    def take(self, pos: int, tokens: Sequence[int], hidden: np.ndarray) -> None:
        """Takes the hidden rows f32 (T, n_embd) of the tokens from position ``pos`` on."""
        self.compute_many()  # no draft can take these back any more
        if pos != self._first + len(self._tokens):
            self._first, self._tokens, self._hidden = pos, [], self._hidden[:0]
        self._tokens += tokens
        self._hidden = np.concatenate([self._hidden, hidden])

    def take_prompt(self, ids: Sequence[int], n_past: int, pos: int, hidden: np.ndarray) -> None:
        """Takes hidden rows of the prompt ``ids``, which begins at position ``n_past``."""
        first = pos - n_past
        self.take(pos, ids[first : first + len(hidden)], hidden)
        self.compute_many()

    def compute_many(self) -> None:
        """Computes the rows whose next token is known, if more wait than a step takes."""
        self.cache.truncate(len(self._positions))  # of rows that an interrupted call has left
        n = len(self._tokens) - 1
        if n > FEW_ROWS:
            x = self._inputs(n, self._tokens[1:])
            self._decoder.forward(x, self._first, [self.cache], vocabulary=NO_TOKEN)
            self._add(n)

    def draft(self, last: int, most: int) -> list[int]:
        """Returns the likeliest tokens after ``last``, at most ``most``, each by the one before.

        last: the token after the last row. Without the hidden row ahead of it there is no draft.
        """
        self.compute_many()
        n = len(self._tokens)
        if not n or most < 1:
            return []
        draft, pos = [], self._first + n - 1
        logits, hidden = self._step(self._inputs(n, [*self._tokens[1:], last]), self._first)
        self._add(n)
        while True:
            draft.append(int(np.argmax(logits)))
            if len(draft) == most:
                break
            pos += 1
            logits, hidden = self._step(self._decoder.inputs(draft[-1:], hidden), pos)
        self.cache.truncate(len(self._positions))
        return draft

    def truncate(self, n: int) -> None:
        """Forgets all rows except those of the sequence's first n tokens."""
        del self._positions[bisect_left(self._positions, n - 1) :]
        self.cache.truncate(len(self._positions))
        n_waiting = max(0, n - self._first)
        del self._tokens[n_waiting:]
        self._hidden = self._hidden[:n_waiting]

    def _inputs(self, n: int, tokens: Sequence[int]) -> Any:
        return self._decoder.inputs(tokens, self._hidden[:n])

    def _step(self, x: Any, pos: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logits f32 (n_vocab,) and the hidden row (1, n_embd) of the last row of x."""
        n = len(x)
        logits = self._decoder.decode_batch(x, range(pos, pos + n), [[self.cache]] * n)
        self.cache.keep(self.cache.n)
        return logits[-1], self._decoder.hidden(n)[-1:]

    def _add(self, n: int) -> None:
        """Moves the first n waiting rows to the cache's positions."""
        self._positions += range(self._first, self._first + n)
        self._first += n
        del self._tokens[:n]
        self._hidden = self._hidden[n:]
