"""World models to plan in: UniZero, and what it shares with MuZero (muzero.py).

UniZero reads a frame's latent and the action taken in it as two elements of the backbone. The output at an action says
what comes of it, the output at a latent what to do and what it is worth:

    z_t = SimNorm(encoder(o_t))        y_0, x_0, y_1, x_1, ... = backbone(z_0, a_0, z_1, a_1, ...)
    next latent z_{t+1}, reward r_t = heads(x_t)        policy, value = heads(y_t)

Nothing is decoded: a latent holds what these four need. The policy learns from a search's visits, the value from n-step
returns that end in a value of the *target*, a slow copy of the model.

Sources: UniZero (Pu et al. 2024, arXiv 2406.10667) and its public code opendilab/LightZero; MuZero (Schrittwieser et
al. 2020, arXiv 1911.08265).

B batch, T time (frames), D width of the backbone, A actions, K bins of a scalar, H W C image. Time: see base.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.backbones.base import Backbone, cache_dtype, map_state
from wmcli.errors import UsageError
from wmcli.nn import value_bins
from wmcli.nn.flatten import Flatten
from wmcli.nn.float32_linear import Float32Linear
from wmcli.nn.masked import masked_mean
from wmcli.nn.residual_trunk import Activation, ResidualTrunk, side
from wmcli.nn.simnorm import divergence, simnorm
from wmcli.tokenizers.categorical import scaled
from wmcli.world_models.base import Batch, DynamicsSettings, Imagined, Parts, PlanningWorldModel, Prediction

INIT_STD = 0.02
Size = Annotated[int, Field(ge=1)]
Channels = Annotated[tuple[Size, Size], Field(strict=False)]


class PlanningSettings(DynamicsSettings):
    """What world models to plan in have in common."""

    learns_policy: ClassVar[bool] = True
    makes_frames: ClassVar[bool] = False

    discount: float = Field(0.997, gt=0, le=1)
    """Worth of a reward one step later."""
    td_steps: int = Field(5, ge=1)
    """Real rewards in a value's target, before it goes on with a value of the frame reached."""
    bootstrap: Literal["target", "search"] = "target"
    """That value: of the slow copy of the model, or of the stored search where there was one."""
    end_on_truncation: bool = False
    """Learn time limits as terminations, as the public code does; else returns stop short of them."""
    predict_termination: bool = False
    """Learn as well where episodes end, so that a search knows where nothing follows; the papers' models do not."""
    updates: int = Field(200, ge=0)
    """Updates in one call of the stage."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay: of unizero on all that has two axes or more, embeddings included, of muzero on everything."""


class UniZeroSettings(PlanningSettings):
    """UniZero, and how it is trained. Defaults: the paper on attention priors (its baseline)."""

    kind: Literal["unizero"] = "unizero"
    """A policy and a value in a sequence of latents and actions, to plan with."""
    sequence_length: int = Field(10, ge=2)
    """Frames of a segment that are learned from."""
    context: int = Field(4, ge=2)
    """Real frames that acting and searching look back on, the current one included. A backbone without a limited number
    of positions carries its state through the search, beyond them."""
    channels: Channels = (32, 64)
    """Of the encoder's convolutions, before and after its second halving."""
    activation: Activation = "leaky_relu"
    """Of the encoder (public code: gelu_tanh)."""
    group: int = Field(8, ge=2)
    """Neighbors in a latent that sum to 1."""
    bound: int = Field(50, ge=1)
    """The outermost bins of values and rewards, squashed: 50 is 2364."""
    latent_weight: float = Field(10.0, ge=0)
    """Weight of the loss of the next latent."""
    reward_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the reward."""
    policy_weight: float = Field(1.0, ge=0)
    """Weight of the loss of the policy."""
    value_weight: float = Field(0.5, ge=0)
    """Weight of the loss of the value."""
    entropy_weight: float = Field(1e-4, ge=0)
    """Weight of the policy's entropy (nats) within its loss."""
    target_rate: float = Field(0.05, gt=0, le=1)
    """How far the target moves towards the model after each update."""
    batch: int = Field(64, ge=1)
    """Segments in an update."""
    optimizer: Literal["adamw", "adam", "laprop"] = "adamw"
    """Of the whole model."""
    learning_rate: float = Field(1e-4, gt=0)
    """Step size of the optimizer."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the optimizer's second moments."""
    clip: float = Field(5.0, gt=0)
    """Largest norm of the whole gradient (public code: 20)."""

    @model_validator(mode="after")
    def _fits_into_the_horizon(self) -> UniZeroSettings:
        if self.context > self.sequence_length:
            raise ValueError(
                f"context = {self.context} must not be more than sequence_length = {self.sequence_length} frames."
            )
        return self

    def build(self, parts: Parts) -> UniZero:
        backbone = parts.square_backbone(2 * self.sequence_length, 2)
        return UniZero(self, backbone, parts.actions, parts.size)


