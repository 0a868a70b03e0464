"""Attention priors: tables by offset against values worked out by hand, gradients, bounds, regularizers.

Axes: R offsets.
"""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from prior_settings import keys_of, prior_settings
from torch import nn
from torch.testing import assert_close
from watching import NoWaiting

from wmcli.errors import UsageError
from wmcli.nn import attention_prior
from wmcli.nn.attention_prior import (
    AttentionPrior,
    log_prior,
    penalty,
    prior_values,
    priors_of,
    project,
    scaled_attention,
    spread,
)
from wmcli.world_models.base import parameter_groups

KINDS = ("local", "span", "gaussian", "gaussian_span")


def prior(layers: int = 2, heads: int = 3, reach: int = 20, **settings) -> AttentionPrior:
    return AttentionPrior(prior_settings(**settings), layers, heads, reach, "backbone.prior")


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def table(reach: int, **settings) -> torch.Tensor:
    """b by offset with the settings' own numbers, (R,)."""
    chosen = prior_settings(**settings)
    names = {"span": ("span",), "gaussian": ("mean", "deviation"), "local": ()}
    names["gaussian_span"] = (*names["gaussian"], *names["span"])
    given = {name: number(getattr(chosen, name)) for name in names[chosen.kind]}
    return log_prior(chosen, torch.arange(reach), **given).detach().double()


def close(got, want, atol: float = 1e-5) -> None:
    assert_close(got.double(), torch.as_tensor(want, dtype=torch.float64), rtol=0, atol=atol)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_gaussian_by_offset():
    close(table(4, kind="gaussian", mean=1.0, deviation=1.0), [-0.5, 0, -0.5, -2])
    close(table(4, kind="gaussian", mean=2.0, deviation=0.5), [-8, -2, 0, -2])
    window = table(7, kind="gaussian").softmax(0)  # of the defaults: a mean of 6, a deviation of 1
    close(window, [0, 0, 0.00019, 0.00634, 0.07719, 0.34593, 0.57035])
    for deviation, mass in ((1.0, 0.88288), (3.0, 0.39033)):
        close(table(20, kind="gaussian", deviation=deviation).softmax(0)[5:8].sum(), mass)


def test_spans_by_offset():
    close(table(6, kind="span", span=1.0).exp(), [1, 1, 2 / 3, 1 / 3, 0, 0])
    close(table(6, kind="span", span=2.0, span_mask="hard").exp(), [1, 1, 1, 0, 0, 0])
    close(table(5, kind="span", span=2.0, span_mask="triangle").exp(), [1, 0.5, 0, 0, 0])
    close(table(5, kind="local", window=2).exp(), [1, 1, 1, 0, 0])
    close(table(4, kind="span", span=1.0).softmax(0).flip(0), [0.11111, 0.22222, 0.33333, 0.33333])
    both = table(4, kind="gaussian_span", span=2.0, span_mask="hard", mean=1.0, deviation=1.0)
    close(both.softmax(0).flip(0), [0, 0.27407, 0.45186, 0.27407])


@pytest.mark.parametrize("span_mask", ["hard", "ramp", "triangle"])
@pytest.mark.parametrize("raw", [-200.0, -9.0, 50.0])
def test_every_span_attends_to_its_own_key_without_nan(span_mask, raw):
    each = prior(kind="gaussian_span", span_mask=span_mask)
    nn.init.constant_(each.raw_span, raw)
    shares = each().softmax(-1)
    shares.square().sum().backward()
    assert (shares.detach()[..., 0] > 0).all() and shares.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in each.parameters())


