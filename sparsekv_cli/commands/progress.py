"""Progress of a prefill on stderr; nothing at all when stderr is no terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BEFORE_BAR = 0.3


class PrefillProgress:
    """A bar that appears when a prefill takes a moment and goes when it is done.

    Call it with (done tokens, total tokens); use it as a context manager so that the bar is taken
    off the screen when an exception ends the prefill.
    """

    def __init__(self, label: str = "prefill") -> None:
        self.label = label
        self.enabled = sys.stderr.isatty()
        self._start: float | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if not self.enabled:
            return
        if done >= total:
            self.close()
            return
        if self._start is None:
            self._start = time.monotonic()
        if time.monotonic() - self._start < SECONDS_BEFORE_BAR:
            return
        if self._bar is None:
            self._bar = _new_bar()
            self._task = self._bar.add_task(self.label, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        """Takes the bar off the screen; a later call starts a new one."""
        self._start = None
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __enter__(self) -> PrefillProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
