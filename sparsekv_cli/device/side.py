"""Work beside a decode step: a second stream, forked from the step's and joined to it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of its own where the device has streams; elsewhere the work is done at once.

    Fork and join are events between the streams, which a graph capture takes in. A capture must not
    end before the join.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._forked = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched inside begins after all launched so far, and runs beside the rest."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._forked = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Has the present stream wait for what was forked, if anything was."""
        if self._stream is not None and self._forked:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._forked = False
