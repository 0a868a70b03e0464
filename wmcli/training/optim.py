"""Optimizers as the papers name them, learning-rate schedules, and one update with clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from wmcli import ranks
from wmcli.config import Section

OptimizerName = Literal["adamw", "adam", "laprop", "sgd"]
LAPROP_MOMENT = "momentum"  # marks a saved state of LaProp
EPS = {"adamw": 1e-8, "adam": 1e-8, "laprop": 1e-20, "sgd": 0.0}
DECAY = 0.1  # of the learning rate, each time it falls
LEAST_NORM = 1e-3  # of a tensor of weights, for adaptive clipping
WINDOW = 101  # updates whose gradient norms a guard knows


class LaProp(torch.optim.Optimizer):
    """Momentum over normalized gradients, with linear warm-up.

    For the n-th gradient g of a parameter, n = 1, 2, ..., and r_n = min(1, n / warmup):

        v <- b2 v + (1 - b2) g^2
        m <- b1 m + (1 - b1) r_n g / (sqrt(v / (1 - b2^n)) + eps)
        parameter <- (1 - lr r_n weight_decay) parameter - lr r_n / a_n m

    where a_n is the average of r_1, ..., r_n with decay b1, started at 0: 1 - b1^n without warm-up. (Adam averages
    first and normalizes the average.) The public code also has lr inside m. Both agree for a constant lr. Here a
    changed lr takes effect at once.

    As in torch's optimizers, each parameter counts its own gradients, and one without a gradient does not change. The
    moments have its type and device. The count is on the device, too, so that a CUDA graph can hold a step. Parameters
    of a group that have had equally many gradients share one. As in torch's fused ones, a step changes nothing where a
    tensor `found_inf` of this object is 1.

    Source: Ziyin et al. 2020, arXiv 2002.04839.
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not used
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            fresh: Tensor | None = None
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    fresh = torch.zeros((), dtype=torch.int64, device=parameter.device) if fresh is None else fresh
                    self.state[parameter] = {
                        "step": fresh,
                        "square": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                        LAPROP_MOMENT: torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    }
            sharing: dict[int, list[Tensor]] = {}  # nearly always a single count
            for parameter in group["params"]:
                if parameter in self.state:
                    sharing.setdefault(id(self.state[parameter]["step"]), []).append(parameter)
            for parameters in sharing.values():
                self._step(parameters, group)

    def _step(self, sharing: list[Tensor], group: dict[str, Any]) -> None:
        """Update those of some parameters with one count that have a gradient."""
        parameters = [parameter for parameter in sharing if parameter.grad is not None]
        if not parameters:
            return
        count = self.state[parameters[0]]["step"]
        if len(parameters) < len(sharing):
            count = count.clone()
            for parameter in parameters:
                self.state[parameter]["step"] = count
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]  # all have one
        squares = [self.state[parameter]["square"] for parameter in parameters]
        momenta = [self.state[parameter][LAPROP_MOMENT] for parameter in parameters]
        skip: Tensor | None = getattr(self, "found_inf", None)
        changed = [count, *parameters, *squares, *momenta]
        before = [] if skip is None else [each.clone() for each in changed]
        count += 1

        # Scalars on the device, in float64 until they are used. Only products take them there without waiting.
        (b1, b2), warmup, n = group["betas"], max(1, group["warmup"]), count.double()
        share = (n / warmup).clamp(max=1.0)
        rate = group["lr"] * share
        kind = parameters[0].dtype

        torch._foreach_mul_(squares, b2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - b2)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_mul_(sizes, (1 - b2**n).rsqrt().to(kind))
        torch._foreach_add_(sizes, group["eps"])
        torch._foreach_mul_(sizes, (1 / ((1 - b1) * share)).to(kind))
        torch._foreach_mul_(momenta, b1)
        torch._foreach_addcdiv_(momenta, gradients, sizes)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, (1 - rate * group["weight_decay"]).to(kind))
        step = rate / _average_share(n, warmup, b1)
        torch._foreach_sub_(parameters, torch._foreach_mul(momenta, step.to(kind)))
        if skip is not None:
            for each, kept in zip(changed, before, strict=True):
                each.copy_(torch.where(skip.bool(), kept, each))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments and counts, and let parameters of a group share equal counts again."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            counts: dict[int, Tensor] = {}
            for parameter in group["params"]:
                if parameter in self.state:
                    count = self.state[parameter]["step"].to(parameter.device, torch.int64)
                    self.state[parameter]["step"] = counts.setdefault(int(count), count)


