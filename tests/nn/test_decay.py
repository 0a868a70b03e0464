"""Which parameters weight decay falls on."""

from __future__ import annotations

import torch
from torch import nn

from wmcli.world_models.base import parameter_groups


class Net(nn.Module):
    """One parameter of each sort, in a mixed order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.RMSNorm(2)
        self.table = nn.Embedding(5, 4)
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.Embedding(2, 4))
        self.tied = nn.Linear(4, 5, bias=False)
        self.tied.weight = self.table.weight
        self.marked = nn.Parameter(torch.zeros(2, 2))
        self.marked._no_weight_decay = True  # type: ignore[attr-defined]
        self.unmarked = nn.Parameter(torch.zeros(2, 2))
        self.unmarked._no_weight_decay = False  # type: ignore[attr-defined]


def test_decay_falls_on_unmarked_matrices_that_are_no_tables_in_the_order_of_the_module() -> None:
    net = Net()
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    decayed, plain = parameter_groups(net, 0.3)
    assert decayed["weight_decay"] == 0.3 and plain["weight_decay"] == 0.0
    assert [names[id(each)] for each in decayed["params"]] == ["unmarked", "conv.weight", "inside.0.weight"]
    assert [names[id(each)] for each in plain["params"]] == [
        "scale",
        "marked",
        "conv.bias",
        "norm.weight",
        "table.weight",
        "inside.0.bias",
        "inside.1.weight",
    ]
