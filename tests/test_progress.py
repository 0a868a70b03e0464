"""Talk on stderr: lines off a terminal, a bar on one, silence when quiet."""

from __future__ import annotations

import io
import sys
import time

import pytest

from wmcli import progress as module
from wmcli.progress import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def work(progress: Progress, clock: Clock, *, updates: int, seconds: float, start: int = 0) -> None:
    with progress.bar("train-dynamics", updates, "updates", start=start) as bar:
        for update in range(start, updates):
            clock.now += seconds
            bar.show(loss=1 / (update + 1))
            bar.advance()


def test_off_a_terminal_a_line_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    work(Progress(), clock, updates=50, seconds=0.5, start=20)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "train-dynamics  40/50 updates  2.0/s  0:05 left  loss 0.025",
        "train-dynamics  50/50 updates  2.0/s  loss 0.02",
    ]


def test_what_is_short_says_nothing_and_long_times_are_readable(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    work(Progress(), clock, updates=3, seconds=0.5)
    work(Progress(), clock, updates=0, seconds=1)
    assert capsys.readouterr().err == ""
    with Progress().bar("collect", 1000, "steps") as bar:
        clock.now += 10
        bar.advance()
        clock.now += 1
    assert capsys.readouterr().err.splitlines()[0] == "collect  1/1000 steps  0.1/s  2:46:30 left"


def test_quiet_keeps_warnings_only(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Progress(quiet=True)
    quiet.say("hello")
    work(quiet, clock, updates=50, seconds=1)
    quiet.warn("careful")
    assert capsys.readouterr().err == "warning: careful\n"


def test_on_a_terminal_lines_stand_above_the_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    progress = Progress()
    with progress.bar("run", 2, "epochs") as outer:
        for _ in range(2):
            progress.say("[not markup] " + "long " * 40 + "end")
            work(progress, clock, updates=7, seconds=1)
            outer.advance()
    progress.say("after")
    text = terminal.getvalue()
    assert "[not markup] " + "long " * 40 + "end" in text, "neither wrapped nor read as markup"
    for part in ("run", "2/2", "epochs", "train-dynamics", "7/7", "updates", "1.0/s", "loss 0.1429"):
        assert part in text
    assert text.endswith("after\n")


def test_a_bar_ends_with_the_error_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress()
    with pytest.raises(KeyboardInterrupt), progress.bar("a", 2, "b"):
        raise KeyboardInterrupt
    assert terminal.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is back"
    with progress.bar("a", 2, "b"):
        pass


@pytest.mark.parametrize("name", ["dumb", "xterm"])
def test_a_dumb_terminal_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", name)
    work(Progress(), clock, updates=5, seconds=1)
    assert ("\x1b" in terminal.getvalue()) == (name == "xterm")


def test_counting_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.process_time()
    with Progress().bar("a", 100_000, "b") as bar:
        for _ in range(100_000):
            bar.advance()
    assert (time.process_time() - began) / 100_000 < 20e-6
    assert module.LINE_SECONDS == 10
