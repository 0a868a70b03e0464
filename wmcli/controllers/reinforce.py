"""The recurrent controller of REM and IRIS: an LSTM actor-critic trained by REINFORCE on imagined rollouts.

Sources: REM (Cohen et al. 2024, ICML, arXiv 2402.05643) and IRIS (Micheli et al. 2023, ICLR, arXiv 2209.00588). Bins of
continuous actions: Simulus (Cohen et al. 2025, arXiv 2502.11537).

B batch, T time (frames), P parameters of the policy, D feature width, h w feature grid, H W C image, I LSTM input
width. An action has the axes of its space behind those given here (`wmcli.spaces`).

Each decision takes two LSTM updates: one with the observation, which yields logits and value, and one with the action.
The policy at t therefore depends on every frame up to t and every action before t. `action_inputs` = false omits the
second update, as in IRIS.

A rollout of `imagination_horizon` transitions has n = imagination_horizon + 1 policy evaluations; the last one only
supplies the value that the returns bootstrap from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from wmcli import ranks
from wmcli.controllers.base import (
    ControllerSettings,
    Learner,
    State,
    Uniforms,
    check_curiosity,
    curiosity_bonus,
    episode_starts,
    rollout_uniforms,
)
from wmcli.errors import UsageError
from wmcli.kernels.lambda_returns import lambda_returns
from wmcli.nn import two_hot
from wmcli.nn.actions import action_embedding, no_action
from wmcli.nn.layers import Flatten, Float32Linear
from wmcli.nn.policies import ContinuousKind, NormalPolicy, build_policy
from wmcli.nn.running import RunningRange
from wmcli.spaces import (
    ActionSpace,
    Image,
    ObservationSpace,
    images_of,
    parts_of,
    to_action_space,
    to_observation_space,
)
from wmcli.world_models.base import Batch, WorldModel

LSTMState = tuple[Tensor, Tensor]
"""Hidden and cell state, (B, width) each, in the precision of the weights."""


class ReinforceSettings(ControllerSettings):
    """The recurrent controller and its training; the defaults are REM's."""

    kind: Literal["reinforce"] = "reinforce"
    """Recurrent policy and value, trained by REINFORCE (REM, IRIS)."""
    input: Literal["latent", "pixels"] = "latent"
    """Input: the world model's features (REM: on their grid), or the image decoded from them (IRIS)."""
    action_inputs: bool = True
    """Feed each action to the LSTM, after the observation (REM); off in IRIS."""
    width: int = Field(512, ge=1)
    """Width of the LSTM, and of the dense layer before it for latent input. [features]"""
    latent_channels: tuple[int, ...] = Field((128, 64), min_length=1, strict=False)
    """Output channels of the 3x3 convolutions over the feature grid, for latent input. Flat features have none.
    [channels]"""
    pixel_channels: tuple[int, ...] = Field((32, 32, 64, 64), min_length=1, strict=False)
    """Output channels of the 3x3 convolutions over the image, for pixel input; each halves the image. [channels]"""
    burn_in: int = Field(20, ge=0)
    """Real frames that the LSTM reads before the frame that imagination starts from. [frames]"""
    burn_in_actions: bool = True
    """Feed the actions of the burn-in frames as well; the public code leor-c/REM omits them."""
    imagination_horizon: int = Field(8, ge=1)
    """Imagined transitions in a rollout: 8 in REM, 19 in IRIS. [decisions]"""
    discount: float = Field(0.995, ge=0, le=1)
    """Gamma, the discount of a reward one step later."""
    trace_decay: float = Field(0.95, ge=0, le=1)
    """Lambda of the lambda-returns: 0 uses the next value, 1 only the imagined rewards and the last value."""
    entropy_weight: float = Field(0.001, ge=0)
    """Weight of the entropy bonus in the loss."""
    value: Literal["mse", "two-hot"] = "mse"
    """Value and its loss: a number and the squared error (REM, IRIS), or a distribution over 255 bins and the cross
    entropy (DreamerV3)."""
    normalize_advantages: bool = False
    """Divide advantages by the range of the returns, as DreamerV3 does."""
    least_range: float = Field(1.0, gt=0)
    """Smallest range that advantages are divided by. With a small one, small rewards count as much as large ones, and
    errors of the value as much as rewards. [rewards]"""
    curiosity: float = Field(0.0, ge=0)
    """Weight of the disagreement of the world model's ensemble, which is added to the imagined rewards."""
    action_unimix: float = Field(0.0, ge=0, lt=1)
    """Share of the uniform distribution in the policy, which keeps its entropy above a bound: 0.01 in DreamerV3. A
    normal policy has none."""
    continuous: ContinuousKind = "bins"
    """Policy of continuous actions: evenly spaced bins (Simulus), or normal, or a normal cut off at the bounds."""
    bins: int = Field(51, ge=2)
    """Bins of each number of a continuous action, for continuous = "bins". [bins]"""
    learn_after_end: bool = True
    """Learn from the steps after an imagined termination as well (REM, IRIS). False suits short episodes: many steps
    lie there, and the world model has no data for them."""
    batch: int = Field(128, ge=1)
    """Rollouts in an update. [sequences]"""
    updates: int = Field(100, ge=1)
    """Updates in one call of the stage. [updates]"""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """Optimizer: adamw decays weights, adam does not."""
    learning_rate: float = Field(1e-4, gt=0)
    """Constant learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay (AdamW) of every parameter."""
    clip: float = Field(3.0, gt=0)
    """Largest norm of the gradient of all parameters."""
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""

    @property
    def burn_in_frames(self) -> int:
        return self.burn_in + 1

    @property
    def imagined_frames(self) -> int:
        return self.imagination_horizon

    def build(self, world_model: WorldModel, wrap_repeated: Callable[[Callable], Callable]) -> ReinforceController:
        check_curiosity(self.curiosity, world_model)
        return ReinforceController(
            self, world_model.feature_shape, world_model.observation_space, world_model.action_space
        )


