"""`collect.apart`: environments played one after another, each by an agent of its own, with nothing between them.

E environments, T steps of each.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from test_stage_collect import EAGER, assert_same_experience, replay, rows_of, time_line
from tiny_run import Killed, copied, kill_at, latest, opened
from wrong_steps import FAULTY

from wmcli.artifacts import Artifact, Run
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.envs import EnvironmentSettings, Streams, make
from wmcli.errors import EnvironmentFault, Stopped, UsageError
from wmcli.experience import Replay
from wmcli.experience.load import SEGMENT, lives_end_episodes
from wmcli.experience.sampler import WindowTable
from wmcli.experience.segment import CLOSING, kind_of, read_segment
from wmcli.stages.collect import collect
from wmcli.stages.dynamics import train_dynamics

APART = "collect.apart=true"
SHARED = ["environment.count=3", "environment.size=16"]


@pytest.fixture
def acting(tiny: Path, tmp_path: Path) -> Path:
    """A run whose newest experience ends amid an episode, and whose controller plays next."""
    folder = copied(tiny, tmp_path / "acting")
    collect(opened(folder, APART), steps=12)
    return folder


def by_stream(artifact: Artifact) -> list[dict[str, np.ndarray]]:
    return time_line(artifact)


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_rows_are_sorted_by_environment_and_go_on_where_others_left_them(tmp_path: Path) -> None:
    """Behind a collect side by side, and before another one."""
    context = opened(tmp_path / "run", new=True)
    artifacts = [collect(context, steps=12), collect(opened(tmp_path / "run", APART), steps=45)]
    artifacts.append(collect(opened(tmp_path / "run"), steps=15))
    assert rows_of(artifacts[1])["stream"].tolist() == [0] * 15 + [1] * 15 + [2] * 15
    assert artifacts[1].metrics["steps"] == 45 and artifacts[1].metrics["episodes"] == 3
    env = make(EnvironmentSettings(size=16), train=True)
    for stream in time_line(*artifacts):
        assert np.flatnonzero(stream["first"]).tolist() == [0, 7, 14, 21]  # Catch takes 7 steps
        for begin in (0, 7, 14):
            replay(env, {name: column[begin : begin + 7] for name, column in stream.items()})


@pytest.mark.parametrize("actor", ["random", "controller"])
def test_an_environment_does_not_depend_on_those_beside_it(tiny: Path, tmp_path: Path, actor: str) -> None:
    three, one = copied(tiny, tmp_path / "three"), copied(tiny, tmp_path / "one")
    make_new = ["collect.epsilon=0.3", APART]
    ours = collect(opened(three, *make_new), controller=actor, steps=30, extend=False)
    alone = collect(opened(one, *make_new, "environment.count=1"), controller=actor, steps=10, extend=False)
    first, other, *_ = by_stream(ours)
    for name, column in by_stream(alone)[0].items():
        assert np.array_equal(column, first[name]), name
    assert not np.array_equal(first["action"], other["action"])


def test_each_is_played_on_one_thread_by_an_agent_with_its_own_numbers(
    acting: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the settings of the command, on the frames before it."""
    seen: list[tuple[object, ...]] = []
    warmed: list[np.ndarray] = []
    act, warm = Agent.act, Agent.burn_in

    def noted(agent: Agent, observation: np.ndarray, first: np.ndarray) -> np.ndarray:
        seen.append((len(observation), torch.get_num_threads(), agent.temperature, agent.epsilon, agent.explore))
        return act(agent, observation, first)

    def noted_frames(agent: Agent, *given: np.ndarray) -> None:
        warmed.append(given[0])
        warm(agent, *given)

    monkeypatch.setattr(Agent, "act", noted)
    monkeypatch.setattr(Agent, "burn_in", noted_frames)
    torch.set_num_threads(2)
    changed = ["training.threads=2", "collect.temperature=0.7", "collect.epsilon=0.25"]
    try:
        collect(opened(acting, APART, *changed), steps=9)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert set(seen) == {(1, 1, 0.7, 0.25, True)} and len(seen) == 9
    before = by_stream(Run.open(acting, create=False).get("experience", latest(acting, "experience").version - 1))
    for frames, stream in zip(warmed, before, strict=True):
        assert np.array_equal(frames[0], stream["observation"][-frames.shape[1] :])


def test_it_is_another_job_than_side_by_side(tmp_path: Path) -> None:
    one, other = (collect(opened(tmp_path / name, *how, new=True)) for name, how in (("a", [APART]), ("b", [])))
    assert one.manifest["job"] != other.manifest["job"]


def test_on_ray_needs_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"collect: on = 'ray' takes .* set collect.apart=true"):
        opened(tmp_path / "run", "collect.on=ray", new=True)


