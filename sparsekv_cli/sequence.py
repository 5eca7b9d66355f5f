"""One sequence: its tokens, the caches that hold their rows, and how it attends."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Generator
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sparsekv_cli.cache.counters import Timings, ledger_of
from sparsekv_cli.cache.kinds import hand_over, reachable
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import LayerSpec
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.forward import OnProgress, Progress, drain
from sparsekv_cli.models.identity import RowsIdentity
from sparsekv_cli.models.next_token.rows import NextTokenRows
from sparsekv_cli.models.tokenizer.ids import n_common
from sparsekv_cli.prefix.difference import Difference
from sparsekv_cli.prefix.prefixes import STEP
from sparsekv_cli.prefix.prompt_rows import NONE_MOVED, Moved, PromptRows
from sparsekv_cli.sampling.plain import Outcome

# Returns the token chosen by logits f32 (n_vocab,) and the sequence's tokens.
Sample = Callable[[np.ndarray, Ids[int]], int]

N_HEADROOM = 512  # further rows that a prefill makes room for, so that an answer fits
# Tokens that are prefilled again after a cut: a method begins its index with the last queries of a
# prefill (32 by default). A cut at the end of the last prefill needs none.
N_REFRESH = 64
# The disk keeps whole prompts only. With prompts on disk, at most so many tokens are prefilled
# again before as many new ones.
N_WHOLE = 512


class Checkpoint(NamedTuple):
    """The end of a sequence's last prefill, to which it can go back."""

    n: int  # tokens
    logits: np.ndarray  # f32 (n_vocab,), after the last token


class Attention(NamedTuple):
    """How a sequence attends."""

    method: Method  # its budget covers the rows up to ``sparse_from``
    specs: Ids[LayerSpec]  # the layers, calibrated for the method
    sparse_from: int  # the method attends to all rows up to so many


class Drafts(Protocol):
    """Guesses the next tokens of a sequence."""

    alone: bool  # whether it drafts only where no other sequence is decoded in the same step

    @property
    def sequence(self) -> Sequence | None:
        """The draft model's sequence; None for a source without one."""

    def begin(self, tokens: Ids[int]) -> None:
        """Called when an answer to ``tokens`` begins. They may differ from the last call's."""

    def draft(self, tokens: Ids[int], last: int, most: int) -> list[int]:
        """Returns at most ``most`` tokens that may follow ``tokens`` and then ``last``.

        ``tokens`` begin with those of the call before.
        """

    def checked(self, n_drafted: int, n_accepted: int, seconds: float) -> None:
        """Called after a decoded step with a draft of ``n_drafted`` tokens (0: none)."""


class Engine(Protocol):
    """Computes the rows of sequences, on a CPU and on a GPU alike."""

    n_ctx: int  # the most tokens of a sequence
    shares_prefill: bool  # one prefill can fill the caches of several methods

    @property
    def n_vocab(self) -> int:
        """The number of tokens in the vocabulary."""

    def caches(self, attention: Attention) -> list[LayerCache]:
        """Returns empty caches, one a layer."""

    def identity(self, method: Method) -> RowsIdentity:
        """Returns the identity of a sequence's rows."""

    def next_rows(self) -> NextTokenRows | None:
        """Returns the empty rows of a next-token block, if it makes drafts."""

    def load_kernels(self, method: Method, specs: Ids[LayerSpec]) -> None:
        """Loads the kernels of the first steps with ``method`` that can be loaded early."""

    def prefill(
        self,
        sequence: Sequence,
        ids: Ids[int],
        *,
        rows: PromptRows | None = None,
        all_logits: bool = False,
    ) -> Generator[Progress, None, np.ndarray]:
        """Adds ``ids`` densely. Yields after chunks and layers.

        Returns logits f32 (n_vocab,) after the last token. With ``all_logits`` it returns
        (T, n_vocab), one row after each token. rows: finds and keeps the rows of prompts.
        Between two steps of the iterator other sequences can be decoded. After a layer another
        prefill can run. Raises SparseKVError for no tokens, for a token outside the vocabulary and
        for more tokens than the context holds. After an exception, or if the iterator is closed,
        nothing is added.
        """

    def decode(
        self, sequences: Ids[Sequence], rows: Ids[Ids[int]], samples: Ids[Sample] = ()
    ) -> list[list[Outcome]]:
        """Adds new tokens to B sequences: ``rows`` has one or several tokens a sequence.

        All rows share every load of a weight. ``Sequence.keep`` can take back all rows of a
        sequence but the first. Returns an outcome after each token: logits f32 (n_vocab,), or the
        next token. A device chooses the next token if ``samples`` has a PlainSampler for the
        sequence. Raises SparseKVError as ``prefill`` does. After an exception every sequence has
        its old tokens, or fewer if its method cannot go back. Raises StepError if a part of several
        sequences has failed: only these go back.
        """


