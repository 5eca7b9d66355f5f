"""Several sequences of one session, whose decode steps share every load of a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from sparsekv_cli.sampling.plain import Outcome
from sparsekv_cli.sequence import SequenceState, ledger_of
from sparsekv_cli.session import Sample, Session

Decoded = TypeVar("Decoded")


class Batch:
    """``n`` sequences of a session's model and method, each with its own tokens and caches.

    The session works on one of them at a time, at first on the first one: see ``use``.
    """

    def __init__(self, session: Session, n: int) -> None:
        self.session = session
        self._current = 0
        self._sequences = [session.state]
        for _ in range(1, n):
            session.reset()
            self._sequences.append(session.state)
        session.state = self._sequences[0]

    def use(self, i: int) -> Session:
        """The session, which works on sequence i from now on."""
        self._keep()
        self.session.state = self._sequences[i]
        self._current = i
        return self.session

    def exchange(self, i: int, j: int) -> None:
        """Sequence i takes the place of sequence j, and j that of i."""
        self._keep()
        sequences = self._sequences
        sequences[i], sequences[j] = sequences[j], sequences[i]
        self.session.state = sequences[self._current]

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        """Adds a token to each of the first B sequences: logits f32 (B, n_vocab).

        ValueError unless 1 <= B <= n. After an exception a sequence is as it was, or empty if the
        method cannot go back.
        """
        return self._step(tokens, self.session.decode_batch)

    def decode_next(self, tokens: Sequence[int], samples: Sequence[Sample]) -> list[Outcome]:
        """``decode``, but the next tokens of those that a device can choose itself."""
        return self._step(
            tokens, lambda ids, states: self.session.decode_batch_next(ids, states, samples)
        )

    def _step(
        self,
        tokens: Sequence[int],
        decode: Callable[[Sequence[int], Sequence[SequenceState]], Decoded],
    ) -> Decoded:
        if not 1 <= len(tokens) <= len(self._sequences):
            raise ValueError(f"{len(tokens)} tokens: must be 1 to {len(self._sequences)}")
        self._keep()
        states, current = self._sequences[: len(tokens)], self._current
        try:
            return decode(tokens, states)
        except BaseException:
            for i, state in enumerate(states):
                self.use(i).rewind(len(state.tokens))  # some layers have the row already
            self.use(current)
            raise

    def ledger(self, n: int) -> dict[str, int]:
        """The first ``n`` sequences' counts and memory together."""
        self._keep()
        return ledger_of([cache for state in self._sequences[:n] for cache in state.caches])

    def _keep(self) -> None:
        """Stores the state of the sequence in use, of which the session may have replaced parts."""
        self._sequences[self._current] = self.session.state
