"""Minigrid and BabyAI."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("minigrid")

from wmcli.envs import EnvironmentSettings, follows_seed, make, protocol  # noqa: E402
from wmcli.spaces import Categories, Discrete, Image  # noqa: E402

ID = "MiniGrid-Empty-5x5-v0"


def test_the_manifest_has_wrappers_meanings_and_the_limit() -> None:
    block = protocol(EnvironmentSettings(id=ID))
    assert json.loads(json.dumps(block)) == block
    assert block["wrappers"] == ["minigrid.wrappers:RGBImgPartialObsWrapper", "minigrid.wrappers:ImgObsWrapper"]
    assert block["actions"] == 7 and block["action_meanings"][:3] == ["left", "right", "forward"]
    assert block["train"] == {"time_limit": 100} and block["versions"]["minigrid"] and block["frame"] == [56, 56, 3]


@pytest.mark.parametrize(
    ("more", "observation"),
    [
        ({}, Image(64, 64)),
        ({"observe": "render"}, Image(64, 64)),
        ({"observe": "both"}, {"observation": Image(64, 64), "render": Image(64, 64)}),
        ({"wrappers": ["minigrid.wrappers:FullyObsWrapper", "minigrid.wrappers:ImgObsWrapper"]}, Image(64, 64)),
        (
            {"wrappers": ["minigrid.wrappers:DictObservationSpaceWrapper"], "size": 8},
            {"direction": Categories((4,)), "image": Image(8, 8), "mission": Categories((42,) * 50)},
        ),
    ],
)
def test_what_is_observed(more: dict, observation: object) -> None:
    env = make(EnvironmentSettings(id=ID, **more), train=True)
    if isinstance(observation, dict) and "mission" in observation:
        words = env.spaces.observation["mission"].sizes[0]  # of minigrid's vocabulary, which grows
        observation["mission"] = Categories((words,) * 50)
    assert env.spaces.observation == observation
    env.reset(seed=0)
    env.step(2)


def test_a_package_may_be_named() -> None:
    named = make(EnvironmentSettings(id=f"minigrid:{ID}"), train=True)
    assert named.spaces.observation == Image(64, 64)


def test_the_goal_terminates_and_time_truncates() -> None:
    env = make(EnvironmentSettings(id=ID), train=True)
    assert env.spaces.action == Discrete(7)
    env.reset(seed=0)
    steps = [env.step(action) for action in (2, 2, 1, 2, 2)]
    assert [step[2:4] for step in steps] == [(False, False)] * 4 + [(True, False)] and steps[-1][1] > 0.9
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(100)]
    assert ends == [(False, False)] * 99 + [(False, True)]


def test_a_seed_gives_the_same_rooms() -> None:
    settings = EnvironmentSettings(id="MiniGrid-FourRooms-v0")
    env = make(settings, train=True)
    first = env.reset(seed=4)[0]
    assert not np.array_equal(env.reset(seed=5)[0], first)
    assert np.array_equal(env.reset(seed=4)[0], first)
    assert follows_seed(settings, Discrete(7))
