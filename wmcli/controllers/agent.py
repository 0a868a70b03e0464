"""Playing on real frames, as collection and evaluation do, and on imagined ones.

E environments side by side, T time (frames), H W C image, A actions.
An `Agent` joins a world model, which turns frames into what the controller sees, and a controller, which decides. Its
random numbers come from its own generator on the CPU, so that playing leaves the randomness of training alone and draws
the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from wmcli.controllers.base import Controller, SearchSummary, State
from wmcli.errors import ArtifactError
from wmcli.nn.categorical import choose
from wmcli.world_models.base import Imagined, WorldModel


class Agent:
    """Plays with a controller in `environments` rows; satisfies `wmcli.controllers.base.Actor`.

    Actions are sampled from softmax(logits / `temperature`), the likeliest taken at temperature 0, and replaced by a
    uniformly random one with probability `epsilon`; with `explore` a search explores as well. The world model is always
    told the action that was executed. So is the controller, unless `feed_executed_action` is off: then it is told its
    own choice before the replacement, as in the public code leor-c/REM. `generator` is on the CPU.
    """

    def __init__(
        self,
        world_model: WorldModel,
        controller: Controller,
        environments: int,
        *,
        temperature: float,
        epsilon: float,
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
        self.remembers = max(world_model.remembers, controller.remembers)
        """Frames of a running episode, or game, that `burn_in` should be given."""
        self.across_ends = world_model.across_ends
        self._state: State = controller.initial_state(environments)
        self._world_state: State | None = None  # until the first frame
        self._previous_action = torch.zeros(environments, dtype=torch.int64, device=self.device)
        self._fresh = torch.ones(environments, dtype=torch.bool, device=self.device)
        self._frame_shape: tuple[int, ...] = ()
        self._search_summary: SearchSummary | None = None

    def act(self, observation: np.ndarray | Tensor, first: np.ndarray | Tensor) -> np.ndarray:
        """Actions (E,) int64 for the current frames (E, H, W, C) uint8; rows with `first` True start from nothing."""
        self.perceive(observation, first)
        return self.decide()

    @torch.no_grad()
    def perceive(self, observation: np.ndarray | Tensor, first: np.ndarray | Tensor) -> None:
        """Take in the current frames, as `act` does, for `decide` to act on."""
        self._perceive(self._put(observation), self._put(first) | self._fresh)
        self._fresh = torch.zeros_like(self._fresh)

    @torch.no_grad()
    def decide(self, instead: np.ndarray | None = None) -> np.ndarray:
        """Actions (E,) int64 for what was perceived or imagined last; `instead` are taken in place of its own."""
        generator = self.generator if self.explore else None
        logits, state = self.controller.decide(self.world_model, self._world_state, self._state, generator)
        self._search_summary = self.controller.summarize_search(state)
        chosen = choose(logits.cpu(), self.temperature, self.generator)
        executed = chosen
        if self.epsilon > 0:
            uniform = torch.randint(logits.shape[1], chosen.shape, generator=self.generator)
            executed = torch.where(torch.rand(chosen.shape, generator=self.generator) < self.epsilon, uniform, chosen)
        if instead is not None:
            executed = torch.as_tensor(instead, dtype=torch.int64)
        self._state = self.controller.follow(self._put(executed if self.feed_executed_action else chosen), state)
        self._previous_action = self._put(executed)
        return executed.numpy().copy()  # the caller's own: this agent remembers `executed`

    @torch.no_grad()
    def imagine(self) -> Imagined:
        """Let the world model say what the last actions bring, instead of an environment; `decide` acts on it next.

        Draws with torch's global generator.
        """
        imagined, self._world_state = self.world_model.imagine(self._world_state, self._previous_action)
        return imagined

    @torch.no_grad()
    def frame(self) -> np.ndarray:
        """What was perceived or imagined last, as the world model draws it, (E, H, W, C) uint8."""
        return self.world_model.frame(self._world_state).cpu().numpy()

    def summarize_search(self) -> dict[str, np.ndarray]:
        """Return policy (E, A) and value (E,) of the search in the last `act`. Empty if it did not search."""
        if self._search_summary is None:
            return {}
        return {name: value.cpu().numpy() for name, value in self._search_summary._asdict().items()}

    @torch.no_grad()
    def burn_in(
        self, observation: np.ndarray | Tensor, action: np.ndarray | Tensor, valid: np.ndarray | Tensor
    ) -> None:
        """Start anew and go over the last frames of the running episodes, or with `across_ends` games, before the
        frames that `act` gets next.

        `observation` (E, T, H, W, C) uint8, `action` (E, T) taken on them, `valid` (E, T) False left of the first real
        frame. A row without real frames is at the start of one.
        """
        assert (valid[:, :-1] <= valid[:, 1:]).all(), "real frames stand at the end of a row"
        observation, action, valid = self._put(observation), self._put(action), self._put(valid)
        self._world_state = None
        self.reset_rows(torch.ones_like(self._fresh))
        for t in range(valid.shape[1]):
            # rows still in their padding are kept at the start: their frames leave no trace
            self._perceive(observation[:, t], self._fresh)
            self._state = self.controller.burn_in(self.world_model, self._world_state, action[:, t], self._state)
            self._previous_action = action[:, t].clone()
            self._fresh = ~valid[:, t]

    def reset_rows(self, rows: np.ndarray | Tensor) -> None:
        """Forget everything in the rows (E,) marked True: the next frame opens an episode there."""
        self._fresh = self._fresh | self._put(rows)

    def state(self) -> dict[str, Tensor]:
        """All that changes while playing, as flat tensors for a checkpoint; the generator included."""
        tensors = {
            "generator": self.generator.get_state(),
            "fresh": self._fresh,
            "previous_action": self._previous_action,
        }
        tensors |= {f"controller/{index}": leaf for index, leaf in enumerate(_leaves(self._state))}
        if self._world_state is not None:
            tensors["frame_shape"] = torch.tensor(self._frame_shape)
            tensors |= {f"world_model/{index}": leaf for index, leaf in enumerate(_leaves(self._world_state))}
        return {name: tensor.clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Go on exactly where `state` was taken, with the same weights and number of environments.

        Raises ArtifactError for a state of another form, which another version of wm left.
        """
        self._fresh = self._put(state["fresh"])
        self._previous_action = self._put(state["previous_action"])
        self._state = self._rebuilt(self._state, state, "controller")
        self._world_state = None
        if "frame_shape" in state:
            # a perceived black frame gives the tree into which the saved tensors go
            self._frame_shape = tuple(state["frame_shape"].tolist())
            black = torch.zeros(len(self._fresh), *self._frame_shape, dtype=torch.uint8, device=self.device)
            template = self.world_model.perceive(
                None,
                black,
                torch.zeros_like(self._previous_action),
                torch.ones_like(self._fresh),
                generator=torch.Generator(),  # what it draws is thrown away
            )
            self._world_state = self._rebuilt(template, state, "world_model")
        self.generator.set_state(state["generator"].cpu())

    def _perceive(self, observation: Tensor, reset: Tensor) -> None:
        assert not self.world_model.training, "dropout while playing: call world_model.eval() first"
        self._frame_shape = tuple(observation.shape[1:])
        self._world_state = self.world_model.perceive(
            self._world_state, observation, self._previous_action, reset, generator=self.generator
        )
        self._state = self.controller.cleared(self._state, reset)

    def _put(self, values: np.ndarray | Tensor) -> Tensor:
        tensor = torch.as_tensor(values)
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # a copy from other memory waits for the device
        return tensor.to(self.device, non_blocking=True)

    def _rebuilt(self, template: State, saved: dict[str, Tensor], name: str) -> State:
        count = sum(key.startswith(f"{name}/") for key in saved)
        if count != sum(1 for _ in _leaves(template)):
            raise ArtifactError(
                f"the checkpoint holds the state of another {name.replace('_', ' ')}, or one that an older wm saved:"
                " add --fresh to begin this piece of work again."
            )
        return _filled(template, iter([self._put(saved[f"{name}/{index}"]) for index in range(count)]))


