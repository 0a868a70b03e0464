"""Settings of protocol `plain`: keyword arguments, wrappers, pictures, time limits, action repeat, missing packages."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest

from wmcli.envs import EnvironmentSettings, Streams, list_environments, make, protocol
from wmcli.envs.display import prepare_mujoco
from wmcli.errors import UsageError
from wmcli.spaces import Categories, Continuous, Image, Vector

OCEAN = "test/Ocean-v0"
SIDE = 8


class Ocean(gymnasium.Env[Any, int]):
    """Counts its steps, is rewarded with their number, and ends after `depth` of them."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, depth: int = 10, render_mode: str | None = None) -> None:
        self.depth, self.render_mode, self.steps = depth, render_mode, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return np.full(2, self.steps, np.float32), float(self.steps), self.steps == self.depth, False, {}

    def render(self) -> np.ndarray:
        return np.full((SIDE, SIDE, 3), self.steps, np.uint8)


class Doubled(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observations times `factor`."""

    def __init__(self, env: gymnasium.Env, factor: int = 2) -> None:
        super().__init__(env)
        self.factor = factor

    def observation(self, observation: Any) -> Any:
        return observation * self.factor


@pytest.fixture(autouse=True)
def ocean() -> Any:
    gymnasium.register(OCEAN, entry_point=Ocean, max_episode_steps=7)
    yield
    gymnasium.registry.pop(OCEAN, None)


def settings(**more: Any) -> EnvironmentSettings:
    return EnvironmentSettings(**({"id": OCEAN, "size": SIDE} | more))


def message(chosen: EnvironmentSettings) -> str:
    with pytest.raises(UsageError) as error:
        make(chosen, train=True)
    text = str(error.value)
    assert "\n" not in text
    return text


def played(env: gymnasium.Env, most: int = 100) -> tuple[list[float], bool, bool]:
    """The rewards of an episode of action 0, and how it ended."""
    env.reset(seed=0)
    rewards = []
    for _ in range(most):
        _, reward, terminated, truncated, _ = env.step(0)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    return rewards, terminated, truncated


def test_keyword_arguments_reach_the_environment() -> None:
    chosen = settings(kwargs={"depth": 3})
    assert played(make(chosen, train=True)) == ([1.0, 2.0, 3.0], True, False)
    assert protocol(chosen)["kwargs"] == {"depth": 3}


def test_wrappers_are_named_or_come_from_modules_the_innermost_first() -> None:
    doubled = f"{__name__}:Doubled"
    chosen = settings(wrappers=[doubled, "FrameStackObservation(stack_size=2)", f"{doubled}(factor=5)"])
    env = make(chosen, train=True)
    assert env.spaces.observation == Vector(4)
    env.reset(seed=0)
    assert env.step(0)[0].tolist() == [0, 0, 10, 10]
    assert protocol(chosen)["wrappers"] == list(chosen.wrappers)


def test_pictures_are_observed_alone_or_as_well() -> None:
    env = make(settings(observe="render"), train=True)
    assert env.spaces.observation == Image(SIDE, SIDE)
    env.reset(seed=0)
    assert (env.step(0)[0] == 1).all()
    env = make(settings(observe="both"), train=True)
    assert env.spaces.observation == {"observation": Vector(2), "render": Image(SIDE, SIDE)}
    env.reset(seed=0)
    seen = env.step(0)[0]
    assert (seen["observation"] == 1).all() and (seen["render"] == 1).all()


@pytest.mark.parametrize(
    ("more", "rewards", "terminated"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7], False),
        ({"time_limit": 4}, [1, 2, 3, 4], False),
        ({"action_repeat": 3}, [6, 15, 7], False),
        ({"action_repeat": 3, "time_limit": 2}, [6, 15], False),
        ({"action_repeat": 3, "kwargs": {"depth": 5}}, [6, 9], True),
        ({"time_limit": 5, "kwargs": {"depth": 5}}, [1, 2, 3, 4, 5], True),
    ],
)
def test_episodes_end_where_the_manifest_says(more: dict[str, Any], rewards: list[float], terminated: bool) -> None:
    chosen = settings(**more)
    assert played(make(chosen, train=True)) == (rewards, terminated, not terminated)
    limit = protocol(chosen)["train"]["time_limit"]
    assert limit == len(rewards) or terminated
    assert Streams(chosen, train=True, seed=0).has_time_limit


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kwargs": {"width": 3}}, ["environment.kwargs", "does not open with width"]),
        ({"wrappers": ["FrameStackObservatio"]}, ["did you mean 'FrameStackObservation'?"]),
        (
            {"wrappers": ["FrameStackObservation"]},
            ["does not fit", "stack_size", "FrameStackObservation(stack_size=4)"],
        ),
        ({"wrappers": ["FrameStackObservation(4)"]}, ["write arguments as in"]),
        ({"wrappers": ["FrameStackObservation(stack_size=x)"]}, ["write arguments as in"]),
        ({"wrappers": ["GrayscaleObservation"]}, ["does not fit test/Ocean-v0"]),
        ({"wrappers": ["builtins:repr"]}, ["returns one str, no environment"]),
        ({"wrappers": ["no_such_module:Thing"]}, ["environment.wrappers", "cannot import 'no_such_module'"]),
        ({"id": "wm/Catch-v0", "observe": "render"}, ["environment.observe = render", "renders no pictures"]),
        ({"id": "Craftr"}, ["did you mean 'Crafter'?"]),
    ],
)
def test_wrong_settings_end_in_one_line(more: dict[str, Any], words: list[str]) -> None:
    text = message(settings(**more))
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("dmc/cartpole-balance", "dm_control", "dmc"),
        ("Crafter", "crafter", "crafter"),
        ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid"),
        ("BabyAI-GoToRedBall-v0", "minigrid", "minigrid"),
        ("LunarLander-v3", "Box2D", "box2d"),
        ("HalfCheetah-v5", "mujoco", "mujoco"),
    ],
)
def test_a_missing_package_is_told_with_the_extra_that_has_it(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails
    text = message(settings(id=name))
    assert f"needs the package {package}" in text and f"pip install 'wmcli[{extra}]'" in text
    monkeypatch.delitem(sys.modules, package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    rows = {row["id"]: row["about"] for row in list_environments()}
    assert f"needs: pip install 'wmcli[{extra}]'" in rows[name]


GYMNASIUM = {
    "CartPole-v1": (Vector(4), 2),
    "Pendulum-v1": (Vector(3), Continuous((-2.0,), (2.0,))),
    "FrozenLake-v1": (Categories((16,)), 4),
    "Blackjack-v1": ({"0": Categories((32,)), "1": Categories((11,)), "2": Categories((2,))}, 2),
}


@pytest.mark.parametrize("name", GYMNASIUM)
def test_spaces_of_gymnasium_are_in_the_manifest(name: str) -> None:
    block = protocol(EnvironmentSettings(id=name))
    observation, actions = GYMNASIUM[name]
    env = make(EnvironmentSettings(id=name), train=True)
    assert env.spaces.observation == observation and json.loads(json.dumps(block)) == block
    assert block["actions"] == (actions if isinstance(actions, int) else env.spaces.describe()["actions"])
    assert type(env.spaces).of(block) == env.spaces


@pytest.mark.parametrize("name", ["LunarLander-v3", "HalfCheetah-v5"])
def test_versions_of_physics_are_in_the_manifest(name: str) -> None:
    package = pytest.importorskip("Box2D" if name.startswith("Lunar") else "mujoco").__name__
    assert protocol(EnvironmentSettings(id=name))["versions"][package]


def test_a_backend_is_chosen_where_there_is_no_display_and_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "SDL_VIDEODRIVER"):
        monkeypatch.setenv(name, "")
    prepare_mujoco()
    environ = importlib.import_module("os").environ
    assert environ["MUJOCO_GL"] in ("egl", "osmesa", "disabled")
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    prepare_mujoco()
    assert environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setenv("DISPLAY", ":0")
    prepare_mujoco()
    assert environ["MUJOCO_GL"] == ""


@pytest.mark.parametrize(("backend", "words"), [("disabled", "libosmesa6"), ("glfw", "MUJOCO_GL=egl")])
def test_pictures_that_would_end_the_process_are_refused(
    backend: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", backend)
    assert words in message(settings(id="HalfCheetah-v5", observe="render"))


@pytest.mark.slow
def test_triton_can_be_imported_after_pictures_were_drawn() -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("triton")
    code = (
        "from wmcli.envs import EnvironmentSettings, make\n"
        "from wmcli.errors import UsageError\n"
        "try:\n"
        "    env = make(EnvironmentSettings(id='HalfCheetah-v5', observe='render'), train=True)\n"
        "    env.reset(seed=0)\n"
        "    env.close()\n"
        "except UsageError as error:\n"
        "    print(error)\n"
        "import triton.language\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    if done.stdout:
        pytest.skip(done.stdout)


@pytest.mark.slow
def test_mujoco_draws_the_same_in_every_environment() -> None:
    pytest.importorskip("mujoco")
    shown = []
    for _ in range(2):
        try:
            env = make(settings(id="HalfCheetah-v5", observe="render", size=32), train=True)
        except UsageError as error:
            pytest.skip(str(error))
        shown.append(env.reset(seed=3)[0])
        env.close()
    assert (shown[0] == shown[1]).all() and shown[0].std() > 10
