"""UniZero: a world model to plan in, on any backbone.

A frame's latent and the action taken in it are two elements of the backbone. Its output at an action predicts the
outcome. Its output at a latent gives the policy and the value:

    z_t = SimNorm(encoder(o_t))        y_0, x_0, y_1, x_1, ... = backbone(z_0, a_0, z_1, a_1, ...)
    next latent z_{t+1}, reward r_t = heads(x_t)        policy, value = heads(y_t)

The encoder joins convolutions of the images with an MLP of all other parts. Nothing is decoded.

Source: UniZero (Pu et al. 2024, arXiv 2406.10667) and its public code opendilab/LightZero.

B batch, T time (frames), D width of the backbone, P outputs of the policy, K bins of a scalar. An observation is a tree
of parts, here called a frame. Time: see base.py.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, cache_dtype, state_tensors, with_tensors
from wmcli.errors import UsageError
from wmcli.nn import value_bins
from wmcli.nn.actions import action_embedding
from wmcli.nn.layers import Flatten, Float32Linear, at_least_float32
from wmcli.nn.mlp import LayerNorm
from wmcli.nn.observations import as_input, count_numbers, joint_image, split_parts
from wmcli.nn.policies import build_policy
from wmcli.nn.residual_trunk import ACTIVATIONS, Activation, ResidualTrunk, side
from wmcli.nn.simnorm import divergence, simnorm
from wmcli.spaces import ActionSpace, ObservationSpace, map_parts, to_action_space, to_observation_space
from wmcli.world_models.base import Batch, Elements, ImaginedStep, Parts, Prediction, masked_mean, part_of
from wmcli.world_models.planners import (
    BootstrappedWorldModel,
    Channels,
    PlanningSettings,
    acted_in,
    policy_terms,
)

INIT_STD = 0.02


class UniZeroSettings(PlanningSettings):
    """Settings of UniZero and its training. Defaults: the paper on attention priors (its baseline)."""

    kind: Literal["unizero"] = "unizero"
    """A policy and a value on a sequence of latents and actions, for planning."""
    sequence_length: int = Field(10, ge=2)
    """Training sequence length. [frames]"""
    context: int = Field(4, ge=2)
    """Real frames that acting and searching read, the current one included. A backbone without a limited number of
    positions carries its state beyond them. [frames]"""
    channels: Channels = (32, 64)
    """Channels of the encoder's convolutions, before and after its second halving. [channels]"""
    activation: Activation = "leaky_relu"
    """Activation of the encoder (public code: gelu_tanh)."""
    group: int = Field(8, ge=2)
    """Neighbors in a latent that sum to 1. [features]"""
    bound: int = Field(50, ge=1)
    """Index of the outermost bins of values and rewards, after squashing: 50 is 2364. [bins]"""
    latent_weight: float = Field(10.0, ge=0)
    """Weight of the loss of the next latent."""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the reward."""
    policy_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the policy."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the loss of the value."""
    entropy_weight: float = Field(1e-4, ge=0)
    """Weight of the policy's entropy (in nats) within its loss."""
    target_rate: float = Field(0.05, gt=0, le=1)
    """Fraction by which the target moves towards the model after each update."""
    batch: int = Field(64, ge=1)
    """Segments in an update. [sequences]"""
    optimizer: Literal["adamw", "adam", "laprop"] = "adamw"
    """Optimizer of all parameters."""
    learning_rate: float = Field(1e-4, gt=0)
    """Step size of the optimizer."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the optimizer's second moments."""
    clip: float = Field(5.0, gt=0)
    """Largest norm of the gradient of all parameters (public code: 20)."""
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""

    @model_validator(mode="after")
    def _check_lengths(self) -> UniZeroSettings:
        if self.context > self.sequence_length:
            raise ValueError(
                f"context = {self.context} must not be more than sequence_length = {self.sequence_length} frames."
            )
        return self

    def build(self, parts: Parts) -> UniZero:
        backbone = parts.square_backbone(2 * self.sequence_length, 2)
        return UniZero(self, backbone, parts.action_space, parts.observation_space)


