"""Work beside a decode step: a second stream, forked from the step's and joined to it again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sparsekv_cli.kernels import clock


class SideStream:
    """A stream of its own where the device has streams; elsewhere the work is done at once.

    Fork and join are events between the streams, which a graph capture takes in. A capture must not
    end before the join.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._times = torch.zeros(clock.N_TIMES.value, dtype=torch.int64, device=device)
        self._done_at_once = 0  # ns of work that had no stream of its own
        self.forked = False  # since the last join

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside begins after all launched so far, and runs beside the rest."""
        self.forked = True
        if self._stream is None:
            begin = time.perf_counter_ns()
            yield
            self._done_at_once += time.perf_counter_ns() - begin
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Has the present stream wait for what was forked, if anything was."""
        if self._stream is not None and self.forked:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self.forked = False

    def take_time(self, *, stop: bool) -> None:
        if self._stream is not None:
            clock.take_time(self._times, stop=stop)

    @property
    def us_waited(self) -> int:
        """Microseconds that steps have waited in ``join_all`` for this stream; waits for the
        device."""
        return (self._done_at_once + int(self._times[clock.TOTAL.value])) // 1000


def join_all(sides: Sequence[SideStream]) -> None:
    """Joins all of them; the time until that is done counts for the last that was forked."""
    forked = [side for side in sides if side.forked]
    if forked:
        forked[-1].take_time(stop=False)
        for side in forked:
            side.join()
        forked[-1].take_time(stop=True)
