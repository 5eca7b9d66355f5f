"""A turn: one prompt and its answer, in a sequence of the library's model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from sparsekv_cli.cache.counters import ledger_since
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer_fields import AnswerFields
from sparsekv_cli.generation.conversation import model_thinking
from sparsekv_cli.generation.fields import Texts
from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.library.replies import Reply
from sparsekv_cli.methods.base import Method
from sparsekv_cli.model import Model
from sparsekv_cli.prefix.folder import PrefixFolder, limit_of
from sparsekv_cli.prefix.prefixes import Prefixes, prompts_in
from sparsekv_cli.prefix.snapshots import can_keep
from sparsekv_cli.sequence import Attention, Sequence
from sparsekv_cli.settings.option import MAX_WHOLE

LOG = logging.getLogger("sparsekv_cli")


class Call(AnswerFields):
    """The checked parameters of one call."""

    max_tokens: Annotated[int, Field(ge=0)] = -1  # -1: as many as fit
    stop: Texts = ()
    logprobs: Annotated[int, Field(ge=0, le=MAX_WHOLE)] | None = None
    method: str | None = None
    budget: str | int | None = None
    method_options: dict[str, Any] | None = None
    think: bool | None = None


class Asked(NamedTuple):
    """The parameters of a call, the same for each of its prompts."""

    call: Call
    sampling: SamplingOptions
    attention: Attention
    is_chat: bool


class Turn:
    """A prompt of token ids and its answer.

    First call ``begin``, then ``decode`` until ``is_done``, then ``reply``.
    """

    def __init__(self, model: Model, sequence: Sequence, ids: list[int], asked: Asked) -> None:
        self.sequence = sequence
        self.generation: Generation | None = None  # None before the prefill has ended
        self.is_done = False
        self._model, self._ids, self._asked = model, ids, asked
        self._n_cached = 0
        # the ledger at the end of the prefill, without the answer
        self._before: dict[str, int] = {}

    def begin(
        self, check: Callable[[], None], rows: Prefixes | None, write: Callable[[str], None]
    ) -> None:
        """Reads the prompt and chooses the first token.

        check: called after each part of the prompt; it may raise. rows: finds and stores prompts on
        disk. write: called with the pieces of the text.
        """
        model, sequence, ids = self._model, self.sequence, self._ids
        if not ids:
            raise SparseKVError("the prompt is empty: give at least one token")
        call, sampling, _, is_chat = self._asked
        use_threads(model)
        sequence.timings.reset()
        marked = model_thinking(model) if is_chat else None
        constraint = new_constraint(model.tokenizer, sampling, marked, call.think)
        sample = new_sampler(model, sampling, call.seed, constraint)
        started = time.perf_counter()
        if rows is not None:
            rows.abandon()  # rows of an answer that was interrupted
        missing = sequence.keep_common(ids, rows=rows)
        if missing:
            sequence.prefill(missing, lambda *_: check(), rows=rows)
        self._n_cached = len(ids) - len(missing) + sequence.timings.cached_tokens
        self._before = sequence.ledger()
        self.generation = Generation(
            model.tokenizer,
            sequence,
            sample,
            n_predict=call.max_tokens,
            stops=call.stop,
            constraint=constraint,
            thinking=marked,
            logprobs=call.logprobs,
            write=write,
        )
        self.is_done = self.generation.choose()
        sequence.timings.ttft_s = time.perf_counter() - started

    def reply(self, stop_reason: str = "") -> Reply:
        """Returns the answer so far. stop_reason: why it ends; empty: the generation's reason."""
        assert self.generation is not None
        answer = self.generation.finish()
        n_prompt, n_answer = len(self._ids), len(answer.tokens)
        usage = {
            "prompt_tokens": n_prompt,
            "cached_tokens": self._n_cached,
            **self.sequence.moved.usage(),
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
        }
        return Reply(
            answer.text,
            answer.thinking,
            answer.tokens,
            stop_reason or answer.stop_reason,
            usage,
            self.sequence.timings.as_dict(),
            ledger_since(self.sequence.ledger(), self._before),
            answer.logprobs,
        )


def decode(model: Model, turns: Ids[Turn]) -> None:
    """Decodes the next token of every turn in one step. Raises the error of a turn that fails."""
    use_threads(model)
    generations = [turn.generation for turn in turns if turn.generation is not None]
    for error in step(model.engine, generations).values():
        raise error
    for turn, generation in zip(turns, generations, strict=True):
        turn.is_done = generation.choose()


def use_threads(model: Model) -> None:
    """Sets the number of threads of kernels. numba stores it for each calling thread."""
    import numba

    numba.set_num_threads(model.n_threads)


def rows_on_disk(
    model: Model,
    folder: Path | None,
    limit: float | None,
    method: Method,
    repair: float | None = None,
) -> Prefixes | None:
    """Returns the store of prompts in a folder for a method; None if nothing can be stored.

    limit: see ``limit_of``. repair: see ``move_passages``.
    """
    if folder is None or method.n_queried is None or not can_keep(model.decoder):
        return None
    kept = PrefixFolder(folder, limit_of(folder, limit), LOG.warning)
    prompts = prompts_in(kept, model.decoder, method.kv_types, method.n_queried, LOG.debug)
    prompts.repair = repair
    return prompts
