"""A model that answers messages and prompts, one call at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload
from weakref import WeakSet, ref

from sparsekv_cli.errors import SparseKVError
from sparsekv_cli.generation.answer import STOP_INTERRUPT
from sparsekv_cli.generation.conversation import prompt_ids
from sparsekv_cli.generation.fields import read_fields
from sparsekv_cli.generation.messages import read_messages
from sparsekv_cli.generation.sampler import SamplingOptions
from sparsekv_cli.library.prompts import (
    CHAT,
    GENERATE,
    Messages,
    messages_of_prompt,
    plain,
    several,
    token_ids,
)
from sparsekv_cli.library.replies import WAIT_S, Reply, Stream, is_in_use
from sparsekv_cli.library.turn import Asked, Call, Turn, decode, rows_on_disk
from sparsekv_cli.methods import build_method
from sparsekv_cli.methods.base import Method
from sparsekv_cli.model import Model
from sparsekv_cli.sequence import Attention

CLOSED = "the model is closed: load it again"
TOGETHER = 8  # prompts that are decoded in one step
Prompt = str | list[int]


def built(name: str, budget: str | int | None, options: Mapping[str, Any] | None) -> Method:
    """Returns the method ``name`` with its options. Raises ValueError for a wrong one."""
    texts = {key: str(value) for key, value in (options or {}).items()}
    return build_method(name, texts, budget=None if budget is None else str(budget))


class LanguageModel:
    """A model that ``load`` has opened. It answers one call at a time.

    A prompt that begins like the last one is only computed from the first different token on. The
    answer is the same as that of a model that has just been loaded.
    """

    def __init__(
        self,
        model: Model,
        folder: Path | None = None,
        limit: float | None = None,
        repair: float | None = None,
    ) -> None:
        """folder: stores rows of prompts, up to ``limit`` GiB; None: nothing is stored.

        limit: None: see ``limit_of``. repair: see ``move_passages``.
        """
        self._model = model
        self._sequence = model.sequence()
        self._attention = cache(model.attention_of)
        of_disk = replace(model, draft=None), folder, limit
        self._rows = cache(partial(rows_on_disk, *of_disk, repair=repair))
        self._lock = threading.Lock()  # held while an answer starts or the model closes
        self._running: Callable[[], Generator[Any, None, None] | None] = lambda: None
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
        """Ends all answers, closes the model's file and frees the memory of its rows.

        If another thread computes an answer, that answer ends after its next token. The memory of a
        draft model is freed too.
        """
        self._is_open = False
        for stream in list(self._streams):
            stream.close()
        while is_in_use(self._running()):
            time.sleep(WAIT_S)
        with self._lock:
            self._sequence.drafts = None
            self._sequence.reset()
            self._model.close()
            self._model = replace(self._model, draft=None)
            self._attention = cache(self._model.attention_of)

    def tokenize(
        self, text: str, *, add_bos: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Returns the token ids of a text.

        parse_special: whether the spelling of a control token, such as <|im_end|>, is that token.
        """
        return self._model.tokenizer.encode(
            text, add_bos=add_bos, add_eos=False, parse_special=parse_special
        )

    def detokenize(self, tokens: Ids[int]) -> str:
        """Returns the text of token ids. Control tokens are spelled out."""
        parts = (self._model.tokenizer.token_bytes(int(token)) for token in tokens)
        return b"".join(parts).decode("utf-8", errors="replace")

    @overload
    def chat(
        self, messages: str | Messages, *, stream: Literal[False] = ..., **given: Any
    ) -> Reply: ...
    @overload
    def chat(self, messages: str | Messages, *, stream: Literal[True], **given: Any) -> Stream: ...
    @overload
    def chat(self, messages: list[str] | list[Messages], **given: Any) -> list[Reply]: ...
    def chat(
        self, messages: Any, *, stream: bool = False, think: bool | None = None, **given: Any
    ) -> Reply | Stream | list[Reply]:
        """Answers a conversation with the model's chat template.

        messages: dictionaries with ``role`` and ``content``, or the text of one message. For a list
        of conversations it returns a list of replies. stream: True returns a Stream of the answer's
        pieces. think: whether the model thinks first; None: its template decides. given: see
        ``generate``. Raises SparseKVError if the model has no chat template, or if a prompt does
        not fit the context.
        """

        def ids_of(conversation: Any) -> list[int]:
            said = read_messages(messages_of_prompt(plain(conversation)))
            return prompt_ids(self._model, said, None, raw=False, parse_special=False, think=think)

        return self._answer(messages, CHAT, ids_of, stream, {**given, "think": think}, is_chat=True)

    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[False] = ..., **given: Any) -> Reply: ...
    @overload
    def generate(self, prompt: Prompt, *, stream: Literal[True], **given: Any) -> Stream: ...
    @overload
    def generate(self, prompt: list[str] | list[list[int]], **given: Any) -> list[Reply]: ...
    def generate(
        self, prompt: Any, *, stream: bool = False, **given: Any
    ) -> Reply | Stream | list[Reply]:
        """Continues a text or token ids, without the chat template.

        For a list of prompts it returns a list of replies, which are decoded together. given:
        ``max_tokens`` is the most tokens, by default as many as fit. ``stop`` is a text or a list
        of texts that end the answer. ``logprobs`` is the number of likeliest tokens to return with
        each token. ``method``, ``budget`` and ``method_options`` are for this call only. The
        parameters of a line of ``run --jsonl`` are accepted too: ``temperature``, ``top_p``,
        ``top_k``, ``min_p``, ``seed``, ``json_schema``, ``grammar``, ``regex`` and so on. Raises
        SparseKVError for an unknown parameter or a bad value.
        """

        def ids_of(one: Any) -> list[int]:
            if not isinstance(one, str):
                return token_ids(one)
            return prompt_ids(self._model, one, None, raw=True, parse_special=True)

        return self._answer(prompt, GENERATE, ids_of, stream, given, is_chat=False)

    async def achat(self, messages: Any, **given: Any) -> Any:
        """Runs ``chat`` in a thread. If it returns a Stream, ``async for`` reads the pieces."""
        return await asyncio.to_thread(partial(self.chat, messages, **given))

    async def agenerate(self, prompt: Any, **given: Any) -> Any:
        """Runs ``generate`` in a thread. If it returns a Stream, ``async for`` reads the pieces."""
        return await asyncio.to_thread(partial(self.generate, prompt, **given))

    def _answer(
        self,
        prompt: Any,
        expected: str,
        ids_of: Callable[[Any], list[int]],
        stream: bool,
        given: Mapping[str, Any],
        *,
        is_chat: bool,
    ) -> Reply | Stream | list[Reply]:
        """Answers one prompt or a list. expected: words for an error, what ``prompt`` may be."""
        if not self._is_open:
            raise SparseKVError(CLOSED)
        prompt = plain(prompt)
        many = several(prompt, expected)
        call = read_fields(Call, plain(given))
        asked = Asked(call, call.sampling(SamplingOptions({})), self._attention_of(call), is_chat)
        said: list[Reply] = []
        if many is not None:
            if stream:
                raise SparseKVError("stream: does not work with a list of prompts: give one")
            pieces = self._all_pieces([ids_of(each) for each in many], asked, said)
        else:
            pieces = self._pieces(ids_of(prompt), asked, said)
        answer = Stream(pieces, self._begin, said)
        self._streams.add(answer)
        if stream:
            return answer
        try:
            for _ in answer:
                pass
        finally:
            answer.close()
        if not said:
            raise SparseKVError(CLOSED)
        return said if many is not None else said[0]

    def _attention_of(self, call: Call) -> Attention:
        if call.method is None and call.budget is None and call.method_options is None:
            assert self._model.attention is not None
            return self._model.attention
        name = call.method or self._model.method.name
        return self._attention(built(name, call.budget, call.method_options))

    def _begin(self, pieces: Generator[str, None, None]) -> None:
        """Gives an answer the model until ``pieces`` ends. Raises SparseKVError if it is in use.

        It runs ``pieces`` to its first ``yield``.
        """
        with self._lock:
            if is_in_use(self._running()):
                raise SparseKVError(
                    "the model is busy with another answer: read its stream to the end, or close it"
                )
            if not self._is_open:
                raise SparseKVError(CLOSED)
            self._running = ref(pieces)
            next(pieces)

    def _pieces(
        self, ids: list[int], asked: Asked, said: list[Reply]
    ) -> Generator[str, None, None]:
        """Yields the pieces of an answer, the first of which is empty. Adds the reply to said."""
        yield ""
        sequence = self._sequence
        if sequence.attention is not asked.attention:
            # rows after these are not computed yet, or were made by the other method
            sequence.keep_common(ids)
            sequence.change_method(asked.attention)
        turn = Turn(self._model, sequence, ids, asked)
        rows = self._rows(sequence.method)
        try:
            new: list[str] = []
            turn.begin(self._check_open, rows, new.append)
            while not turn.is_done:
                yield from new
                new.clear()
                self._check_open()
                decode(self._model, [turn])
            said.append(turn.reply())
            yield from new
        except (GeneratorExit, KeyboardInterrupt, _ClosedError) as error:
            if not said and turn.generation is not None:
                said.append(turn.reply(STOP_INTERRUPT))
            if not isinstance(error, _ClosedError):
                raise
        finally:
            if rows is not None:
                rows.finish()

    def _all_pieces(
        self, prompts: list[list[int]], asked: Asked, said: list[Reply]
    ) -> Generator[str, None, None]:
        """Answers several prompts and adds their replies to ``said``. Yields one empty piece.

        Raises the error of the first prompt that fails.
        """
        yield ""
        rows = self._rows(asked.attention.method)
        for first in range(0, len(prompts), TOGETHER):
            turns = []
            for ids in prompts[first : first + TOGETHER]:
                turn = Turn(self._model, self._model.sequence(asked.attention), ids, asked)
                turn.begin(self._check_open, rows, lambda _: None)
                if rows is not None:
                    rows.finish()
                turns.append(turn)
            while active := [turn for turn in turns if not turn.is_done]:
                self._check_open()
                decode(self._model, active)
            said += [turn.reply() for turn in turns]

    def _check_open(self) -> None:
        if not self._is_open:
            raise _ClosedError(CLOSED)


class _ClosedError(SparseKVError):
    """The model is closed while an answer is computed."""
