"""What one update of a training stage does, for each kind of system: the step, and what follows it.

Each test fails when the line that it is about is taken out of its stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_systems import STAGES, Make, learn, same, weights
from torch import Tensor
from torch.nn import functional as F

RATE = 0.05

# -- the step ---------------------------------------------------------------------------------------------------------


def step_of(kind: str, eps: float, beta2: float, momentum: float, gradients: list[Tensor]) -> Tensor:
    """What the last of `gradients` moves a parameter by at a rate of 1, those before it remembered; without decay.

    Adam (arXiv 1412.6980), LaProp (arXiv 2002.04839, without warm-up) and momentum as in SGD.
    """
    if kind == "sgd":
        return sum(momentum**age * gradient for age, gradient in enumerate(reversed(gradients)))
    first = second = torch.zeros_like(gradients[0])
    for count, gradient in enumerate(gradients, 1):
        second = beta2 * second + (1 - beta2) * gradient**2
        size = (second / (1 - beta2**count)).sqrt() + eps
        first = 0.9 * first + 0.1 * (gradient / size if kind == "laprop" else gradient)
    return first / (1 - 0.9**count) / (1 if kind == "laprop" else size)


def tables_and_vectors(name: str, value: Tensor) -> bool:
    return value.ndim < 2 or "embedding" in name or name == "queries.weight"


def vectors(name: str, value: Tensor) -> bool:
    return value.ndim < 2


def nothing(name: str, value: Tensor) -> bool:
    return False


GRU = "backbone.kind=gru"  # no parameter of it is exempt from decay, or limited in its rate
LAPROP, ADAM, DECAY = {"kind": "laprop", "eps": 1e-20}, {"eps": 0.5}, {"decay": 0.5}
STEPS: list[tuple[str, str, list[str], dict[str, Any], Callable[[str, Tensor], bool]]] = [
    ("rem", "tokenizer", [], DECAY, nothing),
    ("drama", "tokenizer", ["warmup=4"], LAPROP | DECAY | {"warmup": 4}, nothing),
    ("rem", "dynamics", [GRU], DECAY, tables_and_vectors),
    ("drama", "dynamics", [GRU, "warmup=4"], LAPROP | DECAY | {"warmup": 4}, tables_and_vectors),
    ("drama", "dynamics", [GRU, "optimizer=adamw", "warmup=4"], DECAY | {"warmup": 4}, tables_and_vectors),
    ("unizero", "dynamics", ["beta2=0.7"], DECAY | {"beta2": 0.7}, vectors),
    ("muzero", "dynamics", ["optimizer=sgd", "momentum=0.6"], DECAY | {"kind": "sgd", "momentum": 0.6}, nothing),
    ("cells", "dynamics", [GRU, "optimizer=laprop"], LAPROP | DECAY, tables_and_vectors),
    ("rem", "controller", [], DECAY, nothing),
    ("drama", "controller", ["warmup=4"], LAPROP | DECAY | {"warmup": 4}, nothing),
    ("drama", "controller", ["optimizer=adam", "eps=0.5"], ADAM, nothing),
]
"""System, stage, settings, what they come to, and which parameters are spared by weight decay."""


def given(kind: str, overrides: list[str]) -> list[str]:
    return [text if text.startswith("backbone.") else f"{kind}.{text}" for text in overrides]


@pytest.mark.parametrize(("name", "kind", "overrides", "wanted", "spared"), STEPS)
def test_the_first_step_is_that_of_the_settings(
    make: Make, name: str, kind: str, overrides: list[str], wanted: dict[str, Any], spared: Any
) -> None:
    """Optimizer, rate, warm-up, eps and decay, by its groups, from the section; the gradient is cut to `clip`."""
    of = {"kind": "adamw", "eps": 1e-8, "beta2": 0.999, "momentum": 0.0, "decay": 0.0, "warmup": 1} | wanted
    change = [f"learning_rate={RATE}", f"weight_decay={of['decay']}", "clip=0.1", "updates=1"]
    _, (update,) = learn(make(name, trained=kind == "controller"), kind, *given(kind, overrides + change))
    norm = torch.stack([gradient.norm() for gradient in update.gradient.values()]).norm().item()
    assert update.metrics["gradient_norm"] > 0.15 and norm == pytest.approx(0.1, rel=1e-3)
    rate, checked = RATE / of["warmup"], set()
    for parameter, gradient in update.gradient.items():
        before, kept = update.before[parameter], 0.0 if spared(parameter, gradient) else of["decay"]
        if of["kind"] == "sgd":
            gradient = gradient + kept * before
        step = step_of(of["kind"], of["eps"], of["beta2"], of["momentum"], [gradient])
        want = before - rate * step - (0 if of["kind"] == "sgd" else rate * kept * before)
        torch.testing.assert_close(update.after[parameter], want, rtol=1e-4, atol=1e-6, msg=parameter)
        checked.add(bool(kept))
    assert checked == ({bool(of["decay"])} if spared is nothing else {True, False})


WITHOUT_WARMUP = [each[:4] for each in STEPS if "warmup" not in each[3]]


@pytest.mark.parametrize(("name", "kind", "overrides", "wanted"), WITHOUT_WARMUP)
def test_training_further_goes_on_with_weights_and_moments_and_draws_anew(
    make: Make, name: str, kind: str, overrides: list[str], wanted: dict[str, Any]
) -> None:
    of = {"kind": "adamw", "eps": 1e-8, "beta2": 0.999, "momentum": 0.0} | wanted
    run = make(name, trained=kind == "controller")
    change = given(kind, [*overrides, "learning_rate=0.001", "weight_decay=0.0", "updates=1"])
    published, (first,) = learn(run, kind, *change)
    _, (second,) = learn(run, kind, *change, more=True)
    assert same(first.after, second.before) and same(weights(published), second.before)
    for parameter, gradient in second.gradient.items():
        if parameter in first.gradient:
            step = step_of(of["kind"], of["eps"], of["beta2"], of["momentum"], [first.gradient[parameter], gradient])
            want = second.before[parameter] - 0.001 * step
            torch.testing.assert_close(second.after[parameter], want, rtol=1e-4, atol=2e-6, msg=parameter)


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in ("rem", "drama") for k in STAGES])
def test_each_version_draws_numbers_of_its_own(make: Make, name: str, kind: str) -> None:
    """With the same weights and experience its loss is another, also under another seed, whoever called."""
    run = make(name, trained=kind == "controller")
    still = [f"{kind}.learning_rate=1e-30", f"{kind}.updates=1"]
    state = torch.get_rng_state()
    _, (first,) = learn(run, kind, *still)
    assert torch.equal(torch.get_rng_state(), state)
    _, (further,) = learn(run, kind, *still, more=True)
    torch.rand(3)
    _, (again,) = learn(run, kind, *still, force=True)
    _, (other,) = learn(run, kind, *still, "seed=7")
    assert first.metrics["loss"] == again.metrics["loss"]
    assert len({each.metrics["loss"] for each in (first, further, other)}) == 3


WEIGHTS: dict[str, tuple[list[str], dict[str, float]]] = {
    "drama": (
        ["free_nats=0", *(f"{key}_weight=" for key in ("reconstruction", "reward", "dynamics", "representation"))],
        {"reconstruction": 2, "reward_loss": 3, "observation_loss": 5 + 7, "termination_loss": 1},
    ),
    "unizero": (
        ["entropy_weight=0", *(f"{key}_weight=" for key in ("latent", "reward", "value", "policy"))],
        {"latent_loss": 2, "reward_loss": 3, "value_loss": 5, "policy_loss": 7, "termination_loss": 1},
    ),
    "rem": (["clip=100", "reward_weight="], {"observation_loss": 1, "reward_loss": 2, "termination_loss": 1}),
}
"""Settings, of which those after the first become 2, 3, 5 and 7, and how often each part then counts."""


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_loss_is_the_weighted_sum_of_its_parts(make: Make, name: str) -> None:
    (first, *rest), parts = WEIGHTS[name]
    run = make(name, trained=name != "drama")
    if name == "unizero":  # so that there is a policy to learn
        learn(run, "controller", "controller.batch=60")
    change = [first, *(f"{key}{weight}" for key, weight in zip(rest, (2, 3, 5, 7), strict=False)), "updates=1"]
    _, (update,) = learn(run, "dynamics", *given("dynamics", change))
    assert all(update.metrics[part] for part in parts)
    assert update.metrics["loss"] == pytest.approx(sum(update.metrics[part] * parts[part] for part in parts), rel=1e-5)


# -- schedules --------------------------------------------------------------------------------------------------------


def test_the_rate_falls_by_the_updates_of_all_versions(make: Make) -> None:
    run = make("muzero")
    plain = [f"dynamics.{each}" for each in ("optimizer=sgd", "momentum=0.0", "weight_decay=0.0", "clip=1e6")]
    change = [*plain, f"dynamics.learning_rate={RATE}", "dynamics.decay_after=[1, 3]", "dynamics.updates=2"]
    seen = [update for more in (False, True) for update in learn(run, "dynamics", *change, more=more)[1]]
    for update, rate in zip(seen, (RATE, RATE / 10, RATE / 10, RATE / 100), strict=True):
        for name, gradient in update.gradient.items():
            want = update.before[name] - rate * gradient
            torch.testing.assert_close(update.after[name], want, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("preset", ["drama", "rem"])
def test_a_schedule_is_that_of_one_call(make: Make, preset: str) -> None:
    """Two updates of warm-up, then half a cosine to 0 with the last; training further begins it anew."""
    run = make(preset)
    change = ["optimizer=adam", "schedule=cosine", "warmup=2", "updates=6", f"learning_rate={RATE}"]
    shares = [0.5, 1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2]
    for more in (False, True):
        for update, share in zip(learn(run, "dynamics", *given("dynamics", change), more=more)[1], shares, strict=True):
            assert update.rates == pytest.approx([RATE * share] * len(update.rates))


# -- what follows a step ----------------------------------------------------------------------------------------------


def test_unizeros_target_follows_by_a_twentieth_after_every_update(make: Make) -> None:
    """Its parameters alone; its batch statistics are those of its own passes."""
    _, seen = learn(make("unizero"), "dynamics", "dynamics.updates=2", f"dynamics.learning_rate={RATE}")
    for update in seen:
        moved = 0
        for name in (name for name in update.before if name.startswith("target.")):
            old, model, new = update.before[name], update.after[name.removeprefix("target.")], update.after[name]
            if "running" in name:
                assert not torch.equal(new, old), name
            elif new.is_floating_point():
                torch.testing.assert_close(new - old, 0.05 * (model - old), rtol=1e-3, atol=1e-7, msg=name)
                moved += not torch.equal(new, old)
        assert moved > 10


def test_muzeros_target_is_renewed_when_its_updates_are_due(make: Make) -> None:
    """Every third one, counted from version to version, batch statistics included."""
    run = make("muzero")
    change = ["dynamics.updates=2", "dynamics.target_every=3"]
    seen = [update for more in (False, True) for update in learn(run, "dynamics", *change, more=more)[1]]
    for number, update in enumerate(seen, 1):
        names = [name for name in update.before if name.startswith("target.")]
        renewed = all(torch.equal(update.after[name], update.after[name.removeprefix("target.")]) for name in names)
        untouched = all(torch.equal(update.after[name], update.before[name]) for name in names)
        assert names and (renewed, untouched) == ((True, False) if number == 3 else (False, True))


def test_the_slow_critic_follows_after_every_update(make: Make) -> None:
    change = ["controller.updates=2", f"controller.learning_rate={RATE}", "controller.slow_rate=0.3"]
    _, seen = learn(make("drama", trained=True), "controller", *change)
    for update in seen:
        for name in (name for name in update.before if name.startswith("slow_critic.")):
            old, critic, new = update.before[name], update.after[name.removeprefix("slow_")], update.after[name]
            assert not torch.equal(critic, old), name
            torch.testing.assert_close(new, 0.7 * old + 0.3 * critic, rtol=1e-5, atol=1e-7, msg=name)


PRIOR = "backbone.prior"
WITH_PRIORS = {
    "rem": ["backbone.kind=transformer", "backbone.heads=2", f"{PRIOR}.span=4"],
    "drama": ["backbone.kind=transformer", f"{PRIOR}.span=4"],
    "cells": ["backbone.kind=transformer", f"{PRIOR}.span=4"],
    "unizero": [f"{PRIOR}.span=4"],
}


@pytest.mark.parametrize("name", WITH_PRIORS)
def test_the_penalty_of_the_priors_is_learned_from(make: Make, name: str) -> None:
    """Nearly all of the gradient, where it weighs enough: the slope of a softplus at each of the two spans."""
    run, change = make(name), [*WITH_PRIORS[name], f"{PRIOR}.kind=span", f"{PRIOR}.regularizer=l1"]
    (without,), (update,) = (
        learn(run, "dynamics", *change, f"{PRIOR}.strength={strength}", "dynamics.updates=1")[1]
        for strength in (0, 10_000)
    )
    (prior,) = (each for each in update.before if each.endswith("raw_span") and not each.startswith("target."))
    spans = F.softplus(update.before[prior])
    slope = 10_000 * update.before[prior].sigmoid().norm().item()
    assert spans.numel() == 2 and spans.tolist()[0] == pytest.approx([4, 4])
    assert update.metrics["gradient_norm"] == pytest.approx(slope, rel=1e-2)
    assert update.metrics["loss"] - without.metrics["loss"] == pytest.approx(80_000, rel=1e-5)
    assert update.metrics["prior_penalty"] == pytest.approx(80_000)
    assert (update.after[prior] < update.before[prior]).all()


@pytest.mark.parametrize("name", WITH_PRIORS)
def test_priors_are_within_their_limits_after_each_step(make: Make, name: str) -> None:
    change = [*WITH_PRIORS[name], f"{PRIOR}.kind=span", f"{PRIOR}.regularizer=max", f"{PRIOR}.max_span=3"]
    _, (update,) = learn(make(name), "dynamics", *change, "dynamics.updates=1")
    (prior,) = (each for each in update.before if each.endswith("raw_span") and not each.startswith("target."))
    before, after = (F.softplus(state[prior]).flatten().tolist() for state in (update.before, update.after))
    assert before == pytest.approx([4, 4]) and after == pytest.approx([3, 3])
