"""No call leaves anything on a backbone: state goes in and comes out, and new weights count at once."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from test_backbones import TINY, B, D, L, N, Q, T, inputs, tiny
from torch import nn

from wmcli.backbones import Backbone
from wmcli.training.optim import build_optimizer
from wmcli.world_models.base import parameter_groups

pytestmark = pytest.mark.matrix

HOOKS = """
import torch.optim.optimizer as optimizer
import wmcli.assemble, wmcli.controllers, wmcli.training.optim
print(len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks))
"""


def contents(value: Any) -> Any:
    """Return all that an object holds, down to the numbers of its tensors, in a form to compare."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: contents(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [contents(each) for each in value]
    if hasattr(value, "__dict__") and not isinstance(value, FunctionType | type | partial):
        return {"type": type(value), **contents(vars(value))}
    return value


def calls(model: Backbone) -> list[torch.Tensor]:
    """Return the outputs of every kind of call, with and without a state."""
    x, reset = inputs(B, T, D), torch.zeros(B, T, dtype=torch.bool)
    reset[1, 4] = True
    outputs = [model(x, None)[0]]
    y, state = model(x, model.initial_state(B), reset)
    z, state = model.step(x[:, 0], state, reset[:, 0])
    last, _ = model.read(x, None)
    *answers, _ = model.fork(inputs(B, N, L, D), inputs(Q, D), state)
    return [*outputs, y, z, last, *answers]


@pytest.fixture(params=[True, False], ids=["train", "eval"])
def training(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("name", sorted(TINY))
def test_calls_leave_a_backbone_as_it_was(name: str, training: bool) -> None:
    model = tiny(name).train(training)
    before = contents(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            calls(model)
    assert contents(model) == before


@pytest.mark.parametrize("name", sorted(TINY))
def test_new_weights_count_at_once(name: str, training: bool) -> None:
    """After a step of the fused optimizer, which torch's own version counters of tensors miss."""
    model = tiny(name).train(training)
    optimizer = build_optimizer("adamw", parameter_groups(model, 0.0), 0.05, 0.0)
    with torch.no_grad():
        old = calls(model)
    sum(each.square().sum() for each in calls(model)).backward()
    optimizer.step()
    untouched = tiny(name).train(training)
    untouched.load_state_dict(model.state_dict())
    with torch.no_grad():
        for got, want, before in zip(calls(model), calls(untouched), old, strict=True):
            assert torch.equal(got, want)
            assert (got - before).abs().max() > 1e-3


def test_contents_detects_kept_tensors() -> None:
    model = nn.Linear(2, 2)
    model.notes = {"kept": [torch.zeros(2)]}
    before = contents(model)
    assert contents(model) == before
    model.notes["kept"][0] += 1
    assert contents(model) != before


def test_no_import_hooks_into_optimizers() -> None:
    result = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, check=False)
    assert result.stdout == "0 0\n", result.stderr