@pytest.mark.parametrize("form", ["additive", "scale"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_for_each_head_of_each_layer(kind, form):
    if kind == "local" and form == "scale":
        return
    each = prior(**keys_of(kind, form=form, window=4))
    with torch.no_grad():
        for parameter in each.parameters():
            parameter.copy_(torch.randn_like(parameter))
    got = each()
    assert got.shape == (2, 3, 20) and got.dtype == torch.float32
    values = each.values()
    for layer in range(2):
        for head in range(3):
            mine = {name: value[layer, head] for name, value in values.items()}
            row = log_prior(each.settings, torch.arange(20), **mine)
            assert_close(got[layer, head], row if form == "additive" else row.exp())


def test_the_table_is_float32_under_autocast_and_float64_in_a_float64_model():
    with torch.autocast("cpu", torch.bfloat16):
        assert prior(kind="gaussian_span")().dtype == torch.float32
    assert prior(kind="gaussian_span").double()().dtype == torch.float64


def test_spread_gives_each_key_its_offsets_value():
    row, offset = torch.randn(3, 8), torch.tensor([[0, -1, -2], [3, 7, 0]])
    got = spread(row, offset)
    assert got.shape == (1, 3, 2, 3)
    close(got[0, :, 1], row[:, [3, 7, 0]])
    batch = torch.stack((offset, offset + 0, offset.flip(0)))
    assert_close(spread(row, batch), torch.cat([spread(row, each) for each in batch]))


# -- gradients ---------------------------------------------------------------------------------------------------------


def mean_offset(bias: torch.Tensor) -> torch.Tensor:
    """Where the last of R queries looks, in the mean, if content says nothing."""
    return (bias.softmax(-1) * torch.arange(bias.shape[-1])).sum(-1)


def test_golden_gradients_of_a_gaussian():
    settings, mean, deviation = prior_settings(kind="gaussian"), number(1), number(1)
    found = mean_offset(log_prior(settings, torch.arange(4), mean, deviation))
    close(found, 1.115258, 1e-6)
    close(torch.stack(torch.autograd.grad(found, (mean, deviation))), [0.733780, 0.374926], 1e-6)


def test_golden_gradients_through_the_parameters():
    """softplus' slope at 1 is 1 - e^-1; the deviation has 0.001 besides, so that its own is that at 0.999."""
    each = prior(1, 1, 4, kind="gaussian", mean=1.0, deviation=1.0, mean_bound="clamp").double()
    gradients = torch.autograd.grad(mean_offset(each()).sum(), (each.raw_mean, each.raw_deviation))
    close(gradients[0].squeeze(), 0.463838, 1e-6)
    close(gradients[1].squeeze(), 0.374926 * -math.expm1(-0.999), 1e-6)
    each = prior(1, 1, 4, kind="gaussian", mean=1.0, deviation=1.0).double()
    (gradient,) = torch.autograd.grad(mean_offset(each()).sum(), each.raw_mean)
    close(gradient.squeeze(), 0.733780 * 4 * 0.25 * 0.75, 1e-6)  # 4 sigmoid(raw), where sigmoid(raw) = 1/4
    each = prior(1, 1, 4, kind="span", span=1.5).double()
    (gradient,) = torch.autograd.grad(mean_offset(each()).sum(), each.raw_span)
    close(gradient.squeeze(), 0.194217, 1e-6)


def test_golden_gradient_of_a_ramp_and_none_of_a_hard_mask():
    for span_mask, value, slope in (("ramp", 1.25, 0.25), ("hard", 0.5, 0.0)):
        span = number(1.5)
        settings = prior_settings(kind="span", span_mask=span_mask)
        found = mean_offset(log_prior(settings, torch.arange(4), span=span) + 0 * span)
        close(found, value)
        close(torch.autograd.grad(found, span)[0], slope)


def test_golden_gradients_of_the_scale_form():
    settings, mean, deviation = prior_settings(kind="gaussian", form="scale"), number(1), number(1)
    score = torch.tensor([1, -1, 2, 0.5], dtype=torch.float64)
    found = mean_offset(score * log_prior(settings, torch.arange(4), mean, deviation).exp())
    close(found, 1.553027, 1e-6)
    close(torch.stack(torch.autograd.grad(found, (mean, deviation))), [0.566781, 0.077659], 1e-6)


@pytest.mark.parametrize("mean_bound", ["sigmoid", "clamp"])
@pytest.mark.parametrize("form", ["additive", "scale"])
@pytest.mark.parametrize("span_mask", ["ramp", "triangle"])
@pytest.mark.parametrize("kind", ["span", "gaussian", "gaussian_span"])
def test_gradients_of_the_table_equal_finite_differences(kind, span_mask, form, mean_bound):
    values = {"form": form, "span_mask": span_mask, "mean_bound": mean_bound, "mean": 3.3, "span": 4.4}
    each = prior(1, 2, 9, **keys_of(kind, **values)).double()
    names, values = zip(*each.named_parameters(), strict=True)
    weight = torch.linspace(-1, 2, 18, dtype=torch.float64).view(1, 2, 9)

    def run(*parameters):
        got = torch.func.functional_call(each, dict(zip(names, parameters, strict=True)), ())
        return got.softmax(-1) * weight  # what is hidden is no number to subtract

    assert torch.autograd.gradcheck(run, [value.detach().requires_grad_() for value in values])


def test_gradients_of_scaled_attention_equal_finite_differences():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))
    weight = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(3, 4, dtype=torch.bool).tril(1)
    hidden = torch.zeros(3, 4, dtype=torch.float64).masked_fill(~seen, -math.inf)
    for mask in (seen, hidden):
        assert torch.autograd.gradcheck(lambda *o, mask=mask: scaled_attention(*o, mask), (q, k, v, weight))
    assert_close(scaled_attention(q, k, v, weight, seen), scaled_attention(q, k, v, weight, hidden))


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean_bound", ["sigmoid", "clamp"])
@pytest.mark.parametrize(("mean", "deviation", "span"), [(6.0, 1.0, 6.0), (2.0, 3.0, 10.0), (19.0, 0.1, 0.3)])
def test_initial_values_are_those_of_the_settings(mean, deviation, span, mean_bound):
    each = prior(kind="gaussian_span", mean=mean, deviation=deviation, span=span, mean_bound=mean_bound)
    for name, want in (("mean", mean), ("deviation", deviation), ("span", span)):
        assert_close(prior_values(each)[name], torch.full((2, 3), want), rtol=1e-6, atol=0)
    assert {parameter.dtype for parameter in each.parameters()} == {torch.float32}
    if mean_bound == "clamp":
        for value, raw in ((1.0, 0.541325), (2.0, 1.854587), (3.0, 2.948931), (6.0, 5.997518), (10.0, 9.999955)):
            assert attention_prior._raw(value) == pytest.approx(raw, abs=1e-6)