@dataclass(eq=False, repr=False)
class Sequence:
    """One sequence of a model. Positions are absolute."""

    engine: Engine
    attention: Attention
    tokens: list[int] = field(default_factory=list)  # the tokens whose rows the caches hold
    caches: list[LayerCache] = field(default_factory=list)  # one a layer; made if none are given
    checkpoint: Checkpoint | None = None  # the end of the last prefill, if kept
    timings: Timings = field(default_factory=Timings)
    n_ctx: int = 0  # the most tokens; 0 takes the engine's
    drafts: Drafts | None = None  # the source of drafts for its answers
    moved: Moved = field(default=NONE_MOVED, init=False)  # rows of other prompts
    # Where the last prompt leaves a kept one that it has a later part of.
    difference: Difference | None = field(default=None, init=False)
    next_rows: NextTokenRows | None = field(init=False)  # of the block that makes drafts, if any
    # While a change runs: the tokens that stay if it is interrupted. See ``begin``.
    _certain: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.n_ctx = self.n_ctx or self.engine.n_ctx
        if not self.caches:
            self.caches = self.engine.caches(self.attention)
        self.next_rows = self.engine.next_rows()

    @property
    def draft_caches(self) -> list[LayerCache]:
        """The caches of a next-token block and of a smaller model, which make drafts."""
        of_block = [] if self.next_rows is None else [self.next_rows.cache]
        of_model = None if self.drafts is None else self.drafts.sequence
        return [*of_block, *(() if of_model is None else of_model.caches)]

    @property
    def method(self) -> Method:
        return self.attention.method

    @property
    def sparse_from(self) -> int:
        return self.attention.sparse_from

    def serves(self, method: Method) -> bool:
        """Returns whether its rows may serve a sequence of its engine with ``method``."""
        identity = self.engine.identity
        return identity(self.method).serves(identity(method))

    @property
    def is_full(self) -> bool:
        """Whether no more tokens fit the context."""
        return len(self.tokens) >= self.n_ctx

    def prefill(
        self,
        ids: Ids[int],
        progress: OnProgress | None = None,
        *,
        rows: PromptRows | None = None,
        all_logits: bool = False,
    ) -> np.ndarray:
        """Runs ``Engine.prefill`` to its end and returns the logits. progress: see the bars."""
        return drain(self.engine.prefill(self, ids, rows=rows, all_logits=all_logits), progress)

    def decode(self, token: int) -> np.ndarray:
        """Adds one token with the method; returns logits f32 (n_vocab,) after it."""
        ((logits,),) = self.engine.decode([self], [[token]])
        assert isinstance(logits, np.ndarray)
        return logits

    def begin(self) -> int:
        """Begins a change of the caches, which ``commit`` ends. Returns the number of tokens.

        If anything stops the change, at any place, ``settle`` takes it back.
        """
        self.settle()
        self._certain = len(self.tokens)
        return self._certain

    def commit(self, ids: Ids[int], checkpoint: Checkpoint | None) -> None:
        """Ends a change that has added the rows of ``ids``."""
        n, new = self._certain, [int(token) for token in ids]
        # In one line: an interrupt leaves all of it or nothing.
        self.tokens[n:], self.checkpoint, self._certain = new, checkpoint, None

    def settle(self) -> None:
        """Takes back a change that has not come to its end. Each verb of the sequence begins so.

        The sequence then has the tokens that it had before, or fewer, as after ``rewind``.
        """
        if self._certain is not None:
            self._go_back(self._certain)
            self._certain = None

    def reset(self, attention: Attention | None = None) -> None:
        """Forgets the tokens. The timings stay, and without ``attention`` the way to attend."""
        self._cut_drafts(0)
        self._renew(attention or self.attention)

    def _renew(
        self, attention: Attention, ids: Ids[int] = (), caches: list[LayerCache] | None = None
    ) -> None:
        """Takes other caches, which hold the rows of ``ids``; without ``caches`` empty ones."""
        caches = caches or self.engine.caches(attention)  # a stop up to here changes nothing
        self.attention, self.caches, self.tokens, self.checkpoint, self._certain = (
            attention, caches, list(ids), None, None
        )  # fmt: skip

    def rewind(self, n: int) -> None:
        """Keeps at most the first n tokens; fewer if the method cannot go back to them.

        In that case it keeps the tokens up to the checkpoint, or none. At the checkpoint the
        sequence is as it was at the end of its last prefill. Decode steps from there give the same
        bits.
        """
        self.settle()
        self._certain = min(n, len(self.tokens))
        if n < len(self.tokens):
            self._go_back(n)
        else:
            for cache in self.caches:
                cache.keep(n)
            self._cut_drafts(n)
        self._certain = None

    def _go_back(self, n: int) -> None:
        """Does ``rewind``. It begins at any state that an interrupt leaves, also one of its own."""
        n = min(n, len(self.tokens), *(cache.n for cache in self.caches))
        for cache in self.caches:
            cache.keep(n)
        at, reached = self.checkpoint, reachable(self.caches, n)
        for kept in (reached, at.n if at is not None and at.n < reached else 0):
            if kept and all(cache.truncate(kept) == kept for cache in self.caches):
                del self.tokens[kept:]
                self._cut_drafts(kept)
                if at is not None and kept < at.n:
                    self.checkpoint = None
                return
        self.reset()

    def most_rows(self, n: int) -> int:
        """Returns how many of the next n rows fit one step that can take back all but the first."""
        n = min(n, self.n_ctx - len(self.tokens))
        return min((cache.most_rows(n) for cache in self.caches), default=n)

    def keep(self, n: int) -> None:
        """Keeps the first n tokens. Takes back later ones, which the last step added after its
        first.

        The state is then as if they had never come.
        """
        started = time.perf_counter()
        self.settle()
        self.timings.decode_tokens -= self.caches[0].n - n
        self._certain = n
        for cache in self.caches:
            cache.keep(n)
        self._cut_drafts(n)
        self.commit((), self.checkpoint)
        self.timings.decode_s += time.perf_counter() - started

    def _cut_drafts(self, n: int) -> None:
        if self.next_rows is not None:
            self.next_rows.truncate(n)

    def n_alike(
        self, ids: Ids[int], method: Method, least: int = 1, *, is_exact: bool = True
    ) -> int:
        """Returns how many first tokens of ``ids`` have the rows that a prefill of ``ids`` gives.

        These are rows of the last prefill, because steps round otherwise, and sparse ones leave out
        rows. least: tokens at the end of ``ids`` that are computed anew; ``method`` may need the
        queries of more. Kept rows end at a multiple of STEP. is_exact: moved rows do not count, nor
        those that attend to them.
        """
        at, n_queried = self.checkpoint, method.n_queried
        if at is None or n_queried is None:
            return 0
        n = min(n_common(ids, self.tokens[: at.n]), len(ids) - max(least, n_queried))
        n = min(n, self.moved.n_exact) if is_exact else n
        return max(0, n // STEP * STEP)

    def keep_common(
        self, ids: Ids[int], *, goes_on: bool = False, rows: PromptRows | None = None
    ) -> Ids[int]:
        """Keeps the tokens that ``ids`` begin with. Returns the rest of ``ids``, to be prefilled.

        Nothing is left if the last prefill ended where ``ids`` end. Otherwise the answer is the one
        that a new sequence gives. So an answer's tokens are read again, and all tokens if the
        method has changed or dropped rows. goes_on: keeps these too, as the turns of a chat do.
        rows: long prompts that are mostly new begin anew, because the disk keeps whole prompts. So
        do all with many new tokens if rows of known passages are moved, which is done only then.
        """
        self.settle()
        n, at, n_queried = n_common(ids, self.tokens), self.checkpoint, self.method.n_queried or 0
        begins_anew = rows is not None and (rows.repair is not None or n < N_WHOLE)
        if begins_anew and len(ids) - n >= N_WHOLE:
            self.rewind(0)
        elif at is not None and n >= at.n == len(ids):
            self.rewind(n)
        elif not goes_on:
            holds = self.method.holds_all_rows
            self.rewind(self.n_alike(ids, self.method, N_REFRESH) if holds else 0)
        elif n < len(self.tokens) or len(ids) - n < max(1, n_queried):
            self.rewind(min(n, max(0, len(ids) - max(N_REFRESH, n_queried))))
        return ids[len(self.tokens) :]

    def change_method(self, attention: Attention) -> None:
        """Goes on with another method, and with the same tokens if their rows can be taken over.

        They can where the old caches keep all rows on the host, as the new ones do. The last
        tokens, whose queries the new method needs, are prefilled again. Otherwise no tokens are
        left.
        """
        self.settle()
        tokens, old = self.tokens, self.caches
        self.engine.load_kernels(attention.method, attention.specs)
        n_queried = attention.method.n_queried
        if n_queried is None or not self.engine.shares_prefill:
            self.reset(attention)
            return
        n, is_alike = len(tokens) - max(N_REFRESH, n_queried), self.serves(attention.method)
        n = reachable(old, n // STEP * STEP)
        n_room = min(self.n_ctx, len(tokens) + N_HEADROOM)
        caches = self.engine.caches(attention)
        self._certain = max(0, n)
        taken = hand_over(old, caches, n, n_room) if n > 0 and is_alike else None
        self._cut_drafts(0)
        self._renew(attention, tokens[:n] if taken else (), taken or caches)
        if taken:
            self.prefill(tokens[n:])

    def ledger(self) -> dict[str, int]:
        """Returns the counts of all layers, in the words of the JSON contract."""
        return ledger_of(self.caches, self.draft_caches)

    def mark_messages(self, ids: Ids[int], ends: Container[int]) -> None:
        """Tells the caches where messages end in the prompt ``ids`` that is coming.

        ends: the tokens that end a message.
        """
        n_past = len(self.tokens)
        lengths = [n_past + i + 1 for i, token in enumerate(ids) if token in ends]
        for cache in self.caches:
            cache.mark(lengths)
