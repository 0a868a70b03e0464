from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from wmcli.envs import EnvironmentSettings, make
from wmcli.envs.environment import protocol
from wmcli.envs.quarters import BORDER, COLORS, CORNERS, MIDDLE, PUCK, STEPS, WHITE, Quarters
from wmcli.errors import UsageError
from wmcli.spaces import Categories, Continuous, Discrete, Image, Spaces, Vector

OBSERVED = ("all", "image", "vector")
ACTIONS = ("discrete", "multi-discrete", "continuous")


def seen(observed: str, observation: Any) -> tuple[np.ndarray, np.ndarray]:
    """The puck's place from the middle, and the direction of the named quarter, read off the observation alone."""
    if observed == "vector":
        return observation[:2], observation[4:]
    image = observation["image"] if observed == "all" else observation
    color = COLORS[observation["color"]] if observed == "all" else image[0, 0]
    down, right = np.argwhere((image == WHITE).all(-1)).mean(0) + 0.5
    has_color = (image == color).all(-1)[BORDER:-BORDER, BORDER:-BORDER].reshape(2, 28, 2, 28).mean((1, 3)).reshape(-1)
    return np.array([right, down]) - MIDDLE, CORNERS[has_color.argmax()]


def toward(actions: str, away: np.ndarray, target: np.ndarray) -> Any:
    """Push to where the puck is farthest from the named quarter."""
    if actions == "discrete":
        axis = int(np.argmin(away * target))
        return 1 + 2 * axis + int(target[axis] > 0)
    return target.astype(int) + 1 if actions == "multi-discrete" else target.astype(np.float32)


def play(env: gymnasium.Env, seed: int, policy: Any) -> float:
    observation, _ = env.reset(seed=seed)
    for step in range(STEPS):
        observation, reward, ended, truncated, _ = env.step(policy(observation))
        assert observation in env.observation_space
        assert not truncated and ended == (step == STEPS - 1) and bool(reward) == ended
    return reward


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observed", OBSERVED)
def test_pushing_towards_the_quarter_always_wins(observed: Any, actions: Any) -> None:
    env = Quarters(observed, actions)
    assert {play(env, seed, lambda shown: toward(actions, *seen(observed, shown))) for seed in range(60)} == {1.0}


@pytest.mark.parametrize("actions", ACTIONS)
def test_whoever_does_not_know_the_color_earns_minus_one_half(actions: Any) -> None:
    env = Quarters("vector", actions)
    returns = []
    for seed in range(600):
        env.action_space.seed(seed)
        returns.append(play(env, seed, lambda _: env.action_space.sample()))
    always = [play(env, seed, lambda _: toward(actions, np.zeros(2), CORNERS[2])) for seed in range(600)]
    for each in (returns, always):
        assert abs(np.mean(each) + 0.5) < 4 * 0.87 / np.sqrt(600)  # 0.87: deviation of a single return


def test_the_velocity_is_that_of_the_image() -> None:
    env = Quarters("all", "continuous")
    observation, _ = env.reset(seed=4)
    for _ in range(5):
        before, _ = seen("all", observation)
        observation, *_ = env.step(np.array([0.0, 0.0]))
        after, _ = seen("all", observation)
        assert np.abs(after - before - PUCK * observation["velocity"]).max() <= 1  # whole pixels


def test_two_episodes_of_one_seed_are_equal_and_seeds_differ() -> None:
    env = Quarters("image")
    assert (env.reset(seed=5)[0] == env.reset(seed=5)[0]).all()
    assert len({env.reset(seed=seed)[0].tobytes() for seed in range(40)}) > 20


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observed", OBSERVED)
def test_its_spaces_as_wm_reads_them(observed: str, actions: str) -> None:
    kwargs = {"observed": observed, "actions": actions}
    settings = EnvironmentSettings(id="wm/Quarters-v0", size=16, kwargs=kwargs)
    spaces: Spaces = make(settings, train=True).spaces  # type: ignore[attr-defined]
    parts = {"image": Image(16, 16), "velocity": Vector(2), "color": Categories((4,))}
    assert spaces.observation == {"all": parts, "image": Image(16, 16), "vector": Vector(6)}[observed]
    pushes = {
        "discrete": Discrete(5),
        "multi-discrete": Categories((3, 3)),
        "continuous": Continuous((-1.0, -1.0), (1.0, 1.0)),
    }
    assert spaces.action == pushes[actions]
    assert protocol(settings)["kwargs"] == kwargs


def test_an_argument_with_another_value_is_refused() -> None:
    settings = EnvironmentSettings(id="wm/Quarters-v0", kwargs={"actions": "many"})
    with pytest.raises(UsageError, match="actions = 'many': choose one of discrete, multi-discrete, continuous"):
        make(settings, train=True)


def test_it_renders_the_image_with_the_border() -> None:
    env = Quarters("vector", render_mode="rgb_array")
    env.reset(seed=3)
    _, target = seen("image", env.render())
    assert (target == env.step(0)[0][4:]).all()