# -- targets, on any leading frames -----------------------------------------------------------------------------------


def part_of(batch: Batch, span: slice) -> Batch:
    """The frames `span` of every row."""
    return map_state(lambda each: each[:, span], batch)


def bootstrap_frames(valid: Tensor, frames: int, steps: int) -> Tensor:
    """(B, frames) int64: where the return of each of the first `frames` goes on with a value, `steps` later.

    At the end of the data it is the last real frame. valid (B, T) is True in the first frames of each row.
    """
    last = valid.sum(1, keepdim=True) - 1
    return torch.minimum(torch.arange(steps, steps + frames, device=valid.device), last)


def n_step_returns(
    reward: Tensor, ended: Tensor, valid: Tensor, value: Tensor, steps: int, discount: float
) -> tuple[Tensor, Tensor]:
    """Returns G (B, F) of the first F frames of rows, and where (B, F) they can be learned from. l last real frame.

    G_t = sum_{i < m} discount^i r_{t+i} + discount^m value_t, with m = min(steps, l - t); if the task ends in l, all
    rewards up to r_l count and, where the end comes within `steps`, no value. Without an end l itself has no return.

    Args:
        reward, ended, valid: (B, T), T at least F + steps - 1: a row is real at first, then padded, and of one episode,
            so that it can end in its last real frame alone.
        value: (B, F), of the frames that `bootstrap_frames` names.
    """
    frames = value.shape[1]
    time = torch.arange(frames, device=valid.device)
    last = valid.sum(1, keepdim=True) - 1
    # A reward counts if something stands behind it: the next frame, or nothing for good.
    counts = valid & (F.pad(valid[:, 1:], (0, 1)) | ended)
    powers = discount ** torch.arange(steps, device=valid.device, dtype=reward.dtype)
    # A product and a sum: under autocast a matrix product would be in bfloat16.
    rewards = ((reward * counts)[:, : frames + steps - 1].unfold(1, steps, 1) * powers).sum(-1)
    over = (ended & valid).any(1, keepdim=True) & (time + steps > last)
    ahead = (last - time).clamp(0, steps)
    bootstrapped = value.masked_fill(over, 0) * discount ** ahead.to(reward.dtype)
    return rewards + bootstrapped, counts[:, :frames]


class PolicyTerms(NamedTuple):
    """What a policy's loss is made of, each (B, T) float32."""

    loss: Tensor
    """Cross entropy against the search, nats."""
    entropy: Tensor
    """Nats."""
    learned: Tensor
    """bool: real, and searched."""


def policy_terms(logits: Tensor, batch: Batch) -> PolicyTerms:
    """From logits (B, T, A) of the frames of `batch`."""
    log_policy = _wide(logits).log_softmax(-1)
    entropy = -(log_policy.exp() * log_policy).sum(-1)
    if batch.targets is None:
        return PolicyTerms(torch.zeros_like(entropy), entropy, torch.zeros_like(batch.valid))
    loss = -(batch.targets.policy * log_policy).sum(-1)
    return PolicyTerms(loss, entropy, batch.valid & batch.targets.found)


