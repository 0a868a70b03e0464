"""Playing on real frames, as collection and evaluation do, and on imagined ones.

An `Agent` joins a world model, which turns frames into features, and a controller, which decides. It samples with its
own generator on the CPU. Playing therefore does not disturb the randomness of training, and samples are the same on
every device.

E parallel environments, T time (frames), A actions. Observations are trees of parts and actions have the axes of their
space, see `wmcli.spaces`.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from wmcli.controllers.base import Controller, SearchSummary, State
from wmcli.controllers.random_actions import HeldActions
from wmcli.errors import ArtifactError
from wmcli.nn.actions import no_action, no_observation, put_observation, random_actions, where_rows
from wmcli.nn.categorical import uniform
from wmcli.spaces import ActionSpace, Continuous, map_parts, to_action_space
from wmcli.transfer import to_device
from wmcli.world_models.base import ImaginedStep, WorldModel


class Decision(NamedTuple):
    """A controller's decision on the current frames of E environments, before an action is taken."""

    parameters: Tensor
    """(E, P), those of the policy."""
    choice: Tensor
    """(E, ...): the actions that it chose, on the host."""
    state: State
    """Of the controller, after the frames."""


class Snapshot(NamedTuple):
    """Everything that changes in an agent."""

    world_state: State
    state: State
    previous_action: Tensor
    is_first: Tensor
    generator: Tensor


