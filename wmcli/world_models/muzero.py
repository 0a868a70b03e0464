"""MuZero: a convolutional world model to plan in, unrolled a few steps from a stack of frames.

    s_0 = representation(o_{t-3}, ..., o_t)        s_{k+1} = dynamics(s_k, a_{t+k})
    reward r_{t+k} = head(s_{k+1})        policy, value of frame t + k = heads(s_k)

All modules are convolutions. Where the environment shows one image in three colors they see it in gray. What is no
image goes through an MLP, whose output is added at every place of the state. Without an image the state has one place,
and the convolutions are linear maps. A consistency loss pulls each predicted state towards the representation of
the true frame. Values end in those of the *target*, a copy that is renewed every `target_every` updates.

Sources: MuZero (Schrittwieser et al. 2020, arXiv 1911.08265) as LightZero trains it on Atari 100k (Niu et al. 2023,
arXiv 2310.08348); consistency and shifts of EfficientZero (Ye et al. 2021, arXiv 2111.00210), after SimSiam (Chen & He
2021, arXiv 2011.10566).

B batch, T time (frames), N frames of a stack, C channels, h w height and width of a state, A length of an encoded
action, P outputs of the policy, H W image. An observation is a tree of parts, here called a frame. Time: see base.py.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli import ranks
from wmcli.nn import value_bins
from wmcli.nn.actions import encode_action, where_rows
from wmcli.nn.layers import BatchNorm1d, BatchNorm2d, Flatten, Float32Linear
from wmcli.nn.observations import as_input, count_numbers, joint_image, split_parts
from wmcli.nn.policies import build_policy
from wmcli.nn.residual_trunk import ResidualTrunk, TrunkBlock, conv, side
from wmcli.spaces import (
    ActionSpace,
    Image,
    ObservationSpace,
    PartSpace,
    first_part,
    map_parts,
    to_action_space,
    to_observation_space,
)
from wmcli.world_models.base import Batch, ImaginedStep, Parts, Prediction, masked_mean, part_of, weighed
from wmcli.world_models.planners import (
    BootstrappedWorldModel,
    Channels,
    PlanningSettings,
    Positive,
    acted_in,
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
    """Channels of the representation's convolutions, before and after its second halving; a state has the latter, also
    without an image. [channels]"""
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
    """Largest random shift of a row's images in training, in each direction; 0 for none. [pixels]"""
    intensity: float = Field(0.05, ge=0)
    """Standard deviation of a random brightness factor of a row's images in training, truncated at two of them."""
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
    skip_gradients_above: float = Field(0.0, ge=0)
    """Skip an update whose gradient norm is above this many times the median of the last 101; 0 skips none."""

    @property
    def context(self) -> int:
        """Real frames that imagination starts from."""
        return self.frame_stack

    def build(self, parts: Parts) -> MuZero:
        return MuZero(self, parts.action_space, parts.observation_space)


class ObservedState(NamedTuple):
    """State of a trajectory after a real frame."""

    stack: Any
    """As `MuZero.encode` returns frames, (B, N, ...), the current frame last."""
    state: Tensor
    """(B, C, h, w) float32."""


class UnrolledState(NamedTuple):
    """State of a trajectory in imagination; it determines everything that follows."""

    state: Tensor
    """(B, C, h, w) float32."""


