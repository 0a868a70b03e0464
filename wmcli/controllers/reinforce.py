"""The recurrent controller of REM and IRIS: an LSTM actor-critic that learns by REINFORCE from imagined rollouts.

Sources: REM (Cohen et al. 2024, ICML, arXiv 2402.05643) and IRIS (Micheli et al. 2023, ICLR, arXiv 2209.00588).
B batch, T time (frames), A actions, D feature width, h w feature grid, H W C image, I LSTM input width.

Each decision takes two LSTM updates: one with the observation, after which logits and value are read, and one with the
action that was taken. So the policy at t knows every frame up to t and every action before t. The second update is left
out when `action_inputs` is off, as in IRIS.

A rollout of `horizon` imagined transitions has n = horizon + 1 policy evaluations; the last one only gives the value
that the returns start from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from wmcli.controllers.base import ControllerSettings, Learner, State, Uniforms, episode_starts, rollout_uniforms
from wmcli.errors import UsageError
from wmcli.kernels.lambda_returns import lambda_returns
from wmcli.nn.categorical import sample
from wmcli.nn.layers import Flatten, Float32Linear
from wmcli.world_models.base import Batch, WorldModel

LSTMState = tuple[Tensor, Tensor]
"""Hidden and cell state, (B, width) each, in the precision of the weights."""


class ReinforceSettings(ControllerSettings):
    """The recurrent controller and how it learns; the defaults are REM's."""

    kind: Literal["reinforce"] = "reinforce"
    """Recurrent policy and value, learned by REINFORCE (REM, IRIS)."""
    input: Literal["latent", "pixels"] = "latent"
    """What it sees: the world model's features (REM: on their grid), or the image decoded from them (IRIS)."""
    action_inputs: bool = True
    """Feed each action taken to the LSTM, after the observation (REM); off in IRIS."""
    width: int = Field(512, ge=1)
    """Width of the LSTM, and of the dense layer before it for latent input."""
    latent_channels: tuple[int, ...] = Field((128, 64), min_length=1, strict=False)
    """Output channels of the 3x3 convolutions over the feature grid (input = latent; none where features are flat)."""
    pixel_channels: tuple[int, ...] = Field((32, 32, 64, 64), min_length=1, strict=False)
    """Output channels of the 3x3 convolutions over the image, each of which halves it (input = pixels)."""
    burn_in: int = Field(20, ge=0)
    """Real frames that build up the LSTM state before imagination starts from the frame after them."""
    burn_in_actions: bool = True
    """Feed the actions of the burn-in frames as well; the public code leor-c/REM leaves them out."""
    imagination_horizon: int = Field(8, ge=1)
    """Imagined transitions in a rollout: 8 in REM, 19 in IRIS."""
    discount: float = Field(0.995, ge=0, le=1)
    """Gamma: what a reward one step later is worth."""
    trace_decay: float = Field(0.95, ge=0, le=1)
    """Lambda of the lambda-returns: 0 trusts the next value, 1 only the imagined rewards and the last value."""
    entropy_weight: float = Field(0.001, ge=0)
    """Weight of the entropy bonus in the loss."""
    learn_after_end: bool = True
    """Learn from the steps of a rollout after its imagined end as well (REM, IRIS); false: where episodes are short,
    many steps lie there, and the world model was never told what comes then."""
    batch: int = Field(128, ge=1)
    """Rollouts in an update."""
    updates: int = Field(100, ge=1)
    """Updates each time the stage is called."""
    optimizer: Literal["adamw", "adam"] = "adamw"
    """adamw decays weights, adam does not."""
    learning_rate: float = Field(1e-4, gt=0)
    """Constant learning rate."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay (AdamW) of every parameter."""
    clip: float = Field(3.0, gt=0)
    """Largest gradient norm; a larger gradient is scaled down to it."""

    @property
    def burn_in_frames(self) -> int:
        return self.burn_in + 1

    @property
    def imagined_frames(self) -> int:
        return self.imagination_horizon

    def build(
        self, world_model: WorldModel, size: int, repeated: Callable[[Callable], Callable]
    ) -> ReinforceController:
        return ReinforceController(self, world_model.feature_shape, size, world_model.actions)


