"""The interface of controllers: acting and learning, on any world model.

B batch (rows: imagined rollouts, or parallel environments), A actions, P parameters of a policy. An action has the axes
of its space behind those given here, and an observation the parts of its space (`wmcli.spaces`).

A controller uses a world model only through `wmcli.world_models.base.WorldModel`. Its state between frames goes into
and comes out of every call: a tree of tensors with the batch first. The controller stores none.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from wmcli import ranks
from wmcli.config import Section
from wmcli.errors import UsageError
from wmcli.nn.policies import Policy
from wmcli.world_models.base import Batch, ImaginedStep, WorldModel

State = Any
"""A nested tuple, list or dict of tensors (B, ...)."""


NO_CONTROLLER = (
    "controller.kind = 'none' trains a world model alone: choose a controller, as in --set controller.kind=actor-critic"
)


class ControllerSettings(Section):
    """Settings of a controller, and its requirements on the world model.

    A new kind is a subclass in the file of its controller, and a line in `wmcli.settings`.
    """

    searches: ClassVar[bool] = False
    """True: it plans with a search in the world model, and learns nothing in imagination."""
    acts: ClassVar[bool] = True
    """True: there is a controller, which acts in the environment."""

    kind: str
    """Kind of the controller."""

    @property
    def acting_keys(self) -> tuple[str, ...]:
        """Keys that matter when it acts, and not when it is trained."""
        return ()

    @property
    def burn_in_frames(self) -> int:
        """Real frames that it reads before it imagines."""
        return 0

    @property
    def imagined_frames(self) -> int:
        """Largest number of imagined frames of a rollout."""
        return 0

    def build(self, world_model: WorldModel, wrap_repeated: Callable[[Callable], Callable]) -> Controller:
        """Build the controller, freshly initialized.

        Args:
            world_model: The world model that it acts on. It knows the spaces of the environment.
            wrap_repeated: Wraps a function of tensors that is called repeatedly, so that calls may replay a recording.

        Raises:
            UsageError: The world model does not meet the controller's requirements.
        """
        raise NotImplementedError


class NoControllerSettings(ControllerSettings):
    acts: ClassVar[bool] = False

    kind: Literal["none"] = "none"
    """No controller: only a world model is trained."""

    def build(self, world_model: WorldModel, wrap_repeated: Callable[[Callable], Callable]) -> Controller:
        raise UsageError(NO_CONTROLLER)


class Uniforms(NamedTuple):
    """All random numbers of a rollout, uniform in [0, 1), drawn at once. h actions, s imagined steps."""

    start: Tensor
    """(B, T, uniforms_per_frame), for `observe` of the real frames."""
    action: Tensor
    """(h, B, U), U for each action."""
    world: Tensor
    """(s, B, uniforms_per_step)."""


class SearchSummary(NamedTuple):
    """Policy and value of a search at the current frames: targets of the world model."""

    policy: Tensor
    """(B, A) float32: probabilities of the actions, or of the sampled ones."""
    value: Tensor
    """(B,) float32."""
    sampled: Tensor | None = None
    """(B, A, ...): the actions among which the search chose, where it chose among samples."""


class Controller(nn.Module, ABC):
    """Acts on the features or the states of a world model."""

    in_float32 = True
    """True: parts of it compute in the precision of the weights even under autocast, so weights stay float32."""

    lookback: int = 0
    """Frames before the current one that it reads when it starts in the middle of an episode."""

    distribution: Policy
    """Gives meaning to the parameters of the policy that `decide` returns."""

    # -- acting on one frame, batched over rows ---

    def initial_state(self, batch: int) -> State:
        """Return the state before the first frame of an episode, for `batch` rows, on the controller's device.

        By default it is empty, and stays so.
        """
        return ()

    def clear_rows(self, state: State, reset: Tensor) -> State:
        """Return `state` with the rows where `reset` (B,) is True at the initial state."""
        return state

    @abstractmethod
    def decide(
        self, world_model: WorldModel, world_state: State, state: State, generator: torch.Generator | None = None
    ) -> tuple[Tensor, State]:
        """Return the policy's parameters (B, P) float32 for the next action, and the state after the current frame.

        Args:
            world_model: A search may imagine in it.
            world_state: The world model's state after it perceived the frame.
            state: Of the controller.
            generator: CPU generator of a search's exploration; None does not explore.
        """

    def choose(
        self, parameters: Tensor, state: State, temperature: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw the next actions (B, ...), on the host, from the results of `decide`.

        Args:
            parameters: (B, P).
            state: Of the controller, as `decide` returned it.
            temperature: 0 takes the likeliest.
            generator: On the CPU.
        """
        return self.distribution.choose(parameters.cpu(), temperature, generator)

    def value(self, world_model: WorldModel, world_state: State, state: State) -> Tensor | None:
        """Return the value (B,) float32 of the last perceived frame, before `decide`; None if none was learned."""
        return None

    def summarize_search(self, state: State) -> SearchSummary | None:
        """Return policy and value of the search in the last `decide`. None if it did not search."""
        return None

    def follow(self, action: Tensor, state: State) -> State:
        """Update the state by the action (B,) that was taken after the last decision."""
        return state

    def burn_in(self, world_model: WorldModel, world_state: State, action: Tensor, state: State) -> State:
        """Update the state by one real frame and the action (B,) taken on it, without a decision."""
        return state