def _average_share(count: Tensor, warmup: int, decay: float) -> Tensor:
    """Return a_n for n = `count`: the average of min(1, k / warmup), k = 1..n, with `decay`, started at 0."""
    rising = count.clamp(max=warmup)
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
    agc: float = 0.0,
) -> torch.optim.Optimizer:
    """Build an optimizer: AdamW or LaProp (decoupled decay), Adam without decay, or SGD (decay added to the gradient).

    All but LaProp run as one fused kernel per step. On a GPU learning rates are tensors, so that a CUDA graph can hold
    a step and a schedule can still change them. A parameter marked with `_learning_rate_limit` is trained with at most
    that rate.

    Args:
        name: Kind of optimizer.
        parameters: Parameters, or groups that may have a `weight_decay` of their own.
        learning_rate: Step size.
        weight_decay: Of groups without their own.
        warmup: Updates over which the learning rate rises linearly. LaProp only.
        eps: None is 1e-8, for LaProp 1e-20.
        beta2: Decay of the second moment; that of the first is 0.9.
        momentum: Of SGD.
        agc: Limit of adaptive gradient clipping, which `update` applies, see `clip_adaptively`. 0 for none.
    """
    assert warmup == 0 or name == "laprop", "only LaProp warms up"
    groups = list(_groups_by_rate(parameters, learning_rate))
    for group in groups if agc else ():
        group["agc"] = agc
    on_cuda = groups[0]["params"][0].is_cuda
    for group in groups if on_cuda else ():
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)
    eps, betas = EPS[name] if eps is None else eps, (0.9, beta2)
    if name == "laprop":
        return LaProp(groups, learning_rate, betas=betas, eps=eps, weight_decay=weight_decay, warmup=warmup)
    if name == "adamw":
        return torch.optim.AdamW(groups, learning_rate, betas, eps, weight_decay, fused=True, capturable=on_cuda)
    if name == "sgd":
        return torch.optim.SGD(groups, learning_rate, momentum, weight_decay=weight_decay, fused=True)
    optimizer = torch.optim.Adam(groups, learning_rate, betas, eps, fused=True, capturable=on_cuda)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0  # Adam would add the groups' own decay to the gradient
    return optimizer


def _groups_by_rate(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], learning_rate: float
) -> Iterator[dict[str, Any]]:
    """Split groups by the learning-rate limits of their parameters; plain parameters are one group.

    The order is the same at every rate, since saved moments belong to a parameter by its position.
    """
    entries: list[Any] = list(parameters)
    groups: list[dict[str, Any]] = entries if isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        limits: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            limits.setdefault(getattr(parameter, "_learning_rate_limit", math.inf), []).append(parameter)
        for limit, members in limits.items():
            rate = min(group.get("lr", learning_rate), limit)
            yield {**group, "params": members, "lr": rate, "initial_lr": rate}


