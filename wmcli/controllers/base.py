"""The contract of a controller: how it acts and how it learns, whatever the world model.

B batch (rows: imagined rollouts, or environments side by side), A actions.
A controller sees a world model only through `wmcli.world_models.base.WorldModel`. What it remembers between frames is a
state that goes in and comes out of every call: a tree of tensors with the batch first. The controller keeps none.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from wmcli.config import Section
from wmcli.errors import UsageError
from wmcli.nn.categorical import uniform
from wmcli.world_models.base import Batch, WorldModel

State = Any
"""A nested tuple, list or dict of tensors (B, ...)."""


NO_CONTROLLER = (
    "controller.kind = 'none' trains a world model alone: choose a controller, as in --set controller.kind=actor-critic"
)


class ControllerSettings(Section):
    """Settings of a controller, and what it needs of the world model.

    A new kind is a subclass in the file of its controller, and a line in `wmcli.settings`.
    """

    searches: ClassVar[bool] = False
    """It plans with a search in the world model, and learns nothing in imagination."""
    acts: ClassVar[bool] = True
    """There is a controller, which acts in the environment."""

    kind: str
    """Which controller."""

    @property
    def acting_keys(self) -> tuple[str, ...]:
        """Keys that count when it acts, and not when it is trained."""
        return ()

    @property
    def burn_in_frames(self) -> int:
        """Real frames that it reads before it imagines."""
        return 0

    @property
    def imagined_frames(self) -> int:
        """Frames that a rollout imagines at most."""
        return 0

    def build(self, world_model: WorldModel, size: int, repeated: Callable[[Callable], Callable]) -> Controller:
        """Build the controller, freshly initialized.

        Args:
            world_model: The world model that it acts on.
            size: Height and width of a frame, pixels.
            repeated: Turns a function of tensors that is called again and again into one that may replay it.

        Raises:
            UsageError: The world model lacks what the controller needs.
        """
        raise NotImplementedError


class NoControllerSettings(ControllerSettings):
    acts: ClassVar[bool] = False

    kind: Literal["none"] = "none"
    """No controller: only a world model is trained."""

    def build(self, world_model: WorldModel, size: int, repeated: Callable[[Callable], Callable]) -> Controller:
        raise UsageError(NO_CONTROLLER)


class Uniforms(NamedTuple):
    """All that is random in a rollout: numbers uniform in [0, 1), drawn at once. h actions, s imagined steps."""

    start: Tensor
    """(B, T, uniforms_per_frame), for taking in the real frames."""
    action: Tensor
    """(h, B)"""
    world: Tensor
    """(s, B, uniforms_per_step)"""


class SearchSummary(NamedTuple):
    """Policy and value of a search at the current frames: targets to learn from."""

    policy: Tensor
    """(B, A) float32: probabilities of the actions."""
    value: Tensor
    """(B,) float32"""


class Controller(nn.Module, ABC):
    """Acts on what a world model makes of the frames."""

    in_float32 = True
    """Parts of it compute in the precision of the weights whatever autocast says, so that these stay as they are."""

    lookback: int = 0
    """Frames before the current one that it goes over when it begins in the middle of an episode."""

    # -- acting on one frame, batched over rows ---

    @abstractmethod
    def initial_state(self, batch: int) -> State:
        """The state before the first frame of an episode, for `batch` rows, on the controller's device."""

    @abstractmethod
    def cleared(self, state: State, reset: Tensor) -> State:
        """`state` with the rows where `reset` (B,) is True back at the initial state."""

    @abstractmethod
    def decide(
        self, world_model: WorldModel, world_state: State, state: State, generator: torch.Generator | None = None
    ) -> tuple[Tensor, State]:
        """Look at the current frame: logits (B, A) float32 of the next action, and the state after the look.

        `world_state` is the world model's state after it perceived the frame. A search may imagine from it. With a
        `generator`, on the CPU, it also explores while it searches; None: it does not.
        """

    def summarize_search(self, state: State) -> SearchSummary | None:
        """Return policy and value of the search in the last `decide`. None if it did not search."""
        return None

    @abstractmethod
    def follow(self, action: Tensor, state: State) -> State:
        """Tell the controller which action (B,) was taken after its last look."""

    @abstractmethod
    def burn_in(self, world_model: WorldModel, world_state: State, action: Tensor, state: State) -> State:
        """Go past one real frame and the action (B,) taken on it when no decision is wanted."""


class Learner(Controller):
    """A controller that learns in imagination."""

    window: int
    """Frames in each row of the batch that `imagine` takes, left-padded where an episode is shorter."""

    @abstractmethod
    def draw_uniforms(self, world_model: WorldModel, batch: Batch) -> Uniforms:
        """Random numbers for `imagine` from such a batch, with torch's global generator."""

    @abstractmethod
    def imagine(self, world_model: WorldModel, batch: Batch, uniforms: Uniforms) -> Any:
        """What to learn from, imagined from windows of experience: a tuple of tensors (B, ...) without gradient.

        A function of the weights and of what it is given: it draws nothing, changes nothing and never waits for the
        device, so that it can be recorded and replayed (`wmcli.training.graph`). The world model is in eval mode.
        """

    @abstractmethod
    def loss(self, imagined: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to minimize on what `imagine` gave, and metrics (detached, still on the device)."""

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimizer is given: all parameters that learn, in groups that state their weight decay."""

    def after_update(self) -> None:  # noqa: B027 (most controllers have nothing to do)
        """Called after each step of the optimizer, for what follows the weights, such as a slow copy of them."""


def rollout_uniforms(world_model: WorldModel, batch: Batch, actions: int, steps: int) -> Uniforms:
    """Random numbers for a rollout of so many actions and imagined steps, by torch's global generator in one call."""
    rows, frames = batch.action.shape
    shapes = (
        (rows, frames, world_model.uniforms_per_frame),
        (actions, rows),
        (steps, rows, world_model.uniforms_per_step),
    )
    counts = [math.prod(shape) for shape in shapes]
    parts = uniform((sum(counts),), batch.action.device).split(counts)
    return Uniforms(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def episode_starts(batch: Batch) -> Tensor:
    """(B, T) bool: the first real frame of a left-padded window, and any frame that `batch.is_first` marks."""
    starts = batch.valid & batch.is_first
    starts[:, 0] |= batch.valid[:, 0]
    starts[:, 1:] |= batch.valid[:, 1:] & ~batch.valid[:, :-1]
    return starts


class Actor(Protocol):
    """Plays in environments side by side (E rows). Collection and evaluation know no more than this."""

    across_ends: bool
    """True: what it remembers is cleared where a game opens, False: with every episode. `first` and what `burn_in` is
    given go by that."""

    def act(self, observation: np.ndarray | Tensor, first: np.ndarray | Tensor) -> np.ndarray:
        """Actions (E,) int64 for the current frames (E, H, W, C) uint8; `first` (E,): it opens an episode, or game."""

    def summarize_search(self) -> dict[str, np.ndarray]:
        """Return policy (E, A) and value (E,) of the search in the last `act`. Empty if it did not search."""

    def burn_in(
        self, observation: np.ndarray | Tensor, action: np.ndarray | Tensor, valid: np.ndarray | Tensor
    ) -> None:
        """Start anew from the last frames (E, T, ...) of what is running, left-padded where `valid` is False."""

    def reset_rows(self, rows: np.ndarray | Tensor) -> None:
        """Forget everything in the rows (E,) marked True: the next frame opens an episode there."""

    def state(self) -> dict[str, Tensor]:
        """All that changes while playing, the random generator included."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on exactly where `state` was taken."""
