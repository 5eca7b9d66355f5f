"""Progress on stderr: of prefills (on a terminal only), compiling, calibrating and loading."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from sparsekv_cli.commands.shared.terminal import say
from sparsekv_cli.system.work import load_beyond_cores

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SECONDS_BEFORE_BAR = 0.3
PREFILL_LINE_S = 30.0  # seconds between two lines of a prefill, if stderr is no terminal
LINE_S = 10.0  # seconds between two lines if stderr is no terminal
NARROW = 70  # columns; a narrower terminal shows no bar next to the numbers


class _Bar:
    """A bar on a terminal's stderr. In a with block, an exception removes the bar."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said: set[str] = set()

    def _draw(self, unit: str, label: str, done: float, total: float, rate: str = "") -> None:
        """Shows ``done`` of ``total``. unit: what these count; "": per cent is shown."""
        if self._bar is None:
            self._bar = _new_bar(unit)
            self._task = self._bar.add_task(label, total=total, rate=rate)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total, description=label, rate=rate)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            say(line)

    def close(self) -> None:
        """Removes the bar from the screen. A later call shows a new one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PrefillProgress(_Bar):
    """A bar that appears if a prefill takes some time, and is removed at its end.

    It shows tokens a second and the remaining time. If stderr is no terminal, it writes a line
    every PREFILL_LINE_S seconds instead.

    Call it with (done tokens, total tokens), or in another unit. In a with block, an exception
    removes the bar. draws: False: it writes lines on a terminal too, because a bar would disturb
    other output.
    """

    def __init__(self, label: str = "prefill", unit: str = "tokens", *, draws: bool = True) -> None:
        super().__init__()
        self.label, self.unit = label, unit
        self._is_bar = draws and sys.stderr.isatty()
        self._said_at = 0.0
        self._start: float | None = None
        self._n_start = 0  # tokens that were done when the bar appeared

    def __call__(self, done: int, total: int) -> None:
        if done >= total:
            self.close()
            return
        now = time.monotonic()
        if self._start is None:
            self._start, self._n_start, self._said_at = now, done, now
        if now - self._start < SECONDS_BEFORE_BAR:
            return
        rate = (done - self._n_start) / (now - self._start)
        per_second = f"{rate:.0f} t/s, " if self.unit == "tokens" else ""
        remaining = f"{per_second}{(total - done) / rate:.0f} s left" if rate else ""
        if self._is_bar:
            self._draw(self.unit, self.label, done, total, remaining)
        elif now - self._said_at >= PREFILL_LINE_S:
            self._said_at = now
            say(f"{self.label}: {done} of {total} {self.unit}, {remaining or 'no rate yet'}")

    def close(self) -> None:
        self._start = None
        super().close()


class _LateBar(_Bar):
    """A bar that appears with its first figures and shows the remaining time.

    If stderr is no terminal, it writes a line every LINE_S seconds, from 1 % on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._started = self._said_at = time.monotonic()

    def _show(self, unit: str, label: str, done: float, total: float) -> None:
        """Shows the bar at ``done`` of ``total``, as ``_draw`` does."""
        now = time.monotonic()
        if done <= 0:
            self._started = self._said_at = now
        if sys.stderr.isatty():
            self._draw(unit, label, done, total)
        elif now - self._said_at >= LINE_S and total <= 100 * done < 100 * total:
            self._said_at = now
            left = (now - self._started) * (total - done) / done
            say(f"{label}: {100 * done / total:.0f} %, about {left:.0f} s left")


class LoadProgress(_LateBar):
    """A bar for a model that is slow to load. Call it with (done bytes, all bytes)."""

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._started > SECONDS_BEFORE_BAR:
            self._show("", "loading the model", done, total)
        if done >= total:
            self.close()


class CompileProgress(_LateBar):
    """Tells once that kernels are being compiled, with a bar on a terminal.

    Call it with (what, done steps, all steps). For a GPU the number of all steps is unknown: 0. Use
    it as a context manager.
    """

    def __call__(self, what: str, done: int, total: int) -> None:
        self._say_once(f"compiling kernels for this {'CPU' if total else 'GPU'} (first run only)")
        if not total:
            return
        self._show("steps", f"compile {what}", done, total)
        if done >= total:
            self.close()


class CalibrationProgress(_LateBar):
    """Tells that a method is being calibrated and where the result is stored, with a bar.

    Call it with (method, share done, remark at the end). Use it as a context manager.
    """

    def __init__(self) -> None:
        super().__init__()
        self._method = ""

    def __call__(self, method: str, share: float, note: str) -> None:
        if method != self._method:
            self.close()
            self._method = method
            say(f"calibrating {method} for this model (once)")
        if note:
            self.close()
            say(f"calibration of {method}: {note}")
        else:
            self._show("", f"calibrate {method}", share, 1.0)


class MeasureProgress(_LateBar):
    """Tells once that the machine is being measured, with a bar on a terminal.

    Call it with (what, done parts, all parts). Use it as a context manager.
    """

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._said:
            warn_of_load()
        self._say_once("measuring this machine with a model of this shape (once)")
        self._show("parts", f"measure {what}", done, total)
        if done >= total:
            self.close()


def warn_of_load() -> bool:
    """Warns if the machine's load is larger than its number of cores. Returns whether it is."""
    if busy := load_beyond_cores():
        load, n_cores = busy
        say(
            f"warning: the machine is busy (load {load:.1f} on {n_cores} cores): speeds are lower "
            "and less certain than on a quiet one"
        )
    return busy is not None


def _new_bar(unit: str) -> Progress:
    """Returns a bar that counts ``unit``, or per cent if it is "". Tokens also have a rate."""
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