class Rollout(NamedTuple):
    """Imagined rollouts of n - 1 transitions. Constants: no gradient reaches what is recorded here."""

    start: LSTMState
    """After burn-in, before the first observation below."""
    observation: Tensor
    """What the controller saw: features (B, n, D, h, w) or (B, n, D), or images (B, n, H, W, C) uint8."""
    action: Tensor
    """(B, n - 1) int64"""
    reward: Tensor
    """(B, n - 1) float32"""
    terminated: Tensor
    """(B, n - 1) bool"""


class ReinforceController(Learner):
    """LSTM policy and value on features or images.

    `feature_shape`, (D, h, w) or (D,), is the world model's, `image_size` the side of its images in pixels, `actions`
    the number A. The encoder follows autocast. LSTM and heads keep the precision of the weights: the state is carried
    over thousands of frames, and differences of values are small.

    Raises UsageError when the input does not suit the world model or the image size.
    """

    def __init__(
        self, settings: ReinforceSettings, feature_shape: tuple[int, ...], image_size: int, actions: int
    ) -> None:
        super().__init__()
        self.settings = settings
        self.actions = actions
        self.window = settings.burn_in + 1
        self.lookback = settings.burn_in
        if settings.input == "latent":
            self.encoder, inputs = _latent_encoder(feature_shape, settings.latent_channels, settings.width)
        else:
            self.encoder, inputs = _pixel_encoder(image_size, settings.pixel_channels)
        self.action_embedding = nn.Embedding(actions, inputs) if settings.action_inputs else None
        self.lstm = nn.LSTMCell(inputs, settings.width)
        self.policy_head = Float32Linear(settings.width, actions)
        self.value_head = Float32Linear(settings.width, 1)

    # -- one frame at a time ---

    def initial_state(self, batch: int) -> LSTMState:
        """Zeros: nothing seen yet."""
        zeros = self.lstm.weight_hh.new_zeros(batch, self.settings.width)
        return zeros, zeros

    def cleared(self, state: LSTMState, reset: Tensor) -> LSTMState:
        """`state` with the rows where `reset` (B,) is True set to zero."""
        hidden, cell = state
        return hidden.masked_fill(reset[:, None], 0), cell.masked_fill(reset[:, None], 0)

    def policy(self, observation: Tensor, state: LSTMState) -> tuple[Tensor, Tensor, LSTMState]:
        """Look at one observation (B, ...): logits (B, A), value (B,), and the state after the look."""
        state = self._advance(self._encode(observation), state)
        logits, value = self._heads(state[0])
        return logits, value, state

    def follow(self, action: Tensor, state: LSTMState) -> LSTMState:
        """The LSTM update of the action (B,) taken; the same state when `action_inputs` is off."""
        if self.action_embedding is None:
            return state
        return self._advance(self.action_embedding(action), state)

    def view(self, world_model: WorldModel, world_state: State) -> Tensor:
        """What the controller looks at in a world state: its features, or images (B, H, W, C) uint8."""
        if self.settings.input == "latent":
            return world_model.features(world_state)
        return world_model.frame(world_state)

    def decide(
        self, world_model: WorldModel, world_state: State, state: LSTMState, generator: torch.Generator | None = None
    ) -> tuple[Tensor, LSTMState]:
        """Logits (B, A) for the frame the world model perceived last, and the state after the look."""
        logits, _, state = self.policy(self.view(world_model, world_state), state)
        return logits, state

    def burn_in(self, world_model: WorldModel, world_state: State, action: Tensor, state: LSTMState) -> LSTMState:
        """The updates of one real frame and, with `burn_in_actions`, of the action (B,) taken on it."""
        state = self._advance(self._encode(self.view(world_model, world_state)), state)
        return self.follow(action, state) if self.settings.burn_in_actions else state

    # -- many frames ---

    def unroll(
        self, observation: Tensor, action: Tensor | None, state: LSTMState, reset: Tensor | None = None
    ) -> tuple[Tensor, LSTMState]:
        """LSTM outputs (B, T, width) after each observation (B, T, ...), and the state after the last update.

        `action` is (B, T), or (B, T - 1) when the last one has not been taken yet; None feeds no actions. Rows where
        `reset` (B, T) is True start from zero before that frame.
        """
        inputs = self._encode(observation.flatten(0, 1)).unflatten(0, observation.shape[:2])  # (B, T, I)
        followed = 0
        if self.action_embedding is not None and action is not None:
            actions = self.action_embedding(action)  # (B, T or T - 1, I)
            followed = actions.shape[1]
        outputs = []
        for t in range(inputs.shape[1]):
            if reset is not None:
                state = self.cleared(state, reset[:, t])
            state = self._advance(inputs[:, t], state)
            outputs.append(state[0])
            if t < followed:
                state = self._advance(actions[:, t], state)
        return torch.stack(outputs, dim=1), state

    # -- learning ---

    def draw_uniforms(self, world_model: WorldModel, batch: Batch) -> Uniforms:
        """Random numbers for a rollout from each window of `batch`."""
        return rollout_uniforms(
            world_model, batch, self.settings.imagination_horizon, self.settings.imagination_horizon
        )

    @torch.no_grad()
    def imagine(self, world_model: WorldModel, batch: Batch, uniforms: Uniforms) -> Rollout:
        """Burn in on the real windows of `batch` (B, window), then act in imagination for `horizon` steps.

        The LSTM goes over all frames but the last; imagination starts from the last one, which must be real. Frames
        left of the first real one (`valid` False) leave no trace. Actions are sampled at temperature 1. A rollout goes
        on past an imagined termination. See `Controller.imagine`.
        """
        assert not world_model.training, "dropout in imagination: call world_model.eval() first"
        assert batch.valid.shape[1] == self.window, (batch.valid.shape, self.window)
        settings = self.settings
        reset = episode_starts(batch)
        features, world_state = world_model.observe(batch.inputs, batch.action, reset, uniforms.start)
        if settings.input == "latent":
            window = features
        else:
            window = world_model.decode(features if world_model.decodes == "features" else batch.inputs)

        rows = window.shape[0]
        state = self.initial_state(rows)
        if settings.burn_in:
            actions = batch.action[:, :-1] if settings.burn_in_actions else None
            _, state = self.unroll(window[:, :-1], actions, state, reset[:, :-1])
        start = state = self.cleared(state, reset[:, -1])

        observation = window.new_empty(rows, settings.imagination_horizon + 1, *window.shape[2:])
        action = batch.action.new_empty(rows, settings.imagination_horizon, dtype=torch.int64)
        reward = batch.reward.new_empty(rows, settings.imagination_horizon)
        terminated = batch.terminated.new_empty(rows, settings.imagination_horizon)
        observation[:, 0] = window[:, -1]
        for t in range(settings.imagination_horizon):
            logits, _, state = self.policy(observation[:, t], state)
            action[:, t] = sample(logits, uniforms.action[t])
            state = self.follow(action[:, t], state)
            imagined, world_state = world_model.imagine(world_state, action[:, t], uniforms.world[t])
            reward[:, t] = imagined.reward
            terminated[:, t] = imagined.terminated
            observation[:, t + 1] = self.view(world_model, world_state)
        return Rollout(start, observation, action, reward, terminated)

    def loss(self, imagined: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Value, policy and entropy losses, with the decisions of the rollout computed once more in one batch.

        REINFORCE differentiates neither sampled actions nor the world model, so all that depends on the weights is the
        LSTM along recorded observations and actions, from a start state that is constant. Computing that again with a
        graph gives the gradient that a graph kept through imagination would, for the memory of the controller alone.

        Means over the first n - 1 evaluations, with G the lambda-return and [x] constant:
        (V - [G])^2  -  log pi(a) [G - V]  -  entropy weight * H(pi). Steps after an imagined termination count as well
        unless `learn_after_end` is off.
        """
        settings = self.settings
        hidden, _ = self.unroll(imagined.observation, imagined.action, imagined.start)
        logits, values = self._heads(hidden)  # (B, n, A), (B, n)
        target = lambda_returns(
            imagined.reward, values.detach(), imagined.terminated, settings.discount, settings.trace_decay
        )[:, :-1]
        value = values[:, :-1]
        log_policy = logits[:, :-1].log_softmax(-1)
        taken = log_policy.gather(-1, imagined.action[..., None]).squeeze(-1)

        counts = torch.ones_like(value)
        if not settings.learn_after_end:
            ends_before = imagined.terminated.cumsum(1) - imagined.terminated.long()
            counts = (ends_before == 0).to(value.dtype)

        def mean(x: Tensor) -> Tensor:
            return (x * counts).sum() / counts.sum()

        value_loss = mean((value - target).square())
        policy_loss = -mean(taken * (target - value.detach()))
        entropy = -mean((log_policy.exp() * log_policy).sum(-1))
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
        return total, {name: metric.detach() for name, metric in metrics.items()}

    def parameter_groups(self) -> list[dict[str, Any]]:
        """One group: weight decay applies to every parameter, biases and embeddings included (as in REM)."""
        return [{"params": list(self.parameters()), "weight_decay": self.settings.weight_decay}]

    # -- pieces ---

    def _encode(self, observation: Tensor) -> Tensor:
        """LSTM inputs (B, I) of features (B, D, h, w) or (B, D), or of images (B, H, W, C) uint8."""
        weight_type = self.lstm.weight_ih.dtype
        if self.settings.input == "pixels":
            # B H W C -> B C H W, bytes -> [-1, 1]
            observation = observation.permute(0, 3, 1, 2).to(weight_type) / 255 * 2 - 1
        return self.encoder(observation.to(weight_type)).to(weight_type)

    def _advance(self, inputs: Tensor, state: LSTMState) -> LSTMState:
        with torch.autocast(inputs.device.type, enabled=False):
            return self.lstm(inputs, state)

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (..., A) and values (...) of LSTM outputs (..., width)."""
        return self.policy_head(hidden), self.value_head(hidden).squeeze(-1)


def _latent_encoder(feature_shape: tuple[int, ...], channels: tuple[int, ...], width: int) -> tuple[nn.Sequential, int]:
    """3x3 convolutions with SiLU over the grid, flattened (C, h, w), dense with SiLU: (B, D, h, w) -> (B, width).

    Flat features (B, D) have no grid to go over: dense with SiLU.
    """
    if len(feature_shape) == 1:
        return nn.Sequential(nn.Linear(feature_shape[0], width), nn.SiLU()), width
    if len(feature_shape) != 3:
        raise UsageError(
            "controller.input = 'latent' needs features that are flat or on a grid (D, h, w), but this world model has"
            f" {feature_shape}; use --set controller.input=pixels"
        )
    depth, height, columns = feature_shape
    layers: list[nn.Module] = []
    for wide in channels:
        layers += [nn.Conv2d(depth, wide, 3, padding=1), nn.SiLU()]
        depth = wide
    layers += [Flatten(), nn.Linear(depth * height * columns, width), nn.SiLU()]
    return nn.Sequential(*layers), width


def _pixel_encoder(image_size: int, channels: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """3x3 convolution, max-pool by 2, ReLU for each of `channels`, flattened: (B, 3, H, W) -> (B, I)."""
    side, rest = divmod(image_size, 2 ** len(channels))
    if side == 0 or rest:
        raise UsageError(
            f"controller.pixel_channels has {len(channels)} layers and each halves the image, so environment.size ="
            f" {image_size} must be a multiple of {2 ** len(channels)}; change one of the two"
        )
    depth = 3
    layers: list[nn.Module] = []
    for wide in channels:
        layers += [nn.Conv2d(depth, wide, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        depth = wide
    return nn.Sequential(*layers, Flatten()), depth * side * side
