"""`wm play --browser` as a user has it: the command, its page in Chromium, a run with real models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_systems import Make, learn
from tiny_run import copied, latest

from wmcli.artifacts import Run
from wmcli.experience import read_segment
from wmcli.experience.load import SEGMENT
from wmcli.stages.dreaming.tape import FOLDER

pytest.importorskip("websockets")
pytestmark = pytest.mark.slow


def wm(*arguments: str, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wmcli", *arguments]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **how
    )


@contextmanager
def playing(run: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and the address that it printed."""
    command = wm("play", "--run", str(run), "--browser", "--port", "0", "--no-open", *more)
    assert command.stderr is not None
    try:
        for line in command.stderr:
            if found := re.search(r"http://\S+", line):
                yield command, found[0]
                break
        else:
            pytest.fail("the command ended")
    finally:
        command.kill()
        command.wait()
        command.stderr.close()


@contextmanager
def page_at(browser: Any, address: str) -> Iterator[Any]:
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("article.card canvas:visible")
    yield page
    page.close()


def wait(page: Any, condition: Callable[[dict[str, Any]], Any], seconds: float = 30.0) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not condition(view := page.evaluate("wm.view")):
        assert time.monotonic() < deadline, view
        page.wait_for_timeout(20)
    return view


def picture(page: Any, pane: str) -> bytes:
    page.wait_for_timeout(100)
    return page.locator(f"article[data-pane='{pane}'] .screen canvas").first.screenshot()


@pytest.fixture(scope="module")
def run(small: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = copied(small("drama"), tmp_path_factory.mktemp("page") / "run")
    endless = "dynamics.predict_termination=false"  # no dream ends by itself
    learn(folder, "dynamics", endless, "dynamics.updates=2")
    learn(folder, "controller", endless, "controller.updates=1")
    return folder


def test_keys_move_both_sides_branch_step_back_and_record_what_trains(browser: Any, run: Path, tmp_path: Path) -> None:
    run = copied(run, tmp_path / "run")
    with playing(run) as (command, address), page_at(browser, address) as page:
        page.keyboard.press(" ")
        wait(page, lambda view: not view["playing"])
        page.keyboard.press("o")
        wait(page, lambda view: view["recording"] is not None)
        before = wait(page, lambda view: True)
        sides = picture(page, "null"), picture(page, "0")
        for key, action in (("ArrowLeft", 0), ("ArrowRight", 2), ("ArrowLeft", 0)):
            page.keyboard.down(key)
            page.wait_for_timeout(150)
            time_ = page.evaluate("wm.view")["time"]
            page.keyboard.press(".")
            view = wait(page, lambda view, since=time_: view["time"] == since + 1)
            page.keyboard.up(key)
            assert view["real"]["action"] == action, (key, view["real"])
            assert view["panes"][0]["action"] == action
        assert view["time"] == before["time"] + 3 and view["recording"]["steps"] == 3
        moved = picture(page, "null"), picture(page, "0")
        assert sides[0] != moved[0] and sides[1] != moved[1], "both sides change"
        page.keyboard.press("b")
        view = wait(page, lambda view: len(view["panes"]) == 2)
        assert view["panes"][1]["actor"] == "you" and view["actor"] == "dreamer"
        page.keyboard.press(",")
        wait(page, lambda view: view["time"] == before["time"] + 2)
        page.keyboard.press(".")
        page.keyboard.press(".")
        wait(page, lambda view: view["time"] == before["time"] + 4)
        page.keyboard.press("o")
        wait(page, lambda view: view["recording"] is None)
        page.get_by_text("as experience@2").wait_for()
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 0
    assert len(read_segment(latest(run, "experience").path / SEGMENT)["action"]) == 4
    training = wm("train-dynamics", "--run", str(run), "--set", "dynamics.updates=1")
    assert training.communicate()[1] is not None and training.returncode == 0
    assert latest(run, "dynamics").inputs["experience"].version == 2


def test_a_killed_server_loses_nothing_that_was_recorded(browser: Any, run: Path, tmp_path: Path) -> None:
    run = copied(run, tmp_path / "run")
    with playing(run) as (command, address), page_at(browser, address) as page:
        page.evaluate("wm.send({do: 'options', mode: 'realtime', rate: 30})")
        page.evaluate("wm.send({do: 'play'})")
        page.evaluate("wm.send({do: 'record', on: true})")
        wait(page, lambda view: view["recording"] and view["recording"]["steps"] >= 20)
        command.kill()
        command.wait()
        page.get_by_text(re.compile("server|connection", re.IGNORECASE)).first.wait_for()
    assert Run(run).versions("experience") == [1] and len(list((run / FOLDER).iterdir())) == 1
    with playing(run) as (_, address):
        assert Run(run).versions("experience") == [1, 2] and not (run / FOLDER).exists()
    assert len(read_segment(latest(run, "experience").path / SEGMENT)["action"]) >= 20


def test_two_browsers_play_games_of_their_own(browser: Any, run: Path, tmp_path: Path) -> None:
    run = copied(run, tmp_path / "run")
    with playing(run) as (command, address), page_at(browser, address) as one:
        two = browser.new_context().new_page()
        two.goto(address)
        two.wait_for_selector("article.card canvas:visible")
        for page in (one, two):
            page.evaluate("wm.send({do: 'pause'})")
            wait(page, lambda view: not view["playing"])
        times = [page.evaluate("wm.view")["time"] for page in (one, two)]
        for _ in range(5):
            one.evaluate("wm.send({do: 'step'})")
        wait(one, lambda view: view["time"] == times[0] + 5)
        assert two.evaluate("wm.view")["time"] == times[1], "the other one stands still"
        one.evaluate("wm.send({do: 'record', on: true})")
        one.evaluate("wm.send({do: 'step'})")
        wait(one, lambda view: view["recording"] and view["recording"]["steps"] == 1)
        one.close()
        two.evaluate("wm.send({do: 'step'})")
        wait(two, lambda view: view["time"] == times[1] + 1)
        command.send_signal(signal.SIGTERM)
        assert command.wait(20) == 0
        assert command.stderr is not None
        said = command.stderr.read()
    assert "1 recorded steps are now experience@2" in said
    assert np.isfinite(read_segment(latest(run, "experience").path / SEGMENT)["reward"]).all()


def test_a_second_server_on_the_port_is_refused_in_one_line(run: Path) -> None:
    with playing(run) as (_, address):
        port = re.search(r":(\d+)/", address)
        assert port is not None
        second = wm("play", "--run", str(run), "--browser", "--port", port[1])
        _, said = second.communicate(timeout=60)
        assert second.returncode == 2
        assert said.count("\n") == 1 and f"port {port[1]} is taken" in said and "--port" in said