class Learner(Controller):
    """A controller that learns in imagination."""

    window: int
    """Frames in each row of the batch of `imagine`, left-padded where an episode is shorter."""

    differentiates: bool = False
    """True: `loss` needs the gradient of `imagine` with respect to the controller's weights."""

    @abstractmethod
    def draw_uniforms(self, world_model: WorldModel, batch: Batch) -> Uniforms:
        """Draw random numbers for `imagine` from such a batch, with torch's global generator."""

    @abstractmethod
    def imagine(self, world_model: WorldModel, batch: Batch, uniforms: Uniforms) -> Any:
        """Imagine training data from windows of experience: a tuple of tensors (B, ...).

        They have no gradient unless `differentiates`; the caller sees to it.

        It is a function of the weights and its arguments. It draws nothing, changes nothing and never waits for the
        device. It can therefore be recorded and replayed (`wmcli.training.graph`). The world model is in eval mode.
        """

    @abstractmethod
    def loss(self, imagined: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss to minimize on the output of `imagine`, and metrics (detached, still on the device)."""

    @abstractmethod
    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return all learned parameters in groups for `torch.optim`, each with its weight decay."""

    def after_update(self) -> None:  # noqa: B027 (most controllers have nothing to do)
        """Update quantities that follow the weights, such as a slow copy. Called after each step of the optimizer."""


def check_curiosity(weight: float, world_model: WorldModel) -> None:
    """Raise UsageError if a reward for disagreement is wanted of a world model without an ensemble."""
    if weight and not world_model.has_ensemble:
        raise UsageError(
            f"controller.curiosity = {weight}: this dynamics model was trained without an ensemble; train one with"
            " dynamics.ensemble=5, or set controller.curiosity=0."
        )


def curiosity_bonus(weight: float, step: ImaginedStep) -> Tensor:
    """Return the weighted disagreement (B,) of an imagined step; zeros for a weight of 0."""
    if not weight:
        return torch.zeros_like(step.reward)
    assert step.disagreement is not None, "a world model without an ensemble"
    return weight * step.disagreement


def rollout_uniforms(
    world_model: WorldModel, batch: Batch, policy: Policy, actions: int, steps: int, starts: int = 1
) -> Uniforms:
    """Draw the random numbers of rollouts with torch's global generator, in one call.

    Args:
        world_model: Of the rollout.
        batch: The windows that it starts from.
        policy: Of the actions.
        actions: Number of actions, h.
        steps: Number of imagined steps, s.
        starts: Number of rollouts from each window.
    """
    rows, frames = ranks.all_rows(len(batch.valid)), batch.valid.shape[1]
    shapes = (
        (rows, frames, world_model.uniforms_per_frame),
        (actions, rows * starts, policy.uniforms),
        (steps, rows * starts, world_model.uniforms_per_step),
    )
    counts = [math.prod(shape) for shape in shapes]
    parts = torch.rand(sum(counts), device=batch.valid.device).split(counts)
    views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    return Uniforms(*(ranks.own_rows(view, axis) for view, axis in zip(views, (0, 1, 1), strict=True)))


def episode_starts(batch: Batch) -> Tensor:
    """Return (B, T) bool: the first real frame of a left-padded window, and any frame that `batch.is_first` marks."""
    starts = batch.valid & batch.is_first
    starts[:, 0] |= batch.valid[:, 0]
    starts[:, 1:] |= batch.valid[:, 1:] & ~batch.valid[:, :-1]
    return starts


class Actor(Protocol):
    """Plays in parallel environments (E rows). Collection and evaluation need no more than this."""

    across_ends: bool
    """True: its state is cleared where a game opens. False: with every episode. `is_first` and the arguments of
    `burn_in` follow it."""

    def act(self, observation: Any, is_first: np.ndarray | Tensor) -> np.ndarray:
        """Return actions (E, ...) for observations (E, ...); `is_first` (E,) marks those that open an episode, or
        game."""

    def summarize_search(self) -> dict[str, np.ndarray]:
        """Return the columns of the search in the last `act`, see `segment.SEARCHED`. Empty if it did not search."""

    def burn_in(self, observation: Any, action: np.ndarray | Tensor, valid: np.ndarray | Tensor) -> None:
        """Restart from the last frames (E, T, ...) of running episodes, left-padded where `valid` is False."""

    def reset_rows(self, rows: np.ndarray | Tensor) -> None:
        """Clear the rows (E,) marked True: the next frame opens an episode there."""

    def state(self) -> dict[str, Tensor]:
        """Return everything that changes while playing, the random generator included."""

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore a result of `state`, so that playing continues exactly."""
