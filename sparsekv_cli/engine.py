"""The engine computes rows of sequences, by two verbs. This file has the CPU's engine."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator
from collections.abc import Sequence as Ids
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from sparsekv_cli import warmup
from sparsekv_cli.cache.kinds import bytes_to_come, reserve, share_rows
from sparsekv_cli.cache.layer import LayerCache
from sparsekv_cli.cache.spec import STATE, LayerSpec
from sparsekv_cli.errors import SparseKVError, StepError
from sparsekv_cli.methods.base import Method
from sparsekv_cli.models.forward import Forward, Progress
from sparsekv_cli.models.hparams import room_for
from sparsekv_cli.models.identity import RowsIdentity
from sparsekv_cli.models.next_token.rows import NextTokenRows
from sparsekv_cli.models.reuse.repair import repair_steps
from sparsekv_cli.prefix.prompt_rows import Found, PromptRows
from sparsekv_cli.sampling.plain import Outcome
from sparsekv_cli.sequence import N_HEADROOM, Attention, Checkpoint, Sample, Sequence
from sparsekv_cli.system.memory import release_code
from sparsekv_cli.warmup import OnCompile

T = TypeVar("T")

if TYPE_CHECKING:
    from sparsekv_cli.models.decoder import Decoder
    from sparsekv_cli.models.next_token.decoder import NextTokenDecoder


class DecoderEngine(ABC):
    """One model on one machine. Its verbs are those of Engine (sequence.py)."""

    decoder: Forward
    note: str  # a remark for the user
    shares_prefill: bool  # whether one prefill can fill caches of several methods
    first_steps: int  # a sequence's first decode steps that take longer
    records_attended: bool  # whether caches can keep which rows a step attended to
    draft_sources: Ids[str]  # values of --speculate that make drafts
    draft_specs: Ids[LayerSpec] = ()  # the layers that make drafts; rows are f16
    room: int | None = None  # bytes of a GPU that rows may take; None: they lie on the host
    gpu: str = ""  # the name of the GPU that computes; empty: the CPU does

    def __init__(
        self, note: str, n_ctx: int, ends: Callable[[], Container[int]] = frozenset
    ) -> None:
        """n_ctx: the most tokens of a sequence. ends: returns the tokens that end a message."""
        self.note, self.n_ctx = note, n_ctx
        self._ends = ends

    @property
    def n_vocab(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.decoder.hparams.n_vocab

    @abstractmethod
    def layer(self, method: Method, spec: LayerSpec) -> LayerCache:
        """Returns an empty cache of one layer."""

    @abstractmethod
    def decodes_on_host(self, method: Method) -> bool:
        """Returns whether a step with ``method`` runs kernels of cpu/."""

    @abstractmethod
    def load_kernels(self, method: Method, specs: Ids[LayerSpec]) -> None:
        """Loads the kernels of the first steps with ``method`` that can be loaded early."""

    @abstractmethod
    def _decode(
        self,
        sequences: Ids[Sequence],
        rows: Ids[Ids[int]],
        samples: Ids[Sample],
        failed: dict[int, Exception],
    ) -> list[list[Outcome]]:
        """Runs the step of ``decode``. It changes only the caches.

        failed: gets the errors of sequences among several, by their places. Their outcomes are
        not valid.
        """

    def caches(self, attention: Attention) -> list[LayerCache]:
        """Returns empty caches, one a layer."""
        caches = [self.layer(attention.method, spec) for spec in attention.specs]
        share_rows(caches)
        return caches

    def identity(self, method: Method) -> RowsIdentity:
        return self.decoder.identity_of(method.kv_types)

    def next_rows(self) -> NextTokenRows | None:
        """Returns the empty rows of a next-token block, if it makes drafts."""
        return None

    def prefill(
        self,
        sequence: Sequence,
        ids: Ids[int],
        *,
        rows: PromptRows | None = None,
        all_logits: bool = False,
    ) -> Generator[Progress, None, np.ndarray]:
        """See Engine.prefill. rows: used at the beginning of a sequence, without ``all_logits``."""
        if len(ids) == 0:
            raise SparseKVError("the prompt is empty: give at least one token")
        self._check([sequence], [ids])
        timings, n, n_past = sequence.timings, len(ids), sequence.begin()
        if n_past or all_logits:
            rows = None
        try:
            started, found = time.perf_counter(), Found()
            known = None
            moved = again = np.zeros(0, bool)  # of the rows after the loaded ones
            if rows is not None:
                found = rows.find(ids)
            sequence.difference = found.difference
            timings.prefill_s += time.perf_counter() - started
            started = time.perf_counter()
            self._prepare(n - found.n)
            timings.load_s += time.perf_counter() - started
            started = time.perf_counter()
            if any(spec.kind == STATE for spec in sequence.attention.specs):
                sequence.mark_messages(ids, self._ends())
            sequence.checkpoint = None  # finished layers have another end
            if n - found.n > self.decoder.chunk:  # many rows take much memory and time
                release_code()
            n_room, n_loaded = min(sequence.n_ctx, n_past + n + N_HEADROOM), 0
            block = sequence.next_rows
            of_model, more = None if sequence.drafts is None else sequence.drafts.sequence, 0
            if of_model is not None:  # it reads the prompt later
                more = bytes_to_come(of_model.caches, min(n_room, of_model.n_ctx))
            caches = [*sequence.caches, *([] if block is None else [block.cache])]
            reserve(caches, n_room, is_checked=self.shares_prefill, more_bytes=more)
            if rows is not None:
                n_loaded = rows.load(found, sequence.caches, n_room)
                known = rows.move(ids, n_loaded, sequence.caches, n_room)
                if known is None and n_loaded <= found.moved.n_exact:
                    rows.begin(ids, found, n_loaded, sequence.caches)
            n_begun = n_loaded
            if known is not None:
                n_begun += len(known.rows)
                sequence.difference = None  # known tokens are not computed again
                again = yield from _of_more(
                    repair_steps(
                        self.decoder, ids[n_loaded:n_begun], n_loaded, sequence.caches, known
                    ),
                    n - n_loaded,
                    0,
                )
                moved = known.rows
            attend, grid = (None, 0) if all_logits else self.decoder.attention_of(n_past + n)
            steps = self.decoder.forward_steps(
                ids[n_begun:], n_past + n_begun, sequence.caches,
                all_logits=all_logits, attend=attend, grid=grid,
                on_rows=None if rows is None else rows.take,
                on_part=None if rows is None else rows.take_part,
                on_hidden=None if block is None else partial(block.take_prompt, ids, n_past),
            )  # fmt: skip
            logits = yield from _of_more(steps, n - n_loaded, n_begun - n_loaded)
            last = logits[-1] if all_logits else logits
            before = sequence.moved.within(n_past) if n_past else found.moved.within(n_loaded)
            sequence.moved = before.and_then(n_loaded, moved, again)
            sequence.commit(ids, Checkpoint(n_past + n, last.copy()))
        except BaseException:
            if rows is not None:
                rows.abandon()
            sequence.settle()
            raise
        timings.prefill_s += time.perf_counter() - started
        timings.prefill_tokens += n - n_loaded - int(moved.sum()) + int(again.sum())
        timings.cached_tokens += n_loaded
        return logits

    def decode(
        self, sequences: Ids[Sequence], rows: Ids[Ids[int]], samples: Ids[Sample] = ()
    ) -> list[list[Outcome]]:
        self._check(sequences, rows)
        started, failed = time.perf_counter(), dict[int, Exception]()
        lengths = [sequence.begin() for sequence in sequences]
        try:
            outcomes = self._decode(sequences, rows, samples, failed)
            for i, (sequence, new) in enumerate(zip(sequences, rows, strict=True)):
                if i not in failed:
                    sequence.commit(new, sequence.checkpoint)
        except BaseException:
            for sequence, n in zip(sequences, lengths, strict=True):
                sequence.rewind(n)  # some have all of the rows, some have a part
            raise
        seconds = time.perf_counter() - started
        for i, (sequence, new) in enumerate(zip(sequences, rows, strict=True)):
            if i not in failed:  # a failed one goes back at its next use
                sequence.timings.decode_s += seconds
                sequence.timings.decode_tokens += len(new)
        if failed:
            raise StepError(failed, outcomes)
        return outcomes

    def _prepare(self, n_rows: int) -> None:
        """Compiles and loads the kernels of a prefill of ``n_rows`` rows."""
        self.decoder.prepare(n_rows)

    def _check(self, sequences: Ids[Sequence], rows: Ids[Ids[int]]) -> None:
        """Raises SparseKVError for rows that do not fit, and for a file that has changed."""
        hparams = self.decoder.hparams
        for sequence, new in zip(sequences, rows, strict=True):
            sequence.settle()
            have, n = len(sequence.tokens), len(new)
            if have + n > sequence.n_ctx:
                what = f"{have} tokens in the cache and {n} new ones" if have else f"{n} tokens"
                raise SparseKVError(
                    f"{what} do not fit the context of {sequence.n_ctx}: shorten the prompt or "
                    f"{room_for(hparams, have + n)}"
                )
        for new in rows:
            if not len(new):
                raise ValueError("a sequence without new tokens: give at least one")
            low, high = min(new), max(new)
            if low < 0 or high >= hparams.n_vocab:
                bad = low if low < 0 else high
                raise SparseKVError(f"token id {bad} is not in the vocabulary of {hparams.n_vocab}")
        self.decoder.weights.file.check_intact()


def _of_more(
    steps: Generator[Progress, None, T], n: int, n_before: int
) -> Generator[Progress, None, T]:
    """Runs the steps of a part of n rows, which n_before rows precede; yields all rows' progress.

    Returns what the steps return.
    """
    with closing(steps):
        while True:
            try:
                at = next(steps)
            except StopIteration as end:
                return end.value
            yield Progress(n_before + at.done, n, at.ends_layer)


class HostEngine(DecoderEngine):
    """The engine of a CPU alone."""

    decoder: Decoder
    shares_prefill = True
    first_steps = 1
    records_attended = True
    draft_sources = ("auto", "ngram", "mtp", "draft-model")

    def __init__(
        self,
        decoder: Decoder,
        note: str,
        n_ctx: int,
        ends: Callable[[], Container[int]] = frozenset,
        on_compile: OnCompile | None = None,
        next_token: NextTokenDecoder | None = None,
    ) -> None:
        """next_token: the decoder of the next-token block, if it makes drafts."""
        super().__init__(note, n_ctx, ends)
        self.decoder, self._next_token = decoder, next_token
        if next_token is not None:
            self.draft_specs = next_token.layer_specs()
        self._on_compile = on_compile
        self._is_ready_for_few = False

    def layer(self, method: Method, spec: LayerSpec) -> LayerCache:
        return method.layer(spec)

    def next_rows(self) -> NextTokenRows | None:
        return None if self._next_token is None else NextTokenRows(self._next_token)

    def decodes_on_host(self, method: Method) -> bool:
        return True

    def load_kernels(self, method: Method, specs: Ids[LayerSpec]) -> None:
        warmup.load_kernels(self.decoder, method, specs)

    def _prepare(self, n_rows: int) -> None:
        if self.decoder.is_few(n_rows) and not self._is_ready_for_few:
            warmup.compile_few_rows(self.decoder, self._on_compile)
            self._is_ready_for_few = True
        super()._prepare(n_rows)

    def _decode(
        self,
        sequences: Ids[Sequence],
        rows: Ids[Ids[int]],
        samples: Ids[Sample],
        failed: dict[int, Exception],
    ) -> list[list[Outcome]]:
        tokens = [token for new in rows for token in new]
        positions: list[int] = []
        caches: list[Ids[LayerCache]] = []
        for sequence, new in zip(sequences, rows, strict=True):
            n_past = len(sequence.tokens)
            positions += range(n_past, n_past + len(new))
            caches += [sequence.caches] * len(new)
        left = iter(self.decoder.decode_batch(tokens, positions, caches, failed))
        if self._next_token is not None:
            hidden, at = self.decoder.hidden(len(tokens)), 0
            for sequence, new in zip(sequences, rows, strict=True):
                if sequence.next_rows is not None:
                    taken = hidden[at : at + len(new)]
                    sequence.next_rows.take(len(sequence.tokens), new, taken)
                at += len(new)
        return [[next(left) for _ in new] for new in rows]
