"""A session: one model, one method, one sequence. Prefill, decode, rewind; token ids only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sparsekv_cli import sequence, warmup
from sparsekv_cli.cache.kinds import share_rows
from sparsekv_cli.cache.layer import reserve
from sparsekv_cli.cache.spec import STATE, LayerSpec
from sparsekv_cli.calibration import calibrations
from sparsekv_cli.config import SessionConfig
from sparsekv_cli.engine import open_engine
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.gpu import may_have_device
from sparsekv_cli.memory import release_code
from sparsekv_cli.methods.base import Method
from sparsekv_cli.methods.depth import dense_up_to, sparse_from
from sparsekv_cli.models.architectures import Architecture, architecture_of
from sparsekv_cli.models.forward import Progress
from sparsekv_cli.models.gguf.file import GGUFFile, open_gguf
from sparsekv_cli.models.hparams import HParams, read_architecture, read_hparams
from sparsekv_cli.models.weights import Weights, read_weights
from sparsekv_cli.prefix.prompt_rows import Found, PromptRows
from sparsekv_cli.sampling.plain import Outcome, PlainSampler
from sparsekv_cli.sequence import Attention, Checkpoint, SequenceState, Timings, hand_over
from sparsekv_cli.warmup import OnCompile

Sample = Callable[[np.ndarray, Sequence[int]], int]
Added = TypeVar("Added")


N_HEADROOM = 512  # rows that a prefill makes room for beyond its own, so that an answer fits


class Session:
    """One model, one method, one sequence. ``load_session`` makes it.

    Positions are absolute; ``tokens`` are those whose rows the caches hold. ``checkpoint``: where
    their last prefill ended, None if that is no part of them. ``attention``: the sequence's, which
    ``reset`` keeps. ``prefixes``: where a prompt's rows are looked for and kept, if anywhere.
    """

    def __init__(
        self,
        file: GGUFFile,
        architecture: Architecture,
        hparams: HParams,
        weights: Weights,
        method: Method,
        config: SessionConfig,
        on_compile: OnCompile | None = None,
        on_calibrate: calibrations.OnCalibrate | None = None,
    ) -> None:
        import numba

        from sparsekv_cli.cpu.jit.threads import physical_cores

        self.gguf = file
        self.hparams = hparams
        self._on_compile = on_compile
        self.config = config
        self.n_threads = min(config.threads or physical_cores(), numba.config.NUMBA_NUM_THREADS)
        self.n_ctx = config.ctx_size or hparams.n_ctx_train
        numba.set_num_threads(self.n_threads)
        self.engine = open_engine(
            hparams, architecture, weights, method, config, self.n_threads, self.n_ctx, on_compile
        )
        self.decoder = self.engine.decoder
        self.calibrations = calibrations.Calibrations(
            file,
            hparams,
            self.decoder,
            lambda text: self.tokenizer.encode(text, add_eos=False, parse_special=False),
            Path(config.calibration) if config.calibration else None,
        )
        self.timings = Timings()
        self.prefixes: PromptRows | None = None
        self.ledger = sequence.SequenceLedger(lambda: self.caches)
        self.attention = self.attention_of(method, config.sparse_from, on_compile, on_calibrate)
        self.engine.load_kernels(method, self.attention.specs)
        self._is_ready_for_few = False
        self.reset()

    @property
    def method(self) -> Method:
        return self.attention.method

    @property
    def sparse_from(self) -> int:
        return self.attention.sparse_from

    def attention_of(
        self,
        method: Method,
        dense_rows: int,
        on_compile: OnCompile | None = None,
        on_calibrate: calibrations.OnCalibrate | None = None,
    ) -> Attention:
        """How a sequence attends with ``method``, which is calibrated first if necessary.

        dense_rows: as SessionConfig has ``sparse_from``. Where steps pay is known of those on the
        host only.
        """
        specs = self.prepare(method, on_compile, on_calibrate)
        if not method.work_of_a_head:
            return Attention(method, specs, 0)
        if dense_rows < 0:
            dense_rows = sparse_from(method, specs) if self.engine.decodes_on_host(method) else 0
        if dense_rows:
            method = dense_up_to(method, dense_rows)
        return Attention(method, specs, dense_rows)

    def prepare(
        self,
        method: Method,
        on_compile: OnCompile | None = None,
        on_calibrate: calibrations.OnCalibrate | None = None,
    ) -> list[LayerSpec]:
        """The layers' specs for ``method``, which is calibrated and compiled first if necessary."""
        specs = [
            replace(spec, n_checkpoints=self.config.checkpoints)
            for spec in self.calibrations.specs(method, on_calibrate)
        ]
        if self.engine.decodes_on_host(method):
            warmup.compile_method_kernels(self.decoder, method, specs, on_compile)
        return specs

    def reset(self) -> None:
        """Forgets the sequence."""
        self.tokens: list[int] = []
        self.checkpoint: Checkpoint | None = None
        self.caches = [
            self.engine.layer(self.attention.method, spec) for spec in self.attention.specs
        ]
        share_rows(self.caches)

    def change_method(
        self,
        method: Method,
        on_compile: OnCompile | None = None,
        on_calibrate: calibrations.OnCalibrate | None = None,
    ) -> None:
        """Goes on with another method, and with the same tokens if their rows can be taken over.

        They can where the old caches keep all rows as the new ones do, on the host; the tokens
        whose queries the new method needs are prefilled again. Otherwise no tokens are left.
        """
        method.check_layers([layer.kind for layer in self.hparams.layers])
        tokens, caches = self.tokens, self.caches
        self.attention = self.attention_of(
            method, self.config.sparse_from, on_compile, on_calibrate
        )
        self.engine.load_kernels(method, self.attention.specs)
        self.reset()
        if method.n_queried is None or not self.engine.shares_prefill:
            return
        n = sequence.reachable(caches, len(tokens) - max(1, method.n_queried))
        n_room = len(tokens) + N_HEADROOM
        taken = hand_over(caches, self.caches, n, min(self.n_ctx, n_room)) if n > 0 else None
        if taken is not None:
            self.tokens, self.caches = tokens[:n], taken
            self.prefill(tokens[n:])

    @property
    def state(self) -> SequenceState:
        """The sequence, which another one can replace."""
        return SequenceState(self.attention, self.tokens, self.caches, self.checkpoint)

    @state.setter
    def state(self, state: SequenceState) -> None:
        self.attention, self.tokens, self.caches, self.checkpoint = state

    @cached_property
    def tokenizer(self) -> Any:
        from sparsekv_cli.models.tokenizer.tokenizer import load_tokenizer

        return load_tokenizer(self.gguf.metadata)

    def method_options(self) -> dict[str, Any]:
        return self.method.options()

    def prefill(
        self,
        ids: Sequence[int],
        progress: Progress | None = None,
        *,
        all_logits: bool = False,
        between_layers: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Adds ``ids`` densely; logits f32 (n_vocab,) after the last, or (T, n_vocab) after each.

        progress may decode other sequences; between_layers may also prefill them, if it leaves the
        session with the state that it found. SparseKVError for no tokens, or for more than the
        context holds. Then, and when it is interrupted, nothing is added.
        """
        n = len(ids)
        if n == 0:
            raise SparseKVError("the prompt is empty: give at least one token")
        self._check_room(n, len(self.tokens))
        self._check_ids(ids)
        self.gguf.check_intact()
        n_past, prefixes, found = len(self.tokens), self.prefixes, Found()
        started = time.perf_counter()
        if prefixes is not None and not n_past and not all_logits:
            found = prefixes.find(ids)
        else:
            prefixes = None
        self.timings.prefill_s += time.perf_counter() - started
        started = time.perf_counter()
        if self.decoder.is_few(n - found.n) and not self._is_ready_for_few:
            warmup.compile_few_rows(self.decoder, self._on_compile)
            self._is_ready_for_few = True
        self.decoder.prepare(n - found.n)
        self.timings.load_s += time.perf_counter() - started
        if any(spec.kind == STATE for spec in self.attention.specs):
            sequence.mark_messages(self.caches, self.tokenizer.eog_ids, ids, n_past)
        started = time.perf_counter()
        self.checkpoint = None  # layers that are done with these rows forget where they were
        if n - found.n > self.config.chunk:  # rows that take much memory, and long
            release_code()
        try:
            n_room, n_loaded = min(self.n_ctx, n_past + n + N_HEADROOM), 0
            reserve(self.caches, n_room, is_checked=self.engine.shares_prefill)
            if prefixes is not None:
                n_loaded = prefixes.load(found, self.caches, n_room)
                prefixes.begin(ids, found, n_loaded, self.caches)
            logits = self.decoder.forward(
                ids[n_loaded:], n_past + n_loaded, self.caches, progress=progress,
                all_logits=all_logits, on_rows=prefixes and prefixes.take,
                between_layers=between_layers,
            )  # fmt: skip
        except BaseException:
            if prefixes is not None:
                prefixes.abandon()
            self.rewind(n_past)
            raise
        self.tokens.extend(int(token) for token in ids)
        last = logits[-1] if all_logits else logits
        self.checkpoint = Checkpoint(len(self.tokens), last.copy())
        self.timings.prefill_s += time.perf_counter() - started
        self.timings.prefill_tokens += n - n_loaded
        self.timings.cached_tokens += n_loaded
        return logits

    def decode(self, token: int) -> np.ndarray:
        """Adds one token with the method; logits f32 (n_vocab,) after it."""
        return self._add(token, self.decode_batch)[0]

    def decode_next(self, token: int, sample: Sample) -> int:
        """Adds one token; the next one. A device chooses it itself, if it can do ``sample``."""
        (found,) = self._add(token, partial(self.decode_batch_next, samples=[sample]))
        return found if isinstance(found, int) else sample(found, self.tokens)

    def _add(
        self, token: int, decode: Callable[[Sequence[int], Sequence[SequenceState]], Added]
    ) -> Added:
        n_past = len(self.tokens)
        try:
            return decode([token], [self.state])
        except BaseException:
            self.rewind(n_past)  # some layers have the row already
            raise

    def decode_batch(self, tokens: Sequence[int], sequences: Sequence[SequenceState]) -> np.ndarray:
        """Adds a token to each of B sequences of this session: logits f32 (B, n_vocab).

        After an exception some layers may hold the new row already; Batch (batch.py) rewinds them.
        """
        return self._add_batch(tokens, sequences, self.decoder.decode_batch)

    def decode_batch_next(
        self, tokens: Sequence[int], sequences: Sequence[SequenceState], samples: Sequence[Sample]
    ) -> list[Outcome]:
        """``decode_batch``, but the next tokens of those that a device can choose itself."""
        plain = [each if isinstance(each, PlainSampler) else None for each in samples]
        if self.engine.chooses_tokens and any(plain):
            return self._add_batch(tokens, sequences, partial(self.decoder.choose_batch, plain))
        return [row.copy() for row in self.decode_batch(tokens, sequences)]

    def _add_batch(
        self, tokens: Sequence[int], sequences: Sequence[SequenceState], step: Callable[..., Added]
    ) -> Added:
        for state in sequences:
            self._check_room(1, len(state.tokens))
        self._check_ids(tokens)
        self.gguf.check_intact()
        started = time.perf_counter()
        lengths = [len(state.tokens) for state in sequences]
        added = step(tokens, lengths, [state.caches for state in sequences])
        for token, state in zip(tokens, sequences, strict=True):
            state.tokens.append(int(token))
        self.timings.decode_s += time.perf_counter() - started
        self.timings.decode_tokens += len(tokens)
        return added

    def generate(
        self,
        ids: Sequence[int],
        sample: Sample,
        n_predict: int,
        progress: Progress | None = None,
    ) -> Iterator[int]:
        """Prefills ``ids`` and yields sampled tokens, each ahead of its own decode step.

        Without ``ids`` it goes on from the checkpoint, where the session must be. Ends after
        ``n_predict`` tokens (negative: never) or when the context is full. The caller ends it at an
        end-of-generation token by closing the iterator; the token yielded last is then not in
        ``tokens``.
        """
        at, started = self.checkpoint, time.perf_counter()
        if not len(ids) and at is not None and at.n == len(self.tokens):
            logits = at.logits
        else:
            logits = self.prefill(ids, progress)
        if n_predict == 0:
            return
        token = sample(logits, self.tokens)
        self.timings.ttft_s = time.perf_counter() - started
        for produced in count(1):
            yield token
            if produced == n_predict or len(self.tokens) >= self.n_ctx:
                return
            token = self.decode_next(token, sample)

    def rewind(self, n: int) -> None:
        """Keeps at most the first n tokens; fewer if the method cannot go back to them.

        Then it keeps those up to the checkpoint, or else none. At the checkpoint the session is
        what it was when its last prefill had ended; decode steps from there have the same bits.
        """
        n = min(n, len(self.tokens))
        if n == len(self.tokens) and all(cache.n == n for cache in self.caches):
            return
        at, reached = self.checkpoint, sequence.reachable(self.caches, n)
        for kept in (reached, at.n if at is not None and at.n < reached else 0):
            if kept and all(cache.truncate(kept) == kept for cache in self.caches):
                del self.tokens[kept:]
                if at is not None and kept < at.n:
                    self.checkpoint = None
                return
        self.reset()

    def _check_room(self, n: int, have: int) -> None:
        if have + n > self.n_ctx:
            what = f"{have} tokens in the cache and {n} new ones" if have else f"{n} tokens"
            raise SparseKVError(
                f"{what} do not fit the context of {self.n_ctx}: shorten the prompt or raise "
                f"--ctx-size (the model was trained for {self.hparams.n_ctx_train})"
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.hparams.n_vocab:
            bad = low if low < 0 else high
            raise SparseKVError(
                f"token id {bad} is not in the vocabulary of {self.hparams.n_vocab}"
            )


def load_session(
    model_path: Path,
    method: Method,
    config: SessionConfig,
    on_compile: OnCompile | None = None,
    on_calibrate: calibrations.OnCalibrate | None = None,
) -> Session:
    """Opens and checks a model and builds a session; SparseKVError says what is wrong.

    on_compile: told what is being compiled the first time (see warmup.py); on_calibrate: what is
    being calibrated (see calibration/calibrations.py).
    """
    started = time.perf_counter()
    file = open_gguf(model_path)
    try:
        architecture = architecture_of(read_architecture(file))
        hparams = read_hparams(file)
        method.check_layers([layer.kind for layer in hparams.layers])
        n_ctx = config.ctx_size or hparams.n_ctx_train
        weights = read_weights(file, hparams, architecture, n_ctx)
        if config.device != "cpu" and may_have_device():
            warmup.compile_for_gpus_host(model_path, method, config.kv == "host")
        session = Session(
            file, architecture, hparams, weights, method, config, on_compile, on_calibrate
        )
    except BaseException:
        file.close()
        raise
    session.timings.load_s = time.perf_counter() - started
    return session
