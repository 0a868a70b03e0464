"""Optimizers named as in the papers, and the guarded update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wmcli.controllers.actor_critic import ActorCriticSettings
from wmcli.tokenizers.vq import TokenizerSettings
from wmcli.training.checkpoint import load_optimizer, load_tensors, optimizer_tensors, save_tensors
from wmcli.training.optim import (
    GradientGuard,
    LaProp,
    Schedule,
    build_optimizer,
    clip_adaptively,
    optimizer_for,
    update,
)
from wmcli.world_models.base import parameter_groups
from wmcli.world_models.latent import LatentWorldModelSettings
from wmcli.world_models.muzero import MuZeroSettings

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
    optimizer = torch.optim.SGD([{"params": [first, unused]}, {"params": [second], "lr": 0.5}], lr=1.0)
    norm = update(optimizer, first @ GRADIENT + second @ (2 * GRADIENT), 1.0)
    torch.testing.assert_close(norm, torch.tensor(125.0).sqrt())
    torch.testing.assert_close(
        (parameter() - first).norm() ** 2 + (2 * (parameter() - second)).norm() ** 2, torch.tensor(1.0)
    )
    assert torch.equal(unused, parameter())


@pytest.mark.parametrize("limit", [0.01, 0.3, 100.0])
def test_adaptive_clipping_of_each_tensor(limit: float) -> None:
    """Against g / max(1, |g| / (limit max(1e-3, |w|))). A gradient of 0 stays 0; a tensor near 0 counts as 1e-3."""
    weights = [nn.Parameter(torch.randn(shape)) for shape in [(3, 4), (5,), (2, 3, 2)]]
    weights += [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    for scale, weight in zip((10.0, 0.1, 1.0, 1.0, 0.0), weights, strict=False):  # the last has no gradient
        weight.grad = scale * torch.randn_like(weight)
    gradients = [weight.grad.clone() for weight in weights[:-1] if weight.grad is not None]
    clip_adaptively(weights, limit)
    for weight, before in zip(weights, gradients, strict=False):
        upper = limit * max(1e-3, float(weight.detach().norm()))
        torch.testing.assert_close(weight.grad, before / max(1.0, float(before.norm()) / upper))
    assert weights[-1].grad is None


def test_an_update_clips_adaptively_what_the_settings_say() -> None:
    settings = ActorCriticSettings(agc=0.1, optimizer="adam")
    weight = parameter()
    clipped, plain = optimizer_for(settings, [weight]), optimizer_for(ActorCriticSettings(), [weight])
    assert "agc" not in plain.param_groups[0]
    norm = update(clipped, weight @ GRADIENT, 1e9)
    assert float(norm) == 5.0
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.norm(), 0.1 * parameter().detach().norm())


def guarded(name: Any, factor: float | None) -> tuple[nn.Module, torch.optim.Optimizer, GradientGuard | None]:
    torch.manual_seed(2)
    net = nn.Linear(3, 2)
    guard = None if factor is None else GradientGuard(factor, torch.device("cpu"))
    return net, build_optimizer(name, net.parameters(), 1e-2, 0.1, momentum=0.9), guard


def learn_by(
    net: nn.Module, optimizer: torch.optim.Optimizer, guard: GradientGuard | None, *scales: float
) -> dict[str, Tensor]:
    """The weights and moments after updates with gradients of some scales."""
    for number, scale in enumerate(scales):
        given = torch.arange(6.0).view(2, 3) + number % 5
        update(optimizer, scale * net(given).square().mean(), 1e9, guard)
    return {f"weight/{name}": each.clone() for name, each in net.state_dict().items()} | {
        name: each.clone() for name, each in optimizer_tensors(optimizer).items()
    }


@pytest.mark.parametrize("name", ["adamw", "adam", "laprop", "sgd"])
@pytest.mark.parametrize("spike", [1e4, math.nan, math.inf])
def test_a_gradient_far_above_the_others_changes_nothing(name: str, spike: float) -> None:
    net, optimizer, guard = guarded(name, 10.0)
    before = learn_by(net, optimizer, guard, *[1.0] * 60)
    for number in (1, 2):
        after = learn_by(net, optimizer, guard, spike)
        assert guard is not None and guard.skipped == number
        assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    after = learn_by(net, optimizer, guard, 1.0)
    twin, its_optimizer, _ = guarded(name, None)
    want = learn_by(twin, its_optimizer, None, *[1.0] * 60, *[1.0])
    assert all(torch.equal(after[key], want[key]) for key in want)  # skipping nothing, it is the plain update


def test_a_guard_skips_nothing_at_first_and_follows_gradients_that_stay_larger() -> None:
    net, optimizer, guard = guarded("sgd", 10.0)
    optimizer.param_groups[0]["lr"] = 0.0
    assert guard is not None
    learn_by(net, optimizer, guard, *[1.0] * 20, 1e4, *[1.0] * 30)
    assert guard.skipped == 0
    learn_by(net, optimizer, guard, *[1.0] * 101, *[1e4] * 70)
    assert 40 < guard.skipped <= 51


def test_without_any_gradient_nothing_is_far_above() -> None:
    guard = GradientGuard(10.0, torch.device("cpu"))
    assert not any(guard.judge(torch.tensor(norm)) for norm in [0.0] * 101 + [1.0])


def test_gradients_do_not_pile_up() -> None:
    weight = parameter()
    optimizer = torch.optim.SGD([weight], lr=0.0)
    assert [float(update(optimizer, weight @ GRADIENT, 1.0)) for _ in range(3)] == pytest.approx([5.0, 5.0, 5.0])


def test_adamw_decays_apart_from_the_gradient() -> None:
    weight = parameter()
    optimizer = build_optimizer("adamw", [weight], 0.1, 0.5)
    update(optimizer, weight @ torch.zeros(2), 1.0)
    torch.testing.assert_close(weight.detach(), torch.tensor([1.0, -2.0]) * (1 - 0.1 * 0.5))


def test_sgd_has_momentum_and_decays_with_the_gradient() -> None:
    weight = parameter()
    optimizer = build_optimizer("sgd", [weight], 0.1, 0.5, momentum=0.9)
    value, speed = torch.tensor([1.0, -2.0]), torch.zeros(2)
    for _ in range(3):
        update(optimizer, weight @ GRADIENT, 100.0)
        speed = 0.9 * speed + GRADIENT + 0.5 * value
        value = value - 0.1 * speed
    torch.testing.assert_close(weight.detach(), value)


def test_beta2_is_how_long_squares_are_remembered() -> None:
    def after_a_jump(beta2: float) -> Tensor:
        weight = parameter()
        optimizer = build_optimizer("adamw", [weight], 0.1, 0.0, beta2=beta2)
        for size in (1.0, 1.0, 0.0, 0.0):
            update(optimizer, weight @ (size * GRADIENT), 100.0)
        return optimizer.state[weight]["exp_avg_sq"]

    for beta2 in (0.5, 0.999):
        torch.testing.assert_close(after_a_jump(beta2), (1 - beta2) * (1 + beta2) * beta2**2 * GRADIENT**2)


def test_learning_rates_fall_to_a_tenth_after_each_number_of_updates() -> None:
    limited = parameter()
    limited._learning_rate_limit = 0.01  # type: ignore[attr-defined]
    optimizer = build_optimizer("sgd", [parameter(), limited], 0.2, 0.0)
    for updates, factor in [(0, 1.0), (2, 1.0), (3, 0.1), (4, 0.1), (5, 0.01), (3, 0.1)]:
        for trained in range(updates + 1):  # those of earlier versions count
            Schedule(decay_after=(3, 5)).apply(optimizer, updates - trained, trained)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2 * factor, 0.01 * factor])
    Schedule().apply(optimizer, 99, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.01]


def test_learning_rates_warm_up_and_fall_as_half_a_cosine() -> None:
    optimizer = build_optimizer("adam", [parameter()], 0.2, 0.0)

    def share(schedule: Schedule, update: int, trained: int = 0) -> float:
        schedule.apply(optimizer, update, trained)
        return float(optimizer.param_groups[0]["lr"]) / 0.2

    warm = Schedule(warmup=4)
    assert [share(warm, update, trained=50) for update in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    falling = Schedule(warmup=2, cosine=6)
    middle = [(1 + math.cos(math.pi * quarter / 4)) / 2 for quarter in range(5)]
    assert [share(falling, update) for update in range(7)] == pytest.approx([0.5, 1.0, *middle], abs=1e-12)


def test_schedules_and_optimizers_of_settings() -> None:
    latent = LatentWorldModelSettings(optimizer="adam", warmup=7, schedule="cosine", updates=9, eps=1e-5)
    assert Schedule.of(latent) == Schedule(warmup=7, cosine=9)
    laprop = latent.model_copy(update={"optimizer": "laprop", "schedule": "constant"})
    assert Schedule.of(laprop) == Schedule()  # LaProp warms up by itself
    assert Schedule.of(MuZeroSettings(decay_after=(3, 5))) == Schedule(decay_after=(3, 5))
    assert Schedule.of(TokenizerSettings()) == Schedule()
    adam, other = optimizer_for(latent, [parameter()]), optimizer_for(laprop, [parameter()])
    assert isinstance(adam, torch.optim.Adam) and adam.param_groups[0]["eps"] == 1e-5
    assert isinstance(other, LaProp) and other.param_groups[0]["warmup"] == 7


@pytest.mark.parametrize("groups", [False, True])
def test_adam_has_no_weight_decay_even_with_groups(groups: bool) -> None:
    weight = parameter()
    given = [{"params": [weight], "weight_decay": 0.5}] if groups else [weight]
    optimizer = build_optimizer("adam", given, 0.1, 0.5)
    update(optimizer, weight @ torch.zeros(2), 1.0)
    assert torch.equal(weight, parameter())


def test_a_groups_own_decay_goes_before_the_common_one() -> None:
    decayed, plain = parameter(), parameter()
    groups = [{"params": [decayed]}, {"params": [plain], "weight_decay": 0.0}]
    optimizer = build_optimizer("adamw", groups, 0.1, 0.5)
    update(optimizer, (decayed + plain) @ torch.zeros(2), 1.0)
    assert torch.equal(plain, parameter()) and not torch.equal(decayed, parameter())


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_the_first_steps_are_adams(name) -> None:
    """With betas (0.9, 0.999) and eps 1e-8: m / (1 - 0.9^t) over the root of v / (1 - 0.999^t)."""
    weight = parameter()
    optimizer = build_optimizer(name, [weight], 0.01, 0.0)
    expected, m, v = parameter().detach().double(), torch.zeros(2).double(), torch.zeros(2).double()
    for t in range(1, 4):
        gradient = (GRADIENT * t).double()
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        expected -= 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        update(optimizer, weight @ (GRADIENT * t), 1e9)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adam", "laprop"])
def test_eps_may_be_chosen(name) -> None:
    """With eps far above the gradient the first step is lr * g / eps; LaProp's momentum is corrected likewise."""
    weight = parameter()
    update(build_optimizer(name, [weight], 0.1, 0.0, eps=1e6), weight @ GRADIENT, 1e9)
    torch.testing.assert_close((parameter() - weight).detach(), 0.1 * GRADIENT / 1e6, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_only_laprop_warms_up(name) -> None:
    with pytest.raises(AssertionError, match="only LaProp"):
        build_optimizer(name, [parameter()], 0.1, 0.0, warmup=10)


# -- groups -----------------------------------------------------------------------------------------------------------


def limited(limit: float) -> nn.Parameter:
    weight = parameter()
    weight._learning_rate_limit = limit  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize("name", ["adamw", "adam", "laprop"])
@pytest.mark.parametrize("groups", [False, True])
def test_a_limited_parameter_learns_no_faster_than_its_limit(name, groups: bool) -> None:
    free, slow, unhindered = parameter(), limited(0.01), limited(5.0)
    given: Any = [{"params": [free, slow], "weight_decay": 0.0}, {"params": [unhindered]}]
    optimizer = build_optimizer(name, given if groups else [free, slow, unhindered], 0.1, 0.0)
    update(optimizer, (free + slow + unhindered) @ GRADIENT, 1e9)
    for weight, rate in [(free, 0.1), (slow, 0.01), (unhindered, 0.1)]:  # the first step is lr * sign(g) with all three
        torch.testing.assert_close((parameter() - weight).detach(), rate * torch.ones(2), rtol=1e-5, atol=1e-6)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01, 0.1]


