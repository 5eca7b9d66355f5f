"""Drafts from a smaller model: the tokens that it would choose."""

from collections.abc import Sequence as Ids

import numpy as np

from sparsekv_cli.models.tokenizer.ids import n_common
from sparsekv_cli.sequence import Sequence

MOST = 16  # tokens of a draft
LONG = 64  # new tokens that are prefilled; fewer are decoded
PIECE = 512  # tokens that a call prefills at most, so that no step waits for a long text


class ModelDrafts:
    """A sequence of a smaller model, which follows the sequence that it drafts for.

    Its tokens are ids of the same vocabulary. It makes no draft for a text with a token that it
    lacks. It reads many new tokens in pieces, one a call. There is no draft until they are read.
    """

    alone = False
    least_chance = 0.4  # of a draft's last token to be accepted, by the draft model

    def __init__(self, sequence: Sequence, n_vocab: int) -> None:
        """n_vocab: tokens that both vocabularies have. The ids of others are larger."""
        self.sequence, self._n_vocab = sequence, n_vocab
        self.is_reading = False  # whether the last call read a piece of the text
        self._n_same = 0  # tokens that both sequences have in common for certain
        self._is_known = True  # whether the vocabulary has all tokens of the text

    def begin(self, tokens: Ids[int]) -> None:
        self._n_same = n_common(tokens, self.sequence.tokens)
        self._is_known = True

    @np.errstate(all="ignore")  # NaN and infinity end a draft, and nothing else
    def draft(
        self, tokens: Ids[int], last: int, most: int, least_chance: float | None = None
    ) -> list[int]:
        """See Drafts. A draft ends before a token whose chance is below ``least_chance``.

        The chance is the product of the draft model's probabilities from the draft's begin.
        """
        least_chance = self.least_chance if least_chance is None else least_chance
        self.is_reading = False
        sequence = self.sequence
        most = min(most, MOST, sequence.n_ctx - len(tokens) - 1)
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
        """Gives the sequence the tokens of ``text``. Returns the logits after the last one.

        None: the sequence lacks tokens of the text still, or for good.
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
