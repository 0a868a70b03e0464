"""The actor-critic of DreamerV3, STORM and Drama: two networks on one frame's features that learn from imagined
rollouts.

Sources: DreamerV3 (Hafner et al. 2023, arXiv 2301.04104), STORM (Zhang et al. 2023, NeurIPS, arXiv 2310.09615) and
Drama (Wang et al. 2025, ICLR, arXiv 2410.08893), whose public code gives the defaults where it differs from the papers.

B batch, T time (frames), A actions, F features of a frame, flattened.

The controller has no state between frames: the world model's features summarize the past. The critic predicts the value
as a distribution over bins (`wmcli.nn.two_hot`). A slow copy of itself regularizes it against divergence. Advantages
are divided by the range of the returns where that is above `least_range`.

A rollout of h imagined actions visits n = h + 1 states; the last one only supplies the value that the returns bootstrap
from.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

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
from wmcli.nn.categorical import mixed_log_probabilities, sample
from wmcli.nn.initialize import initialize
from wmcli.nn.layers import Float32Linear
from wmcli.nn.mlp import Activation, Norm, mlp
from wmcli.nn.running import RunningNormalizer, RunningRange
from wmcli.world_models.base import Batch, WorldModel


class ActorCriticSettings(ControllerSettings):
    """The actor-critic and its training; the defaults are those of Drama's public code."""

    kind: Literal["actor-critic"] = "actor-critic"
    """Feed-forward actor and critic on the world model's features (DreamerV3, STORM, Drama)."""
    actor_layers: int = Field(3, ge=1)
    """Hidden layers of the actor: 3 in Drama's code, 2 in its paper and in STORM. [layers]"""
    actor_width: int = Field(256, ge=1)
    """Width of the actor's hidden layers. [features]"""
    critic_layers: int = Field(3, ge=1)
    """Hidden layers of the critic. [layers]"""
    critic_width: int = Field(512, ge=1)
    """Width of the critic's hidden layers. [features]"""
    norm: Norm = "rms"
    """Norm after each hidden linear layer: "rms" (DreamerV3, Drama) or "layer" (STORM)."""
    activation: Activation = "silu"
    """Activation after each norm: "silu" (DreamerV3, Drama) or "relu" (STORM)."""
    initialization: Literal["orthogonal", "torch"] = "orthogonal"
    """Initialization of actor and critic: orthogonal, the last layers nearly 0 (Drama), or torch's default (STORM)."""
    input: Literal["state", "frame", "memory"] = "state"
    """Inputs of actor and critic: all features, those of the frame alone, or all features and the backbone's state. The
    last is the full state policy of Recall to Imagine (arXiv 2403.04253)."""
    normalize_inputs: bool = True
    """Normalize the actor's inputs by the running mean and variance of all features (Drama's code only)."""
    start: Literal["prior", "posterior"] = "prior"
    """First state of a rollout: imagined after the last real action (Drama, STORM), or that of the last real frame."""
    imagination_horizon: int = Field(16, ge=1)
    """Imagined actions in a rollout: 16 in Drama and STORM, 15 in DreamerV3. [decisions]"""
    discount: float = Field(0.985, ge=0, le=1)
    """Gamma, the discount of a reward one step later."""
    trace_decay: float = Field(0.95, ge=0, le=1)
    """Lambda of the lambda-returns: 0 uses the next value, 1 only the imagined rewards and the last value."""
    entropy_weight: float = Field(3e-4, ge=0)
    """Weight of the entropy bonus in the loss."""
    returns: Literal["v3", "drama", "storm"] = "v3"
    """Form of the lambda-returns (kernels/lambda_returns.py); Drama's code shifts them by one step."""
    slow_rate: float = Field(0.02, gt=0, le=1)
    """Fraction by which the slow critic moves towards the critic after each update."""
    slow_target: Literal["returns", "values"] = "returns"
    """Target of the slow loss: "returns" computed with the slow critic (Drama, STORM), or its "values" (DreamerV3)."""
    slow_weight: float = Field(1.0, ge=0)
    """Weight of the slow loss."""
    least_range: float = Field(1.0, gt=0)
    """Smallest range of the returns that advantages are divided by. With a small one, small rewards count as much as
    large ones, and errors of the value as much as rewards. [rewards]"""
    curiosity: float = Field(0.0, ge=0)
    """Weight of the disagreement of the world model's ensemble, which is added to the imagined rewards."""
    action_unimix: float = Field(0.0, ge=0, lt=1)
    """Share of the uniform distribution in the policy: 0.01 in DreamerV3."""
    weigh_by_continuation: bool = False
    """Weigh each step by the probability of reaching it, discount included (DreamerV3). Else all steps weigh the same,
    also after an imagined end (Drama, STORM)."""
    batch: int = Field(1024, ge=1)
    """Rollouts in an update. [sequences]"""
    updates: int = Field(100, ge=1)
    """Updates in one call of the stage. [updates]"""
    optimizer: Literal["laprop", "adamw", "adam"] = "laprop"
    """Optimizer: laprop in DreamerV3 and Drama, adam in STORM."""
    learning_rate: float = Field(4e-5, gt=0)
    """Learning rate after the warm-up: 4e-5 in DreamerV3 and Drama, 3e-5 in STORM."""
    warmup: int = Field(1000, ge=0)
    """Updates over which the learning rate rises linearly (laprop). [updates]"""
    eps: float = Field(0.0, ge=0)
    """Added to the root of the second moment: 1e-5 in STORM. 0 is the optimizer's own, 1e-20 for laprop (DreamerV3,
    Drama), 1e-8 for the others."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of every parameter; adam has none."""
    clip: float = Field(100.0, gt=0)
    """Largest norm of the gradient of all parameters."""

    @model_validator(mode="after")
    def _check_returns(self) -> ActorCriticSettings:
        if self.returns == "drama" and self.start != "prior":
            raise ValueError(
                "returns = 'drama' counts the reward that leads to the first state, which is imagined only with"
                " start = 'prior'; set that, or returns = 'v3'"
            )
        return self

    @property
    def imagined_frames(self) -> int:
        return self.imagination_horizon + (self.start == "prior")

    def build(self, world_model: WorldModel, size: int, wrap_repeated: Callable[[Callable], Callable]) -> ActorCritic:
        check_curiosity(self.curiosity, world_model)
        features = world_model.feature_shape
        if self.input == "frame":
            if world_model.frame_features is None:
                raise UsageError(
                    "controller.input = frame: this dynamics model has no features of the frame alone;"
                    " set controller.input=state."
                )
            features = (world_model.frame_features,)
        if self.input == "memory":
            if world_model.memory_features is None:
                raise UsageError(
                    "controller.input = memory: this dynamics model, on this backbone, keeps no state of a fixed size;"
                    " set controller.input=state, or another backbone.kind, for example s4."
                )
            features = (math.prod(features) + world_model.memory_features,)
        return ActorCritic(self, features, world_model.actions, window=world_model.context)