class RecurrentRollout(NamedTuple):
    """Imagined rollouts of n - 1 transitions. Constants: they carry no gradient."""

    start: LSTMState
    """State after burn-in, before the first observation below."""
    observation: Tensor
    """The controller's inputs: features (B, n, D, h, w) or (B, n, D), or images (B, n, H, W, C) uint8."""
    action: Tensor
    """(B, n - 1, ...)."""
    reward: Tensor
    """(B, n - 1) float32."""
    terminated: Tensor
    """(B, n - 1) bool."""
    bonus: Tensor
    """(B, n - 1) float32, for curiosity."""


class ReinforceController(Learner):
    """LSTM policy and value on features or images.

    The encoder follows autocast. LSTM and heads keep the precision of the weights: the state is carried over thousands
    of frames, and differences of values are small.

    Args:
        settings: The section of the settings.
        feature_shape: (D, h, w) or (D,), that of the world model.
        observation: What the environment shows, for pixel input. A number is the side of a square image.
        actions: How it is acted on. A number is that of discrete actions.

    Raises:
        UsageError: The input does not suit the world model or the observation.
    """

    def __init__(
        self,
        settings: ReinforceSettings,
        feature_shape: tuple[int, ...],
        observation: ObservationSpace | int,
        actions: ActionSpace | int,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.action_space = to_action_space(actions)
        self.distribution = build_policy(self.action_space, settings.continuous, settings.bins)
        self.window = settings.burn_in + 1
        self.lookback = settings.burn_in
        if settings.input == "latent":
            self.encoder, inputs = _latent_encoder(feature_shape, settings.latent_channels, settings.width)
        else:
            self._image, image = _single_image(to_observation_space(observation))
            self.encoder, inputs = _pixel_encoder(image, settings.pixel_channels)
        self.action_embedding = action_embedding(self.action_space, inputs) if settings.action_inputs else None
        self.lstm = nn.LSTMCell(inputs, settings.width)
        self.policy_head = Float32Linear(settings.width, self.distribution.outputs)
        self.value_head = Float32Linear(settings.width, two_hot.BINS if settings.value == "two-hot" else 1)
        if settings.value == "two-hot":  # else the outermost bins, 20 orders of magnitude apart, are the first values
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)
        self.return_range = RunningRange() if settings.normalize_advantages else None

    # -- one frame at a time ---

    def initial_state(self, batch: int) -> LSTMState:
        """Return zeros."""
        zeros = self.lstm.weight_hh.new_zeros(batch, self.settings.width)
        return zeros, zeros

    def clear_rows(self, state: LSTMState, reset: Tensor) -> LSTMState:
        """Return `state` with zeros in the rows where `reset` (B,) is True."""
        hidden, cell = state
        return hidden.masked_fill(reset[:, None], 0), cell.masked_fill(reset[:, None], 0)

    def policy(self, observation: Tensor, state: LSTMState) -> tuple[Tensor, Tensor, LSTMState]:
        """Read one observation (B, ...): return the policy's parameters (B, P), value (B,), and the next state."""
        state = self._advance(self._encode(observation), state)
        parameters, value = self._heads(state[0])
        return parameters, self._expected_value(value), state

    def follow(self, action: Tensor, state: LSTMState) -> LSTMState:
        """Update the LSTM by the action (B, ...); return the same state if `action_inputs` is off."""
        if self.action_embedding is None:
            return state
        return self._advance(self._embed_action(action), state)

    def view(self, world_model: WorldModel, world_state: State) -> Tensor:
        """Return the controller's input in a world state: features, or images (B, H, W, C) uint8."""
        if self.settings.input == "latent":
            return world_model.features(world_state)
        return parts_of(world_model.frame(world_state))[self._image]

    def decide(
        self, world_model: WorldModel, world_state: State, state: LSTMState, generator: torch.Generator | None = None
    ) -> tuple[Tensor, LSTMState]:
        """Return the policy's parameters (B, P) for the last perceived frame, and the next state."""
        parameters, _, state = self.policy(self.view(world_model, world_state), state)
        return parameters, state

    def value(self, world_model: WorldModel, world_state: State, state: LSTMState) -> Tensor:
        """Return the value (B,) of the last perceived frame."""
        return self.policy(self.view(world_model, world_state), state)[1]

    def burn_in(self, world_model: WorldModel, world_state: State, action: Tensor, state: LSTMState) -> LSTMState:
        """Update the LSTM by one real frame and, with `burn_in_actions`, by the action (B, ...) taken on it."""
        state = self._advance(self._encode(self.view(world_model, world_state)), state)
        return self.follow(action, state) if self.settings.burn_in_actions else state

    # -- many frames ---

    def unroll(
        self, observation: Tensor, action: Tensor | None, state: LSTMState, reset: Tensor | None = None
    ) -> tuple[Tensor, LSTMState]:
        """Run the LSTM over observations and actions.

        Args:
            observation: (B, T, ...).
            action: (B, T, ...), or (B, T - 1, ...) before the last one is taken; None feeds no actions.
            state: Before the first observation.
            reset: (B, T) bool. True clears the row before that frame.

        Returns:
            Outputs (B, T, width) after each observation, and the state after the last update.
        """
        inputs = self._encode(observation.flatten(0, 1)).unflatten(0, observation.shape[:2])  # (B, T, I)
        num_actions = 0
        if self.action_embedding is not None and action is not None:
            actions = self._embed_action(action)  # (B, T or T - 1, I)
            num_actions = actions.shape[1]
        outputs = []
        for t in range(inputs.shape[1]):
            if reset is not None:
                state = self.clear_rows(state, reset[:, t])
            state = self._advance(inputs[:, t], state)
            outputs.append(state[0])
            if t < num_actions:
                state = self._advance(actions[:, t], state)
        return torch.stack(outputs, dim=1), state

    # -- learning ---

    def draw_uniforms(self, world_model: WorldModel, batch: Batch) -> Uniforms:
        """Draw random numbers for a rollout from each window of `batch`."""
        horizon = self.settings.imagination_horizon
        return rollout_uniforms(world_model, batch, self.distribution, horizon, horizon)

    @torch.no_grad()
    def imagine(self, world_model: WorldModel, batch: Batch, uniforms: Uniforms) -> RecurrentRollout:
        """Burn in on the real windows of `batch` (B, window), then act in imagination for `imagination_horizon` steps.

        The LSTM reads all frames but the last. Imagination starts from the last one, which must be real. Padding before
        the first real frame (`valid` False) has no effect. Actions are sampled at temperature 1. A rollout continues
        past an imagined termination. See `Learner.imagine`.
        """
        assert not world_model.training, "dropout in imagination: call world_model.eval() first"
        assert batch.valid.shape[1] == self.window, (batch.valid.shape, self.window)
        settings = self.settings
        reset = episode_starts(batch)
        features, world_state = world_model.observe(batch.inputs, batch.action, reset, uniforms.start)
        if settings.input == "latent":
            window = features
        else:
            decoded = world_model.decode(features if world_model.decodes == "features" else batch.inputs)
            window = parts_of(decoded)[self._image]

        rows = window.shape[0]
        state = self.initial_state(rows)
        if settings.burn_in:
            actions = batch.action[:, :-1] if settings.burn_in_actions else None
            _, state = self.unroll(window[:, :-1], actions, state, reset[:, :-1])
        start = state = self.clear_rows(state, reset[:, -1])

        observation = window.new_empty(rows, settings.imagination_horizon + 1, *window.shape[2:])
        action = no_action(self.action_space, (rows, settings.imagination_horizon), window.device)
        reward, bonus = batch.reward.new_empty(2, rows, settings.imagination_horizon)
        terminated = batch.terminated.new_empty(rows, settings.imagination_horizon)
        observation[:, 0] = window[:, -1]
        for t in range(settings.imagination_horizon):
            parameters, _, state = self.policy(observation[:, t], state)
            action[:, t] = self.distribution.sample(parameters, uniforms.action[t])
            state = self.follow(action[:, t], state)
            imagined, world_state = world_model.imagine(world_state, action[:, t], uniforms.world[t])
            reward[:, t], bonus[:, t] = imagined.reward, curiosity_bonus(settings.curiosity, imagined)
            terminated[:, t] = imagined.terminated
            observation[:, t + 1] = self.view(world_model, world_state)
        return RecurrentRollout(start, observation, action, reward, terminated, bonus)

    def loss(self, imagined: RecurrentRollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the value, policy and entropy losses, and recompute the rollout's decisions in one batch.

        REINFORCE differentiates neither sampled actions nor the world model. Only the LSTM along recorded observations
        and actions depends on the weights; its start state is constant. Recomputing it with a graph yields the gradient
        of a graph kept through imagination, with the memory of the controller alone.

        Means over the first n - 1 evaluations, with G the lambda-return and [x] constant:

            (V - [G])^2  -  log pi(a) [G - V]  -  entropy weight * H(pi)

        A two-hot value has its cross entropy in place of the square. Normalized advantages are [G - V] divided by the
        running range of G. Steps after an imagined termination count as well unless `learn_after_end` is off.
        """
        settings = self.settings
        hidden, _ = self.unroll(imagined.observation, imagined.action, imagined.start)
        parameters, value_outputs = self._heads(hidden)  # (B, n, P), (B, n, 1 or bins)
        values = self._expected_value(value_outputs)  # (B, n)
        target = lambda_returns(
            imagined.reward + imagined.bonus,
            values.detach(),
            imagined.terminated,
            settings.discount,
            settings.trace_decay,
        )[:, :-1]
        value = values[:, :-1]
        policy = self.distribution.normalize(parameters[:, :-1])
        log_probability = self.distribution.log_probability(policy, imagined.action)

        mask = torch.ones_like(value)
        if not settings.learn_after_end:
            terminations_before = imagined.terminated.cumsum(1) - imagined.terminated.long()
            mask = (terminations_before == 0).to(value.dtype)

        def mean(x: Tensor) -> Tensor:
            return (x * mask).sum() / ranks.per_rank(mask.sum())

        value_loss = mean(self._value_losses(value_outputs[:, :-1], target))
        advantage = target - value.detach()
        if self.return_range is not None:
            if self.training:
                self.return_range.update(target)
            advantage = advantage / self.return_range().clamp(min=settings.least_range)
        policy_loss = -mean(log_probability * advantage)
        entropy = mean(self.distribution.entropy(policy))
        total = value_loss + policy_loss - settings.entropy_weight * entropy
        metrics = {
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "entropy": entropy,
            "value_mean": mean(value),
            "imagined_return": mean(target),
            "imagined_reward": mean(imagined.reward),
            "imagined_terminations": mean(imagined.terminated.float()),
        }
        if settings.curiosity:
            metrics["imagined_bonus"] = mean(imagined.bonus)
        return total, {name: metric.detach() for name, metric in metrics.items()}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return one group: weight decay applies to every parameter, biases and embeddings included (as in REM)."""
        return [{"params": list(self.parameters()), "weight_decay": self.settings.weight_decay}]

    # -- pieces ---

    def _encode(self, observation: Tensor) -> Tensor:
        """Encode features (B, D, h, w) or (B, D), or images (B, H, W, C) uint8, as LSTM inputs (B, I)."""
        weight_type = self.lstm.weight_ih.dtype
        if self.settings.input == "pixels":
            # B H W C -> B C H W, bytes -> [-1, 1]
            observation = observation.permute(0, 3, 1, 2).to(weight_type) / 255 * 2 - 1
        return self.encoder(observation.to(weight_type)).to(weight_type)

    def _embed_action(self, action: Tensor) -> Tensor:
        """Embed actions (..., *axes) as LSTM inputs (..., I)."""
        assert self.action_embedding is not None
        with torch.autocast(action.device.type, enabled=False):
            return self.action_embedding(action)

    def _advance(self, inputs: Tensor, state: LSTMState) -> LSTMState:
        with torch.autocast(inputs.device.type, enabled=False):
            return self.lstm(inputs, state)

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters (..., P), and outputs of the value (..., 1 or bins), for LSTM outputs (..., width)."""
        parameters = self.policy_head(hidden)
        unimix = self.settings.action_unimix
        if unimix or isinstance(self.distribution, NormalPolicy):  # else logits, which `sample` takes as they are
            parameters = self.distribution.parameters(parameters, unimix)
        return parameters, self.value_head(hidden)

    def _expected_value(self, outputs: Tensor) -> Tensor:
        """Return the values (...) of outputs (..., 1 or bins)."""
        return two_hot.decode(outputs) if self.settings.value == "two-hot" else outputs.squeeze(-1)

    def _value_losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Return the loss (...) of outputs (..., 1 or bins) against returns (...), which are constants."""
        if self.settings.value == "two-hot":
            return two_hot.loss(outputs, target)
        return (outputs.squeeze(-1) - target).square()


def _latent_encoder(feature_shape: tuple[int, ...], channels: tuple[int, ...], width: int) -> tuple[nn.Sequential, int]:
    """Build 3x3 convolutions with SiLU and a dense layer with SiLU: (B, D, h, w) -> (B, width).

    The grid is flattened as (C, h, w). Flat features (B, D) get the dense layer with SiLU alone.
    """
    if len(feature_shape) == 1:
        return nn.Sequential(nn.Linear(feature_shape[0], width), nn.SiLU()), width
    if len(feature_shape) != 3:
        raise UsageError(
            f"controller.input = 'latent' needs features (D,) or (D, h, w), and this world model has {feature_shape};"
            " use --set controller.input=pixels"
        )
    depth, height, columns = feature_shape
    layers: list[nn.Module] = []
    for outputs in channels:
        layers += [nn.Conv2d(depth, outputs, 3, padding=1), nn.SiLU()]
        depth = outputs
    layers += [Flatten(), nn.Linear(depth * height * columns, width), nn.SiLU()]
    return nn.Sequential(*layers), width


def _single_image(observation: ObservationSpace) -> tuple[str, Image]:
    """Return name and space of the only image, which has three colors.

    Raises:
        UsageError: There is no such image, or there are several.
    """
    images = images_of(observation)
    if [image.channels for image in images.values()] != [3]:
        raise UsageError(
            "controller.input = 'pixels' needs observations with a single image, in three colors, and this environment"
            " shows others; use --set controller.input=latent"
        )
    return next(iter(images.items()))


def _pixel_encoder(image: Image, channels: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """Build 3x3 convolution, max-pool by 2, ReLU for each of `channels`, flattened: (B, 3, H, W) -> (B, I)."""
    shrink = 2 ** len(channels)
    if image.height % shrink or image.width % shrink:
        square = image.height == image.width
        size = f"environment.size = {image.height}" if square else f"the image's {image.height} x {image.width} pixels"
        raise UsageError(
            f"{size} must be a multiple of {shrink}: each of the {len(channels)} layers of controller.pixel_channels"
            " halves the image; change one of the two"
        )
    depth = 3
    layers: list[nn.Module] = []
    for outputs in channels:
        layers += [nn.Conv2d(depth, outputs, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        depth = outputs
    return nn.Sequential(*layers, Flatten()), depth * (image.height // shrink) * (image.width // shrink)