def test_a_parameters_place_does_not_depend_on_the_rate() -> None:
    """Saved moments know a parameter by its place; with another rate they must find it again."""
    parameters = [limited(0.01), parameter(), limited(0.01), parameter()]

    def order(rate: float) -> list[int]:
        groups = build_optimizer("adamw", parameters, rate, 0.0).param_groups
        return [id(each) for group in groups for each in group["params"]]

    assert order(0.1) == order(0.001)


def test_a_groups_own_rate_and_decay_stay_when_it_is_split() -> None:
    first, second = parameter(), limited(0.01)
    optimizer = build_optimizer("laprop", [{"params": [first, second], "lr": 0.02, "weight_decay": 0.3}], 0.1, 0.0)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.3), (0.01, 0.3)]


def test_groups_without_limits_are_left_as_they_are() -> None:
    """States are saved by a parameter's index over all groups."""
    net = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2), nn.LayerNorm(2))
    optimizer = build_optimizer("adamw", parameter_groups(net, 0.1), 1e-3, 0.0)
    got = [[id(each) for each in group["params"]] for group in optimizer.param_groups]
    assert got == [[id(each) for each in group["params"]] for group in parameter_groups(net, 0.1)]


# -- LaProp -----------------------------------------------------------------------------------------------------------


def plain_laprop(
    start: Tensor,
    gradients: list[Tensor],
    *,
    lr: float,
    warmup: int,
    decay: float = 0.0,
    eps: float = 1e-20,
    betas: tuple[float, float] = (0.9, 0.999),
) -> Iterator[Tensor]:
    """As the sheet has it: the rate inside the momentum, and its running average kept as one goes."""
    b1, b2 = betas
    theta, v, m, average = start.clone(), torch.zeros_like(start), torch.zeros_like(start), 0.0
    for k, g in enumerate(gradients):
        rate = lr * min(1.0, (k + 1) / warmup) if warmup else lr
        v = b2 * v + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * rate * g / ((v / (1 - b2 ** (k + 1))).sqrt() + eps)
        average = b1 * average + (1 - b1) * rate
        theta = theta * (1 - rate * decay) - m / (average / rate)
        yield theta