@pytest.mark.parametrize("mean_bound", ["sigmoid", "clamp"])
def test_means_stay_within_the_offsets(mean_bound):
    each = prior(kind="gaussian", mean_bound=mean_bound)
    nn.init.constant_(each.raw_mean, 1e3)
    values = each.values()["mean"]
    assert (values <= 20).all() and (values >= 19).all()
    nn.init.constant_(each.raw_mean, -1e3)
    assert (each.values()["mean"] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_parameters_and_no_decay(kind):
    each = prior(2, 8, kind=kind)
    count = {"local": 0, "span": 16, "gaussian": 32, "gaussian_span": 48}[kind]
    assert sum(parameter.numel() for parameter in each.parameters()) == count
    decayed, plain = parameter_groups(each, 0.1)
    assert not decayed["params"] and sum(parameter.numel() for parameter in plain["params"]) == count
    assert {name.removeprefix("raw_") for name in each.state_dict()} == each.values().keys()


# -- of whole models ---------------------------------------------------------------------------------------------------


def model(**settings) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), prior(kind="gaussian_span", **settings))


def test_penalties_are_sums_over_heads_and_layers():
    eight = {"layers": 2, "heads": 8}
    for name, want, slope in (("l1", 2.4, 0.025), ("l2", 14.4, 0.3)):
        each = prior(**eight, kind="span", regularizer=name)
        found = penalty(each)
        assert found.item() == pytest.approx(want, rel=1e-6)
        (gradient,) = torch.autograd.grad(found, each.raw_span)
        assert_close(gradient, torch.full((2, 8), slope * -math.expm1(-6.0)))  # the slope of L itself times softplus'
    assert penalty(prior(kind="span")) is None and penalty(prior(kind="span", regularizer="max")) is None
    assert penalty(prior(kind="gaussian")) is None and penalty(nn.Linear(2, 2)) is None
    assert penalty(model(regularizer="l1", strength=0.5)).item() == pytest.approx(0.5 * 6 * 6)


