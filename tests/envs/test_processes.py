"""Streams in processes of their own are those of one process, to the bit, whatever goes wrong there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from odd_games import DEATH, FAULT, ODD, OUTSIDE_TORCH, SLEEP, TALK

from wmcli.envs import AnyStreams, EnvironmentSettings, Streams, open_streams
from wmcli.envs.processes import ProcessStreams
from wmcli.errors import ArtifactError, EnvironmentFault, UsageError
from wmcli.spaces import draw_actions

GAMES = {
    "catch": EnvironmentSettings(size=16, count=5),
    "dict": EnvironmentSettings(id="wm/Quarters-v0", kwargs={"actions": "continuous"}, size=16, count=3),
    "multi-discrete": EnvironmentSettings(id="wm/Quarters-v0", kwargs={"actions": "multi-discrete"}, size=16, count=2),
    "pong": EnvironmentSettings(id="Pong", protocol="rem", size=24, count=3),
    "rem": EnvironmentSettings(id="Breakout", protocol="rem", size=24, count=3),
    "drama": EnvironmentSettings(id="Breakout", protocol="drama", size=24, count=3),
}
ODD_GAMES = EnvironmentSettings(id=ODD, size=8, count=4)


@contextmanager
def opened(
    settings: EnvironmentSettings, processes: int, seed: int = 0, state: dict[str, Any] | None = None
) -> Iterator[AnyStreams]:
    settings = settings.model_copy(update={"processes": processes})
    seed = seed if state is None else state["seed"]
    streams = open_streams(settings, train=True, seed=seed, state=state)
    try:
        yield streams
    finally:
        streams.close()


def arrays_of(values: Any) -> dict[str, np.ndarray]:
    """All arrays in nested tuples and dicts, by their place."""
    if isinstance(values, dict | tuple):
        items = values.items() if isinstance(values, dict) else enumerate(values)
        return {f"{name}/{key}": array for name, each in items for key, array in arrays_of(each).items()}
    return {"": np.asarray(values)}


def assert_same(ours: Any, theirs: Any) -> None:
    ours, theirs = arrays_of(ours), arrays_of(theirs)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and np.array_equal(array, theirs[name]), name


def standing(streams: AnyStreams) -> tuple[Any, ...]:
    ages = streams.age(False), streams.age(True)
    return streams.observation, streams.first, streams.restarted, ages, streams.state(), streams.has_time_limit


def play(streams: AnyStreams, others: AnyStreams, steps: int) -> dict[str, int]:
    """Play both in the same way and compare all they show; return the episodes and games that ended."""
    rng, count = np.random.default_rng(steps), {"episodes": 0, "games": 0}
    for _ in range(steps):
        action = draw_actions(streams.spaces.action, (len(streams.first),), rng)
        before, kept = streams.observation, arrays_of(streams.observation)
        kept = {name: array.copy() for name, array in kept.items()}
        after = streams.step(action)
        assert_same(after, others.step(action))
        assert_same((streams.observation, streams.first), (others.observation, others.first))
        assert_same(arrays_of(before), kept)  # observations of earlier steps stay what they were
        count["episodes"] += int((after.terminated | after.truncated).sum())
        count["games"] += int(after.game_over.sum())
    assert_same(standing(streams), standing(others))
    return count


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_frames_rewards_flags_and_states_are_those_of_one_process(game: str) -> None:
    """From either a saved state leads into the other."""
    settings, steps = GAMES[game], {"pong": 60, "rem": 350, "drama": 350}.get(game, 25)
    with opened(settings, 2, seed=7) as apart, opened(settings, 0, seed=7) as here:
        assert type(apart) is ProcessStreams and type(here) is Streams
        assert apart.spaces == here.spaces
        assert_same(standing(apart), standing(here))
        ended = play(apart, here, steps)
        assert ended["episodes"] > 2 or game == "pong"  # whose games are long
        if game in ("rem", "drama"):
            assert ended["episodes"] > ended["games"] > 0  # lives were lost, and games
        with opened(settings, 0, state=apart.state()) as resumed, opened(settings, 99, state=here.state()) as again:
            play(resumed, apart, 20)
            assert_same(standing(resumed), standing(apart))
            for _ in range(20):
                again.step(np.zeros_like(draw_actions(again.spaces.action, (settings.count,), np.random.default_rng())))
                here.step(np.zeros_like(draw_actions(again.spaces.action, (settings.count,), np.random.default_rng())))
            assert_same(standing(again), standing(here))


def test_some_streams_are_those_of_all() -> None:
    settings = GAMES["catch"]
    whole, some = Streams(settings, train=True, seed=3), Streams(settings, train=True, seed=3, numbers=[1, 4])
    for _ in range(20):
        assert np.array_equal(whole.observation[[1, 4]], some.observation)
        action = np.random.default_rng(0).integers(3, size=5)
        whole.step(action)
        some.step(action[[1, 4]])


@pytest.mark.slow
def test_a_process_steps_its_environments_outside_of_torch_and_talks_on_stderr() -> None:
    """So in a command: pytest's own streams are not the process's."""
    code = f"""