def stepped(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.clone()
    optimizer.step()


def test_laprop_golden() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = build_optimizer("laprop", [weight], 1e-3, 0.0)
    for gradient, want in [(1.0, -0.001), (1.0, -0.002), (-1.0, -0.00226199)]:
        stepped(optimizer, [weight], [torch.tensor([gradient], dtype=torch.float64)])
        assert weight.item() == pytest.approx(want, abs=5e-9)
    assert weight.item() == pytest.approx(-0.002 - 0.001 * 0.071 / 0.271, rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 8])
def test_the_first_step_is_the_sign_of_a_gradient_of_any_size(warmup: int) -> None:
    gradient = torch.tensor([1e-12, -1e-6, 1.0, -1e6, 0.0])
    weight = nn.Parameter(torch.zeros(5))
    stepped(build_optimizer("laprop", [weight], 0.5, 0.0, warmup=warmup), [weight], [gradient])
    torch.testing.assert_close(weight.detach(), -0.5 / max(1, warmup) * gradient.sign())


def test_warm_up_is_linear_and_exact() -> None:
    """Under a constant gradient an update is the learning rate of the moment: lr * (k + 1) / 1000, then lr."""
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = build_optimizer("laprop", [weight], 4e-5, 0.0, warmup=1000)
    before = 0.0
    for k in range(1100):
        stepped(optimizer, [weight], [torch.tensor(3.0, dtype=torch.float64)])
        now = weight.item()
        assert before - now == pytest.approx(4e-5 * min(1.0, (k + 1) / 1000), rel=1e-8)
        before = now