class BootstrappedWorldModel(PlanningWorldModel):
    """What UniZero and MuZero share: n-step values from a target, a copy that follows what values are made of.

    The target is a part of the weights, is never learned and stays in eval mode.
    """

    frozen_encoder = False
    across_ends = False
    decodes = None
    draws = 0

    settings: Any
    target: Any  # nn.ModuleDict, from the name of a part to its copy

    def _make_target(self, *parts: str) -> None:
        copies = {name: copy.deepcopy(getattr(self, name)) for name in parts}
        self.target = nn.ModuleDict(copies).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> BootstrappedWorldModel:
        super().train(mode)
        self.target.eval()
        return self

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Weight decay on all that has two axes or more; none on the rest and on what a backbone exempts."""
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            if not name.startswith("target."):
                spared = parameter.ndim < 2 or getattr(parameter, "_no_weight_decay", False)
                (plain if spared else decayed).append(parameter)
        return [{"params": decayed, "weight_decay": self.settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]

    def _ended(self, batch: Batch) -> Tensor:
        return batch.terminated | batch.truncated if self.settings.end_on_truncation else batch.terminated

    @torch.no_grad()
    def _value_targets(
        self, batch: Batch, frames: int, target_values: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`n_step_returns` of the first `frames`; target_values gives those at some frames (B, frames) of each row."""
        s, searched = self.settings, batch.targets
        where = bootstrap_frames(batch.valid, frames, s.td_steps)
        value = target_values(where)
        if s.bootstrap == "search" and searched is not None:
            value = torch.where(searched.found.gather(1, where), searched.value.gather(1, where), value)
        return n_step_returns(batch.reward, self._ended(batch), batch.valid, value, s.td_steps, s.discount)

    def _termination_losses(self, logit: Tensor, ended: Tensor) -> Tensor:
        """Binary cross entropy (B, T) of logits (B, T, 1)."""
        return F.binary_cross_entropy_with_logits(logit.float().squeeze(-1), ended.float(), reduction="none")


# -- UniZero ----------------------------------------------------------------------------------------------------------


class FrameEncoder(nn.Sequential):
    """Frames (..., H, W, 3) uint8 to latents (..., D) float32, of which every `group` neighbors sum to 1."""

    def __init__(self, settings: UniZeroSettings, width: int, size: int) -> None:
        super().__init__(
            ResidualTrunk(3, settings.channels, settings.activation),
            Flatten(),
            nn.Linear(settings.channels[1] * side(size) ** 2, width, bias=False),
        )
        self.group = settings.group
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)

    def forward(self, observation: Tensor) -> Tensor:
        z = super().forward(scaled(observation.flatten(0, -4)))
        return simnorm(z, self.group).unflatten(0, observation.shape[:-3])


class UniZeroState(NamedTuple):
    """Where a trajectory stands. All are tensors (B, ...) of constant shape, so it is a search's node as it is."""

    tokens: Tensor
    """(B, W, D): the elements read last, latents and actions in turn, right-aligned; the last is the current latent."""
    length: Tensor
    """(B,) int64: how many of them belong to the episode."""
    memory: tuple[Tensor, ...]
    """The tensors of the backbone's state; none where the backbone reads the elements anew."""
    summary: Tensor
    """(B, D) float32: the backbone's output at the current latent."""


