"""The results of a call: a whole answer, or a stream of its pieces."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from sparsekv_cli.errors import SparseKVError

WAIT_S = 0.01  # seconds between two checks whether another thread's step has ended


@dataclass(frozen=True)
class Reply:
    """A whole answer. ``str(reply)`` is its text."""

    text: str  # without the thinking
    thinking: str  # the model's thinking before the text
    tokens: list[int]  # without the token that ended the answer
    # "eos", "length" or "stop"; "interrupt" if the caller ended it
    stop_reason: str  # "eos", "length" or "stop"; "interrupt" if it was ended early
    usage: dict[str, int]  # prompt_tokens, cached_tokens, completion_tokens, total_tokens
    timings: dict[str, float]  # seconds, with the names of ``sparsekv-cli run --json``
    ledger: dict[str, int]  # rows and bytes, with the names of ``sparsekv-cli run --json``
    logprobs: list[dict[str, Any]]  # one entry a token, if the caller asked for them

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Stream(Iterator[str], AsyncIterator[str]):
    """The pieces of an answer, as strings, for ``for`` and for ``async for``.

    ``reply`` is the whole answer after the last piece. After ``close`` or Ctrl-C it is the answer
    so far. It is None before the first piece.
    """

    _pieces: Generator[str, None, None]
    _begin: Callable[[Generator[str, None, None]], None]  # called before the first piece
    _said: list[Reply]
    _thread: int = field(default=0, init=False)  # the thread that asked for the last piece

    @property
    def reply(self) -> Reply | None:
        return self._said[-1] if self._said else None

    def __next__(self) -> str:
        self._thread = threading.get_ident()
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CREATED:
            self._begin(self._pieces)
        return next(self._pieces)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> str:
        piece = await asyncio.to_thread(next, self, None)
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """Ends the answer. The model can then answer again.

        If another thread computes a piece, the answer ends after that piece. Raises SparseKVError
        if this thread is computing a piece, as in a signal handler.
        """
        while inspect.getgeneratorstate(self._pieces) != inspect.GEN_CLOSED:
            try:
                self._pieces.close()
            except ValueError:  # a thread is computing a piece
                if self._thread == threading.get_ident():
                    raise SparseKVError(
                        "the answer cannot be closed while this thread computes a piece of it"
                    ) from None
                time.sleep(WAIT_S)


def is_in_use(pieces: Generator[str, None, None] | None) -> bool:
    """Returns whether an answer has begun and has not ended."""
    running = (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)
    return pieces is not None and inspect.getgeneratorstate(pieces) in running
