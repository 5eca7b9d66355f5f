"""One sequence's rows of a next-token block: cached rows and pending rows."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsekv_cli.cache.layer import DenseCache
from sparsekv_cli.models.decoder import FEW_ROWS
from sparsekv_cli.models.next_token.decoder import NextTokenDecoder

NO_TOKEN = np.zeros(1, np.int64)  # the vocabulary of a pass whose logits are not used


class NextTokenRows:
    """The rows of K and V of a block. Row p is computed from hidden row p and token p + 1.

    The last hidden row is pending until the next token is known. Tokens that were loaded from a
    file or copied from another sequence have no rows here. The block works without these rows.
    """

    def __init__(self, decoder: NextTokenDecoder) -> None:
        self.cache = DenseCache(decoder.layer_specs()[0])
        self._decoder = decoder
        self._positions: list[int] = []  # positions of the cached rows
        self._first = 0  # position of the first pending row
        self._tokens: list[int] = []  # tokens of the pending rows
        self._hidden = np.empty((0, decoder.hparams.n_embd), np.float32)

    def take(self, pos: int, tokens: Sequence[int], hidden: np.ndarray) -> None:
        """Adds the hidden rows f32 (T, n_embd) of tokens from position ``pos`` on as pending."""
        self.compute_many()  # drafts cannot remove these rows any more
        if pos != self._first + len(self._tokens):
            self._first, self._tokens, self._hidden = pos, [], self._hidden[:0]
        joined = np.concatenate([self._hidden, hidden])
        self._tokens, self._hidden = [*self._tokens, *tokens], joined  # at once

    def take_prompt(self, ids: Sequence[int], n_past: int, pos: int, hidden: np.ndarray) -> None:
        """Adds hidden rows of the prompt ``ids``, whose first token is at position ``n_past``."""
        first = pos - n_past
        self.take(pos, ids[first : first + len(hidden)], hidden)
        self.compute_many()

    def compute_many(self) -> None:
        """Computes the pending rows with a known next token if they exceed ``FEW_ROWS``."""
        self.cache.truncate(len(self._positions))  # drops rows of an interrupted call
        n = len(self._tokens) - 1
        if n > FEW_ROWS:
            x = self._inputs(n, self._tokens[1:])
            self._decoder.forward(x, self._first, [self.cache], vocabulary=NO_TOKEN)
            self._add(n)

    def draft(self, last: int, most: int) -> list[int]:
        """Returns a draft of up to ``most`` tokens after ``last``: the likeliest token each time.

        last: the token after the last row. The draft is empty without a pending hidden row.
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
        """Drops all rows except those of the sequence's first n tokens."""
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
        """Moves the first n rows from the pending to the cached ones."""
        positions, first = self._positions, self._first + n
        # In one line: an interrupt leaves all of it or nothing.
        positions[len(positions) :], self._first, self._tokens, self._hidden = (
            range(self._first, first), first, self._tokens[n:], self._hidden[n:]
        )  # fmt: skip