class UniZero(BootstrappedWorldModel):
    """Learns latents, what follows from them, and what to do, for frames of `size` pixels.

    A latent sees at most 2 * context - 1 elements, itself included; with so many the oldest frame falls away. A
    backbone with learned positions (`max_length`) reads the elements that are left anew at every imagined step, at
    positions from 0 on, which is exact. Any other carries its state from node to node, and forgets nothing.

    Raises:
        UsageError: the backbone's width is no multiple of the latent's groups.
    """

    backbone: Any  # Backbone, which as an nn.Module would be taken for a tensor

    def __init__(self, settings: UniZeroSettings, backbone: Backbone, actions: int, size: int) -> None:
        super().__init__()
        width = backbone.width
        if width % settings.group:
            raise UsageError(
                f"backbone.width = {width}: latents of this width do not fall into groups of dynamics.group = "
                f"{settings.group}; use a multiple of it"
            )
        assert backbone.max_length is None or backbone.max_length >= 2 * settings.sequence_length
        self.settings = settings
        self.actions = actions
        self.discount = settings.discount
        self.context = settings.context
        self.segment = settings.sequence_length + settings.td_steps
        self.feature_shape = (width,)
        self.kept = 2 * settings.context - 3  # elements that are left for the next action to stand behind
        self.rereads = backbone.max_length is not None
        # What `_memory` puts the tensors of a state back into.
        self._form = None if self.rereads else backbone.initial_state(0)
        self.encoder = FrameEncoder(settings, width, size)
        self.action_embedding = nn.Embedding(actions, width)
        self.backbone = backbone
        # Not decoded to numbers: what it gives is an element of the backbone, which autocast rounds in any case.
        self.latent_head = _head(width, width, nn.Linear)
        self.reward_head = _head(width, value_bins.bins(settings.bound))
        self.policy_head = _head(width, actions)
        self.value_head = _head(width, value_bins.bins(settings.bound))
        self.termination_head = _head(width, 1) if settings.predict_termination else None
        nn.init.normal_(self.action_embedding.weight, std=INIT_STD)
        self._make_target("encoder", "action_embedding", "backbone", "value_head")

    @property
    def remembers(self) -> int:
        return self.settings.context - 1

    @torch.no_grad()
    def after_update(self) -> None:
        """Move the target's parameters towards the model's. Its batch statistics come of its own passes."""
        for name, part in self.target.items():
            new = list(getattr(self, name).parameters())
            torch._foreach_lerp_(list(part.parameters()), new, self.settings.target_rate)

    # -- the parts ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, observation: Tensor) -> Tensor:
        """Frames (B, T, H, W, C) uint8 to latents (B, T, D)."""
        return self.encoder(observation)

    def _next_latent(self, x: Tensor) -> Tensor:
        """Outputs at actions (..., D) to the latents of the next frames (..., D)."""
        return simnorm(self.latent_head(x), self.settings.group)

    # -- learning -----------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Weighted losses of next latent, reward, policy, value and termination, each the mean over what is real.

        `batch.latent` holds frames (B, horizon + td_steps, H, W, C), of which the first `horizon` are learned from. The
        label of a next latent is the target's, from the same frames and with their batch statistics. The policy is
        learned where a search was made.

        The names: `latent_loss` (KL, nats a group), `reward_loss`, `policy_loss`, `value_loss` (cross entropies, nats),
        `termination_loss` if it is learned, `policy_entropy` (nats) and `value_mean` (discounted reward). Fresh weights
        predict uniform latents, so `latent_loss` begins at ln `group` less the labels' entropy: 0.7 to 1 at the paper's
        size, as in the public code.
        """
        s = self.settings
        part = part_of(batch, slice(s.sequence_length))
        valid = part.valid
        z = self.encoder(part.latent)
        y, x = self._read_pairs(z, part.action, self.action_embedding, self.backbone)
        value_target, has_return = self._value_targets(
            batch, s.sequence_length, lambda at: self._target_values(batch, at)
        )
        label = self._labels(part.latent)  # after the values: it moves the statistics that they are read with

        latent_losses = divergence(label[:, 1:], self._next_latent(x[:, :-1]), s.group)
        latent_loss = masked_mean(latent_losses, valid[:, 1:])
        reward_loss = masked_mean(value_bins.loss(self.reward_head(x), part.reward), valid)
        value = self.value_head(y)
        value_loss = masked_mean(value_bins.loss(value, value_target), has_return)
        policy = policy_terms(self.policy_head(y), part)
        policy_loss = masked_mean(policy.loss, policy.learned)
        entropy = masked_mean(policy.entropy, policy.learned)

        total = s.latent_weight * latent_loss + s.reward_weight * reward_loss + s.value_weight * value_loss
        total = total + s.policy_weight * (policy_loss - s.entropy_weight * entropy)
        log = {
            "latent_loss": latent_loss,
            "reward_loss": reward_loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "policy_entropy": masked_mean(policy.entropy, valid),
            "value_mean": masked_mean(value_bins.decode(value), valid),
        }
        if self.termination_head is not None:
            ends = self._termination_losses(self.termination_head(x), self._ended(part))
            log["termination_loss"] = masked_mean(ends, valid)
            total = total + log["termination_loss"]
        return total, {name: each.detach() for name, each in log.items()}

    @staticmethod
    def _read_pairs(z: Tensor, action: Tensor, embedding: Any, backbone: Any) -> tuple[Tensor, Tensor]:
        """Latents (B, T, D) and actions (B, T), from nothing, to the outputs at latents and at actions (B, T, D)."""
        pairs, _ = backbone(torch.stack((z, embedding(action)), 2).flatten(1, 2), None)
        y, x = pairs.unflatten(1, (-1, 2)).unbind(2)
        return y, x

    @torch.no_grad()
    def _labels(self, frames: Tensor) -> Tensor:
        """The target's latents of frames (B, T, H, W, C), in training with their batch statistics."""
        encoder = self.target["encoder"].train(self.training)
        label = encoder(frames)
        encoder.eval()
        return label

    def _target_values(self, batch: Batch, where: Tensor) -> Tensor:
        """The target's values (B, F) of frames `where` (B, F), ascending: it reads F frames from the first of them."""
        frames = where[:, :1] + torch.arange(where.shape[1], device=where.device)
        rows = torch.arange(len(where), device=where.device)[:, None]
        encoder, embedding, backbone, head = self.target.values()
        y, _ = self._read_pairs(encoder(batch.latent[rows, frames]), batch.action[rows, frames], embedding, backbone)
        return value_bins.decode(head(y)).gather(1, where - where[:, :1])

    # -- imagination --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def observe(
        self, latent: Tensor, action: Tensor, reset: Tensor, numbers: Tensor | None = None
    ) -> tuple[Tensor, UniZeroState]:
        """Every frame with as much of its past as acting would have. See `WorldModel.observe`."""
        rows, time = action.shape
        window = 2 * self.context - 1
        tokens = torch.stack((self._token(latent), self._token(self.action_embedding(action))), 2).flatten(1, 2)
        windows = F.pad(tokens, (0, 0, window - 1, 0)).unfold(1, window, 2).mT  # (B, T, window, D)
        steps = torch.arange(time, device=reset.device)
        since = steps - torch.where(reset, steps, 0).cummax(1).values  # frames since the last reset
        length = (2 * since + 1).clamp(max=window)
        features, _ = self._read(windows.flatten(0, 1), length.flatten(), None)
        features = features.unflatten(0, (rows, time))
        return features, self._state(windows[:, -1], length[:, -1])

    @torch.no_grad()
    def imagine(
        self, state: UniZeroState, action: Tensor, numbers: Tensor | None = None
    ) -> tuple[Imagined, UniZeroState]:
        """One step, without chance: expected reward and next latent, and whether an end is likelier than not."""
        act = self._token(self.action_embedding(action))
        if self.rereads:
            memory = self.backbone.initial_state(len(action))
            x, memory = self._read(torch.cat((state.tokens, act[:, None]), 1), state.length + 1, memory)
        else:
            x, memory = self.backbone.step(_wide(act), self._memory(state.memory))
        z = self._token(self._next_latent(x))
        summary, memory = self.backbone.step(_wide(z), memory)
        kept = state.tokens.shape[1]
        after = UniZeroState(
            torch.cat((state.tokens, act[:, None], z[:, None]), 1)[:, -kept:],
            (state.length + 2).clamp(max=kept),
            () if self.rereads else _tensors(memory),
            _wide(summary),
        )
        if self.termination_head is None:
            terminated = torch.zeros_like(action, dtype=torch.bool)
        else:
            terminated = self.termination_head(x).squeeze(-1) > 0
        return Imagined(self.latent(after), value_bins.decode(self.reward_head(x)), terminated), after

    def root(self, state: UniZeroState) -> UniZeroState:
        """What a backbone carries in its state is not kept a second time as elements; the current latent is."""
        if self.rereads:
            return state
        return state._replace(tokens=state.tokens[:, -1:], length=torch.ones_like(state.length))

    @torch.no_grad()
    def predict(self, state: UniZeroState) -> Prediction:
        """Policy logits (B, A) and value (B,) of the current frame."""
        return Prediction(_wide(self.policy_head(state.summary)), value_bins.decode(self.value_head(state.summary)))

    def features(self, state: UniZeroState) -> Tensor:
        """The backbone's output at the current latent, (B, D) float32."""
        return state.summary

    def latent(self, state: UniZeroState) -> Tensor:
        """The current frame's latent, (B, D)."""
        return _wide(state.tokens[:, -1])

    # -- acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def perceive(
        self,
        state: UniZeroState | None,
        observation: Tensor,
        previous_action: Tensor,
        reset: Tensor,
        generator: torch.Generator | None = None,
    ) -> UniZeroState:
        """Take in one real frame: the last `context` frames of the episode are read anew each time."""
        z = self._token(self.encode(observation[:, None]))
        if state is None:
            tokens = z.new_zeros(len(z), self.kept, z.shape[2])
            length = torch.ones_like(previous_action)
        else:
            tokens = state.tokens
            length = (state.length + 2).masked_fill(reset, 1)
        act = self._token(self.action_embedding(previous_action))
        return self._state(torch.cat((tokens, act[:, None], z), 1), length)

    def _state(self, window: Tensor, length: Tensor) -> UniZeroState:
        """After a window (B, 2 * context - 1, D) of which the last `length` (B,) elements are real."""
        memory = None if self.rereads else self.backbone.initial_state(len(window))
        summary, memory = self._read(window, length, memory)
        kept = window[:, -self.kept :]
        return UniZeroState(kept, length.clamp(max=self.kept), _tensors(memory), summary)

    def _read(self, window: Tensor, length: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """The output at the last of W elements (B, W, D), of which `length` (B,) are real, and the backbone's state."""
        opens = torch.arange(window.shape[1], device=window.device) == (window.shape[1] - length)[:, None]
        y, memory = self.backbone.read(_wide(window), memory, opens)
        return _wide(y), memory

    def _token(self, element: Tensor) -> Tensor:
        """An element as a window keeps it: in the precision that the backbone's projections come in."""
        return element.to(cache_dtype(self.action_embedding.weight))

    def _memory(self, tensors: tuple[Tensor, ...]) -> Any:
        """The backbone's state of its tensors: the inverse of `_tensors`."""
        left = iter(tensors)
        return map_state(lambda _: next(left), self._form)


def _tensors(memory: Any) -> tuple[Tensor, ...]:
    """The tensors of a backbone's state, without the constants in it."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_state(take, memory)
    return tuple(found)


def _head(width: int, outputs: int, last_layer: type[nn.Linear] = Float32Linear) -> nn.Sequential:
    """(..., width) to (..., outputs), at first zero whatever comes in."""
    hidden, last = nn.Linear(width, width), last_layer(width, outputs)
    nn.init.normal_(hidden.weight, std=INIT_STD)
    for zero in (hidden.bias, last.weight, last.bias):
        nn.init.zeros_(zero)
    return nn.Sequential(hidden, nn.GELU(approximate="tanh"), last)


def _wide(x: Tensor) -> Tensor:
    """In float32, if it is of less."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
