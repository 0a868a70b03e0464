"""Policies over every action space: samples against densities, entropies by integration, and the likeliest action."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from wmcli.nn.categorical import choose, mixed_log_probabilities
from wmcli.nn.categorical import sample as sample_category
from wmcli.nn.policies import BinsPolicy, CategoriesPolicy, DiscretePolicy, NormalPolicy, Policy, build_policy
from wmcli.spaces import ActionSpace, Categories, Continuous, Discrete

TWO_NUMBERS = Continuous((-2.0, 0.0), (2.0, 5.0))
CASES: dict[str, tuple[ActionSpace, str]] = {
    "discrete": (Discrete(4), "normal"),
    "categories": (Categories((2, 4, 3)), "normal"),
    "normal": (TWO_NUMBERS, "normal"),
    "truncated-normal": (TWO_NUMBERS, "truncated-normal"),
    "bins": (TWO_NUMBERS, "bins"),
}
# Raw mean and deviation: in the middle, near a bound and narrow, near a bound and wide.
OUTPUTS = [(0.2, -1.0), (1.8, -9.0), (-1.5, 6.0)]


def policy_of(case: str) -> Policy:
    space, continuous = CASES[case]
    return build_policy(space, continuous, bins=5)  # type: ignore[arg-type]


def drawn(policy: Policy, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normalized parameters of a random network."""
    torch.manual_seed(1)
    return policy.normalize(policy.parameters(torch.randn(*shape, policy.outputs, dtype=dtype)))


