"""MuZero for frames: a model of what planning needs, unrolled a few steps from a stack of frames.

    s_0 = representation(o_{t-3}, ..., o_t)        s_{k+1} = dynamics(s_k, a_{t+k})
    reward r_{t+k} = head(s_{k+1})        policy, value of frame t + k = heads(s_k)

All are convolutions on gray frames. What the dynamics arrive at is also drawn to what the representation makes of the
true frame (consistency), and values end in one of the *target*, a copy that is renewed now and then.

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
from wmcli.nn.batch_norm import BatchNorm2d
from wmcli.nn.flatten import Flatten
from wmcli.nn.float32_linear import Float32Linear
from wmcli.nn.masked import masked_mean
from wmcli.nn.one_hot import one_hot
from wmcli.nn.residual_trunk import ResidualBlock, ResidualTrunk, conv, side
from wmcli.world_models.base import Batch, Imagined, Parts, Prediction
from wmcli.world_models.planning import BootstrappedWorldModel, Channels, PlanningSettings, Size, part_of, policy_terms

LUMINANCE = (299, 587, 114)  # of red, green and blue, in thousandths (ITU-R BT.601)


class MuZeroSettings(PlanningSettings):
    """MuZero, and how it is trained. Defaults: LightZero's for Atari 100k."""

    uses_backbone: ClassVar[bool] = False

    kind: Literal["muzero"] = "muzero"
    """A policy and a value in what follows from a stack of frames, to plan with."""
    frame_stack: int = Field(4, ge=1)
    """Frames that a state is made of."""
    unroll_steps: int = Field(5, ge=1)
    """Steps that the dynamics take in training, one after the other."""
    channels: Channels = (32, 64)
    """Of the representation's convolutions, before and after its second halving; the latter are a state's."""
    head_channels: int = Field(16, ge=1)
    """Channels that a head first makes of a state."""
    head_width: int = Field(32, ge=1)
    """Width of a head's hidden layer."""
    projection_width: int = Field(1024, ge=1)
    """Width of the vectors whose agreement is consistency, and of the layers before them."""
    predictor_width: int = Field(512, ge=1)
    """Width of the hidden layer that predicts them."""
    bound: int = Field(300, ge=1)
    """The outermost bins of values and rewards, squashed: 300 is 58706."""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the reward."""
    policy_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the policy."""
    value_weight: float = Field(0.25, ge=0)
    """Weight of the loss of the value."""
    consistency_weight: float = Field(2.0, ge=0)
    """Weight of the disagreement of a state that was arrived at and one that was seen."""
    shift: int = Field(4, ge=0)
    """Pixels by which a row's frames are shifted in training, at most, in each direction; 0: not at all."""
    intensity: float = Field(0.05, ge=0)
    """Standard deviation of a factor on the brightness of a row's frames in training, cut at two of them."""
    target_every: int = Field(100, ge=1)
    """Updates between two renewals of the target."""
    batch: int = Field(256, ge=1)
    """Segments in an update."""
    optimizer: Literal["sgd", "adamw", "adam"] = "sgd"
    """Of the whole model."""
    learning_rate: float = Field(0.2, gt=0)
    """Step size of the optimizer."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of sgd."""
    decay_after: Annotated[tuple[Size, ...], Field(strict=False)] = (25_000, 50_000)
    """Updates after each of which the step size falls to a tenth."""
    clip: float = Field(10.0, gt=0)
    """Largest norm of the whole gradient."""

    @property
    def context(self) -> int:
        """Real frames that imagination starts from."""
        return self.frame_stack

    def build(self, parts: Parts) -> MuZero:
        return MuZero(self, parts.actions, parts.size)


class Seen(NamedTuple):
    """Where a trajectory stands after a real frame."""

    stack: Tensor
    """(B, N, H, W) uint8, the current frame last."""
    state: Tensor
    """(B, C, h, w) float32."""


class Node(NamedTuple):
    """Where imagination stands: all that follows from here depends on this alone."""

    state: Tensor
    """(B, C, h, w) float32."""


