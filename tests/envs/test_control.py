"""Tasks of the DeepMind Control Suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from wmcli.envs.display import prepare_mujoco

prepare_mujoco()  # before the import
suite = pytest.importorskip("dm_control.suite")

from wmcli.envs import EnvironmentSettings, Streams, make, protocol  # noqa: E402
from wmcli.envs.control import ControlTask  # noqa: E402
from wmcli.errors import UsageError  # noqa: E402
from wmcli.spaces import Image, Vector, draw_actions, parts_of  # noqa: E402


def seen(env: Any, seed: int, steps: int = 5) -> list[float]:
    """All numbers of an episode's beginning under random actions."""
    rng = np.random.default_rng(0)
    numbers = [env.reset(seed=seed)[0]]
    rewards = []
    for _ in range(steps):
        observation, reward, *_ = env.step(rng.uniform(-1, 1, env.action_space.shape))
        numbers.append(observation)
        rewards.append(reward)
    return [*np.concatenate([np.ravel(part) for each in numbers for part in each.values()]).tolist(), *rewards]


@pytest.mark.parametrize("task", ["cartpole-swingup", "reacher-easy", "ball_in_cup-catch", "point_mass-hard"])
def test_a_seed_gives_what_the_suite_gives_whatever_came_before(task: str) -> None:
    env = ControlTask(task)
    once = seen(env, 7)
    assert seen(env, 8) != once
    assert seen(env, 7) == once
    ours, suites = ControlTask(task), suite.load(*task.split("-"), task_kwargs={"random": 7})
    first = ours.reset(seed=7)[0]
    assert all((first[name] == value).all() for name, value in suites.reset().observation.items())


def test_numbers_without_axes_are_vectors_and_the_manifest_is_complete() -> None:
    settings = EnvironmentSettings(id="dmc/walker-walk")
    env = make(settings, train=True)
    assert env.spaces.observation == {"height": Vector(1), "orientations": Vector(14), "velocity": Vector(9)}
    observation = env.reset(seed=0)[0]
    assert {name: part.shape for name, part in observation.items()} == {
        name: part.shape for name, part in parts_of(env.spaces.observation).items()
    }
    block = protocol(settings)
    assert json.loads(json.dumps(block)) == block
    assert block["train"] == {"time_limit": 1000} and block["versions"]["dm_control"]
    assert block["actions"]["kind"] == "continuous" and block["actions"]["low"] == [-1.0] * 6
    assert protocol(EnvironmentSettings(id="dmc/walker-walk", action_repeat=4))["train"] == {"time_limit": 250}


def test_time_ends_an_episode_as_truncation() -> None:
    env = ControlTask("cartpole-balance")
    env.reset(seed=0)
    env._control._step_limit = 3
    ends = [env.step(np.zeros(1))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (False, True)]


def test_a_discount_of_zero_is_a_termination(monkeypatch: pytest.MonkeyPatch) -> None:
    env = ControlTask("cartpole-balance")
    env.reset(seed=0)
    monkeypatch.setattr(env._control.task, "get_termination", lambda physics: 0.0)
    assert env.step(np.zeros(1))[2:4] == (True, False)


def test_streams_are_restored_to_the_bit() -> None:
    settings = EnvironmentSettings(id="dmc/reacher-easy", count=2)
    streams = Streams(settings, train=True, seed=3)
    rng = np.random.default_rng(1)
    for _ in range(4):
        streams.step(draw_actions(streams.spaces.action, (2,), rng))
    again = Streams.restore(settings, True, streams.state())
    assert not again.restarted.any()
    for name, part in streams.observation.items():
        assert (again.observation[name] == part).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [("dmc/cartpole-balanc", "did you mean 'dmc/cartpole-balance'?"), ("dmc/xyz", "domains: acrobot, ball_in_cup")],
)
def test_unknown_tasks_end_in_one_line(name: str, words: str) -> None:
    with pytest.raises(UsageError, match="no task called") as error:
        make(EnvironmentSettings(id=name), train=True)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MUJOCO_GL") not in ("egl", "osmesa"), reason="nothing draws here")
def test_pictures_are_observed() -> None:
    env = make(EnvironmentSettings(id="dmc/cartpole-balance", observe="both", size=32), train=True)
    assert env.spaces.observation["render"] == Image(32, 32)
    shown = env.reset(seed=0)[0]["render"]
    assert shown.std() > 10
    env.step(np.ones(1))
    assert (env.reset(seed=0)[0]["render"] == shown).all()
    env.close()


def test_triton_may_be_imported_behind_an_environment_that_draws() -> None:
    """Mesa and Triton have an LLVM each: without a remedy the process ends with a segmentation fault."""
    pytest.importorskip("triton")
    code = """
from wmcli.envs import EnvironmentSettings, make
make(EnvironmentSettings(id="dmc/cartpole-balance"), train=True).reset(seed=1)
import triton
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