def optimizer_for(
    settings: Section, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Build the optimizer that a section of the settings describes."""
    values = settings.model_dump()
    return build_optimizer(
        values["optimizer"],
        parameters,
        values["learning_rate"],
        values["weight_decay"],
        warmup=values.get("warmup", 0) if values["optimizer"] == "laprop" else 0,  # others warm up by a schedule
        eps=values.get("eps") or None,
        beta2=values.get("beta2", 0.999),
        momentum=values.get("momentum", 0.0),
        agc=values.get("agc", 0.0),
    )


class Schedule(NamedTuple):
    """Learning rates over updates, as a share of the optimizer's initial ones."""

    warmup: int = 0
    """Updates over which they rise linearly."""
    cosine: int = 0
    """Update at which they reach 0, as half a cosine that begins after the warm-up; 0 keeps them constant."""
    decay_after: tuple[int, ...] = ()
    """Updates, those of earlier versions included, after each of which they fall to a tenth."""

    @classmethod
    def of(cls, settings: Section) -> Schedule:
        """Return the schedule that a section of the settings describes."""
        values = settings.model_dump()
        decay_after = tuple(values.get("decay_after", ()))
        if "schedule" not in values:
            return cls(decay_after=decay_after)
        return cls(
            warmup=0 if values["optimizer"] == "laprop" else values["warmup"],  # LaProp warms up by itself
            cosine=values["updates"] if values["schedule"] == "cosine" else 0,
            decay_after=decay_after,
        )

    def apply(self, optimizer: torch.optim.Optimizer, update: int, trained: int) -> None:
        """Set the learning rates for the next update.

        Args:
            optimizer: One of `build_optimizer`.
            update: Updates done since training began.
            trained: Updates of earlier versions.
        """
        share = min(1.0, (update + 1) / max(1, self.warmup))
        if self.cosine and update >= self.warmup:
            share = (1 + math.cos(math.pi * (update - self.warmup) / max(1, self.cosine - self.warmup))) / 2
        share *= DECAY ** sum(trained + update >= each for each in self.decay_after)
        for group in optimizer.param_groups:
            rate = group["initial_lr"] * share
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


class GradientGuard:
    """Skips updates whose gradient norm is above `factor` times the median of the last `WINDOW`, theirs included.

    So a gradient that stays larger is followed after half of a window. The first half of the first window skips
    nothing. Its state is on the device, so that judging waits for nothing and a CUDA graph can hold it. A checkpoint
    has it, too (`Resumable`).
    """

    def __init__(self, factor: float, device: torch.device) -> None:
        self._factor = factor
        self._norms = torch.full((WINDOW,), math.inf, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)

    @classmethod
    def of(cls, settings: Section, device: torch.device) -> GradientGuard | None:
        """Return the guard that a section of the settings describes, None for none."""
        factor = settings.model_dump()["skip_gradients_above"]
        return cls(factor, device) if factor else None

    @property
    def skipped(self) -> int:
        """Number of updates skipped so far. It waits for the device."""
        return int(self._skipped)

    @torch.no_grad()
    def judge(self, norm: Tensor) -> Tensor:
        """Take the norm of the next update. Return 1.0 if it is to be skipped, else 0.0, a scalar on the device."""
        median = self._norms.sort().values[WINDOW // 2]
        norm = norm.float().nan_to_num(nan=math.inf, posinf=math.inf)
        skips = (norm > self._factor * median) & (median > 0)
        self._norms.copy_(torch.cat((self._norms[1:], norm[None])))
        self._skipped += skips
        return skips.float()

    def state(self) -> dict[str, Any]:
        """Return the norms and the number of skipped updates."""
        return {"norms": self._norms.cpu().numpy(), "skipped": self.skipped}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a result of `state`."""
        self.continue_from(state)
        self._skipped.fill_(state["skipped"])

    def continue_from(self, state: dict[str, Any]) -> None:
        """Go on with the norms of a finished stage."""
        self._norms.copy_(torch.from_numpy(state["norms"]))


def update(optimizer: torch.optim.Optimizer, loss: Tensor, clip: float, guard: GradientGuard | None = None) -> Tensor:
    """Do a backward pass and one optimizer step, with the gradient norm clipped to `clip`, then adaptively if wanted.

    Gradients are averaged over ranks before. Where the `guard` skips the update, weights, moments and step counts stay.

    Returns:
        The norm before clipping, a scalar on the device.
    """
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    ranks.average_gradients(parameters)
    norm = nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
    for group in optimizer.param_groups:
        if group.get("agc"):
            clip_adaptively(group["params"], group["agc"])
    if guard is not None:
        optimizer.found_inf = guard.judge(norm)  # type: ignore[attr-defined]  # torch's name of what skips a step
    optimizer.step()
    return norm


@torch.no_grad()
def clip_adaptively(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scale each gradient so that its norm is at most `limit` times that of its parameter, and 1e-3 `limit` at least.

    Source: adaptive gradient clipping (Brock et al. 2021, arXiv 2102.06171), of whole tensors as in DreamerV3.
    """
    learning = [parameter for parameter in parameters if parameter.grad is not None]
    if not learning:
        return
    gradients = [parameter.grad for parameter in learning if parameter.grad is not None]  # all have one
    factors = [
        (limit * size.clamp(min=LEAST_NORM) / norm).clamp(max=1.0)  # 1 where the gradient is 0
        for size, norm in zip(torch._foreach_norm(list[Tensor](learning)), torch._foreach_norm(gradients), strict=True)
    ]
    torch._foreach_mul_(gradients, factors)
