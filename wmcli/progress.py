"""Talk for people, on stderr: lines, warnings and progress bars. Results for programs never come this way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

REDRAW_SECONDS = 0.1  # on a terminal
LINE_SECONDS = 10.0  # elsewhere: a log must not fill with progress
SHORTEST_SECONDS = 2.0  # off a terminal, what took less than this says nothing


class _Screen:
    """What nested talkers share: the bars drawn on the terminal, None while there are none, and the warnings given."""

    def __init__(self) -> None:
        self.drawn: rich.progress.Progress | None = None
        self.warned: set[str] = set()


class Progress:
    """Where one command talks. Quiet keeps warnings only."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._lines = not quiet
        self._screen = _Screen()

    def inside(self) -> Progress:
        """For work inside one of our bars: its bars show below ours and vanish when done, its lines are left out."""
        inner = Progress(self.quiet)
        inner._lines = False
        inner._screen = self._screen
        return inner

    def say(self, line: str) -> None:
        """One line, above the bars."""
        if self._lines:
            self._write(line)

    def warn(self, line: str) -> None:
        """One line that quiet does not hide; the same one is given once."""
        if line not in self._screen.warned:
            self._screen.warned.add(line)
            self._write(f"warning: {line}")

    @contextmanager
    def bar(self, what: str, total: int, unit: str, start: int = 0) -> Iterator[Bar]:
        """A bar for `total` units of work called `unit`, `start` of which were done before. Bars may be nested."""
        screen = self._screen
        outermost = screen.drawn is None and not self.quiet and _is_terminal()
        if outermost:
            screen.drawn = _rich_progress()
            screen.drawn.start()
        bar = Bar(self, what, total, unit, start)
        try:
            yield bar
        finally:
            bar._finish(keep=self._lines)
            if outermost and screen.drawn is not None:
                screen.drawn.stop()
                screen.drawn = None

    def _write(self, line: str) -> None:
        if self._screen.drawn is not None:
            self._screen.drawn.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


class Bar:
    """One bar. Counting costs a clock reading; drawing happens every tenth of a second, in the caller's thread."""

    def __init__(self, progress: Progress, what: str, total: int, unit: str, start: int) -> None:
        self._progress, self._what, self._total, self._unit = progress, what, total, unit
        self._start = self._done = start
        self._values: dict[str, float] = {}
        self._began = self._reported = time.monotonic()
        self._drawn = progress._screen.drawn
        if self._drawn is not None:
            self._task = self._drawn.add_task(what, total=total, completed=start, unit=unit, rate="", values="")
        self._every = LINE_SECONDS if self._drawn is None else REDRAW_SECONDS

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""
        self._done += n
        now = time.monotonic()
        if now - self._reported >= self._every:
            self._report(now)

    def show(self, **values: float) -> None:
        """Numbers to show behind the bar from now on, such as the newest losses: plain ones, already on the CPU."""
        self._values.update(values)

    def _report(self, now: float) -> None:
        self._reported = now
        values = "  ".join(f"{name} {value:.4g}" for name, value in self._values.items())
        rate = (self._done - self._start) / max(now - self._began, 1e-9)
        if self._drawn is not None:
            self._drawn.update(self._task, completed=self._done, rate=_rate(rate), values=values, refresh=True)
        elif not self._progress.quiet:
            parts = [self._what, f"{self._done}/{self._total} {self._unit}", _rate(rate)]
            if rate > 0 and self._done < self._total:
                parts.append(f"{_clock((self._total - self._done) / rate)} left")
            if values:
                parts.append(values)
            self._progress._write("  ".join(parts))

    def _finish(self, keep: bool) -> None:
        now = time.monotonic()
        if self._drawn is not None and not keep:
            self._drawn.remove_task(self._task)
        elif self._drawn is not None or now - self._began >= SHORTEST_SECONDS:
            self._report(now)


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _rich_progress() -> rich.progress.Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}  {task.fields[rate]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[values]}", markup=False),
        console=Console(stderr=True),
        auto_refresh=False,
    )


def _rate(rate: float) -> str:
    """`12.34` -> `12.3/s`; what takes ten seconds and more says how long one takes: `0.02` -> `50 s each`."""
    return f"{rate:.1f}/s" if rate >= 0.1 or rate == 0 else f"{1 / rate:.0f} s each"


def _clock(seconds: float) -> str:
    """`75.2` -> `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