def test_the_max_norm_scales_down_only_larger_gradients():
    bounds = (("max", 0.0, 5.0), ("max", 4.5, 4.5), ("max", 20.0, 5.0), ("l1", 20.0, 20.0), ("l1", 0.0, math.inf))
    for regularizer, span_limit, limit in bounds:
        each = model(regularizer=regularizer, max_span=5.0, span=4.2, span_limit=span_limit)
        spans = each[1].raw_span
        with torch.no_grad():
            spans[0] = torch.tensor([1.0, 4.0, 30.0])
        before = prior_values(each)
        project(each)
        assert_close(prior_values(each)["span"], before["span"].clamp(max=limit))
        assert_close(prior_values(each)["mean"], before["mean"])
        assert spans.requires_grad and spans.grad_fn is None
        project(each)


def test_a_span_begins_within_its_limit():
    assert prior_settings(kind="span", span=20.0, span_limit=20.0).largest_span == 20
    with pytest.raises(UsageError, match="span = 21 is more than span_limit = 20: lower span"):
        prior_settings(kind="span", span=21.0, span_limit=20.0)


def test_a_frozen_copy_does_not_count():
    live = model(regularizer="l1")
    both = nn.ModuleList([live, copy.deepcopy(live).requires_grad_(False)])
    assert priors_of(both) == [live[1]]
    assert penalty(both).item() == penalty(live).item()
    assert {name: value.shape for name, value in prior_values(both).items()} == {
        "mean": (2, 3),
        "deviation": (2, 3),
        "span": (2, 3),
    }
    assert not any(value.requires_grad for value in prior_values(both).values())
    assert prior_values(prior(kind="span")).keys() == {"span"} and prior_values(nn.Linear(2, 2)) == {}


def test_nothing_waits_for_the_device():
    each = model(regularizer="l1")
    with NoWaiting():
        each[1]()
        penalty(each).backward()
        project(each)
        prior_values(each)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "span", "leak": True}, "leak = true exists with form = 'scale' only"),
        (
            {"kind": "local", "form": "scale"},
            "'prior.form': kind 'local' has no such key, span, gaussian",
        ),
        ({"mean": 2.0}, "'prior.mean': kind 'none' has no such key, gaussian, gaussian_span have it"),
        ({"kind": "gaussian", "window": 2}, "kind 'gaussian' has no such key, only local has it"),
        ({"kind": "gausian"}, "did you mean 'gaussian'?"),
        ({"kind": "gaussian", "deviation": 0.001}, "deviation"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(values, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        prior_settings(**values)
    assert "\n" not in str(caught.value)


def test_a_mean_beyond_all_offsets_is_a_usage_error():
    with pytest.raises(UsageError, match=r"prior\.mean = 6: the largest offset here is 5"):
        prior(reach=6, kind="gaussian")
    prior(reach=7, kind="gaussian")


def test_warnings_name_the_leak_and_the_span_that_cannot_learn():
    assert attention_prior.warnings(prior_settings(kind="gaussian_span")) == []
    assert attention_prior.warnings(prior_settings()) == []
    (leak,) = attention_prior.warnings(prior_settings(kind="span", form="scale", leak=True))
    (hard,) = attention_prior.warnings(prior_settings(kind="span", span_mask="hard"))
    assert "leak" in leak and "future" in leak and "span_mask" in hard