import torch, numpy as np
from wmcli.envs import EnvironmentSettings, open_streams
streams = open_streams(EnvironmentSettings(id={ODD!r}, size=8, count=2, processes=2), train=True, seed=0)
streams.step(np.array([{OUTSIDE_TORCH}, {TALK}]))
streams.close()
"""
    done = subprocess.run([sys.executable, "-c", code], env=with_path(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert sorted(done.stderr.split("\n")) == ["", "said below it", "said by the game"]


def with_path() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.slow
@pytest.mark.parametrize("faulty", range(4))
def test_after_a_fault_the_state_is_that_of_one_process(faulty: int) -> None:
    """Also the numbers of games that end in the very step that fails, before and behind the faulty environment."""
    ends = set()
    with opened(ODD_GAMES, 2, seed=1) as first:
        for _ in range(4):
            first.step(np.zeros(4, np.int64))
        states = [first.state()]
        for _ in range(4):
            first.step(np.zeros(4, np.int64))
            states.append(first.state())
    for state in states:
        action = np.where(np.arange(4) == faulty, FAULT, 0)
        broken = []
        for processes in (0, 2):
            with opened(ODD_GAMES, processes, state=state) as streams:
                with pytest.raises(EnvironmentFault, match=r"step \d+.*action 1.*told to") as caught:
                    streams.step(action)
                assert "\n" not in str(caught.value)
                broken.append((str(caught.value), streams.broken_state()))
        assert broken[0][0] == broken[1][0]
        assert_same(broken[0][1], broken[1][1])
        ends |= set(np.flatnonzero(broken[0][1]["game"] - state["game"]).tolist())
    assert not ends & set(range(faulty + 1, 4))
    assert not faulty or ends, "no game ended in a step that failed: nothing was tried"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["segmentation fault", "kill"])
def test_a_process_that_dies_is_a_fault_and_the_rest_can_be_saved(way: str) -> None:
    with opened(ODD_GAMES, 2, seed=1) as streams:
        assert isinstance(streams, ProcessStreams)
        streams.step(np.zeros(4, np.int64))
        action = np.array([0, 0, 0, DEATH])
        if way == "kill":
            streams._workers[1]._process.kill()
            action[3] = 0
        name, words = "SIGKILL", "the process of environment 2 to 3 was ended by SIGKILL"
        if way == "segmentation fault":
            name, words = "SIGSEGV", "step 2 of a game in environment 3 did not end: its process was ended by SIGSEGV"
        words = rf"^{ODD}: {words}\. Run the same command again"
        with pytest.raises(EnvironmentFault, match=words):
            streams.step(action)
        state = streams.broken_state()
        with pytest.raises(EnvironmentFault, match=name):
            streams.state()
    with opened(ODD_GAMES, 0, state=state) as again:
        assert again.state()["game"].tolist() == [1, 1, 1, 1] and not again.restarted.any()


@pytest.mark.slow
def test_what_does_not_open_says_so_and_leaves_no_process() -> None:
    with pytest.raises(UsageError, match="no environment called 'wm/Cach-v0'; did you mean 'wm/Catch-v0'"):
        open_streams(EnvironmentSettings(id="wm/Cach-v0", processes=1), train=True, seed=0)
    assert not subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, timeout=10).stdout


def test_another_number_of_environments_is_refused_before_a_process_starts() -> None:
    with opened(GAMES["catch"], 0, seed=0) as streams:
        state = streams.state()
    with pytest.raises(ArtifactError, match="environment.count=5"):
        open_streams(EnvironmentSettings(size=16, count=2, processes=2), train=True, seed=0, state=state)


@pytest.mark.slow
def test_processes_do_not_outlive_their_parent_and_leave_signals_to_it() -> None:
    code = f"""
import numpy as np
from wmcli.envs import EnvironmentSettings, open_streams
streams = open_streams(EnvironmentSettings(id={ODD!r}, size=8, count=2, processes=2), train=True, seed=0)
print(*(worker._process.pid for worker in streams._workers), flush=True)
input()
streams.step(np.array([0, 0]))
print("stepped", flush=True)
streams.step(np.array([0, {SLEEP}]))
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=with_path(), **pipes) as child:
        workers = [int(word) for word in child.stdout.readline().split()]
        for worker in workers:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(worker, number)
            assert os.getsid(worker) == worker  # out of reach of the terminal's Ctrl-C
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "stepped\n"
        time.sleep(0.5)  # one of them is amid a step
        child.kill()
    until = time.monotonic() + 20
    for worker in workers:
        while alive(worker):
            assert time.monotonic() < until, "it lives on"
            time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
