"""Playing on real frames: agreement with training, statistics of the choice, exact resume."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rollouts import imagine
from safetensors.torch import load, save

from wmcli.controllers.actor_critic import ActorCritic, ActorCriticSettings
from wmcli.controllers.agent import Agent, UniformAgent
from wmcli.controllers.base import SearchSummary
from wmcli.controllers.reinforce import ReinforceController, ReinforceSettings
from wmcli.errors import ArtifactError


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def controller_for(**changes) -> ReinforceController:
    torch.manual_seed(3)
    settings = ReinforceSettings(**({"width": 7, "latent_channels": (6,), "pixel_channels": (3,)} | changes))
    return ReinforceController(settings, (5, 2, 3), 8, 4)


def frames_of(numbers: torch.Tensor) -> np.ndarray:
    """(..., 8, 8, 3) uint8 frames that carry the numbers, as the counting model reads them."""
    return numbers[..., None, None, None].expand(*numbers.shape, 8, 8, 3).to(torch.uint8).numpy()


def play(agent, numbers: torch.Tensor, first: torch.Tensor) -> np.ndarray:
    return np.stack([agent.act(frames_of(n), f.numpy()) for n, f in zip(numbers.T, first.T, strict=True)], axis=1)


@pytest.mark.parametrize("changes", [{}, {"burn_in_actions": False}, {"input": "pixels", "action_inputs": False}])
def test_burn_in_is_that_of_imagination(changes, world, make_batch):
    controller = controller_for(burn_in=5, imagination_horizon=1, **changes)
    batch = make_batch((3, 6, 4), 6)
    rollout = imagine(controller, world, batch)
    agent = Agent(world, controller, 3, temperature=1, epsilon=0, generator=seeded(0))
    agent.act(frames_of(torch.tensor([1, 2, 3])), np.zeros(3, bool))  # what it remembers of this must go
    agent.burn_in(frames_of(batch.inputs[:, :-1]), batch.action[:, :-1].numpy(), batch.valid[:, :-1].numpy())
    torch.testing.assert_close(agent._state, rollout.start)

    actions = agent.act(frames_of(batch.inputs[:, -1]), np.zeros(3, bool))
    _, world_state = world.observe(batch.inputs, batch.action, batch.valid & (batch.valid.cumsum(1) == 1))
    torch.testing.assert_close(agent._world_state.total, world_state.total)
    with torch.no_grad():
        _, _, state = controller.policy(rollout.observation[:, 0], rollout.start)
        state = controller.follow(torch.from_numpy(actions), state)
    torch.testing.assert_close(agent._state, state)


def test_a_row_without_frames_burns_in_to_nothing(world):
    controller = controller_for()
    numbers = torch.randint(50, (2, 4))
    valid = np.array([[False] * 4, [False, False, True, True]])
    agent = Agent(world, controller, 2, temperature=1, epsilon=0, generator=seeded(0))
    agent.burn_in(frames_of(numbers), np.ones((2, 4), np.int64), valid)
    agent.act(frames_of(torch.tensor([9, 9])), np.zeros(2, bool))
    new = Agent(world, controller, 2, temperature=1, epsilon=0, generator=seeded(0))
    new.act(frames_of(torch.tensor([9, 9])), np.ones(2, bool))
    torch.testing.assert_close(agent._state[0][0], new._state[0][0])
    assert (agent._state[0][1] != new._state[0][1]).all()


def test_rows_do_not_influence_each_other_and_reset_alone(world):
    """One row restarts in the middle: it goes on like a new agent, the other as if nothing had happened."""
    controller = controller_for(action_inputs=False)  # so that the states do not hang on what was sampled
    numbers = torch.randint(50, (2, 6))
    first = torch.zeros(2, 6, dtype=torch.bool)
    first[1, 4] = True
    agents = [Agent(world, controller, 2, temperature=1, epsilon=0, generator=seeded(0)) for _ in range(3)]
    play(agents[0], numbers, first)
    play(agents[1], numbers, torch.zeros_like(first))
    play(agents[2], numbers[:, :4], torch.zeros_like(first[:, :4]))
    agents[2].reset_rows(np.array([False, True]))
    play(agents[2], numbers[:, 4:], torch.zeros_like(first[:, 4:]))
    torch.testing.assert_close(agents[0]._state, agents[2]._state)
    torch.testing.assert_close(agents[0]._state[0][0], agents[1]._state[0][0])
    assert (agents[0]._state[0][1] != agents[1]._state[0][1]).all()


def biased(world, log_probability: torch.Tensor) -> ReinforceController:
    controller = controller_for()
    with torch.no_grad():
        controller.policy_head.weight.zero_()
        controller.policy_head.bias.copy_(log_probability)
    return controller


@pytest.mark.parametrize(("temperature", "epsilon"), [(1.0, 0.0), (0.5, 0.0), (1.0, 0.3), (0.01, 0.01)])
def test_temperature_and_epsilon(world, temperature, epsilon):
    probability = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    agent = Agent(
        world, biased(world, probability.log()), rows, temperature=temperature, epsilon=epsilon, generator=seeded(0)
    )
    actions = agent.act(frames_of(torch.zeros(rows, dtype=torch.int64)), np.ones(rows, bool))
    assert actions.dtype == np.int64
    share = torch.from_numpy(np.bincount(actions, minlength=4) / rows).float()
    sharpened = (probability.log() / temperature).softmax(-1)
    torch.testing.assert_close(share, (1 - epsilon) * sharpened + epsilon / 4, atol=0.015, rtol=0)


@pytest.mark.parametrize("feed", [True, False])
def test_who_is_told_which_action(world, feed):
    controller = biased(world, torch.tensor([0.0, 0.0, 60.0, 0.0]))  # the policy always wants 2
    agent = Agent(world, controller, 5, temperature=1, epsilon=1, feed_executed_action=feed, generator=seeded(0))
    fresh = controller.initial_state(5)
    executed = agent.act(frames_of(torch.full((5,), 7)), np.ones(5, bool))
    assert len(set(executed)) > 1, "replaced at random"
    with torch.no_grad():
        _, _, state = controller.policy(world.features(agent._world_state), fresh)
        state = controller.follow(torch.from_numpy(executed) if feed else torch.full((5,), 2), state)
    torch.testing.assert_close(agent._state, state)
    want = executed.copy()
    executed[:] = 3  # what the caller does with the array is no concern of the agent's
    agent.act(frames_of(torch.full((5,), 8)), np.zeros(5, bool))
    torch.testing.assert_close(world.told[-1], torch.from_numpy(want))


def test_reproducible_and_apart_from_the_global_randomness(world):
    controller = controller_for()
    numbers, first = torch.randint(50, (3, 20)), torch.rand(3, 20) < 0.2
    before = torch.get_rng_state()

    def actions(seed: int) -> np.ndarray:
        agent = Agent(world, controller, 3, temperature=1, epsilon=0.1, generator=seeded(seed))
        return play(agent, numbers, first)

    np.testing.assert_array_equal(actions(5), actions(5))
    assert (actions(5) != actions(6)).any()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("played", [0, 7])
def test_resume_is_exact(world, played, hold):
    controller = controller_for()
    numbers, first = torch.randint(50, (3, 15)), torch.rand(3, 15) < 0.2
    agent = Agent(world, controller, 3, temperature=1, epsilon=0.1, hold=hold, generator=seeded(5))
    for t in range(played):
        agent.act(frames_of(numbers[:, t]), first[:, t])
    stored = load(save(agent.state()))
    want = play(agent, numbers[:, played:], first[:, played:])

    other = Agent(world, controller, 3, temperature=1, epsilon=0.1, hold=hold, generator=seeded(99))
    other.load(stored)
    np.testing.assert_array_equal(play(other, numbers[:, played:], first[:, played:]), want)
    torch.testing.assert_close(other._state, agent._state, rtol=0, atol=0)
    assert type(other._world_state) is type(agent._world_state)
    assert other._world_state.step == agent._world_state.step


def test_a_checkpoint_of_another_form_is_refused_in_one_line(world):
    """An older version kept fewer tensors of the world model's state."""
    agent = Agent(world, controller_for(), 3, temperature=1, epsilon=0, generator=seeded(5))
    agent.act(frames_of(torch.tensor([1, 2, 3])), np.ones(3, bool))
    stored = agent.state()
    del stored["world_model/2"]
    with pytest.raises(ArtifactError, match="world model.*--fresh") as caught:
        Agent(world, controller_for(), 3, temperature=1, epsilon=0, generator=seeded(5)).load(stored)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("played", [0, 7])
