"""Work next to a decode step: a second stream, forked and joined again."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sparsekv_cli.kernels import clock


class SideStream:
    """A second stream if the device has streams. Otherwise its work runs at once.

    Fork and join are events between the streams, which a graph capture records. A capture must not
    end before the join.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._times = torch.zeros(clock.N_TIMES.value, dtype=torch.int64, device=device)
        self._done_at_once = 0  # ns of work that had no stream of its own
        self.forked = False  # since the last join

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches inside this block begin after all earlier ones and run at the same time as all
        later ones.

        An exception joins it, so that no later capture waits for launches that are not part of it.
        """
        self.forked = True
        try:
            if self._stream is None:
                begin = time.perf_counter_ns()
                yield
                self._done_at_once += time.perf_counter_ns() - begin
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                yield
        except BaseException:
            self.join()
            raise

    def join(self) -> None:
        """Makes the current stream wait for the forked work, if any."""
        if self._stream is not None and self.forked:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self.forked = False

    def take_time(self, *, stop: bool) -> None:
        if self._stream is not None:
            clock.take_time(self._times, stop=stop)

    @property
    def us_waited(self) -> int:
        """Microseconds that steps waited for this stream in ``join_all``. Waits for the device."""
        return (self._done_at_once + int(self._times[clock.TOTAL.value])) // 1000


def join_all(sides: Sequence[SideStream]) -> None:
    """Joins all streams. The time that this takes is counted for the stream that forked last."""
    forked = [side for side in sides if side.forked]
    if forked:
        forked[-1].take_time(stop=False)
        for side in forked:
            side.join()
        forked[-1].take_time(stop=True)