class Agent:
    """Plays with a controller in several environments; satisfies `wmcli.controllers.base.Actor`.

    Args:
        world_model: In eval mode.
        controller: Decides on the features of the world model.
        environments: E.
        temperature: Of the samples of the policy; at 0 the likeliest action is taken.
        epsilon: Probability of replacing the action by a uniformly random one.
        hold: Hold such an action for several decisions. Then `epsilon` is the probability that a hold begins, at each
            decision outside of one. A hold ends where an episode opens.
        explore: Let a search explore as well.
        feed_executed_action: Update the controller by the executed action, as the world model always is. Else by its
            choice before the replacement, as in the public code leor-c/REM.
        generator: On the CPU.
    """

    def __init__(
        self,
        world_model: WorldModel,
        controller: Controller,
        environments: int,
        *,
        temperature: float,
        epsilon: float,
        hold: bool = False,
        explore: bool = False,
        feed_executed_action: bool = True,
        generator: torch.Generator,
    ) -> None:
        assert temperature >= 0
        assert generator.device.type == "cpu"
        self.world_model = world_model
        self.controller = controller
        self.temperature = temperature
        self.epsilon = epsilon
        self.explore = explore
        self.feed_executed_action = feed_executed_action
        self.generator = generator
        self.device = next(chain(controller.parameters(), world_model.parameters())).device
        self.lookback = max(world_model.lookback, controller.lookback)
        """Frames of a running episode, or game, that `burn_in` needs."""
        self.across_ends = world_model.across_ends
        self._state: State = controller.initial_state(environments)
        self._world_state: State | None = None
        self._previous_action = no_action(world_model.action_space, (environments,), self.device)
        self._is_first = torch.ones(environments, dtype=torch.bool, device=self.device)
        self._search_summary: SearchSummary | None = None
        self._held = HeldActions(world_model.action_space, environments) if hold else None

    def act(self, observation: Any, is_first: np.ndarray | Tensor) -> np.ndarray:
        """Return actions (E, ...) for observations (E, ...); rows with `is_first` (E,) True have no past."""
        self.perceive(observation, is_first)
        return self.decide()

    @torch.no_grad()
    def perceive(self, observation: Any, is_first: np.ndarray | Tensor) -> None:
        """Read the current frames, as `act` does, before `decide`."""
        if self._held is not None:
            self._held.end(torch.as_tensor(is_first).cpu())
        self._perceive(self._put_parts(observation), self._put(is_first) | self._is_first)
        self._is_first = torch.zeros_like(self._is_first)

    def decide(self, instead: np.ndarray | None = None) -> np.ndarray:
        """Return actions (E, ...) for the last perceived or imagined observations; `instead` replaces them."""
        return self.take(self.consider(), instead)

    @torch.no_grad()
    def consider(self) -> Decision:
        """Decide on the last perceived or imagined observations, without taking an action. `take` comes next."""
        generator = self.generator if self.explore else None
        parameters, state = self.controller.decide(self.world_model, self._world_state, self._state, generator)
        self._search_summary = self.controller.summarize_search(state)
        choice = self.controller.choose(parameters, state, self.temperature, self.generator)
        if isinstance(self.world_model.action_space, Continuous):  # a normal policy also draws numbers out of bounds
            choice = choice.clamp(-1, 1)
        return Decision(parameters, choice, state)

    @torch.no_grad()
    def take(self, decision: Decision, instead: np.ndarray | None = None) -> np.ndarray:
        """Return the actions (E, ...) to execute after `consider`; `instead` replaces them."""
        choice = executed_action = decision.choice
        if self._held is not None:
            executed_action = self._held.replace(choice, self.epsilon, self.generator)
        elif self.epsilon > 0:
            count = (len(choice),)
            anything = random_actions(self.world_model.action_space, count, self.generator)
            executed_action = where_rows(torch.rand(count, generator=self.generator) < self.epsilon, anything, choice)
        if instead is not None:
            executed_action = torch.as_tensor(instead, dtype=choice.dtype)
        followed = executed_action if self.feed_executed_action else choice
        self._state = self.controller.follow(self._put(followed), decision.state)
        self._previous_action = self._put(executed_action)
        return executed_action.numpy().copy()  # a copy: the agent keeps `executed_action`

    @torch.no_grad()
    def value(self) -> Tensor | None:
        """Return the controller's value (E,) of the last perceived or imagined observations; None without one."""
        return self.controller.value(self.world_model, self._world_state, self._state)

    @torch.no_grad()
    def latent(self) -> Tensor:
        """Return the latents (E, ...) of the last perceived or imagined observations."""
        return self.world_model.latent(self._world_state)

    @torch.no_grad()
    def imagine(self, generator: torch.Generator | None = None) -> ImaginedStep:
        """Take the last actions in the world model instead of an environment; `decide` acts on the result.

        Samples come from a generator on the CPU; None is torch's global one.
        """
        uniforms = None
        if generator is not None:
            shape = len(self._is_first), self.world_model.uniforms_per_step
            uniforms = uniform(shape, self.device, generator)
        imagined, self._world_state = self.world_model.imagine(self._world_state, self._previous_action, uniforms)
        return imagined

    @torch.no_grad()
    def frame(self) -> Any:
        """Return the last perceived or imagined observations as the world model decodes them, arrays (E, ...)."""
        return map_parts(lambda part: part.cpu().numpy(), self.world_model.frame(self._world_state))

    def summarize_search(self) -> dict[str, np.ndarray]:
        """Return the columns of the search behind the last `act`: policy (E, A), value (E,), and the sampled actions
        that it chose among, if it did. Empty without a search."""
        if self._search_summary is None:
            return {}
        policy, value, sampled = self._search_summary
        both = torch.cat((policy, value[:, None]), 1).cpu().numpy()  # one copy waits once
        columns = {"policy": both[:, :-1], "value": both[:, -1]}
        return columns if sampled is None else columns | {"sampled": sampled.cpu().numpy()}

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that changes while playing or imagining, in memory. Not with `hold`.

        For a checkpoint on disk, which holds real frames alone, see `state`.
        """
        assert self._held is None
        changing = self._world_state, self._state, self._previous_action, self._is_first, self.generator.get_state()
        return Snapshot(*(tree_map_only(Tensor, torch.clone, each) for each in changing))

    def restore(self, snapshot: Snapshot) -> None:
        """Continue exactly where an agent of the same models was when it returned this snapshot."""
        changing = (tree_map_only(Tensor, torch.clone, each) for each in snapshot[:-1])  # caches are written in place
        self._world_state, self._state, self._previous_action, self._is_first = changing
        self.generator.set_state(snapshot.generator)
        self._search_summary = None

    @torch.no_grad()
    def burn_in(self, observation: Any, action: np.ndarray | Tensor, valid: np.ndarray | Tensor) -> None:
        """Restart from the last frames of the running episodes, or with `across_ends` games, before the next `act`.

        Args:
            observation: (E, T, ...), left-padded.
            action: (E, T, ...), taken on these frames.
            valid: (E, T) bool, False in padding. A row without real frames is at the start of an episode.
        """
        assert (valid[:, :-1] <= valid[:, 1:]).all(), "real frames are at the end of a row"
        observation, action, valid = self._put_parts(observation), self._put(action), self._put(valid)
        self._world_state = None
        self.reset_rows(torch.ones_like(self._is_first))
        for t in range(valid.shape[1]):
            # Padding is cleared with the next frame, so it has no effect.
            self._perceive(map_parts(lambda part, at=t: part[:, at], observation), self._is_first)
            self._state = self.controller.burn_in(self.world_model, self._world_state, action[:, t], self._state)
            self._previous_action = action[:, t].clone()
            self._is_first = ~valid[:, t]

    def reset_rows(self, rows: np.ndarray | Tensor) -> None:
        """Clear the rows (E,) marked True: the next frame opens an episode there."""
        self._is_first = self._is_first | self._put(rows)
        if self._held is not None:
            self._held.end(torch.as_tensor(rows).cpu())

    def state(self) -> dict[str, Tensor]:
        """Return everything that changes while playing, the generator included, as flat tensors for a checkpoint."""
        tensors = {
            "generator": self.generator.get_state(),
            "fresh": self._is_first,
            "previous_action": self._previous_action,
        }
        tensors |= {f"controller/{index}": leaf for index, leaf in enumerate(_leaves(self._state))}
        if self._world_state is not None:
            tensors |= {f"world_model/{index}": leaf for index, leaf in enumerate(_leaves(self._world_state))}
        if self._held is not None:
            tensors |= self._held.state()
        return {name: tensor.clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Resume exactly where `state` was returned, with the same weights and number of environments.

        Raises:
            ArtifactError: The state has another structure, such as that of another version of wm.
        """
        self._is_first = self._put(state["fresh"])
        self._previous_action = self._put(state["previous_action"])
        self._state = self._rebuild(self._state, state, "controller")
        self._world_state = None
        if any(name.startswith("world_model/") for name in state):
            # Perceiving zeros yields the tree of the saved tensors.
            zeros = no_observation(self.world_model.observation_space, (len(self._is_first),), self.device)
            template = self.world_model.perceive(
                None,
                zeros,
                torch.zeros_like(self._previous_action),
                torch.ones_like(self._is_first),
                generator=torch.Generator(),  # its samples are not used
            )
            self._world_state = self._rebuild(template, state, "world_model")
        if self._held is not None:
            self._held.load(state)
        self.generator.set_state(state["generator"].cpu())

    def _perceive(self, observation: Any, reset: Tensor) -> None:
        assert not self.world_model.training, "dropout while playing: call world_model.eval() first"
        self._world_state = self.world_model.perceive(
            self._world_state, observation, self._previous_action, reset, generator=self.generator
        )
        self._state = self.controller.clear_rows(self._state, reset)

    def _put(self, values: np.ndarray | Tensor) -> Tensor:
        return to_device(values, self.device)

    def _put_parts(self, observation: Any) -> Any:
        return put_observation(observation, self.device)

    def _rebuild(self, template: State, saved: dict[str, Tensor], name: str) -> State:
        count = sum(key.startswith(f"{name}/") for key in saved)
        if count != len(_leaves(template)):
            raise ArtifactError(
                f"the checkpoint holds the state of another {name.replace('_', ' ')} or of an older wm:"
                " add --fresh to start this job again."
            )
        places, tree = tree_flatten(template)
        tensors = iter([self._put(saved[f"{name}/{index}"]) for index in range(count)])
        return tree_unflatten([None if place is None else _like(place, next(tensors)) for place in places], tree)