class UniformAgent:
    """Plays uniformly random actions; satisfies `wmcli.controllers.base.Actor`. `generator` is on the CPU."""

    across_ends = False

    def __init__(self, actions: int, environments: int, *, generator: torch.Generator) -> None:
        assert generator.device.type == "cpu"
        self.actions = actions
        self.environments = environments
        self.generator = generator

    def act(self, observation: np.ndarray | Tensor, first: np.ndarray | Tensor) -> np.ndarray:
        """Random actions (E,) int64, whatever the frames."""
        return torch.randint(self.actions, (self.environments,), generator=self.generator).numpy()

    def summarize_search(self) -> dict[str, np.ndarray]:
        """Return nothing: nobody searched."""
        return {}

    def burn_in(
        self, observation: np.ndarray | Tensor, action: np.ndarray | Tensor, valid: np.ndarray | Tensor
    ) -> None:
        """Nothing is remembered."""

    def reset_rows(self, rows: np.ndarray | Tensor) -> None:
        """Nothing is remembered."""

    def state(self) -> dict[str, Tensor]:
        """The generator's state."""
        return {"generator": self.generator.get_state()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on exactly where `state` was taken."""
        self.generator.set_state(state["generator"].cpu())


# -- trees of tensors ---


def _leaves(tree: State) -> Iterator[Tensor]:
    """What a nested tuple, list or dict holds, in order: tensors, and numbers as tensors. None is an empty place."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, bool | int | float):
        yield torch.tensor(tree)
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from _leaves(branch)
    elif tree is not None:
        assert isinstance(tree, tuple | list), type(tree)
        for branch in tree:
            yield from _leaves(branch)


def _filled(tree: State, leaves: Iterator[Tensor]) -> State:
    """A tree shaped like `tree` that holds `leaves`, in the order of `_leaves`."""
    if isinstance(tree, Tensor):
        return next(leaves)
    if isinstance(tree, bool | int | float):
        return next(leaves).item()
    if isinstance(tree, dict):
        return {key: _filled(branch, leaves) for key, branch in tree.items()}
    if tree is None:
        return None
    branches = [_filled(branch, leaves) for branch in tree]
    if hasattr(tree, "_fields"):  # a NamedTuple takes its fields one by one
        return type(tree)(*branches)
    return type(tree)(branches)
