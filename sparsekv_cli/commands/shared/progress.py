"""Progress on stderr: of a prefill (on a terminal only), of compiling, of calibrating."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BEFORE_BAR = 0.3
LINE_S = 10.0  # between two lines where stderr is no terminal
NARROW = 70  # columns of a terminal that has no room for the bar next to its numbers


class PrefillProgress:
    """A bar that appears when a prefill takes a moment and goes when it is done.

    It shows how many tokens a second are read, and how long the others will take.

    Call it with (done tokens, total tokens), or in another unit. Use it as a context manager: the
    bar then leaves the screen when an exception ends the prefill.
    """

    def __init__(self, label: str = "prefill", unit: str = "tokens") -> None:
        self.label, self.unit = label, unit
        self.enabled = sys.stderr.isatty()
        self._start: float | None = None
        self._n_start = 0  # tokens that were done by then
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        if not self.enabled:
            return
        if done >= total:
            self.close()
            return
        now = time.monotonic()
        if self._start is None:
            self._start, self._n_start = now, done
        if now - self._start < SECONDS_BEFORE_BAR:
            return
        if self._bar is None:
            self._bar = _new_bar(self.unit)
            self._task = self._bar.add_task(self.label, total=total, rate="")
            self._bar.start()
        assert self._task is not None
        rate = (done - self._n_start) / (now - self._start)
        told = f"{rate:.0f} t/s, {(total - done) / rate:.0f} s left" if rate else ""
        self._bar.update(self._task, completed=done, total=total, rate=told)

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


class _LateBar:
    """A bar on a terminal's stderr that its first figures bring; a context manager takes it off.

    Elsewhere it is a line every LINE_S seconds. Both say how long the rest will take.
    """

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._started = self._said_at = time.monotonic()

    def _show(self, unit: str, label: str, done: float, total: float) -> None:
        """The bar at ``done`` of ``total``; unit: what it counts, per cent without one."""
        now = time.monotonic()
        if done <= 0:
            self._started = self._said_at = now
        if not sys.stderr.isatty():
            if now - self._said_at >= LINE_S and 0 < done < total:
                self._said_at = now
                left = (now - self._started) * (total - done) / done
                line = f"{label}: {100 * done / total:.0f} %, about {left:.0f} s left"
                print(line, file=sys.stderr, flush=True)
            return
        if self._bar is None:
            self._bar = _new_bar(unit)
            self._task = self._bar.add_task(label, total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, description=label)

    def close(self) -> None:
        """Takes the bar off the screen; a later call starts a new one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CompileProgress(_LateBar):
    """Says once that kernels are being compiled, with a bar on a terminal.

    Call it with (what, steps done, steps in all), the GPU's with 0 steps in all, whose number
    nobody knows; use it as a context manager.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def __call__(self, what: str, done: int, total: int) -> None:
        place = "CPU" if total else "GPU"
        if place not in self._said:
            self._said.add(place)
            line = f"compiling kernels for this {place} (first run only)"
            print(line, file=sys.stderr, flush=True)
        if not total:
            return
        self._show("steps", f"compile {what}", done, total)
        if done >= total:
            self.close()


class CalibrationProgress(_LateBar):
    """Says that a method is being calibrated and where that is kept, with a bar on a terminal.

    Call it with (method, share done, remark at the end); use it as a context manager.
    """

    def __init__(self) -> None:
        super().__init__()
        self._method = ""

    def __call__(self, method: str, share: float, note: str) -> None:
        if method != self._method:
            self.close()
            self._method = method
            line = f"calibrating {method} for this model (once)"
            print(line, file=sys.stderr, flush=True)
        if note:
            self.close()
            print(f"calibration of {method}: {note}", file=sys.stderr, flush=True)
        else:
            self._show("", f"calibrate {method}", share, 1.0)


class MeasureProgress(_LateBar):
    """Says once that the machine is measured, with a bar on a terminal.

    Call it with (what, done, of how many); use it as a context manager.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_said = False

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._has_said:
            self._has_said = True
            line = "measuring this machine with a model of this shape (once)"
            print(line, file=sys.stderr, flush=True)
        self._show("parts", f"measure {what}", done, total)
        if done >= total:
            self.close()


def _new_bar(unit: str) -> Progress:
    """A bar that counts ``unit``; without one, it shows per cent. Tokens have their rate, too."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    bar = [BarColumn()] if console.width >= NARROW else []
    return Progress(
        TextColumn("{task.description}"),
        *bar,
        MofNCompleteColumn() if unit else TaskProgressColumn(),
        TextColumn("{task.fields[rate]}" if unit == "tokens" else unit),
        *([] if unit == "tokens" else [TimeElapsedColumn(), TextColumn("left:")]),
        *([] if unit == "tokens" else [TimeRemainingColumn()]),
        console=console,
        transient=True,
    )
