"""A constraint says which tokens may follow in an answer.

The model first thinks freely, up to a number of tokens. After the thinking, a grammar decides.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.models.chat.thinking import Thinking, overlap
from sparsekv_cli.models.tokenizer.marks import TokenText

if TYPE_CHECKING:
    from sparsekv_cli.models.tokenizer.tokenizer import Tokenizer
    from sparsekv_cli.sampling.grammar import Constraint

BEGINS, THINKS, CLOSES, ANSWERS = range(4)


class AnswerConstraint:
    """The place of one answer in its thinking or its grammar. ``restart`` begins an answer.

    thinking: the markers of the model's template; None: the model does not think. grammar: the form
    of the answer after the thinking; None: any form. budget: most tokens of thinking, after which
    the end marker is forced. budget None: any number; with a grammar, half of the tokens that are
    left besides the end marker.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        thinking: Thinking | None,
        grammar: Constraint | None,
        budget: int | None = None,
    ) -> None:
        if thinking is None and budget is not None:
            raise SparseKVError(
                "--think-budget: the chat template of this model has no markers of thinking, or "
                "is not applied: leave the option out"
            )
        self._tokenizer, self._thinking, self._grammar = tokenizer, thinking, grammar
        self.budget = budget
        self._all = np.arange(0)
        self._not_ends = np.arange(0)  # all tokens but those that end an answer
        self._long: list[tuple[int, str]] | None = None
        self._phase = ANSWERS

    def copy(self) -> AnswerConstraint:
        """Returns the same constraint for another answer. Call ``restart`` on it."""
        new = copy.copy(self)
        new._grammar = None if self._grammar is None else self._grammar.copy()
        return new

    def restart(self, prompt: Sequence[int] = (), n_left: int = 0) -> None:
        """Begins an answer of at most ``n_left`` tokens. prompt: its ids, or only the last ids."""
        self._restart_grammar()
        self._phase, self._tail, self._n_thought = ANSWERS, "", 0
        self._forced: list[int] = []
        self._n_most = self.budget
        thinking = self._thinking
        if thinking is None or thinking.closed_by(self._tokenizer, prompt):
            return
        if self._n_most is None and self._grammar is not None:
            n_closing = len(self._ids(thinking.closing("")))
            self._n_most = max(0, n_left - n_closing) // 2
        self._text = TokenText(self._tokenizer, thinking.marks.by_id())
        opened = thinking.opened_by(self._tokenizer, prompt)
        if opened or thinking.is_channel:
            self._phase = THINKS
            self._close_in_time()
            return
        start = self._ids(thinking.start)
        if self._n_most is None or self._n_most > len(start):
            self._phase, self._forced, self._n_thought = BEGINS, start, len(start)
        elif self._grammar is None:
            self._phase, self._forced = CLOSES, self._ids(thinking.start + thinking.closing(""))

    def allowed(self, n_vocab: int) -> np.ndarray | None:
        """Returns the ids that may follow, int64 (n,), ascending, below n_vocab; None: all ids."""
        if self._phase == CLOSES:
            return np.array(self._forced[:1])
        if self._phase == THINKS:
            return self._thinkable(n_vocab)
        if self._grammar is None:
            return None
        if self._phase == ANSWERS:
            return self._grammar.allowed(n_vocab)
        self._matching = self._grammar.allowed(n_vocab) if self._matches else np.arange(0)
        return np.union1d(self._matching, self._forced[:1])

    def accept(self, token: int) -> None:
        """Adds ``token`` to the answer. ``allowed`` must contain it."""
        if self._phase == CLOSES:
            del self._forced[0]
            self._phase = CLOSES if self._forced else ANSWERS
        elif self._phase == THINKS:
            self._think(token)
        elif self._phase == BEGINS:
            self._begin(token)
        elif self._grammar is not None:
            self._grammar.accept(token)

    @property
    def is_finished(self) -> bool:
        """Whether the answer matches the grammar and nothing but its end can follow."""
        is_answer = self._phase == ANSWERS or (self._phase == BEGINS and self._matches)
        return is_answer and self._grammar is not None and self._grammar.is_finished

    def _restart_grammar(self) -> None:
        self._matches = True  # the tokens so far may be the start marker or the answer
        if self._grammar is not None:
            self._grammar.restart()

    def _begin(self, token: int) -> None:
        """Adds one of the first tokens.

        It belongs to the start marker, to the answer, or to either.
        """
        if self._grammar is not None and self._matches:
            self._matches = token in self._matching
            if self._matches:
                self._grammar.accept(token)
        if token != self._forced[0]:
            self._phase = ANSWERS
            return
        del self._forced[0]
        if not self._forced:
            self._restart_grammar()
            self._phase = THINKS

    def _think(self, token: int) -> None:
        assert self._thinking is not None
        self._n_thought += 1
        self._tail = self._thinking.end_of(self._tail + self._text.push(token))
        if self._thinking.is_closed(self._tail):
            self._phase = ANSWERS
        else:
            self._close_in_time()

    def _close_in_time(self) -> None:
        assert self._thinking is not None
        if self._n_most is not None and self._n_thought >= self._n_most:
            self._phase, self._forced = CLOSES, self._ids(self._thinking.closing(self._tail))

    def _thinkable(self, n_vocab: int) -> np.ndarray | None:
        """Returns the tokens that may follow in the thinking; None: all tokens.

        With a grammar, no token may end the answer before the thinking has ended.
        """
        assert self._thinking is not None
        if self._grammar is None:
            return None
        if len(self._all) != n_vocab:
            ends = [token for token in self._tokenizer.eog_ids if token < n_vocab]
            self._all = np.arange(n_vocab)
            self._not_ends = np.delete(self._all, ends)
        rests = self._thinking.rests_of_header(self._tail)
        if rests:
            return np.unique([self._ids(rest)[0] for rest in rests])
        return np.setdiff1d(self._not_ends, self._too_long(), assume_unique=True)

    def _too_long(self) -> list[int]:
        """Returns the tokens that would complete the end marker and add text after it."""
        assert self._thinking is not None
        end = self._thinking.marks[self._thinking.end]
        n = overlap(self._tail, end)
        if not n or self._thinking.is_channel:
            return []
        if self._long is None:
            token_bytes, ids = self._tokenizer.token_bytes, range(self._tokenizer.n_vocab)
            tokens = ((i, token_bytes(i).decode("utf-8", errors="replace")) for i in ids)
            self._long = [(i, text) for i, text in tokens if text.rpartition(end[-1:])[2].strip()]
            self._long = [(i, text) for i, text in self._long if end[-1:] in text]
        return [
            token
            for token, text in self._long
            if text.startswith(end[n:]) and text[len(end) - n :].strip()
        ]

    def _ids(self, text: str) -> list[int]:
        """Returns the ids of ``text``, which may spell control tokens. No BOS or EOS is added."""
        return self._tokenizer.encode(text, add_bos=False, add_eos=False, parse_special=True)