class FrameEncoder(nn.Sequential):
    """Encodes frames, trees of (..., *part), as latents (..., D) float32, whose groups of `group` neighbors sum to 1.

    Its first three modules are the trunk of all images, its flattening, and the last layer. The last layer also reads
    `numbers`, an MLP of all other parts.
    """

    numbers: nn.Module | None

    def __init__(self, settings: UniZeroSettings, width: int, space: ObservationSpace) -> None:
        image, count = joint_image(space, settings.kind), count_numbers(space)
        trunk: nn.Module = nn.Identity()
        features = 0
        if image is not None:
            trunk = ResidualTrunk(image.channels, settings.channels, settings.activation)
            features = settings.channels[1] * side(image.height) * side(image.width)
        super().__init__(trunk, Flatten(), nn.Linear(features + (width if count else 0), width, bias=False))
        self.space = space
        self.group = settings.group
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
        self.numbers = _numbers(count, width, settings.activation) if count else None

    def forward(self, observation: Any) -> Tensor:
        images, numbers = split_parts(self.space, map_parts(as_input, self.space, observation))
        lead = images[0].shape[:-3] if images else numbers[0].shape[:-1]
        trunk, flatten, last = list(self)[:3]
        features = []
        if images:
            pixels = torch.cat(images, -3).flatten(0, -4).contiguous(memory_format=torch.channels_last)
            features.append(flatten(trunk(pixels.float().div_(255))))
        if self.numbers is not None:
            features.append(self.numbers(torch.cat(numbers, -1).flatten(0, -2)))
        return simnorm(last(torch.cat(features, -1)), self.group).unflatten(0, lead)


def _numbers(inputs: int, width: int, activation: Activation) -> nn.Sequential:
    """Build an MLP (B, inputs) -> (B, width) of two layers, each with norm and activation."""
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [nn.Linear(inputs, width, bias=False), LayerNorm(width), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers)


class UniZeroState(NamedTuple):
    """State of a trajectory: tensors (B, ...) of constant shape, so that a search stores it as a node unchanged."""

    tokens: Tensor
    """(B, W, D): the last elements, latents and actions in turn, right-aligned. The last is the current latent."""
    length: Tensor
    """(B,) int64: number of them that belong to the episode."""
    backbone_state: tuple[Tensor, ...]
    """Tensors of the backbone's state; empty if the backbone rereads the elements."""
    output: Tensor
    """(B, D) float32: output of the backbone at the current latent."""


