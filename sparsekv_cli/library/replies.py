"""The results of a call: a whole answer, or its pieces as they come."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from sparsekv_cli.errors import SparseKVError

WAIT_S = 0.01  # between two looks at another thread's step


@dataclass(frozen=True)
class Reply:
    """A whole answer. ``str(reply)`` is its text."""

    text: str  # without the thinking
    thinking: str  # the model's thinking before the text
    tokens: list[int]  # without the token that ended the answer
    stop_reason: str  # "eos", "length" or "stop"; "interrupt" if it was ended early
    usage: dict[str, int]  # prompt_tokens, cached_tokens, completion_tokens, total_tokens
    timings: dict[str, float]  # as ``sparsekv-cli run --json`` has them, in seconds
    ledger: dict[str, int]  # rows and bytes, as ``sparsekv-cli run --json`` has them
    logprobs: list[dict[str, Any]]  # one entry a token, if they were asked for

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Stream(Iterator[str], AsyncIterator[str]):
    """The pieces of an answer, as strings, for ``for`` and for ``async for``.

    ``reply`` is the answer after its last piece. After ``close`` or Ctrl-C it is the answer up to
    there, and None if it has not begun.
    """

    _pieces: Generator[str, None, None]
    _begin: Callable[[Generator[str, None, None]], None]  # called before the first piece
    _said: list[Reply]
    _thread: int = field(default=0, init=False)  # that has asked for a piece last

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
        """Ends the answer here. The model can then answer again.

        If another thread computes the next piece, it is ended after that. Raises SparseKVError
        within the computation of a piece, as in a signal handler.
        """
        while inspect.getgeneratorstate(self._pieces) != inspect.GEN_CLOSED:
            try:
                self._pieces.close()
            except ValueError:  # it is running
                if self._thread == threading.get_ident():
                    raise SparseKVError(
                        "the answer cannot be closed while this thread computes a piece of it"
                    ) from None
                time.sleep(WAIT_S)


def is_in_use(pieces: Generator[str, None, None] | None) -> bool:
    """Returns whether an answer has begun and has not ended, however it ends."""
    running = (inspect.GEN_RUNNING, inspect.GEN_SUSPENDED)
    return pieces is not None and inspect.getgeneratorstate(pieces) in running
