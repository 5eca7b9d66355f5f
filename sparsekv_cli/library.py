"""The library: ``load`` opens a model, which answers messages and prompts.

from sparsekv_cli import load

with load("model.gguf", method="lfps") as model:
    print(model.chat([{"role": "user", "content": "Hello"}]))
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, overload
from weakref import WeakSet

from pydantic import Field

from sparsekv_cli.cache.counters import ledger_since
from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer import Answer
from sparsekv_cli.generation.answer_fields import AnswerFields
from sparsekv_cli.generation.conversation import model_thinking, prompt_ids
from sparsekv_cli.generation.fields import Texts, read_fields
from sparsekv_cli.generation.generation import Generation, step
from sparsekv_cli.generation.messages import read_messages
from sparsekv_cli.generation.sampler import SamplingOptions, new_constraint, new_sampler
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.model import Model, load_model
from sparsekv_cli.models.sources.locate import resolve_model
from sparsekv_cli.sequence import Attention
from sparsekv_cli.settings.config import SessionConfig

Messages = Ids[Mapping[str, Any]]


@dataclass(frozen=True)
class Reply:
    """A whole answer. ``str(reply)`` is its text."""

    text: str  # without the thinking
    thinking: str  # the model's thinking before the text
    tokens: list[int]  # without the token that ended the answer
    stop_reason: str  # "eos", "length" or "stop"
    usage: dict[str, int]  # prompt_tokens, cached_tokens, completion_tokens, total_tokens
    timings: dict[str, float]  # as ``sparsekv-cli run --json`` has them, in seconds
    ledger: dict[str, int]  # rows and bytes, as ``sparsekv-cli run --json`` has them

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Stream(Iterator[str]):
    """The pieces of an answer, as strings. ``reply`` is the whole answer after the last piece."""

    _pieces: Iterator[str | Reply]
    reply: Reply | None = field(default=None, init=False)

    def __next__(self) -> str:
        for piece in self._pieces:
            if isinstance(piece, str):
                return piece
            self.reply = piece
        raise StopIteration

    def close(self) -> None:
        """Ends the answer here. The model can then answer again."""
        self._pieces.close()  # type: ignore[attr-defined]


def load(
    name_or_path: str | Path,
    method: str = "full",
    budget: str | int | None = None,
    *,
    method_options: Mapping[str, Any] | None = None,
    n_ctx: int = 0,
    threads: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    **settings: Any,
) -> LanguageModel:
    """Opens a model. The result is a context manager, which closes the model at its end.

    name_or_path: what ``-m`` takes on the command line. method, budget, method_options: how calls
    attend by default. n_ctx: the most tokens of prompt and answer; 0 takes the length that the
    model was trained for. threads: 0 takes one thread for each physical core. settings: other
    fields of SessionConfig, such as ``prefill_dtype``. Raises SparseKVError for a model that cannot
    be opened, ValueError for a method or an option that does not exist.
    """
    chosen = _build(method, budget, method_options)
    config = SessionConfig(ctx_size=n_ctx, threads=threads, device=device, **settings)
    return LanguageModel(load_model(resolve_model(str(name_or_path)), chosen, config))


def _build(name: str, budget: str | int | None, options: Mapping[str, Any] | None) -> Method:
    texts = {key: str(value) for key, value in (options or {}).items()}
    return build_method(name, texts, budget=None if budget is None else str(budget))


class LanguageModel:
    """A model that ``load`` has opened. It answers one call at a time.

    It computes only the part of a prompt that differs from the last one.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sequence = model.sequence()
        self._attention = cache(model.attention_of)
        self._is_free = threading.Lock()
        self._is_open = True
        self._streams: WeakSet[Stream] = WeakSet()

    @property
    def n_ctx(self) -> int:
        """The most tokens of a prompt and its answer together."""
        return self._model.n_ctx

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends streams, closes the model's file and frees the memory of its rows.

        It frees all memory of a draft model.
        """
        self._is_open = False
        for stream in list(self._streams):
            stream.close()
        self._sequence.drafts = None
        self._sequence.reset()
        self._model.close()
        self._model = replace(self._model, draft=None)
        self._attention = cache(self._model.attention_of)

    def tokenize(
        self, text: str, *, add_bos: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Returns the token ids of a text. parse_special: control tokens in it are tokens."""
        return self._model.tokenizer.encode(
            text, add_bos=add_bos, add_eos=False, parse_special=parse_special
        )

    def detokenize(self, tokens: Ids[int]) -> str:
        """Returns the text of token ids, with control tokens."""
        parts = (self._model.tokenizer.token_bytes(int(token)) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")

    @overload
    def chat(self, messages: Messages, *, stream: Literal[False] = ..., **given: Any) -> Reply: ...
    @overload
    def chat(self, messages: Messages, *, stream: Literal[True], **given: Any) -> Stream: ...
    def chat(
        self, messages: Messages, *, stream: bool = False, think: bool | None = None, **given: Any
    ) -> Reply | Stream:
        """Answers a conversation, by the model's chat template.

        messages: dictionaries with ``role`` and ``content``. stream: returns the pieces as they
        come. think: whether the model thinks first; None takes what its template does. given: see
        ``generate``. Raises SparseKVError for a model without a chat template and for a prompt that
        does not fit the context.
        """
        self._check_open()
        said = read_messages(list(messages))
        ids = prompt_ids(self._model, said, None, raw=False, parse_special=False, think=think)
        return self._answer(ids, stream, {**given, "think": think}, is_chat=True)

    @overload
    def generate(self, prompt: str, *, stream: Literal[False] = ..., **given: Any) -> Reply: ...
    @overload
    def generate(self, prompt: str, *, stream: Literal[True], **given: Any) -> Stream: ...
    def generate(self, prompt: str, *, stream: bool = False, **given: Any) -> Reply | Stream:
        """Continues a text, without the chat template.

        given: ``max_tokens`` is the most tokens; by default as many as fit. ``stop`` is one or more
        texts. ``method``, ``budget`` and ``method_options`` are those of this call. The parameters
        of a line of ``run --jsonl`` are accepted too: ``temperature``, ``top_p``, ``top_k``,
        ``min_p``, ``seed``, ``json_schema``, ``grammar``, ``regex`` and so on. Raises SparseKVError
        for an unknown parameter or a bad value.
        """
        self._check_open()
        ids = prompt_ids(self._model, prompt, None, raw=True, parse_special=True)
        return self._answer(ids, stream, given, is_chat=False)

    def _answer(
        self, ids: list[int], stream: bool, given: Mapping[str, Any], *, is_chat: bool
    ) -> Reply | Stream:
        call = read_fields(_Call, given)
        sampling, attention = call.sampling(SamplingOptions({})), self._attention_of(call)
        pieces = Stream(self._pieces(ids, call, sampling, attention, is_chat=is_chat))
        self._streams.add(pieces)
        if stream:
            return pieces
        for _ in pieces:
            pass
        assert pieces.reply is not None
        return pieces.reply

    def _attention_of(self, call: _Call) -> Attention:
        if call.method is None and call.budget is None and call.method_options is None:
            assert self._model.attention is not None
            return self._model.attention
        name = call.method or self._model.method.name
        return self._attention(_build(name, call.budget, call.method_options))

    def _pieces(
        self,
        ids: list[int],
        call: _Call,
        sampling: SamplingOptions,
        attention: Attention,
        *,
        is_chat: bool,
    ) -> Iterator[str | Reply]:
        """Yields the pieces of an answer, then the whole of it."""
        import numba

        if not self._is_free.acquire(blocking=False):
            raise SparseKVError(
                "the model is busy with another answer: read its stream to the end, or close it"
            )
        try:
            model, sequence = self._model, self._sequence
            numba.set_num_threads(model.n_threads)  # which numba keeps for each thread
            if sequence.attention is not attention:
                sequence.keep_common(ids)  # the other method has made later rows
                sequence.change_method(attention)
            sequence.timings.reset()
            marked = model_thinking(model) if is_chat else None
            constraint = new_constraint(model.tokenizer, sampling, marked, call.think)
            sample = new_sampler(model, sampling, call.seed, constraint)
            started = time.perf_counter()
            missing = sequence.keep_common(ids)
            if missing:
                sequence.prefill(missing)
            before = sequence.ledger()  # other answers may have used the caches
            new: list[str] = []
            generation = Generation(
                model.tokenizer,
                sequence,
                sample,
                n_predict=call.max_tokens,
                stops=call.stop,
                constraint=constraint,
                thinking=marked,
                write=new.append,
            )
            is_done = generation.choose()
            sequence.timings.ttft_s = time.perf_counter() - started
            while not is_done:
                yield from new
                new.clear()
                step(model.engine, [generation])
                is_done = generation.choose()
            answer = generation.finish()
            yield from new
            yield self._reply(answer, len(ids), len(ids) - len(missing), before)
        finally:
            self._is_free.release()

    def _reply(
        self, answer: Answer, n_prompt: int, n_cached: int, before: Mapping[str, int]
    ) -> Reply:
        n_answer = len(answer.tokens)
        usage = {
            "prompt_tokens": n_prompt,
            "cached_tokens": n_cached,
            "completion_tokens": n_answer,
            "total_tokens": n_prompt + n_answer,
        }
        return Reply(
            answer.text,
            answer.thinking,
            answer.tokens,
            answer.stop_reason,
            usage,
            self._sequence.timings.as_dict(),
            ledger_since(self._sequence.ledger(), before),
        )

    def _check_open(self) -> None:
        if not self._is_open:
            raise SparseKVError("the model is closed: load it again")


class _Call(AnswerFields):
    """The checked parameters of one call."""

    max_tokens: Annotated[int, Field(ge=0)] = -1  # -1: as many as fit
    stop: Texts = ()
    method: str | None = None
    budget: str | int | None = None
    method_options: dict[str, Any] | None = None
    think: bool | None = None