class UniZero(BootstrappedWorldModel):
    """Learns latents, their transitions, rewards, a policy and a value.

    A latent depends on at most 2 * context - 1 elements, itself included. Beyond that the oldest frame is dropped. A
    backbone with learned positions (`max_length`) rereads the remaining elements at every imagined step, at positions
    from 0 on. This is exact. Any other backbone carries its state from node to node without a limit.

    Args:
        settings: Of the section `dynamics`.
        backbone: Of elements as wide as its outputs.
        actions: The actions, or the number of discrete ones.
        observation: What the environment shows, or the side of a square image in three colors.

    Raises:
        UsageError: The backbone's width is no multiple of the latent's groups, or images differ in size.
    """

    backbone: Any  # a Backbone; mypy takes attributes of modules for tensors

    def __init__(
        self,
        settings: UniZeroSettings,
        backbone: Backbone,
        actions: ActionSpace | int,
        observation: ObservationSpace | int,
    ) -> None:
        super().__init__()
        width = backbone.width
        if width % settings.group:
            raise UsageError(
                f"backbone.width = {width}: latents need a width divisible by dynamics.group = "
                f"{settings.group}; change one of the two"
            )
        assert backbone.max_length is None or backbone.max_length >= 2 * settings.sequence_length
        self.settings = settings
        self.observation_space = to_observation_space(observation)
        self.action_space = to_action_space(actions)
        self.distribution = build_policy(self.action_space, settings.continuous)
        self.discount = settings.discount
        self.context = settings.context
        self.segment = settings.sequence_length + settings.td_steps
        self.elements = 2
        self.feature_shape = (width,)
        self.past_elements = 2 * settings.context - 3  # elements that remain before the next action
        self.rereads = backbone.max_length is not None
        # The tree of a state's tensors.
        self._form = None if self.rereads else backbone.initial_state(0)
        self.encoder = FrameEncoder(settings, width, self.observation_space)
        self.action_embedding = action_embedding(self.action_space, width)
        self.backbone = backbone
        # Not in float32: its output is an element of the backbone, which autocast rounds anyway.
        self.latent_head = _head(width, width, nn.Linear)
        self.reward_head = _head(width, value_bins.bins(settings.bound))
        self.policy_head = _head(width, self.distribution.outputs)
        self.value_head = _head(width, value_bins.bins(settings.bound))
        self.termination_head = _head(width, 1) if settings.predict_termination else None
        nn.init.normal_(self.action_embedding.weight, std=INIT_STD)
        self._make_target("encoder", "action_embedding", "backbone", "value_head")

    @property
    def lookback(self) -> int:
        return self.settings.context - 1

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the target's parameters towards the model's. Its batch statistics come from its own passes."""
        for name, part in self.target.items():
            new = list(getattr(self, name).parameters())
            torch._foreach_lerp_(list(part.parameters()), new, self.settings.target_rate)

    # -- the parts ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Any) -> Tensor:
        """Encode frames, a tree of (B, T, *part), as latents (B, T, D)."""
        return self.encoder(observation)

    def elements_of(self, latent: Tensor, action: Tensor) -> Elements:
        return Elements(_pairs(latent, self.action_embedding(action)))

    def _next_latent(self, x: Tensor) -> Tensor:
        """Predict the latents (..., D) of the next frames from the outputs (..., D) at actions."""
        return simnorm(self.latent_head(x), self.settings.group)

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the weighted losses of next latent, reward, policy, value and termination, each a mean over real frames.

        The target encodes the label of a next latent, from the same frames and with their batch statistics. The policy
        is learned only in frames with a search. The frame that closes an episode counts as a next frame, and for the
        value to which a return leads.

        Fresh weights predict uniform latents. `latent_loss` therefore begins at ln `group` less the entropy of the
        labels. This is 0.7 to 1 at the paper's size, as in the public code.

        Args:
            batch: Its `inputs` hold frames (B, sequence_length + td_steps, *part). It learns from the first
                `sequence_length`.

        Returns:
            The loss and the metrics `latent_loss` (KL, nats a group), `reward_loss`, `policy_loss`, `value_loss` (cross
                entropies, nats), `termination_loss` if it is learned, `policy_entropy` (nats) and `value_mean`
                (discounted reward).
        """
        s = self.settings
        part = part_of(batch, slice(s.sequence_length))
        valid, acted, weight = part.valid, acted_in(part), batch.weight
        z = self.encoder(part.inputs)
        y, x = self._read_pairs(z, part.action, self.action_embedding, self.backbone)
        value_target, has_return = self._value_targets(
            batch, s.sequence_length, lambda at: self._target_values(batch, at)
        )
        label = self._labels(part.inputs)  # after the values: it moves the statistics that these use

        latent_losses = divergence(label[:, 1:], self._next_latent(x[:, :-1]), s.group)
        latent_loss = masked_mean(latent_losses, valid[:, 1:], weight)
        reward_loss = masked_mean(value_bins.loss(self.reward_head(x), part.reward), acted, weight)
        value = self.value_head(y)
        value_loss = masked_mean(value_bins.loss(value, value_target), has_return, weight)
        policy = policy_terms(self.policy_head(y), part, self.distribution)
        policy_loss = masked_mean(policy.loss, policy.mask, weight)
        entropy = masked_mean(policy.entropy, policy.mask, weight)

        total = s.latent_weight * latent_loss + s.reward_weight * reward_loss + s.value_weight * value_loss
        total = total + s.policy_weight * (policy_loss - s.entropy_weight * entropy)
        log = {
            "latent_loss": latent_loss,
            "reward_loss": reward_loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "policy_entropy": masked_mean(policy.entropy, acted),
            "value_mean": masked_mean(value_bins.decode(value), acted),
        }
        if self.termination_head is not None:
            termination_losses = self._termination_losses(self.termination_head(x), self._ended(part))
            log["termination_loss"] = masked_mean(termination_losses, acted, weight)
            total = total + log["termination_loss"]
        return total, {name: each.detach() for name, each in log.items()}

    @staticmethod
    def _read_pairs(z: Tensor, action: Tensor, embedding: Any, backbone: Any) -> tuple[Tensor, Tensor]:
        """Return the outputs at latents and at actions, each (B, T, D), of a sequence without a past.

        Args:
            z: Latents (B, T, D).
            action: (B, T, ...).
            embedding: Of actions.
            backbone: The model's or the target's.
        """
        pairs, _ = backbone(_pairs(z, embedding(action)), None)
        y, x = pairs.unflatten(1, (-1, 2)).unbind(2)
        return y, x

    @torch.no_grad()
    def _labels(self, frames: Any) -> Tensor:
        """Return the target's latents of frames (B, T, *part), in training with their batch statistics."""
        encoder = self.target["encoder"].train(self.training)
        label = encoder(frames)
        encoder.eval()
        return label

    def _target_values(self, batch: Batch, where: Tensor) -> Tensor:
        """Return the target's values (B, F) of frames `where` (B, F), ascending.

        It reads F frames from the first of them on.
        """
        frames = where[:, :1] + torch.arange(where.shape[1], device=where.device)
        rows = torch.arange(len(where), device=where.device)[:, None]
        encoder, embedding, backbone, head = self.target.values()
        z = encoder(map_parts(lambda part: part[rows, frames], batch.inputs))
        y, _ = self._read_pairs(z, batch.action[rows, frames], embedding, backbone)
        return value_bins.decode(head(y)).gather(1, where - where[:, :1])

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, UniZeroState]:
        """Read every frame with as much of its past as acting would have. See `WorldModel.observe`."""
        rows, time = reset.shape
        window = 2 * self.context - 1
        tokens = _pairs(self._token(latent), self._token(self.action_embedding(action)))
        windows = F.pad(tokens, (0, 0, window - 1, 0)).unfold(1, window, 2).mT  # (B, T, window, D)
        steps = torch.arange(time, device=reset.device)
        since = steps - torch.where(reset, steps, 0).cummax(1).values  # frames since the last reset
        length = (2 * since + 1).clamp(max=window)
        features, _ = self._read(windows.flatten(0, 1), length.flatten(), None)
        features = features.unflatten(0, (rows, time))
        return features, self._state(windows[:, -1], length[:, -1])

    @torch.no_grad()
    def imagine(
        self, state: UniZeroState, action: Tensor, uniforms: Tensor | None = None
    ) -> tuple[ImaginedStep, UniZeroState]:
        """Take one deterministic step: expected reward and next latent, and the likelier termination."""
        act = self._token(self.action_embedding(action))
        if self.rereads:
            backbone_state = self.backbone.initial_state(len(act))
            x, backbone_state = self._read(torch.cat((state.tokens, act[:, None]), 1), state.length + 1, backbone_state)
        else:
            x, backbone_state = self.backbone.step(
                at_least_float32(act), with_tensors(self._form, state.backbone_state)
            )
        z = self._token(self._next_latent(x))
        output, backbone_state = self.backbone.step(at_least_float32(z), backbone_state)
        limit = state.tokens.shape[1]
        after = UniZeroState(
            torch.cat((state.tokens, act[:, None], z[:, None]), 1)[:, -limit:],
            (state.length + 2).clamp(max=limit),
            () if self.rereads else tuple(state_tensors(backbone_state)),
            at_least_float32(output),
        )
        reward = value_bins.decode(self.reward_head(x))
        if self.termination_head is None:
            terminated = torch.zeros_like(reward, dtype=torch.bool)
        else:
            terminated = self.termination_head(x).squeeze(-1) > 0
        return ImaginedStep(self.latent(after), reward, terminated), after

    def root(self, state: UniZeroState) -> UniZeroState:
        """Drop the elements that the backbone's state already includes, all but the current latent."""
        if self.rereads:
            return state
        return state._replace(tokens=state.tokens[:, -1:], length=torch.ones_like(state.length))

    @torch.no_grad()
    def predict(self, state: UniZeroState) -> Prediction:
        """Predict outputs of the policy (B, P) and value (B,) of the current frame."""
        return Prediction(
            at_least_float32(self.policy_head(state.output)), value_bins.decode(self.value_head(state.output))
        )

    def features(self, state: UniZeroState) -> Tensor:
        """Return the backbone's output at the current latent, (B, D) float32."""
        return state.output

    def latent(self, state: UniZeroState) -> Tensor:
        """Return the current frame's latent, (B, D)."""
        return at_least_float32(state.tokens[:, -1])

    # -- acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def perceive(
        self,
        state: UniZeroState | None,
        observation: Any,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> UniZeroState:
        """Read one real frame by rereading the last `context` frames of the episode."""
        z = self._token(self.encode(map_parts(lambda part: part[:, None], observation)))
        if state is None:
            tokens = z.new_zeros(len(z), self.past_elements, z.shape[2])
            length = torch.ones_like(reset, dtype=torch.int64)
        else:
            tokens = state.tokens
            length = (state.length + 2).masked_fill(reset, 1)
        act = self._token(self.action_embedding(previous_action))
        return self._state(torch.cat((tokens, act[:, None], z), 1), length)

    def _state(self, window: Tensor, length: Tensor) -> UniZeroState:
        """Read a window (B, 2 * context - 1, D), of which the last `length` (B,) elements are real."""
        backbone_state = None if self.rereads else self.backbone.initial_state(len(window))
        output, backbone_state = self._read(window, length, backbone_state)
        past = window[:, -self.past_elements :]
        return UniZeroState(past, length.clamp(max=self.past_elements), tuple(state_tensors(backbone_state)), output)

    def _read(self, window: Tensor, length: Tensor, backbone_state: Any) -> tuple[Tensor, Any]:
        """Return the output at the last of W elements (B, W, D), of which `length` (B,) are real, and the state."""
        reset = torch.arange(window.shape[1], device=window.device) == (window.shape[1] - length)[:, None]
        y, backbone_state = self.backbone.read(at_least_float32(window), backbone_state, reset)
        return at_least_float32(y), backbone_state

    def _token(self, element: Tensor) -> Tensor:
        """Convert an element to the precision of the backbone's projections, in which a window keeps it."""
        return element.to(cache_dtype(self.action_embedding.weight))


def _pairs(latent: Tensor, action: Tensor) -> Tensor:
    """Return latents and embedded actions, (B, T, D) each, in turn: (B, 2 T, D)."""
    return torch.stack((latent, action), 2).flatten(1, 2)


def _head(width: int, outputs: int, last_layer: type[nn.Linear] = Float32Linear) -> nn.Sequential:
    """Build a head from (..., width) to (..., outputs) that at first returns zero."""
    hidden, last = nn.Linear(width, width), last_layer(width, outputs)
    nn.init.normal_(hidden.weight, std=INIT_STD)
    for zero in (hidden.bias, last.weight, last.bias):
        nn.init.zeros_(zero)
    return nn.Sequential(hidden, nn.GELU(approximate="tanh"), last)
