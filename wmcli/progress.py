"""Talk for people, on stderr: lines, warnings and progress bars. Results for programs never come this way."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from wmcli import ranks

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.live import Live
    from rich.table import Table

REDRAW_SECONDS = 0.1  # on a terminal
LINE_SECONDS = 10.0  # elsewhere: a log must not fill with progress
SHORTEST_SECONDS = 2.0  # off a terminal, shorter work prints nothing
SHORTEST_BAR = 4  # columns
MOST_VALUES = 3  # behind a bar; there is room for more in a log
_WORDS, _NO_WORDS = ("in ", " left"), ("", "")  # before the time taken, after the time left
_FORMS = (  # of a bar, the first that fits: gap, with unit?, words, columns to leave to bar and values
    (2, True, _WORDS, 30),
    (1, True, _WORDS, 20),
    (1, True, _NO_WORDS, 0),
    (1, False, _NO_WORDS, 0),
)


def size(number: float) -> str:
    """Return bytes in two or three digits: `3.8 MB`. Units are powers of 1,000."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while number >= 999.5 and unit != "TB":
        number, unit = number / 1000, next(units)
    return f"{number:.1f} {unit}" if number < 9.95 and unit != "B" else f"{number:,.0f} {unit}"


def duration(seconds: float) -> str:
    """Return a time in two or three digits: `40 s`, `12 min`, `3.1 h`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first names and the number of the others: `a, b, c and 4 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


class _Screen:
    """State that nested instances share: the open bars, their drawing on the terminal, and the warnings so far."""

    def __init__(self) -> None:
        self.live: Live | None = None  # None off a terminal, and while there are no bars
        self.bars: list[Bar] = []  # outermost first
        self.warned: set[str] = set()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        if self.bars:
            yield _table(self.bars, options.max_width)


class Progress:
    """Where one command talks. Quiet keeps warnings only. Of several ranks the first one talks."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet or not ranks.is_first()
        self._lines = not self.quiet
        self._screen = _Screen()

    def inside(self) -> Progress:
        """Return the instance for work inside one of our bars. Its bars are below ours, and it prints no lines."""
        inner = Progress(self.quiet)
        inner._lines = False
        inner._screen = self._screen
        return inner

    def say(self, line: str) -> None:
        """Write one line, above the bars."""
        if self._lines:
            self._write(line)

    def warn(self, line: str) -> None:
        """Write one line that quiet does not hide; the same one is given once."""
        if ranks.is_first() and line not in self._screen.warned:
            self._screen.warned.add(line)
            self._write(f"warning: {line}")

    @contextmanager
    def bar(self, label: str, total: int, unit: str, start: int = 0) -> Iterator[Bar]:
        """Show a bar for `total` units of work, `start` of which are done. Bars may be nested.

        At the end a line remains, with count, rate and time.
        """
        screen = self._screen
        outermost = screen.live is None and not self.quiet and _is_terminal()
        if outermost:
            screen.live = _live(screen)
            screen.live.start()
        bar = Bar(self, label, total, unit, start)
        screen.bars.append(bar)
        bar._draw()
        try:
            yield bar
        finally:
            screen.bars.remove(bar)
            bar._finish()
            if outermost and screen.live is not None:
                screen.live.stop()
                screen.live = None

    def _write(self, line: str) -> None:
        with suppress(OSError):  # a full disk, or nobody who listens: the work goes on
            if self._screen.live is not None:
                self._screen.live.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()


