"""Distributions over actions, one for each action space.

A policy has no weights. It gives meaning to the outputs of a network, its *parameters*: logits, or mean and deviation.
A sample is a function of them and of numbers uniform in [0, 1), so a rollout draws all its random numbers beforehand.

Axes: P outputs of the network, U uniforms of an action, N numbers of a continuous action, K categories, A actions.

Sources: DreamerV3 (Hafner et al. 2023, arXiv 2301.04104) for the normal policies; Simulus (Cohen et al. 2025, arXiv
2502.11537) for bins.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from wmcli.nn.categorical import choose, mixed_log_probabilities, sample, uniform
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete

ContinuousKind = Literal["normal", "truncated-normal", "bins"]
"""Policy of continuous actions: normal with a mean in (-1, 1), the same cut off at -1 and 1, or evenly spaced bins."""
LEAST_STD, MOST_STD = 0.1, 1.0  # of normal policies, as in DreamerV3
SMALLEST = 2.0**-25  # half a step of float32 uniforms, in place of 0


class Policy(ABC):
    """A distribution over the actions of a space."""

    outputs: int
    """P."""
    uniforms: int
    """U."""

    def parameters(self, outputs: Tensor, unimix: float = 0.0) -> Tensor:
        """Return the parameters (..., P) float32 of a network's outputs (..., P).

        Args:
            outputs: Of the network.
            unimix: Share of the uniform distribution over categories. A normal policy has none.
        """
        return outputs.float() if outputs.dtype != torch.float64 else outputs

    def normalize(self, parameters: Tensor) -> Tensor:
        """Return parameters whose categories have log-probabilities in place of any logits."""
        return parameters

    @abstractmethod
    def sample(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        """Draw actions (..., *space.shape) with numbers (..., U) uniform in [0, 1)."""

    @abstractmethod
    def choose(self, parameters: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
        """Draw actions (..., *space.shape) at a temperature; the likeliest at 0, without a random number."""

    @abstractmethod
    def log_probability(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log-probability, or log-density, (...) of actions (..., *space.shape). Normalized parameters."""

    @abstractmethod
    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy (...), nats. Normalized parameters."""


def build_policy(space: ActionSpace, continuous: ContinuousKind = "normal", bins: int = 15) -> Policy:
    """Build the policy of an action space.

    Args:
        space: The action space.
        continuous: Kind of the policy of continuous actions.
        bins: Bins of each number, for the kind "bins".
    """
    if isinstance(space, Discrete):
        return DiscretePolicy(space.count)
    if isinstance(space, Categories):
        return CategoriesPolicy(space.sizes)
    assert isinstance(space, Continuous)
    if continuous == "bins":
        return BinsPolicy(len(space.low), bins)
    return NormalPolicy(len(space.low), truncated=continuous == "truncated-normal")


class DiscretePolicy(Policy):
    """Logits or log-probabilities (..., A) of A actions."""

    uniforms = 1

    def __init__(self, count: int) -> None:
        self.outputs = count

    def parameters(self, outputs: Tensor, unimix: float = 0.0) -> Tensor:
        return mixed_log_probabilities(outputs, unimix)

    def sample(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        return sample(parameters, uniforms[..., 0])

    def choose(self, parameters: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
        return choose(parameters, temperature, generator)

    def normalize(self, parameters: Tensor) -> Tensor:
        return parameters.log_softmax(-1)

    def log_probability(self, parameters: Tensor, action: Tensor) -> Tensor:
        return parameters.gather(-1, action[..., None]).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return -(parameters.exp() * parameters).sum(-1)


class CategoriesPolicy(Policy):
    """Independent categories: the logits or log-probabilities of each, one behind the other."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.outputs, self.uniforms = sum(sizes), len(sizes)
        self._each = [DiscretePolicy(size) for size in sizes]

    def parameters(self, outputs: Tensor, unimix: float = 0.0) -> Tensor:
        return torch.cat([mixed_log_probabilities(part, unimix) for part in outputs.split(self.sizes, -1)], -1)

    def normalize(self, parameters: Tensor) -> Tensor:
        return torch.cat([part.log_softmax(-1) for part in parameters.split(self.sizes, -1)], -1)

    def sample(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        parts = zip(parameters.split(self.sizes, -1), uniforms.unbind(-1), strict=True)
        return torch.stack([sample(part, each) for part, each in parts], -1)

    def choose(self, parameters: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
        parts = parameters.split(self.sizes, -1)
        return torch.stack([choose(part, temperature, generator) for part in parts], -1)

    def log_probability(self, parameters: Tensor, action: Tensor) -> Tensor:
        parts = zip(self._each, parameters.split(self.sizes, -1), action.unbind(-1), strict=True)
        return torch.stack([policy.log_probability(part, each) for policy, part, each in parts], -1).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        parts = zip(self._each, parameters.split(self.sizes, -1), strict=True)
        return torch.stack([policy.entropy(part) for policy, part in parts], -1).sum(-1)


class BinsPolicy(CategoriesPolicy):
    """Continuous actions as categories: each number is one of evenly spaced values, -1 and 1 included."""

    def __init__(self, numbers: int, bins: int) -> None:
        super().__init__((bins,) * numbers)
        self._last = bins - 1

    def sample(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        return self._value(super().sample(parameters, uniforms))

    def choose(self, parameters: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
        return self._value(super().choose(parameters, temperature, generator))

    def log_probability(self, parameters: Tensor, action: Tensor) -> Tensor:
        index = ((action.clamp(-1, 1) + 1) / 2 * self._last).round().long()
        return super().log_probability(parameters, index)

    def _value(self, index: Tensor) -> Tensor:
        return index.float() / self._last * 2 - 1


class NormalPolicy(Policy):
    """Independent normal distributions: mean in (-1, 1) and deviation in (0.1, 1), each (..., N), concatenated.

    Not `truncated`, it also draws actions beyond -1 and 1. The environment takes these as -1 and 1.
    """

    def __init__(self, numbers: int, *, truncated: bool) -> None:
        self.outputs, self.uniforms = 2 * numbers, numbers
        self.truncated = truncated

    def parameters(self, outputs: Tensor, unimix: float = 0.0) -> Tensor:
        mean, deviation = super().parameters(outputs).chunk(2, -1)
        return torch.cat((mean.tanh(), LEAST_STD + (MOST_STD - LEAST_STD) * (deviation + 2).sigmoid()), -1)

    def sample(self, parameters: Tensor, uniforms: Tensor) -> Tensor:
        mean, deviation = parameters.chunk(2, -1)
        uniforms = uniforms.to(mean.dtype).clamp(SMALLEST, 1 - 2 * SMALLEST)
        if self.truncated:
            low, high = self._shares(mean, deviation)
            uniforms = low + uniforms * (high - low)
            return (mean + deviation * torch.special.ndtri(uniforms)).clamp(-1, 1)
        return mean + deviation * torch.special.ndtri(uniforms)

    def choose(self, parameters: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
        mean, deviation = parameters.chunk(2, -1)
        if temperature == 0:
            return mean
        scaled = torch.cat((mean, deviation * temperature), -1)
        return self.sample(scaled, uniform(mean.shape, mean.device, generator))

    def log_probability(self, parameters: Tensor, action: Tensor) -> Tensor:
        mean, deviation = parameters.chunk(2, -1)
        density = -((action - mean) / deviation).square() / 2 - deviation.log() - math.log(2 * math.pi) / 2
        if self.truncated:
            low, high = self._shares(mean, deviation)
            density = density - (high - low).log()
        return density.sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        mean, deviation = parameters.chunk(2, -1)
        entropy = deviation.log() + math.log(2 * math.pi * math.e) / 2
        if self.truncated:
            below, above = (-1 - mean) / deviation, (1 - mean) / deviation
            low, high = self._shares(mean, deviation)
            slope = below * (-below.square() / 2).exp() - above * (-above.square() / 2).exp()
            share = high - low
            entropy = entropy + share.log() + slope / math.sqrt(2 * math.pi) / (2 * share)
        return entropy.sum(-1)

    @staticmethod
    def _shares(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares of the normal distribution below -1 and below 1."""
        return torch.special.ndtr((-1 - mean) / deviation), torch.special.ndtr((1 - mean) / deviation)