def test_a_model_that_draws_while_it_perceives(played, world):
    """It draws from the agent's generator, so the play is the same after a resume, and training's draws are too."""

    class Noisy(type(world)):
        def perceive(self, state, observation, previous_action, reset, generator=None):
            noise = torch.randint(2, observation.shape[:1], generator=generator).to(torch.uint8)
            return super().perceive(state, observation + noise[:, None, None, None], previous_action, reset)

    world, controller = Noisy(), controller_for()
    numbers, first = torch.randint(50, (3, 15)), torch.rand(3, 15) < 0.2
    before = torch.get_rng_state()
    agent = Agent(world, controller, 3, temperature=1, epsilon=0.1, generator=seeded(5))
    for t in range(played):
        agent.act(frames_of(numbers[:, t]), first[:, t])
    stored = load(save(agent.state()))
    want = play(agent, numbers[:, played:], first[:, played:])

    other = Agent(world, controller, 3, temperature=1, epsilon=0.1, generator=seeded(99))
    other.load(stored)
    torch.testing.assert_close(other.state(), stored, rtol=0, atol=0)
    np.testing.assert_array_equal(play(other, numbers[:, played:], first[:, played:]), want)
    torch.testing.assert_close(other._world_state.total, agent._world_state.total, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_controller_without_memory(world):
    """Its state is empty: nothing is saved of it, and it plays on after a resume."""
    torch.manual_seed(3)
    settings = ActorCriticSettings(actor_width=8, critic_width=8)
    controller = ActorCritic(settings, world.feature_shape, actions=4, window=6)
    torch.nn.init.normal_(controller.actor[-1].weight)  # so that frames matter
    numbers, first = torch.randint(50, (3, 15)), torch.rand(3, 15) < 0.2
    agent = Agent(world, controller, 3, temperature=1, epsilon=0, generator=seeded(5))
    agent.burn_in(frames_of(numbers[:, :4]), np.ones((3, 4), np.int64), np.ones((3, 4), bool))
    agent.act(frames_of(numbers[:, 4]), first[:, 4])
    stored = load(save(agent.state()))
    assert not any(name.startswith("controller/") for name in stored)
    want = play(agent, numbers[:, 5:], first[:, 5:])
    other = Agent(world, controller, 3, temperature=1, epsilon=0, generator=seeded(99))
    other.load(stored)
    np.testing.assert_array_equal(play(other, numbers[:, 5:], first[:, 5:]), want)


@pytest.mark.parametrize("explore", [False, True])
def test_a_search_returns_its_result_and_explores_with_the_agents_generator(world, explore):
    class Searching(ActorCritic):
        """Says that it found its own policy, and how much noise it was given."""

        def initial_state(self, batch):
            return SearchSummary(torch.zeros(batch, 4), torch.zeros(batch))

        def decide(self, world_model, world_state, state, generator=None):
            logits = self.policy(world_model.features(world_state).flatten(1))
            noise = torch.zeros(3) if generator is None else torch.rand(3, generator=generator)
            return logits, SearchSummary(logits.softmax(-1), noise)

        def summarize_search(self, state):
            return state

    controller = Searching(ActorCriticSettings(actor_width=8), world.feature_shape, actions=4, window=6)
    agent = Agent(world, controller, 3, temperature=0, epsilon=0, explore=explore, generator=seeded(5))
    assert agent.summarize_search() == {}
    agent.act(frames_of(torch.arange(3)), np.ones(3, bool))
    summary = agent.summarize_search()
    assert summary["policy"].shape == (3, 4) and np.allclose(summary["policy"].sum(1), 1)
    np.testing.assert_array_equal(summary["value"], torch.rand(3, generator=seeded(5)) if explore else np.zeros(3))
    assert UniformAgent(3, 2, generator=seeded(0)).summarize_search() == {}


def test_a_state_does_not_change_later(world):
    agent = Agent(world, controller_for(), 3, temperature=1, epsilon=0.1, generator=seeded(5))
    play(agent, torch.randint(50, (3, 2)), torch.zeros(3, 2, dtype=torch.bool))
    stored = agent.state()
    copy = load(save(stored))
    play(agent, torch.randint(50, (3, 2)), torch.zeros(3, 2, dtype=torch.bool))
    torch.testing.assert_close(stored, copy, rtol=0, atol=0)


def test_uniform_play():
    agent = UniformAgent(3, 6_000, generator=seeded(0))
    stored = agent.state()
    actions = agent.act(np.zeros((6_000, 8, 8, 3), np.uint8), np.zeros(6_000, bool))
    assert actions.dtype == np.int64
    np.testing.assert_allclose(np.bincount(actions) / 6_000, 1 / 3, atol=0.03)
    agent.load(stored)
    np.testing.assert_array_equal(agent.act(np.zeros(0), np.zeros(0)), actions)
