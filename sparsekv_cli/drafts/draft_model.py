"""Drafts from a smaller model: the tokens that it would choose."""

from collections.abc import Sequence as Ids

import numpy as np

from sparsekv_cli.models.tokenizer.ids import n_common
from sparsekv_cli.sequence import Sequence

LONGEST_DRAFT = 16  # tokens of a draft
LONG = 64  # up to so many new tokens are decoded, more are prefilled
PIECE = 512  # tokens that one call prefills at most, so that a step does not wait for a long text


class ModelDrafts:
    """Drafts of a smaller model. Its own sequence follows the sequence that it drafts for.

    Both models have the same token ids. If the text has an id that the smaller model lacks, there
    are no drafts. Many new tokens are read in pieces, one piece a call, and until then the drafts
    are empty.
    """

    alone = False
    least_chance = 0.4  # least chance, by the draft model, that all tokens of a draft are accepted

    def __init__(self, sequence: Sequence, n_vocab: int) -> None:
        """n_vocab: the number of ids that both vocabularies have: 0 .. n_vocab - 1."""
        self.sequence, self._n_vocab = sequence, n_vocab
        self.is_reading = False  # whether the last call read a piece of the text
        self._n_same = 0  # number of first tokens that are the same in both sequences
        self._is_known = True  # whether all ids of the text are below n_vocab

    def begin(self, tokens: Ids[int]) -> None:
        self._n_same = n_common(tokens, self.sequence.tokens)
        self._is_known = True

    @np.errstate(all="ignore")  # NaN and infinity only end a draft
    def draft(
        self, tokens: Ids[int], last: int, most: int, least_chance: float | None = None
    ) -> list[int]:
        """See Drafts. The draft ends before a token whose chance is below ``least_chance``.

        The chance of a token is the product of the probabilities of all draft tokens up to it.
        """
        least_chance = self.least_chance if least_chance is None else least_chance
        self.is_reading = False
        sequence = self.sequence
        most = min(most, LONGEST_DRAFT, sequence.n_ctx - len(tokens) - 1)
        if most <= 0 or not self._is_known:
            return []
        logits = self._follow([*tokens, last])
        draft: list[int] = []
        if logits is None:
            return draft
        chance = 1.0
        while True:
            logits = logits[: self._n_vocab]
            token = int(np.argmax(logits))  # the first NaN, if there is one
            if not np.isfinite(logits[token]):
                return draft
            chance /= float(np.sum(np.exp(logits - logits[token])))
            if chance < least_chance:
                return draft
            draft.append(token)
            if len(draft) == most:
                return draft
            logits = sequence.decode(token)

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Does nothing, because the next draft begins with the accepted tokens."""

    def _follow(self, text: list[int]) -> np.ndarray | None:
        """Makes ``text`` the tokens of the draft model's sequence. Returns the logits after it.

        Returns None if the sequence still lacks tokens of the text, or cannot have them.
        """
        sequence, n = self.sequence, self._n_same
        n += n_common(text[n:], sequence.tokens[n:])
        sequence.rewind(min(n, len(text) - 1))
        new = text[len(sequence.tokens) :]
        self._is_known = max(new) < self._n_vocab
        if not self._is_known:
            return None
        self.is_reading = len(new) > LONG or not sequence.tokens
        if self.is_reading:
            new = new[:PIECE]
            self._n_same = len(sequence.tokens) + len(new)
            sequence.prefill(new)
            return None
        self._n_same = len(text)
        while True:
            n = max(1, sequence.most_rows(len(new)))
            (outcomes,) = sequence.engine.decode([sequence], [new[:n]])
            sequence.keep(len(sequence.tokens))
            new = new[n:]
            if not new:
                logits = outcomes[-1]
                assert isinstance(logits, np.ndarray)
                return logits
