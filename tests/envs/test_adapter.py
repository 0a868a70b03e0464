"""Any space of gymnasium in the form of `wmcli.spaces`, and back."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from wmcli.envs.adapter import Adapted
from wmcli.envs.checked import Checked
from wmcli.envs.pace import Pace
from wmcli.errors import EnvironmentFault
from wmcli.spaces import Categories, Continuous, Discrete, Image, Vector, parts_of


class Given(gymnasium.Env[Any, Any]):
    """Shows samples of a space and keeps the actions that reach it."""

    def __init__(self, observation: spaces.Space, action: spaces.Space) -> None:
        self.observation_space, self.action_space, self.taken = observation, action, []
        self.shown: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self._show(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        return self._show(), 1.0, False, False, {}

    def _show(self) -> Any:
        self.shown = self.observation_space.sample()
        return self.shown


OBSERVATIONS = {
    "vector": (spaces.Box(-np.inf, np.inf, (2, 3), np.float64), Vector(6)),
    "bytes": (spaces.Box(0, 255, (7,), np.uint8), Vector(7)),
    "grey": (spaces.Box(0, 255, (8, 8), np.uint8), Image(8, 8, 3)),
    "stacked": (spaces.Box(0, 255, (4, 8, 8), np.uint8), Image(8, 8, 4)),
    "colors stacked": (spaces.Box(0, 255, (2, 8, 8, 3), np.uint8), Image(8, 8, 6)),
    "discrete": (spaces.Discrete(5, start=3), Categories((5,))),
    "multi-binary": (spaces.MultiBinary(3), Categories((2, 2, 2))),
    "dict": (
        spaces.Dict({"a": spaces.Dict({"b": spaces.Box(-1, 1, (2,))}), "c/d": spaces.MultiDiscrete([2, 3])}),
        {"a.b": Vector(2), "c_d": Categories((2, 3))},
    ),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_have_the_form_of_their_space(name: str) -> None:
    given, want = OBSERVATIONS[name]
    env = Adapted(Checked(Given(given, spaces.Discrete(2)), name), 8)
    assert env.spaces.observation == want
    observation, _ = env.reset(seed=1)
    for key, part in parts_of(observation).items():
        space = parts_of(want)[key]
        assert part.shape == space.shape and part.dtype == space.dtype
        if isinstance(space, Categories):
            assert (part >= 0).all() and (part < space.sizes).all()


def test_channels_keep_their_order() -> None:
    env = Adapted(Given(OBSERVATIONS["colors stacked"][0], spaces.Discrete(2)), 8)
    observation, _ = env.reset()
    shown = env.unwrapped.shown  # (S, H, W, C)
    assert (observation[..., :3] == shown[0]).all() and (observation[..., 3:] == shown[1]).all()


def test_actions_reach_the_environment_in_its_own_form() -> None:
    box = spaces.Box(np.array([[-2.0], [0.0]]), np.array([[2.0], [4.0]]), dtype=np.float64)
    env = Adapted(Given(OBSERVATIONS["vector"][0], box), 8)
    assert env.spaces.action == Continuous((-2.0, 0.0), (2.0, 4.0))
    env.reset()
    for action in (np.array([-1.0, 1.0]), np.array([0.0, -7.0], np.float32)):
        env.step(action)
    assert [taken.reshape(-1).tolist() for taken in env.unwrapped.taken] == [[-2.0, 4.0], [0.0, 0.0]]
    assert env.unwrapped.taken[0].shape == (2, 1) and env.unwrapped.taken[0].dtype == np.float64

    env = Adapted(Given(OBSERVATIONS["vector"][0], spaces.MultiDiscrete([3, 4], start=[1, -1])), 8)
    assert env.spaces.action == Categories((3, 4))
    env.reset()
    env.step(np.array([2, 0]))
    assert env.unwrapped.taken[0].tolist() == [3, -1]
    assert Adapted(Given(OBSERVATIONS["vector"][0], spaces.Discrete(3)), 8).spaces.action == Discrete(3)


@pytest.mark.parametrize("number", [np.nan, np.inf, 1e39])
def test_numbers_that_float32_cannot_hold_are_faults(number: float) -> None:
    env = Checked(Given(spaces.Dict(speed=spaces.Box(-np.inf, np.inf, (2,), np.float64)), spaces.Discrete(2)), "Odd")
    env.env._show = lambda: {"speed": np.array([0.0, number])}
    with pytest.raises(EnvironmentFault, match="Odd: .* speed .*not finite"):
        env.reset(seed=0)


def test_actions_are_repeated_and_episodes_cut_off() -> None:
    env = Pace(Given(spaces.Discrete(2), spaces.Discrete(2)), action_repeat=3, time_limit=2)
    env.reset(seed=0)
    steps = [env.step(1)[1:4] for _ in range(2)]
    assert steps == [(3.0, False, False), (3.0, False, True)] and len(env.unwrapped.taken) == 6
