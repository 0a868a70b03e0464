"""Optimizers as the papers name them, and one guarded update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

OptimizerName = Literal["adamw", "adam", "laprop", "sgd"]
LAPROP_MOMENT = "momentum"  # by which a saved state of LaProp is told from one of Adam
EPS = {"adamw": 1e-8, "adam": 1e-8, "laprop": 1e-20, "sgd": 0.0}
DECAY = 0.1  # of the learning rate, each time it falls


class LaProp(torch.optim.Optimizer):
    """Momentum over normalized gradients (Ziyin et al. 2020, arXiv 2002.04839) with linear warm-up.

    For the n-th gradient g of a parameter, n = 1, 2, ..., and r_n = min(1, n / warmup):

        v <- b2 v + (1 - b2) g^2
        m <- b1 m + (1 - b1) r_n g / (sqrt(v / (1 - b2^n)) + eps)
        parameter <- (1 - lr r_n weight_decay) parameter - lr r_n / a_n m

    where a_n is the average of r_1, ..., r_n with decay b1, started at 0: 1 - b1^n without warm-up. (Adam averages
    first and normalizes the average.) The public code has lr inside m as well. That is the same as long as lr does not
    change, and this way a training that goes on with another lr takes it at once.

    Like torch's own, a parameter counts its own gradients; one without a gradient stands still. The moments have its
    type and device. The count stays on the host: with it a_n is known in closed form and nothing waits for the device.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = EPS["laprop"],
        weight_decay: float = 0.0,
        warmup: int = 0,
    ) -> None:
        assert warmup >= 0
        super().__init__(
            parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "warmup": warmup}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures have no use here
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            together: dict[int, list[Tensor]] = {}  # by their count, nearly always one
            for parameter in group["params"]:
                if parameter.grad is not None:
                    together.setdefault(self._counted(parameter), []).append(parameter)
            for count, parameters in together.items():
                self._step(parameters, group, count)

    def _counted(self, parameter: Tensor) -> int:
        """Count a gradient of the parameter: its number, from 1."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            state["square"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state[LAPROP_MOMENT] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        return int(state["step"])  # on the host

    def _step(self, parameters: list[Tensor], group: dict[str, Any], count: int) -> None:
        (b1, b2), warmup = group["betas"], max(1, group["warmup"])
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]  # all have one
        squares = [self.state[parameter]["square"] for parameter in parameters]
        momenta = [self.state[parameter][LAPROP_MOMENT] for parameter in parameters]
        share = min(1.0, count / warmup)
        rate = group["lr"] * share

        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - b2)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_div_(sizes, math.sqrt(1 - b2**count))
        torch._foreach_add_(sizes, group["eps"])
        torch._foreach_mul_(momenta, b1)
        torch._foreach_addcdiv_(momenta, gradients, sizes, (1 - b1) * share)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
        torch._foreach_add_(parameters, momenta, alpha=-rate / _average_share(count, warmup, b1))


def _average_share(count: int, warmup: int, decay: float) -> float:
    """a_n for n = `count`: the average of min(1, k / warmup), k = 1..n, with `decay`, started at 0."""
    rising = min(count, warmup)
    average = (rising - decay * (1 - decay**rising) / (1 - decay)) / warmup
    return 1 - decay ** (count - rising) * (1 - average)


def build_optimizer(
    name: OptimizerName,
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    learning_rate: float,
    weight_decay: float,
    *,
    warmup: int = 0,
    eps: float | None = None,
    beta2: float = 0.999,
    momentum: float = 0.0,
) -> torch.optim.Optimizer:
    """AdamW (decoupled decay), Adam without decay, SGD (decay added to the gradient), each fused into one kernel a
    step, or LaProp (decoupled decay).

    Betas (0.9, `beta2`), for SGD `momentum`; `eps` None is 1e-8, for LaProp 1e-20. Groups may bring a `weight_decay`
    of their own. LaProp alone has `warmup`, updates over which the learning rate rises linearly. A parameter marked
    with `_learning_rate_limit` is trained with that rate where `learning_rate` is higher.
    """
    assert warmup == 0 or name == "laprop", "only LaProp warms up"
    groups = list(_groups_by_rate(parameters, learning_rate))
    eps, betas = EPS[name] if eps is None else eps, (0.9, beta2)
    if name == "laprop":
        return LaProp(groups, learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, warmup=warmup)
    if name == "adamw":
        return torch.optim.AdamW(groups, learning_rate, betas, eps, weight_decay, fused=True)
    if name == "sgd":
        return torch.optim.SGD(groups, learning_rate, momentum, weight_decay=weight_decay, fused=True)
    optimizer = torch.optim.Adam(groups, learning_rate, betas, eps, fused=True)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0  # groups bring decays of their own, which Adam would add to the gradient
    return optimizer


def _groups_by_rate(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], learning_rate: float
) -> Iterator[dict[str, Any]]:
    """The groups of parameters (plain ones are one group), each split by the parameters' limits: in the same order at
    every rate, since saved moments know a parameter by its place."""
    given: list[Any] = list(parameters)
    groups: list[dict[str, Any]] = given if isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        limits: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            limits.setdefault(getattr(parameter, "_learning_rate_limit", math.inf), []).append(parameter)
        for limit, members in limits.items():
            rate = min(group.get("lr", learning_rate), limit)
            yield {**group, "params": members, "lr": rate, "initial_lr": rate}


def decay_rates(optimizer: torch.optim.Optimizer, decay_after: Sequence[int], updates: int) -> None:
    """Set the learning rates for the update after so many `updates`: a tenth after each number in `decay_after`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * DECAY ** sum(updates >= each for each in decay_after)


def schedule_rates(
    optimizer: torch.optim.Optimizer, done: int, *, warmup: int, schedule: Literal["constant", "cosine"], updates: int
) -> None:
    """Set the learning rates for the update after `done` ones: rising linearly over `warmup` updates, then as they are,
    or falling to 0 with the last of `updates` as half a cosine."""
    share = min(1.0, (done + 1) / max(1, warmup))
    if schedule == "cosine" and done >= warmup:
        share = (1 + math.cos(math.pi * (done - warmup) / max(1, updates - warmup))) / 2
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share


def update(optimizer: torch.optim.Optimizer, loss: Tensor, clip: float) -> Tensor:
    """Backward pass, gradient norm clipped to `clip`, one optimizer step. Returns the norm before clipping, on the
    device."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
    optimizer.step()
    return norm