def grid(count: int) -> Tensor:
    """The midpoints of evenly spaced intervals of [0, 1]."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


# -- what all have in common -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "kind", "outputs", "uniforms"),
    [
        ("discrete", DiscretePolicy, 4, 1),
        ("categories", CategoriesPolicy, 9, 3),
        ("normal", NormalPolicy, 4, 2),
        ("truncated-normal", NormalPolicy, 4, 2),
        ("bins", BinsPolicy, 10, 2),
    ],
)
def test_sizes(case, kind, outputs, uniforms):
    policy = policy_of(case)
    assert type(policy) is kind and (policy.outputs, policy.uniforms) == (outputs, uniforms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_shapes_and_types(case, dtype):
    policy, space = policy_of(case), CASES[case][0]
    parameters = drawn(policy, 3, 5, dtype=dtype)
    action = policy.sample(parameters, torch.rand(3, 5, policy.uniforms))
    assert action.shape == (3, 5, *space.shape)
    assert action.is_floating_point() == isinstance(space, Continuous)
    for number in (policy.log_probability(parameters, action), policy.entropy(parameters)):
        assert number.shape == (3, 5) and number.dtype == dtype and number.isfinite().all()
    for temperature in (0.0, 0.5, 1.0):
        chosen = policy.choose(parameters, temperature, torch.Generator().manual_seed(0))
        assert chosen.shape == action.shape and chosen.isfinite().all()
    low = policy.parameters(torch.randn(2, policy.outputs, dtype=torch.bfloat16))
    assert low.dtype == torch.float32


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_reinforce_is_that_of_the_mean_reward(case):
    """For a reward of each action: the sum over samples of reward times grad log pi is the gradient of the mean."""
    policy = policy_of(case)
    outputs = torch.zeros(policy.outputs, dtype=torch.float64) + torch.linspace(-0.5, 0.5, policy.outputs)
    uniforms = torch.rand(400_000, policy.uniforms, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def reward(action: Tensor) -> Tensor:
        numbers = action.double().clamp(-1, 9)
        return numbers.sin() if action.ndim == 1 else numbers.sin().sum(-1)

    def mean(outputs: Tensor) -> float:
        parameters = policy.normalize(policy.parameters(outputs)).expand(len(uniforms), -1)
        return float(reward(policy.sample(parameters, uniforms)).mean())

    leaf = outputs.clone().requires_grad_()
    parameters = policy.normalize(policy.parameters(leaf)).expand(len(uniforms), -1)
    action = policy.sample(parameters.detach(), uniforms)
    baseline = reward(action).mean()
    objective = (policy.log_probability(parameters, action) * (reward(action) - baseline)).mean()
    (gradient,) = torch.autograd.grad(objective, leaf)
    step = 0.02
    for index in range(policy.outputs):
        shift = step * torch.eye(policy.outputs, dtype=torch.float64)[index]
        want = (mean(outputs + shift) - mean(outputs - shift)) / (2 * step)
        assert float(gradient[index]) == pytest.approx(want, abs=0.01)


# -- categories --------------------------------------------------------------------------------------------------------


def test_discrete_actions_are_those_of_a_plain_categorical():
    """Bit for bit, as before there were other action spaces."""
    policy, outputs, uniforms = policy_of("discrete"), torch.randn(50, 4), torch.rand(50, 1)
    parameters = policy.parameters(outputs, 0.1)
    assert torch.equal(parameters, mixed_log_probabilities(outputs, 0.1))
    assert torch.equal(policy.sample(parameters, uniforms), sample_category(parameters, uniforms[:, 0]))
    for temperature in (0.0, 0.7):
        one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
        want = choose(parameters, temperature, other)
        assert torch.equal(policy.choose(parameters, temperature, one), want)
        assert torch.equal(one.get_state(), other.get_state())


def test_categories_are_independent():
    policy = policy_of("categories")
    outputs = torch.randn(7, 9, dtype=torch.float64)
    parameters = policy.parameters(outputs, 0.2)
    parts = [DiscretePolicy(size) for size in (2, 4, 3)]
    pieces = [part.parameters(each, 0.2) for part, each in zip(parts, outputs.split((2, 4, 3), -1), strict=True)]
    torch.testing.assert_close(parameters, torch.cat(pieces, -1))
    uniforms = torch.rand(7, 3)
    action = policy.sample(parameters, uniforms)
    each = [part.sample(p, uniforms[:, k : k + 1]) for k, (part, p) in enumerate(zip(parts, pieces, strict=True))]
    assert torch.equal(action, torch.stack(each, -1))
    log_probability = [part.log_probability(p, a) for part, p, a in zip(parts, pieces, each, strict=True)]
    torch.testing.assert_close(policy.log_probability(parameters, action), sum(log_probability))
    entropies = [part.entropy(p) for part, p in zip(parts, pieces, strict=True)]
    torch.testing.assert_close(policy.entropy(parameters), sum(entropies))
    assert policy.choose(parameters, 0.0).tolist() == [[int(p[i].argmax()) for p in pieces] for i in range(7)]


@pytest.mark.parametrize("case", ["discrete", "categories", "bins"])
def test_logits_are_normalized(case):
    policy = policy_of(case)
    logits = torch.randn(6, policy.outputs, dtype=torch.float64)
    shifted = policy.normalize(logits + 3)
    torch.testing.assert_close(shifted, policy.normalize(logits))
    torch.testing.assert_close(policy.normalize(shifted), shifted)
    assert float(shifted.exp().sum(-1)[0]) == pytest.approx(policy.uniforms)


def test_bins_round_trip():
    """A sample's probability is that of its bin, and the outermost bins are the bounds."""
    policy = policy_of("bins")
    parameters = drawn(policy, 1)[0]
    index = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    value = index.float() / 4 * 2 - 1
    assert float(value.min()) == -1 and float(value.max()) == 1
    want = parameters[:5][index[:, 0]] + parameters[5:][index[:, 1]]
    torch.testing.assert_close(policy.log_probability(parameters.expand(25, -1), value), want)
    assert float(want.exp().sum()) == pytest.approx(1)
    sampled = policy.sample(parameters.expand(1000, -1), torch.rand(1000, 2))
    assert {round(4 * float(x)) for x in sampled.flatten()} <= {-4, -2, 0, 2, 4}
    torch.testing.assert_close(
        policy.log_probability(parameters.expand(25, -1), value + 0.2 * torch.rand(25, 2) - 0.1), want
    )


# -- normal policies ---------------------------------------------------------------------------------------------------


def normal_parameters(mean: float, deviation: float) -> tuple[NormalPolicy, NormalPolicy, Tensor]:
    """One number, plain and truncated."""
    plain, truncated = NormalPolicy(1, truncated=False), NormalPolicy(1, truncated=True)
    return plain, truncated, plain.parameters(torch.tensor([mean, deviation], dtype=torch.float64))


@pytest.mark.parametrize(("mean", "deviation"), OUTPUTS)
def test_mean_and_deviation_are_dreamers(mean, deviation):
    _, _, parameters = normal_parameters(mean, deviation)
    want = [math.tanh(mean), 0.9 / (1 + math.exp(-deviation - 2)) + 0.1]
    assert parameters.tolist() == pytest.approx(want)


