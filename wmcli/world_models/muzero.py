"""MuZero for frames: a convolutional world model to plan in, unrolled a few steps from a stack of frames.

    s_0 = representation(o_{t-3}, ..., o_t)        s_{k+1} = dynamics(s_k, a_{t+k})
    reward r_{t+k} = head(s_{k+1})        policy, value of frame t + k = heads(s_k)

All parts are convolutions on gray frames. A consistency loss pulls each predicted state towards the representation of
the true frame. Values end in those of the *target*, a copy that is renewed every `target_every` updates.

Sources: MuZero (Schrittwieser et al. 2020, arXiv 1911.08265) as LightZero trains it on Atari 100k (Niu et al. 2023,
arXiv 2310.08348); consistency and shifts of EfficientZero (Ye et al. 2021, arXiv 2111.00210), after SimSiam (Chen & He
2021, arXiv 2011.10566).

B batch, T time (frames), N frames of a stack, C channels, h w height and width of a state, A actions, H W image. Time:
see base.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.nn import value_bins
from wmcli.nn.categorical import one_hot
from wmcli.nn.layers import BatchNorm2d, Flatten, Float32Linear
from wmcli.nn.residual_trunk import ResidualTrunk, TrunkBlock, conv, side
from wmcli.world_models.base import Batch, ImaginedStep, Parts, Prediction, masked_mean, weighed
from wmcli.world_models.planners import (
    BootstrappedWorldModel,
    Channels,
    PlanningSettings,
    Positive,
    part_of,
    policy_terms,
)

LUMINANCE = (299, 587, 114)  # of red, green and blue, in thousandths (ITU-R BT.601)


class MuZeroSettings(PlanningSettings):
    """Settings of MuZero and its training. Defaults: LightZero's for Atari 100k."""

    uses_backbone: ClassVar[bool] = False

    kind: Literal["muzero"] = "muzero"
    """A policy and a value on states unrolled from a stack of frames, for planning."""
    frame_stack: int = Field(4, ge=1)
    """Frames that a state is made of. [frames]"""
    unroll_steps: int = Field(5, ge=1)
    """Dynamics steps unrolled in training. [decisions]"""
    channels: Channels = (32, 64)
    """Channels of the representation's convolutions, before and after its second halving; a state has the latter.
    [channels]"""
    head_channels: int = Field(16, ge=1)
    """Channels of the first layer of a head. [channels]"""
    head_width: int = Field(32, ge=1)
    """Width of a head's hidden layer. [features]"""
    projection_width: int = Field(1024, ge=1)
    """Width of the projections that the consistency loss compares, and of the layers before them. [features]"""
    predictor_width: int = Field(512, ge=1)
    """Width of the predictor's hidden layer in the consistency loss. [features]"""
    bound: int = Field(300, ge=1)
    """Index of the outermost bins of values and rewards, after squashing: 300 is 58706. [bins]"""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the reward."""
    policy_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the policy."""
    value_weight: float = Field(0.25, ge=0)
    """Weight of the loss of the value."""
    consistency_weight: float = Field(2.0, ge=0)
    """Weight of the consistency loss between a predicted state and that of the true frame."""
    shift: int = Field(4, ge=0)
    """Largest random shift of a row's frames in training, in each direction; 0 for none. [pixels]"""
    intensity: float = Field(0.05, ge=0)
    """Standard deviation of a random brightness factor of a row's frames in training, truncated at two of them."""
    target_every: int = Field(100, ge=1)
    """Updates between two renewals of the target. [updates]"""
    batch: int = Field(256, ge=1)
    """Segments in an update. [sequences]"""
    optimizer: Literal["sgd", "adamw", "adam"] = "sgd"
    """Optimizer of all parameters."""
    learning_rate: float = Field(0.2, gt=0)
    """Step size of the optimizer."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of sgd."""
    decay_after: Annotated[tuple[Positive, ...], Field(strict=False)] = (25_000, 50_000)
    """Updates after which the step size falls to a tenth, each time. [updates]"""
    clip: float = Field(10.0, gt=0)
    """Largest norm of the gradient of all parameters."""

    @property
    def context(self) -> int:
        """Real frames that imagination starts from."""
        return self.frame_stack

    def build(self, parts: Parts) -> MuZero:
        return MuZero(self, parts.actions, parts.size)