# -- interrupted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ["random", "controller"])
def test_killed_again_and_again_it_is_the_same(
    acting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actor: str
) -> None:
    whole = collect(opened(copied(acting, tmp_path / "whole"), APART), controller=actor, steps=33)
    kills, made = 0, None
    while made is None:
        try:
            with monkeypatch.context() as patch:
                kill_at(patch, "checkpoint", 4)
                made = collect(opened(acting, APART, EAGER), controller=actor, steps=33)
        except Killed:
            kills += 1
            assert kills < 30, "does not move on"
    assert kills > 5
    assert_same_experience(made, whole)


def test_asked_to_stop_it_keeps_what_has_been_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second environment. The first one is not played again."""
    whole = collect(opened(tmp_path / "whole", APART, new=True))
    step, steps = Streams.step, []

    def signals(streams: Streams, action: np.ndarray) -> object:
        if len(streams.first) == 1 and streams.seed:  # not to see whether the environment follows its seed
            steps.append(action)
        if len(steps) == 35:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(streams, action)

    monkeypatch.setattr(Streams, "step", signals)
    with pytest.raises(Stopped, match="stopped after step 5 of 30 of environment 1; the same command"):
        collect(opened(tmp_path / "run", APART, new=True))
    steps[:] = [None] * 40
    made = collect(opened(tmp_path / "run"))
    assert len(steps) == 40 + 90 - 35
    assert_same_experience(made, whole)


def test_steps_before_a_fault_are_kept_and_new_games_begin(tmp_path: Path) -> None:
    opened(tmp_path / "run", f"environment.id={FAULTY}", APART, new=True)
    for stream in range(3):
        with pytest.raises(EnvironmentFault, match=f"The 11 of 20 steps of environment {stream} before it are saved"):
            collect(opened(tmp_path / "run"), steps=60)
    rows = by_stream(collect(opened(tmp_path / "run"), steps=60))
    assert all(np.flatnonzero(stream["first"]).tolist() == [0, 11] for stream in rows)


# -- what learns from it -----------------------------------------------------------------------------------------------


def interleaved(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same rows in the order of time, and the closing observations in the order of theirs."""
    count = int(arrays["stream"].max()) + 1
    order = np.arange(len(arrays["stream"])).reshape(count, -1).T.reshape(-1)
    ended = arrays["terminated"] | arrays["truncated"]
    number = np.cumsum(ended) - 1
    closing = number[order][ended[order]]
    return {name: array[closing if kind_of(name) == CLOSING else order] for name, array in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("across_ends", [False, True])
def test_a_replay_has_the_same_windows_as_of_rows_in_the_order_of_time(
    tmp_path: Path, closing: bool, across_ends: bool
) -> None:
    """Of games with lives, over two segments."""
    breakout = ["environment.id=Breakout", "environment.protocol=rem"]
    context = opened(tmp_path / "run", APART, *breakout, new=True)
    segments = [read_segment(collect(context, steps=steps).path / SEGMENT) for steps in (240, 360)]
    lives = lives_end_episodes(context.environment)
    assert lives and segments[0]["terminated"].any()

    def windows(order: object) -> set[tuple[bytes, ...]]:
        memory = Replay("cpu", lives_end_episodes=lives, closing=closing)
        for segment in segments:
            memory.extend(order(segment))
        runs, rows = memory.runs(across_ends)
        table = WindowTable(runs, rows, length=9, minimum=3, pad="left")
        found = table.windows(np.arange(len(table)))
        columns = [memory.observation, memory.action, memory.reward, memory.terminated, memory.truncated]
        columns += [memory.first, memory.opens_game, memory.ends_game]
        columns += [memory.is_closing] if closing else []
        content = [column.numpy()[found.rows] for column in columns] + [found.valid]
        return {tuple(column[window].tobytes() for column in content) for window in range(len(table))}

    sorted_by_stream = windows(dict)
    assert sorted_by_stream == windows(interleaved) and len(sorted_by_stream) > 300


def test_models_learn_from_it(acting: Path) -> None:
    context = opened(acting, APART)
    experience = collect(context, steps=30)
    assert train_dynamics(context).inputs["experience"].digest == experience.digest
    assert len(context.experience(experience)) == experience.metrics["total_steps"]


def test_random_play_apart_may_hold_its_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[UniformAgent] = []
    act = UniformAgent.act
    monkeypatch.setattr(UniformAgent, "act", lambda agent, *given: made.append(agent) or act(agent, *given))
    collect(opened(tmp_path / "run", APART, "collect.random_actions=held", new=True))
    assert len(made) == 90 and all(agent.environments == 1 and agent._held is not None for agent in made)
