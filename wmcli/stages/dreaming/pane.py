"""One dream: an agent that imagines, what it predicted last, and what it thinks of its current frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from wmcli.controllers.agent import Agent, Decision, Snapshot
from wmcli.controllers.base import Controller
from wmcli.controllers.mcts import MCTS
from wmcli.report.observations import draw_observations
from wmcli.spaces import map_parts
from wmcli.stages.dreaming.insight import entropy_of, latent_of, policy_of, search_of, searched_of
from wmcli.stages.dreaming.reality import Moment, Reality, stacked
from wmcli.training.device import Machine
from wmcli.world_models.base import WorldModel


class Model(NamedTuple):
    """A world model and the controller that acts in it."""

    name: str
    about: str
    """Kind and backbone, for people."""
    world_model: WorldModel
    controller: Controller
    machine: Machine
    acts: bool = True
    """False: nobody learned to act in it, and the controller plays at random."""


class Thought(NamedTuple):
    """A controller's decision on a frame, and its reasons."""

    decision: Decision
    policy: list[float] | None
    value: float | None
    search: dict[str, Any] | None
    """See `search_of`."""
    searched: Mapping[int, tuple[float, bool]]
    """Reward and end of the actions that the search has imagined in the frame. Of samples, none are known."""


class Mind:
    """An agent at one frame, real or imagined, and its thought on it."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.agent = Agent(
            model.world_model,
            model.controller,
            1,
            temperature=1.0,
            epsilon=0.0,
            generator=torch.Generator().manual_seed(seed),
        )
        self.thought: Thought

    @property
    def choice(self) -> np.ndarray:
        """The action (...) that the controller chose."""
        return self.thought.decision.choice[0].numpy().copy()

    @torch.no_grad()
    def think(self) -> None:
        """Decide on the current frame."""
        controller = self.model.controller
        with self.model.machine.autocast():
            value = None if isinstance(controller, MCTS) else self.agent.value()
            decision = self.agent.consider()
        policy, number, search, searched = None, None if value is None else float(value), None, {}
        if isinstance(controller, MCTS):
            assert controller.tree is not None, "keep_tree is off"
            summary, search = self.agent.summarize_search(), search_of(controller.tree)
            number = float(summary["value"][0])
            if controller.candidates is None:  # else shares of samples, which differ from frame to frame
                policy = [round(float(share), 5) for share in summary["policy"][0]]
                searched = searched_of(controller.tree)
        elif self.model.acts:
            policy = policy_of(controller.distribution, decision.parameters)
        self.thought = Thought(decision, policy, number, search, searched)

    def take(self, action: np.ndarray) -> None:
        """Take an action (...) in the current frame."""
        self.agent.take(self.thought.decision, action[None])

    def copy(self) -> Mind:
        """Return another agent at the same frame, with the same thought and the same random numbers to come."""
        other = Mind(self.model, 0)
        other.agent.temperature = self.agent.temperature
        other.restore(self.agent.snapshot(), self.thought)
        return other

    def restore(self, snapshot: Snapshot, thought: Thought) -> None:
        """Continue from a snapshot of an agent of the same model."""
        self.agent.restore(snapshot)
        self.thought = thought


class Witness:
    """A mind that follows reality, so that dreams can start from it."""

    def __init__(self, model: Model, seed: int) -> None:
        self.mind = Mind(model, seed)
        self._read: Moment | None = None  # the last one that it has read

    def attend(self, reality: Reality) -> Mind:
        """Return the mind at reality's current moment, whose frame must be known.

        From the moment before, it reads one frame, and from anywhere else all that its models look back to.
        """
        moment, agent = reality.moment, self.mind.agent
        if self._read is not None and self._read.observation is moment.observation:
            return self.mind
        before = reality.moments[reality.now - 1] if reality.now else None
        opens = moment.opens_game if agent.across_ends else moment.opens_episode
        with self.mind.model.machine.autocast():
            if (
                before is not None
                and before.outcome is not None
                and self._read is not None
                and self._read.observation is before.observation
            ):
                self.mind.take(before.outcome.action)
            elif not opens and (past := reality.window(agent.lookback, agent.across_ends)):
                agent.burn_in(*stacked(past), np.ones((1, len(past)), bool))
            else:
                opens = True
            agent.perceive(map_parts(lambda part: part[None], moment.observation), np.array([opens]))
        self.mind.think()
        self._read = moment
        return self.mind


@dataclass
class Pane:
    """A dream and its last step."""

    number: int
    mind: Mind
    uniforms: torch.Generator
    """Of the world model's samples; a copy of a dream draws the same."""
    actor: Any = "main"
    """See `DreamSession`."""
    age: int = 0
    """Imagined steps since the real frame."""
    reward: float = 0.0
    total: float = 0.0
    """Sum of rewards since the real frame."""
    termination: float | None = None
    """Probability that the task ended with the last step."""
    is_over: bool = False
    entropy: float | None = None
    """Of the distribution that the current latent was drawn from. [nats]"""
    disagreement: float | None = None
    codes: int | None = None
    """Different tokens of a latent variable."""
    action: np.ndarray | None = None
    """That led to the current frame."""
    picture: np.ndarray | None = None
    """(H, W, 3) uint8, None from a model that decodes nothing."""
    latent: dict[str, Any] | None = None

    def wake(self, witness: Mind, action: np.ndarray | None) -> None:
        """Start anew from a real frame. What the last step predicted stays, unless the dream was over before it.

        Args:
            witness: It has read the frame.
            action: That led to the frame; None if it is the first.
        """
        self.mind.restore(witness.agent.snapshot(), witness.thought)
        if self.is_over:
            self.reward, self.termination, self.entropy, self.disagreement = 0.0, None, None, None
        self.age, self.total, self.is_over, self.action = 0, 0.0, False, action
        self._look()

    @torch.no_grad()
    def step(self, action: np.ndarray, *, think: bool = True) -> None:
        """Imagine the next frame under an action (...), and think about it unless the dream wakes at once."""
        searched = self.mind.thought.searched
        self.mind.take(action)
        self.age += 1
        self.action = np.array(action)
        if not think and searched and int(action) in searched:
            self.reward, self.is_over = searched[int(action)]
            self.termination = float(self.is_over)
        else:
            with self.mind.model.machine.autocast():
                step = self.mind.agent.imagine(self.uniforms)
            self.reward, self.is_over = float(step.reward), bool(step.terminated)
            self.termination = float(step.terminated) if step.continuation is None else 1 - float(step.continuation)
            self.entropy = entropy_of(step.prior)
            self.disagreement = None if step.disagreement is None else float(step.disagreement)
            self.codes = None if step.prior is None else step.prior.shape[-1]
        self.total += self.reward
        if think:
            self.mind.think()
            self._look()

    def state(self) -> PaneState:
        """Return everything that changes, for `load`."""
        last = {
            name: value for name, value in vars(self).items() if name not in ("number", "mind", "uniforms", "actor")
        }
        return PaneState(self.mind.agent.snapshot(), self.mind.thought, self.uniforms.get_state(), last)

    def load(self, state: PaneState) -> None:
        """Continue where `state` was returned, with the same model."""
        self.mind.restore(state.snapshot, state.thought)
        self.uniforms.set_state(state.uniforms)
        vars(self).update(state.last)

    def copy(self, number: int) -> Pane:
        """Return another dream at the same moment, which draws the same random numbers."""
        other = Pane(number, self.mind.copy(), torch.Generator(), self.actor)
        other.load(self.state())
        return other

    def describe(self) -> dict[str, Any]:
        """Return everything a page shows but the picture."""
        thought = self.mind.thought
        return {
            "id": self.number,
            "actor": self.actor,
            "age": self.age,
            "reward": self.reward,
            "return": self.total,
            "termination": self.termination,
            "terminated": self.is_over,
            "value": thought.value,
            "policy": thought.policy,
            "action": None if self.action is None else self.action.tolist(),
            "choice": self.mind.choice.tolist() if self.mind.model.acts else None,
            "entropy": self.entropy,
            "disagreement": self.disagreement,
            "latent": self.latent,
            "search": thought.search,
        }

    @torch.no_grad()
    def _look(self) -> None:
        model, agent = self.mind.model.world_model, self.mind.agent
        with self.mind.model.machine.autocast():
            self.latent = latent_of(agent.latent(), model.feature_shape, self.codes)
            self.picture = None
            if model.decodes is not None:
                self.picture = draw_observations(model.observation_space, agent.frame())[0]


class PaneState(NamedTuple):
    """Everything that changes in a pane."""

    snapshot: Snapshot
    thought: Thought
    uniforms: torch.Tensor
    last: dict[str, Any]