class FeatureRollout(NamedTuple):
    """Imagined rollouts of h actions through n = h + 1 states. Constants: they carry no gradient."""

    feature: Tensor
    """(B, n, F), the controller's inputs in each state."""
    action: Tensor
    """(B, h) int64, taken in each state but the last."""
    reward: Tensor
    """(B, n) float32, of the step that led to each state: that of action[:, t] is reward[:, t + 1]. The first is 0
    where the rollout starts at a real frame."""
    terminated: Tensor
    """(B, n) bool, of the step that led to each state: the task ended."""
    bonus: Tensor
    """(B, n) float32, for curiosity, of the step that led to each state."""
    valid: Tensor
    """(B,) bool: False where the first state would follow a real end, see `WorldModel.find_ends`."""


class ActorCritic(Learner):
    """Policy and value on the features of one frame.

    Hidden layers follow autocast. The last layers keep the precision of the weights, since differences of values are
    small. Values, returns and losses are float32.

    Args:
        settings: The section of the settings.
        feature_shape: Shape of its inputs, as `ActorCriticSettings.input` selects them.
        actions: Number of actions A.
        window: Real frames that imagination starts from.
    """

    def __init__(
        self, settings: ActorCriticSettings, feature_shape: tuple[int, ...], actions: int, window: int
    ) -> None:
        super().__init__()
        self.settings = settings
        self.actions = actions
        self.window = window
        features = math.prod(feature_shape)
        self.normalizer = RunningNormalizer(features) if settings.normalize_inputs else None
        self.actor = _network(settings, features, settings.actor_width, settings.actor_layers, actions)
        self.critic = _network(settings, features, settings.critic_width, settings.critic_layers, two_hot.BINS)
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.return_range = RunningRange()

    # -- one frame at a time ---

    def policy(self, feature: Tensor) -> Tensor:
        """Return log-probabilities (..., A) of the actions, given features (..., F)."""
        inputs = feature if self.normalizer is None else self.normalizer(feature)
        return mixed_log_probabilities(_run(self.actor, inputs), self.settings.action_unimix)

    def initial_state(self, batch: int) -> State:
        """Return an empty state."""
        return ()

    def clear_rows(self, state: State, reset: Tensor) -> State:
        """Return `state`, which is empty."""
        return state

    def decide(
        self, world_model: WorldModel, world_state: State, state: State, generator: torch.Generator | None = None
    ) -> tuple[Tensor, State]:
        """Return log-probabilities (B, A) for the last perceived frame. The normalizer is not updated."""
        return self.policy(self._read_features(world_model, world_state)), state

    def follow(self, action: Tensor, state: State) -> State:
        """Return `state`, which is empty."""
        return state

    def burn_in(self, world_model: WorldModel, world_state: State, action: Tensor, state: State) -> State:
        """Return `state`, which is empty."""
        return state

    # -- learning ---

    def draw_uniforms(self, world_model: WorldModel, batch: Batch) -> Uniforms:
        """Draw random numbers for a rollout from each window of `batch`."""
        horizon = self.settings.imagination_horizon
        return rollout_uniforms(world_model, batch, horizon, horizon + (self.settings.start == "prior"))

    @torch.no_grad()
    def imagine(self, world_model: WorldModel, batch: Batch, uniforms: Uniforms) -> FeatureRollout:
        """Observe the real windows of `batch` (B, window), then act in imagination.

        With start = "prior" the first state is imagined after the last real action; with "posterior" it is the last
        real frame. Padding before the first real frame (`valid` False) has no effect. Actions are sampled at
        temperature 1. A rollout continues past an imagined termination. See `Learner.imagine`.
        """
        assert not world_model.training, "dropout in imagination: call world_model.eval() first"
        assert batch.valid.shape[1] == self.window, (batch.valid.shape, self.window)
        _, state = world_model.observe(batch.inputs, batch.action, episode_starts(batch), uniforms.start)
        rows, horizon = batch.action.shape[0], self.settings.imagination_horizon
        action = batch.action.new_empty(rows, horizon, dtype=torch.int64)
        reward, bonus = batch.reward.new_zeros(2, rows, horizon + 1)
        terminated = batch.terminated.new_zeros(rows, horizon + 1)
        valid = batch.valid[:, -1]
        steps = iter(uniforms.world)
        if self.settings.start == "prior":
            valid = valid & ~world_model.find_ends(batch)[:, -1]
            imagined, state = world_model.imagine(state, batch.action[:, -1], next(steps))
            reward[:, 0], bonus[:, 0] = imagined.reward, curiosity_bonus(self.settings.curiosity, imagined)
            terminated[:, 0] = imagined.terminated
        first = self._read_features(world_model, state)
        feature = first.new_empty(rows, horizon + 1, first.shape[1])
        feature[:, 0] = first
        for t in range(horizon):
            action[:, t] = sample(self.policy(feature[:, t]), uniforms.action[t])
            imagined, state = world_model.imagine(state, action[:, t], next(steps))
            reward[:, t + 1], bonus[:, t + 1] = imagined.reward, curiosity_bonus(self.settings.curiosity, imagined)
            terminated[:, t + 1] = imagined.terminated
            feature[:, t + 1] = self._read_features(world_model, state)
        return FeatureRollout(feature, action, reward, terminated, bonus, valid)

    def loss(self, imagined: FeatureRollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the policy, value, slow and entropy losses, and recompute the rollout's decisions in one batch.

        Means over the h actions, with G the lambda-return, G' the target of `slow_target`, S the range of the returns,
        and [x] constant:

            -log pi(a) [(G - V) / max(1, S)]  +  CE(V, [G])  +  slow weight * CE(V, [G'])  -  entropy weight * H(pi)

        Neither sampled actions nor the world model are differentiated. The gradient is therefore that of a graph kept
        through imagination.

        In training mode the range is updated by the returns before its use. The normalizer is updated by the features
        after its use, so that the trained policy is the one that acted. In eval mode neither changes.
        """
        settings = self.settings
        value_logits = _run(self.critic, imagined.feature)  # (B, n, bins)
        value = two_hot.decode(value_logits.detach())  # (B, n)
        target = self._returns(imagined, value)  # (B, h), as all tensors below
        with torch.no_grad():
            slow_value = two_hot.decode(_run(self.slow_critic, imagined.feature))
        slow_target = self._returns(imagined, slow_value) if settings.slow_target == "returns" else slow_value[:, :-1]

        if self.training:
            self.return_range.update(target)
        scale = self.return_range()
        value, value_logits = value[:, :-1], value_logits[:, :-1]
        log_policy = self.policy(imagined.feature[:, :-1])  # (B, h, A)
        log_probability = log_policy.gather(-1, imagined.action[..., None]).squeeze(-1)
        weight = self._weights(imagined, value.dtype)

        policy_loss = -(weight * log_probability * (target - value) / scale.clamp(min=settings.least_range)).mean()
        value_loss = (weight * two_hot.loss(value_logits, target)).mean()
        slow_loss = (weight * two_hot.loss(value_logits, slow_target)).mean()
        entropy = -(weight * (log_policy.exp() * log_policy).sum(-1)).mean()
        total = policy_loss + value_loss + settings.slow_weight * slow_loss - settings.entropy_weight * entropy
        if self.training and self.normalizer is not None:
            self.normalizer.update(imagined.feature)
        metrics = {
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "slow_loss": slow_loss,
            "entropy": entropy,
            "value_mean": value.mean(),
            "imagined_return": target.mean(),
            "imagined_reward": imagined.reward[:, 1:].mean(),
            "imagined_terminations": imagined.terminated[:, 1:].float().mean(),
            "return_scale": scale,
        }
        if settings.curiosity:
            metrics["imagined_bonus"] = imagined.bonus[:, 1:].mean()
        return total, {name: metric.detach() for name, metric in metrics.items()}

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the slow critic towards the critic: slow <- (1 - rate) slow + rate critic."""
        slow: list[Tensor] = list(self.slow_critic.parameters())
        torch._foreach_lerp_(slow, list[Tensor](self.critic.parameters()), self.settings.slow_rate)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return one group, actor and critic. The slow critic gets no gradient."""
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        return [{"params": parameters, "weight_decay": self.settings.weight_decay}]

    # -- pieces ---

    def _read_features(self, world_model: WorldModel, state: State) -> Tensor:
        """Return the controller's inputs in the current frame, (B, F)."""
        features = world_model.features(state).flatten(1)
        if self.settings.input == "frame":
            return features[:, : world_model.frame_features]
        return torch.cat((features, world_model.memory(state)), 1) if self.settings.input == "memory" else features

    def _returns(self, rollout: FeatureRollout, value: Tensor) -> Tensor:
        """Compute lambda-returns (B, h) from values (B, n), in the form that the settings name."""
        settings = self.settings
        # Drama's code takes reward and termination at the index of the value: those that lead to the state.
        steps = slice(None, -1) if settings.returns == "drama" else slice(1, None)
        return lambda_returns(
            (rollout.reward + rollout.bonus)[:, steps],
            value,
            rollout.terminated[:, steps],
            settings.discount,
            settings.trace_decay,
            "next" if settings.returns == "v3" else "own",
        )[:, :-1]

    def _weights(self, rollout: FeatureRollout, dtype: torch.dtype) -> Tensor:
        """Return the weights (B, h) of the steps: 1, or discount^t up to a termination; 0 in rollouts that are not
        valid."""
        ended = rollout.terminated[:, :-1]
        valid = rollout.valid[:, None].to(dtype)
        if not self.settings.weigh_by_continuation:
            return valid.expand(ended.shape)
        steps = torch.arange(ended.shape[1], device=ended.device, dtype=dtype)
        return valid * (~ended).cumprod(1) * self.settings.discount**steps


def _network(settings: ActorCriticSettings, inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Build a stack of dense layers from (..., inputs) to (..., outputs)."""
    network = mlp(
        inputs,
        width,
        layers,
        outputs,
        norm_kind=settings.norm,
        activation=settings.activation,
        last_layer=Float32Linear,
    )
    initialize(network, settings.initialization)
    return network


def _run(network: nn.Sequential, x: Tensor) -> Tensor:
    """Apply a network to features of any precision."""
    return network(x.to(next(network.parameters()).dtype))