class Bar:
    """One bar. Counting costs a clock reading; drawing happens every tenth of a second, in the caller's thread."""

    def __init__(self, progress: Progress, label: str, total: int, unit: str, start: int) -> None:
        self._progress, self._label, self._total, self._unit = progress, label, total, unit
        self._start = self._done = start
        self._values: dict[str, float] = {}
        self._began = self._advanced = self._reported = time.monotonic()
        self._expects: tuple[float | None, float] | None = None  # seconds left, as of when; None: never given
        self._took: float | None = None  # seconds, once it is over

    def advance(self, n: int = 1) -> None:
        """Count `n` more units as done, and draw the newest values and expectation."""
        self._done += n
        self._advanced = now = time.monotonic()
        if now - self._reported >= (LINE_SECONDS if self._progress._screen.live is None else REDRAW_SECONDS):
            self._reported = now
            if self._progress._screen.live is not None:
                self._draw()
            elif not self._progress.quiet and self._done < self._total:  # the last line has the time taken
                self._progress._write(self._line(now))

    def show(self, **values: float) -> None:
        """Show numbers behind the bar from now on, such as the newest losses: plain ones, already on the CPU."""
        self._values = values

    def expect(self, seconds: float | None) -> None:
        """Set the seconds left from now on, instead of an estimate from the rate. None is unknown."""
        self._expects = seconds, time.monotonic()

    def _draw(self) -> None:
        if self._progress._screen.live is not None:
            self._progress._screen.live.refresh()

    def _finish(self) -> None:
        now, live = time.monotonic(), self._progress._screen.live
        self._took = now - self._began
        if live is not None and self._done > self._start:
            live.console.print(_table([self], live.console.width))
        elif live is None and self._took >= SHORTEST_SECONDS and not self._progress.quiet:
            self._progress._write(self._line(now))

    def _line(self, now: float) -> str:
        count = f"{self._done}/{self._total} {self._unit}"
        return "  ".join([self._label, count, self._rate(), self._time(now, _WORDS), *_texts(self._values)])

    def _time(self, now: float, words: tuple[str, str]) -> str:
        """Return the total time of finished work, or the time left."""
        if self._took is not None:
            return words[0] + _clock(self._took)
        return _clock(self._seconds_left(now)) + words[1]

    def _rate(self) -> str:
        """`12.3/s`; where one unit takes ten seconds and more, how long: `50 s each`."""
        done, seconds = self._done - self._start, self._advanced - self._began
        if not done or not seconds:
            return "-/s"
        if (rate := done / seconds) >= 0.1:
            return f"{rate:.0f}/s" if rate >= 100 else f"{rate:.1f}/s"
        return f"{1 / rate:.0f} s each" if rate > 0.01 else f"{_clock(1 / rate)} each"

    def _seconds_left(self, now: float) -> float | None:
        """Return the seconds left by `expect`, else by the rate so far; None if unknown."""
        if self._expects is not None:
            seconds, since = self._expects
            return None if seconds is None else max(seconds - (now - since), 0.0)
        if (left := self._total - self._done) <= 0:
            return 0.0
        if self._done == self._start:
            return None
        each = (self._advanced - self._began) / (self._done - self._start)
        return (left - 1) * each + max(each - (now - self._advanced), 0.0)  # the unit in work has taken some already


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _live(screen: _Screen) -> Live:
    from rich.console import Console
    from rich.live import Live

    return Live(screen, console=Console(stderr=True), auto_refresh=False, transient=True)


def _table(bars: Sequence[Bar], width: int) -> Table:
    """Lay out one row per bar: name, bar, count, rate, time left, then values if `width` allows.

    A narrow terminal first loses gaps, then words, the unit, and the ends of names. The columns stay.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    now = time.monotonic()
    for gap, unit, words, for_values in _FORMS:
        cells = [
            (
                bar._label,
                f"{bar._done}/{bar._total}",
                f"{bar._unit} {bar._rate()}" if unit else bar._rate(),
                bar._time(now, words),
            )
            for bar in bars
        ]
        label, *rest = [max(map(len, column)) for column in zip(*cells, strict=True)]
        room = width - sum(rest) - 4 * gap  # for label and bar
        if room >= label + SHORTEST_BAR + for_values:
            break
    label = max(min(label, room - SHORTEST_BAR), 1)
    length = max(min(room - label, width // 8), SHORTEST_BAR)
    spare = room - label - length - gap
    table = Table.grid(padding=(0, gap, 0, 0), pad_edge=False)
    table.add_column(width=label, no_wrap=True, overflow="ellipsis")
    table.add_column(width=length)
    for size in rest:
        table.add_column(width=size, no_wrap=True, justify="right")
    for bar, (name, *texts) in zip(bars, cells, strict=True):
        values = _fitting(bar._values, spare)
        progress = ProgressBar(total=bar._total, completed=bar._done, width=length)
        table.add_row(Text(name), progress, *map(Text, [*texts, values] if values else texts))
    return table


def _fitting(values: Mapping[str, float], room: int) -> str:
    """As many whole values as `room` columns hold, and an ellipsis for those left out: a number cut short is false."""
    texts = _texts(values)
    for count in range(min(len(texts), MOST_VALUES), 0, -1):
        text = "  ".join(texts[:count] + ["…"] * (count < len(texts)))
        if len(text) <= room:
            return text
    return ""


def _texts(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items()]


def _clock(seconds: float | None) -> str:
    """`75.2` -> `1:15`, two days and more in days and hours, None -> `-:--`."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
