"""Which parameters weight decay falls on."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """All parameters of `module` in two groups for `torch.optim`: decayed by `weight_decay`, and not decayed.

    Decay falls on matrices (and whatever has more axes). It spares vectors and scalars, such as biases and norms, the
    tables of `nn.Embedding`, and parameters marked with `_no_weight_decay = True`. Within a group the parameters stand
    in the order of `module.parameters()`.
    """
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in module.parameters():
        spared = parameter.ndim < 2 or id(parameter) in tables or getattr(parameter, "_no_weight_decay", False)
        (plain if spared else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