SHAPES = [(3, 4), (5,), (), (2, 3, 2)]
DECAYS = [0.3, 0.0, 0.0, 0.3]


def drawn(updates: int, dtype: torch.dtype) -> tuple[list[Tensor], list[list[Tensor]]]:
    """First values, and the gradients of each update."""
    generator = torch.Generator().manual_seed(2)
    make = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return make, [[torch.randn(s, generator=generator, dtype=dtype) * 3**k for s in SHAPES] for k in range(updates)]


def grouped(start: list[Tensor], warmup: int, lr: float = 0.01) -> tuple[LaProp, list[nn.Parameter]]:
    weights = [nn.Parameter(each.clone()) for each in start]
    groups = [{"params": [weights[0], weights[3]], "weight_decay": 0.3}, {"params": weights[1:3], "weight_decay": 0.0}]
    optimizer = build_optimizer("laprop", groups, lr, 0.7, warmup=warmup)
    assert isinstance(optimizer, LaProp)
    return optimizer, weights


@pytest.mark.parametrize("warmup", [0, 1, 7, 100])
def test_laprop_is_its_plain_loop(warmup: int) -> None:
    start, gradients = drawn(15, torch.float64)
    optimizer, weights = grouped(start, warmup)
    loops = [
        plain_laprop(start[i], [each[i] for each in gradients], lr=0.01, warmup=warmup, decay=DECAYS[i])
        for i in range(len(SHAPES))
    ]
    for each in gradients:
        stepped(optimizer, weights, each)
        for weight, loop in zip(weights, loops, strict=True):
            torch.testing.assert_close(weight.detach(), next(loop), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cut", [1, 5, 7, 11])
def test_laprop_resumed_in_the_middle_ends_in_the_same_bits(cut: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Warm-up ends with the seventh update."""
    start, gradients = drawn(15, dtype)
    whole, want = grouped(start, 7)
    for each in gradients:
        stepped(whole, want, each)
    first, weights = grouped(start, 7)
    for each in gradients[:cut]:
        stepped(first, weights, each)
    save_tensors(tmp_path / "x", optimizer_tensors(first), {})
    second, resumed = grouped([weight.detach() for weight in weights], 7)
    load_optimizer(second, load_tensors(tmp_path / "x")[0])
    for each in gradients[cut:]:
        stepped(second, resumed, each)
    assert all(torch.equal(a, b) for a, b in zip(resumed, want, strict=True))
    ours, theirs = optimizer_tensors(second), optimizer_tensors(whole)
    assert ours.keys() == theirs.keys() and len(ours) == 3 * len(SHAPES)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)


def test_another_rate_counts_from_the_next_update_on(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    first = build_optimizer("laprop", [weight], 1e-2, 0.0)
    for _ in range(5):
        stepped(first, [weight], [torch.ones(2, dtype=torch.float64)])
    save_tensors(tmp_path / "x", optimizer_tensors(first), {})
    second = build_optimizer("laprop", [weight], 1e-4, 0.0)
    load_optimizer(second, load_tensors(tmp_path / "x")[0])
    before = weight.detach().clone()
    stepped(second, [weight], [torch.ones(2, dtype=torch.float64)])
    torch.testing.assert_close(before - weight.detach(), torch.full((2,), 1e-4, dtype=torch.float64))


def test_a_parameter_without_a_gradient_stands_still_and_counts_its_own() -> None:
    """Three gradients of one, of which the other misses the second: it goes on as if there had been two."""
    start, gradients = drawn(3, torch.float64)
    optimizer, weights = grouped(start, 7)
    for k, each in enumerate(gradients):
        for weight, gradient in zip(weights, each, strict=True):
            weight.grad = gradient.clone()
        if k == 1:
            weights[3].grad = None
        optimizer.step()
    for i, took in [(0, [0, 1, 2]), (3, [0, 2])]:
        (*_, want) = plain_laprop(start[i], [gradients[k][i] for k in took], lr=0.01, warmup=7, decay=0.3)
        torch.testing.assert_close(weights[i].detach(), want)


def test_laprop_reads_nothing_from_the_device() -> None:
    """Tensors on the meta device have no values: an update that looked at one would fail."""
    weights = [nn.Parameter(torch.zeros(shape, device="meta")) for shape in SHAPES]
    optimizer = build_optimizer("laprop", [{"params": weights, "weight_decay": 0.1}], 0.1, 0.0, warmup=3)
    for _ in range(5):
        stepped(optimizer, weights, [torch.ones_like(weight) for weight in weights])
    assert len({id(optimizer.state[weight]["step"]) for weight in weights}) == 1


def test_tiny_and_vanishing_gradients_stay_finite() -> None:
    """In float32 the square of 1e-30 is 0: eps alone is left under the gradient."""
    weight = nn.Parameter(torch.zeros(4))
    optimizer = build_optimizer("laprop", [weight], 1e-3, 0.0)
    for _ in range(50):
        stepped(optimizer, [weight], [torch.tensor([0.0, 1e-30, 1e-22, 1e-15])])
    assert torch.isfinite(weight).all() and weight[0] == 0
    assert math.isclose(weight[3].item(), -50 * 1e-3, rel_tol=1e-4)