class UniformAgent:
    """Plays uniformly random actions; satisfies `wmcli.controllers.base.Actor`.

    Args:
        space: The actions, or the number of discrete ones.
        environments: E.
        hold: Hold each action for several decisions, at most to the end of the episode.
        generator: On the CPU.
    """

    across_ends = False

    def __init__(
        self, space: ActionSpace | int, environments: int, *, hold: bool = False, generator: torch.Generator
    ) -> None:
        assert generator.device.type == "cpu"
        self.space = to_action_space(space)
        self.environments = environments
        self.generator = generator
        self._held = HeldActions(self.space, environments) if hold else None

    def act(self, observation: Any, is_first: np.ndarray | Tensor) -> np.ndarray:
        """Return random actions (E, ...), whatever the observations."""
        if self._held is None:
            return random_actions(self.space, (self.environments,), self.generator).numpy()
        self.reset_rows(is_first)
        return self._held.replace(no_action(self.space, (self.environments,)), 1.0, self.generator).numpy()

    def summarize_search(self) -> dict[str, np.ndarray]:
        """Return nothing: there is no search."""
        return {}

    def burn_in(self, observation: Any, action: np.ndarray | Tensor, valid: np.ndarray | Tensor) -> None:
        """End all holds; there is no other state."""
        self.reset_rows(torch.ones(self.environments, dtype=torch.bool))

    def reset_rows(self, rows: np.ndarray | Tensor) -> None:
        """End the holds in the rows (E,) marked True."""
        if self._held is not None:
            self._held.end(torch.as_tensor(rows).cpu())

    def state(self) -> dict[str, Tensor]:
        """Return the generator's state and the holds."""
        held = {} if self._held is None else self._held.state()
        return {"generator": self.generator.get_state(), **held}

    def load(self, state: dict[str, Tensor]) -> None:
        """Resume exactly where `state` was returned."""
        if self._held is not None:
            self._held.load(state)
        self.generator.set_state(state["generator"].cpu())


def _leaves(tree: State) -> list[Tensor]:
    """Return the tensors of a nested tuple, list or dict in order, numbers as tensors; None is skipped."""
    return [torch.as_tensor(leaf) for leaf in tree_flatten(tree)[0] if leaf is not None]


def _like(place: Tensor | bool | int | float, saved: Tensor) -> Any:
    """Return a saved tensor, as a number where the place holds one."""
    return saved if isinstance(place, Tensor) else saved.item()