class ObservedState(NamedTuple):
    """State of a trajectory after a real frame."""

    stack: Tensor
    """(B, N, H, W) uint8, the current frame last."""
    state: Tensor
    """(B, C, h, w) float32."""


class UnrolledState(NamedTuple):
    """State of a trajectory in imagination; it determines everything that follows."""

    state: Tensor
    """(B, C, h, w) float32."""


class MuZero(BootstrappedWorldModel):
    """Learns states, their transitions, rewards, a policy and a value, for frames of `size` pixels.

    `encode` returns gray frames. Elsewhere a latent is a state (C, h, w).
    """

    elements = 0

    def __init__(self, settings: MuZeroSettings, actions: int, size: int) -> None:
        super().__init__()
        channels, pixels = settings.channels[1], side(size)
        self.settings = settings
        self.actions = actions
        self.discount = settings.discount
        self.context = settings.context
        self.history = settings.frame_stack - 1
        self.segment = self.history + settings.unroll_steps + 1 + settings.td_steps
        self.feature_shape = (channels, pixels, pixels)
        self.representation = ResidualTrunk(settings.frame_stack, settings.channels, "relu")
        self.dynamics = Dynamics(channels, actions)
        self.prediction = TrunkBlock(channels, channels, "relu")
        self.reward_head = _head(settings, pixels, value_bins.bins(settings.bound))
        self.policy_head = _head(settings, pixels, actions)
        self.value_head = _head(settings, pixels, value_bins.bins(settings.bound))
        self.termination_head = _head(settings, pixels, 1) if settings.predict_termination else None
        inputs, width, hidden = channels * pixels**2, settings.projection_width, settings.predictor_width
        self.projection = nn.Sequential(
            Flatten(), *_normed(inputs, width), nn.ReLU(), *_normed(width, width), nn.ReLU(), *_normed(width, width)
        )
        self.predictor = nn.Sequential(*_normed(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._make_target("representation", "prediction", "value_head")
        self._updates = 0

    @property
    def lookback(self) -> int:
        return self.history

    def after_update(self) -> None:
        """Count the update, and every `target_every` updates renew the target, batch statistics included."""
        self._updates += 1
        if self._updates % self.settings.target_every == 0:
            for name, part in self.target.items():
                part.load_state_dict(getattr(self, name).state_dict())

    def get_extra_state(self) -> Tensor:
        """Return the number of updates, so that the next renewal is saved with the weights."""
        return torch.tensor(self._updates)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the number of updates."""
        self._updates = int(state)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return one group with weight decay on everything, as in the public code."""
        parameters = [each for name, each in self.named_parameters() if not name.startswith("target.")]
        return [{"params": parameters, "weight_decay": self.settings.weight_decay}]

    # -- the parts ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Convert frames (B, T, H, W, 3) uint8 to gray ones (B, T, H, W) uint8."""
        return to_gray(observation)

    def _represent(self, images: Tensor) -> Tensor:
        """Encode stacks (B, N, H, W) in [0, 1] to states (B, C, h, w)."""
        return self.representation(images.contiguous(memory_format=torch.channels_last)).float()

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the weighted losses of reward, policy, value, consistency and termination.

        Policy and value are learned at the first frame after the history and at all predicted states, the rest at
        predicted states only. After the end of an episode rewards and values are 0. Other padding is left out, and so
        is the policy of frames without a search. The total is summed over steps, averaged over the batch and divided by
        `unroll_steps`.

        Args:
            batch: Its `inputs` hold frames (B, history + unroll_steps + 1 + td_steps, H, W, 3).

        Returns:
            The loss and the metrics `reward_loss`, `policy_loss`, `value_loss` (cross entropies, nats),
                `consistency_loss` (-1 to 1), `termination_loss` if it is learned, `policy_entropy` (nats) and
                `value_mean` (discounted reward).
        """
        s = self.settings
        unroll, stack = s.unroll_steps, s.frame_stack
        frames = to_gray(batch.inputs)
        batch = part_of(batch, slice(self.history, None))
        part = part_of(batch, slice(unroll + 1))
        valid, action = part.valid, part.action
        images = frames[:, : stack + unroll].float() / 255
        states = [self._represent(self._augment_rows(images[:, :stack]))]
        for step in range(unroll):
            states.append(self.dynamics(states[-1], action[:, step]))
        state = torch.stack(states, 1)  # (B, unroll + 1, C, h, w)
        predicted = state[:, 1:].flatten(0, 1)
        hidden = self.prediction(state.flatten(0, 1))
        value = self.value_head(hidden).unflatten(0, valid.shape)
        policy = policy_terms(self.policy_head(hidden).unflatten(0, valid.shape), part)
        reward = self.reward_head(predicted).unflatten(0, (len(valid), unroll))
        value_target, has_return = self._value_targets(batch, unroll + 1, lambda at: self._target_values(frames, at))

        before, after = valid[:, :-1], valid[:, 1:]
        # After the end of an episode rewards are 0.
        ended = (self._ended(part) & valid).any(1, keepdim=True) & ~valid
        earned = part.reward.masked_fill(ended, 0)[:, :-1]
        terms = {
            "reward_loss": (s.reward_weight, value_bins.loss(reward, earned), before | ended[:, :-1]),
            "policy_loss": (s.policy_weight, policy.loss, policy.mask),
            "value_loss": (s.value_weight, value_bins.loss(value, value_target), has_return | ended),
            "consistency_loss": (s.consistency_weight, self._inconsistency(predicted, images[:, 1:]), after),
        }
        if self.termination_head is not None:
            logit = self.termination_head(predicted).unflatten(0, before.shape)
            terms["termination_loss"] = (1.0, self._termination_losses(logit, self._ended(part)[:, :-1]), before)
        total = torch.stack(
            [weight * weighed(losses * mask, batch.weight).sum() for weight, losses, mask in terms.values()]
        ).sum()
        log = {name: masked_mean(losses, mask) for name, (_, losses, mask) in terms.items()}
        log["policy_entropy"] = masked_mean(policy.entropy, valid)
        log["value_mean"] = masked_mean(value_bins.decode(value), valid)
        return total / (len(valid) * unroll), {name: each.detach() for name, each in log.items()}

    def _inconsistency(self, predicted: Tensor, images: Tensor) -> Tensor:
        """Return the negative cosine similarity (B, unroll) of predicted states and those of the true frames.

        Args:
            predicted: (B * unroll, C, h, w). Only these receive gradients.
            images: The true frames (B, N - 1 + unroll, H, W), each row augmented as one.
        """
        with torch.no_grad():
            stacks = self._augment_rows(images).unfold(1, self.settings.frame_stack, 1).permute(0, 1, 4, 2, 3)
            true = self.projection(self._represent(stacks.flatten(0, 1))).float()
        agreement = F.cosine_similarity(self.predictor(self.projection(predicted)).float(), true, -1)
        return -agreement.unflatten(0, stacks.shape[:2])

    def _augment_rows(self, images: Tensor) -> Tensor:
        """Shift images (B, N, H, W) and scale their brightness in training, alike within a row."""
        s = self.settings
        return augment(images, s.shift, s.intensity) if self.training and (s.shift or s.intensity) else images

    def _target_values(self, frames: Tensor, where: Tensor) -> Tensor:
        """Return the target's values (B, F) of frames `where` (B, F).

        Args:
            frames: (B, T, H, W) uint8, the history first.
            where: Numbers of frames, counted from the first one behind the history.
        """
        rows = torch.arange(len(where), device=where.device)[:, None, None]
        stacks = frames[rows, where[..., None] + torch.arange(self.settings.frame_stack, device=where.device)]
        representation, prediction, head = self.target.values()
        images = _scaled(stacks.flatten(0, 1)).contiguous(memory_format=torch.channels_last)
        return value_bins.decode(head(prediction(representation(images)))).view_as(where)

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, ObservedState]:
        """Encode every gray frame (B, T, H, W) with its history. See `WorldModel.observe`.

        The episode's first frame stands for those before it.
        """
        steps = torch.arange(latent.shape[1], device=latent.device)
        start = torch.where(reset, steps, 0).cummax(1).values
        back = torch.arange(-self.history, 1, device=latent.device)
        frames = torch.maximum(steps[:, None] + back, start[..., None])  # (B, T, N)
        stacks = latent[torch.arange(len(latent), device=latent.device)[:, None, None], frames]
        state = self._represent(_scaled(stacks.flatten(0, 1))).unflatten(0, reset.shape)
        return state, ObservedState(stacks[:, -1], state[:, -1])

    @torch.no_grad()
    def imagine(
        self, state: ObservedState | UnrolledState, action: Tensor, uniforms: Tensor | None = None
    ) -> tuple[ImaginedStep, UnrolledState]:
        """Take one deterministic step: next state, expected reward, and the likelier termination."""
        predicted = self.dynamics(state.state, action)
        if self.termination_head is None:
            terminated = torch.zeros_like(action, dtype=torch.bool)
        else:
            terminated = self.termination_head(predicted).squeeze(-1) > 0
        return ImaginedStep(predicted, value_bins.decode(self.reward_head(predicted)), terminated), UnrolledState(
            predicted
        )

    def root(self, state: ObservedState | UnrolledState) -> UnrolledState:
        """Return the state without the frames."""
        return UnrolledState(state.state)

    @torch.no_grad()
    def predict(self, state: ObservedState | UnrolledState) -> Prediction:
        """Predict policy logits (B, A) and value (B,) of the current frame."""
        hidden = self.prediction(state.state)
        return Prediction(self.policy_head(hidden).float(), value_bins.decode(self.value_head(hidden)))

    def features(self, state: ObservedState | UnrolledState) -> Tensor:
        """Return the current state, (B, C, h, w) float32."""
        return state.state

    def latent(self, state: ObservedState | UnrolledState) -> Tensor:
        """Return the current state, (B, C, h, w) float32."""
        return state.state

    @torch.no_grad()
    def perceive(
        self,
        state: ObservedState | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> ObservedState:
        """Read one real frame. An episode's first frame fills the stack."""
        frame = to_gray(observation)[:, None]
        stack = frame.repeat(1, self.settings.frame_stack, 1, 1)
        if state is not None:
            stack = torch.where(reset[:, None, None, None], stack, torch.cat((state.stack[:, 1:], frame), 1))
        return ObservedState(stack, self._represent(_scaled(stack)))


class Dynamics(nn.Module):
    """Predicts the next state (B, C, h, w) float32 from a state and actions (B,).

    It is block(relu(state + norm(conv(state and action)))).
    """

    def __init__(self, channels: int, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.conv = conv(channels + actions, channels)
        self.norm = BatchNorm2d(channels)
        self.block = TrunkBlock(channels, channels, "relu")

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        planes = one_hot(action, self.actions, state.dtype)[..., None, None].expand(-1, -1, *state.shape[2:])
        x = torch.cat((state, planes), 1).contiguous(memory_format=torch.channels_last)
        return self.block(F.relu(state + self.norm(self.conv(x)))).float()


def to_gray(observation: Tensor) -> Tensor:
    """Convert colors (..., 3) uint8 to luminance (...) uint8, rounded, in integer arithmetic."""
    assert observation.dtype == torch.uint8 and observation.shape[-1] == 3, "frames are uint8 with three colors last"
    red, green, blue = (
        weight * color.to(torch.int32) for weight, color in zip(LUMINANCE, observation.unbind(-1), strict=True)
    )
    return ((red + green + blue + 500) // 1000).to(torch.uint8)


def augment(images: Tensor, shift: int, intensity: float) -> Tensor:
    """Shift each row of images and scale its brightness. Samples come from torch's global generator.

    Args:
        images: (B, N, H, W).
        shift: Largest shift in pixels. Edges are repeated.
        intensity: Standard deviation of a normal factor around 1, truncated at two of them.
    """
    rows, _, height, width = images.shape
    offset = torch.randint(2 * shift + 1, (2, rows, 1), device=images.device)
    y, x = offset - shift
    y = (y + torch.arange(height, device=images.device)).clamp(0, height - 1)
    x = (x + torch.arange(width, device=images.device)).clamp(0, width - 1)
    row = torch.arange(rows, device=images.device)[:, None, None]
    moved = images.permute(0, 2, 3, 1)[row, y[:, :, None], x[:, None]].permute(0, 3, 1, 2)
    factor = torch.randn(rows, 1, 1, 1, device=images.device).clamp(-2, 2)
    return moved * (1 + intensity * factor)


def _scaled(stacks: Tensor) -> Tensor:
    return stacks.float() / 255


def _normed(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs)


def _head(settings: MuZeroSettings, pixels: int, outputs: int) -> nn.Sequential:
    """Build a head from states (B, C, h, w) to (B, outputs) that at first returns zero."""
    channels, width = settings.head_channels, settings.head_width
    last = Float32Linear(width, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Conv2d(settings.channels[1], channels, 1, bias=False),
        BatchNorm2d(channels),
        nn.ReLU(),
        Flatten(),
        *_normed(channels * pixels**2, width),
        nn.ReLU(),
        last,
    )
