"""The actor-critic of DreamerV3, STORM and Drama: two networks on one frame's features that learn from imagined
rollouts.

Sources: DreamerV3 (Hafner et al. 2023, arXiv 2301.04104), STORM (Zhang et al. 2023, NeurIPS, arXiv 2310.09615) and
Drama (Wang et al. 2025, ICLR, arXiv 2410.08893), whose public code gives the defaults where it differs from the papers.

B batch (windows), T time (frames), K frames of a window that a rollout starts from, R rollouts, one for each of these
B K frames, F features of a frame, flattened, P parameters of the policy.

The controller has no state between frames: the world model's features summarize the past. The critic predicts the value
as a distribution over bins (`wmcli.nn.two_hot`). A slow copy of itself regularizes it against divergence. Advantages
are divided by the range of the returns where that is above `least_range`.

A rollout of h imagined actions visits n = h + 1 states; the last one only supplies the value that the returns bootstrap
from.

The policy learns by REINFORCE, on any action space, or by the gradient of the returns through the world model, where
actions are continuous (`gradient`). The second is how DreamerV1 and V2, and V3's first version, learn continuous
control.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.func import functional_call

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
from wmcli.nn.initialize import initialize, scale_last
from wmcli.nn.layers import Float32Linear
from wmcli.nn.mlp import Activation, Norm, mlp
from wmcli.nn.policies import ContinuousKind, NormalPolicy, build_policy
from wmcli.nn.running import RunningNormalizer, RunningRange
from wmcli.nn.two_hot import TwoHot
from wmcli.spaces import ActionSpace, to_action_space
from wmcli.world_models.base import Batch, ImaginedStep, WorldModel

FIRST_POLICY = 0.01  # factor of the actor's last weights in DreamerV3


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
    norm_eps: float = Field(0.0, ge=0)
    """Epsilon of the norms; 0 is 1e-6 for RMSNorm and 1e-5 for LayerNorm (DreamerV3: 1e-4)."""
    initialization: Literal["orthogonal", "torch", "fan-in"] = "orthogonal"
    """Initialization of actor and critic: orthogonal, the last layers nearly 0 (Drama); torch's default (STORM); or by
    the fan in, the actor's last layer times 0.01 and the critic's 0 (DreamerV3)."""
    continuous: ContinuousKind = "normal"
    """Policy of continuous actions: normal, its mean in (-1, 1) and deviation in (0.1, 1) (DreamerV3), the same
    truncated to [-1, 1], or 15 bins for each number. No effect on discrete actions."""
    gradient: Literal["reinforce", "reparameterized"] = "reinforce"
    """Gradient of the policy: REINFORCE, or that of the returns through the imagined frames and sampled actions, which
    needs a normal policy and dynamics.kind = "latent"."""
    two_hot: TwoHot = "symlog"
    """Space in which values are divided between bins and averaged: symlog space, or symexp, that of the returns
    themselves (DreamerV3's code since 2024)."""
    input: Literal["state", "frame", "memory"] = "state"
    """Inputs of actor and critic: all features, those of the frame alone, or all features and the backbone's state. The
    last is the full state policy of Recall to Imagine (arXiv 2403.04253)."""
    normalize_inputs: bool = True
    """Normalize the actor's inputs by the running mean and variance of all features (Drama's code only)."""
    start: Literal["prior", "posterior"] = "prior"
    """First state of a rollout: imagined after the last real action (Drama, STORM), or that of the last real frame."""
    starts: int = Field(1, ge=1)
    """Last frames of each window that a rollout starts from, up to dynamics.context. More than 1 needs
    start = "posterior" and a recurrent posterior. DreamerV3 starts from all. [frames]"""
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
    replay_weight: float = Field(0.0, ge=0)
    """Weight of the value loss on the real frames that rollouts start from, with the real rewards (DreamerV3: 0.3).
    Above 0 it needs `starts` of at least 2."""
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
    expected_continuation: bool = False
    """Discount by the predicted probability that the task goes on (DreamerV3), in place of imagined terminations."""
    batch: int = Field(1024, ge=1)
    """Windows in an update, with `starts` rollouts each. [sequences]"""
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
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""
    agc: float = Field(0.0, ge=0)
    """Adaptive gradient clipping: largest norm of a tensor's gradient as a share of the tensor's own, 0.3 in DreamerV3;
    0 for none."""

    @model_validator(mode="after")
    def _check_starts(self) -> ActorCriticSettings:
        if self.starts > 1 and self.start != "posterior":
            raise ValueError(f"starts = {self.starts} needs start = 'posterior': rollouts begin at real frames")
        if self.replay_weight and self.starts < 2:
            raise ValueError(
                f"replay_weight = {self.replay_weight} needs starts of at least 2: values of real frames bootstrap from"
                " the rollouts of the frames behind them"
            )
        if self.expected_continuation and (self.returns != "v3" or not self.weigh_by_continuation):
            raise ValueError("expected_continuation = true needs returns = 'v3' and weigh_by_continuation = true")
        return self

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

    def build(self, world_model: WorldModel, wrap_repeated: Callable[[Callable], Callable]) -> ActorCritic:
        check_curiosity(self.curiosity, world_model)
        self._check_world_model(world_model)
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
        return ActorCritic(self, features, world_model.action_space, window=world_model.context)

    def _check_world_model(self, world_model: WorldModel) -> None:
        """Raise UsageError if the world model cannot do what the settings ask for."""
        if self.gradient == "reparameterized":
            if not world_model.differentiable:
                raise UsageError(
                    "controller.gradient = reparameterized: imagination of this dynamics model has no gradient;"
                    " set controller.gradient=reinforce, or dynamics.kind=latent."
                )
            if not isinstance(build_policy(world_model.action_space, self.continuous), NormalPolicy):
                raise UsageError(
                    "controller.gradient = reparameterized needs continuous actions and a normal policy;"
                    " set controller.gradient=reinforce."
                )
        if self.starts > world_model.context:
            raise UsageError(
                f"controller.starts = {self.starts}: windows have dynamics.context = {world_model.context} frames; set"
                f" controller.starts={world_model.context}, or a larger dynamics.context."
            )
        if self.starts > 1 and not world_model.starts_anywhere:
            raise UsageError(
                f"controller.starts = {self.starts}: this dynamics model imagines from the last frame of a window"
                " alone; set controller.starts=1, or dynamics.posterior=recurrent."
            )


class ReplayedFrames(NamedTuple):
    """The outcomes of the K real frames of each window that rollouts start from. Constants."""

    reward: Tensor
    """(B, K) float32, of the action taken in each frame."""
    terminated: Tensor
    """(B, K) bool, likewise."""
    is_known: Tensor
    """(B, K) bool: a real frame with an action, whose successor, if there is one, is the next frame of the window."""


class FeatureRollout(NamedTuple):
    """Imagined rollouts of h actions through n = h + 1 states. Constants, unless the gradient is reparameterized."""

    feature: Tensor
    """(R, n, F), the controller's inputs in each state."""
    action: Tensor
    """(R, h, ...), taken in each state but the last."""
    reward: Tensor
    """(R, n) float32, of the step that led to each state: that of action[:, t] is reward[:, t + 1]. The first is 0
    where the rollout starts at a real frame."""
    terminated: Tensor
    """(R, n) bool, of the step that led to each state: the task ended."""
    bonus: Tensor
    """(R, n) float32, for curiosity, of the step that led to each state."""
    valid: Tensor
    """(R,) bool: False where the first state is no real frame, or would follow a real end, see `WorldModel.find_ends`.
    """
    continuation: Tensor | None = None
    """(R, n) float32, probability that the task went on in the step that led to each state; None if it is not used."""
    replayed: ReplayedFrames | None = None
    """Where `replay_weight` is above 0."""


class ActorCritic(Learner):
    """Policy and value on the features of one frame.

    Hidden layers follow autocast. The last layers keep the precision of the weights, since differences of values are
    small. Values, returns and losses are float32.

    Args:
        settings: The section of the settings.
        feature_shape: Shape of its inputs, as `ActorCriticSettings.input` selects them.
        actions: The action space, or the number of actions.
        window: Real frames that imagination starts from.
    """

    def __init__(
        self,
        settings: ActorCriticSettings,
        feature_shape: tuple[int, ...],
        actions: ActionSpace | int,
        window: int,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.action_space = to_action_space(actions)
        self.distribution = build_policy(self.action_space, settings.continuous)
        self.window = window
        self.differentiates = settings.gradient == "reparameterized"
        features = math.prod(feature_shape)
        self.normalizer = RunningNormalizer(features) if settings.normalize_inputs else None
        self.actor = _network(
            settings, features, settings.actor_width, settings.actor_layers, self.distribution.outputs, FIRST_POLICY
        )
        self.critic = _network(settings, features, settings.critic_width, settings.critic_layers, two_hot.BINS, 0.0)
        self.slow_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.return_range = RunningRange()

    # -- one frame at a time ---

    def policy(self, feature: Tensor) -> Tensor:
        """Return the policy's parameters (..., P), given features (..., F): log-probabilities of discrete actions."""
        inputs = feature if self.normalizer is None else self.normalizer(feature)
        return self.distribution.parameters(_run(self.actor, inputs), self.settings.action_unimix)

    def decide(
        self, world_model: WorldModel, world_state: State, state: State, generator: torch.Generator | None = None
    ) -> tuple[Tensor, State]:
        """Return the policy's parameters (B, P) for the last perceived frame. The normalizer is not updated."""
        return self.policy(self._read_features(world_model, world_state)), state

    def value(self, world_model: WorldModel, world_state: State, state: State) -> Tensor:
        """Return the value (B,) of the last perceived frame. The critic reads features as they are."""
        return two_hot.decode(_run(self.critic, self._read_features(world_model, world_state)), self.settings.two_hot)

    # -- learning ---

    def draw_uniforms(self, world_model: WorldModel, batch: Batch) -> Uniforms:
        """Draw random numbers for the rollouts from each window of `batch`."""
        settings, horizon = self.settings, self.settings.imagination_horizon
        steps = horizon + (settings.start == "prior")
        return rollout_uniforms(world_model, batch, self.distribution, horizon, steps, settings.starts)

    def imagine(self, world_model: WorldModel, batch: Batch, uniforms: Uniforms) -> FeatureRollout:
        """Observe the real windows of `batch` (B, window), then act in imagination.

        With start = "prior" the first state is imagined after the last real action; with "posterior" it is the last
        real frame, or with `starts` each of the last ones. Padding before the first real frame (`valid` False) has no
        effect. Actions are sampled at temperature 1. A rollout continues past an imagined termination. See
        `Learner.imagine`. Features and rewards depend on the actor's weights where `differentiates`.
        """
        assert not world_model.training, "dropout in imagination: call world_model.eval() first"
        assert batch.valid.shape[1] == self.window, (batch.valid.shape, self.window)
        settings = self.settings
        with torch.no_grad():
            state, valid = self._start(world_model, batch, uniforms)
        steps = iter(uniforms.world)
        with torch.set_grad_enabled(self.differentiates and torch.is_grad_enabled()):
            nothing = torch.zeros(len(valid), dtype=batch.reward.dtype, device=valid.device)
            reward, bonus, continuation = [nothing], [nothing], [torch.ones_like(nothing)]
            terminated = [torch.zeros_like(valid)]
            if settings.start == "prior":
                imagined, state = world_model.imagine(state, batch.action[:, -1], next(steps))
                reward, bonus = [imagined.reward], [curiosity_bonus(settings.curiosity, imagined)]
                terminated, continuation = [imagined.terminated], [self._continuation(imagined)]
            feature, action = [self._read_features(world_model, state)], []
            for t in range(settings.imagination_horizon):
                action.append(self.distribution.sample(self.policy(feature[t]), uniforms.action[t]))
                imagined, state = world_model.imagine(state, action[t], next(steps))
                reward.append(imagined.reward)
                bonus.append(curiosity_bonus(settings.curiosity, imagined))
                terminated.append(imagined.terminated)
                continuation.append(self._continuation(imagined))
                feature.append(self._read_features(world_model, state))
            return FeatureRollout(
                torch.stack(feature, 1),
                torch.stack(action, 1),
                torch.stack(reward, 1),
                torch.stack(terminated, 1),
                torch.stack(bonus, 1),
                valid,
                torch.stack(continuation, 1) if settings.expected_continuation else None,
                self._replayed(batch) if settings.replay_weight else None,
            )

    def _start(self, world_model: WorldModel, batch: Batch, uniforms: Uniforms) -> tuple[State, Tensor]:
        """Return the states (R rows) after the real frames, and (R,) bool: whether a rollout from there counts."""
        starts = self.settings.starts
        arguments = batch.inputs, batch.action, episode_starts(batch), uniforms.start
        if starts > 1:
            _, state = world_model.observe_each(*arguments, last=starts)
        else:
            _, state = world_model.observe(*arguments)
        valid = batch.valid[:, -starts:]
        if self.settings.start == "prior":
            valid = valid & ~world_model.find_ends(batch)[:, -1:]
        if batch.is_closing is not None:  # nothing follows the frame in which a task ends
            valid = valid & ~(batch.is_closing & batch.terminated)[:, -starts:]
        return state, valid.flatten()

    def _continuation(self, step: ImaginedStep) -> Tensor:
        """Return the probability (R,) that the task goes on after an imagined step."""
        return (~step.terminated).to(step.reward.dtype) if step.continuation is None else step.continuation

    def _replayed(self, batch: Batch) -> ReplayedFrames:
        """Return the outcomes of the last K frames of the windows."""
        starts = self.settings.starts
        is_followed = torch.cat((~batch.is_first[:, 1:], torch.zeros_like(batch.is_first[:, :1])), 1)
        is_known = batch.valid & (batch.terminated | is_followed)
        if batch.is_closing is not None:
            is_known = is_known & ~batch.is_closing
        return ReplayedFrames(batch.reward[:, -starts:], batch.terminated[:, -starts:], is_known[:, -starts:])

    def loss(self, imagined: FeatureRollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the policy, value, slow, entropy and replay losses, and recompute the rollout's decisions in one batch.

        Means over the h actions, with G the lambda-return, G' the target of `slow_target`, S the range of the returns,
        and [x] constant:

            -log pi(a) [(G - V) / max(1, S)]  +  CE(V, [G])  +  slow weight * CE(V, [G'])  -  entropy weight * H(pi)

        Neither sampled actions nor the world model are differentiated. The gradient is therefore that of a graph kept
        through imagination. With gradient = "reparameterized" the first term is -G / [max(1, S)]. There G has a
        gradient through rewards and features, and none to the critic's weights.

        In training mode the range is updated by the returns before its use. The normalizer is updated by the features
        after its use, so that the trained policy is the one that acted. In eval mode neither changes.
        """
        settings, feature = self.settings, imagined.feature.detach()
        value_logits = _run(self.critic, feature)  # (R, n, bins)
        value = two_hot.decode(value_logits.detach(), settings.two_hot)  # (R, n)
        returns = self._returns(imagined, self._value_along(imagined) if self.differentiates else value)
        target = returns.detach()  # (R, h), as all tensors below
        with torch.no_grad():
            slow_value = two_hot.decode(_run(self.slow_critic, feature), settings.two_hot)
        slow_target = self._returns(imagined, slow_value) if settings.slow_target == "returns" else slow_value[:, :-1]

        if self.training:
            self.return_range.update(target)
        scale = self.return_range()
        least_scale = scale.clamp(min=settings.least_range)
        first_logits = value_logits[:, 0]
        value, value_logits = value[:, :-1], value_logits[:, :-1]
        parameters = self.policy(feature[:, :-1])  # (R, h, P)
        weight = self._weights(imagined, value.dtype)

        if self.differentiates:
            policy_loss = -(weight * returns / least_scale).mean()
        else:
            log_probability = self.distribution.log_probability(parameters, imagined.action)
            policy_loss = -(weight * log_probability * (target - value) / least_scale).mean()
        value_loss = (weight * two_hot.loss(value_logits, target, settings.two_hot)).mean()
        slow_loss = (weight * two_hot.loss(value_logits, slow_target, settings.two_hot)).mean()
        entropy = (weight * self.distribution.entropy(parameters)).mean()
        total = policy_loss + value_loss + settings.slow_weight * slow_loss - settings.entropy_weight * entropy
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
        if imagined.replayed is not None:
            metrics["replay_loss"] = self._replay_loss(imagined.replayed, first_logits, target[:, 0], slow_value[:, 0])
            total = total + settings.replay_weight * metrics["replay_loss"]
        if self.training and self.normalizer is not None:
            self.normalizer.update(feature)
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

    def _value_along(self, imagined: FeatureRollout) -> Tensor:
        """Return values (R, n) with a gradient through the features and none to the critic's weights."""
        constants = {name: weight.detach() for name, weight in self.critic.named_parameters()}
        inputs = imagined.feature.to(next(self.critic.parameters()).dtype)
        return two_hot.decode(functional_call(self.critic, constants, (inputs,)), self.settings.two_hot)

    def _returns(self, rollout: FeatureRollout, value: Tensor) -> Tensor:
        """Compute lambda-returns (R, h) from values (R, n), in the form that the settings name."""
        settings = self.settings
        if rollout.continuation is not None:
            reward, live = rollout.reward + rollout.bonus, settings.discount * rollout.continuation
            return _mixed_returns(reward[:, 1:], value, live[:, 1:], torch.full_like(live[:, 1:], settings.trace_decay))
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

    def _replay_loss(self, replayed: ReplayedFrames, logits: Tensor, imagined: Tensor, slow_value: Tensor) -> Tensor:
        """Return the value and slow losses on the real frames but the last of each window, whose successor is unknown.

        The target is the lambda-return of the real rewards. It bootstraps from the imagined returns.

        Args:
            replayed: Outcomes of the frames.
            logits: (B K, bins), of the critic.
            imagined: (B K,), lambda-returns of the rollouts that start there.
            slow_value: (B K,), of the slow critic.
        """
        settings, shape = self.settings, replayed.reward.shape
        target = _mixed_returns(
            replayed.reward[:, :-1],
            imagined.view(shape),
            settings.discount * (~replayed.terminated[:, :-1]).to(imagined.dtype),
            settings.trace_decay * replayed.is_known[:, 1:].to(imagined.dtype),
        )
        logits = logits.unflatten(0, shape)[:, :-1]
        losses = two_hot.loss(logits, target, settings.two_hot)
        losses = losses + settings.slow_weight * two_hot.loss(logits, slow_value.view(shape)[:, :-1], settings.two_hot)
        return (replayed.is_known[:, :-1] * losses).mean()

    def _weights(self, rollout: FeatureRollout, dtype: torch.dtype) -> Tensor:
        """Return the weights (R, h) of the steps: 1, or discount^t up to a termination; 0 in rollouts that are not
        valid."""
        ended = rollout.terminated[:, :-1]
        valid = rollout.valid[:, None].to(dtype)
        if not self.settings.weigh_by_continuation:
            return valid.expand(ended.shape)
        steps = torch.arange(ended.shape[1], device=ended.device, dtype=dtype)
        alive = (~ended).cumprod(1)
        if rollout.continuation is not None:
            alive = rollout.continuation[:, :-1].detach().to(dtype).cumprod(1)
        return valid * alive * self.settings.discount**steps


def _mixed_returns(reward: Tensor, bootstrap: Tensor, live: Tensor, trace: Tensor) -> Tensor:
    """Compute lambda-returns with a discount and a lambda of each step, which `lambda_returns` has not.

        G[n-1] = V[n-1],   G[t] = r[t] + live[t] ((1 - trace[t]) V[t+1] + trace[t] G[t+1])

    Args:
        reward: r, (N, n - 1), of the action in state t.
        bootstrap: V, (N, n).
        live: (N, n - 1), discount times the probability that the task goes on after the action.
        trace: (N, n - 1), lambda; 0 where the return of the next state is not to be used.

    Returns:
        (N, n - 1).
    """
    mixed, returns = bootstrap[:, -1], []
    for t in reversed(range(reward.shape[1])):
        mixed = reward[:, t] + live[:, t] * torch.lerp(bootstrap[:, t + 1], mixed, trace[:, t])
        returns.append(mixed)
    return torch.stack(returns[::-1], 1)


def _network(
    settings: ActorCriticSettings, inputs: int, width: int, layers: int, outputs: int, last: float
) -> nn.Sequential:
    """Build a stack of dense layers from (..., inputs) to (..., outputs).

    With initialization = "fan-in" the weights of the last layer are multiplied by `last`.
    """
    network = mlp(
        inputs,
        width,
        layers,
        outputs,
        norm_kind=settings.norm,
        activation=settings.activation,
        eps=settings.norm_eps,
        last_layer=Float32Linear,
    )
    initialize(network, settings.initialization)
    if settings.initialization == "fan-in":
        scale_last(network, last)
    return network


def _run(network: nn.Sequential, x: Tensor) -> Tensor:
    """Apply a network to features of any precision."""
    return network(x.to(next(network.parameters()).dtype))
