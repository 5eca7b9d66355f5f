"""Drafts of a smaller model: the tokens that it would choose."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import numpy as np

from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.prefix.prompt_rows import n_common
from sparsekv_cli.sequence import Sequence

MOST = 16  # tokens of a draft
LONG = 64  # new tokens that are prefilled; fewer are decoded


class ModelDrafts:
    """A sequence of a smaller model, which follows the sequence that it drafts for.

    Its tokens are ids of the same vocabulary.
    """

    alone = False
    least_chance = 0.4  # of a draft's last token to be accepted, by the draft model

    def __init__(self, sequence: Sequence, n_vocab: int) -> None:
        """n_vocab: only the first tokens of the draft model's vocabulary are drafted."""
        self._sequence, self._n_vocab = sequence, n_vocab
        self._n_same = 0  # tokens that both sequences have in common for certain

    @property
    def caches(self) -> Ids[LayerCache]:
        return self._sequence.caches

    def begin(self, tokens: Ids[int]) -> None:
        self._n_same = n_common(tokens, self._sequence.tokens)

    def draft(
        self, tokens: Ids[int], last: int, most: int, least_chance: float | None = None
    ) -> list[int]:
        """See Drafts. A draft ends before a token whose chance is below ``least_chance``.

        The chance is the product of the draft model's probabilities from the draft's begin.
        """
        least_chance = self.least_chance if least_chance is None else least_chance
        sequence, text = self._sequence, [*tokens, last]
        most = min(most, MOST, sequence.n_ctx - len(text))
        if most <= 0:
            return []
        logits = self._follow(text)
        draft: list[int] = []
        chance = 1.0
        while True:
            logits = logits[: self._n_vocab]
            token = int(np.argmax(logits))
            chance /= float(np.sum(np.exp(logits - logits[token])))
            if chance < least_chance:
                return draft
            draft.append(token)
            if len(draft) == most:
                return draft
            logits = sequence.decode(token)

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Nothing to do: the next draft begins with what was accepted."""

    def _follow(self, text: list[int]) -> np.ndarray:
        """Gives the sequence the tokens of ``text``. Returns the logits after the last one."""
        sequence, n = self._sequence, self._n_same
        n += n_common(text[n:], sequence.tokens[n:])
        sequence.rewind(min(n, len(text) - 1))
        new = text[len(sequence.tokens) :]
        self._n_same = len(text)
        if len(new) > LONG or not sequence.tokens:
            return sequence.prefill(new)
        while True:
            n = max(1, sequence.most_rows(len(new)))
            (outcomes,) = sequence.engine.decode([sequence], [new[:n]])
            sequence.keep(len(sequence.tokens))
            new = new[n:]
            if not new:
                logits = outcomes[-1]
                assert isinstance(logits, np.ndarray)
                return logits
