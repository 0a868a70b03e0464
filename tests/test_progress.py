"""Talk on stderr: lines off a terminal, a bar on one, silence when quiet."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest
from seconds import within

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


def open_terminal(monkeypatch: pytest.MonkeyPatch, width: int = 110, *, is_terminal: bool = True) -> Terminal:
    """Stand in for stderr. No fixture: pytest puts its own stderr back between setting up and calling a test."""
    terminal = Terminal()
    monkeypatch.setattr(terminal, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    return terminal


def lines(terminal: Terminal) -> list[str]:
    """All that was ever written, as lines of text; drawn again means there again."""
    return [line.rstrip() for line in re.sub("\x1b[^A-Za-z]*[A-Za-z]|\r", "\n", terminal.getvalue()).split("\n")]


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
        "train-dynamics  50/50 updates  2.0/s  in 0:15  loss 0.02",
    ]


def test_short_work_prints_nothing_and_long_times_are_readable(
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
    terminal = open_terminal(monkeypatch)
    progress = Progress()
    with progress.bar("run", 2, "epochs") as outer:
        for _ in range(2):
            progress.say("[not markup] " + "long " * 40 + "end")
            work(progress, clock, updates=7, seconds=1)
            outer.advance()
    progress.say("after")
    assert "[not markup] " + "long " * 40 + "end" in terminal.getvalue(), "neither wrapped nor read as markup"
    assert any(
        re.match("train-dynamics +━+ +7/7  updates 1.0/s  in 0:07  loss 0.1429$", line) for line in lines(terminal)
    )
    assert any(re.match("run +━+  2/2  epochs 0.1/s  in 0:14$", line) for line in lines(terminal))
    assert terminal.getvalue().endswith("after\n")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_values_take_no_room_from_the_bar(clock: Clock, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    terminal = open_terminal(monkeypatch, width)
    progress = Progress()
    with progress.bar("run", 60, "epochs") as outer, progress.inside().bar("train-dynamics", 2000, "updates") as bar:
        clock.now += 20
        outer.show(**{"return": -20.5})
        outer.advance()
        bar.show(loss=0.1234, observation_loss=12.5, reward_loss=0.0625, gradient_norm=1.0)
        bar.advance(1000)
        clock.now += 5
    drawn = lines(terminal)
    assert max(map(len, drawn)) <= width
    (row,) = [line for line in drawn if re.match("train-.* 1000/2000 .*0:20( left|[^0-9]*$)", line)] or [""]
    assert re.match(r"train-\S+ +━\S+ +1000/2000 +(updates )?50.0/s +0:20", row), drawn
    shown = [name for name in ("loss 0.1234", "observation_loss 12.5", "reward_loss 0.0625") if name in row]
    assert len(shown) >= {40: 0, 60: 0, 80: 1, 120: 2, 160: 3}[width]
    assert row.endswith("…") == bool(shown) and "gradient_norm" not in row
    assert any(re.match("run .* 1/60 ", line) for line in drawn)


def test_a_long_name_is_cut_and_the_other_columns_are_not(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch, 40)
    with Progress().bar("profile training, 1024 elements, memory", 100_000, "calls") as bar:
        clock.now += 100
        bar.show(loss=1.0)
        bar.advance(5)
    assert max(map(len, lines(terminal))) <= 40
    assert any(re.match("prof.*… *━* +5/100000 20 s each 23 d 3 h$", line) for line in lines(terminal)), lines(terminal)


def test_a_finished_stage_stays_as_a_line_inside_a_loop_too(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    progress = Progress()
    with progress.bar("run", 2, "epochs") as outer:
        for _ in range(2):
            work(progress.inside(), clock, updates=7, seconds=1)
            outer.advance()
    kept = [line for line in lines(terminal) if " in 0:" in line]
    assert [line.split()[0] for line in kept] == ["train-dynamics", "train-dynamics", "run"]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_values_shown_before_an_advance_are_drawn_with_it_and_the_last_ones_at_the_end(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    terminal = open_terminal(monkeypatch, is_terminal=on_terminal)
    with Progress().bar("learn", 4, "updates") as bar:
        for update in range(1, 4):
            clock.now += 10
            bar.show(loss=float(update))
            bar.advance()
        bar.show(loss=9.0)
    counted = [re.search("(\\d)/4.*loss (\\d)", line) for line in lines(terminal)]
    assert [match.groups() for match in counted if match] == [("1", "1"), ("2", "2"), ("3", "3"), ("3", "9")]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_an_estimate_of_the_caller_replaces_the_extrapolation(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    terminal = open_terminal(monkeypatch, is_terminal=on_terminal)
    with Progress().bar("run", 5, "epochs") as bar:
        for told in (..., None, 80 * 86400.0, 90.0):
            if told is not ...:
                bar.expect(told)
            clock.now += 20
            bar.advance()
        bar.expect(1.0)
    left = [re.search("([1-9])/5 .* ([^ ]+) left", line) for line in lines(terminal)]
    # Told 20 s before it is drawn, which is why 90 s are 70.
    drawn = [match.groups() for match in left if match]
    assert drawn == [("1", "1:20"), ("2", "-:--"), ("3", "h"), ("4", "1:10")]
    assert "79 d 23 h left" in terminal.getvalue()


def test_the_time_left_runs_down_while_others_draw(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    progress = Progress()
    with progress.bar("run", 3, "epochs") as outer:
        clock.now += 60
        outer.advance()
        with progress.inside().bar("eval", 3, "episodes") as inner:
            for _ in range(3):
                clock.now += 25
                inner.advance()
    left = [match[1] for line in lines(terminal) if (match := re.match("run .* 1/3 .* ([^ ]+) left", line))]
    # Two epochs of a minute; the one in work is 25, 50, 75 seconds old: at least the other is left.
    assert list(dict.fromkeys(left)) == ["2:00", "1:35", "1:10", "1:00"]


@pytest.mark.parametrize("name", ["dumb", "xterm"])
def test_a_dumb_terminal_gets_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", name)
    work(Progress(), clock, updates=5, seconds=1)
    assert ("\x1b" in terminal.getvalue()) == (name == "xterm")


def test_counting_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    with within(100_000 * 20e-6), Progress().bar("a", 100_000, "b") as bar:
        for _ in range(100_000):
            bar.advance()
    assert module.LINE_SECONDS == 10
