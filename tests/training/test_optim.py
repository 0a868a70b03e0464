"""Optimisers named as in the papers, and the guarded update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wmcli.training.optim import build_optimiser, update

GRADIENT = torch.tensor([3.0, 4.0])  # of norm 5


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, -2.0]))


def test_the_norm_before_clipping_is_returned_and_a_long_gradient_is_cut_to_length() -> None:
    for clip, factor in [(100.0, 1.0), (2.0, 2 / 5)]:
        weight = parameter()
        norm = update(torch.optim.SGD([weight], lr=1.0), weight @ GRADIENT, clip)
        torch.testing.assert_close(norm, torch.tensor(5.0))
        torch.testing.assert_close(weight.detach(), torch.tensor([1.0, -2.0]) - factor * GRADIENT)


def test_the_norm_is_that_of_all_groups_together() -> None:
    first, second, unused = parameter(), parameter(), parameter()
    optimiser = torch.optim.SGD([{"params": [first, unused]}, {"params": [second], "lr": 0.5}], lr=1.0)
    norm = update(optimiser, first @ GRADIENT + second @ (2 * GRADIENT), 1.0)
    torch.testing.assert_close(norm, torch.tensor(125.0).sqrt())
    torch.testing.assert_close(
        (parameter() - first).norm() ** 2 + (2 * (parameter() - second)).norm() ** 2, torch.tensor(1.0)
    )
    assert torch.equal(unused, parameter())


def test_gradients_do_not_pile_up() -> None:
    weight = parameter()
    optimiser = torch.optim.SGD([weight], lr=0.0)
    assert [float(update(optimiser, weight @ GRADIENT, 1.0)) for _ in range(3)] == pytest.approx([5.0, 5.0, 5.0])


def test_adamw_decays_apart_from_the_gradient() -> None:
    weight = parameter()
    optimiser = build_optimiser("adamw", [weight], 0.1, 0.5)
    update(optimiser, weight @ torch.zeros(2), 1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([1.0, -2.0]) * (1 - 0.1 * 0.5))


@pytest.mark.parametrize("groups", [False, True])
def test_adam_decays_nothing_whatever_the_groups_say(groups: bool) -> None:
    weight = parameter()
    given = [{"params": [weight], "weight_decay": 0.5}] if groups else [weight]
    optimiser = build_optimiser("adam", given, 0.1, 0.5)
    update(optimiser, weight @ torch.zeros(2), 1.0)
    assert torch.equal(weight, parameter())


def test_a_groups_own_decay_goes_before_the_common_one() -> None:
    decayed, plain = parameter(), parameter()
    groups = [{"params": [decayed]}, {"params": [plain], "weight_decay": 0.0}]
    optimiser = build_optimiser("adamw", groups, 0.1, 0.5)
    update(optimiser, (decayed + plain) @ torch.zeros(2), 1.0)
    assert torch.equal(plain, parameter()) and not torch.equal(decayed, parameter())


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_the_first_steps_are_adams(name) -> None:
    """With betas (0.9, 0.999) and eps 1e-8: m / (1 - 0.9^t) over the root of v / (1 - 0.999^t)."""
    weight = parameter()
    optimiser = build_optimiser(name, [weight], 0.01, 0.0)
    expected, m, v = parameter().detach().double(), torch.zeros(2).double(), torch.zeros(2).double()
    for t in range(1, 4):
        gradient = (GRADIENT * t).double()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        update(optimiser, weight @ (GRADIENT * t), 1e9)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-6)
