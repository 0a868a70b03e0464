"""Held random actions: how long they are held, how often they begin, where they end, and exact resume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.random_actions import LONGEST, HeldActions, draw_lengths
from wmcli.controllers.reinforce import ReinforceController, ReinforceSettings
from wmcli.spaces import Discrete
from wmcli.stages.opening import open_context


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def lengths(actions: list[int]) -> list[int]:
    return [len(list(run)) for _, run in itertools.groupby(actions)]


def test_the_lengths_follow_the_zeta_distribution():
    drawn = draw_lengths(200_000, seeded(0))
    assert int(drawn.min()) >= 1 and int(drawn.max()) <= LONGEST
    weights = np.arange(1, LONGEST + 1) ** -2.0
    want = weights / weights.sum()
    found = np.bincount(drawn, minlength=LONGEST + 1)[1:] / len(drawn)
    np.testing.assert_allclose(found[:5], want[:5], atol=0.005)
    assert found[19:].sum() == pytest.approx(want[19:].sum(), abs=0.003)


def test_each_action_is_held_for_its_length():
    """With 1,000 actions two holds in a row are seldom of one action, so runs are holds."""
    agent = UniformAgent(1000, 50, hold=True, generator=seeded(1))
    played = np.stack([agent.act(np.zeros(50), np.zeros(50, bool)) for _ in range(2000)])
    runs = [length for column in played.T for length in lengths(column.tolist())]
    assert np.mean(runs) == pytest.approx(3.3, rel=0.1)
    assert np.mean(np.array(runs) == 1) == pytest.approx(0.61, abs=0.02)


def test_a_new_episode_ends_a_hold_in_its_row_alone():
    agent = UniformAgent(10**6, 2, hold=True, generator=seeded(2))
    frames, none = np.zeros(2), np.zeros(2, bool)
    while True:  # until both rows hold an action
        before = agent.act(frames, none)
        if (agent._held._left > 0).all():
            break
    after = agent.act(frames, np.array([True, False]))
    assert after[0] != before[0] and after[1] == before[1]


def test_a_new_episode_ends_an_agents_hold(world):
    torch.manual_seed(3)
    settings = ReinforceSettings(width=7, latent_channels=(6,))
    controller = ReinforceController(settings, (5, 2, 3), 8, 4)
    agent = Agent(world, controller, 2, temperature=1, epsilon=1.0, hold=True, generator=seeded(5))
    assert agent._held is not None
    frames = np.zeros((2, 8, 8, 3), np.uint8)
    agent.perceive(frames, np.ones(2, bool))
    agent._held._left.fill_(9)
    agent.perceive(frames, np.array([True, False]))
    assert agent._held._left.tolist() == [0, 9]


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 1.0])
def test_epsilon_is_the_probability_that_a_hold_begins(epsilon):
    """Between holds the policy's choice, 0, is played: a share 1 / (1 + 3.3 epsilon / (1 - epsilon)), more or less."""
    held, choice, generator = HeldActions(Discrete(10**6), 100), torch.zeros(100, dtype=torch.int64), seeded(3)
    outside = begins = random = 0
    for _ in range(3000):
        free = held._left == 0
        action = held.replace(choice, epsilon, generator)
        outside += int(free.sum())
        begins += int((free & (action != 0)).sum())
        random += int((action != 0).sum())
    assert begins / outside == pytest.approx(epsilon, abs=0.002)
    assert random / begins == pytest.approx(3.3, rel=0.1) if 0 < epsilon < 1 else random == epsilon * 300_000


@pytest.mark.parametrize("played", [0, 9])
def test_resume_is_exact(played):
    def act(agent: UniformAgent) -> np.ndarray:
        return agent.act(np.zeros(5), np.zeros(5, bool))

    agent = UniformAgent(7, 5, hold=True, generator=seeded(4))
    for _ in range(played):
        act(agent)
    stored = agent.state()
    want = [act(agent) for _ in range(20)]
    other = UniformAgent(7, 5, hold=True, generator=seeded(99))
    other.load(stored)
    np.testing.assert_array_equal([act(other) for _ in range(20)], want)


def test_collect_holds_actions_and_this_is_another_job(tmp_path):
    """`wm collect` plays held actions before there is a controller; without the setting nothing changes."""
    from wmcli.experience import read_segment
    from wmcli.experience.load import SEGMENT
    from wmcli.stages.collect import collect

    mean, digests = {}, {}
    for kind in ("independent", "held"):
        sets = [f"collect.random_actions={kind}", "collect.steps=400", "environment.count=2", "environment.size=16"]
        context = open_context(tmp_path / kind, "quickstart", sets, create=True)
        segment = collect(context, controller="random")
        arrays = read_segment(segment.path / SEGMENT)
        mean[kind] = np.mean(lengths(arrays["action"][arrays["stream"] == 0].tolist()))
        digests[kind] = segment.manifest["job"]
    assert mean["independent"] < 1.8 < 2.2 < mean["held"]
    assert digests["independent"] != digests["held"]