class MuZero(BootstrappedWorldModel):
    """Learns states, their transitions, rewards, a policy and a value.

    `encode` returns frames as the inputs of the representation. Elsewhere a latent is a state (C, h, w).

    Args:
        settings: Of the section `dynamics`.
        actions: The actions, or the number of discrete ones.
        observation: What the environment shows, or the side of a square image in three colors.

    Raises:
        UsageError: Images differ in size.
    """

    elements = 0
    representation: Any  # a ResidualTrunk; None without an image
    numbers: Any  # an MLP; None without other parts

    def __init__(
        self, settings: MuZeroSettings, actions: ActionSpace | int, observation: ObservationSpace | int
    ) -> None:
        super().__init__()
        self.settings = settings
        self.observation_space = to_observation_space(observation)
        self.action_space = to_action_space(actions)
        self.distribution = build_policy(self.action_space, settings.continuous)
        image, numbers = joint_image(self.observation_space, settings.kind), count_numbers(self.observation_space)
        self.in_gray = isinstance(self.observation_space, Image) and self.observation_space.channels == 3
        channels, stack = settings.channels[1], settings.frame_stack
        height, width = (1, 1) if image is None else (side(image.height), side(image.width))
        pixels, kernel = height * width, 1 if image is None else 3
        self.discount = settings.discount
        self.context = settings.context
        self.history = settings.frame_stack - 1
        self.segment = self.history + settings.unroll_steps + 1 + settings.td_steps
        self.feature_shape = (channels, height, width)
        self.representation = self.numbers = None
        if image is not None:
            colors = 1 if self.in_gray else image.channels
            self.representation = ResidualTrunk(stack * colors, settings.channels, "relu")
        if numbers:
            layers = _normed(stack * numbers, channels), _normed(channels, channels)
            self.numbers = nn.Sequential(*layers[0], nn.ReLU(), *layers[1], nn.ReLU())
        self.dynamics = Dynamics(channels, self.action_space, kernel)
        self.prediction = TrunkBlock(channels, channels, "relu", size=kernel)
        self.reward_head = _head(settings, pixels, value_bins.bins(settings.bound))
        self.policy_head = _head(settings, pixels, self.distribution.outputs)
        self.value_head = _head(settings, pixels, value_bins.bins(settings.bound))
        self.termination_head = _head(settings, pixels, 1) if settings.predict_termination else None
        inputs, width, hidden = channels * pixels, settings.projection_width, settings.predictor_width
        self.projection = nn.Sequential(
            Flatten(), *_normed(inputs, width), nn.ReLU(), *_normed(width, width), nn.ReLU(), *_normed(width, width)
        )
        self.predictor = nn.Sequential(*_normed(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        encoders = [name for name in ("representation", "numbers") if getattr(self, name) is not None]
        self._make_target(*encoders, "prediction", "value_head")
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
    def encode(self, observation: Any) -> Any:
        """Convert frames, a tree of (B, T, *part), to inputs, a tree of (B, T, ...) in the form of `as_input`.

        One image in three colors becomes gray, (B, T, H, W) uint8.
        """
        return to_gray(observation) if self.in_gray else map_parts(as_input, self.observation_space, observation)

    def _represent(self, inputs: Any) -> Tensor:
        """Encode stacks of inputs (B, N, ...), images in [0, 1], to states (B, C, h, w)."""
        return self._encode_stacks(self, inputs).float()

    def _encode_stacks(self, parts: Any, inputs: Any) -> Tensor:
        """Do so with the encoders of `parts`, the model or the target, in the precision of autocast."""
        images, numbers = split_parts(self.observation_space, inputs)
        states = []
        if images:
            pixels = torch.cat([each.flatten(1, -3) for each in images], 1)
            states.append(parts.representation(pixels.contiguous(memory_format=torch.channels_last)))
        if numbers:
            states.append(parts.numbers(torch.cat([each.flatten(1) for each in numbers], 1))[..., None, None])
        return sum(states[1:], start=states[0])

    def _scaled(self, inputs: Any) -> Any:
        """Return inputs with images in [0, 1]."""

        def scale(space: PartSpace, part: Tensor) -> Tensor:
            return part.float() / 255 if isinstance(space, Image) else part

        return map_parts(scale, self.observation_space, inputs)

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the weighted losses of reward, policy, value, consistency and termination.

        Policy and value are learned at the first frame after the history and at all predicted states, the rest at
        predicted states only. After the end of an episode rewards and values are 0. Other padding is left out, and so
        is the policy of frames without a search. The frame that closes an episode counts for consistency, and for the
        value to which a return leads. The total is summed over steps, averaged over the batch and divided by
        `unroll_steps`.

        Args:
            batch: Its `inputs` hold frames (B, history + unroll_steps + 1 + td_steps, *part).

        Returns:
            The loss and the metrics `reward_loss`, `policy_loss`, `value_loss` (cross entropies, nats),
                `consistency_loss` (-1 to 1), `termination_loss` if it is learned, `policy_entropy` (nats) and
                `value_mean` (discounted reward).
        """
        s = self.settings
        unroll, stack = s.unroll_steps, s.frame_stack
        frames = self.encode(batch.inputs)
        batch = part_of(batch, slice(self.history, None))
        part = part_of(batch, slice(unroll + 1))
        valid, acted, action = part.valid, acted_in(part), part.action
        inputs = self._scaled(_frames(frames, slice(stack + unroll)))
        states = [self._represent(self._augment_rows(_frames(inputs, slice(stack))))]
        for step in range(unroll):
            states.append(self.dynamics(states[-1], action[:, step]))
        state = torch.stack(states, 1)  # (B, unroll + 1, C, h, w)
        predicted = state[:, 1:].flatten(0, 1)
        hidden = self.prediction(state.flatten(0, 1))
        value = self.value_head(hidden).unflatten(0, valid.shape)
        policy = policy_terms(self.policy_head(hidden).unflatten(0, valid.shape), part, self.distribution)
        reward = self.reward_head(predicted).unflatten(0, (len(valid), unroll))
        value_target, has_return = self._value_targets(batch, unroll + 1, lambda at: self._target_values(frames, at))

        before, after = acted[:, :-1], valid[:, 1:]
        # After the end of an episode rewards are 0.
        ended = (self._ended(part) & acted).any(1, keepdim=True) & ~acted
        earned = part.reward.masked_fill(ended, 0)[:, :-1]
        terms = {
            "reward_loss": (s.reward_weight, value_bins.loss(reward, earned), before | ended[:, :-1]),
            "policy_loss": (s.policy_weight, policy.loss, policy.mask),
            "value_loss": (s.value_weight, value_bins.loss(value, value_target), has_return | ended),
            "consistency_loss": (
                s.consistency_weight,
                self._inconsistency(predicted, _frames(inputs, slice(1, None))),
                after,
            ),
        }
        if self.termination_head is not None:
            logit = self.termination_head(predicted).unflatten(0, before.shape)
            terms["termination_loss"] = (1.0, self._termination_losses(logit, self._ended(part)[:, :-1]), before)
        total = torch.stack(
            [weight * weighed(losses * mask, batch.weight).sum() for weight, losses, mask in terms.values()]
        ).sum()
        log = {name: masked_mean(losses, mask) for name, (_, losses, mask) in terms.items()}
        log["policy_entropy"] = masked_mean(policy.entropy, acted)
        log["value_mean"] = masked_mean(value_bins.decode(value), acted)
        return total / (len(valid) * unroll), {name: each.detach() for name, each in log.items()}

    def _inconsistency(self, predicted: Tensor, inputs: Any) -> Tensor:
        """Return the negative cosine similarity (B, unroll) of predicted states and those of the true frames.

        Args:
            predicted: (B * unroll, C, h, w). Only these receive gradients.
            inputs: Of the true frames (B, N - 1 + unroll, ...), scaled; each row augmented as one.
        """

        def stacks(part: Tensor) -> Tensor:
            return part.unfold(1, self.settings.frame_stack, 1).movedim(-1, 2).flatten(0, 1)

        with torch.no_grad():
            true = self.projection(self._represent(map_parts(stacks, self._augment_rows(inputs)))).float()
        agreement = F.cosine_similarity(self.predictor(self.projection(predicted)).float(), true, -1)
        return -agreement.unflatten(0, (len(first_part(inputs)), -1))

    def _augment_rows(self, inputs: Any) -> Any:
        """Shift images (B, N, ..., H, W) and scale their brightness in training, alike within a row."""
        s = self.settings
        if not self.training or not (s.shift or s.intensity):
            return inputs

        def change(space: PartSpace, part: Tensor) -> Tensor:
            if not isinstance(space, Image):
                return part
            return augment(part.flatten(1, -3), s.shift, s.intensity).reshape(part.shape)

        return map_parts(change, self.observation_space, inputs)

    def _target_values(self, frames: Any, where: Tensor) -> Tensor:
        """Return the target's values (B, F) of frames `where` (B, F).

        Args:
            frames: Inputs (B, T, ...), the history first.
            where: Numbers of frames, counted from the first one behind the history.
        """
        rows = torch.arange(len(where), device=where.device)[:, None, None]
        steps = where[..., None] + torch.arange(self.settings.frame_stack, device=where.device)
        stacks = map_parts(lambda part: part[rows, steps].flatten(0, 1), frames)
        state = self._encode_stacks(self.target, self._scaled(stacks))
        return value_bins.decode(self.target.value_head(self.target.prediction(state))).view_as(where)

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Any, action: Tensor, reset: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Tensor, ObservedState]:
        """Encode every frame, given as inputs (B, T, ...), with its history. See `WorldModel.observe`.

        The episode's first frame stands for those before it.
        """
        steps = torch.arange(reset.shape[1], device=reset.device)
        start = torch.where(reset, steps, 0).cummax(1).values
        back = torch.arange(-self.history, 1, device=reset.device)
        frames = torch.maximum(steps[:, None] + back, start[..., None])  # (B, T, N)
        rows = torch.arange(len(reset), device=reset.device)[:, None, None]
        stacks = map_parts(lambda part: part[rows, frames], latent)
        flat = map_parts(lambda part: part.flatten(0, 1), stacks)
        state = self._represent(self._scaled(flat)).unflatten(0, reset.shape)
        return state, ObservedState(_frames(stacks, -1), state[:, -1])

    @torch.no_grad()
    def imagine(
        self, state: ObservedState | UnrolledState, action: Tensor, uniforms: Tensor | None = None
    ) -> tuple[ImaginedStep, UnrolledState]:
        """Take one deterministic step: next state, expected reward, and the likelier termination."""
        predicted = self.dynamics(state.state, action)
        reward = value_bins.decode(self.reward_head(predicted))
        if self.termination_head is None:
            terminated = torch.zeros_like(reward, dtype=torch.bool)
        else:
            terminated = self.termination_head(predicted).squeeze(-1) > 0
        return ImaginedStep(predicted, reward, terminated), UnrolledState(predicted)

    def root(self, state: ObservedState | UnrolledState) -> UnrolledState:
        """Return the state without the frames."""
        return UnrolledState(state.state)

    @torch.no_grad()
    def predict(self, state: ObservedState | UnrolledState) -> Prediction:
        """Predict outputs of the policy (B, P) and value (B,) of the current frame."""
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
        observation: Any,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> ObservedState:
        """Read one real frame. An episode's first frame fills the stack."""
        frame = map_parts(lambda part: part[:, None], self.encode(observation))
        count = self.settings.frame_stack
        stack = map_parts(lambda part: part.repeat(1, count, *[1] * (part.ndim - 2)), frame)
        if state is not None:
            moved = map_parts(lambda before, part: torch.cat((before[:, 1:], part), 1), state.stack, frame)
            stack = map_parts(lambda fresh, part: where_rows(reset, fresh, part), stack, moved)
        return ObservedState(stack, self._represent(self._scaled(stack)))


class Dynamics(nn.Module):
    """Predicts the next state (B, C, h, w) float32 from a state and actions (B, ...).

    It is block(relu(state + norm(conv(state and action)))), where each number of the encoded action fills a plane.
    """

    def __init__(self, channels: int, space: ActionSpace, kernel: int) -> None:
        super().__init__()
        self.space = space
        self.conv = conv(channels + space.encoded, channels, size=kernel)
        self.norm = BatchNorm2d(channels)
        self.block = TrunkBlock(channels, channels, "relu", size=kernel)

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        planes = encode_action(self.space, action, state.dtype)[..., None, None].expand(-1, -1, *state.shape[2:])
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
    offset = torch.randint(2 * shift + 1, (2, ranks.all_rows(rows), 1), device=images.device)
    y, x = ranks.own_rows(offset, axis=1) - shift
    y = (y + torch.arange(height, device=images.device)).clamp(0, height - 1)
    x = (x + torch.arange(width, device=images.device)).clamp(0, width - 1)
    row = torch.arange(rows, device=images.device)[:, None, None]
    moved = images.permute(0, 2, 3, 1)[row, y[:, :, None], x[:, None]].permute(0, 3, 1, 2)
    factor = ranks.drawn(lambda shape: torch.randn(shape, device=images.device), (rows, 1, 1, 1)).clamp(-2, 2)
    return moved * (1 + intensity * factor)


def _frames(tree: Any, which: Any) -> Any:
    """Return frames of inputs (B, T, ...)."""
    return map_parts(lambda part: part[:, which], tree)


def _normed(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module]:
    return nn.Linear(inputs, outputs, bias=False), BatchNorm1d(outputs)


def _head(settings: MuZeroSettings, pixels: int, outputs: int) -> nn.Sequential:
    """Build a head from states (B, C, h, w) of h w `pixels` to (B, outputs) that at first returns zero."""
    channels, width = settings.head_channels, settings.head_width
    last = Float32Linear(width, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Conv2d(settings.channels[1], channels, 1, bias=False),
        BatchNorm2d(channels),
        nn.ReLU(),
        Flatten(),
        *_normed(channels * pixels, width),
        nn.ReLU(),
        last,
    )