class MuZero(BootstrappedWorldModel):
    """Learns states, what follows from them, and what to do, for frames of `size` pixels.

    What `encode` gives are gray frames; a latent, apart from that, is a state (C, h, w).
    """

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
        self.prediction = ResidualBlock(channels, channels, "relu")
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
    def remembers(self) -> int:
        return self.history

    def after_update(self) -> None:
        """Count the update; renew the target, batch statistics included, every `target_every` of them."""
        self._updates += 1
        if self._updates % self.settings.target_every == 0:
            for name, part in self.target.items():
                part.load_state_dict(getattr(self, name).state_dict())

    def get_extra_state(self) -> Tensor:
        """The updates so far: the next renewal is saved with the weights."""
        return torch.tensor(self._updates)

    def set_extra_state(self, state: Tensor) -> None:
        self._updates = int(state)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Weight decay on all that learns, as in the public code."""
        learned = [each for name, each in self.named_parameters() if not name.startswith("target.")]
        return [{"params": learned, "weight_decay": self.settings.weight_decay}]

    # -- the parts ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Frames (B, T, H, W, 3) uint8 to gray ones (B, T, H, W) uint8."""
        return gray(observation)

    def _represent(self, images: Tensor) -> Tensor:
        """Stacks (B, N, H, W) in [0, 1] to states (B, C, h, w)."""
        return self.representation(images.contiguous(memory_format=torch.channels_last)).float()

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted losses of reward, policy, value, consistency and termination.

        `batch.latent` holds frames (B, history + unroll + 1 + td_steps, H, W, 3). Policy and value are learned at the
        frame after the history and at all that the dynamics arrive at, the rest at these alone. Behind an end rewards
        and values are 0; what else is padded is left out, and so is the policy where no search was made. The total is
        summed over the steps, averaged over the batch and divided by `unroll`.

        The names: `reward_loss`, `policy_loss`, `value_loss` (cross entropies, nats), `consistency_loss` (-1 to 1) and
        `termination_loss` if it is learned, means over what is learned; `policy_entropy` (nats) and `value_mean`
        (discounted reward).
        """
        s = self.settings
        unroll, stack = s.unroll_steps, s.frame_stack
        frames = gray(batch.latent)
        batch = part_of(batch, slice(self.history, None))
        part = part_of(batch, slice(unroll + 1))
        valid, action = part.valid, part.action
        images = frames[:, : stack + unroll].float() / 255
        states = [self._represent(self._varied(images[:, :stack]))]
        for step in range(unroll):
            states.append(self.dynamics(states[-1], action[:, step]))
        state = torch.stack(states, 1)  # (B, unroll + 1, C, h, w)
        arrived = state[:, 1:].flatten(0, 1)
        hidden = self.prediction(state.flatten(0, 1))
        value = self.value_head(hidden).unflatten(0, valid.shape)
        policy = policy_terms(self.policy_head(hidden).unflatten(0, valid.shape), part)
        reward = self.reward_head(arrived).unflatten(0, (len(valid), unroll))
        value_target, has_return = self._value_targets(batch, unroll + 1, lambda at: self._target_values(frames, at))

        before, after = valid[:, :-1], valid[:, 1:]
        # Behind the end of an episode there is nothing to earn.
        gone = (self._ended(part) & valid).any(1, keepdim=True) & ~valid
        earned = part.reward.masked_fill(gone, 0)[:, :-1]
        terms = {
            "reward_loss": (s.reward_weight, value_bins.loss(reward, earned), before | gone[:, :-1]),
            "policy_loss": (s.policy_weight, policy.loss, policy.learned),
            "value_loss": (s.value_weight, value_bins.loss(value, value_target), has_return | gone),
            "consistency_loss": (s.consistency_weight, self._inconsistency(arrived, images[:, 1:]), after),
        }
        if self.termination_head is not None:
            logit = self.termination_head(arrived).unflatten(0, before.shape)
            terms["termination_loss"] = (1.0, self._termination_losses(logit, self._ended(part)[:, :-1]), before)
        total = torch.stack([weight * (losses * mask).sum() for weight, losses, mask in terms.values()]).sum()
        log = {name: masked_mean(losses, mask) for name, (_, losses, mask) in terms.items()}
        log["policy_entropy"] = masked_mean(policy.entropy, valid)
        log["value_mean"] = masked_mean(value_bins.decode(value), valid)
        return total / (len(valid) * unroll), {name: each.detach() for name, each in log.items()}

    def _inconsistency(self, arrived: Tensor, images: Tensor) -> Tensor:
        """Minus the cosine between states arrived at (B * unroll, C, h, w) and those of the true frames, (B, unroll).

        The frames are `images` (B, N - 1 + unroll, H, W), one row varied as one. Only the former learn.
        """
        with torch.no_grad():
            stacks = self._varied(images).unfold(1, self.settings.frame_stack, 1).permute(0, 1, 4, 2, 3)
            seen = self.projection(self._represent(stacks.flatten(0, 1))).float()
        agreement = F.cosine_similarity(self.predictor(self.projection(arrived)).float(), seen, -1)
        return -agreement.unflatten(0, stacks.shape[:2])

    def _varied(self, images: Tensor) -> Tensor:
        """In training, images (B, N, H, W), those of a row alike, shifted and made brighter or darker."""
        s = self.settings
        return varied(images, s.shift, s.intensity) if self.training and (s.shift or s.intensity) else images

    def _target_values(self, frames: Tensor, where: Tensor) -> Tensor:
        """The target's values (B, F) of frames `where` (B, F), counted behind the history of `frames` (B, T, H, W)."""
        rows = torch.arange(len(where), device=where.device)[:, None, None]
        stacks = frames[rows, where[..., None] + torch.arange(self.settings.frame_stack, device=where.device)]
        representation, prediction, head = self.target.values()
        images = _scaled(stacks.flatten(0, 1)).contiguous(memory_format=torch.channels_last)
        return value_bins.decode(head(prediction(representation(images)))).view_as(where)

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, Seen]:
        """Gray frames (B, T, H, W), each with those before it, none of which comes from before a reset: the episode's
        first frame stands for them. See `WorldModel.observe`."""
        steps = torch.arange(latent.shape[1], device=latent.device)
        opens = torch.where(reset, steps, 0).cummax(1).values
        back = torch.arange(-self.history, 1, device=latent.device)
        frames = torch.maximum(steps[:, None] + back, opens[..., None])  # (B, T, N)
        stacks = latent[torch.arange(len(latent), device=latent.device)[:, None, None], frames]
        state = self._represent(_scaled(stacks.flatten(0, 1))).unflatten(0, reset.shape)
        return state, Seen(stacks[:, -1], state[:, -1])

    @torch.no_grad()
    def imagine(self, state: Seen | Node, action: Tensor, numbers: Tensor | None = None) -> tuple[Imagined, Node]:
        """One step, without chance: expected reward, and whether an end is likelier than not."""
        arrived = self.dynamics(state.state, action)
        if self.termination_head is None:
            terminated = torch.zeros_like(action, dtype=torch.bool)
        else:
            terminated = self.termination_head(arrived).squeeze(-1) > 0
        return Imagined(arrived, value_bins.decode(self.reward_head(arrived)), terminated), Node(arrived)

    def root(self, state: Seen | Node) -> Node:
        """The state without the frames."""
        return Node(state.state)

    @torch.no_grad()
    def predict(self, state: Seen | Node) -> Prediction:
        """Policy logits (B, A) and value (B,) of the current frame."""
        hidden = self.prediction(state.state)
        return Prediction(self.policy_head(hidden).float(), value_bins.decode(self.value_head(hidden)))

    def features(self, state: Seen | Node) -> Tensor:
        """The current state, (B, C, h, w) float32."""
        return state.state

    def latent(self, state: Seen | Node) -> Tensor:
        """The same."""
        return state.state

    @torch.no_grad()
    def perceive(
        self,
        state: Seen | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> Seen:
        """Take in one real frame. An episode's first frame fills the stack."""
        frame = gray(observation)[:, None]
        stack = frame.repeat(1, self.settings.frame_stack, 1, 1)
        if state is not None:
            stack = torch.where(reset[:, None, None, None], stack, torch.cat((state.stack[:, 1:], frame), 1))
        return Seen(stack, self._represent(_scaled(stack)))


class Dynamics(nn.Module):
    """State (B, C, h, w) and action (B,) to the next state, float32: relu(state + norm(conv(both))), and a block."""

    def __init__(self, channels: int, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.conv = conv(channels + actions, channels)
        self.norm = BatchNorm2d(channels)
        self.block = ResidualBlock(channels, channels, "relu")

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        planes = one_hot(action, self.actions, state.dtype)[..., None, None].expand(-1, -1, *state.shape[2:])
        x = torch.cat((state, planes), 1).contiguous(memory_format=torch.channels_last)
        return self.block(F.relu(state + self.norm(self.conv(x)))).float()


def gray(observation: Tensor) -> Tensor:
    """Colors (..., 3) uint8 to their luminance (...) uint8, rounded, in whole numbers alone."""
    assert observation.dtype == torch.uint8 and observation.shape[-1] == 3, "frames are uint8 with three colors last"
    red, green, blue = (
        weight * color.to(torch.int32) for weight, color in zip(LUMINANCE, observation.unbind(-1), strict=True)
    )
    return ((red + green + blue + 500) // 1000).to(torch.uint8)


def varied(images: Tensor, shift: int, intensity: float) -> Tensor:
    """Images (B, N, H, W), each row moved by up to `shift` pixels and multiplied by a factor of its own.

    What moves in at an edge repeats the edge. The factor is normal around 1 with deviation `intensity`, cut at two of
    them. Draws from torch's global generator.
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
    """States (B, C, h, w) to (B, outputs), at first zero whatever the state."""
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