@pytest.mark.parametrize(("mean", "deviation"), OUTPUTS)
def test_the_plain_normal(mean, deviation):
    policy, _, parameters = normal_parameters(mean, deviation)
    reference = Normal(*parameters)
    action = torch.linspace(-3, 3, 50, dtype=torch.float64)
    got = policy.log_probability(parameters.expand(50, -1), action[:, None])
    torch.testing.assert_close(got, reference.log_prob(action))
    torch.testing.assert_close(policy.entropy(parameters), reference.entropy())
    u = grid(100)
    sampled = policy.sample(parameters.expand(100, -1), u[:, None])[:, 0]
    torch.testing.assert_close(reference.cdf(sampled), u)


@pytest.mark.parametrize(("mean", "deviation"), OUTPUTS)
def test_the_truncated_normal_by_integration(mean, deviation):
    """Its density has an integral of 1, its entropy is that of the integral, and the share below a sample is u."""
    _, policy, parameters = normal_parameters(mean, deviation)
    count = 200_000
    action = 2 * grid(count) - 1
    log_density = policy.log_probability(parameters.expand(count, -1), action[:, None])
    mass = log_density.exp() * 2 / count
    assert float(mass.sum()) == pytest.approx(1, rel=1e-7)
    assert float(policy.entropy(parameters)) == pytest.approx(-float((mass * log_density).sum()), abs=1e-6)
    u = grid(1000)
    sampled = policy.sample(parameters.expand(1000, -1), u[:, None])[:, 0]
    share = torch.from_numpy(np.interp(sampled.numpy(), action.numpy() + 1 / count, mass.cumsum(0).numpy()))
    torch.testing.assert_close(share, u, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("mean", "deviation"), [*OUTPUTS, (12.0, -12.0), (-12.0, 12.0)])
def test_samples_rise_with_the_uniforms_and_stay_finite(truncated, mean, deviation, dtype):
    policy = NormalPolicy(1, truncated=truncated)
    parameters = policy.parameters(torch.tensor([mean, deviation], dtype=dtype))
    extreme = torch.tensor([0.0, 2.0**-24, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1 - 2.0**-24])
    sampled = policy.sample(parameters.expand(len(extreme), -1), extreme[:, None])[:, 0]
    assert sampled.isfinite().all() and (sampled.diff() >= 0).all() and sampled.dtype == dtype
    if truncated:
        assert float(sampled.abs().max()) <= 1
    assert policy.log_probability(parameters.expand(len(extreme), -1), sampled[:, None]).isfinite().all()


@pytest.mark.parametrize("case", ["normal", "truncated-normal"])
def test_samples_have_the_gradient_of_finite_differences(case):
    policy = policy_of(case)
    outputs = torch.tensor([0.3, -1.2, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    uniforms = torch.tensor([0.2, 0.7], dtype=torch.float64)

    def sampled(outputs: Tensor) -> Tensor:
        return policy.sample(policy.parameters(outputs), uniforms)

    assert torch.autograd.gradcheck(sampled, (outputs,))
    assert torch.autograd.gradcheck(lambda x: policy.entropy(policy.parameters(x)), (outputs,))
    action = torch.tensor([0.4, -0.9], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: policy.log_probability(policy.parameters(x), action), (outputs,))


@pytest.mark.parametrize("case", ["normal", "truncated-normal"])
def test_the_likeliest_number_is_the_mean_and_draws_nothing(case):
    policy = policy_of(case)
    parameters, generator = drawn(policy, 3), torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert torch.equal(policy.choose(parameters, 0.0, generator), parameters[:, :2])
    assert torch.equal(generator.get_state(), before)
    many = parameters[:1].expand(20_000, -1)
    narrow, wide = (policy.choose(many, temperature, generator).std(0) for temperature in (0.2, 1.0))
    assert (narrow < wide).all()


def test_a_temperature_scales_the_deviation():
    policy = policy_of("normal")
    parameters = drawn(policy, 1).expand(50_000, -1)
    sampled = policy.choose(parameters, 0.5, torch.Generator().manual_seed(0))
    torch.testing.assert_close(sampled.std(0), parameters[0, 2:] / 2, rtol=0.02, atol=0)
