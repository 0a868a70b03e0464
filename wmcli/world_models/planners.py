"""Planning world models: the settings, targets and base class that UniZero and MuZero share.

The policy learns from the visits of a search, the value from n-step returns. These end in a value of the *target*, a
slow copy of the model.

Sources: MuZero (Schrittwieser et al. 2020, arXiv 1911.08265); UniZero (Pu et al. 2024, arXiv 2406.10667); Sampled
MuZero (Hubert et al. 2021, arXiv 2104.06303) for policies that learn from samples.

B batch, T time (frames), F first frames that are learned from, A actions, or sampled ones, P parameters of a policy.
Time: see base.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from wmcli.nn.policies import ContinuousKind, Policy
from wmcli.world_models.base import Batch, DynamicsSettings, PlanningWorldModel

Positive = Annotated[int, Field(ge=1)]
Channels = Annotated[tuple[Positive, Positive], Field(strict=False)]


class PlanningSettings(DynamicsSettings):
    """Settings that planning world models share."""

    learns_policy: ClassVar[bool] = True
    makes_frames: ClassVar[bool] = False

    discount: float = Field(0.997, gt=0, le=1)
    """Discount of a reward one step later."""
    td_steps: int = Field(5, ge=1)
    """Real rewards in a value target, before the value of the frame reached. [decisions]"""
    bootstrap: Literal["target", "search"] = "target"
    """Source of the last value in a value target: the slow copy of the model, or the stored search where there is one.
    """
    end_on_truncation: bool = False
    """Learn time limits as terminations, as the public code does; else returns end before them."""
    closing_frames: bool = False
    """Learn from the observation that closes an episode as well; segments of earlier versions have none."""
    predict_termination: bool = False
    """Learn terminations, so that a search stops at the end of an episode. The papers' models do not."""
    continuous: ContinuousKind = "normal"
    """Policy of continuous actions: normal with a mean in (-1, 1), the same cut off at -1 and 1, or evenly spaced bins.
    """
    updates: int = Field(200, ge=0)
    """Updates in one call of the stage. [updates]"""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay. unizero applies it to parameters with two or more axes, embeddings included, muzero to all."""

    @property
    def reads_closing(self) -> bool:
        return self.closing_frames


# -- targets ----------------------------------------------------------------------------------------------------------


def acted_in(batch: Batch) -> Tensor:
    """Return (B, T) bool: the frame is real and an action was taken in it, as in all that close no episode."""
    return batch.valid if batch.is_closing is None else batch.valid & ~batch.is_closing


def bootstrap_frames(valid: Tensor, frames: int, steps: int) -> Tensor:
    """Return the frame whose value continues the return of each of the first `frames`, (B, frames) int64.

    It lies `steps` later, or is the last real frame of the row, or the first one of a row without any.

    Args:
        valid: (B, T) bool, True in the first frames of each row.
        frames: F.
        steps: Real rewards in a return.
    """
    last = (valid.sum(1, keepdim=True) - 1).clamp(min=0)
    return torch.minimum(torch.arange(steps, steps + frames, device=valid.device), last)


def n_step_returns(
    reward: Tensor, ended: Tensor, valid: Tensor, value: Tensor, steps: int, discount: float
) -> tuple[Tensor, Tensor]:
    """Compute the n-step returns of the first F frames of each row.

    With l the last real frame and m = min(steps, l - t),

        G_t = sum_{i < m} discount^i r_{t+i} + discount^m value_t.

    If the task ends in l, all rewards up to r_l count. The value is then left out if the end comes within `steps`.
    Without an end, l itself has no return.

    Args:
        reward: (B, T), T at least F + steps - 1. A row is real first, then padded. It lies within one episode.
        ended: (B, T) bool, True at most in the last real frame.
        valid: (B, T) bool, False in padding.
        value: (B, F), of the frames that `bootstrap_frames` names.
        steps: Real rewards in a return.
        discount: Discount of a reward one step later.

    Returns:
        G (B, F), and a mask (B, F) of the frames that have one.
    """
    frames = value.shape[1]
    time = torch.arange(frames, device=valid.device)
    last = valid.sum(1, keepdim=True) - 1
    # A reward counts if a frame or the end of the task follows it.
    counts = valid & (F.pad(valid[:, 1:], (0, 1)) | ended)
    powers = discount ** torch.arange(steps, device=valid.device, dtype=reward.dtype)
    # A product and a sum: under autocast a matrix product would be in bfloat16.
    rewards = ((reward * counts)[:, : frames + steps - 1].unfold(1, steps, 1) * powers).sum(-1)
    is_over = (ended & valid).any(1, keepdim=True) & (time + steps > last)
    ahead = (last - time).clamp(0, steps)
    bootstrapped = value.masked_fill(is_over, 0) * discount ** ahead.to(reward.dtype)
    return rewards + bootstrapped, counts[:, :frames]


class PolicyTerms(NamedTuple):
    """The terms of a policy's loss, each (B, T)."""

    loss: Tensor
    """Cross entropy against the search, nats, float32. With continuous actions it has densities for probabilities."""
    entropy: Tensor
    """Entropy of the policy, nats, float32."""
    mask: Tensor
    """bool: an action was taken in the frame, after a search."""


def policy_terms(outputs: Tensor, batch: Batch, distribution: Policy) -> PolicyTerms:
    """Compute the terms of the policy loss from a network's outputs (B, T, P) at the frames of `batch`."""
    parameters = distribution.parameters(outputs)
    entropy = distribution.entropy(parameters)
    targets = batch.targets
    if targets is None:
        return PolicyTerms(torch.zeros_like(entropy), entropy, torch.zeros_like(batch.valid))
    each = parameters  # the log-probabilities of all actions
    if targets.sampled is not None:
        each = parameters[..., None, :].expand(*targets.policy.shape, -1)
        each = distribution.log_probability(each, targets.sampled)
    return PolicyTerms(-(targets.policy * each).sum(-1), entropy, acted_in(batch) & targets.is_searched)


# -- the base class ---------------------------------------------------------------------------------------------------


class BootstrappedWorldModel(PlanningWorldModel):
    """A planning world model whose n-step values end in those of a target network.

    The target copies the parts that a value is computed from. It belongs to the weights, gets no gradient and stays in
    eval mode.
    """

    frozen_encoder = False
    across_ends = False
    decodes = None
    uniforms_per_step = 0

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
        """Return groups with weight decay on parameters with two or more axes, unless a backbone exempts them."""
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
        """Return `n_step_returns` of the first `frames`.

        Args:
            batch: Rows of at least `frames` + td_steps - 1 frames.
            frames: F.
            target_values: From frame numbers (B, F) to the target's values (B, F) of these frames.
        """
        s, targets = self.settings, batch.targets
        valid, ended = batch.valid, self._ended(batch)
        if batch.is_closing is not None:  # nothing is earned behind an end
            valid, ended = valid & ~(batch.is_closing & ended), ended & ~batch.is_closing
        where = bootstrap_frames(valid, frames, s.td_steps)
        value = target_values(where)
        if s.bootstrap == "search" and targets is not None:
            value = torch.where(targets.is_searched.gather(1, where), targets.value.gather(1, where), value)
        return n_step_returns(batch.reward, ended, valid, value, s.td_steps, s.discount)

    def _termination_losses(self, logit: Tensor, ended: Tensor) -> Tensor:
        """Return the binary cross entropy (B, T) of logits (B, T, 1)."""
        return F.binary_cross_entropy_with_logits(logit.float().squeeze(-1), ended.float(), reduction="none")
